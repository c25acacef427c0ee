//! Results as tables, and as JSON.

use super::contest::{Spread, Times};
use super::measure::Measured;
use super::overhead::Overhead;
use super::phases::{Phase, Phases};
use mpgpu::units::size;
use serde_json::{Value, json};
use std::fmt::Write;

/// What a case came to.
pub enum Outcome {
    /// mpgpu against plain copies.
    Copies(Measured),
    /// The steps of a graph.
    Phases(Phases),
    /// What `mp_execute` adds.
    Overhead(Overhead),
}

impl Outcome {
    /// The measurement in few words, while others are still to come.
    pub fn line(&self) -> String {
        match self {
            Outcome::Copies(measured) => line(measured),
            Outcome::Phases(phases) => format!(
                "{} nodes: new addresses {:.2} us a node, {} re-pointed, {} instantiated anew; bytes verified",
                phases.nodes,
                phases.repoint_per_node * 1e6,
                phases.repointed,
                phases.instantiated_anew
            ),
            Outcome::Overhead(overhead) => format!(
                "{} of {} copies: driver {:.2} us, mp_execute {:.2} us, with a request {:.2} us; {} rounds, bytes verified",
                overhead.launch,
                overhead.nodes,
                overhead.driver.issue.median * 1e6,
                overhead.mpgpu.issue.median * 1e6,
                overhead.requested.issue.median * 1e6,
                overhead.rounds
            ),
        }
    }

    /// The measurement for programs. Times are in seconds.
    pub fn to_json(&self) -> Value {
        match self {
            Outcome::Copies(measured) => copies_to_json(measured),
            Outcome::Phases(phases) => phases_to_json(phases),
            Outcome::Overhead(overhead) => overhead_to_json(overhead),
        }
    }
}

/// The tables of all results, each with how to read it.
pub fn tables(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    let copies: Vec<_> = outcomes.iter().filter_map(|outcome| if let Outcome::Copies(m) = outcome { Some(m) } else { None }).collect();
    let phases: Vec<_> = outcomes.iter().filter_map(|outcome| if let Outcome::Phases(p) = outcome { Some(p) } else { None }).collect();
    let overheads: Vec<_> = outcomes.iter().filter_map(|outcome| if let Outcome::Overhead(o) = outcome { Some(o) } else { None }).collect();
    for table in [
        (!copies.is_empty()).then(|| copies_table(&copies)),
        (!phases.is_empty()).then(|| phases_table(&phases)),
        (!overheads.is_empty()).then(|| overhead_table(&overheads)),
    ]
    .into_iter()
    .flatten()
    {
        if !text.is_empty() {
            text += "\n";
        }
        text += &table;
    }
    text
}

/// A line for each manner of plain copies.
fn copies_table(results: &[&Measured]) -> String {
    let mut text = format!("{:>134} {:>15}\n", "GB/s", "issue us");
    text += &format!(
        "{:<10} {:>10} {:>4} {:>5}  {:<26} {:>26} {:>26} {:>6} {:>7} {:>7} {:>7} {:>7}\n",
        "case", "size", "n", "paths", "plain", "plain us", "mpgpu us", "ratio", "plain", "mpgpu", "plain", "mpgpu"
    );
    for result in results {
        for (manner, plain) in &result.plain {
            let Measured { case, transfers, mpgpu, .. } = result;
            let rate = |times: &Times| result.bytes as f64 / times.total.median / 1e9;
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{:<10} {:>10} {transfers:>4} {:>5}  {:<26} {:>26} {:>26} {:>6.3} {:>7.2} {:>7.2} {:>7.1} {:>7.1}",
                case.name,
                size(result.size),
                result.plan.paths(),
                manner,
                spread(&plain.total),
                spread(&mpgpu.total),
                ratio(plain, mpgpu),
                rate(plain),
                rate(mpgpu),
                plain.issue.median * 1e6,
                mpgpu.issue.median * 1e6,
            );
        }
    }
    text + "Times are medians (min-max) in microseconds from issue until the host sees the last byte arrived; `issue` is the calling \
            thread's part.\nRatio is plain over mpgpu: above 1 mpgpu is faster. Rates are in 10^9 bytes per second over all transfers of the \
            step.\n"
}

fn phases_table(results: &[&Phases]) -> String {
    let mut text = format!("{:<13} {:>10} {:>5}  {:<22} {:>10} {:>26}\n", "case", "size", "nodes", "step", "first us", "later us");
    for result in results {
        for Phase { name, first, later } in &result.steps {
            let (case, bytes) = (result.case.name, size(result.size));
            let _ = writeln!(text, "{case:<13} {bytes:>10} {:>5}  {name:<22} {:>10.2} {:>26}", result.nodes, first * 1e6, fine(later));
        }
        let _ = writeln!(
            text,
            "{:<13} {:>10} {:>5}  new addresses cost {:.2} us for each node, {:.2} by the driver's calls alone; {} re-pointed, {} instantiated anew",
            result.case.name,
            size(result.size),
            result.nodes,
            result.repoint_per_node * 1e6,
            result.driver_repoint_per_node * 1e6,
            result.repointed,
            result.instantiated_anew
        );
    }
    text + "Microseconds of the calling thread, and end to end from launch until the host sees the last byte; later ones are medians (min-max) \
            over 15 graphs.\nAn execution is the look-up of the graph, its launch and an event record; the first one builds the graph.\n"
}

fn overhead_table(results: &[&Overhead]) -> String {
    let mut text = format!(
        "{:<17} {:>10} {:<10} {:>6} {:>22} {:>22} {:>9} {:>10} {:>22} {:>22} {:>9} {:>10}\n",
        "case",
        "size",
        "launch",
        "copies",
        "driver us",
        "mp_execute us",
        "beyond us",
        "control us",
        "driver and event us",
        "with request us",
        "beyond us",
        "control us"
    );
    for result in results {
        let _ = writeln!(
            text,
            "{:<17} {:>10} {:<10} {:>6} {:>22} {:>22} {:>9.2} {:>10.2} {:>22} {:>22} {:>9.2} {:>10.2}",
            result.case.name,
            size(result.size),
            result.launch,
            result.nodes,
            fine(&result.driver.issue),
            fine(&result.mpgpu.issue),
            result.beyond * 1e6,
            result.control * 1e6,
            fine(&result.recorded.issue),
            fine(&result.requested.issue),
            result.requested_beyond * 1e6,
            result.requested_control * 1e6
        );
    }
    text + "Medians (min-max) of the calling thread's time in microseconds; the stream is idle at each call. `beyond` is mp_execute less the \
            driver's own launch,\nand mp_execute with a request less that launch and the event record that a request needs: the median of the \
            differences within a round.\n`control` is the same for a second graph of the driver made like the first, in place of mp_execute: \
            what differs when nothing does.\n"
}

fn line(result: &Measured) -> String {
    let mut text = format!("mpgpu {:.1} us", result.mpgpu.total.median * 1e6);
    for (manner, plain) in &result.plain {
        let _ = write!(text, "; {manner} {:.1} us, ratio {:.3}", plain.total.median * 1e6, ratio(plain, &result.mpgpu));
    }
    format!("{text}; {} rounds, bytes verified", result.rounds)
}

fn spread(spread: &Spread) -> String {
    let us = |seconds: f64| seconds * 1e6;
    format!("{:.1} ({:.1}-{:.1})", us(spread.median), us(spread.min), us(spread.max))
}

fn fine(spread: &Spread) -> String {
    let us = |seconds: f64| seconds * 1e6;
    format!("{:.2} ({:.2}-{:.1})", us(spread.median), us(spread.min), us(spread.max))
}

fn ratio(plain: &Times, mpgpu: &Times) -> f64 {
    plain.total.median / mpgpu.total.median
}

fn spread_to_json(s: &Spread) -> Value {
    json!({ "median": s.median, "min": s.min, "max": s.max })
}

fn times_to_json(t: &Times) -> Value {
    json!({ "total": spread_to_json(&t.total), "issue": spread_to_json(&t.issue) })
}

fn copies_to_json(result: &Measured) -> Value {
    let plain = |(manner, t): &(String, Times)| json!({ "manner": manner, "times": times_to_json(t), "ratio": ratio(t, &result.mpgpu) });
    json!({
        "case": result.case.name,
        "size": result.size,
        "transfers": result.transfers,
        "bytes": result.bytes,
        "rounds": result.rounds,
        "verified": true,
        "mpgpu": times_to_json(&result.mpgpu),
        "plain": result.plain.iter().map(plain).collect::<Vec<_>>(),
        "plan": result.plan.to_json(),
    })
}

fn phases_to_json(result: &Phases) -> Value {
    let step = |phase: &Phase| json!({ "step": phase.name, "first": phase.first, "later": spread_to_json(&phase.later) });
    json!({
        "case": result.case.name,
        "size": result.size,
        "nodes": result.nodes,
        "graphs": result.graphs,
        "verified": true,
        "steps": result.steps.iter().map(step).collect::<Vec<_>>(),
        "repoint_per_node": result.repoint_per_node,
        "driver_repoint_per_node": result.driver_repoint_per_node,
        "repointed": result.repointed,
        "instantiated_anew": result.instantiated_anew,
    })
}

fn overhead_to_json(result: &Overhead) -> Value {
    json!({
        "case": result.case.name,
        "size": result.size,
        "launch": result.launch,
        "copies": result.nodes,
        "rounds": result.rounds,
        "verified": true,
        "driver": times_to_json(&result.driver),
        "recorded": times_to_json(&result.recorded),
        "mpgpu": times_to_json(&result.mpgpu),
        "requested": times_to_json(&result.requested),
        "beyond": result.beyond,
        "requested_beyond": result.requested_beyond,
        "control": result.control,
        "requested_control": result.requested_control,
        "plan": result.plan.to_json(),
    })
}
