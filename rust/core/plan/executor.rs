//! Chooses the executor of a program: streams or a graph.

use super::options::Options;
use crate::program::{Engine, Mechanism, Op, Program, Shape};
use crate::topology::MemoryKind;
use crate::topology::{Costs, Machine};

/// Seconds of the issuing thread for one more operation of a plan with staged paths: see [`executor`].
pub(super) fn issue(options: &Options, costs: &Costs) -> f64 {
    if matches!(options.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
}

/// Returns the executor of a program. If the caller leaves it open, the one that takes the issuing thread less time: a graph or streams.
///
/// Streams take `issue` for each copy and `lane` for each lane beyond the first, which is the caller's own stream. A graph takes
/// `graph` for its first copy and `graph_node` for each further one. What else was read:
///
/// - One lane of copies stays on the stream, where it ends as soon (readings, graphs) and nothing need be instantiated.
/// - A kernel alone is a graph: the GPU has its arguments already, which are up to 4 KB (two H200, 52 messages of 24 KB and less: 10.0 us, of
///   which 2.0 to issue, and 13.7 and 5.2 in a stream).
/// - Plain copies that follow each other in a lane stay on streams: a graph leaves some 12 us between two of them, a stream 4 (all-to-all
///   and two copies of 16 MiB on H200).
/// - Where one GPU may work on all lanes its streams need no signal between GPUs, and a graph's nodes do: both directions of 1, 4 and 16 MiB
///   took 14.2, 22.5 and 56 us, as a graph 16.2, 25 to 30 and 61 to 63 (two H200).
/// - Staged programs go as graphs whatever they take to issue: end to end that is 0.5 to 1.5 % faster from 32 MiB to 1 GiB
///   (two H200).
/// - Memory that the driver stages by itself is none for a graph.
pub(super) fn executor(machine: &Machine, batch: &[Shape], options: &Options, program: &Program) -> Engine {
    let costs = machine.costs();
    let pageable = |shape: &Shape| shape.bytes > 0 && [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
    if options.engine != Engine::Auto {
        return options.engine;
    }
    if batch.iter().any(pageable) {
        return Engine::Stream;
    }
    if program.lanes.len() < 2 {
        return if program.ops.iter().any(|op| op.mechanism == Mechanism::Kernel) { Engine::Graph } else { Engine::Stream };
    }
    if program.ops.iter().any(|op| !op.after.is_empty()) {
        return Engine::Graph;
    }
    let mut copies = vec![0_u32; program.lanes.len()];
    program.ops.iter().filter(|op| op.mechanism == Mechanism::Copy).for_each(|op| copies[op.lane.0 as usize] += 1);
    if copies.iter().any(|copies| *copies > 1) {
        return Engine::Stream;
    }
    let on_stream = |op: &Op| match op.mechanism {
        Mechanism::Copy | Mechanism::Thread => costs.issue,
        Mechanism::Batch => costs.issue + costs.batch_segment * op.copies.len() as f64,
        Mechanism::Kernel => costs.issue + costs.kernel_segment * op.copies.len() as f64,
    };
    // A graph has no node for a batch of copies: it holds them one by one.
    let nodes = |op: &Op| if op.mechanism == Mechanism::Kernel { 1 } else { op.copies.len() };
    let nodes = program.ops.iter().map(nodes).sum::<usize>();
    let first = &program.lanes[0];
    let meet = first.devices().any(|device| program.lanes.iter().all(|lane| lane.devices().any(|other| other == device)));
    let read = program.lanes.iter().any(|lane| lane.device != first.device);
    // Streams of one GPU need no events of another one, which is the better half of what a lane costs: two copies and their lanes are issued
    // in 6.5 us.
    let (lane, signals) = if meet && read { (costs.fork_join_issue / 2.0, costs.fork_join_gpus) } else { (costs.fork_join_issue, 0.0) };
    let streams = program.ops.iter().map(on_stream).sum::<f64>() + lane * (program.lanes.len() - 1) as f64;
    let graph = costs.graph_launch + costs.graph_node * nodes.saturating_sub(1) as f64 + signals;
    if graph < streams { Engine::Graph } else { Engine::Stream }
}
