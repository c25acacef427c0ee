//! The machine that a subcommand speaks of.

use crate::arguments::Failure;
use mpgpu::backend::cuda;
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

/// The GPUs that the driver shows this process; why not, where it shows none.
pub fn found() -> Result<Source, Failure> {
    cuda::device_count()?;
    let machine = Machine::new(cuda::discover::discover()?)?;
    let remark = "Discovered from the driver and NVML: wiring as seen, capacities nominal times what was read on machines of the kind.\n\
                  The description says what is assumed. GPUs are numbered as CUDA_VISIBLE_DEVICES orders them.";
    Ok(Source { machine, origin: "discovered", remark: remark.into() })
}

/// The machine that is named, else the one at hand, else the preset that a context takes where there is no GPU.
pub fn in_force(name: Option<&str>) -> Result<Source, Failure> {
    match name {
        Some(name) => named(name),
        None if cuda::device_count().is_ok() => found(),
        None => named(topology::DEFAULT_PRESET),
    }
}
