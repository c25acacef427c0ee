//! Divides a batch into parts that share no resource, and joins the plans of the parts to one plan. A transfer then does not change the
//! plan of transfers with which it shares no resource.

use super::canonical::renamed;
use super::planned::{Plan, TransferPlan};
use crate::program::{LaneId, Op, OpId, Place, Program, RingId, Shape};
use crate::topology::Machine;

/// Divides a batch into parts whose direct copies share no resource. Returns the indices of the transfers of each part. Returns a single
/// part if a transfer has no direct route.
pub(super) fn parts(machine: &Machine, batch: &[Shape]) -> Vec<Vec<u32>> {
    fn root(of: &mut [usize], mut at: usize) -> usize {
        while of[at] != at {
            of[at] = of[of[at]];
            at = of[at];
        }
        at
    }
    let mut of: Vec<usize> = (0..machine.resources().len()).collect();
    let mut first = Vec::with_capacity(batch.len());
    for shape in batch {
        let Some(route) = machine.route(shape.src_device, shape.dst_device) else { return vec![(0..batch.len() as u32).collect()] };
        let own = route.resources.first().map(|resource| resource.0 as usize);
        for resource in route.resources.iter().skip(1) {
            let (a, b) = (root(&mut of, route.resources[0].0 as usize), root(&mut of, resource.0 as usize));
            of[b] = a;
        }
        first.push(own);
    }
    let mut parts: Vec<(Option<usize>, Vec<u32>)> = Vec::new();
    for (transfer, own) in (0..).zip(first) {
        let own = own.map(|own| root(&mut of, own));
        match parts.iter_mut().find(|part| part.0 == own) {
            Some(part) => part.1.push(transfer),
            None => parts.push((own, vec![transfer])),
        }
    }
    parts.into_iter().map(|part| part.1).collect()
}

/// Joins the plans of the parts of a batch. Returns the common program, and the plan of each transfer in the order of the batch. Operations
/// of one part keep their order. Operations of different parts alternate in proportion to their numbers, so that all parts progress
/// together.
pub(super) fn joined(batch: &[Shape], parts: &[Vec<u32>], plans: &[Plan]) -> (Program, Vec<TransferPlan>) {
    let mut program = Program { transfers: batch.iter().map(|shape| shape.bytes).collect(), ..Program::default() };
    if plans.iter().any(|plan| !plan.program.sources.is_empty()) {
        program.sources = batch.iter().map(|shape| shape.source).collect();
    }
    let mut transfers: Vec<Option<TransferPlan>> = vec![None; batch.len()];
    // For each operation: its position in the part's program as a fraction of the program's length, the part, and its index in the part.
    let mut order: Vec<(f64, usize, usize)> = Vec::new();
    let mut own: Vec<Vec<Op>> = Vec::new();
    for (at, (part, plan)) in parts.iter().zip(plans).enumerate() {
        let (lanes, rings) = (program.lanes.len() as u32, program.rings.len() as u32);
        let Program { lanes: own_lanes, rings: own_rings, mut ops, .. } = renamed(Program::clone(&plan.program), part);
        program.lanes.extend(own_lanes);
        program.rings.extend(own_rings);
        order.extend((0..ops.len()).map(|op| (op as f64 / ops.len() as f64, at, op)));
        for op in &mut ops {
            op.lane = LaneId(op.lane.0 + lanes);
            for place in op.copies.iter_mut().flat_map(|copy| [&mut copy.from, &mut copy.to]) {
                if let Place::Slot { ring, .. } = place {
                    *ring = RingId(ring.0 + rings);
                }
            }
        }
        own.push(ops);
        for (own, &transfer) in plan.transfers.iter().zip(part) {
            transfers[transfer as usize] = Some(own.clone());
        }
    }
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut numbers: Vec<Vec<OpId>> = own.iter().map(|ops| vec![OpId(0); ops.len()]).collect();
    for (number, &(_, part, op)) in (0..).zip(&order) {
        numbers[part][op] = OpId(number);
        let mut op = own[part][op].clone();
        op.after.iter_mut().for_each(|before| *before = numbers[part][before.0 as usize]);
        program.ops.push(op);
    }
    (program, transfers.into_iter().flatten().collect())
}
