//! Compares predicted with measured times. Executes plans for the context's topology on this machine.

use mpgpu_contexts::{Context, Plan as Bound, PlanOptions, Transfer};
use mpgpu_core::plan::{PathPlan, Plan, Shape};
use mpgpu_core::topology::DeviceId;
use mpgpu_core::units::size;
use serde_json::{Value, json};
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

/// Minimum size in bytes of a large case. In smaller cases startup time dominates, so the goal for the worst error does not apply to them.
const LARGE: u64 = 16 << 20;
/// Maximum relative errors of predictions that count as good. The first value is for the median error, and equals the error of a published
/// model. The second value is for the worst error of large cases.
const GOALS: [f64; 2] = [0.06, 0.15];
const WARM_UP: usize = 3;
const ROUNDS: usize = 11;
/// Number of passes over all cases. Each pass uses another buffer of host memory and newly allocated GPU memory, because a prediction must
/// not depend on one buffer or one moment. The number is odd, so that the median is the value of one of the passes.
const TURNS: usize = 3;
/// Maximum total size in bytes of the sources and destinations of one case on one device.
const MOST_MEMORY: u64 = 4 << 30;

struct Case {
    name: String,
    /// Source and destination device of each copy.
    copies: Vec<(DeviceId, DeviceId)>,
    max_paths: Option<u32>,
    host_path: Option<bool>,
}

/// Predicted and measured times of one case at one size, in seconds.
pub struct Checked {
    case: String,
    bytes: u64,
    paths: usize,
    predicted: f64,
    /// Measured times in seconds of all executions. There is one list for each pass over all cases.
    rounds: Vec<Vec<f64>>,
    /// Paths of the executed plan, as JSON for the report.
    plan: Value,
}

impl Checked {
    /// Returns the median time of each pass in seconds.
    fn turns(&self) -> Vec<f64> {
        self.rounds.iter().map(|seconds| middle(seconds.clone())).collect()
    }

    /// Returns the measured time of the case in seconds: the median of the medians of all passes.
    fn measured(&self) -> f64 {
        middle(self.turns())
    }

    /// Returns the difference between the slowest and the fastest pass, relative to the measured time. No prediction can be more precise
    /// than this.
    fn spread(&self) -> f64 {
        let turns = self.turns();
        let (least, most) = turns.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
        (most - least) / self.measured()
    }

    /// Returns the relative error of the prediction. It is positive if the predicted time is too long.
    fn error(&self) -> f64 {
        self.predicted / self.measured() - 1.0
    }
}

fn cases(gpus: u32) -> Vec<Case> {
    let gpu = DeviceId::gpu;
    let case = |name: &str, copies: Vec<(DeviceId, DeviceId)>| Case { name: name.into(), copies, max_paths: None, host_path: None };
    let plain = |name: &str, copies| Case { max_paths: Some(1), host_path: Some(false), ..case(name, copies) };
    let mut cases = Vec::new();
    if gpus > 1 {
        cases.push(plain("direct", vec![(gpu(0), gpu(1))]));
        cases.push(case("direct + others", vec![(gpu(0), gpu(1))]));
        cases.push(plain("both ways, direct", vec![(gpu(0), gpu(1)), (gpu(1), gpu(0))]));
        cases.push(case("both ways", vec![(gpu(0), gpu(1)), (gpu(1), gpu(0))]));
    }
    for paths in 1..=gpus {
        let through = |name: &str, copy| Case { max_paths: Some(paths), ..case(&format!("{name}, {paths} paths"), vec![copy]) };
        cases.push(through("host to GPU", (DeviceId::HOST, gpu(0))));
        cases.push(through("GPU to host", (gpu(0), DeviceId::HOST)));
    }
    if gpus > 2 {
        let ring: Vec<_> = (0..gpus).map(|i| (gpu(i), gpu((i + 1) % gpus))).collect();
        cases.push(plain("ring, direct", ring.clone()));
        cases.push(case("ring", ring));
        let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (gpu(from), gpu(to))));
        cases.push(case("all to all", pairs.filter(|(from, to)| from != to).collect()));
    }
    cases
}

pub fn run(context: &Context) -> Result<Vec<Checked>, Box<dyn Error>> {
    let machine = context.machine();
    let sizes: &[u64] =
        if context.backend().is_virtual() { &[1 << 20, 4 << 20] } else { &[1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30] };
    let mut checked: Vec<Checked> = Vec::new();
    let joined = |&(from, to): &(DeviceId, DeviceId)| machine.contains(from) && machine.contains(to) && machine.route(from, to).is_some();
    // If the topology has no route for one of the copies of a case, no time can be predicted. Such a case is left out.
    let (cases, left_out): (Vec<Case>, Vec<Case>) = cases(machine.gpu_count()).into_iter().partition(|case| case.copies.iter().all(joined));
    for case in left_out {
        eprintln!("{}: skipped, not all of its copies have a direct route", case.name);
    }
    let uses_host = cases.iter().flat_map(|case| &case.copies).any(|copy| copy.0.is_host() || copy.1.is_host());
    let host = if uses_host { Some(Memory::of_host(context, sizes)?) } else { None };
    for turn in 0..TURNS {
        eprintln!("comparing predictions with measurements: round {} of {TURNS}", turn + 1);
        let mut row = 0;
        for case in &cases {
            let on_busiest =
                machine.devices().map(|device| case.copies.iter().filter(|copy| copy.0 == device || copy.1 == device).count()).max();
            let most = (MOST_MEMORY / on_busiest.unwrap_or(1).max(1) as u64).min(host.as_ref().map_or(u64::MAX, |host| host.1));
            let sizes: Vec<u64> = sizes.iter().copied().filter(|bytes| *bytes <= most).collect();
            let Some(&largest) = sizes.last() else { continue };
            let at_host = host.as_ref().map_or(0, |host| host.0.addresses[turn]);
            let mut memory = Memory::new(context);
            let transfers = memory.transfers(at_host, &case.copies, largest)?;
            for bytes in sizes {
                let (plan, seconds) =
                    measure(context, case, &transfers, bytes).map_err(|error| format!("{}, {}: {error}", case.name, size(bytes)))?;
                match checked.get_mut(row) {
                    Some(known) => known.rounds.push(seconds),
                    None => checked.push(Checked {
                        case: case.name.clone(),
                        bytes,
                        paths: plan.paths(),
                        predicted: plan.planned().predicted,
                        rounds: vec![seconds],
                        plan: paths(plan.planned()),
                    }),
                }
                row += 1;
            }
        }
    }
    Ok(checked)
}

/// Measures a case at one size. Returns its plan, and the time of each execution in seconds.
fn measure(context: &Context, case: &Case, transfers: &[Transfer], bytes: u64) -> Result<(Arc<Bound>, Vec<f64>), Box<dyn Error>> {
    let options = PlanOptions { max_paths: case.max_paths, host_path: case.host_path, adapt: Some(false), ..PlanOptions::default() };
    let (from, to) = case.copies[0];
    let transfers: Vec<Transfer> = transfers.iter().map(|transfer| Transfer { bytes, ..*transfer }).collect();
    let plan = context.plan(&transfers, &options)?;
    let stream = context.create_stream(if from.is_host() { to } else { from })?;
    let mut seconds = Vec::with_capacity(ROUNDS);
    for round in 0..WARM_UP + ROUNDS {
        let start = Instant::now();
        plan.execute(stream)?.wait()?;
        if round >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    context.destroy_stream(stream)?;
    Ok((plan, seconds))
}

/// Returns the median of an odd number of times.
fn middle(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Returns a JSON description of every path of a plan: its route, bytes and number of chunks.
fn paths(plan: &Plan) -> Value {
    let path = |shape: &Shape, path: &PathPlan| {
        let via = path.via.map(|via| format!("{via}>")).unwrap_or_default();
        json!([format!("{}>{via}{}", shape.src_device, shape.dst_device), path.bytes, path.chunks])
    };
    plan.transfers.iter().flat_map(|transfer| transfer.paths.iter().map(move |one| path(&transfer.shape, one))).collect()
}

/// Allocations of a context that are freed when the value is dropped.
struct Memory<'a> {
    context: &'a Context,
    addresses: Vec<u64>,
}

impl<'a> Memory<'a> {
    fn new(context: &'a Context) -> Memory<'a> {
        Memory { context, addresses: Vec::new() }
    }

    /// Allocates one buffer of host memory for each pass. Returns the buffers, and the size of each in bytes, which is the largest of
    /// `sizes` for which there is enough memory. All buffers exist at the same time. If one were freed before the next is allocated, the
    /// next would consist of the same pages, which may be slower than others.
    fn of_host(context: &'a Context, sizes: &[u64]) -> Result<(Memory<'a>, u64), Box<dyn Error>> {
        let mut last = None;
        for &bytes in sizes.iter().rev() {
            let mut memory = Memory::new(context);
            match (0..TURNS).try_for_each(|_| memory.allocate(DeviceId::HOST, bytes).map(drop)) {
                Ok(()) => {
                    last.into_iter().for_each(|error| eprintln!("sizes above {} are not checked: {error}", size(bytes)));
                    return Ok((memory, bytes));
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| "no size to check".into()))
    }

    fn allocate(&mut self, device: DeviceId, bytes: u64) -> Result<u64, Box<dyn Error>> {
        let address = self.context.allocate(device, bytes)?;
        self.addresses.push(address);
        Ok(address)
    }

    /// Returns the transfers of a case for the given copies. GPU memory is allocated here, and host memory is at the address `host`. No
    /// case has more than one copy from or to host memory.
    fn transfers(&mut self, host: u64, copies: &[(DeviceId, DeviceId)], bytes: u64) -> Result<Vec<Transfer>, Box<dyn Error>> {
        let mut end = |device: DeviceId| if device.is_host() { Ok(host) } else { self.allocate(device, bytes) };
        copies
            .iter()
            .map(|&(src_device, dst_device)| Ok(Transfer { src: end(src_device)?, src_device, dst: end(dst_device)?, dst_device, bytes }))
            .collect()
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        for &address in &self.addresses {
            if let Err(error) = self.context.free(address) {
                log::warn!("could not free a buffer of the check: {error}");
            }
        }
    }
}

/// Summarises results: returns their number, the median and the largest absolute error, and the result with the largest error. Returns
/// `None` if there are no results.
fn summary<'a>(checked: impl Iterator<Item = &'a Checked>) -> Option<(usize, f64, f64, &'a Checked)> {
    let mut sorted: Vec<&Checked> = checked.collect();
    sorted.sort_by(|a, b| a.error().abs().total_cmp(&b.error().abs()));
    let worst = *sorted.last()?;
    let middle = |index: usize| sorted[index].error().abs();
    let median = (middle((sorted.len() - 1) / 2) + middle(sorted.len() / 2)) / 2.0;
    Some((sorted.len(), median, worst.error().abs(), worst))
}

pub fn table(checked: &[Checked]) -> String {
    let mut text = String::from(
        "predicted and measured time of plans, us; error above 0: the prediction is too long; spread: difference between the medians of \
         the rounds\n\n",
    );
    text +=
        &format!("{:<24} {:>8} {:>5} {:>11} {:>11} {:>8} {:>10}\n", "case", "size", "paths", "predicted", "measured", "error", "spread");
    for row in checked {
        let Checked { case, bytes, paths, predicted, .. } = row;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{case:<24} {:>8} {paths:>5} {:>11.1} {:>11.1} {:>+7.1} % {:>8.1} %",
            size(*bytes),
            predicted * 1e6,
            row.measured() * 1e6,
            100.0 * row.error(),
            100.0 * row.spread()
        );
    }
    let all = summary(checked.iter()).map(|found| ("all", found));
    let large = summary(checked.iter().filter(|row| row.bytes >= LARGE)).map(|found| ("16 MiB and more", found));
    text.push('\n');
    for (what, (count, median, worst, at)) in all.into_iter().chain(large) {
        let _ = writeln!(
            text,
            "{what}: {count} plans, median error {:.1} % (goal {:.0}), worst {:.1} % (goal {:.0} at 16 MiB and more): {} {}",
            100.0 * median,
            100.0 * GOALS[0],
            100.0 * worst,
            100.0 * GOALS[1],
            at.case,
            size(at.bytes)
        );
    }
    text
}

pub fn to_json(checked: &[Checked]) -> Value {
    let summary = |found: Option<(usize, f64, f64, &Checked)>| {
        found.map(|(count, median, worst, _)| json!({ "count": count, "median": median, "worst": worst }))
    };
    json!({
        "plans": checked.iter().map(|row| json!({
            "case": row.case, "bytes": row.bytes, "paths": row.paths, "predicted": row.predicted, "measured": row.measured(), "error": row.error(),
            "spread": row.spread(), "seconds": row.rounds, "plan": row.plan,
        })).collect::<Vec<_>>(),
        "all": summary(summary_of(checked, 0)),
        "large": summary(summary_of(checked, LARGE)),
    })
}

fn summary_of(checked: &[Checked], least: u64) -> Option<(usize, f64, f64, &Checked)> {
    summary(checked.iter().filter(|row| row.bytes >= least))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(bytes: u64, predicted: f64) -> Checked {
        Checked { case: "direct".into(), bytes, paths: 1, predicted, rounds: vec![vec![1.0]; TURNS], plan: Value::Null }
    }

    #[test]
    fn the_summary_tells_small_from_large() {
        let rows = [row(1 << 20, 1.5), row(16 << 20, 0.9), row(64 << 20, 1.02)];
        let (count, median, worst, at) = summary_of(&rows, 0).expect("rows");
        assert!(count == 3 && (median - 0.1).abs() < 1e-9 && (worst - 0.5).abs() < 1e-9 && at.bytes == 1 << 20);
        let (count, median, worst, _) = summary_of(&rows, LARGE).expect("rows");
        assert!(count == 2 && (median - 0.06).abs() < 1e-9 && (worst - 0.1).abs() < 1e-9);
        assert!(summary_of(&rows, 1 << 40).is_none());
        let text = table(&rows);
        assert!(text.contains("+50.0 %") && text.contains("-10.0 %"), "{text}");
    }

    #[test]
    fn the_median_of_the_turns_counts_and_how_far_they_are_apart_is_told() {
        let rounds = vec![vec![3.0, 1.0, 2.0], vec![8.0, 9.0, 7.0], vec![4.0, 4.0, 40.0]];
        let row = Checked { rounds, ..row(LARGE, 5.0) };
        assert_eq!((row.turns(), row.measured(), row.spread()), (vec![2.0, 8.0, 4.0], 4.0, 1.5));
        let text = table(&[row]);
        assert!(text.contains("+25.0 %") && text.contains("150.0 %"), "{text}");
    }

    #[test]
    fn cases_need_the_gpus_that_they_name() {
        for gpus in [1, 2, 3, 8] {
            let cases = cases(gpus);
            assert!(cases.iter().flat_map(|case| &case.copies).all(|(from, to)| from != to && from.0 < gpus as i32 && to.0 < gpus as i32));
            assert_eq!(cases.iter().filter(|case| case.name.starts_with("host to GPU")).count(), gpus as usize);
        }
    }
}
