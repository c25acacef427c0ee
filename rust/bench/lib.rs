//! Compares mpgpu with plain copies (calls of the driver, or of `memcpy`) in one run. Implements the overview of `mpgpu bench` and the
//! cases of `mpgpu bench --case`. Every byte is verified.
//!
//! | file | content |
//! | --- | --- |
//! | `cases` | list of cases |
//! | `compare` | measuring loop: methods that are timed alternately, and medians |
//! | `memory` | buffers, patterns, and the verification of every byte |
//! | `plain` | plain copies: the driver's, or `memcpy` on the host backend |
//! | `steps` | executions of one plan compared with plain copies, isolated or several in flight |
//! | `puts`, `peer` | puts with signal into memory of another process, and the peer process |
//! | `narrow` | GPU-to-GPU copies that are as slow as on a machine with narrow links |
//! | `driver_graph` | CUDA graph of a program that is built by direct driver calls |
//! | `phases` | times to create, instantiate, launch and update CUDA graphs |
//! | `overhead` | time that the calling thread spends in `mp_execute` |
//! | `report` | table and JSON output |
//! | `look` | overview with one line for each kind of copy, which `mpgpu bench` prints without `--case` |

mod ball;
mod cases;
mod compare;
mod driver_graph;
mod look;
mod memory;
mod narrow;
mod overhead;
mod peer;
mod phases;
mod plain;
mod puts;
mod report;
mod steps;

use cases::{Case, HOST_BACKEND_LARGEST};
use clap::Args;
use compare::Comparison;
pub use look::{LOOKS, Looked, Row, look, peer};
use memory::{Buffers, Pattern};
use mpgpu_contexts::{Config, Context, ContextOptions};
use mpgpu_core::units::{parse_size, size};
use plain::Plain;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::error::Error;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::PathBuf;

/// Error that stopped the benchmark.
pub type Failure = Box<dyn Error>;

/// Command-line arguments of `mpgpu bench` that select and configure cases.
#[derive(Args)]
pub struct CaseArguments {
    /// Print the cases and exit
    #[arg(long)]
    list: bool,
    /// Cases to measure, separated by commas, or `all`; with medians and spread
    #[arg(long, value_delimiter = ',', value_name = "CASE", value_parser = cases::named, conflicts_with = "bytes")]
    case: Vec<&'static [Case]>,
    /// Sizes of one transfer of a case (of one face in halo26 and halo26_bidir), separated by commas; bytes may end in K, M or G
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = positive_size, requires = "case")]
    sizes: Vec<u64>,
    /// Number of rounds; each round times every method once. By default as many rounds as take about half a second
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u32).range(1..), requires = "case")]
    repeat: Option<u32>,
    /// Number of thread blocks (of 256 threads) that make one copy between GPUs in the case d2d_narrow
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64), requires = "case")]
    narrow_blocks: u32,
    /// Engine (how copies are issued) to plan for; overrides MPGPU_ENGINE
    #[arg(long, requires = "case")]
    engine: Option<String>,
    /// Print the plan of each case for its largest size
    #[arg(long, requires = "case")]
    plans: bool,
    /// Write all results as JSON to this file, too, and update it after each measurement
    #[arg(long, value_name = "FILE", requires = "case")]
    output: Option<PathBuf>,
}

fn positive_size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(0) => Err("a size must be 1 byte or more".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

impl CaseArguments {
    /// True if the command line asks for the list of cases or for certain cases. False if it asks for the overview.
    pub fn are_named(&self) -> bool {
        self.list || !self.case.is_empty()
    }

    /// Returns the configuration from the environment, in which command-line options take precedence.
    fn config(&self) -> Result<Config, Failure> {
        let said = self.engine.as_ref().map(|engine| ("MPGPU_ENGINE".into(), engine.into()));
        let environment = std::env::vars_os().filter(|(name, _)| said.is_none() || name != "MPGPU_ENGINE");
        Ok(Config::from_pairs(environment.chain(said.clone()))?)
    }

    /// Returns the sizes in bytes at which a case is measured: those of the command line, or else the default sizes.
    fn sizes(&self, case: &Case, on_gpus: bool) -> Vec<u64> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let largest = if on_gpus { u64::MAX } else { HOST_BACKEND_LARGEST };
        let within: Vec<u64> = case.sizes.iter().copied().filter(|size| *size <= largest).collect();
        if within.is_empty() { vec![largest] } else { within }
    }
}

/// Context, buffers and options that all cases use.
struct Bench<'a> {
    context: &'a Context,
    plain: RefCell<Box<dyn Plain>>,
    pattern: Pattern<'a>,
    repeat: Option<u32>,
    narrow_blocks: u32,
}

impl Bench<'_> {
    fn buffers<'b>(&self, context: &'b Context, legs: &[cases::Leg]) -> Result<Buffers<'b>, Failure> {
        Buffers::new(context, &mut **self.plain.borrow_mut(), &self.pattern, legs)
    }

    fn on_gpus(&self) -> bool {
        is_on_gpus(self.context)
    }
}

/// True if the context uses GPUs, false on the host backend.
pub fn is_on_gpus(context: &Context) -> bool {
    !context.backend().is_virtual()
}

/// Lists or measures the requested cases. Returns the text for standard output. Progress is written to standard error.
pub fn measure(arguments: &CaseArguments, options: &ContextOptions, as_json: bool) -> Result<String, Failure> {
    if arguments.list {
        return Ok(cases::list());
    }
    let config = arguments.config()?;
    // The file is opened before the measurement, so that a run of several minutes does not fail at its end because the file cannot be
    // written.
    let mut json_file = match &arguments.output {
        Some(path) => Some(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?),
        None => None,
    };
    let context = Context::open(options, config)?;
    let on_gpus = is_on_gpus(&context);
    eprint!("{}", context.describe());

    let gpus = context.machine().gpu_count();
    let (mut skipped, mut runs) = (Vec::new(), Vec::new());
    for case in arguments.case.iter().copied().flatten() {
        match case.missing(gpus, on_gpus) {
            Some(why) => {
                eprintln!("{}: skipped, {why}", case.name);
                skipped.push(json!({ "case": case.name, "why": why }));
            }
            None => runs.extend(arguments.sizes(case, on_gpus).into_iter().map(|size| (case, size))),
        }
    }
    let all: Vec<_> = runs.iter().map(|(case, size)| (case.legs)(gpus, *size)).collect();
    let largest = all.iter().flatten().map(|leg| leg.bytes).max().unwrap_or(0);
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    let bench = Bench {
        context: &context,
        plain: RefCell::new(plain::of(&context)),
        pattern: Pattern::new(&context, largest, most)?,
        repeat: arguments.repeat,
        narrow_blocks: arguments.narrow_blocks,
    };
    let mut results: Vec<Comparison> = Vec::new();
    let report = |results: &[Comparison]| {
        json!({
            "context": context.to_json(),
            "driver": driver_version(on_gpus),
            "skipped": skipped,
            "results": results.iter().map(Comparison::to_json).collect::<Vec<Value>>(),
        })
    };
    let mut save = |results: &[Comparison]| json_file.as_mut().map_or(Ok(()), |file| rewrite(file, &report(results)));
    save(&results)?;
    for (case, bytes) in &runs {
        let what = format!("{} {}", case.name, size(*bytes));
        let measured = (case.run)(&bench, case, *bytes).map_err(|error| format!("{what}: {error}"))?;
        measured.iter().for_each(|result| eprintln!("{what}: {}", result.line()));
        results.extend(measured);
        // The results are saved after each measurement, so that an interrupted run leaves its results.
        save(&results)?;
    }
    if as_json {
        return Ok(format!("{:#}\n", report(&results)));
    }
    let mut text = heading(&context, on_gpus) + &report::table(&results);
    if arguments.plans {
        for (case, bytes) in runs.iter().filter(|(case, bytes)| runs.iter().all(|other| other.0.name != case.name || other.1 <= *bytes)) {
            let of_case = results.iter().find(|result| result.case.name == case.name && result.size == *bytes);
            if let Some(plan) = of_case.and_then(|result| result.plan.as_ref()) {
                text += &format!("\n{}, {}:\n{}", case.name, size(*bytes), plan.describe());
            }
        }
    }
    Ok(text)
}

fn rewrite(file: &mut File, report: &Value) -> Result<(), Failure> {
    // A pipe or a terminal cannot be rewound, so the reports are written to it one after the other.
    if file.rewind().is_ok() {
        file.set_len(0)?;
    }
    serde_json::to_writer_pretty(&*file, report)?;
    Ok(writeln!(file)?)
}

/// Returns the heading of a report, which names the machine and its driver. Without GPUs, it states that no GPU was measured.
pub fn heading(context: &Context, on_gpus: bool) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if on_gpus {
        let driver = driver_version(true);
        format!("mpgpu {version}, {}, driver {}\n", context.machine().topology().description, driver.as_str().unwrap_or("unknown"))
    } else {
        format!("mpgpu {version}, host backend: CPU threads move the bytes of virtual GPUs; the figures do not show the speed of GPUs\n")
    }
}

/// Returns the version of the driver, or null if NVML does not report it.
fn driver_version(on_gpus: bool) -> Value {
    let version = if on_gpus { nvml_wrapper::Nvml::init().and_then(|nvml| nvml.sys_driver_version()).ok() } else { None };
    version.map_or(Value::Null, Value::from)
}
