//! Who moves partitions, and in how many a transfer is divided: what the caller says, and what is chosen for it.

use super::super::error::Error;
use crate::plan::{self, Options, PartitionForecast, PartitionVariant, Shape};
use crate::program::{MOST_PARTITIONS, PartitionUse};
use crate::topology::Machine;

/// Who moves partitions that are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Copy engines. Where nobody is told of arrivals, as many partitions at a time as steps turn out to be fastest with: one, several or all. Else a
    /// producer may wait for the arrival of another partition, so each moves by itself.
    Auto {
        /// As for copy engines.
        tells: bool,
    },
    /// Copy engines, over all paths of the plan, without a multiprocessor, each partition by itself.
    CopyEngine {
        /// Whether they tell the receiver what has arrived, which takes them about 2 us for each partition (H200).
        tells: bool,
    },
    /// The producers: they store their bytes at the destination.
    Producer,
}

/// How transfers of a plan move in partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Partitioning {
    /// Partitions of each transfer; `None` leaves the number to the model.
    pub count: Option<u32>,
    /// Who moves them.
    pub agent: Agent,
}

/// Plans for partitions, and what was settled of what the caller had left open.
pub(super) struct Settled {
    /// The first is what the model prefers.
    pub variants: Vec<PartitionVariant>,
    pub forecast: PartitionForecast,
}

impl Partitioning {
    /// Refuses numbers out of range.
    pub(super) fn check(self) -> Result<(), Error> {
        match self.count {
            Some(count) if !(1..=MOST_PARTITIONS).contains(&count) => {
                let reason = format!("1 to {MOST_PARTITIONS} partitions, or 0 for what the model says");
                Err(Error::Option { name: "count", value: count.to_string(), reason })
            }
            _ => Ok(()),
        }
    }

    /// What all ranks must want alike; 0 for what the model says.
    pub(super) fn named(self) -> [(&'static str, String); 3] {
        let (agent, tells) = (self.agent.name(), self.agent.purpose() != PartitionUse::Moved { tells: false });
        [("count", self.count.unwrap_or(0).to_string()), ("agent", agent.into()), ("arrivals", tells.to_string())]
    }

    /// Plans the transfers, of which nothing is left in `shapes` that the plan does not move. `tuned` is the number that was measured to be best for
    /// them, where one was; `adapts` says whether steps may choose.
    pub(super) fn plan(
        self,
        machine: &Machine,
        shapes: &mut [Shape],
        options: &Options,
        tuned: Option<u32>,
        adapts: bool,
    ) -> Result<Settled, Error> {
        let (is_auto, is_stored) = (matches!(self.agent, Agent::Auto { .. }), self.agent == Agent::Producer);
        let count = self.count.or(tuned.filter(|_| is_auto));
        let whole = plan::plan(machine, shapes, options)?;
        let totals: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
        let forecast = plan::forecast_engines(machine, &whole, &totals, count);
        if is_stored {
            shapes.iter_mut().for_each(|shape| shape.bytes = 0);
            let variant = PartitionVariant { name: "stored", plan: plan::plan(machine, shapes, options)?, seconds: forecast.seconds };
            return Ok(Settled { variants: vec![variant], forecast });
        }
        let adapts = adapts && self.agent == Agent::Auto { tells: false };
        Ok(Settled { variants: plan::partition_variants(machine, whole, &forecast, adapts), forecast })
    }
}

impl Agent {
    pub(super) fn purpose(self) -> PartitionUse {
        match self {
            Agent::Auto { tells } | Agent::CopyEngine { tells } => PartitionUse::Moved { tells },
            Agent::Producer => PartitionUse::Stored,
        }
    }

    /// As the C API has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Agent::Auto { .. } => "auto",
            Agent::CopyEngine { .. } => "copy engine",
            Agent::Producer => "producer",
        }
    }

    /// For people.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Agent::Auto { .. } | Agent::CopyEngine { .. } => "moved by copy engines",
            Agent::Producer => "stored by their producers",
        }
    }
}
