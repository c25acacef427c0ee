//! The machine that a subcommand speaks of.

use crate::arguments::Failure;
use mpgpu_contexts::{Config, DISCOVERED, Origin, PROBED, machine_here};
use mpgpu_core::topology::{self, Machine};
use mpgpu_devices::cuda;

/// A machine, and where it was taken from.
pub struct Source {
    pub machine: Machine,
    /// `preset`, `file`, `discovered` or `probed`.
    pub origin: &'static str,
    /// What its figures are worth.
    pub remark: String,
}

/// A preset, a topology file, or what a context on this machine takes: `discovered` or `probed`.
pub fn named(name: &str) -> Result<Source, Failure> {
    if [DISCOVERED, PROBED].contains(&name) {
        return match cuda::device_count() {
            Ok(_) => here(&Config { topology: Some(name.into()), ..Config::from_environment()? }),
            Err(why) => Err(format!("topology {name} is that of this machine's GPUs: {why}; or name a preset or a topology file").into()),
        };
    }
    let machine = Machine::new(topology::load(name)?)?;
    let (origin, remark) = match topology::preset_text(name) {
        Some(_) => ("preset", format!("Where each figure comes from, and which were not measured: mpgpu topo {name} --toml")),
        None => ("file", format!("The figures are those of the file {name}.")),
    };
    Ok(Source { machine, origin, remark })
}

/// What a context would take by itself: the topology that `MPGPU_TOPOLOGY` names, else that of the GPUs that the driver shows, as
/// probed or as discovered. The inner result says why there are none.
pub fn found() -> Result<Result<Source, Failure>, Failure> {
    let config = Config::from_environment()?;
    match &config.topology {
        Some(name) => named(name).map(Ok),
        None => match cuda::device_count() {
            Ok(_) => here(&config).map(Ok),
            Err(why) => Ok(Err(why.into())),
        },
    }
}

fn here(config: &Config) -> Result<Source, Failure> {
    let (topology, origin) = machine_here(config)?;
    let machine = Machine::new(topology)?;
    let (origin, remark) = match origin {
        Origin::Probed(path) => ("probed", format!("Measured by `mpgpu probe`: {}", path.display())),
        Origin::Discovered | Origin::Named => (
            "discovered",
            "Discovered from the driver and NVML: wiring as seen, capacities nominal times what was read on machines of the kind.\n\
             The description says what is assumed."
                .into(),
        ),
    };
    Ok(Source { machine, origin, remark: remark + "\nGPUs are numbered as CUDA_VISIBLE_DEVICES orders them." })
}

/// The machine that is named, else what a context would take.
pub fn in_force(name: Option<&str>) -> Result<Source, Failure> {
    match name {
        Some(name) => named(name),
        None => found()?.or_else(|_| named(topology::DEFAULT_PRESET)),
    }
}
