//! `mpgpu bench`: mpgpu against plain copies, in one run.
//!
//! | file | one idea |
//! | --- | --- |
//! | `arguments` | what it may be told |
//! | `cases` | the list of cases |
//! | `plain` | the plain copies: the driver's, or `memcpy` on the host backend |
//! | `buffers` | memory, patterns, and the check of every byte |
//! | `measure` | rounds, warm-up, medians |
//! | `report` | table and JSON |

mod arguments;
mod buffers;
mod cases;
mod measure;
mod plain;
mod report;

pub use arguments::BenchArguments;
use buffers::Pattern;
use cases::{CASES, Case, HOST_BACKEND_LARGEST};
use measure::{Bench, Measured};
use mpgpu::engine::{Config, Context, ContextOptions, PlanOptions};
use plain::{OnCuda, OnHost, Plain};
use serde_json::{Value, json};
use std::error::Error;

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
        Some(path) => Some(std::fs::File::create(path).map_err(|error| format!("{}: {error}", path.display()))?),
        None => None,
    };
    let options =
        ContextOptions { backend: arguments.backend.map(Into::into), topology: arguments.topology.clone(), ..ContextOptions::default() };
    let context = Context::open(&options, Config::from_environment()?)?;
    let on_gpus = context.backend().name() == "cuda";
    eprint!("{}", context.describe());

    let gpus = context.machine().gpu_count();
    let (runs, skipped): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|case| case.gpus <= gpus);
    for case in &skipped {
        eprintln!("{}: skipped, needs {} GPUs and there are {gpus}", case.name, case.gpus);
    }
    let sizes = |case: &'static Case| -> Vec<u64> {
        let largest = if on_gpus { u64::MAX } else { HOST_BACKEND_LARGEST };
        if arguments.sizes.is_empty() {
            case.sizes.iter().copied().filter(|size| *size <= largest).collect()
        } else {
            arguments.sizes.clone()
        }
    };
    let legs = |case: &&'static Case| sizes(case).into_iter().map(|size| (case.legs)(gpus, size)).collect::<Vec<_>>();
    let all: Vec<_> = runs.iter().flat_map(legs).collect();
    let largest = all.iter().flatten().map(|leg| leg.bytes).max().unwrap_or(0);
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    drop(all);

    let plain: Box<dyn Plain> = if on_gpus { Box::new(OnCuda::default()) } else { Box::new(OnHost::default()) };
    let mut bench = Bench {
        context: &context,
        plain,
        pattern: Pattern::new(&context, largest, most)?,
        options: PlanOptions { engine: arguments.engine.map(Into::into), ..PlanOptions::default() },
        repeat: arguments.repeat,
    };
    let mut results: Vec<Measured> = Vec::new();
    for case in &runs {
        for size in sizes(case) {
            let what = format!("{} {}", case.name, mpgpu::units::size(size));
            let measured = bench.measure(case, size).map_err(|error| format!("{what}: {error}"))?;
            eprintln!("{what}: {}", report::line(&measured));
            results.push(measured);
        }
    }

    if let Some(file) = &mut json_file {
        let report = json!({
            "context": context.to_json(),
            "driver": driver(on_gpus),
            "skipped": skipped.iter().map(|case| case.name).collect::<Vec<_>>(),
            "results": results.iter().map(report::to_json).collect::<Vec<Value>>(),
        });
        serde_json::to_writer_pretty(file, &report)?;
    }
    let mut text = heading(&context, on_gpus) + &report::table(&results) + report::LEGEND;
    if arguments.plans {
        for case in &runs {
            if let Some(largest) = results.iter().filter(|result| result.case.name == case.name).max_by_key(|result| result.size) {
                text += &format!("\n{}, {}:\n{}", case.name, mpgpu::units::size(largest.size), largest.plan.describe());
            }
        }
    }
    Ok(text)
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
    fn every_case_runs_on_the_host_backend_and_is_reported() {
        let file = std::env::temp_dir().join(format!("mpgpu-bench-{}.json", std::process::id()));
        let path = file.to_str().expect("a path in UTF-8");
        let text = bench("beluga", &["--sizes", "8,100000", "--repeat", "3", "--plans", "--json", path]).expect("it runs");
        let json: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
        std::fs::remove_file(&file).expect("it was there");
        assert!(text.contains("host backend"), "{text}");
        for case in CASES {
            assert!(text.lines().any(|line| line.starts_with(&format!("{} ", case.name)) && line.contains("97.7 KiB")), "{text}");
            assert!(text.contains(&format!("{}, 97.7 KiB:\nplan for beluga", case.name)), "{text}");
        }
        let results = json["results"].as_array().expect("a list");
        assert_eq!(results.len(), 2 * CASES.len());
        for result in results {
            let median = |times: &Value| times["total"]["median"].as_f64().expect("seconds");
            let (mpgpu, plain) = (median(&result["mpgpu"]), median(&result["plain"][0]["times"]));
            assert!(mpgpu > 0.0 && plain >= 0.0 && result["rounds"] == 3, "{result}");
            assert_eq!(result["plain"][0]["manner"], "memcpy, one thread");
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
