//! Creates the timeline of a plan's operations.

use super::planned::Plan;
use crate::model::timeline::{Arrow, Span, Timeline, TimelineLane};
use crate::program::{Copy, Mechanism, Op, Place};
use crate::topology::DeviceId;
use crate::units::size;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Path of each copy of an operation: the index of a transfer and the index of one of its paths. `None` if the path is unknown.
pub type OpPaths = SmallVec<[Option<(u32, usize)>; 1]>;

impl Plan {
    /// Returns the timeline of one run of the plan. `times` contains the start and end of each operation of the program, in seconds. The
    /// rows of the timeline correspond to the program's internal streams, and the bars to its operations.
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

    /// Returns the paths of the copies of each operation. Staged data belongs to the path on which it first reaches a destination.
    pub fn paths_of_copies(&self) -> Vec<OpPaths> {
        // The loop runs backwards, so that the path of the data in a slot is known before the copy that fills the slot.
        let mut of_slots: BTreeMap<(u32, u32), (u32, usize)> = BTreeMap::new();
        let mut path_of = |copy: &Copy| {
            let path = match copy.to {
                Place::Destination { transfer, offset } => {
                    let paths = &self.transfers[transfer as usize].paths;
                    paths.iter().position(|path| (path.offset..path.offset + path.bytes).contains(&offset)).map(|path| (transfer, path))
                }
                Place::Slot { ring, slot } => of_slots.get(&(ring.0, slot)).copied(),
                Place::Source { .. } => None,
            };
            if let (Place::Slot { ring, slot }, Some(path)) = (copy.from, path) {
                of_slots.insert((ring.0, slot), path);
            }
            path
        };
        let mut paths = Vec::with_capacity(self.program.ops.len());
        paths.extend(self.program.ops.iter().rev().map(|op| op.copies.iter().map(&mut path_of).collect()));
        paths.reverse();
        paths
    }

    /// Returns the source device and destination device of each copy of an operation.
    fn ways(&self, op: &Op) -> impl Iterator<Item = (DeviceId, DeviceId)> {
        let device = |place: Place| match place {
            Place::Source { transfer, .. } => self.transfers[transfer as usize].shape.src_device,
            Place::Destination { transfer, .. } => self.transfers[transfer as usize].shape.dst_device,
            Place::Slot { ring, .. } => self.program.rings[ring.0 as usize].device,
        };
        op.copies.iter().map(move |copy| (device(copy.from), device(copy.to)))
    }
}
