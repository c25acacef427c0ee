//! The `mpgpu` command: what mpgpu knows of a machine, what it would do there, and how fast it is. Needs no GPU.

mod arguments;
mod bench;

use arguments::{Arguments, Command, PlanArguments, TopoArguments};
use clap::Parser;
use mpgpu::backend::MemoryKind;
use mpgpu::plan::{Shape, plan};
use mpgpu::topology::{self, DeviceId, Machine};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mpgpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let text = match arguments.command {
        Command::Topo(arguments) => topo(&arguments)?,
        Command::Plan(arguments) => plan_transfers(&arguments)?,
        Command::Bench(arguments) => bench::run(&arguments)?,
    };
    // A closed pipe (`mpgpu topo | head`) is no error of ours.
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The presets, or one machine.
fn topo(arguments: &TopoArguments) -> Result<String, Box<dyn Error>> {
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

fn plan_transfers(arguments: &PlanArguments) -> Result<String, Box<dyn Error>> {
    let machine = Machine::new(topology::load(&arguments.topology)?)?;
    let kind = |device: DeviceId| match device.is_host() {
        true if arguments.pageable => MemoryKind::Pageable,
        true => MemoryKind::Pinned,
        false => MemoryKind::Device,
    };
    let batch: Vec<Shape> = arguments
        .transfers
        .iter()
        .map(|t| Shape { dst_device: t.dst, src_device: t.src, dst_kind: kind(t.dst), src_kind: kind(t.src), bytes: t.bytes })
        .collect();
    let plan = plan(&machine, &batch, &arguments.options())?;
    if arguments.json {
        return Ok(format!("{:#}\n", plan.to_json(&machine)));
    }
    Ok(plan.describe(&machine))
}
