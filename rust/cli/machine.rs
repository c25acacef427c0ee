//! Finds the machine for which a subcommand is called.

use crate::arguments::Failure;
use mpgpu_contexts::{Config, DISCOVERED, Origin, PROBED, machine_here};
use mpgpu_core::topology::{self, Machine};
use mpgpu_devices::cuda;

/// Machine (topology) with the origin of its description.
pub struct Source {
    pub machine: Machine,
    /// Kind of source of the topology: `preset`, `file`, `discovered` (reported by the driver) or `probed` (measured).
    pub origin: &'static str,
    /// Remark for the user on how reliable the topology's figures are.
    pub remark: String,
}

/// Returns the machine for a name: a preset, the path of a topology file, or `discovered` or `probed` for this machine.
pub fn named(name: &str) -> Result<Source, Failure> {
    if [DISCOVERED, PROBED].contains(&name) {
        return match cuda::device_count() {
            Ok(_) => here(&Config { topology: Some(name.into()), ..Config::from_environment()? }),
            Err(why) => Err(format!(
                "topology {name} describes the GPUs of this machine, which are not available: {why}; name a preset or a topology file"
            )
            .into()),
        };
    }
    let machine = Machine::new(topology::load(name)?)?;
    let (origin, remark) = match topology::preset_text(name) {
        Some(_) => ("preset", format!("`mpgpu topo {name} --toml` shows the source of each figure, and which figures were not measured.")),
        None => ("file", format!("The figures are those of the file {name}.")),
    };
    Ok(Source { machine, origin, remark })
}

/// Returns the machine that a context uses by default: the one that `MPGPU_TOPOLOGY` names, or else the probed or discovered topology of
/// the visible GPUs. The inner error is the reason why this machine has no usable GPU.
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
            "Discovered from the driver and NVML: links as reported, nominal capacities scaled by measurements on such machines.\n\
             The description lists the assumptions."
                .into(),
        ),
    };
    Ok(Source { machine, origin, remark: remark + "\nGPUs are numbered in the order of CUDA_VISIBLE_DEVICES." })
}

/// Returns the machine called `name`. If `name` is `None`, returns the machine that a context uses by default, or the default preset on a
/// machine without GPUs.
pub fn in_force(name: Option<&str>) -> Result<Source, Failure> {
    match name {
        Some(name) => named(name),
        None => found()?.or_else(|_| named(topology::DEFAULT_PRESET)),
    }
}
