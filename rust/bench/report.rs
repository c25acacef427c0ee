//! Formats the results of the benchmark as a table and as JSON.

use super::compare::{Comparison, Figure, Samples, Spread};
use mpgpu_core::units::size;
use serde_json::{Map, Value, json};
use std::fmt::Write;

const MICROSECONDS: f64 = 1e6;

impl Comparison {
    /// Returns a summary of the comparison in one line. It is printed as soon as the comparison is measured, while other measurements still
    /// run.
    pub fn line(&self) -> String {
        let median = |samples: &Samples| Spread::of(&samples.total).median * MICROSECONDS;
        let mut text = format!("{} {:.1} us", self.mpgpu.name, median(&self.mpgpu));
        for other in &self.against {
            let _ = write!(text, "; {} {:.1} us, ratio {:.3}", other.name, median(other), self.ratio(other));
        }
        for (name, figure) in &self.figures {
            let _ = write!(text, "; {name} {figure}");
        }
        format!("{text}; {} rounds, bytes verified", self.mpgpu.total.len())
    }

    fn ratio(&self, other: &Samples) -> f64 {
        Spread::of(&other.total).median / Spread::of(&self.mpgpu.total).median
    }

    /// Returns the comparison as JSON, with times in seconds.
    pub fn to_json(&self) -> Value {
        let spread = |seconds: &[f64]| {
            let Spread { median, min, max } = Spread::of(seconds);
            json!({ "median": median, "min": min, "max": max })
        };
        let times = |of: &Samples| json!({ "total": spread(&of.total), "issue": spread(&of.issue) });
        let against = |other: &Samples| {
            let beyond = self.mpgpu.issue_beyond(other);
            json!({ "manner": other.name, "times": times(other), "ratio": self.ratio(other), "issue_beyond": beyond })
        };
        let figures = self.figures.iter().map(|(name, figure)| match figure {
            Figure::Seconds(seconds) => (format!("{name} seconds"), json!(seconds)),
            Figure::Count(count) => ((*name).to_owned(), json!(count)),
        });
        json!({
            "case": self.case.name,
            "size": self.size,
            "way": self.mpgpu.name,
            "transfers": self.copies,
            "bytes": self.bytes,
            "rounds": self.mpgpu.total.len(),
            "verified": true,
            "mpgpu": times(&self.mpgpu),
            "plain": self.against.iter().map(against).collect::<Vec<_>>(),
            "figures": figures.collect::<Map<_, _>>(),
            "plan": self.plan.as_ref().map(|plan| plan.to_json()),
        })
    }
}

impl std::fmt::Display for Figure {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Figure::Seconds(seconds) => write!(out, "{:.2} us", seconds * MICROSECONDS),
            Figure::Count(count) => write!(out, "{count}"),
        }
    }
}

fn spread(seconds: &[f64]) -> String {
    let Spread { median, min, max } = Spread::of(seconds);
    let [median, min, max] = [median, min, max].map(|seconds| seconds * MICROSECONDS);
    if median < 100.0 { format!("{median:.2} ({min:.2}-{max:.1})") } else { format!("{median:.1} ({min:.1}-{max:.1})") }
}

/// Returns all comparisons as a table with one line for each, followed by a legend.
pub fn table(results: &[Comparison]) -> String {
    let heads = [
        "case",
        "size",
        "copies",
        "paths",
        "mpgpu",
        "plain",
        "plain us",
        "mpgpu us",
        "ratio",
        "plain GB/s",
        "mpgpu GB/s",
        "plain issue",
        "mpgpu issue",
        "beyond",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let mut notes = String::new();
    for result in results {
        let paths = result.plan.as_ref().map_or(String::new(), |plan| plan.paths().to_string());
        let first = [result.case.name.to_owned(), size(result.size), result.copies.to_string(), paths, result.mpgpu.name.clone()];
        for plain in &result.against {
            let rate = |of: &Samples| format!("{:.2}", result.bytes as f64 / Spread::of(&of.total).median / 1e9);
            let issue = |of: &Samples| format!("{:.1}", Spread::of(&of.issue).median * MICROSECONDS);
            let times = [plain.name.clone(), spread(&plain.total), spread(&result.mpgpu.total), format!("{:.3}", result.ratio(plain))];
            let beyond = format!("{:.2}", result.mpgpu.issue_beyond(plain) * MICROSECONDS);
            let rates = [rate(plain), rate(&result.mpgpu), issue(plain), issue(&result.mpgpu), beyond];
            rows.push(first.iter().cloned().chain(times).chain(rates).collect());
        }
        for (name, figure) in &result.figures {
            // Writing to a String cannot fail.
            let _ = writeln!(notes, "{} {}, {} copies: {name}: {figure}", result.case.name, size(result.size), result.copies);
        }
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let is_name = |column: usize| ["case", "mpgpu", "plain"].contains(&heads[column]);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate();
        let aligned =
            cells.map(|(column, (cell, &width))| if is_name(column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        text += &format!("{}\n", aligned.collect::<Vec<_>>().join("  "));
    }
    text + &notes
        + "Times are medians (min-max) in microseconds, from the call until the host sees that the last byte has arrived. `issue` is the \
           time of the\ncalling thread, and `beyond` is the median of the issue time of mpgpu minus that of plain. Ratio is plain / \
           mpgpu: above 1 mpgpu is faster.\n\
           Rates are in 10^9 bytes per second over all copies of the step.\n"
}
