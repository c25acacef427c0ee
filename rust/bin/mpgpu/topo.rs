//! `mpgpu topo`: a machine.

use clap::Args;
use mpgpu::topology::{self, DeviceId, Machine};
use std::error::Error;

#[derive(Args)]
pub struct TopoArguments {
    /// A preset's name or a topology file; without it the presets are listed
    pub topology: Option<String>,
    /// Print the topology as a TOML file
    #[arg(long, requires = "topology")]
    pub toml: bool,
}

/// The presets, or one machine.
pub fn run(arguments: &TopoArguments) -> Result<String, Box<dyn Error>> {
    let Some(name) = &arguments.topology else {
        let mut text = String::from("presets, for --topology and MPGPU_TOPOLOGY:\n");
        for name in topology::preset_names() {
            let description = topology::preset(name).map(|preset| preset.description).unwrap_or_default();
            text += &format!("  {name:<12} {description}\n");
        }
        return Ok(text + "`mpgpu topo NAME` shows one as a table, `--toml` as a file to edit.\n");
    };
    let machine = Machine::new(topology::load(name)?)?;
    if arguments.toml {
        return Ok(machine.topology().to_toml());
    }
    Ok(table(&machine))
}

/// Bandwidth of the direct copy between every two devices, GB/s.
fn table(machine: &Machine) -> String {
    let devices: Vec<DeviceId> = machine.devices().collect();
    let mut text = format!("{}: {}\n", machine.topology().name, machine.topology().description);
    text += "direct copy from row to column, GB/s; '-' where no copy engine can copy directly\n\n        ";
    devices.iter().for_each(|&to| text += &format!("{:>7}", machine.device_name(to).unwrap_or_default()));
    for &from in &devices {
        text += &format!("\n{:<8}", machine.device_name(from).unwrap_or_default());
        for &to in &devices {
            let cell = match machine.route(from, to) {
                _ if from == to => String::new(),
                Some(route) => format!("{:.1}", route.bandwidth / 1e9),
                None => "-".into(),
            };
            text += &format!("{cell:>7}");
        }
    }
    text + "\n"
}
