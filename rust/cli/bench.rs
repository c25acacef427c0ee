//! Implements `mpgpu bench`, which measures the gain of mpgpu over plain copies (copies by the driver alone) on this node, prints one line
//! for each kind of copy, and recommends next steps. With `--case` it measures the named cases and shows how much the times vary.

use crate::arguments::{Failure, backend, size as bytes};
use crate::text::table;
use clap::Args;
use mpgpu_bench::{CaseArguments, Looked, Row, heading, is_on_gpus, look, measure, peer};
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions};
use mpgpu_core::units::size;
use serde_json::{Value, json};

pub const EXAMPLES: &str = "\
    The driver's plain copies (the fastest of several methods) and mpgpu copy the same buffers in turn; every\n\
    byte is compared. Takes well under a minute on an idle node, and ends with next steps. The exit code\n\
    is 1 if a kind of copy was refused or bytes were wrong. --case measures named cases by size.\n\n\
    Examples:\n  \
    mpgpu bench\n  \
    mpgpu bench --bytes 1G\n  \
    mpgpu bench --list\n  \
    mpgpu bench --case d2d,latency --output result.json\n  \
    mpgpu bench --case d2d --sizes 64M,1G --repeat 50 --plans\n  \
    mpgpu bench --backend host --topology beluga      without GPUs: shows that it works, not how fast";

/// Ratio of mpgpu's rate to the rate of the fastest plain method. Below this value a kind of copy counts as slower with mpgpu. Above the
/// inverse of this value it counts as faster.
const NO_LOSS: f64 = 0.97;

#[derive(Args)]
pub struct BenchArguments {
    /// Bytes of one transfer; an all-to-all sends a quarter of this between each pair of GPUs. The default is 256M, or 16M without GPUs
    #[arg(long, value_parser = positive)]
    bytes: Option<u64>,
    /// Backend; by default the value of MPGPU_BACKEND, or CUDA if there are GPUs
    #[arg(long, value_parser = backend())]
    backend: Option<BackendChoice>,
    /// A preset's name or a topology file, like MPGPU_TOPOLOGY
    #[arg(long)]
    topology: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cases: CaseArguments,
    /// Run as the peer process of another bench: seed of the pattern, and bytes of the inbox
    #[arg(long, hide = true, num_args = 2, value_names = ["SEED", "BYTES"])]
    peer: Option<Vec<u64>>,
}

fn positive(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("must be 1 byte or more".into()),
        bytes => Ok(bytes),
    }
}

/// Runs the subcommand. Returns the report, and true if all copies that are possible on this machine succeeded with correct data.
pub fn run(arguments: &BenchArguments) -> Result<(String, bool), Failure> {
    let options = ContextOptions { backend: arguments.backend, topology: arguments.topology.clone(), ..ContextOptions::default() };
    if arguments.cases.are_named() {
        return Ok((measure(&arguments.cases, &options, arguments.json)?, true));
    }
    let context = Context::open(&options, Config::from_environment()?)?;
    if let Some([seed, bytes]) = arguments.peer.as_deref() {
        return peer(&context, *seed, *bytes).map(|()| (String::new(), true));
    }
    let on_gpus = is_on_gpus(&context);
    // The topology counts as known if the user has named one or if the context uses a probe (measurement of the machine). If neither is the
    // case, the topology is the one that the driver reports.
    let is_known = !on_gpus || context.config().topology.is_some();
    let rows = look(&context, arguments.bytes, |row| eprintln!("{}: {}", row.what, state(row)))?;
    let is_sound = rows.iter().all(|row| !matches!(row.result, Looked::Failed(_)));
    let next = next(&rows, on_gpus, is_known);
    let heading = heading(&context, on_gpus);
    let text = if arguments.json { to_json(&heading, on_gpus, &rows, &next) } else { to_text(&heading, &rows, &next) };
    Ok((text, is_sound))
}

fn state(row: &Row) -> &str {
    match &row.result {
        Looked::Measured { .. } => "bytes correct",
        Looked::Left(why) | Looked::Failed(why) => why,
    }
}

fn to_text(heading: &str, rows: &[Row], next: &[String]) -> String {
    let gigabytes = |rate: f64| format!("{:.1}", rate / 1e9);
    let mut lines = vec![["copy", "bytes", "plain GB/s", "mpgpu GB/s", "ratio", "bytes correct"].map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| {
        let [plain, mpgpu, ratio, right] = match row.result {
            Looked::Measured { plain, mpgpu, .. } => [gigabytes(plain), gigabytes(mpgpu), format!("{:.2}", mpgpu / plain), "yes".into()],
            Looked::Left(_) => ["-", "-", "-", "not run"].map(str::to_owned),
            Looked::Failed(_) => ["-", "-", "-", "NO"].map(str::to_owned),
        };
        vec![row.what.to_owned(), size(row.bytes), plain, mpgpu, ratio, right]
    }));
    let next: String = next.iter().map(|line| format!("  - {line}\n")).collect();
    format!("{heading}\n{}\nNext:\n{next}", table(&lines))
}

/// Returns the recommended next steps, from the results in `rows`.
fn next(rows: &[Row], on_gpus: bool, is_known: bool) -> Vec<String> {
    let mut next = Vec::new();
    if !on_gpus {
        next.push(
            "The figures are those of CPU threads and do not describe GPUs; `mpgpu plan --topology hgx-h200 gpu0:gpu1:1G` models GPUs"
                .into(),
        );
    }
    if !is_known {
        next.push("run `mpgpu probe` once while the node is idle, so that plans use measured capacities; then `mpgpu bench` again".into());
    }
    for row in rows {
        match &row.result {
            Looked::Failed(why) => next.push(format!("{}: {why}; `mpgpu doctor` shows what is refused, with a remedy", row.what)),
            Looked::Left(why) => next.push(format!("{}: not run, {why}", row.what)),
            // Without GPUs, CPU threads make the copies, and times on a busy machine do not show which copies are faster.
            Looked::Measured { plain, mpgpu, paths } if on_gpus && mpgpu / plain < NO_LOSS => next.push(if *paths == 1 {
                format!(
                    "{}: slower than the driver: the plan is one direct copy, and a call of mpgpu takes longer than a call of the \
                     driver; call the driver for this copy",
                    row.what
                )
            } else {
                format!(
                    "{}: slower than the driver over {paths} paths: other programs use the links, or the topology overestimates their \
                     capacity; run `mpgpu probe` on an idle node, or set MPGPU_MAX_PATHS=1",
                    row.what
                )
            }),
            Looked::Measured { plain, mpgpu, .. } if on_gpus && mpgpu / plain < 1.0 / NO_LOSS => {
                next.push(format!("{}: no gain; `mpgpu plan` with these devices shows why other paths are not used", row.what));
            }
            Looked::Measured { .. } => {}
        }
    }
    if on_gpus {
        next.push("to accelerate a program, start it unmodified with `mpgpu run PROGRAM`, or use the API".into());
    }
    next
}

fn to_json(heading: &str, on_gpus: bool, rows: &[Row], next: &[String]) -> String {
    let row = |row: &Row| {
        let (plain, mpgpu, paths) = match row.result {
            Looked::Measured { plain, mpgpu, paths } => (json!(plain), json!(mpgpu), json!(paths)),
            Looked::Left(_) | Looked::Failed(_) => (Value::Null, Value::Null, Value::Null),
        };
        let right = match row.result {
            Looked::Measured { .. } => json!(true),
            Looked::Left(_) => Value::Null,
            Looked::Failed(_) => json!(false),
        };
        json!({ "case": row.case, "bytes": row.bytes, "plain": plain, "mpgpu": mpgpu, "paths": paths, "bytes_right": right, "state": state(row) })
    };
    let rows = rows.iter().map(row).collect::<Vec<_>>();
    format!("{:#}\n", json!({ "machine": heading.trim_end(), "on_gpus": on_gpus, "copies": rows, "next": next }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(result: Looked) -> [Row; 1] {
        [Row { case: "d2d", what: "GPU 0 to GPU 1", bytes: 1 << 20, result }]
    }

    fn measured(mpgpu: f64, paths: usize) -> [Row; 1] {
        row(Looked::Measured { plain: 100e9, mpgpu, paths })
    }

    #[test]
    fn what_loses_and_what_is_refused_is_said_with_what_to_do() {
        let told = |rows: &[Row], is_known| next(rows, true, is_known).join("\n");
        assert!(told(&measured(150e9, 2), false).contains("mpgpu probe"));
        assert!(!told(&measured(150e9, 2), true).contains("mpgpu probe"));
        assert!(told(&measured(90e9, 1), true).contains("GPU 0 to GPU 1: slower than the driver: the plan is one direct copy"));
        assert!(told(&measured(90e9, 3), true).contains("GPU 0 to GPU 1: slower than the driver over 3 paths"));
        assert!(told(&measured(101e9, 1), true).contains("no gain"));
        assert!(told(&row(Looked::Failed("peer access".into())), true).contains("peer access; `mpgpu doctor`"));
    }

    #[test]
    fn wrong_bytes_stand_in_the_table_and_threads_are_no_gpus() {
        let rows = row(Looked::Failed("byte 7 of 9 is wrong".into()));
        assert!(to_text("heading\n", &rows, &[]).lines().any(|line| line.contains("GPU 0 to GPU 1") && line.ends_with("NO")));
        assert!(next(&measured(90e9, 1), false, true)[0].contains("do not describe GPUs"));
    }
}
