//! Measurements as a table, and as JSON.

use super::measure::{Measured, Spread, Times};
use super::plain::Manner;
use mpgpu::units::size;
use serde_json::{Value, json};
use std::fmt::Write;

/// How to read a table.
pub const LEGEND: &str = "\
Times are medians (min-max) in microseconds from issue until the host sees the last byte arrived; `issue` is the calling thread's part.
Ratio is plain over mpgpu: above 1 mpgpu is faster. Rates are in 10^9 bytes per second over all transfers of the step.
";

/// A line for each manner of plain copies.
pub fn table(results: &[Measured]) -> String {
    let mut text = format!("{:>126} {:>15}\n", "GB/s", "issue us");
    text += &format!(
        "{:<10} {:>10} {:>4} {:>5}  {:<18} {:>26} {:>26} {:>6} {:>7} {:>7} {:>7} {:>7}\n",
        "case", "size", "n", "paths", "plain", "plain us", "mpgpu us", "ratio", "plain", "mpgpu", "plain", "mpgpu"
    );
    for result in results {
        for (manner, plain) in &result.plain {
            let Measured { case, transfers, mpgpu, .. } = result;
            let rate = |times: &Times| result.bytes as f64 / times.total.median / 1e9;
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{:<10} {:>10} {transfers:>4} {:>5}  {:<18} {:>26} {:>26} {:>6.3} {:>7.2} {:>7.2} {:>7.1} {:>7.1}",
                case.name,
                size(result.size),
                result.plan.paths(),
                manner.name(),
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
    text
}

/// One measurement in few words, while others are still to come.
pub fn line(result: &Measured) -> String {
    let mut text = format!("mpgpu {:.1} us", result.mpgpu.total.median * 1e6);
    for (manner, plain) in &result.plain {
        let _ = write!(text, "; {} {:.1} us, ratio {:.3}", manner.name(), plain.total.median * 1e6, ratio(plain, &result.mpgpu));
    }
    format!("{text}; {} rounds, bytes verified", result.rounds)
}

fn spread(spread: &Spread) -> String {
    let us = |seconds: f64| seconds * 1e6;
    format!("{:.1} ({:.1}-{:.1})", us(spread.median), us(spread.min), us(spread.max))
}

fn ratio(plain: &Times, mpgpu: &Times) -> f64 {
    plain.total.median / mpgpu.total.median
}

/// One measurement for programs. Times are in seconds.
pub fn to_json(result: &Measured) -> Value {
    let spread = |s: &Spread| json!({ "median": s.median, "min": s.min, "max": s.max });
    let times = |t: &Times| json!({ "total": spread(&t.total), "issue": spread(&t.issue) });
    let plain = |(manner, t): &(Manner, Times)| json!({ "manner": manner.name(), "times": times(t), "ratio": ratio(t, &result.mpgpu) });
    json!({
        "case": result.case.name,
        "size": result.size,
        "transfers": result.transfers,
        "bytes": result.bytes,
        "rounds": result.rounds,
        "verified": true,
        "mpgpu": times(&result.mpgpu),
        "plain": result.plain.iter().map(plain).collect::<Vec<_>>(),
        "plan": result.plan.to_json(),
    })
}
