//! `mpgpu bench`: mpgpu against plain copies, in one run.
//!
//! | file | one idea |
//! | --- | --- |
//! | `arguments` | what it may be told |
//! | `cases` | the list of cases |
//! | `plain` | the plain copies: the driver's, or `memcpy` on the host backend |
//! | `buffers` | memory, patterns, and the check of every byte |
//! | `contest` | rounds, warm-up, medians |
//! | `measure` | executions of a plan against plain copies, one at a time or several under way |
//! | `puts` | puts with signal into another process's memory |
//! | `peer` | that other process |
//! | `narrow` | GPU-to-GPU copies at the rate of narrow links |
//! | `driver_graph` | a program as a graph of the driver's |
//! | `phases` | what a graph costs, step by step |
//! | `overhead` | what `mp_execute` costs the calling thread |
//! | `report` | tables and JSON |

mod arguments;
mod buffers;
mod cases;
mod contest;
mod driver_graph;
mod measure;
mod narrow;
mod overhead;
mod peer;
mod phases;
mod plain;
mod puts;
mod report;

pub use arguments::BenchArguments;
use buffers::Pattern;
use cases::{CASES, Case, HOST_BACKEND_LARGEST, Kind};
use measure::Bench;
use mpgpu::engine::{Config, Context, ContextOptions, PlanOptions};
pub use peer::{PeerArguments, run as run_peer};
use plain::{OnCuda, OnHost, Plain};
use report::Outcome;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::error::Error;
use std::fs::File;
use std::io::{Seek, Write};

/// Why the bench stopped.
type Failure = Box<dyn Error>;

/// Runs the cases that were asked for. Progress goes to standard error, the result is for standard output.
pub fn run(arguments: &BenchArguments) -> Result<String, Failure> {
    if arguments.list {
        return Ok(cases::list());
    }
    // Before anything is measured: a run of minutes should not end with a name that does not exist or a file that can't be written.
    let named = arguments.case.iter().map(|name| cases::find(name)).collect::<Result<Vec<_>, _>>()?;
    let chosen: Vec<&'static Case> = if named.is_empty() { CASES.iter().collect() } else { named };
    let mut json_file = match &arguments.json {
        Some(path) => Some(File::create(path).map_err(|error| format!("{}: {error}", path.display()))?),
        None => None,
    };
    let options =
        ContextOptions { backend: arguments.backend.map(Into::into), topology: arguments.topology.clone(), ..ContextOptions::default() };
    let context = Context::open(&options, Config::from_environment()?)?;
    let on_gpus = context.backend().name() == "cuda";
    eprint!("{}", context.describe());

    let gpus = context.machine().gpu_count();
    let mut skipped = Vec::new();
    let mut runs = Vec::new();
    for case in chosen {
        match case.missing(gpus, on_gpus) {
            Some(why) => {
                eprintln!("{}: skipped, {why}", case.name);
                skipped.push(json!({ "case": case.name, "why": why }));
            }
            None => runs.push(case),
        }
    }
    let sizes = |case: &'static Case| -> Vec<u64> {
        let largest = if on_gpus { u64::MAX } else { HOST_BACKEND_LARGEST };
        if !arguments.sizes.is_empty() {
            return arguments.sizes.clone();
        }
        let within: Vec<u64> = case.sizes.iter().copied().filter(|size| *size <= largest).collect();
        if within.is_empty() { vec![largest] } else { within }
    };
    let legs = |case: &&'static Case| sizes(case).into_iter().map(|size| case.legs(gpus, size)).collect::<Vec<_>>();
    let all: Vec<_> = runs.iter().flat_map(legs).collect();
    let largest = all.iter().flatten().map(|leg| leg.bytes).max().unwrap_or(0);
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    drop(all);

    let plain: Box<dyn Plain> = if on_gpus { Box::new(OnCuda::default()) } else { Box::new(OnHost::default()) };
    let bench = Bench {
        context: &context,
        plain: RefCell::new(plain),
        pattern: Pattern::new(&context, largest, most)?,
        options: PlanOptions { engine: arguments.engine.map(Into::into), ..PlanOptions::default() },
        topology: arguments.topology.clone(),
        repeat: arguments.repeat,
        narrow_blocks: arguments.narrow_blocks,
    };
    let report = |outcomes: &[Outcome]| {
        json!({
            "context": context.to_json(),
            "driver": driver(on_gpus),
            "skipped": skipped,
            "results": outcomes.iter().map(Outcome::to_json).collect::<Vec<Value>>(),
        })
    };
    if let Some(file) = &mut json_file {
        rewrite(file, &report(&[]))?;
    }
    let mut outcomes: Vec<Outcome> = Vec::new();
    for case in &runs {
        for size in sizes(case) {
            let what = format!("{} {}", case.name, mpgpu::units::size(size));
            let measured = measure(&bench, case, size).map_err(|error| format!("{what}: {error}"))?;
            measured.iter().for_each(|outcome| eprintln!("{what}: {}", outcome.line()));
            outcomes.extend(measured);
            // After each one, so that a run that is cut short leaves what it has measured.
            if let Some(file) = &mut json_file {
                rewrite(file, &report(&outcomes))?;
            }
        }
    }

    let mut text = heading(&context, on_gpus) + &report::tables(&outcomes);
    if arguments.plans {
        for case in &runs {
            let plans = outcomes.iter().filter_map(|outcome| match outcome {
                Outcome::Copies(measured) => Some((measured.case, measured.size, &measured.plan)),
                Outcome::Overhead(overhead) => Some((overhead.case, overhead.size, &overhead.plan)),
                Outcome::Phases(_) => None,
            });
            if let Some((_, size, plan)) = plans.filter(|(of, ..)| of.name == case.name).max_by_key(|(_, size, _)| *size) {
                text += &format!("\n{}, {}:\n{}", case.name, mpgpu::units::size(size), plan.describe());
            }
        }
    }
    Ok(text)
}

/// One case at one size.
fn measure(bench: &Bench<'_>, case: &'static Case, size: u64) -> Result<Vec<Outcome>, Failure> {
    Ok(match case.kind {
        Kind::Step { against, .. } => vec![Outcome::Copies(bench.step(case, size, against)?)],
        Kind::Anew => vec![Outcome::Copies(bench.anew(case, size)?)],
        Kind::Window => bench.windows(case, size)?.into_iter().map(Outcome::Copies).collect(),
        Kind::PutSignal => bench.put_signal(case, size)?.into_iter().map(Outcome::Copies).collect(),
        Kind::PutLatency => vec![Outcome::Copies(bench.put_latency(case, size)?)],
        Kind::Narrow => vec![Outcome::Copies(bench.narrow(case, size)?)],
        Kind::GraphPhases => bench.graph_phases(case, size)?.into_iter().map(Outcome::Phases).collect(),
        Kind::ExecuteOverhead => vec![Outcome::Overhead(bench.execute_overhead(case, size)?)],
    })
}

fn rewrite(file: &mut File, report: &Value) -> Result<(), Failure> {
    // A pipe or a terminal cannot be rewound; it gets one report after the other.
    if file.rewind().is_ok() {
        file.set_len(0)?;
    }
    serde_json::to_writer_pretty(&*file, report)?;
    writeln!(file)?;
    Ok(())
}

fn heading(context: &Context, on_gpus: bool) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if on_gpus {
        let driver = driver(true);
        format!("mpgpu {version}, {}, driver {}\n", context.machine().topology().description, driver.as_str().unwrap_or("unknown"))
    } else {
        format!("mpgpu {version}, host backend: CPU threads move the bytes of virtual GPUs; nothing here says how fast GPUs are\n")
    }
}

/// The driver's version, where NVML tells it.
fn driver(on_gpus: bool) -> Value {
    let version = if on_gpus { nvml_wrapper::Nvml::init().and_then(|nvml| nvml.sys_driver_version()).ok() } else { None };
    version.map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arguments, Command};
    use clap::Parser;

    fn bench(topology: &str, more: &[&str]) -> Result<String, Failure> {
        let first = ["mpgpu", "bench", "--backend", "host", "--topology", topology];
        let arguments = first.iter().chain(more);
        match Arguments::try_parse_from(arguments)?.command {
            Command::Bench(arguments) => run(&arguments),
            _ => Err("not the bench command".into()),
        }
    }

    #[test]
    fn every_case_runs_on_the_host_backend_and_is_reported_or_says_why_not() {
        let file = std::env::temp_dir().join(format!("mpgpu-bench-{}.json", std::process::id()));
        let path = file.to_str().expect("a path in UTF-8");
        // Puts into another process run this program again, which here is a test: tests/rust/command.rs has them.
        let cases: Vec<_> = CASES.iter().filter(|case| !matches!(case.kind, Kind::PutSignal | Kind::PutLatency)).collect();
        let names = cases.iter().map(|case| case.name).collect::<Vec<_>>().join(",");
        let arguments = ["--case", &names, "--sizes", "8,100000", "--repeat", "3", "--plans", "--json", path];
        let text = bench("beluga", &arguments).expect("it runs");
        let json: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
        std::fs::remove_file(&file).expect("it was there");
        assert!(text.contains("host backend"), "{text}");
        let results = json["results"].as_array().expect("a list");
        for case in cases {
            let of_case: Vec<_> = results.iter().filter(|result| result["case"] == case.name).collect();
            let skipped = json["skipped"].as_array().expect("a list").iter().find(|skipped| skipped["case"] == case.name);
            if case.kind.needs_driver() {
                assert!(of_case.is_empty() && skipped.is_some_and(|s| s["why"].as_str().is_some_and(|why| why.contains("CUDA"))), "{json}");
                continue;
            }
            assert!(skipped.is_none());
            // Windows of 1, 4 and 16 puts, in one stream, and those of several in a stream each.
            assert_eq!(of_case.len(), if case.name == "put_window" { 2 * 5 } else { 2 }, "{}", case.name);
            assert!(text.lines().any(|line| line.starts_with(&format!("{} ", case.name)) && line.contains("97.7 KiB")), "{text}");
            assert!(text.contains(&format!("{}, 97.7 KiB:\nplan for ", case.name)), "{text}");
            for result in of_case {
                let median = |times: &Value| times["total"]["median"].as_f64().expect("seconds");
                let plain = &result["plain"][0];
                assert!(median(&result["mpgpu"]) > 0.0 && median(&plain["times"]) >= 0.0 && result["rounds"] == 3, "{result}");
                assert!(plain["ratio"].is_f64() && result["verified"] == true, "{result}");
                let manner = plain["manner"].as_str().expect("a name");
                match case.name {
                    "put_window" => assert!(manner.starts_with(&format!("window {}, memcpy", result["transfers"])), "{manner}"),
                    "d2d_narrow" => assert_eq!(manner, "one narrow path"),
                    _ => assert_eq!(manner, "memcpy, one thread"),
                }
            }
        }
    }

    #[test]
    fn a_case_for_more_gpus_than_there_are_is_left_out_and_named() {
        const TWO_GPUS: &str = r#"
            name = "two"
            node = [{ name = "gpu0", kind = "gpu" }, { name = "gpu1", kind = "gpu" }, { name = "host0", kind = "host" }]
            [[link]]
            between = [["gpu0", "gpu1"], ["gpu0", "host0"], ["gpu1", "host0"]]
            kind = "pcie"
            bandwidth = 10e9
        "#;
        let file = std::env::temp_dir().join(format!("mpgpu-bench-{}.toml", std::process::id()));
        std::fs::write(&file, TWO_GPUS).expect("written");
        let text = bench(file.to_str().expect("a path in UTF-8"), &["--case", "ring,d2d", "--sizes", "8", "--repeat", "1"]);
        std::fs::remove_file(&file).expect("it was there");
        let text = text.expect("it runs");
        assert!(text.contains("\nd2d ") && !text.contains("\nring"), "{text}");
    }

    #[test]
    fn a_misspelt_case_is_refused_before_anything_runs() {
        let error = bench("no-such-file", &["--case", "d2x"]).expect_err("no such case").to_string();
        assert!(error.contains("d2x") && error.contains("all_to_all"), "{error}");
    }
}
