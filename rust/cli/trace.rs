//! Implements `mpgpu trace`, which shows the timeline of one execution of a plan, simulated or measured.

use crate::arguments::{Failure, backend, write_file};
use crate::draw;
use crate::plan::Request;
use crate::text::{print_json, table};
use clap::Args;
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{self as context, BackendChoice, Config, Context, ContextOptions, PlanOptions};
use mpgpu_core::model::simulate::{Executor, Scenario};
use mpgpu_core::model::timeline::{Arrow, Span, Timeline, TimelineLane};
use mpgpu_core::plan::{OpPaths, Options, Plan, Shape, plan};
use mpgpu_core::topology::Machine;
use mpgpu_core::units::{size, time};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Number of untimed executions before the traced execution. They are needed because the first copies of a process, and the first copies
/// between two GPUs, are slow.
const WARM_UP: usize = 3;

#[derive(Args)]
pub struct TraceArguments {
    #[command(flatten)]
    pub what: Request,
    /// Execute the plan on this machine and take timestamps, instead of simulating it
    #[arg(long)]
    pub measure: bool,
    /// Backend to measure on; by default the value of MPGPU_BACKEND, or CUDA if there are GPUs
    #[arg(long, value_parser = backend(), requires = "measure")]
    pub backend: Option<BackendChoice>,
    /// Write the timeline to this file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Write a drawing (SVG) of the timeline to this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Omit the arrows between operations from the drawing
    #[arg(long, requires = "svg")]
    pub no_arrows: bool,
    /// Print JSON: the plan, and its lanes (internal streams), operations and dependencies, in bytes and seconds
    #[arg(long)]
    pub json: bool,
}

/// One execution of a plan, simulated or measured, with its timeline.
struct Run {
    machine: Machine,
    plan: Plan,
    timeline: Timeline,
    /// Uncertainty in seconds when times of two devices are compared; `None` for a simulated execution.
    precision: Option<f64>,
    /// Remarks on the timeline, for the user.
    notes: Vec<String>,
    /// Path of each copy: the result of [`Plan::paths_of_copies`].
    paths: Vec<OpPaths>,
    /// Time in seconds that plain copies of the same transfers take. `None` if the drawing does not compare with them.
    plain: Option<f64>,
}

/// Runs the subcommand and returns the text for standard output.
pub fn run(arguments: &TraceArguments) -> Result<String, Failure> {
    let run = if arguments.measure { measure(arguments)? } else { simulate(arguments)? };
    let path = |span: &Span| run.path(span);
    if let Some(file) = &arguments.svg {
        write_file(
            file,
            &draw::gantt(&run.timeline, path, &draw::Chart { notes: &run.notes, arrows: !arguments.no_arrows, plain: run.plain }),
        )?;
    }
    if let Some(file) = &arguments.perfetto {
        write_file(file, &format!("{}\n", draw::perfetto(&run.timeline, path)))?;
    }
    if arguments.json {
        print_json(&run)?;
        return Ok(String::new());
    }
    Ok(run.describe())
}

fn simulate(arguments: &TraceArguments) -> Result<Run, Failure> {
    let (machine, plan) = arguments.what.plan()?;
    let executor = Executor::of(plan.executor);
    let batch = arguments.what.batch();
    let mut timeline = simulated(&machine, &plan, &batch)?;
    let plain = arguments.svg.as_ref().and_then(|_| simulated_plain(&machine, &plan.options, &batch));
    timeline.name = title(arguments, &machine);
    let issued = match executor {
        Executor::Streams => "issued on streams, one by one",
        Executor::Graph | Executor::FirstGraph => "launched as one graph",
    };
    let notes = vec![format!("{} on {}; {issued}.", summary(&plan), machine.topology().name)];
    Ok(Run { paths: plan.paths_of_copies(), plan, timeline, precision: None, notes, machine, plain })
}

/// Simulates one execution of a plan and returns its timeline.
fn simulated(machine: &Machine, plan: &Plan, batch: &[Shape]) -> Result<Timeline, Failure> {
    let mut scenario = Scenario::new(machine, plan.options.staging_bytes);
    let bound = scenario.bind(&plan.program, batch)?;
    scenario.execute(bound, Executor::of(plan.executor), 0);
    Ok(scenario.run().timeline)
}

/// Simulates the transfers with one path for each transfer, and returns the time in seconds. Returns `None` if one of the transfers has no
/// route for a single path.
fn simulated_plain(machine: &Machine, options: &Options, batch: &[Shape]) -> Option<f64> {
    let plan = plan(machine, batch, &Options { max_paths: 1, ..*options }).ok()?;
    Some(draw::last_copy(&simulated(machine, &plan, batch).ok()?))
}

fn measure(arguments: &TraceArguments) -> Result<Run, Failure> {
    let options = ContextOptions { backend: arguments.backend, topology: arguments.what.topology.clone(), ..ContextOptions::default() };
    // CPU threads make no copies here, because the operations of such copies cannot be timed one by one.
    let config = Config { host_threads: 0, ..Config::from_environment()? };
    let context = Context::open(&options, config)?;
    // Pageable host memory, if the user requested it. It must stay allocated until the execution has finished.
    let mut ordinary: Vec<Vec<u8>> = Vec::new();
    let mut allocated = Vec::new();
    let mut allocate = |device: mpgpu_core::topology::DeviceId, bytes: u64| -> Result<u64, Failure> {
        if !(arguments.what.pageable && device.is_host()) {
            let address = context.allocate(device, bytes)?;
            allocated.push(address);
            return Ok(address);
        }
        let mut memory = vec![0; usize::try_from(bytes)?];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        ordinary.push(memory);
        Ok(address)
    };
    let mut transfers: Vec<context::Transfer> = Vec::new();
    for (at, transfer) in arguments.what.transfers.iter().enumerate() {
        let of = arguments.what.source_of(at);
        let src = if of < at { transfers[of].src } else { allocate(transfer.src, transfer.bytes)? };
        let dst = allocate(transfer.dst, transfer.bytes)?;
        transfers.push(context::Transfer { dst, dst_device: transfer.dst, src, src_device: transfer.src, bytes: transfer.bytes });
    }
    let plan = context.plan(&transfers, &arguments.what.plan_options())?;
    let first = arguments.what.transfers.first().map_or(mpgpu_core::topology::DeviceId::gpu(0), |transfer| transfer.src);
    let stream = context.create_stream(first)?;
    let mut trace = traced(&plan, stream)?;
    let plain = match measured_plain(arguments, &context, &transfers) {
        Some(plain) => Some(draw::last_copy(&traced(&plain, stream)?.timeline)),
        None => None,
    };
    drop(ordinary);
    allocated.into_iter().try_for_each(|address| context.free(address))?;
    context.destroy_stream(stream)?;
    trace.timeline.name = title(arguments, context.machine());
    let backend = context.backend().name();
    let mut notes = vec![format!("{} on the {backend} backend, topology {}.", summary(plan.planned()), context.machine().topology().name)];
    if backend == "host" {
        notes.push("Virtual devices on CPU threads: measured times, but not of GPUs.".into());
    } else {
        notes.push("Device timestamps; the plan ran on streams, because a graph is not traced operation by operation.".into());
        notes.push(format!("Clocks of different GPUs are aligned to within {}.", time(trace.precision)));
    }
    let planned = plan.planned().clone();
    let paths = planned.paths_of_copies();
    Ok(Run {
        machine: context.machine().clone(),
        plan: planned,
        timeline: trace.timeline,
        precision: Some(trace.precision),
        notes,
        paths,
        plain,
    })
}

/// Makes a plan with one path for each transfer, if the drawing compares with such a plan. Returns `None` if it does not, or if one of the
/// transfers has no route for a single path.
fn measured_plain(arguments: &TraceArguments, context: &Context, transfers: &[context::Transfer]) -> Option<Arc<context::Plan>> {
    let options = PlanOptions { max_paths: Some(1), ..arguments.what.plan_options() };
    arguments.svg.as_ref().and_then(|_| context.plan(transfers, &options).ok())
}

/// Traces an execution after [`WARM_UP`] other traced executions. Tracing runs on streams even if the plan otherwise runs as a graph, and
/// these streams are created on first use.
fn traced(plan: &context::Plan, stream: StreamHandle) -> Result<context::Trace, Failure> {
    for _ in 0..WARM_UP {
        plan.trace(stream)?;
    }
    Ok(plan.trace(stream)?)
}

/// Returns the title of the drawing: the machine and the transfers.
fn title(arguments: &TraceArguments, machine: &Machine) -> String {
    let transfers = &arguments.what.transfers;
    let one = |transfer: &crate::arguments::Transfer| format!("{} to {}, {}", transfer.src, transfer.dst, size(transfer.bytes));
    let what = match transfers.as_slice() {
        [only] => one(only),
        many => format!("{} transfers, {}", many.len(), size(many.iter().map(|transfer| transfer.bytes).fold(0, u64::saturating_add))),
    };
    format!("{}: {what}", machine.topology().name)
}

fn summary(plan: &Plan) -> String {
    let paths: usize = plan.transfers.iter().map(|transfer| transfer.paths.len()).sum();
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    format!("{} on {}, {}", plural(plan.program.ops.len(), "operation"), plural(plan.program.lanes.len(), "lane"), plural(paths, "path"))
}

impl Run {
    /// Returns the name of the path to which an operation belongs, for example `gpu0>gpu5 via gpu1, gpu4`.
    fn path(&self, span: &Span) -> Option<String> {
        let paths = self.paths.get(span.op? as usize)?;
        let &[only] = &paths[..] else { return Some(format!("{} transfers in one call", paths.len())) };
        let (transfer, path) = only?;
        let planned = &self.plan.transfers[transfer as usize];
        let vias: Vec<String> = planned.paths[path].vias().map(|via| via.to_string()).collect();
        let way = if vias.is_empty() { "direct".into() } else { format!("via {}", vias.join(", ")) };
        Some(format!("{}>{} {way}", planned.shape.src_device, planned.shape.dst_device))
    }

    /// Returns the time in seconds from the start of the first operation to the end of the last operation.
    fn seconds(&self) -> f64 {
        draw::last_copy(&self.timeline)
    }

    fn describe(&self) -> String {
        let nature = if self.timeline.modelled { "simulated" } else { "measured" };
        let mut text = format!("{}, {nature}\n", self.timeline.name);
        for note in &self.notes {
            text += &format!("  {note}\n");
        }
        let bytes: u64 = self.plan.transfers.iter().map(|transfer| transfer.shape.bytes).sum();
        let seconds = self.seconds();
        let rate = if seconds > 0.0 { format!(" ({:.1} GB/s)", bytes as f64 / seconds / 1e9) } else { String::new() };
        text += &format!("last byte after {}{rate}; the planner's model expects {}\n\n", time(seconds), time(self.plan.predicted));
        let heading = ["lane", "operations", "bytes", "begin", "end", "busy", "GB/s while busy"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for (number, lane) in self.timeline.lanes.iter().enumerate() {
            let spans = || self.timeline.spans.iter().filter(|span| span.lane == number);
            let busy: f64 = spans().map(|span| span.end - span.begin).sum();
            let bytes: u64 = spans().map(|span| span.bytes).sum();
            let begin = spans().map(|span| span.begin).fold(f64::INFINITY, f64::min);
            let end = spans().map(|span| span.end).fold(0.0, f64::max);
            if spans().next().is_none() {
                continue;
            }
            let part = if seconds > 0.0 { format!("{:.0} %", 100.0 * busy / seconds) } else { String::new() };
            let moved = if bytes > 0 { size(bytes) } else { "-".into() };
            let rate = if bytes > 0 && busy > 0.0 { format!("{:.1}", bytes as f64 / busy / 1e9) } else { "-".into() };
            rows.push(vec![lane.name.clone(), spans().count().to_string(), moved, time(begin), time(end), part, rate]);
        }
        text + &table(&rows)
    }
}

impl Serialize for Run {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let timeline = &self.timeline;
        let lane = |lane: &TimelineLane| json!({"name": lane.name, "device": lane.device.0});
        let span = |span: &Span| {
            json!({
                "lane": span.lane, "operation": span.op, "name": span.name, "path": self.path(span),
                "begin_seconds": span.begin, "end_seconds": span.end, "bytes": span.bytes,
            })
        };
        let arrow = |arrow: &Arrow| json!({"from_span": arrow.from, "to_span": arrow.to});
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &timeline.name)?;
        map.serialize_entry("modelled", &timeline.modelled)?;
        map.serialize_entry("precision_seconds", &self.precision)?;
        map.serialize_entry("notes", &self.notes)?;
        map.serialize_entry("last_byte_seconds", &self.seconds())?;
        map.serialize_entry("lanes", &Items(&timeline.lanes, lane))?;
        map.serialize_entry("spans", &Items(&timeline.spans, span))?;
        map.serialize_entry("arrows", &Items(&timeline.arrows, arrow))?;
        map.serialize_entry("plan", &self.plan.json(&self.machine))?;
        map.end()
    }
}

/// List whose items are converted to JSON one at a time while they are written.
struct Items<'a, T, F>(&'a [T], F);

impl<T, F: Fn(&T) -> Value> Serialize for Items<'_, T, F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(&self.1))
    }
}
