//! Which paths a batch may take: one for each transfer, or several.

use super::candidates::{Candidate, Reason};
use super::selection::{Assignment, PathShare, Selection};
use super::split::{Column, split};
use super::staging::NoRoom;
use crate::model::GRAIN;
use smallvec::SmallVec;

/// Solving again with better chunk counts and without dropped paths settles after two or three rounds; the bound keeps planning
/// time predictable.
const ROUNDS: usize = 4;

/// Part of a transfer, or of the time of one path, below which solving again changes nothing that could be measured.
const SETTLED: f64 = 5e-3;

impl Selection<'_> {
    /// Every transfer on the one path that is fastest for it alone. That is the direct one wherever a route exists: a plain
    /// copy is what the caller would have done.
    pub(super) fn one_path(&self) -> Result<Assignment, NoRoom> {
        let costs = self.machine.costs();
        let fastest = |demand: usize| {
            let of = &self.of[demand];
            let bytes = self.demands[demand].shape.bytes;
            let seconds = |i: &usize| self.model(*i).seconds(costs, bytes, self.model(*i).best_chunks(costs, bytes));
            let direct = of.clone().find(|&i| self.candidates[i].via.is_none());
            direct.or_else(|| of.clone().min_by(|a, b| seconds(a).total_cmp(&seconds(b))))
        };
        let fastest: Vec<Option<usize>> = (0..self.demands.len()).map(fastest).collect();
        let shares = (0..).zip(&self.demand_of).zip(self.batch).filter_map(|((transfer, demand), shape)| {
            let candidate = fastest[(*demand)? as usize]?;
            Some(PathShare { transfer, candidate, offset: 0, bytes: shape.bytes, ring: None })
        });
        self.stage(shares.collect())
    }

    /// Several paths for each transfer, but for those that `closes` gives a reason to close; `None` where no second path is worth having. `without` is the
    /// time of the best plan without them.
    pub(super) fn several_paths(&mut self, without: f64, closes: impl Fn(&Self, usize) -> Option<Reason>) -> Option<Assignment> {
        self.closed.fill(None);
        self.close_slow(without);
        for at in 0..self.candidates.len() {
            if self.closed[at].is_none() {
                self.closed[at] = closes(self, at);
            }
        }
        if self.of.iter().any(|of| self.open(of).next().is_none()) {
            return None;
        }
        if self.of.iter().all(|of| self.open(of).count() < 2) {
            return None;
        }
        let mut guess = self.guess();
        for round in 1..=ROUNDS {
            let mut shares = self.solve(&guess)?;
            let mut lost = self.drop_small(&mut shares);
            self.host_chunk = self.host_chunk_for(&shares);
            let settled = match self.balance(&shares) {
                Some(balanced) => {
                    shares = balanced;
                    lost = self.drop_small(&mut shares);
                    lost <= SETTLED
                }
                None => lost <= SETTLED && self.drift(&guess, &shares) <= SETTLED * without,
            };
            // Direct paths alone are what every transfer has with one path.
            if (0..self.candidates.len()).all(|i| self.closed[i].is_some() || self.candidates[i].via.is_none()) {
                return None;
            }
            if settled || round == ROUNDS {
                match self.stage(self.of_transfers(&self.weighted(&shares))) {
                    Ok(assignment) => return Some(assignment),
                    Err(NoRoom { candidate, ring_bytes, .. }) => self.closed[candidate] = Some(Reason::Staging { ring_bytes }),
                }
                // It may have been the last path of its transfer.
                if self.of.iter().any(|of| self.open(of).next().is_none()) {
                    return None;
                }
            }
            log::trace!(target: "mpgpu::plan", "round {round}: {lost:.4} of a transfer moved to other paths");
            guess = shares;
        }
        None
    }

    /// Closes staged paths that options forbid, and those that cannot pay.
    fn close_slow(&mut self, without: f64) {
        let costs = self.machine.costs();
        for of in &self.of {
            let has_direct = of.clone().any(|i| self.candidates[i].via.is_none());
            for i in of.clone().filter(|&i| self.candidates[i].via.is_some()) {
                let bytes = self.demand(i).shape.bytes;
                let soonest = costs.copy + self.model(i).overhead(costs, GRAIN.min(bytes), 1);
                self.closed[i] = if self.options.max_paths == 1 {
                    Some(Reason::Option("max_paths is 1"))
                } else if self.options.min_bytes.is_some_and(|least| bytes < least) {
                    Some(Reason::Option("the transfer is below min_bytes"))
                } else if soonest >= without {
                    Some(Reason::FixedCost { seconds: soonest, without })
                } else if self.aggregated && has_direct && (bytes as f64) < self.least_share(i) {
                    Some(Reason::NoShare)
                } else {
                    None
                };
            }
            // A transfer without a direct route keeps what one_path gave it if nothing else is left.
            if of.clone().all(|i| self.closed[i].is_some()) {
                of.clone().for_each(|i| self.closed[i] = None);
            }
        }
    }

    /// Bytes for which each open candidate's chunks are counted at first: the part of its transfer's rates that is its own if
    /// every resource is divided evenly among the candidates of the batch.
    fn guess(&self) -> Vec<f64> {
        let resources = self.machine.resources();
        let mut users = vec![0.0_f64; resources.len()];
        for i in (0..self.candidates.len()).filter(|&i| self.closed[i].is_none()) {
            self.model(i).weights.iter().for_each(|&(r, weight)| users[r.0 as usize] += weight * self.count(i));
        }
        let rate = |i: usize| {
            let even = |&(r, _): &(crate::topology::ResourceId, f64)| resources[r.0 as usize].capacity / users[r.0 as usize];
            self.model(i).weights.iter().map(even).fold(1e18, f64::min)
        };
        let mut guess = vec![0.0; self.candidates.len()];
        for (of, demand) in self.of.iter().zip(&self.demands) {
            let all: f64 = self.open(of).map(rate).sum();
            self.open(of).for_each(|i| guess[i] = demand.shape.bytes as f64 * rate(i) / all);
        }
        guess
    }

    /// Bytes for each candidate; closed ones get none.
    fn solve(&self, guess: &[f64]) -> Option<Vec<f64>> {
        let costs = self.machine.costs();
        let resources = self.machine.resources();
        let open: Vec<usize> = (0..self.candidates.len()).filter(|&i| self.closed[i].is_none()).collect();
        let column = |&i: &usize| {
            let Candidate { demand, model, .. } = &self.candidates[i];
            // Of many alike, each takes one path.
            let bytes = if self.count(i) > 1.0 { self.demand(i).shape.bytes } else { guess[i] as u64 };
            let chunks = self.chunks(i, bytes);
            let (fixed, each) = model.line(costs, chunks);
            Column {
                transfer: *demand,
                fixed: costs.copy + model.overhead(costs, bytes, chunks),
                line: (costs.copy + fixed, each),
                work: model.weights.iter().map(|&(r, weight)| (r.0, weight / resources[r.0 as usize].capacity)).collect(),
                link_time: model.hops.iter().map(|rate| rate.recip()).sum(),
            }
        };
        let columns: Vec<Column> = open.iter().map(column).collect();
        let demands: Vec<f64> = self.demands.iter().map(|demand| demand.shape.bytes as f64 * f64::from(demand.count)).collect();
        match split(&columns, &demands, resources.len()) {
            Ok(bytes) => {
                let mut shares = vec![0.0; self.candidates.len()];
                open.iter().zip(bytes).for_each(|(&i, bytes)| shares[i] = bytes / self.count(i));
                Some(shares)
            }
            Err(unsolved) => {
                log::warn!(target: "mpgpu::plan", "one path for each transfer, because the split was not solved: {}", unsolved.0);
                None
            }
        }
    }

    /// Closes candidates whose share is not worth an operation, and those beyond `max_paths`, and scales up what is left. The
    /// largest part of a transfer that lay on closed ones.
    fn drop_small(&mut self, shares: &mut [f64]) -> f64 {
        let mut lost = 0.0_f64;
        for of in &self.of {
            let mut open: SmallVec<[usize; 16]> = self.open(of).collect();
            let all: f64 = open.iter().map(|&i| shares[i]).sum();
            open.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
            for (rank, &i) in open.iter().enumerate().skip(1) {
                let least = if self.model(i).is_staged() { self.least_share(i) } else { 0.0 };
                if shares[i] < least.max(GRAIN as f64) {
                    self.closed[i] = Some(Reason::NoShare);
                } else if rank >= self.options.max_paths as usize {
                    self.closed[i] = Some(Reason::Option("max_paths is reached by larger shares"));
                } else {
                    continue;
                }
                shares[i] = 0.0;
            }
            let left: f64 = open.iter().map(|&i| shares[i]).sum();
            if left > 0.0 {
                open.iter().for_each(|&i| shares[i] *= all / left);
                lost = lost.max(1.0 - left / all);
            }
        }
        lost
    }

    /// By how many seconds a transfer ends later because its chunks were counted for other shares: a path's error moves the end in
    /// proportion to what it carries.
    fn drift(&self, guess: &[f64], shares: &[f64]) -> f64 {
        let overhead =
            |i: usize, chunks_for: f64| self.model(i).overhead(self.machine.costs(), shares[i] as u64, self.chunks(i, chunks_for as u64));
        let error = |i: usize| (overhead(i, guess[i]) - overhead(i, shares[i])).abs() * shares[i];
        let late = self
            .of
            .iter()
            .zip(&self.demands)
            .map(|(of, demand)| of.clone().filter(|&i| shares[i] > 0.0).map(error).sum::<f64>() / demand.shape.bytes.max(1) as f64);
        late.fold(0.0, f64::max)
    }
}
