//! Who moves partitions, and in how many a transfer is divided: what the caller says, and what is chosen for it.

use super::super::error::Error;
use super::tune::agent_of;
use crate::plan::{self, Options, PartitionForecast, Plan, Shape};
use crate::program::{MOST_BLOCKS, MOST_PARTITIONS, PartitionUse};
use crate::topology::{Machine, MemoryKind};
use crate::tune::PartitionSetting;
use std::sync::Arc;

/// Who moves partitions that are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Copy engines or a polling kernel, whichever the model expects to end first.
    Auto {
        /// As for copy engines.
        tells: bool,
    },
    /// Copy engines, over all paths of the plan, without a multiprocessor.
    CopyEngine {
        /// Whether they tell the receiver what has arrived, which takes them about 2 us for each partition (H200).
        tells: bool,
    },
    /// The producers: they store their bytes at the destination.
    Producer,
    /// A kernel of few blocks on the GPU of each source, which copies by stores.
    PollingKernel {
        /// How many; `None` leaves the number to the model.
        blocks: Option<u32>,
    },
}

/// How transfers of a plan move in partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Partitioning {
    /// Partitions of each transfer; `None` leaves the number to the model.
    pub count: Option<u32>,
    /// Who moves them.
    pub agent: Agent,
}

/// A plan for partitions, and what was settled of what the caller had left open.
pub(super) struct Settled {
    pub plan: Plan,
    pub forecast: PartitionForecast,
    pub agent: Agent,
}

impl Partitioning {
    /// Refuses numbers out of range.
    pub(super) fn check(self) -> Result<(), Error> {
        let refuse = |name, value: u32, most: u32, what: &str| {
            let reason = format!("1 to {most} {what}, or 0 for what the model says");
            Err(Error::Option { name, value: value.to_string(), reason })
        };
        match (self.count, self.agent) {
            (Some(count), _) if !(1..=MOST_PARTITIONS).contains(&count) => refuse("count", count, MOST_PARTITIONS, "partitions"),
            (_, Agent::PollingKernel { blocks: Some(blocks) }) if !(1..=MOST_BLOCKS).contains(&blocks) => {
                refuse("blocks", blocks, MOST_BLOCKS, "thread blocks")
            }
            _ => Ok(()),
        }
    }

    /// What all ranks must want alike; 0 for what the model says.
    pub(super) fn named(self) -> [(&'static str, String); 4] {
        let (agent, tells, blocks) = match self.agent {
            Agent::Auto { tells } => ("auto", tells, 0),
            Agent::CopyEngine { tells } => ("copy engine", tells, 0),
            Agent::Producer => ("producer", true, 0),
            Agent::PollingKernel { blocks } => ("polling kernel", true, blocks.unwrap_or(0)),
        };
        let count = self.count.unwrap_or(0);
        [("count", count.to_string()), ("agent", agent.into()), ("arrivals", tells.to_string()), ("blocks", blocks.to_string())]
    }

    /// Plans the transfers, of which nothing is left in `shapes` that the plan does not move. What was measured for them is taken where the agent is
    /// left open. `unsupported` names a transfer in an error.
    pub(super) fn plan(
        self,
        machine: &Machine,
        shapes: &mut [Shape],
        options: &Options,
        tuned: Option<PartitionSetting>,
        unsupported: &dyn Fn(usize, String) -> Error,
    ) -> Result<Settled, Error> {
        if let (Agent::Auto { tells }, Some(setting)) = (self.agent, tuned) {
            let measured = Partitioning { count: self.count.or(Some(setting.count)), agent: agent_of(setting, tells) };
            if let Ok(settled) = measured.plan(machine, shapes, options, None, unsupported) {
                return Ok(settled);
            }
        }
        let polled = |shapes: &[Shape], blocks| self.plan_polled(machine, shapes, options, blocks, unsupported);
        let engines = |shapes: &[Shape], tells| {
            let mut plan = plan::plan(machine, shapes, options)?;
            let forecast = plan::forecast_engines(machine, &plan, &totals(shapes), self.count);
            plan.program = Arc::new(plan::partition(&plan, &forecast.partitions));
            Ok::<Settled, Error>(Settled { plan, forecast, agent: Agent::CopyEngine { tells } })
        };
        match self.agent {
            Agent::CopyEngine { tells } => engines(shapes, tells),
            Agent::PollingKernel { blocks } => polled(shapes, blocks),
            Agent::Auto { tells } => {
                let engines = engines(shapes, tells)?;
                Ok(polled(shapes, None).ok().filter(|polled| polled.forecast.seconds < engines.forecast.seconds).unwrap_or(engines))
            }
            Agent::Producer => {
                let Settled { forecast, .. } = engines(shapes, true)?;
                shapes.iter_mut().for_each(|shape| shape.bytes = 0);
                Ok(Settled { plan: plan::plan(machine, shapes, options)?, forecast, agent: Agent::Producer })
            }
        }
    }

    fn plan_polled(
        self,
        machine: &Machine,
        shapes: &[Shape],
        options: &Options,
        blocks: Option<u32>,
        unsupported: &dyn Fn(usize, String) -> Error,
    ) -> Result<Settled, Error> {
        let refuse = |index: usize, reason: &str| {
            Err(unsupported(index, format!("a polling kernel cannot move it: {reason}; let copy engines move it (MP_AGENT_COPY_ENGINE)")))
        };
        for (index, shape) in shapes.iter().enumerate().filter(|(_, shape)| shape.bytes > 0) {
            if shape.src_device.is_host() {
                return refuse(index, "its source is host memory, and the kernel is one of the source's GPU");
            }
            if shape.dst_kind == MemoryKind::Pageable {
                return refuse(index, "GPUs do not write to ordinary host memory");
            }
        }
        let mut plan = plan::plan(machine, shapes, &Options { max_paths: 1, ..*options })?;
        let forecast = plan::forecast_polled(machine, &plan, &totals(shapes), self.count, blocks);
        let program = plan::partition_polled(&plan, &forecast.partitions);
        let Some(program) = program else {
            let staged = plan.transfers.iter().position(|transfer| transfer.paths.iter().any(|path| path.via.is_some()));
            return refuse(staged.unwrap_or(0), "there is no direct path between its GPUs");
        };
        plan.program = Arc::new(program);
        let agent = Agent::PollingKernel { blocks: Some(forecast.blocks) };
        Ok(Settled { plan, forecast, agent })
    }
}

fn totals(shapes: &[Shape]) -> Vec<u64> {
    shapes.iter().map(|shape| shape.bytes).collect()
}

impl Agent {
    pub(super) fn purpose(self) -> PartitionUse {
        match self {
            Agent::Auto { tells } | Agent::CopyEngine { tells } => PartitionUse::Moved { tells },
            Agent::Producer => PartitionUse::Stored,
            Agent::PollingKernel { .. } => PartitionUse::Polled,
        }
    }

    /// For people.
    pub(super) fn describe(self) -> String {
        match self {
            Agent::Auto { .. } | Agent::CopyEngine { .. } => "moved by copy engines".into(),
            Agent::Producer => "stored by their producers".into(),
            Agent::PollingKernel { blocks } => format!("moved by polling kernels of {} blocks", blocks.unwrap_or(0)),
        }
    }
}
