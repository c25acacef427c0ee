//! Chooses how the operations of a program are issued: on streams or as a graph.

use super::options::Options;
use crate::program::{Engine, Mechanism, Op, Program, Shape};
use crate::topology::MemoryKind;
use crate::topology::{Costs, Machine};

/// Returns the time that the issuing thread needs for each further operation of a plan with staged paths, in seconds; see [`executor`].
pub(super) fn issue(options: &Options, costs: &Costs) -> f64 {
    if matches!(options.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
}

/// Returns the executor of a program: the one that the options select, or for [`Engine::Auto`] the one that takes the issuing thread less
/// time.
///
/// Streams take `issue` for each copy and `fork_join_issue` for each lane (internal stream) beyond the first, which is the caller's stream.
/// A graph takes `graph_launch` for its first copy and `graph_node` for each further one. Measurements add these rules:
///
/// - Copies in a single lane stay on the stream: they end as early as in a graph, and nothing has to be instantiated.
/// - A single kernel is issued as a graph, because the kernel's arguments of up to 4 KB are then already on the GPU (two H200, 52 messages
///   of up to 24 KB: 10.0 us in total and 2.0 us to issue, compared with 13.7 and 5.2 us on a stream).
/// - Plain copies that run one after the other in a lane stay on streams: a graph leaves about 12 us between two of them, a stream 4 us
///   (all-to-all, and two copies of 16 MiB, on H200).
/// - If one GPU may issue all lanes, the streams need no signals between GPUs, but the nodes of a graph do: copies in both directions of 1,
///   4 and 16 MiB took 14.2, 22.5 and 56 us on streams, and 16.2, 25 to 30 and 61 to 63 us as a graph (two H200).
/// - Programs with staged paths are issued as graphs in any case, because their total time is 0.5 to 1.5 % shorter from 32 MiB to 1 GiB
///   (two H200).
/// - Programs with pageable memory that the driver stages are issued on streams, because graphs do not support them.
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
    // A graph has no node for a batch of copies, so each copy is a separate node.
    let nodes = |op: &Op| if op.mechanism == Mechanism::Kernel { 1 } else { op.copies.len() };
    let nodes = program.ops.iter().map(nodes).sum::<usize>();
    let first = &program.lanes[0];
    let meet = first.devices().any(|device| program.lanes.iter().all(|lane| lane.devices().any(|other| other == device)));
    let read = program.lanes.iter().any(|lane| lane.device != first.device);
    // Streams of one GPU need no events of other GPUs, which are more than half of the cost of an internal stream: two copies in two
    // internal streams are issued in 6.5 us.
    let (lane, signals) = if meet && read { (costs.fork_join_issue / 2.0, costs.fork_join_gpus) } else { (costs.fork_join_issue, 0.0) };
    let streams = program.ops.iter().map(on_stream).sum::<f64>() + lane * (program.lanes.len() - 1) as f64;
    let graph = costs.graph_launch + costs.graph_node * nodes.saturating_sub(1) as f64 + signals;
    if graph < streams { Engine::Graph } else { Engine::Stream }
}
