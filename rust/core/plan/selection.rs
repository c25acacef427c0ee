//! Keeps track of the candidate paths of a batch: which are open (still possible) and why others were closed.

use super::candidates::{self, Candidate, Reason, Rejection};
use super::demand::{Demand, Demands};
use super::options::{Options, PlanError, Relays};
use crate::model::PathModel;
use crate::program::{Ring, Shape};
use crate::topology::{DeviceId, Machine};
use std::ops::Range;

/// Part of a transfer that one path carries: `bytes` bytes of the transfer from `offset` on.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct PathShare {
    /// Transfer, as an index into the batch.
    pub transfer: u32,
    /// Path that carries this part of the transfer, as an index into the candidate paths.
    pub candidate: usize,
    /// Offset, in the transfer, of the part that the path carries, bytes.
    pub offset: u64,
    pub bytes: u64,
    /// Staging ring of the path, as an index into [`Assignment::rings`]. `None` for direct paths, and until a ring is assigned.
    pub ring: Option<u32>,
}

/// Complete division of a batch: the parts of all transfers, and the staging rings that they use.
#[derive(Clone, Debug, Default)]
pub(super) struct Assignment {
    pub shares: Vec<PathShare>,
    /// Staging rings (rings of staging buffers), in the order in which the elements of `shares` first use them. Each buffer of a ring holds
    /// one chunk.
    pub rings: Vec<Ring>,
}

impl Assignment {
    /// Returns the size of each chunk of a path share except the last, in bytes.
    pub fn chunk_bytes(&self, share: &PathShare) -> u64 {
        share.ring.map_or(share.bytes, |ring| self.rings[ring as usize].slot_bytes.min(share.bytes))
    }

    pub fn chunks(&self, share: &PathShare) -> u32 {
        share.ring.map_or(1, |_| share.bytes.div_ceil(self.chunk_bytes(share).max(1)).max(1) as u32)
    }
}

/// Candidate paths of a batch, with the reasons why some of them are excluded.
pub(super) struct Selection<'a> {
    pub machine: &'a Machine,
    pub batch: &'a [Shape],
    pub options: &'a Options,
    pub demands: Vec<Demand>,
    /// Demand (group of similar transfers) of each transfer, as an index into `demands`; `None` for a transfer of zero bytes.
    pub demand_of: Vec<Option<u32>>,
    /// True if a demand may consist of several transfers.
    pub aggregated: bool,
    pub candidates: Vec<Candidate>,
    /// Candidate paths of each demand, as a range of `candidates`.
    pub of: Vec<Range<usize>>,
    /// Paths of each demand that were excluded before they became candidates.
    pub rejected: Vec<Vec<Rejection>>,
    /// Reason why each candidate path is excluded (closed); `None` while it may be used (open).
    pub closed: Vec<Option<Reason>>,
    /// Largest chunk size that fits twice into each ring in host memory, bytes.
    pub host_chunk: u64,
    /// Divisor of the number of chunks that is best for each path alone.
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

    /// Returns the number of transfers in the demand that the candidate path belongs to.
    pub fn count(&self, candidate: usize) -> f64 {
        f64::from(self.demand(candidate).count)
    }

    /// Returns the candidate paths of a range that are not excluded.
    pub fn open(&self, of: &Range<usize>) -> impl Iterator<Item = usize> + Clone {
        of.clone().filter(|&i| self.closed[i].is_none())
    }

    /// Returns the number of chunks for this number of bytes on a candidate path, as selected by the options or the model.
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

    /// Returns the number of chunks that the model selects, without regard to the size of staging rings.
    pub fn best_chunks(&self, candidate: usize, bytes: u64) -> u32 {
        self.model(candidate).best_chunks(self.machine.costs(), bytes).div_ceil(self.coarser)
    }

    /// Returns the number of bytes that a path could transfer while an internal stream waits between two chunks. A smaller part of a
    /// transfer is not worth a separate pipeline.
    pub fn least_share(&self, candidate: usize) -> f64 {
        let model = self.model(candidate);
        model.chunk_gap(self.machine.costs()) * model.rate
    }
}
