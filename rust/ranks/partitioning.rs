//! Defines the options of partitioned transfers: the agent (copy engines or kernels) that moves partitions, and the number of partitions.
//! The caller sets them, or the performance model chooses them.

use super::transfers::{HandedIn, TransferName};
use crate::contexts::Error;
use crate::plan::{self, Options, PartitionForecast, PartitionVariant, Passing, Shape};
use crate::program::ranks::{Parts, RankedBatch};
use crate::program::{MOST_PARTITIONS, PartitionFlags, PartitionMove, Partitions, add_partition_flags};
use crate::topology::Machine;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// Agent (copy engines or kernels) that moves the partitions of a transfer when they are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Agent that was measured to be fastest. If arrivals are not signalled, each step uses one of three methods: copy engines move single
    /// partitions, copy engines move all partitions together, or the kernels that produce the data store it at the destination. If arrivals
    /// are signalled, copy engines move each partition separately, because a producing kernel may wait for the arrival of another
    /// partition.
    Auto {
        /// True if copy engines signal the arrival of each partition to the receiver.
        tells: bool,
        /// True if producing kernels may store the data at the destination. This requires that they write to the address in their trigger,
        /// and that nothing else reads the source.
        stores: bool,
    },
    /// Copy engines, over all paths of the plan, without using a multiprocessor. Each partition moves separately.
    CopyEngine {
        /// True if copy engines signal the arrival of each partition to the receiver. A signal takes about 2 us per partition (H200).
        tells: bool,
    },
    /// Kernels that produce the data and store it at the destination themselves.
    Producer,
}

/// Options of a node plan (plan that several ranks execute together) whose transfers are divided into partitions. Each partition is copied
/// when a kernel has produced it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Partitioning {
    /// Number of partitions of each transfer. `None` leaves the choice to the performance model.
    pub count: Option<u32>,
    /// Agent (copy engines or kernels) that moves the partitions when they are ready.
    pub agent: Agent,
}

/// Plan variants of partitioned transfers, with all options decided that the caller left open.
pub(super) struct Settled {
    /// Variants of a plan whose transfers are divided into partitions. The performance model expects the first variant to be the fastest.
    pub variants: Vec<PartitionVariant>,
    pub forecast: PartitionForecast,
}

impl Partitioning {
    /// Returns an error for a number of partitions out of range.
    pub(super) fn check(self) -> Result<(), Error> {
        match self.count {
            Some(count) if !(1..=MOST_PARTITIONS).contains(&count) => {
                let reason = format!("must be 1 to {MOST_PARTITIONS} partitions, or 0 to let the model choose");
                Err(Error::Option { name: "count", value: count.to_string(), reason })
            }
            _ => Ok(()),
        }
    }

    /// Returns the names and values of the options that must be equal on all ranks. The count 0 means that the performance model chooses
    /// the number of partitions.
    pub(super) fn named(self) -> [(&'static str, String); 4] {
        let (count, tells) = (self.count.unwrap_or(0).to_string(), self.agent.tells());
        let stores = matches!(self.agent, Agent::Auto { stores: true, .. });
        [("count", count), ("agent", self.agent.name().into()), ("arrivals", tells.to_string()), ("stores", stores.to_string())]
    }

    /// Plans the transfers in one or more variants. In a variant in which producing kernels store the data, the planned transfers have 0
    /// bytes. `tuned` is the fastest number of partitions, if it was measured. `adapts` is true if each step may use a different variant.
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
        // A partition passes through at most one relay.
        let options = &Options { passing: Passing::Off, ..*options };
        let whole = plan::plan(machine, shapes, options)?;
        let totals: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
        let forecast = plan::forecast_engines(machine, &whole, &totals, count);
        // Time of the transfer over the direct link, in seconds, without the cost of synchronisation between links.
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
        // The CPU may write host memory, and it cannot use the trigger of a kernel.
        let by_kernels = shapes.iter().all(|shape| shape.bytes == 0 || !shape.src_device.is_host());
        if adapts && by_kernels && matches!(self.agent, Agent::Auto { stores: true, .. }) && totals.iter().any(|total| *total > 0) {
            variants.push(stored()?);
        }
        Ok(Settled { variants, forecast })
    }
}

impl Agent {
    /// True if the arrival of each partition is signalled to the receiver.
    pub(super) fn tells(self) -> bool {
        match self {
            Agent::Auto { tells, .. } | Agent::CopyEngine { tells } => tells,
            Agent::Producer => true,
        }
    }

    /// Returns the name of the agent (copy engines or kernels) in the C API.
    pub(super) fn name(self) -> &'static str {
        match self {
            Agent::Auto { .. } => "auto",
            Agent::CopyEngine { .. } => "copy engine",
            Agent::Producer => "producer",
        }
    }

    /// Returns the text that represents the agent (copy engines or kernels) in the description of a plan.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Agent::Auto { tells: false, .. } => "moved by the active variant",
            Agent::Auto { .. } | Agent::CopyEngine { .. } => "moved by copy engines",
            Agent::Producer => "stored by their producers",
        }
    }
}

/// Partitions of all transfers in one plan variant. The values are equal on all ranks.
pub(super) struct Partitioned {
    pub agent: Agent,
    /// Text that identifies the kind of transfers in a tuning file (`tune::shape_of`).
    pub shape: String,
    /// Identification of each transfer: the rank that has passed it to the plan, and its number among the transfers of that rank.
    pub names: Vec<TransferName>,
    /// Pairs of matched descriptors: the identification of a receive descriptor, and that of the send descriptor that matches it.
    pub halves: BTreeMap<TransferName, TransferName>,
    pub partitions: Vec<Partitions>,
    pub flags: Vec<PartitionFlags>,
    /// Index range of the flags that belong to partitions. The range is equal in every variant, and all variants use the same memory for
    /// these flags.
    pub own: Range<u32>,
    /// Name of the plan variant in descriptions and measurements.
    pub name: &'static str,
    pub seconds: f64,
    /// Method by which the plan variant moves partitions.
    pub how: PartitionMove,
}

/// Properties of partitioned transfers that are equal in all variants of a plan.
pub(super) struct PartitionedBatch {
    pub agent: Agent,
    /// Text that identifies the kind of transfers in a tuning file. See [`Partitioned::shape`].
    pub shape: String,
    pub partitions: Vec<Partitions>,
}

impl Partitioned {
    /// Returns the partitions of one plan variant. Also adds the flags of partitions to `parts`, the division of the variant's work among
    /// the ranks.
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
                "rank {} would copy the partitions, but the kernel that produces them runs on another rank and cannot signal the internal \
                 streams of that rank: use host memory of the rank that owns the destination's GPU as the source",
                elsewhere.rank
            );
            unsupported(elsewhere.transfer as usize, reason)
        })?;
        let names = handed.iter().map(|handed| handed.name).collect();
        let halves = handed.iter().filter_map(|handed| handed.receive.map(|half| (half, handed.name))).collect();
        let (shape, partitions) = (of.shape.clone(), of.partitions.clone());
        // If producing kernels store the data, the later flags mark the beginning and the end of a step.
        let ready = u32::from(how == PartitionMove::Early);
        let all = of.partitions.iter().zip(&flags).map(|(partitions, of)| partitions.count * (of.writers + ready));
        let own = first..first + all.sum::<u32>();
        Ok(Partitioned { agent: of.agent, shape, names, halves, partitions, flags, own, name, seconds, how })
    }

    /// True if anything reads the counters in which producing kernels count what they have written.
    pub fn counts(&self) -> bool {
        self.how.counts(self.agent.tells())
    }

    /// Appends a line for each transfer to `text`, the plan's description.
    pub fn describe(&self, text: &mut String) {
        let agent = self.agent.describe();
        for ((rank, index), Partitions { count, bytes, .. }) in self.names.iter().zip(&self.partitions) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  transfer {index} of rank {rank}: {count} partitions of {bytes} bytes, {agent}");
        }
    }
}
