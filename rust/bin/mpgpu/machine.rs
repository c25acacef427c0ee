//! The machine that a subcommand speaks of.

use crate::arguments::Failure;
use mpgpu::backend::cuda;
use mpgpu::engine::Config;
use mpgpu::topology::{self, Machine};

/// A machine, and where it was taken from.
pub struct Source {
    pub machine: Machine,
    /// `preset`, `file` or `discovered`.
    pub origin: &'static str,
    /// What its figures are worth.
    pub remark: String,
}

/// A preset, or a topology file.
pub fn named(name: &str) -> Result<Source, Failure> {
    let machine = Machine::new(topology::load(name)?)?;
    let (origin, remark) = match topology::preset_text(name) {
        Some(_) => ("preset", format!("Where each figure comes from, and which were not measured: mpgpu topo {name} --toml")),
        None => ("file", format!("The figures are those of the file {name}.")),
    };
    Ok(Source { machine, origin, remark })
}

/// What a context would take by itself: the topology that `MPGPU_TOPOLOGY` names, else that of the GPUs that the driver shows. The inner
/// result says why there are none.
pub fn found() -> Result<Result<Source, Failure>, Failure> {
    match Config::from_environment()?.topology {
        Some(name) => named(&name).map(Ok),
        None => match cuda::device_count() {
            Ok(_) => discovered().map(Ok),
            Err(why) => Ok(Err(why.into())),
        },
    }
}

fn discovered() -> Result<Source, Failure> {
    let machine = Machine::new(cuda::discover::discover()?)?;
    let remark = "Discovered from the driver and NVML: wiring as seen, capacities nominal times what was read on machines of the kind.\n\
                  The description says what is assumed. GPUs are numbered as CUDA_VISIBLE_DEVICES orders them.";
    Ok(Source { machine, origin: "discovered", remark: remark.into() })
}

/// The machine that is named, else what a context would take.
pub fn in_force(name: Option<&str>) -> Result<Source, Failure> {
    match name {
        Some(name) => named(name),
        None => found()?.or_else(|_| named(topology::DEFAULT_PRESET)),
    }
}
