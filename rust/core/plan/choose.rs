//! Divides the data of a batch among candidate paths: one path for each transfer, or several paths.

use super::candidates::{Candidate, Reason};
use super::selection::{Assignment, PathShare, Selection};
use super::split::{Column, split};
use super::staging::NoRoom;
use crate::model::GRAIN;
use crate::topology::DeviceId;
use smallvec::SmallVec;

/// Largest number of times that the division is solved. Solving again with better chunk counts and without dropped paths settles after two
/// or three iterations. The limit keeps planning time predictable.
const ROUNDS: usize = 4;

/// Fraction of a transfer, or of a path's time, below which solving again makes no measurable difference.
const SETTLED: f64 = 5e-3;

impl Selection<'_> {
    /// Assigns each transfer to the single path that is fastest for it. If a direct route exists, that is the direct path, because the
    /// caller would have made a direct copy without this library.
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

    /// Assigns each transfer to several paths. Returns `None` if no second path helps. `without` is the simulated time of the best plan so
    /// far, in seconds. `closed` excludes paths: `Some(true)` those through host memory, `Some(false)` those through other GPUs, `None` no
    /// path.
    pub(super) fn several_paths(&mut self, without: f64, closed: Option<bool>) -> Option<Assignment> {
        self.closed.fill(None);
        self.close_slow(without);
        for (known, candidate) in self.closed.iter_mut().zip(&self.candidates).filter(|(known, _)| known.is_none()) {
            let is_closed = |via: DeviceId| closed == Some(via.is_host());
            *known = candidate.via.filter(|via| is_closed(*via)).map(Reason::Slower);
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
            // With direct paths only, the result would be the plan with one path for each transfer.
            if (0..self.candidates.len()).all(|i| self.closed[i].is_some() || self.candidates[i].via.is_none()) {
                return None;
            }
            if settled || round == ROUNDS {
                match self.stage(self.of_transfers(&self.weighted(&shares))) {
                    Ok(assignment) => return Some(assignment),
                    Err(NoRoom { candidate, ring_bytes, .. }) => self.closed[candidate] = Some(Reason::Staging { ring_bytes }),
                }
                // A path excluded here may have been the last possible path of its transfer.
                if self.of.iter().any(|of| self.open(of).next().is_none()) {
                    return None;
                }
            }
            log::trace!(target: "mpgpu::plan", "round {round}: {lost:.4} of a transfer moved to other paths");
            guess = shares;
        }
        None
    }

    /// Excludes staged paths that options forbid, and those that are too slow to help. `without` is the simulated time of the best plan so
    /// far, in seconds.
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
            // If nothing else is left, a transfer without a direct route keeps the path that `one_path` selects.
            if of.clone().all(|i| self.closed[i].is_some()) {
                of.clone().for_each(|i| self.closed[i] = None);
            }
        }
    }

    /// Returns a first estimate of the bytes of each candidate path, from which its number of chunks is computed. It divides every resource
    /// evenly among the paths of the batch, and each transfer in proportion to the resulting rates.
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

    /// Solves the linear program. Returns the bytes that each candidate path carries for one transfer; excluded paths carry none. Returns
    /// `None` if the solver fails.
    fn solve(&self, guess: &[f64]) -> Option<Vec<f64>> {
        let costs = self.machine.costs();
        let resources = self.machine.resources();
        let open: Vec<usize> = (0..self.candidates.len()).filter(|&i| self.closed[i].is_none()).collect();
        let column = |&i: &usize| {
            let Candidate { demand, model, .. } = &self.candidates[i];
            // If a candidate path serves many similar transfers, each transfer uses one path.
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

    /// Excludes paths whose bytes are not worth an operation, and those beyond `max_paths`, and increases the bytes of the others in
    /// proportion. Returns the largest fraction of any transfer that was on excluded paths.
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
                    self.closed[i] = Some(Reason::Option("max_paths is reached by paths that carry more bytes"));
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

    /// Returns the largest delay of any transfer, in seconds, that results from chunk counts computed for the bytes in `guess` and not for
    /// those in `shares`. The error of a path delays the transfer in proportion to the bytes of the path.
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
