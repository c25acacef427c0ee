//! Tunes partitioned transfers by measurement. Plans each candidate (combination of an agent and a number of partitions) on all ranks,
//! executes it with the caller's own kernels, and keeps the fastest. An agent is the mechanism that moves partitions: copy engines or
//! kernels.

use super::exchange::{Collective, CollectiveCall, Named};
use super::group::NodeGroup;
use super::partitioned::Trigger;
use super::partitioning::{Agent, Partitioning};
use super::planning::OwnRequest;
use super::steps::NodePlan;
use super::transfers::{NodeTransfer, Window};
use crate::backend::StreamHandle;
use crate::contexts::probe_files::write;
use crate::contexts::{Context, Error, PlanOptions};
use crate::tune::{self, Origin, PartitionMover, PartitionTrial, PartitionTuning, Tuning, digest, spread_partitions};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Options for the tuning of partitioned transfers by measurement.
#[derive(Copy, Clone, Debug)]
pub struct PartitionTrials<'a> {
    /// Agents (copy engines or producing kernels) with which the transfers are measured.
    pub agents: &'a [Agent],
    /// Number of timed steps for each candidate (combination of a mechanism that moves partitions and a number of partitions). Further
    /// steps before them are not timed.
    pub rounds: u32,
    /// Number of blocks of the kernel that produces the data. It is only recorded with the measurements. 0 if the program does not vary it.
    pub blocks: u32,
    /// Path of the file to which the measurements and the best number of partitions for copy engines are written. Its folder must exist,
    /// but the file need not. `None` writes no file.
    pub file: Option<&'a Path>,
}

/// Function that launches the kernels that produce a step's data in the given stream. The first argument contains the trigger of each
/// transfer that this rank has passed to the plan, in order. The function returns a text if the launch fails.
pub type Produce<'a> = &'a mut dyn FnMut(&[Trigger], StreamHandle) -> Result<(), String>;

impl NodeGroup {
    /// Measures the transfers with several numbers of partitions and several agents (mechanisms that move partitions, for example copy
    /// engines). Returns the combination that is fastest for all ranks together. The transfers are those that
    /// [`NodeGroup::plan_partitioned`] would plan. All ranks call this function together. Destinations are overwritten.
    pub fn tune_partitions(
        self: &Arc<NodeGroup>,
        windows: &[Window],
        transfers: &[NodeTransfer],
        options: &PlanOptions,
        trials: &PartitionTrials<'_>,
        produce: Produce<'_>,
    ) -> Result<Partitioning, Error> {
        let received = transfers.iter().position(|transfer| transfer.src.rank != self.rank() && !transfer.is_receive_half());
        let checked = match received {
            Some(index) => {
                let reason = format!(
                    "transfer {index} is sent by rank {}: for tuning, each transfer must be passed by the rank that sends it",
                    transfers[index].src.rank
                );
                Err(Error::NodeArgument { argument: c"transfers", reason })
            }
            None => Ok(trials.named()),
        };
        let mut call = self.exchange.call(Collective::TUNE_PARTITIONS)?;
        let stream = self.context().create_stream(self.own_device());
        let told = call.all(checked.and_then(|named| stream.as_ref().map(|_| named).map_err(Error::clone)));
        let found = told.and_then(|told| {
            let (stream, rounds) = (stream.clone()?, trials.rounds);
            let (call, own) = (&mut call, OwnRequest { windows, transfers, partitioning: None, options });
            let tried = Vec::new();
            CandidateTrials { node: self, call, own, rounds, stream, produce, tried, refusal: None }.find(&told, trials)
        });
        stream.and_then(|stream| self.context().destroy_stream(stream))?;
        found
    }
}

impl PartitionTrials<'_> {
    /// Returns the names and values of the tuning options that must be equal on all ranks.
    fn named(&self) -> Named {
        let agents: Vec<String> = self.agents.iter().map(|agent| format!("{agent:?}")).collect();
        vec![("agents".into(), agents.join(", ")), ("rounds".into(), self.rounds.to_string())]
    }
}

/// Adds the measurements `trials` to the entry of the file for transfers of this kind, and keeps the rest of the file. If there is no such
/// entry, `found` becomes the entry.
fn keep(context: &Context, file: &Path, found: PartitionTuning, trials: &[PartitionTrial]) -> Result<(), Error> {
    let (machine, backend) = (context.machine(), context.backend().name());
    let mut tuning = match file.exists() {
        true => tune::load(file, machine, backend)?,
        false => Tuning {
            topology: machine.topology().name.clone(),
            digest: digest(machine.topology()),
            origin: if context.backend().is_virtual() { Origin::Host } else { Origin::Cuda },
            classes: Vec::new(),
            partitions: Vec::new(),
        },
    };
    let known = tuning.partitions.iter().position(|known| known.shape == found.shape).map(|known| tuning.partitions.remove(known));
    tuning.partitions.push(known.unwrap_or(found).with(trials));
    write(file, &tuning.to_toml())
        .map_err(|error| Error::NotSupported(format!("tuned values cannot be written to {}: {error}", file.display())))
}

/// Number of untimed steps after which an adaptive plan has measured its variants. The plan tries them within the first 32 steps.
const LEARNED: u32 = 48;

struct CandidateTrials<'a, 'n> {
    node: &'a Arc<NodeGroup>,
    call: &'a mut CollectiveCall<'n>,
    own: OwnRequest<'a>,
    rounds: u32,
    stream: StreamHandle,
    produce: Produce<'a>,
    tried: Vec<(Partitioning, f64)>,
    /// Error of the first candidate (combination of a mechanism that moves partitions and a number of partitions) that could not be
    /// planned. `None` if all could be planned.
    refusal: Option<Error>,
}

impl CandidateTrials<'_, '_> {
    /// Returns the fastest candidate (combination of a mechanism that moves partitions and a number of partitions), and writes the
    /// measurements to the file if one is given. `told` contains the tuning options of each rank.
    fn find(mut self, told: &[Named], trials: &PartitionTrials<'_>) -> Result<Partitioning, Error> {
        self.node.exchange.check_alike(c"tuning", &told.iter().collect::<Vec<_>>())?;
        let (shape, scored) = self.search(trials.agents)?;
        let best = |of: &dyn Fn(Agent) -> bool| {
            scored.iter().filter(|(found, _)| of(found.agent)).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(found, _)| *found)
        };
        let Some(found) = best(&|_| true) else {
            return Err(self.refusal.take().unwrap_or_else(|| {
                Error::NotSupported("no agent (method of moving the partitions) was given: name agents to try".into())
            }));
        };
        let kept = best(&|agent| matches!(agent, Agent::CopyEngine { .. }))
            .and_then(|found| found.count)
            .filter(|_| self.node.rank() == 0)
            .zip(trials.file);
        let bytes = self.own.transfers.iter().fold(0, |sum: u64, transfer| sum.saturating_add(transfer.bytes));
        let trial = |(tried, seconds): &(Partitioning, f64)| PartitionTrial {
            mover: match tried.agent {
                Agent::Auto { .. } => PartitionMover::Automatic,
                Agent::CopyEngine { .. } => PartitionMover::CopyEngine,
                Agent::Producer => PartitionMover::Producer,
            },
            count: tried.count.unwrap_or(1),
            blocks: trials.blocks,
            ns: (seconds * 1e9) as u64,
        };
        let tried: Vec<PartitionTrial> = self.tried.iter().map(trial).collect();
        let new = |count| PartitionTuning { shape, bytes, count, trials: Vec::new() };
        let written = kept.map_or(Ok(()), |(count, file)| keep(self.node.context(), file, new(count), &tried));
        self.call.all(written)?;
        Ok(found)
    }

    /// Measures the candidates of each agent (mechanism that moves partitions). Returns the text that identifies the kind of transfers in a
    /// tuning file, and the best candidate of each agent with its time per step in seconds.
    fn search(&mut self, agents: &[Agent]) -> Result<(String, Vec<(Partitioning, f64)>), Error> {
        let (mut shape, mut found) = (String::new(), Vec::new());
        for &agent in agents {
            // The search starts with the number of partitions that the performance model chooses.
            let Some(plan) = self.plan(Partitioning { count: None, agent })? else { continue };
            let starts = spread_partitions(plan.partition_count(), plan.largest_bytes());
            shape = plan.shape().to_owned();
            if matches!(agent, Agent::Auto { .. }) {
                let by_model = Partitioning { count: None, agent };
                let seconds = self.time(&plan, LEARNED)?;
                self.tried.extend(seconds.map(|seconds| (Partitioning { count: Some(plan.partition_count()), agent }, seconds)));
                found.extend(seconds.map(|seconds| (by_model, seconds)));
                continue;
            }
            end(&plan);
            let in_parts = |count| Partitioning { count: Some(count), agent };
            let best = tune::search_partitions(&starts, |count| self.score(in_parts(count)))?;
            found.extend(best.map(|(count, seconds)| (in_parts(count), seconds)));
        }
        Ok((shape, found))
    }

    /// Plans a candidate (combination of a mechanism that moves partitions and a number of partitions) on all ranks. Returns `None` if it
    /// cannot be planned. All ranks have then received the reason.
    fn plan(&mut self, partitioning: Partitioning) -> Result<Option<NodePlan>, Error> {
        match self.node.plan_within(self.call, OwnRequest { partitioning: Some(partitioning), ..self.own }) {
            Ok(plan) => Ok(Some(plan)),
            Err(error @ Error::Allgather(_)) => Err(error),
            Err(error) => {
                log::debug!("tuning skips {partitioning:?}: {error}");
                self.refusal.get_or_insert(error);
                Ok(None)
            }
        }
    }

    /// Plans a candidate (combination of a mechanism that moves partitions and a number of partitions) and returns its median time per step
    /// in seconds, as measured by [`time`](CandidateTrials::time). Returns `None` if the candidate cannot be planned or measured.
    fn score(&mut self, partitioning: Partitioning) -> Result<Option<f64>, Error> {
        let Some(plan) = self.plan(partitioning)? else { return Ok(None) };
        let median = self.time(&plan, 1)?;
        log::debug!("tuning: {partitioning:?} takes {median:?} s");
        self.tried.extend(median.map(|seconds| (partitioning, seconds)));
        Ok(median)
    }

    /// Returns the median time in seconds of a step on the slowest rank, and destroys the plan. Executes `untimed` steps before the timed
    /// steps. A failure on one rank fails the call on all ranks. The failed rank reports it in the next exchange, which every rank enters
    /// only after its own step has ended.
    fn time(&mut self, plan: &NodePlan, untimed: u32) -> Result<Option<f64>, Error> {
        let triggers = (0..self.own.transfers.len()).map(|index| plan.trigger(self.node.rank(), index)).collect::<Result<Vec<_>, _>>();
        let mut seconds = Vec::new();
        let mut last = triggers.as_ref().map(drop).map_err(Error::clone);
        for round in 0..untimed + self.rounds {
            if let Err(error) = self.call.all(last) {
                end(plan);
                return Err(error);
            }
            let begin = Instant::now();
            last = self.step(plan, triggers.as_deref().unwrap_or(&[]));
            if last.is_err() {
                // The other ranks would otherwise wait for this rank's operations of the step.
                end(plan);
                break;
            }
            if round >= untimed {
                seconds.push(begin.elapsed().as_secs_f64());
            }
        }
        let has_ended = last.is_err();
        let all = self.call.all(last.map(|()| seconds));
        if !has_ended {
            end(plan);
        }
        let all = all?;
        let slowest = |round: usize| all.iter().filter_map(|of_rank| of_rank.get(round)).copied().fold(0.0, f64::max);
        let mut slowest: Vec<f64> = (0..self.rounds as usize).map(slowest).collect();
        slowest.sort_unstable_by(f64::total_cmp);
        Ok(slowest.get(slowest.len() / 2).copied())
    }

    fn step(&mut self, plan: &NodePlan, triggers: &[Trigger]) -> Result<(), Error> {
        plan.arm(self.stream)?;
        (self.produce)(triggers, self.stream).map_err(|reason| Error::NodeArgument {
            argument: c"produce",
            reason: format!("the function that launches the producers {reason}"),
        })?;
        plan.enqueue(self.stream)?;
        self.node.context().synchronize_stream(self.stream)
    }
}

/// Destroys the plan of a candidate (combination of a mechanism that moves partitions and a number of partitions). The plan's errors were
/// reported before and are ignored here.
fn end(plan: &NodePlan) {
    if let Err(error) = plan.destroy() {
        log::debug!("could not destroy a plan that was made for a trial: {error}");
    }
}
