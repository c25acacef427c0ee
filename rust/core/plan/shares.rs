//! Converts the bytes of each candidate to whole bytes of each transfer on each path.

use super::selection::{PathShare, Selection};
use crate::model::GRAIN;
use crate::topology::DeviceId;
use std::ops::Range;

impl Selection<'_> {
    /// Returns the bytes of each candidate path, corrected by the factors of a tuning file. The corrected bytes of each transfer are scaled
    /// so that their sum stays the same.
    pub(super) fn weighted(&self, shares: &[f64]) -> Vec<f64> {
        let mut weighted = shares.to_vec();
        let Some(tuned) = self.options.tuned else { return weighted };
        for of in &self.of {
            let before: f64 = shares[of.clone()].iter().sum();
            for i in of.clone() {
                weighted[i] *= match self.candidates[i].via {
                    None => 1.0,
                    Some(via) => f64::from(if DeviceId::is_host(via) { tuned.host_share } else { tuned.relay_share }) / 1000.0,
                };
            }
            let after: f64 = weighted[of.clone()].iter().sum();
            if after > 0.0 {
                weighted[of.clone()].iter_mut().for_each(|share| *share *= before / after);
            }
        }
        weighted
    }

    /// Returns the part of each transfer on each path. The transfers of a demand (group of similar transfers) use its paths one after the
    /// other: each path is used until it has its bytes. So nearly every transfer uses a single path, as in an optimal vertex of the linear
    /// program of all transfers.
    pub(super) fn of_transfers(&self, bytes: &[f64]) -> Vec<PathShare> {
        let mut left = vec![0.0; bytes.len()];
        if self.aggregated {
            for (of, demand) in self.of.iter().zip(&self.demands) {
                self.round(demand.shape.bytes, of, bytes, |at, _, whole| left[at] = whole as f64 * f64::from(demand.count));
            }
        }
        let mut shares = Vec::with_capacity(self.batch.len());
        let mut part = bytes.to_vec();
        for ((transfer, demand), shape) in (0..).zip(&self.demand_of).zip(self.batch) {
            let Some(demand) = *demand else { continue };
            let of = &self.of[demand as usize];
            if self.aggregated {
                self.take(shape.bytes as f64, of, &mut left, &mut part);
            }
            self.round(shape.bytes, of, &part, |candidate, offset, bytes| {
                shares.push(PathShare { transfer, candidate, offset, bytes, ring: None });
            });
        }
        shares
    }

    /// Divides the bytes of one transfer among its paths and writes the result to `part`. `left` contains the bytes that may still be
    /// assigned to each path.
    fn take(&self, mut bytes: f64, of: &Range<usize>, left: &mut [f64], part: &mut [f64]) {
        let mut first = None;
        for at in of.clone() {
            let (takes, least) = (left[at].min(bytes), self.least_share(at));
            // A part that is too small for a separate path is added to the path before or after it.
            part[at] = match takes {
                takes if takes > 0.0 && bytes - takes < least => bytes,
                takes if takes < least => 0.0,
                takes => takes,
            };
            left[at] = (left[at] - part[at]).max(0.0);
            bytes -= part[at];
            first = first.or((part[at] > 0.0).then_some(at));
        }
        // Bytes that are left over after rounding go to the first path.
        if let Some(first) = first.or_else(|| self.open(of).next()) {
            part[first] += bytes;
        }
    }

    /// Calls `share` for each candidate path in order with the path's index, the offset and the number of bytes. The numbers are multiples
    /// of [`GRAIN`], except that the largest part takes the remainder. Their sum is `all`.
    fn round(&self, all: u64, of: &Range<usize>, part: &[f64], mut share: impl FnMut(usize, u64, u64)) {
        let Some(largest) = self.open(of).max_by(|&a, &b| part[a].total_cmp(&part[b]).then(b.cmp(&a))) else { return };
        let whole = |i: usize| (part[i] as u64).min(all) / GRAIN * GRAIN;
        let others: u64 = self.open(of).filter(|&i| i != largest).map(whole).sum();
        let mut offset = 0;
        for candidate in self.open(of) {
            let bytes = if candidate == largest { all.saturating_sub(others) } else { whole(candidate) }.min(all - offset);
            if bytes > 0 {
                share(candidate, offset, bytes);
            }
            offset += bytes;
        }
    }
}
