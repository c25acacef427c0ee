//! Implements the `mpgpu` command, which shows what mpgpu knows about a machine and how the library would copy data there. It also works on
//! machines without GPUs.
//!
//! Each subcommand has one file or folder. It contains the arguments, as a type that derives [`clap::Args`], and a function `run` that
//! returns the text for standard output.

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
    after_help = "A first look: `mpgpu bench` measures the speed-up on this node, `mpgpu topo` shows the machine, `mpgpu plan \
                  gpu0:gpu1:256M` shows a plan, `mpgpu trace --svg run.svg gpu0:gpu1:256M` draws its timeline. Each subcommand's --help \
                  has examples."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the speed-up by mpgpu over the driver's copies on this node, and recommend next steps; or measure named cases
    #[command(after_help = bench::EXAMPLES)]
    Bench(bench::BenchArguments),
    /// Show a machine: as a table, a drawing, or a file to edit
    #[command(after_help = "Examples:\n  \
        mpgpu topo                                  this machine, or the presets if it has no GPU\n  \
        mpgpu topo --presets\n  \
        mpgpu topo dgx1-v100 --svg dgx1.svg         a drawing with bandwidths\n  \
        mpgpu topo beluga --toml > node.toml        a file to edit; then: mpgpu plan --topology ./node.toml ...\n\n\
        The planner uses only this description of the machine: with wrong bandwidths it makes slow plans.")]
    Topo(topo::TopoArguments),
    /// Show the plan for given transfers, and why other paths are left out
    #[command(after_help = "Examples:\n  \
        mpgpu plan --topology beluga gpu0:gpu1:512M\n  \
        mpgpu plan --topology hgx-h200 host0:gpu0:1G --max-paths 4\n  \
        mpgpu plan --topology beluga gpu0:gpu1:128M gpu1:gpu2:128M gpu2:gpu3:128M gpu3:gpu0:128M --no-host-path\n\n\
        Transfers of one call are planned together, like those of one time step of a simulation code. The cost model makes the \
        plan, and all times are modelled. Values that `mpgpu tune` has found are used only in programs, by contexts.")]
    Plan(plan::PlanArguments),
    /// Show the timeline of a plan, simulated or measured
    #[command(after_help = "Examples:\n  \
        mpgpu trace --topology beluga gpu0:gpu1:64M --svg run.svg\n  \
        mpgpu trace --topology beluga gpu0:gpu1:64M --perfetto run.json     open it at ui.perfetto.dev\n  \
        mpgpu trace --measure gpu0:gpu1:256M --svg run.svg                  device timestamps of a measured run\n\n\
        Without --measure, no GPU is needed. With --measure, each operation is timed separately, and the plan runs on streams.")]
    Trace(trace::TraceArguments),
    /// Run plans on a modelled machine in virtual time: tables over sizes, numbers of paths, engines and executions in flight
    #[command(after_help = sim::SimArguments::EXAMPLES)]
    Sim(sim::SimArguments),
    /// Measure this machine: the speed of copies, which copies slow each other down, and whether all bytes arrive
    #[command(after_help = "\
                            CUDA does not report which GPUs share a path to host memory, how fast host memory is, or how much\n\
        time a chunk costs. Virtual machines also hide the PCIe tree. The probe makes copies, one at a\n\
        time and concurrently, and fits bandwidths to the times. The result is a topology file that\n\
        contexts on these GPUs use by default from then on, until the driver changes. Then the probe\n\
        searches for a few seconds for plans for host copies that are faster than the cost model's plans,\n\
        and stores their settings in a tuning file.\n\n\
        The probe takes less than a minute on eight GPUs. It uses all GPUs and host memory, so nothing\n\
        else should run on the node.\n\nExamples:\n  \
        mpgpu probe\n  \
        mpgpu probe --check                      also compare predictions with measurements\n  \
        mpgpu probe --output node.toml           for MPGPU_TOPOLOGY=node.toml, or mpgpu plan --topology node.toml\n  \
        mpgpu probe --check --topology hgx-h200  check how well a preset predicts this machine\n\n\
        docs/reference/probe.md describes the method and its limits.")]
    Probe(probe::ProbeArguments),
    /// Check this machine: report what works, is missing, slow or refused, and a remedy for each problem
    #[command(after_help = "\
        Prints one line for each check: driver and its features, visible GPUs, MIG, MPS, GPU pairs\n\
        that report peer access but lose bytes, NVSwitch fabric, PCIe lanes, pinning, huge pages,\n\
        limits, /dev/shm, sharing between processes, and probe and tuning files. Bytes are copied\n\
        between all pairs of GPUs, for which a context is created on each GPU; --no-trials skips these\n\
        copies. The command also works without a GPU.\n\n\
        The exit code is 1 if something is refused, else 0.\n\n\
        Examples:\n  \
        mpgpu doctor\n  \
        mpirun -n 4 mpgpu doctor --no-trials     one report per rank; lines begin with [rank.local rank]")]
    Doctor(doctor::DoctorArguments),
    /// Run an unmodified program, and accelerate those of its copies for which a plan is faster
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

/// Prints the help or version that the user requested, or the reason why the arguments are invalid. Returns the exit code.
fn explain(refusal: &clap::Error) -> ExitCode {
    let printed = refusal.print().and_then(|()| std::io::stdout().flush());
    if let Err(error) = unless_closed(printed) {
        eprintln!("mpgpu: standard output: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::from(u8::try_from(refusal.exit_code()).unwrap_or(2))
}

/// Returns success if writing failed because standard output is closed, as in `mpgpu topo | head`. Returns every other result unchanged.
fn unless_closed(written: std::io::Result<()>) -> std::io::Result<()> {
    written.or_else(|error| if error.kind() == std::io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

/// Runs the selected subcommand. Returns true if it found no problem.
fn run(arguments: Arguments) -> Result<bool, Box<dyn Error>> {
    let mut is_sound = true;
    // An invalid variable is ignored here. Some subcommands need no environment, and the others report the error themselves.
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
