//! Implements `mpgpu probe`, which measures the machine, shows the result, and stores it for later contexts.

mod check;
mod report;

pub use report::costs;

use crate::arguments::backend;
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions};
use mpgpu_measure::probe::{ProbeOptions, Progress};
use serde_json::{Value, json};
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args)]
pub struct ProbeArguments {
    /// Write the topology to this file instead of the place where contexts find it by default. No tuning follows
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print the topology and write no file. No tuning follows
    #[arg(long, conflicts_with = "output")]
    pub stdout: bool,
    /// Print the result as JSON instead of tables, with every measurement
    #[arg(long, conflicts_with = "stdout")]
    pub json: bool,
    /// Make fewer and shorter measurements, for a first look. No tuning follows
    #[arg(long)]
    pub quick: bool,
    /// Afterwards compare predictions with measurements: plans of several kinds and sizes, each predicted from the probe alone
    #[arg(long, conflicts_with = "stdout")]
    pub check: bool,
    /// Compare predictions of this topology (a preset's name or a file) with measurements, instead of measuring a new one
    #[arg(long, requires = "check", conflicts_with_all = ["output", "quick"])]
    pub topology: Option<String>,
    /// Backend; by default the value of MPGPU_BACKEND, or CUDA if there are GPUs
    #[arg(long, value_parser = backend())]
    pub backend: Option<BackendChoice>,
}

pub fn run(arguments: &ProbeArguments) -> Result<String, Box<dyn Error>> {
    let open = |topology: Option<String>| -> Result<Context, Box<dyn Error>> {
        let options = ContextOptions { backend: arguments.backend, topology, ..ContextOptions::default() };
        Ok(Context::open(&options, Config::from_environment()?)?)
    };
    if let Some(topology) = &arguments.topology {
        let context = open(Some(topology.clone()))?;
        let checked = check::run(&context)?;
        return Ok(if arguments.json { format!("{:#}\n", check::to_json(&checked)) } else { check::table(&checked) });
    }

    let context = open(None)?;
    let mut options = if arguments.quick { ProbeOptions::quick() } else { ProbeOptions::default() };
    // Contexts look for a tuning only next to a probe that is stored in the default folder.
    let is_kept = context.keeps_probes() && !arguments.stdout && arguments.output.is_none();
    if !is_kept {
        options.tuned_bytes.clear();
    }
    if arguments.check && !is_kept && arguments.output.is_none() {
        return Err(
            "--check compares predictions of the stored probe, but this probe would not be stored: name a file with --output".into()
        );
    }
    let start = Instant::now();
    let bar = Bar::new();
    let report = context.probe(&options, &mut |progress| bar.show(progress))?;
    bar.0.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    if arguments.stdout {
        return Ok(report.to_toml());
    }
    let is_written = is_kept || arguments.output.is_some();
    let path = if is_written {
        let stored = context.store_probe(&report, arguments.output.as_deref());
        // The result is shown even if it cannot be stored.
        Some(stored.inspect_err(|_| print!("{}", report::tables(&report)))?)
    } else {
        None
    };
    match &path {
        Some(path) => eprintln!("measured in {seconds:.1} s; written to {}", path.display()),
        None => eprintln!("measured in {seconds:.1} s; not stored: pass --output FILE to write it"),
    }
    if !context.keeps_probes() {
        eprintln!("the measured copies were made by CPU threads between virtual devices; the figures do not describe any GPU");
    } else if is_kept {
        eprintln!("contexts on these GPUs use this topology from now on; MPGPU_TOPOLOGY=discovered disables it");
        if report.tuning.is_some() {
            eprintln!("contexts also use the tuning that was made for this topology; MPGPU_TUNING_FILE=none disables that");
        }
    }
    drop(context);

    let checked = match (&path, arguments.check) {
        (Some(path), true) => Some(check::run(&open(Some(path.to_string_lossy().into_owned()))?)?),
        _ => None,
    };
    if arguments.json {
        let found = report::to_json(&report, path.as_deref(), seconds);
        let check = checked.map(|checked| check::to_json(&checked));
        return Ok(with_readings(&json!({ "probe": found, "check": check }), &report::readings(&report)));
    }
    let tables = report::tables(&report);
    Ok(match checked {
        Some(checked) => format!("{tables}\n{}", check::table(&checked)),
        None => tables,
    })
}

/// Returns `object` as JSON text, with the additional member `readings` at its end. That member has one measurement on each line, because
/// there are thousands of measurements.
fn with_readings(object: &Value, readings: &[Value]) -> String {
    let text = format!("{object:#}");
    let lines: Vec<String> = readings.iter().map(|reading| format!("    {reading}")).collect();
    let open = text.strip_suffix("\n}").unwrap_or(&text);
    format!("{open},\n  \"readings\": [\n{}\n  ]\n}}\n", lines.join(",\n"))
}

/// Progress bar on standard error. It is shown only if standard error is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Bar {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // The template is a constant, so it is valid.
        let style = ProgressStyle::with_template("{prefix:14} {bar:32} {pos:>4}/{len:4} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Bar(bar)
    }

    fn show(&self, progress: Progress) {
        self.0.set_prefix(progress.stage);
        self.0.set_length(u64::from(progress.of));
        self.0.set_position(u64::from(progress.done));
        self.0.set_message(format!("{} measurements, {:.0} s", progress.measurements, self.0.elapsed().as_secs_f64()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_the_last_member_of_the_same_object() {
        let object = json!({ "probe": { "costs": { "copy": 7e-6 } }, "check": null });
        let readings = [json!({ "direct": [["gpu0>gpu1", 4096]], "total": [7e-6] }), json!({ "direct": [], "total": [] })];
        for count in [0, 2] {
            let text = with_readings(&object, &readings[..count]);
            let read: Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!((&read["probe"], &read["readings"]), (&object["probe"], &json!(readings[..count])), "{text}");
        }
    }
}
