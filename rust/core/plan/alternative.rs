//! Plans that the planner compares: division of the data over paths, with operations and modelled times.

use super::candidates::Reason;
use super::candidates::Rejection;
use super::executor;
use super::lower::{Piece, StagedPath, copying_device, lower};
use super::mechanism::{self, Launch};
use super::options::{OPERATION_BYTES, PlanError};
use super::planned::{PathPlan, Plan, TransferPlan};
use super::selection::{Assignment, PathShare, Selection};
use crate::headroom::headroom;
use crate::model::{Flow, Issue, finish};
use crate::program::Mechanism;
use smallvec::SmallVec;
use std::sync::Arc;

/// Possible plan of a batch, with its modelled time.
pub(super) struct Alternative {
    pub assignment: Assignment,
    pub launches: Vec<Launch>,
    /// Mechanism and modelled end in seconds of each path share (part of a transfer on one path).
    ends: Vec<(Mechanism, f64)>,
    /// Modelled time until the whole batch is done, seconds.
    pub seconds: f64,
}

impl Alternative {
    pub fn new(selection: &Selection<'_>, assignment: Assignment) -> Self {
        let Selection { machine, batch, options, candidates, .. } = selection;
        let costs = machine.costs();
        let shares = &assignment.shares;
        let launches = mechanism::launches(machine, batch, options, candidates, shares);
        let flows = mechanism::flows(machine, batch, candidates, shares, mechanism::issued(&launches));
        let mut ends = vec![(Mechanism::Copy, 0.0); shares.len()];
        for (issued, head, efficiency) in mechanism::started(machine, batch, candidates, shares, mechanism::issued(&launches)) {
            for &at in issued.members {
                let path = issued.path(batch, candidates, &shares[at]);
                let flow = Flow { efficiency, ..Flow::new(path, shares[at].bytes, 1, head) };
                ends[at] = (issued.mechanism, flow.alone(costs));
            }
        }
        // Pipelines are issued after the direct operations, one after the other. Paths that use the same staging ring are one pipeline.
        let each = executor::issue(options, costs);
        let mut operations = launches.len();
        let mut pipelines: Vec<Flow> = Vec::with_capacity(assignment.rings.len());
        for (at, share) in shares.iter().enumerate() {
            let Some(ring) = share.ring else { continue };
            if ring as usize == pipelines.len() {
                let head = costs.copy + each * (launches.len() + 2 * pipelines.len()) as f64;
                pipelines.push(Flow::new(selection.model(share.candidate), 0, 0, head));
            }
            let pipeline = &mut pipelines[ring as usize];
            let chunks = assignment.chunks(share);
            *pipeline = Flow::new(pipeline.path, pipeline.bytes + share.bytes, pipeline.chunks.saturating_add(chunks), pipeline.head);
            ends[at].1 = pipeline.alone(costs);
            operations += 2 * chunks as usize;
        }
        let each = if pipelines.is_empty() { costs.issue } else { each };
        let issue = Issue { operations, each, joins_gpus: mechanism::joins(&launches) };
        let seconds = finish(machine, flows.into_iter().chain(pipelines), &issue);
        Alternative { assignment, launches, ends, seconds }
    }

    /// Converts the alternative to a plan with its program. `one_path` is the modelled time with one path for each transfer, in seconds.
    pub fn into_plan(self, mut selection: Selection<'_>, one_path: f64) -> Result<Plan, PlanError> {
        let Selection { machine, batch, options, .. } = selection;
        let Assignment { shares, rings } = &self.assignment;
        let chunks = shares.iter().map(|share| self.assignment.chunks(share) as usize);
        headroom(chunks.fold(0, |sum: usize, chunks| sum.saturating_add(2 * chunks)), OPERATION_BYTES)?;
        let mut transfers: Vec<TransferPlan> = Vec::with_capacity(batch.len());
        let mut staged: Vec<StagedPath> = Vec::with_capacity(rings.len());
        let alike = if selection.aggregated { selection.demands.len() } else { 0 };
        let mut left_out = LeftOut { none: Arc::default(), last: vec![None; alike] };
        let mut last_paths: Vec<Arc<Vec<PathPlan>>> = vec![Arc::default(); alike];
        let mut next = shares.iter().zip(&self.ends).peekable();
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
                if let (Some(via), Some(ring)) = (via, ring) {
                    if ring as usize == staged.len() {
                        let lanes = [copying_device(shape.src_device, via), copying_device(via, shape.dst_device)];
                        staged.push(StagedPath { pieces: SmallVec::new(), lanes, ring: rings[ring as usize] });
                    }
                    staged[ring as usize].pieces.push(Piece { transfer, offset, bytes });
                }
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
        let direct: Vec<_> = self.launches.into_iter().map(|launch| launch.op).collect();
        let bytes = batch.iter().map(|shape| shape.bytes).collect();
        let program = lower(bytes, &direct, mechanism::lane_key(machine, batch, &direct), &staged);
        let executor = executor::executor(machine, batch, options, &program);
        Ok(Plan { transfers, program: Arc::new(program), options: *options, executor, threads: None, predicted: self.seconds, one_path })
    }
}

/// List of the paths that a transfer does not use, each with the reason. Equal transfers share the list.
type Rejections = Arc<Vec<Rejection>>;

/// Lists of the unused paths of transfers, created one after the other.
struct LeftOut {
    none: Rejections,
    /// Paths that the previous transfer of each demand (group of similar transfers) used, and the list of that transfer. The next transfer
    /// shares the list if it uses the same paths. Only for aggregated batches.
    last: Vec<Option<(SmallVec<[usize; 8]>, Rejections)>>,
}

impl LeftOut {
    /// Returns the list of unused paths of the next transfer, which uses the paths `used`.
    fn of(&mut self, selection: &mut Selection<'_>, transfer: u32, used: SmallVec<[usize; 8]>) -> Rejections {
        let Some(demand) = selection.demand_of[transfer as usize].map(|demand| demand as usize) else { return self.none.clone() };
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
