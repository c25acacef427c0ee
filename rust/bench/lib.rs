//! mpgpu against plain copies, in one run: the first look of `mpgpu bench`, and the cases of `mpgpu bench --case`. Every byte is checked.
//!
//! | file | one idea |
//! | --- | --- |
//! | `cases` | the list of cases |
//! | `compare` | the measuring loop: contestants by turns, medians |
//! | `memory` | memory, patterns, and the check of every byte |
//! | `plain` | the plain copies: the driver's, or `memcpy` on the host backend |
//! | `steps` | executions of one plan against plain copies, one at a time or several under way |
//! | `puts`, `peer` | puts with signal into another process's memory, and that process |
//! | `narrow` | GPU-to-GPU copies at the rate of narrow links |
//! | `driver_graph` | a program as a graph made by the driver's calls |
//! | `phases` | what a graph costs, step by step |
//! | `overhead` | what `mp_execute` costs the calling thread |
//! | `report` | the table and the JSON |
//! | `look` | one line for each kind of copy: what `mpgpu bench` shows without `--case` |

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

/// Why the benchmark stopped.
pub type Failure = Box<dyn Error>;

/// Cases of `mpgpu bench`, and how they are measured.
#[derive(Args)]
pub struct CaseArguments {
    /// Print the cases and exit
    #[arg(long)]
    list: bool,
    /// Measure these cases, separated by commas, or `all`, with medians and spread
    #[arg(long, value_delimiter = ',', value_name = "CASE", value_parser = cases::named, conflicts_with = "bytes")]
    case: Vec<&'static [Case]>,
    /// Sizes of one transfer of a case (of one face in halo26 and halo26_bidir), separated by commas; bytes may end in K, M or G
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = positive_size, requires = "case")]
    sizes: Vec<u64>,
    /// Rounds in which everything is timed once; by default as many as take about half a second
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u32).range(1..), requires = "case")]
    repeat: Option<u32>,
    /// Thread blocks of 256 threads that make one copy between GPUs in d2d_narrow
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64), requires = "case")]
    narrow_blocks: u32,
    /// Executor to plan for, as MPGPU_ENGINE
    #[arg(long, requires = "case")]
    engine: Option<String>,
    /// Print the plan of each case's largest size
    #[arg(long, requires = "case")]
    plans: bool,
    /// Write everything to this file as JSON too, anew after each measurement
    #[arg(long, value_name = "FILE", requires = "case")]
    output: Option<PathBuf>,
}

fn positive_size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(0) => Err("a size to measure is 1 byte or more".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

impl CaseArguments {
    /// Returns true if cases are to be listed or measured, in place of a first look.
    pub fn are_named(&self) -> bool {
        self.list || !self.case.is_empty()
    }

    /// The environment, and what the command line says in place of it.
    fn config(&self) -> Result<Config, Failure> {
        let said = self.engine.as_ref().map(|engine| ("MPGPU_ENGINE".into(), engine.into()));
        let environment = std::env::vars_os().filter(|(name, _)| said.is_none() || name != "MPGPU_ENGINE");
        Ok(Config::from_pairs(environment.chain(said.clone()))?)
    }

    /// Sizes of a case.
    fn sizes(&self, case: &Case, on_gpus: bool) -> Vec<u64> {
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let largest = if on_gpus { u64::MAX } else { HOST_BACKEND_LARGEST };
        let within: Vec<u64> = case.sizes.iter().copied().filter(|size| *size <= largest).collect();
        if within.is_empty() { vec![largest] } else { within }
    }
}

/// What does not change from case to case.
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

/// Whether a context is on GPUs, and not on the host backend.
pub fn is_on_gpus(context: &Context) -> bool {
    !context.backend().is_virtual()
}

/// Lists the cases or measures those that were asked for, and returns what goes to standard output. Progress goes to standard error.
pub fn measure(arguments: &CaseArguments, options: &ContextOptions, as_json: bool) -> Result<String, Failure> {
    if arguments.list {
        return Ok(cases::list());
    }
    let config = arguments.config()?;
    // Before anything is measured: a run of minutes should not end with a file that cannot be written.
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
        // After each one, so that a run that is cut short leaves what it has measured.
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
    // A pipe or a terminal cannot be rewound; it gets one report after the other.
    if file.rewind().is_ok() {
        file.set_len(0)?;
    }
    serde_json::to_writer_pretty(&*file, report)?;
    Ok(writeln!(file)?)
}

/// What was measured: the machine and its driver, or that no GPU was.
pub fn heading(context: &Context, on_gpus: bool) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if on_gpus {
        let driver = driver_version(true);
        format!("mpgpu {version}, {}, driver {}\n", context.machine().topology().description, driver.as_str().unwrap_or("unknown"))
    } else {
        format!("mpgpu {version}, host backend: CPU threads move the bytes of virtual GPUs; nothing here says how fast GPUs are\n")
    }
}

/// The driver's version, where NVML tells it.
fn driver_version(on_gpus: bool) -> Value {
    let version = if on_gpus { nvml_wrapper::Nvml::init().and_then(|nvml| nvml.sys_driver_version()).ok() } else { None };
    version.map_or(Value::Null, Value::from)
}
