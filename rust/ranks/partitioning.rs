//! Who moves partitions, and in how many a transfer is divided: what the caller says, and what is chosen for it.

use super::transfers::{HandedIn, TransferName};
use crate::contexts::Error;
use crate::plan::{self, Options, PartitionForecast, PartitionVariant, Passing, Shape};
use crate::program::ranks::{Parts, RankedBatch};
use crate::program::{MOST_PARTITIONS, PartitionFlags, PartitionMove, Partitions, add_partition_flags};
use crate::topology::Machine;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// Who moves partitions that are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// What steps turn out to be fastest with, where nobody is told of arrivals: copy engines, with one partition at a time or all, or the producers. Else a producer may wait for the arrival of another partition, so copy engines move each by itself.
    Auto {
        /// As for copy engines.
        tells: bool,
        /// Whether producers may store: they write where their trigger says, and nobody reads the source.
        stores: bool,
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
    pub(super) fn named(self) -> [(&'static str, String); 4] {
        let (count, tells) = (self.count.unwrap_or(0).to_string(), self.agent.tells());
        let stores = matches!(self.agent, Agent::Auto { stores: true, .. });
        [("count", count), ("agent", self.agent.name().into()), ("arrivals", tells.to_string()), ("stores", stores.to_string())]
    }

    /// Plans the transfers; shapes of those that producers store have no bytes in the plan. `tuned` is the number that was measured to be best for
    /// them, where one was; `adapts` says whether steps may choose.
    pub(super) fn plan(
        self,
        machine: &Machine,
        shapes: &[Shape],
        options: &Options,
        tuned: Option<u32>,
        adapts: bool,
    ) -> Result<Settled, Error> {
        let is_auto = matches!(self.agent, Agent::Auto { .. });
        let count = self.count.or(tuned.filter(|_| is_auto));
        // Partitions pass one relay at most.
        let options = &Options { passing: Passing::Off, ..*options };
        let whole = plan::plan(machine, shapes, options)?;
        let totals: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
        let forecast = plan::forecast_engines(machine, &whole, &totals, count);
        // Over the link between the two, without hand-overs.
        let seconds = whole.one_path;
        let stored = || {
            let unmoved: Vec<Shape> = shapes.iter().map(|shape| Shape { bytes: 0, ..*shape }).collect();
            let plan = plan::plan(machine, &unmoved, options)?;
            Ok::<_, Error>(PartitionVariant { name: "stored by the producers", plan, seconds, how: PartitionMove::Stored })
        };
        if self.agent == Agent::Producer {
            return Ok(Settled { variants: vec![stored()?], forecast });
        }
        let adapts = adapts && matches!(self.agent, Agent::Auto { tells: false, .. });
        let mut variants = plan::partition_variants(machine, whole, &forecast, adapts);
        // Who writes host memory need not be a kernel of a GPU.
        let by_kernels = shapes.iter().all(|shape| shape.bytes == 0 || !shape.src_device.is_host());
        if adapts && by_kernels && matches!(self.agent, Agent::Auto { stores: true, .. }) && totals.iter().any(|total| *total > 0) {
            variants.push(stored()?);
        }
        Ok(Settled { variants, forecast })
    }
}

impl Agent {
    /// Whether receivers are told of arrivals.
    pub(super) fn tells(self) -> bool {
        match self {
            Agent::Auto { tells, .. } | Agent::CopyEngine { tells } => tells,
            Agent::Producer => true,
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
            Agent::Auto { tells: false, .. } => "moved in the way that is in force",
            Agent::Auto { .. } | Agent::CopyEngine { .. } => "moved by copy engines",
            Agent::Producer => "stored by their producers",
        }
    }
}

/// What all ranks know of partitions.
pub(super) struct Partitioned {
    pub agent: Agent,
    /// What tells these transfers apart from others (`tune::shape_of`).
    pub shape: String,
    /// The rank that has handed in each transfer, and its number there.
    pub names: Vec<TransferName>,
    /// Of each half of a receiver the name of the whole.
    pub halves: BTreeMap<TransferName, TransferName>,
    pub partitions: Vec<Partitions>,
    pub flags: Vec<PartitionFlags>,
    /// All of these flags: the same of each variant, in one memory.
    pub own: Range<u32>,
    /// Of the variant.
    pub name: &'static str,
    pub seconds: f64,
    /// Of the variant.
    pub how: PartitionMove,
}

/// What transfers of a plan have in common that move in partitions, whatever the variant.
pub(super) struct PartitionedBatch {
    pub agent: Agent,
    /// As [`Partitioned::shape`].
    pub shape: String,
    pub partitions: Vec<Partitions>,
}

impl Partitioned {
    /// Of the variant whose division is `parts`.
    pub fn new(
        of: &PartitionedBatch,
        &PartitionVariant { name, seconds, how, .. }: &PartitionVariant,
        handed: &[HandedIn],
        parts: &mut Parts,
        batch: &RankedBatch<'_>,
        unsupported: &dyn Fn(usize, String) -> Error,
    ) -> Result<Partitioned, Error> {
        let first = parts.flags.len() as u32;
        let flags = add_partition_flags(parts, batch, &of.partitions, how, of.agent.tells()).map_err(|elsewhere| {
            let reason = format!(
                "rank {} would read it, whose lanes a producer of another rank cannot tell: let host memory be sent by the rank of a GPU that it \
                 goes to",
                elsewhere.rank
            );
            unsupported(elsewhere.transfer as usize, reason)
        })?;
        let names = handed.iter().map(|handed| handed.name).collect();
        let halves = handed.iter().filter_map(|handed| handed.receive.map(|half| (half, handed.name))).collect();
        let (shape, partitions) = (of.shape.clone(), of.partitions.clone());
        // Behind them are those by which ranks begin and end a step in which producers store.
        let ready = u32::from(how == PartitionMove::Early);
        let all = of.partitions.iter().zip(&flags).map(|(partitions, of)| partitions.count * (of.writers + ready));
        let own = first..first + all.sum::<u32>();
        Ok(Partitioned { agent: of.agent, shape, names, halves, partitions, flags, own, name, seconds, how })
    }

    /// Whether anybody looks at what producers say.
    pub fn counts(&self) -> bool {
        self.how.counts(self.agent.tells())
    }

    /// For people.
    pub fn describe(&self, text: &mut String) {
        let agent = self.agent.describe();
        for ((rank, index), Partitions { count, bytes, .. }) in self.names.iter().zip(&self.partitions) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  transfer {index} of rank {rank}: {count} partitions of {bytes} bytes, {agent}");
        }
    }
}
