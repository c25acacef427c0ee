//! Implements `mpgpu tune`, which searches for faster plans than those of the model, by measuring or simulating many plans.
//!
//! | file | contents |
//! | --- | --- |
//! | `report` | tables and JSON |
//! | `partitions` | trials that programs have made with their own kernels |

mod partitions;
mod report;

use crate::arguments::{Failure, backend, size, write_file};
use crate::machine;
use clap::{Args, Subcommand};
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, Executed, NO_TUNING};
use mpgpu_core::plan::Options;
use mpgpu_core::topology::{self, Machine};
use mpgpu_measure::tune::{Campaign, Case, Origin, Score, Search, Simulated, TuneError, TunedPoint, Tuning, digest};
use report::{Judged, MachineReport};
use serde_json::json;
use std::fmt::Display;
use std::path::PathBuf;

pub const EXAMPLES: &str = "Examples:\n  \
    mpgpu tune --output tuning.toml                        searches on the GPUs of this machine\n  \
    MPGPU_TUNING_FILE=tuning.toml ./app                    uses the values found\n  \
    mpgpu tune --simulate --topology beluga --cases d2d --sizes 4M,64M\n  \
    mpgpu tune --judge --simulate                          compares the model with all combinations of the settings\n  \
    mpgpu tune --judge --cases d2d,h2d --sizes 64M,256M    compares the tuning of these GPUs with all combinations\n  \
    MPGPU_TUNING_FILE=none mpgpu tune --judge              compares the model alone, on these GPUs\n\n\
    Each search starts from the model's plan and varies the number of paths, the use of host memory, the bytes on each path and the \
    chunk size, one after the other, with streams and with graphs. This takes 3 to 60 evaluations for each engine, case and size; \
    --exhaustive takes hundreds to thousands. On GPUs an evaluation is the median of several executions, and a setting is kept only if \
    it is faster than the model's plan by more than 1 %, and significantly often. Run the search on an idle machine.\n\n\
    The file is valid only for the topology that it was made for; contexts refuse it for any other topology.";

#[derive(Subcommand)]
pub enum TuneCommand {
    /// Show the trials (measured times) that a program has stored for transfers in partitions
    #[command(after_help = partitions::EXAMPLES)]
    Partitions(partitions::PartitionsArguments),
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct TuneArguments {
    #[command(subcommand)]
    pub command: Option<TuneCommand>,
    /// Score plans in the simulator instead of executing them; needs no GPU
    #[arg(long)]
    pub simulate: bool,
    /// A preset's name or a topology file; by default the topology that a context would use. With --judge --simulate the default is every
    /// preset
    #[arg(long, value_name = "NAME|FILE")]
    pub topology: Option<String>,
    /// Backend to execute on; by default the value of MPGPU_BACKEND, or CUDA if there are GPUs
    #[arg(long, value_parser = backend(), conflicts_with = "simulate")]
    pub backend: Option<BackendChoice>,
    /// Cases, separated by commas: d2d, h2d, d2h (one copy between GPUs, from host, to host), bidir (both directions), ring, all_to_all
    #[arg(long, value_delimiter = ',', value_name = "CASE", value_parser = case)]
    pub cases: Vec<Case>,
    /// Bytes of each transfer, separated by commas, as in 64M; the settings found for a size apply up to half way to the next size
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = tuned_size)]
    pub sizes: Vec<u64>,
    /// Try all combinations of the settings too (paths x host path x chunks x shares), and keep the best one if it is faster
    #[arg(long)]
    pub exhaustive: bool,
    /// Compare the plan that a context chooses (by its tuning, else by the model) with the fastest of all combinations of the settings, and
    /// write no file
    #[arg(long, conflicts_with_all = ["output", "exhaustive"])]
    pub judge: bool,
    /// Write the tuning to this file
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn case(name: &str) -> Result<Case, String> {
    Case::named(name).ok_or_else(|| format!("there are {}", Case::ALL.map(Case::name).join(", ")))
}

/// Smallest size in bytes that can be tuned. Smaller copies end on any machine before a second path could start.
const LEAST_SIZE: u64 = 4096;

fn tuned_size(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes < LEAST_SIZE => Err(format!("{text}: must be {LEAST_SIZE} or more; smaller copies are never split")),
        bytes => Ok(bytes),
    }
}

const M: u64 = 1 << 20;
/// Sizes in bytes that are tuned by default. They cover the message sizes of the papers. Each size is four times the preceding size, so
/// every size in this range is within a factor of two of a tuned size.
const SIZES: &[u64] = &[M, 4 * M, 16 * M, 64 * M, 256 * M];
/// Sizes in bytes that are tuned by default on the host backend, where CPU threads make the copies.
const HOST_SIZES: &[u64] = &[M, 4 * M, 16 * M];
/// Default sizes in bytes for `--judge`. At these sizes the planner uses several paths, or is close to doing so.
const JUDGED_SIZES: &[u64] = &[16 * M, 64 * M, 256 * M];

/// Runs the subcommand: searches for better plans and returns the report.
pub fn run(arguments: &TuneArguments) -> Result<String, Failure> {
    if let Some(TuneCommand::Partitions(arguments)) = &arguments.command {
        return partitions::run(arguments);
    }
    if arguments.simulate {
        let names = match &arguments.topology {
            Some(name) => vec![name.as_str()],
            None if arguments.judge => topology::preset_names().filter(|name| !topology::MODELLED_PRESETS.contains(name)).collect(),
            None => vec![topology::DEFAULT_PRESET],
        };
        let mut reports = Vec::new();
        for name in names {
            let machine = machine::named(name)?.machine;
            let base = Options::default();
            reports.push(tune(arguments, &machine, base, SIZES, Origin::Simulator, None, &mut Simulated { machine: &machine })?);
        }
        return Ok(finish(arguments, &reports));
    }
    let options = ContextOptions { backend: arguments.backend, topology: arguments.topology.clone(), ..ContextOptions::default() };
    // The search ignores options from the environment. It also ignores an earlier tuning, unless `--judge` evaluates that tuning.
    let mut config = Config::from_environment()?;
    if !arguments.judge {
        config.tuning_file = Some(NO_TUNING.into());
    }
    let context = Context::open(&options, config)?;
    eprint!("{}", context.describe());
    let base = Options { staging_bytes: context.config().staging_bytes, ..Options::default() };
    let (origin, sizes) = if context.backend().is_virtual() { (Origin::Host, HOST_SIZES) } else { (Origin::Cuda, SIZES) };
    let report = tune(arguments, context.machine(), base, sizes, origin, context.tuning(), &mut Executed::new(&context))?;
    Ok(finish(arguments, &[report]))
}

/// Searches for better plans on one machine, for every case and size.
fn tune<S: Score<Error: Display>>(
    arguments: &TuneArguments,
    machine: &Machine,
    base: Options,
    sizes: &[u64],
    origin: Origin,
    in_force: Option<&Tuning>,
    score: &mut S,
) -> Result<MachineReport, Failure> {
    let sizes = match arguments.sizes.as_slice() {
        [] if arguments.judge && origin != Origin::Host => JUDGED_SIZES,
        [] => sizes,
        asked => asked,
    };
    let cases = if arguments.cases.is_empty() { Case::ALL.to_vec() } else { arguments.cases.clone() };
    let search = if arguments.exhaustive || arguments.judge { Search::Both } else { Search::Short };
    let campaign = Campaign { machine, sizes, base, search, in_force };
    let name = &machine.topology().name;
    let mut points: Vec<TunedPoint> = Vec::new();
    for case in cases {
        let batches = campaign.batches(case);
        if batches.is_empty() {
            eprintln!("{name} {}: skipped: the machine has too few GPUs, or no route between them and host memory", case.name());
        }
        for (size, batch) in batches {
            let what = format!("{name} {} {}", case.name(), mpgpu_core::units::size(size));
            let told = |engine: mpgpu_core::plan::Engine, done: usize, of: usize| {
                if done.is_multiple_of(500) {
                    eprintln!("{what}: {}: {done} of {of} settings evaluated", engine.name());
                }
            };
            match campaign.point(case, size, batch, score, told) {
                Ok(Some(point)) => {
                    eprintln!("{what}: {}", report::line(&point, in_force.is_some()));
                    points.push(point);
                }
                Ok(None) => {}
                // No path connects this pair of devices, so it is skipped.
                Err(TuneError::Plan(error)) => eprintln!("{what}: skipped, {error}"),
                Err(error) => return Err(format!("{what}: {error}").into()),
            }
        }
    }
    // Points (combinations of case and size) are sorted by size within a case and device class, which is easier to read.
    points.sort_by_key(|point| (point.case as u8, point.batch[0].src_device, point.batch[0].dst_device, point.size));
    // `--judge` does not need the sizes from which several paths are faster. They are not determined, because this would take further
    // executions.
    let tuning = match arguments.judge {
        true => None,
        false => Some(campaign.tuning(&points, origin, score).map_err(|error| error.to_string())?),
    };
    if let (Some(path), Some(tuning)) = (&arguments.output, &tuning) {
        write_file(path, &tuning.to_toml())?;
        eprintln!("written: {}; MPGPU_TUNING_FILE={} activates it", path.display(), path.display());
    }
    Ok(MachineReport { machine: name.clone(), digest: digest(machine.topology()), origin, in_force: in_force.cloned(), points, tuning })
}

fn finish(arguments: &TuneArguments, reports: &[MachineReport]) -> String {
    let judged = arguments.judge.then(|| Judged::of(reports));
    if arguments.json {
        let machines: Vec<_> = reports.iter().map(MachineReport::to_json).collect();
        return format!("{:#}\n", json!({ "machines": machines, "judged": judged.map(|judged| judged.to_json()) }));
    }
    match judged {
        Some(judged) => report::judgement(reports, &judged),
        None => {
            let mut text: String = reports.iter().map(report::tuned).collect();
            if arguments.output.is_none() {
                text += "\nNothing was written: --output FILE keeps the result.\n";
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arguments, Command};
    use clap::Parser;
    use serde_json::Value;

    fn tune(more: &[&str]) -> Result<String, Failure> {
        match Arguments::try_parse_from(["mpgpu", "tune"].iter().chain(more))?.command {
            Command::Tune(arguments) => run(&arguments),
            _ => Err("not the tune command".into()),
        }
    }

    #[test]
    fn a_simulated_tuning_is_written_as_a_file_that_is_read_back_and_reported() {
        let file = std::env::temp_dir().join(format!("mpgpu-tune-{}.toml", std::process::id()));
        let path = file.to_str().expect("a path in UTF-8");
        let arguments = ["--simulate", "--topology", "beluga", "--cases", "d2d,bidir", "--sizes", "64K,16M", "--output", path, "--json"];
        let text = tune(&arguments).expect("it runs");
        let written = std::fs::read_to_string(&file).expect("written");
        std::fs::remove_file(&file).expect("it was there");
        let tuning = mpgpu_measure::tune::parse(&written).expect("a tuning");
        assert_eq!((tuning.topology.as_str(), tuning.origin, tuning.classes.len()), ("beluga", Origin::Simulator, 2));
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let points = json["machines"][0]["points"].as_array().expect("a list");
        assert_eq!(points.len(), 4);
        for point in points {
            let seconds = |key: &str| point[key].as_f64().expect("seconds");
            assert!(seconds("tuned_seconds") <= seconds("model_seconds") && point["evaluations"].as_u64() > Some(2), "{point}");
            assert!(point["exhaustive_seconds"].is_null(), "{point}");
        }
        let refused = std::fs::write(&file, &written).map(|()| tune(&["partitions", path])).expect("written").expect_err("no program");
        std::fs::remove_file(&file).expect("it was there");
        assert!(refused.to_string().contains("contains no trials"), "{refused}");
        let text = tune(&["--simulate", "--topology", "beluga", "--cases", "d2d", "--sizes", "16M"]).expect("it runs");
        assert!(text.contains("16.0 MiB") && text.contains("Nothing was written"), "{text}");
    }

    #[test]
    fn the_judgement_holds_the_models_choice_against_the_whole_grid() {
        let arguments = ["--judge", "--simulate", "--topology", "hgx-h100-4", "--cases", "d2d", "--sizes", "64M"];
        let json: Value = serde_json::from_str(&tune(&[&arguments[..], &["--json"]].concat()).expect("it runs")).expect("JSON");
        let point = &json["machines"][0]["points"][0];
        let seconds = |key: &str| point[key].as_f64().expect("seconds");
        assert!(
            seconds("exhaustive_seconds") <= seconds("short_seconds") && seconds("short_seconds") <= seconds("model_seconds"),
            "{point}"
        );
        assert!(point["exhaustive_evaluations"].as_u64() > point["evaluations"].as_u64(), "{point}");
        assert_eq!(json["judged"]["cases"], 1);
        let loss = (seconds("model_seconds") / seconds("exhaustive_seconds") - 1.0) * 100.0;
        assert!((point["model_loss_percent"].as_f64().expect("a number") - loss).abs() < 1e-9, "{point}");
        let text = tune(&arguments).expect("it runs");
        assert!(text.contains("hgx-h100-4") && text.contains("within 3 %"), "{text}");
    }

    #[test]
    fn plans_are_tuned_by_execution_on_the_host_backend() {
        let arguments = ["--backend", "host", "--topology", "beluga", "--cases", "d2d,d2h", "--sizes", "64K,1M"];
        let text = tune(&arguments).expect("it runs");
        assert!(text.contains("d2d") && text.contains("d2h") && text.contains("CPU threads"), "{text}");
    }

    #[test]
    fn what_cannot_be_tuned_is_refused_with_what_can() {
        let refusal = |more: &[&str]| tune(more).expect_err("refused").to_string();
        assert!(refusal(&["--cases", "d2x"]).contains("all_to_all"));
        assert!(refusal(&["--sizes", "100"]).contains("must be 4096 or more"));
        assert!(refusal(&["--judge", "--output", "x.toml"]).contains("cannot be used with"));
        assert!(refusal(&["--simulate", "--topology", "no-such"]).contains("no-such"));
        assert!(refusal(&["partitions", "no-such.toml"]).contains("no-such.toml"));
        assert!(refusal(&["--judge", "partitions", "x.toml"]).contains("cannot be used with"));
    }
}
