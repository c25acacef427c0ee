//! Implements `mpgpu doctor`, which reports what works, is slow or is refused on this machine.

use crate::arguments::Failure;
use clap::Args;
use mpgpu_contexts::doctor::{Facts, Finding, Level, findings};
use serde_json::{Value, json};

#[derive(Args)]
pub struct DoctorArguments {
    /// Skip the test copies between GPUs and the pinning of host memory; creates no context on any GPU
    #[arg(long)]
    no_trials: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand. Returns the report, and true if no finding has the severity "refused".
pub fn run(arguments: &DoctorArguments) -> Result<(String, bool), Failure> {
    // Log messages are disabled, because the report already contains the same facts.
    if std::env::var_os("MPGPU_LOG").is_none() {
        log::set_max_level(log::LevelFilter::Off);
    }
    let facts = Facts::gather(!arguments.no_trials);
    let found = findings(&facts);
    let is_sound = found.iter().all(|finding| finding.level != Level::Refused);
    let text = if arguments.json { format!("{:#}\n", to_json(&facts, &found)) } else { to_text(&facts, &found) };
    Ok((text, is_sound))
}

const LEVELS: [Level; 5] = [Level::Well, Level::Absent, Level::Slow, Level::Unknown, Level::Refused];

fn count(found: &[Finding], level: Level) -> usize {
    found.iter().filter(|finding| finding.level == level).count()
}

fn to_text(facts: &Facts, found: &[Finding]) -> String {
    // The lines of several ranks can be interleaved, so each line starts with its rank.
    let rank = facts.rank.as_ref().map_or(String::new(), |rank| match rank.local {
        Some(local) => format!("[{}.{local}] ", rank.number),
        None => format!("[{}] ", rank.number),
    });
    let mut text = String::new();
    for Finding { level, topic, line, remedy } in found {
        text += &format!("{rank}{:<7}  {topic:<8}  {line}\n", level.name());
        if !remedy.is_empty() {
            text += &format!("{rank}{:19}-> {remedy}\n", "");
        }
    }
    let counts = LEVELS.map(|level| format!("{} {}", count(found, level), level.name()));
    text + &format!("{rank}{}\n", counts.join(", "))
}

fn to_json(facts: &Facts, found: &[Finding]) -> Value {
    let findings = found
        .iter()
        .map(|finding| json!({"level": finding.level.name(), "topic": finding.topic, "line": finding.line, "remedy": finding.remedy}));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "rank": facts.rank.as_ref().map(|rank| json!({"number": rank.number, "local": rank.local, "variable": rank.variable})),
        "gpus": facts.cuda.as_ref().map(|cuda| cuda.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()).unwrap_or_else(|_| Vec::<String>::new()),
        "findings": findings.collect::<Vec<_>>(),
        "well": count(found, Level::Well),
        "absent": count(found, Level::Absent),
        "slow": count(found, Level::Slow),
        "unknown": count(found, Level::Unknown),
        "refused": count(found, Level::Refused),
    })
}
