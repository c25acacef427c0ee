//! Reports the results of a probe, as tables and as JSON.

use mpgpu_contexts::ProbeReport;
use mpgpu_core::plan::Mechanism;
use mpgpu_core::topology::{CostUnit, Costs, DeviceId};
use mpgpu_measure::probe::{Hop, HopFound, Integrity, Pipeline, Reading};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

/// Minimum slowdown at which two copies are listed as slowing each other down. The slowdown is the time of both copies at the same time,
/// divided by the time of an isolated copy.
const SHOWN: f64 = 1.1;
/// Maximum number of lines of a list. If a list is longer, the remaining lines are omitted and their number is shown.
const LONGEST: usize = 40;

pub fn tables(report: &ProbeReport) -> String {
    let probed = &report.probed;
    let mut text = format!("{}: {}\n\n", probed.topology.name, probed.topology.description);
    text += &matrix("one isolated copy, from row to column, GB/s; LOST if bytes do not arrive", &probed.hops, |hop| match hop.verdict {
        Integrity::Intact => format!("{:.1}", hop.rate / 1e9),
        Integrity::Lost { .. } => "LOST".into(),
    });
    text += &matrix("\none isolated copy of a few bytes, us", &probed.hops, |hop| match hop.verdict {
        Integrity::Intact => format!("{:.1}", hop.start * 1e6),
        Integrity::Lost { .. } => String::new(),
    });

    // Writing to a String cannot fail.
    let _ = writeln!(text, "\nshared capacities: {}", if probed.groups.is_empty() { "none found" } else { "together no faster than" });
    for group in probed.groups.iter().take(LONGEST) {
        let staged = group.staged.map_or(String::new(), |staged| format!("staged {:.1}", staged / 1e9));
        let _ = writeln!(text, "{:>9.1} GB/s  {staged:<12}  {:<16} {}", group.capacity / 1e9, group.name, ends(&group.hops));
    }
    more(&mut text, probed.groups.len());

    let mut slow: Vec<_> = probed.pairs.iter().filter(|pair| pair.slowdown > SHOWN).collect();
    slow.sort_by(|a, b| b.slowdown.total_cmp(&a.slowdown));
    let of = probed.pairs.len();
    let _ = writeln!(text, "\n{} of {of} pairs of copies slow each other down by more than 10 %", slow.len());
    for pair in slow.iter().take(LONGEST) {
        let _ = writeln!(text, "{:>7.2} times  {} with {}", pair.slowdown, arrow(pair.first), arrow(pair.second));
    }
    more(&mut text, slow.len());

    text += "\nfixed costs, us, and how they were measured\n";
    for cost in Costs::TABLE {
        let value = (cost.of)(&probed.topology.costs) * if cost.unit == CostUnit::Seconds { 1e6 } else { 1.0 };
        let _ = writeln!(text, "{value:>9.3}  {:<18} {}", cost.name, cost.probe.unwrap_or("not measured: assumed"));
    }
    let residuals = probed.residuals;
    let _ = writeln!(
        text,
        "{} random sets of copies, not used for fitting: predicted within {:.1} % (median), {:.1} % (worst)",
        residuals.count,
        residuals.median * 100.0,
        residuals.worst * 100.0
    );
    probed.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    if let Some(tuning) = &report.tuning {
        let _ = writeln!(text, "tuning made for it: {}", tuning.summary());
    }
    text
}

fn more(text: &mut String, all: usize) {
    if all > LONGEST {
        text.push_str(&format!("          and {} more; --json has all\n", all - LONGEST));
    }
}

fn matrix(title: &str, hops: &[HopFound], cell: impl Fn(&HopFound) -> String) -> String {
    let devices: BTreeSet<DeviceId> = hops.iter().flat_map(|hop| [hop.from, hop.to]).collect();
    // Hosts have negative device numbers. They are listed after the GPUs, in the order host 0, host 1, and so on.
    let (hosts, gpus): (Vec<DeviceId>, Vec<DeviceId>) = devices.into_iter().partition(|device| device.is_host());
    let devices: Vec<DeviceId> = gpus.into_iter().chain(hosts.into_iter().rev()).collect();
    let mut text = format!("{title}\n        ");
    devices.iter().for_each(|to| text += &format!("{:>8}", to.to_string()));
    for &from in &devices {
        text += &format!("\n{:<8}", from.to_string());
        for &to in &devices {
            let hop = hops.iter().find(|hop| (hop.from, hop.to) == (from, to));
            let cell = hop.map_or(if from == to { String::new() } else { "-".into() }, &cell);
            text += &format!("{cell:>8}");
        }
    }
    text + "\n"
}

fn arrow((from, to): (DeviceId, DeviceId)) -> String {
    format!("{from}>{to}")
}

/// Formats a list of hops (pairs of source and destination device), with as many as fit into one line.
fn ends(hops: &[(DeviceId, DeviceId)]) -> String {
    const MOST: usize = 8;
    let mut text = hops.iter().take(MOST).map(|hop| arrow(*hop)).collect::<Vec<_>>().join(" ");
    if hops.len() > MOST {
        text += &format!(" and {} more", hops.len() - MOST);
    }
    text
}

pub fn to_json(report: &ProbeReport, path: Option<&Path>, seconds: f64) -> Value {
    let probed = &report.probed;
    let hop = |hop: &HopFound| {
        let lost = match hop.verdict {
            Integrity::Intact => None,
            Integrity::Lost { wrong, of } => Some(json!({ "wrong_bytes": wrong, "of": of })),
        };
        json!({ "from": hop.from.to_string(), "to": hop.to.to_string(), "bytes_per_second": hop.rate, "start_seconds": hop.start, "lost": lost })
    };
    json!({
        "file": path,
        "seconds": seconds,
        "date": report.record.date,
        "driver": report.record.fingerprint.driver,
        "gpus": report.record.fingerprint.gpus,
        "measurements": probed.measurements,
        "hops": probed.hops.iter().map(hop).collect::<Vec<_>>(),
        "shared": probed.groups.iter().map(|group| json!({
            "name": group.name,
            "bytes_per_second": group.capacity,
            "staged_bytes_per_second": group.staged,
            "hops": group.hops.iter().map(|hop| arrow(*hop)).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "pairs": probed.pairs.iter().map(|pair| json!([arrow(pair.first), arrow(pair.second), pair.slowdown])).collect::<Vec<_>>(),
        "costs": costs(&probed.topology.costs),
        "residuals": probed.residuals,
        "notes": probed.notes,
        "tuning": report.tuning.as_ref().map(|tuning| json!({ "digest": tuning.digest, "classes": tuning.classes.len() })),
    })
}

/// Returns the planner's costs as JSON: each cost with its name, in seconds or as a ratio.
pub fn costs(costs: &Costs) -> Value {
    Costs::TABLE.iter().map(|cost| (cost.name.to_owned(), json!((cost.of)(costs)))).collect::<serde_json::Map<String, Value>>().into()
}

/// Returns every measurement as JSON. Each has its copies, and for each run two times in seconds: until the submission returned, and until
/// all data had arrived.
pub fn readings(report: &ProbeReport) -> Vec<Value> {
    let hop = |hop: &Hop| json!([arrow((hop.from, hop.to)), hop.bytes]);
    let pipeline = |pipeline: &Pipeline| {
        let Pipeline { hop, via, chunks } = pipeline;
        json!([format!("{}>{via}>{}", hop.from, hop.to), hop.bytes, chunks])
    };
    let reading = |reading: &Reading| {
        let mut line = json!({
            "direct": reading.direct.iter().map(hop).collect::<Vec<_>>(),
            "issue": reading.runs.iter().map(|run| run.issue).collect::<Vec<_>>(),
            "total": reading.runs.iter().map(|run| run.total).collect::<Vec<_>>(),
        });
        if reading.as_plan {
            line["staged"] = reading.staged.iter().map(pipeline).collect();
        }
        if let Some((mechanism, count)) = reading.many {
            line["mechanism"] = match mechanism {
                Mechanism::Copy => "copy",
                Mechanism::Batch => "batch",
                Mechanism::Kernel => "kernel",
                Mechanism::Thread => "thread",
            }
            .into();
            line["count"] = count.into();
        }
        line
    };
    report.probed.readings.iter().map(reading).collect()
}
