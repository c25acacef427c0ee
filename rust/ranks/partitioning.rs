//! Options of partitioned transfers: the agent that moves partitions and the number of partitions, as given by the caller or chosen by the
//! model.

use super::transfers::{HandedIn, TransferName};
use crate::contexts::Error;
use crate::plan::{self, Options, PartitionForecast, PartitionVariant, Passing, Shape};
use crate::program::ranks::{Parts, RankedBatch};
use crate::program::{MOST_PARTITIONS, PartitionFlags, PartitionMove, Partitions, add_partition_flags};
use crate::topology::Machine;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

/// Agent that moves partitions when they are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// The fastest way as measured. If arrivals are not signalled, steps choose among copy engines that move single partitions, copy
    /// engines that move all together, and the producers. If arrivals are signalled, copy engines move each partition separately, because a
    /// producer may wait for the arrival of another partition.
    Auto {
        /// True if copy engines signal arrivals to the receiver.
        tells: bool,
        /// True if producers may store: they write to the address that their trigger gives, and nothing else reads the source.
        stores: bool,
    },
    /// Copy engines, over all paths of the plan, without a multiprocessor. Each partition moves separately.
    CopyEngine {
        /// True if copy engines signal arrivals to the receiver. A signal takes about 2 us per partition (H200).
        tells: bool,
    },
    /// The producers, which store their bytes at the destination.
    Producer,
}

/// Options of a plan whose transfers move in partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Partitioning {
    /// Number of partitions of each transfer. `None` leaves it to the model.
    pub count: Option<u32>,
    /// Agent that moves the partitions.
    pub agent: Agent,
}

/// Plans of partitioned transfers, with the values that were chosen for the options that the caller left open.
pub(super) struct Settled {
    /// Variants; the model prefers the first.
    pub variants: Vec<PartitionVariant>,
    pub forecast: PartitionForecast,
}

impl Partitioning {
    /// Refuses numbers out of range.
    pub(super) fn check(self) -> Result<(), Error> {
        match self.count {
            Some(count) if !(1..=MOST_PARTITIONS).contains(&count) => {
                let reason = format!("must be 1 to {MOST_PARTITIONS} partitions, or 0 to let the model choose");
                Err(Error::Option { name: "count", value: count.to_string(), reason })
            }
            _ => Ok(()),
        }
    }

    /// Returns the options that must be the same on all ranks. A count of 0 leaves the number to the model.
    pub(super) fn named(self) -> [(&'static str, String); 4] {
        let (count, tells) = (self.count.unwrap_or(0).to_string(), self.agent.tells());
        let stores = matches!(self.agent, Agent::Auto { stores: true, .. });
        [("count", count), ("agent", self.agent.name().into()), ("arrivals", tells.to_string()), ("stores", stores.to_string())]
    }

    /// Plans the transfers. In a variant in which producers store, the shapes have no bytes. `tuned` is the best number of partitions as
    /// measured, if it was measured. `adapts` is true if steps may choose among variants.
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
        // A partition passes at most one relay.
        let options = &Options { passing: Passing::Off, ..*options };
        let whole = plan::plan(machine, shapes, options)?;
        let totals: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
        let forecast = plan::forecast_engines(machine, &whole, &totals, count);
        // Time over the direct link, without hand-overs between links.
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
        // Host memory may be written by the CPU, which cannot use the trigger of a kernel.
        let by_kernels = shapes.iter().all(|shape| shape.bytes == 0 || !shape.src_device.is_host());
        if adapts && by_kernels && matches!(self.agent, Agent::Auto { stores: true, .. }) && totals.iter().any(|total| *total > 0) {
            variants.push(stored()?);
        }
        Ok(Settled { variants, forecast })
    }
}

impl Agent {
    /// True if arrivals are signalled to receivers.
    pub(super) fn tells(self) -> bool {
        match self {
            Agent::Auto { tells, .. } | Agent::CopyEngine { tells } => tells,
            Agent::Producer => true,
        }
    }

    /// Returns the agent's name in the C API.
    pub(super) fn name(self) -> &'static str {
        match self {
            Agent::Auto { .. } => "auto",
            Agent::CopyEngine { .. } => "copy engine",
            Agent::Producer => "producer",
        }
    }

    /// Returns the agent's description for `describe`.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Agent::Auto { tells: false, .. } => "moved by the active variant",
            Agent::Auto { .. } | Agent::CopyEngine { .. } => "moved by copy engines",
            Agent::Producer => "stored by their producers",
        }
    }
}

/// Partitions of a plan variant, identical on all ranks.
pub(super) struct Partitioned {
    pub agent: Agent,
    /// Key of the transfers in a tuning file (`tune::shape_of`).
    pub shape: String,
    /// Rank that has passed each transfer, and the transfer's number on that rank.
    pub names: Vec<TransferName>,
    /// Name of the matched transfer, for each receive descriptor.
    pub halves: BTreeMap<TransferName, TransferName>,
    pub partitions: Vec<Partitions>,
    pub flags: Vec<PartitionFlags>,
    /// Flags of all partitions. They are the same in every variant, and share one memory.
    pub own: Range<u32>,
    /// Name of the variant.
    pub name: &'static str,
    pub seconds: f64,
    /// Way in which the variant moves partitions.
    pub how: PartitionMove,
}

/// Properties of partitioned transfers that all variants of a plan share.
pub(super) struct PartitionedBatch {
    pub agent: Agent,
    /// Key of the transfers in a tuning file. See [`Partitioned::shape`].
    pub shape: String,
    pub partitions: Vec<Partitions>,
}

impl Partitioned {
    /// Returns the partitions of one variant, and adds their flags to its division `parts`.
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
                "rank {} would read it, and a producer of another rank cannot signal the internal streams of that rank: send host memory from the rank of the \
                 destination's GPU",
                elsewhere.rank
            );
            unsupported(elsewhere.transfer as usize, reason)
        })?;
        let names = handed.iter().map(|handed| handed.name).collect();
        let halves = handed.iter().filter_map(|handed| handed.receive.map(|half| (half, handed.name))).collect();
        let (shape, partitions) = (of.shape.clone(), of.partitions.clone());
        // In a variant in which producers store, the later flags mark the beginning and the end of a step.
        let ready = u32::from(how == PartitionMove::Early);
        let all = of.partitions.iter().zip(&flags).map(|(partitions, of)| partitions.count * (of.writers + ready));
        let own = first..first + all.sum::<u32>();
        Ok(Partitioned { agent: of.agent, shape, names, halves, partitions, flags, own, name, seconds, how })
    }

    /// True if any party reads the producers' counts.
    pub fn counts(&self) -> bool {
        self.how.counts(self.agent.tells())
    }

    /// Appends a line for each transfer to the text of `describe`.
    pub fn describe(&self, text: &mut String) {
        let agent = self.agent.describe();
        for ((rank, index), Partitions { count, bytes, .. }) in self.names.iter().zip(&self.partitions) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  transfer {index} of rank {rank}: {count} partitions of {bytes} bytes, {agent}");
        }
    }
}
