//! The `mpgpu` command: what mpgpu knows of a machine, and what it would do there. Needs no GPU.
//!
//! One file or folder for each subcommand, with its arguments: a type that derives [`clap::Args`], and `run`, which returns what goes to
//! standard output.

mod arguments;
mod bench;
mod doctor;
mod draw;
mod machine;
mod pages;
mod plan;
mod probe;
mod run;
mod sim;
mod text;
mod topo;
mod trace;
mod tune;

use clap::{CommandFactory, Parser, Subcommand};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

/// Plans copies between the GPUs and host memory of one node over every link that helps.
#[derive(Parser)]
#[command(
    name = "mpgpu",
    version,
    max_term_width = 100,
    after_help = "A first look: `mpgpu bench` for what is gained here, `mpgpu topo` for the machine, `mpgpu plan gpu0:gpu1:256M` for what would be done there, `mpgpu trace --svg \
                  run.svg gpu0:gpu1:256M` for how it goes. Each subcommand's --help has examples."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure what mpgpu gains here: each kind of copy against plain ones, and what to do next; or cases
    #[command(after_help = bench::EXAMPLES)]
    Bench(bench::BenchArguments),
    /// Show a machine: as a table, a drawing, or a file to edit
    #[command(after_help = "Examples:\n  \
        mpgpu topo                                  this machine, or the presets where there is no GPU\n  \
        mpgpu topo --presets\n  \
        mpgpu topo dgx1-v100 --svg dgx1.svg         a drawing with capacities\n  \
        mpgpu topo beluga --toml > node.toml        a file to edit; then: mpgpu plan --topology ./node.toml ...\n\n\
        What the planner knows of a machine is what stands here: a capacity that is wrong makes plans that are wrong.")]
    Topo(topo::TopoArguments),
    /// Show what would be done for given transfers, and why other paths are left out
    #[command(after_help = "Examples:\n  \
        mpgpu plan --topology beluga gpu0:gpu1:512M\n  \
        mpgpu plan --topology hgx-h200 host0:gpu0:1G --max-paths 4\n  \
        mpgpu plan --topology beluga gpu0:gpu1:128M gpu1:gpu2:128M gpu2:gpu3:128M gpu3:gpu0:128M --no-host-path\n\n\
        Transfers of one call are planned together, as one step of a simulation code has them. All times are modelled, and \
        the plan is the model's: what was tuned for a machine, contexts take.")]
    Plan(plan::PlanArguments),
    /// Show what happens when: the timeline of a plan, simulated or measured
    #[command(after_help = "Examples:\n  \
        mpgpu trace --topology beluga gpu0:gpu1:64M --svg run.svg\n  \
        mpgpu trace --topology beluga gpu0:gpu1:64M --perfetto run.json     open it at ui.perfetto.dev\n  \
        mpgpu trace --measure gpu0:gpu1:256M --svg run.svg                  device timestamps of a real run\n\n\
        Without --measure no GPU is needed. With it, operations are timed one by one, over streams.")]
    Trace(trace::TraceArguments),
    /// Run plans on a modelled machine in virtual time: tables over sizes, paths, engines and windows
    #[command(after_help = sim::SimArguments::EXAMPLES)]
    Sim(sim::SimArguments),
    /// Measure this machine: how fast copies are, which slow each other down, and whether their bytes arrive
    #[command(after_help = "\
        No attribute tells which GPUs share a way to host memory, what that memory delivers, or what a\n\
        chunk costs, and virtual machines hide the rest. The probe makes copies, alone and at once, and\n\
        finds the capacities that explain the times. The result is a topology file that contexts on\n\
        these GPUs read by themselves from then on, until the driver changes. Beside it goes what a\n\
        search of a few seconds finds better than the model's plans for copies of host memory.\n\n\
        It takes less than a minute on eight GPUs, uses all of them and host memory, and must run alone.\n\n\
        Examples:\n  \
        mpgpu probe\n  \
        mpgpu probe --check                      then compare predictions with measurements\n  \
        mpgpu probe --output node.toml           for MPGPU_TOPOLOGY=node.toml, or mpgpu plan --topology node.toml\n  \
        mpgpu probe --check --topology hgx-h200  how well does a preset predict this machine?\n\n\
        docs/reference/probe.md has the method and what it cannot see.")]
    Probe(probe::ProbeArguments),
    /// Report what of this machine is well, absent, slow or refused, each with a remedy
    #[command(after_help = "\
        One line for each check: driver and its features, GPUs in sight, MIG, MPS, peers that claim\n\
        access and lose bytes, NVSwitch fabric, PCIe lanes, pinning, huge pages, limits, /dev/shm, what\n\
        sharing between processes needs, and probe and tuning files. Bytes are copied between all pairs\n\
        of GPUs, which takes a context on each; --no-trials leaves that out. Needs no GPU.\n\n\
        The exit code is 1 if something is refused, else 0.\n\n\
        Examples:\n  \
        mpgpu doctor\n  \
        mpirun -n 4 mpgpu doctor --no-trials     what each rank sees; lines begin with [rank.local rank]")]
    Doctor(doctor::DoctorArguments),
    /// Run a program that is not changed, with the copies that gain going through plans
    #[command(after_help = run::EXAMPLES)]
    Run(run::RunArguments),
    /// Search for better plans than the model's, on GPUs or in the simulator, and write them to a tuning file
    #[command(after_help = tune::EXAMPLES)]
    Tune(tune::TuneArguments),
    /// Write the manual pages and shell completions of this command
    #[command(hide = true)]
    Pages(pages::PagesArguments),
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(refusal) => return explain(&refusal),
    };
    match run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mpgpu: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the help or the version that was asked for, or why the arguments are refused.
fn explain(refusal: &clap::Error) -> ExitCode {
    let printed = refusal.print().and_then(|()| std::io::stdout().flush());
    if let Err(error) = unless_closed(printed) {
        eprintln!("mpgpu: standard output: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::from(u8::try_from(refusal.exit_code()).unwrap_or(2))
}

/// A closed pipe (`mpgpu topo | head`) is no error of ours.
fn unless_closed(written: std::io::Result<()>) -> std::io::Result<()> {
    written.or_else(|error| if error.kind() == std::io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

/// Whether the command has nothing to complain about.
fn run(arguments: Arguments) -> Result<bool, Box<dyn Error>> {
    let mut is_sound = true;
    // A variable that cannot be read is reported by whoever needs it: several subcommands need none.
    if let Ok(config) = mpgpu_contexts::Config::from_environment() {
        mpgpu::log::configure(config.log);
    }
    let text = match arguments.command {
        Command::Bench(arguments) => {
            let (text, sound) = bench::run(&arguments)?;
            is_sound = sound;
            text
        }
        Command::Topo(arguments) => topo::run(&arguments)?,
        Command::Plan(arguments) => plan::run(&arguments)?,
        Command::Trace(arguments) => trace::run(&arguments)?,
        Command::Sim(arguments) => sim::run(&arguments)?,
        Command::Probe(arguments) => probe::run(&arguments)?,
        Command::Doctor(arguments) => {
            let (text, sound) = doctor::run(&arguments)?;
            is_sound = sound;
            text
        }
        Command::Run(arguments) => run::run(&arguments)?,
        Command::Tune(arguments) => tune::run(&arguments)?,
        Command::Pages(arguments) => pages::run(Arguments::command(), &arguments)?,
    };
    let mut out = std::io::stdout().lock();
    unless_closed(out.write_all(text.as_bytes()).and_then(|()| out.flush())).map_err(|error| format!("standard output: {error}"))?;
    Ok(is_sound)
}
