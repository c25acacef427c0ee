//! The candidate paths of a batch that are still open.

use super::candidates::{self, Candidate, Reason, Rejection};
use super::demand::{Demand, Demands};
use super::options::{Options, PlanError, Relays};
use crate::model::PathModel;
use crate::program::{Ring, Shape};
use crate::topology::{DeviceId, Machine};
use std::ops::Range;

/// Bytes of a transfer on a path.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct PathShare {
    /// Index into the batch.
    pub transfer: u32,
    /// Index into the candidates.
    pub candidate: usize,
    pub offset: u64,
    pub bytes: u64,
    /// Index into [`Assignment::rings`] on a staged path, once it has one.
    pub ring: Option<u32>,
}

/// Shares that together are the batch, and the staging rings that those of staged paths pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Assignment {
    pub shares: Vec<PathShare>,
    /// In the order in which shares first use them. A chunk fills a slot.
    pub rings: Vec<Ring>,
}

impl Assignment {
    /// Bytes of the chunks of a share, but for the last.
    pub fn chunk_bytes(&self, share: &PathShare) -> u64 {
        share.ring.map_or(share.bytes, |ring| self.rings[ring as usize].slot_bytes.min(share.bytes))
    }

    pub fn chunks(&self, share: &PathShare) -> u32 {
        share.ring.map_or(1, |_| share.bytes.div_ceil(self.chunk_bytes(share).max(1)).max(1) as u32)
    }
}

/// A batch, the candidate paths of its demands, and why some of them are closed.
pub(super) struct Selection<'a> {
    pub machine: &'a Machine,
    pub batch: &'a [Shape],
    pub options: &'a Options,
    pub demands: Vec<Demand>,
    /// For each transfer its demand; none for a transfer of no bytes.
    pub demand_of: Vec<Option<u32>>,
    /// Whether demands may stand for several transfers.
    pub aggregated: bool,
    pub candidates: Vec<Candidate>,
    /// For each demand the range of its candidates.
    pub of: Vec<Range<usize>>,
    /// For each demand the paths that never were candidates.
    pub rejected: Vec<Vec<Rejection>>,
    /// Why a candidate is closed, once it is.
    pub closed: Vec<Option<Reason>>,
    /// The largest chunk that rings in host memory have room for, two at a time.
    pub host_chunk: u64,
    /// How many times fewer chunks there are than is best for each path alone.
    pub coarser: u32,
}

impl<'a> Selection<'a> {
    pub fn new(machine: &'a Machine, batch: &'a [Shape], options: &'a Options) -> Result<Self, PlanError> {
        let Demands { all: demands, of: demand_of, aggregated } = Demands::new(batch);
        let (mut found, mut of, mut rejected) = (Vec::new(), Vec::with_capacity(demands.len()), Vec::with_capacity(demands.len()));
        for (number, demand) in (0..).zip(&demands) {
            let begin = found.len();
            let mut reasons = Vec::new();
            candidates::candidates(machine, number, &demand.shape, options, &mut found, &mut reasons);
            if found.len() == begin {
                let Shape { src_device: src, dst_device: dst, .. } = demand.shape;
                let transfer = demand_of.iter().position(|of| *of == Some(number)).unwrap_or(0);
                let is_free = options.host_path && options.relays == Relays::ALL;
                return Err(PlanError::NoRoute { transfer, src, dst, is_free });
            }
            of.push(begin..found.len());
            rejected.push(reasons);
        }
        let closed = vec![None; found.len()];
        Ok(Selection {
            machine,
            batch,
            options,
            demands,
            demand_of,
            aggregated,
            candidates: found,
            of,
            rejected,
            closed,
            host_chunk: u64::MAX,
            coarser: 1,
        })
    }

    pub fn model(&self, candidate: usize) -> &PathModel {
        &self.candidates[candidate].model
    }

    pub fn demand(&self, candidate: usize) -> &Demand {
        &self.demands[self.candidates[candidate].demand as usize]
    }

    /// How many transfers a candidate is of.
    pub fn count(&self, candidate: usize) -> f64 {
        f64::from(self.demand(candidate).count)
    }

    /// Those of a range that are not closed.
    pub fn open(&self, of: &Range<usize>) -> impl Iterator<Item = usize> + Clone {
        of.clone().filter(|&i| self.closed[i].is_none())
    }

    /// The number of chunks with which the model wants so many bytes on a candidate.
    pub fn chunks(&self, candidate: usize, bytes: u64) -> u32 {
        let via = self.candidates[candidate].via;
        match via.and_then(|via| self.options.chunk(via, bytes)) {
            Some(chunk) => u32::try_from(bytes.div_ceil(chunk.max(1))).unwrap_or(u32::MAX).max(1),
            None => {
                let best = self.best_chunks(candidate, bytes);
                let is_in_host = via.is_some_and(DeviceId::is_host);
                if is_in_host { best.max(u32::try_from(bytes.div_ceil(self.host_chunk)).unwrap_or(u32::MAX)) } else { best }
            }
        }
    }

    /// The same apart from what staging rings have room for.
    pub fn best_chunks(&self, candidate: usize, bytes: u64) -> u32 {
        self.model(candidate).best_chunks(self.machine.costs(), bytes).div_ceil(self.coarser)
    }

    /// What a path carries while a lane waits between two chunks. Less is not worth a pipeline of its own.
    pub fn least_share(&self, candidate: usize) -> f64 {
        let model = self.model(candidate);
        model.chunk_gap(self.machine.costs()) * model.rate
    }
}
