//! The `mpgpu` command: what mpgpu knows of a machine, what it would do there, and how fast it is. Needs no GPU.
//!
//! One file or folder for each subcommand, with its arguments: a type that derives [`clap::Args`], and `run`, which returns what goes to
//! standard output.

mod arguments;
mod bench;
mod draw;
mod machine;
mod plan;
mod text;
mod topo;

use clap::{Parser, Subcommand};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

/// Plans copies between the GPUs and host memory of one node over every link that helps.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the presets, or one machine as a table or a file
    Topo(topo::TopoArguments),
    /// Show what would be done for given transfers, and why other paths are left out
    #[command(after_help = "Examples:\n  \
        mpgpu plan --topology beluga gpu0:gpu1:512M\n  \
        mpgpu plan --topology hgx-h200 host0:gpu0:1G --max-paths 4\n  \
        mpgpu plan --topology beluga gpu0:gpu1:128M gpu1:gpu2:128M gpu2:gpu3:128M gpu3:gpu0:128M --no-host-path\n\n\
        All times are modelled.")]
    Plan(plan::PlanArguments),
    /// Measure mpgpu against plain copies on this machine, and check every byte
    #[command(after_help = "Examples:\n  \
        mpgpu bench --list\n  \
        mpgpu bench --case d2d,latency --json result.json\n  \
        mpgpu bench --case d2d --sizes 64M,1G --repeat 50 --plans\n\n\
        Without a GPU the host backend is measured, against memcpy on one thread.")]
    Bench(bench::BenchArguments),
}

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
        Command::Topo(arguments) => topo::run(&arguments)?,
        Command::Plan(arguments) => plan::run(&arguments)?,
        Command::Bench(arguments) => bench::run(&arguments)?,
    };
    // A closed pipe (`mpgpu topo | head`) is no error of ours.
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
