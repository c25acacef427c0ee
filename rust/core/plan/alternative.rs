//! Possible plan in which each path has at most one relay: division of a batch's data among paths, program, and times of the paths.

use super::candidates::Reason;
use super::candidates::Rejection;
use super::lower::{Piece, StagedPath, copying_device, lower};
use super::mechanism::{self, Launch};
use super::options::{OPERATION_BYTES, Options, PlanError};
use super::planned::{PathPlan, TransferPlan};
use super::selection::{Assignment, PathShare, Selection};
use crate::headroom::headroom;
use crate::model::Flow;
use crate::program::{Engine, Mechanism, Program, Shape};
use smallvec::SmallVec;
use std::sync::Arc;

/// Possible plan of a batch: division of the data among paths, and operations for the direct paths.
pub(super) struct Alternative {
    pub assignment: Assignment,
    /// Operations that copy the data on direct paths.
    pub launches: Vec<Launch>,
}

impl Alternative {
    /// Creates the alternative of a division of the data. `engine` decides by which mechanisms the parts on direct paths are copied.
    pub fn new(selection: &Selection<'_>, assignment: Assignment, engine: Engine) -> Self {
        let Selection { machine, batch, options, candidates, .. } = selection;
        let options = Options { engine, ..**options };
        let launches = mechanism::launches(machine, batch, &options, candidates, &assignment.shares);
        Alternative { assignment, launches }
    }

    /// Returns the mechanism of each path share (part of a transfer on one path), and the modelled time in seconds at which the path share
    /// would be complete if no other path used its links.
    fn ends(&self, selection: &Selection<'_>) -> Vec<(Mechanism, f64)> {
        let Selection { machine, batch, options, candidates, .. } = selection;
        let (costs, shares) = (machine.costs(), &self.assignment.shares);
        let mut ends = vec![(Mechanism::Copy, 0.0); shares.len()];
        for (issued, head, efficiency) in mechanism::started(machine, batch, candidates, shares, mechanism::issued(&self.launches)) {
            for &at in issued.members {
                let path = issued.path(batch, candidates, &shares[at]);
                let flow = Flow { efficiency, ..Flow::new(path, shares[at].bytes, 1, head) };
                ends[at] = (issued.mechanism, flow.alone(costs));
            }
        }
        // Pipelines are issued after the direct operations, one after the other. Paths that use the same staging ring are one pipeline.
        let each = options.issue(costs);
        let mut pipelines: Vec<Flow> = Vec::with_capacity(self.assignment.rings.len());
        for (at, share) in shares.iter().enumerate() {
            let Some(ring) = share.ring else { continue };
            if ring as usize == pipelines.len() {
                let head = costs.copy + each * (self.launches.len() + 2 * pipelines.len()) as f64;
                pipelines.push(Flow::new(selection.model(share.candidate), 0, 0, head));
            }
            let pipeline = &mut pipelines[ring as usize];
            let chunks = self.assignment.chunks(share);
            *pipeline = Flow::new(pipeline.path, pipeline.bytes + share.bytes, pipeline.chunks.saturating_add(chunks), pipeline.head);
            ends[at].1 = pipeline.alone(costs);
        }
        ends
    }

    /// Returns the program of the alternative. Returns an error if the host has too little memory for its operations.
    pub fn program(&self, selection: &Selection<'_>) -> Result<Program, PlanError> {
        let Selection { machine, batch, .. } = selection;
        let Assignment { shares, rings } = &self.assignment;
        let chunks = shares.iter().map(|share| self.assignment.chunks(share) as usize);
        headroom(chunks.fold(0, |sum: usize, chunks| sum.saturating_add(2 * chunks)), OPERATION_BYTES)?;
        let mut staged: Vec<StagedPath> = Vec::with_capacity(rings.len());
        for share in shares {
            let PathShare { transfer, candidate, offset, bytes, ring, .. } = *share;
            if let (Some(via), Some(ring)) = (selection.candidates[candidate].via, ring) {
                if ring as usize == staged.len() {
                    let Shape { src_device, dst_device, .. } = batch[transfer as usize];
                    let lanes = [copying_device(src_device, via), copying_device(via, dst_device)];
                    staged.push(StagedPath { pieces: SmallVec::new(), lanes, ring: rings[ring as usize] });
                }
                staged[ring as usize].pieces.push(Piece { transfer, offset, bytes });
            }
        }
        let direct: Vec<_> = self.launches.iter().map(|launch| launch.op.clone()).collect();
        let bytes = batch.iter().map(|shape| shape.bytes).collect();
        Ok(lower(bytes, &direct, mechanism::lane_key(machine, batch, &direct), &staged))
    }

    /// Converts the alternative to the plans of all transfers. `closed` contains the reason why each candidate path is excluded; `None` if
    /// it is not excluded.
    pub fn into_transfers(self, mut selection: Selection<'_>, closed: Vec<Option<Reason>>) -> Vec<TransferPlan> {
        let ends = self.ends(&selection);
        selection.closed = closed;
        let Assignment { shares, rings } = &self.assignment;
        let batch = selection.batch;
        let mut transfers: Vec<TransferPlan> = Vec::with_capacity(batch.len());
        let alike = if selection.aggregated { selection.demands.len() } else { 0 };
        let mut left_out = LeftOut { none: Arc::default(), last: vec![None; alike] };
        let mut last_paths: Vec<Arc<Vec<PathPlan>>> = vec![Arc::default(); alike];
        let mut next = shares.iter().zip(&ends).peekable();
        for (transfer, &shape) in (0..).zip(batch) {
            let mut paths: SmallVec<[PathPlan; 1]> = SmallVec::new();
            let mut used: SmallVec<[usize; 8]> = SmallVec::new();
            while let Some((share, &(mechanism, seconds))) = next.next_if(|(share, _)| share.transfer == transfer) {
                let PathShare { candidate, offset, bytes, ring, .. } = *share;
                let via = selection.candidates[candidate].via;
                used.push(candidate);
                paths.push(PathPlan {
                    earlier: SmallVec::new(),
                    via,
                    offset,
                    bytes,
                    chunks: self.assignment.chunks(share),
                    chunk_bytes: self.assignment.chunk_bytes(share),
                    slots: ring.map_or(0, |ring| rings[ring as usize].slots),
                    mechanism,
                    seconds,
                });
            }
            let last = selection.demand_of[transfer as usize].and_then(|demand| last_paths.get_mut(demand as usize));
            let paths = match last {
                Some(last) if last[..] == paths[..] => last.clone(),
                last => {
                    let paths = Arc::new(paths.into_vec());
                    last.into_iter().for_each(|last| *last = paths.clone());
                    paths
                }
            };
            transfers.push(TransferPlan { shape, paths, rejected: left_out.of(&mut selection, transfer, used) });
        }
        transfers
    }
}

/// List of the paths that a transfer does not use, each with the reason. Equal transfers share the list.
type Rejections = Arc<Vec<Rejection>>;

/// Lists of the unused paths of transfers, created one after the other.
struct LeftOut {
    none: Rejections,
    /// Paths that the previous transfer of each demand (group of similar transfers) used, and the list of paths that were rejected for that
    /// transfer. The next transfer shares the list if it uses the same paths. Only for aggregated batches.
    last: Vec<Option<(SmallVec<[usize; 8]>, Rejections)>>,
}

impl LeftOut {
    /// Returns the list of unused paths of the next transfer, which uses the paths `used`.
    fn of(&mut self, selection: &mut Selection<'_>, transfer: u32, used: SmallVec<[usize; 8]>) -> Rejections {
        let demand = selection.demand_of[transfer as usize].map(|demand| demand as usize);
        let Some(demand) = demand.filter(|_| selection.options.rejected) else { return self.none.clone() };
        if let Some(Some((_, list))) = self.last.get(demand).filter(|last| last.as_ref().is_some_and(|last| last.0 == used)) {
            return list.clone();
        }
        let never = &mut selection.rejected[demand];
        let mut list = if selection.aggregated { never.clone() } else { std::mem::take(never) };
        let unused = selection.of[demand].clone().filter(|i| !used.contains(i));
        let reason = |i: usize| selection.closed[i].clone().unwrap_or(Reason::NoShare);
        list.extend(unused.map(|i| Rejection { via: selection.candidates[i].via, reason: reason(i) }));
        let list = Arc::new(list);
        if selection.aggregated {
            self.last[demand] = Some((used, list.clone()));
        }
        list
    }
}
