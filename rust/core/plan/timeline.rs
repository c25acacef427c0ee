//! The times of a plan's operations, as a timeline.

use super::planned::Plan;
use crate::model::timeline::{Arrow, Span, Timeline, TimelineLane};
use crate::program::{Mechanism, Op, Place, Program};
use crate::topology::DeviceId;
use crate::units::size;

impl Plan {
    /// A timeline of one run: `times` has begin and end of each operation of the program, in seconds. Its lanes and spans are those of the
    /// program.
    pub fn timeline(&self, name: String, modelled: bool, times: &[(f64, f64)]) -> Timeline {
        let program = &*self.program;
        let lanes = program.lanes.iter().enumerate().map(|(number, lane)| {
            let mut ways: Vec<String> = Vec::new();
            for op in program.ops.iter().filter(|op| op.lane.0 as usize == number) {
                for way in self.ways(op).map(|(from, to)| format!("{from}>{to}")) {
                    if !ways.contains(&way) {
                        ways.push(way);
                    }
                }
            }
            let ways = if ways.len() > 2 { format!("{} and {} more", ways[0], ways.len() - 1) } else { ways.join(", ") };
            TimelineLane { name: format!("{} lane {number}: {ways}", lane.device), device: lane.device }
        });
        let spans = (0..).zip(&program.ops).zip(times).map(|((index, op), &(begin, end))| {
            let bytes = op.copies.iter().map(|copy| copy.bytes).sum();
            let what = match (op.mechanism, self.ways(op).next()) {
                (Mechanism::Copy, Some((from, to))) => format!("{from}>{to}"),
                (Mechanism::Batch, _) => format!("batch of {}", op.copies.len()),
                (Mechanism::Thread, _) => "thread".into(),
                (Mechanism::Kernel, _) => format!("kernel, {} copies", op.copies.len()),
                (Mechanism::Copy, None) => "nothing".into(),
            };
            Span { lane: op.lane.0 as usize, op: Some(index), name: format!("{what} {}", size(bytes)), begin, end, bytes }
        });
        let arrows = program.ops.iter().enumerate().take(times.len()).flat_map(|(to, op)| {
            let others = op.after.iter().filter(move |from| program.ops[from.0 as usize].lane != op.lane);
            others.map(move |from| Arrow { from: from.0 as usize, to })
        });
        Timeline { name, modelled, lanes: lanes.collect(), spans: spans.collect(), arrows: arrows.collect() }
    }

    /// The transfers that an operation serves, each with the device that its bytes are staged on: its path.
    pub fn paths_of(&self, op: &Op) -> impl Iterator<Item = (u32, Option<DeviceId>)> + use<> {
        let paths: Vec<_> = op.copies.iter().map(|copy| path(&self.program, copy.from, copy.to)).collect();
        paths.into_iter()
    }

    /// Where each copy of an operation begins and ends.
    fn ways(&self, op: &Op) -> impl Iterator<Item = (DeviceId, DeviceId)> {
        let device = |place: Place| match place {
            Place::Source { transfer, .. } => self.transfers[transfer as usize].shape.src_device,
            Place::Destination { transfer, .. } => self.transfers[transfer as usize].shape.dst_device,
            Place::Slot { ring, .. } => self.program.rings[ring.0 as usize].device,
        };
        op.copies.iter().map(move |copy| (device(copy.from), device(copy.to)))
    }
}

/// A copy has a transfer at one end at least: a chunk rests once on its way.
fn path(program: &Program, from: Place, to: Place) -> (u32, Option<DeviceId>) {
    let mut path = (0, None);
    for place in [from, to] {
        match place {
            Place::Source { transfer, .. } | Place::Destination { transfer, .. } => path.0 = transfer,
            Place::Slot { ring, .. } => path.1 = Some(program.rings[ring.0 as usize].device),
        }
    }
    path
}
