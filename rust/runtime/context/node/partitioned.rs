//! Transfers of a node plan that move in partitions, each as soon as whoever produces it says that it is ready.
//!
//! A step has two calls. [`NodePlan::arm`] comes before the producers, and [`NodePlan::enqueue`] after them. Until the second call nothing is enqueued
//! that waits for a producer: what waits on the GPU never stands before a kernel in the same hardware queue, however few of those there
//! are, and a plan that is armed and never executed leaves nothing behind.
//!
//! Who waits, and for whom, is as in every node plan: lanes take flags in host memory. A producer raises them by a store of its own, which the
//! caller's kernel does through a [`Trigger`] (`mpgpu/trigger.cuh`).

use super::super::error::Error;
use super::binding::{Bindings, FLAG_BYTES, Held};
use super::part::Armed;
use super::plan::{NodePlan, Together};
use crate::backend::{Completion, Endpoints, Execution, Signal};
use crate::ipc::signal;
use crate::plan::{self, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::program::ranks::{FlagId, Part, Parts, RankedBatch};
use crate::program::{Copy, MOST_PARTITIONS, PartitionFlags, PartitionUse, Partitions, add_partition_flags};
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, Machine};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who moves partitions that are ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Copy engines, over all paths of the plan, without a multiprocessor.
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

impl Partitioning {
    /// Whether the producers move the bytes.
    pub fn is_stored(self) -> bool {
        self.agent == Agent::Producer
    }

    fn purpose(self) -> PartitionUse {
        match self.agent {
            Agent::CopyEngine { tells } => PartitionUse::Moved { tells },
            Agent::Producer => PartitionUse::Stored,
        }
    }

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

    /// The partitions of each transfer of a plan, of `sizes` bytes.
    pub(super) fn divide(self, machine: &Machine, plan: &plan::Plan, sizes: &[u64]) -> Vec<Partitions> {
        let divided = |total: &u64| match self.count {
            Some(count) => Partitions::new(*total, count),
            None => plan::best_partitions(machine, *total, plan.predicted),
        };
        sizes.iter().map(divided).collect()
    }
}

/// What all ranks know of partitions.
pub(super) struct Partitioned {
    pub partitioning: Partitioning,
    /// The rank that has handed in each transfer, and its number there.
    names: Vec<(u32, usize)>,
    partitions: Vec<Partitions>,
    flags: Vec<PartitionFlags>,
}

impl Partitioned {
    pub fn new(
        partitioning: Partitioning,
        partitions: Vec<Partitions>,
        names: Vec<(u32, usize)>,
        parts: &mut Parts,
        batch: &RankedBatch<'_>,
        failed: &dyn Fn(usize, String) -> Error,
    ) -> Result<Partitioned, Error> {
        let flags = add_partition_flags(parts, batch, &partitions, partitioning.purpose()).map_err(|elsewhere| {
            let reason = format!(
                "rank {} would read it, whose lanes a producer of another rank cannot tell: let host memory be sent by the rank of a GPU that it \
                 goes to",
                elsewhere.rank
            );
            failed(elsewhere.transfer as usize, reason)
        })?;
        Ok(Partitioned { partitioning, names, partitions, flags })
    }

    /// For people.
    pub fn describe(&self, text: &mut String) {
        let agent = if self.partitioning.is_stored() { "stored by their producers" } else { "moved by copy engines" };
        for ((rank, index), Partitions { count, bytes, .. }) in self.names.iter().zip(&self.partitions) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  transfer {index} of rank {rank}: {count} partitions of {bytes} bytes, {agent}");
        }
    }
}

/// What a producer or a receiver needs of one transfer: addresses that its kernels can use.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Trigger {
    /// Where producers write: the source, or where they store themselves the destination. 0 where this rank is not the source's.
    pub data: u64,
    /// The flags that are raised for partitions, one each; 0 where this rank is not the source's.
    pub ready: u64,
    /// Flags that tell of arrival; 0 where this rank is not the destination's, or is not told.
    pub arrived: u64,
    /// A counter of 64 bits for each partition, in which producers count what they have written. It stands at 0 between steps.
    pub counters: u64,
    /// How the transfer is divided.
    pub partitions: Partitions,
    /// Flags of each partition that tell of arrival.
    pub arrived_flags: u32,
}

/// How far a step is.
#[derive(Debug, Default)]
struct ArmedState {
    /// Armed and not executed; whether in a capture.
    armed: Option<bool>,
    /// The last execution.
    last: Option<Completion>,
}

/// One rank's flags and counters.
pub(super) struct PartitionWords {
    /// Of each transfer that this rank sends or receives.
    triggers: BTreeMap<(u32, usize), Trigger>,
    /// Flags of partitions that lie with this rank: the first, and bytes of all.
    flags: (u64, u64),
    /// As many zeros, on a device that can copy them there.
    zeros: u64,
    device: DeviceId,
    state: Mutex<ArmedState>,
}

/// A destroyed plan waits so long for partitions that nobody has made ready.
const PATIENCE: Duration = Duration::from_secs(10);

impl PartitionWords {
    /// Allocates what this rank needs; `None` where the plan has no partitions.
    pub fn new(at: &Bindings<'_>, held: &mut Held) -> Result<Option<PartitionWords>, Error> {
        let Some(partitioned) = &at.together.partitioned else { return Ok(None) };
        let (rank, context) = (at.node.rank(), at.node.context());
        let mut allocate = |device: DeviceId, bytes: u64| {
            let address = context.allocate_shared(device, bytes)?;
            held.allocations.push(address);
            Ok::<u64, Error>(address)
        };
        let all = || partitioned.names.iter().zip(&partitioned.partitions).zip(&partitioned.flags).zip(&at.together.transfers).enumerate();
        let mut cleared: Vec<(DeviceId, u64, u64)> = Vec::new();
        let (mut triggers, mut flags) = (BTreeMap::new(), (u64::MAX, 0));
        let mut own = |first: u32, count: u32| {
            let address = at.flag_address(FlagId(first));
            flags = (flags.0.min(address), flags.1 + u64::from(count) * FLAG_BYTES);
            address
        };
        for (index, (((name, partitions), of), transfer)) in all() {
            let mut trigger = Trigger { partitions: *partitions, arrived_flags: of.writers, ..Trigger::default() };
            if transfer.src.rank == rank && partitions.count > 0 {
                let transfer = index as u32;
                (trigger.data, trigger.ready) = match partitioned.partitioning.agent {
                    Agent::CopyEngine { .. } => (at.address(Place::Source { transfer, offset: 0 }), own(of.ready, partitions.count)),
                    // These lie with the receiver.
                    Agent::Producer => (at.address(Place::Destination { transfer, offset: 0 }), at.flag_address(FlagId(of.ready))),
                };
                let (device, bytes) = (at.node.device_here(at.together.src_devices[index]), u64::from(partitions.count) * 8);
                trigger.counters = allocate(device, bytes)?;
                cleared.push((device, trigger.counters, bytes));
            }
            if transfer.dst.rank == rank && partitions.count * of.writers > 0 {
                trigger.arrived = own(of.arrived, partitions.count * of.writers);
            }
            if [transfer.src.rank, transfer.dst.rank].contains(&rank) {
                triggers.insert(*name, trigger);
            }
        }
        // A device that can copy is one that the rank works for.
        let device = at.node.own_device();
        let zeros = if flags.1 > 0 { allocate(device, flags.1)? } else { 0 };
        cleared.extend((flags.1 > 0).then_some((device, zeros, flags.1)));
        clear(at, &cleared, &mut allocate)?;
        Ok(Some(PartitionWords { triggers, flags, zeros, device, state: Mutex::default() }))
    }

    /// What comes before producers.
    pub fn armed(&self, part: &Part, at: &Bindings<'_>) -> Armed {
        Armed::new(part, at, self.device, self.flags.0, self.zeros, self.flags.1)
    }

    /// Notes that a step is armed.
    pub fn arm(&self, is_captured: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        if state.armed.is_some() {
            let reason = "it is armed already: execute it, after what makes its partitions ready".into();
            return Err(Error::NodeArgument { argument: c"plan", reason });
        }
        state.armed = Some(is_captured);
        Ok(())
    }

    /// It was not armed after all.
    pub fn disarm(&self) {
        lock(&self.state).armed = None;
    }

    /// Notes that the armed step is executed.
    pub fn take_armed(&self, is_captured: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let refuse = |reason: &str| Err(Error::NodeArgument { argument: c"plan", reason: reason.into() });
        match state.armed {
            None => refuse("its transfers move in partitions, and it is not armed: call mp_plan_arm before what makes them ready"),
            Some(armed) if armed != is_captured => refuse("it was armed outside of this capture: arm and execute it in one"),
            Some(_) => {
                state.armed = None;
                Ok(())
            }
        }
    }

    /// The end of the last execution.
    pub fn note(&self, end: Completion) {
        lock(&self.state).last = Some(end);
    }

    /// Waits for the last execution, for so long; then names what is missing.
    fn wait(&self, plan: &NodePlan, patience: Duration, is_ended: bool) -> Result<(), Error> {
        let Some(last) = lock(&self.state).last.clone() else { return Ok(()) };
        let begin = Instant::now();
        let mut looks = 0_u32;
        while !last.is_done()? {
            if begin.elapsed() >= patience {
                let missing = self.missing(plan)?;
                return Err(Error::PartitionTimeout { missing, seconds: patience.as_secs_f64(), is_ended });
            }
            signal::rest(looks);
            looks = looks.saturating_add(1);
        }
        last.wait().map_err(Error::from)
    }

    /// Waits for the last execution before the plan goes. Where it does not end, it is ended without its partitions.
    pub fn end(&self, plan: &NodePlan) -> Result<(), Error> {
        let waited = self.wait(plan, PATIENCE, true);
        // Flags of bytes that producers store tell their receiver of arrival, and nothing here awaits them.
        if matches!(waited, Err(Error::PartitionTimeout { .. })) && !plan.together.is_stored() {
            let backend = plan.node.context().backend();
            for flag in self.triggers.values().filter(|trigger| trigger.ready != 0).flat_map(Trigger::ready_flags) {
                backend.raise_signal(Signal { counter: flag, value: 1 })?;
            }
        }
        if lock(&self.state).armed.take().is_some() {
            // The others may have begun the step.
            plan.progress.fail();
        }
        waited
    }

    /// Names what keeps the last execution from its end.
    fn missing(&self, plan: &NodePlan) -> Result<String, Error> {
        let backend = plan.node.context().backend();
        let mut text = String::new();
        for ((rank, index), trigger) in &self.triggers {
            for (base, flags, what) in
                [(trigger.ready, 1, "was not made ready"), (trigger.arrived, trigger.arrived_flags, "has not arrived")]
            {
                let mut missing = Vec::new();
                for partition in 0..if base == 0 { 0 } else { trigger.partitions.count } {
                    let first = base + u64::from(partition * flags) * FLAG_BYTES;
                    let mut is_up = true;
                    for flag in 0..flags {
                        is_up &= backend.read_signal(first + u64::from(flag) * FLAG_BYTES)? != 0;
                    }
                    if !is_up {
                        missing.push(partition);
                    }
                }
                if let Some(first) = missing.first() {
                    let (comma, rest) = (if text.is_empty() { "" } else { ", " }, missing.len() - 1);
                    let more = if rest > 0 { format!(" (and {rest} more)") } else { String::new() };
                    // Writing to a String cannot fail.
                    let _ = write!(text, "{comma}partition {first}{more} of transfer {index} of rank {rank} {what}");
                }
            }
        }
        Ok(if text.is_empty() { "the step has not ended, though its partitions have come as far as this rank sees".into() } else { text })
    }
}

impl Trigger {
    /// The flags that producers raise.
    fn ready_flags(&self) -> impl Iterator<Item = u64> {
        (0..u64::from(self.partitions.count)).map(|partition| self.ready + partition * FLAG_BYTES)
    }
}

/// Fills memory of devices with zeros, and waits for that. Shared host memory is zero when it is new.
fn clear(
    at: &Bindings<'_>,
    memory: &[(DeviceId, u64, u64)],
    allocate: &mut impl FnMut(DeviceId, u64) -> Result<u64, Error>,
) -> Result<(), Error> {
    let most = memory.iter().filter(|(device, ..)| !device.is_host()).map(|(.., bytes)| *bytes).max().unwrap_or(0);
    if most == 0 {
        return Ok(());
    }
    let (backend, zeros) = (at.node.context().backend(), allocate(DeviceId::HOST, most)?);
    for &(device, address, bytes) in memory.iter().filter(|(device, ..)| !device.is_host()) {
        let (program, endpoints) = copy_of(device, bytes, Endpoints { dst: address, src: zeros });
        let stream = backend.create_stream(device)?;
        let submitted = backend.submit(&Execution::new(&program, &endpoints, &Arc::from([]), stream));
        let done = submitted.and_then(|end| end.map_or(Ok(()), |end| end.wait()));
        done.and(backend.destroy_stream(stream))?;
    }
    Ok(())
}

/// A program of one copy.
pub(super) fn copy_of(device: DeviceId, bytes: u64, ends: Endpoints) -> (Arc<Program>, Arc<[Endpoints]>) {
    let copy = Copy { from: Place::Source { transfer: 0, offset: 0 }, to: Place::Destination { transfer: 0, offset: 0 }, bytes };
    let op = Op { lane: LaneId(0), mechanism: Mechanism::Copy, copies: [copy].into_iter().collect(), after: Default::default() };
    let program = Program { transfers: vec![bytes], lanes: vec![Lane::new(device)], rings: Vec::new(), ops: vec![op] };
    (Arc::new(program), Arc::from([ends]))
}

impl NodePlan {
    /// The flags of a plan whose transfers move in partitions.
    pub(super) fn words(&self) -> Result<&PartitionWords, Error> {
        self.words.as_ref().ok_or_else(|| {
            let reason = "its transfers do not move in partitions: make it with mp_node_plan_partitioned".into();
            Error::NodeArgument { argument: c"plan", reason }
        })
    }

    /// What this rank's kernels need of a transfer: that of number `index` among those that `rank` has handed in.
    pub fn trigger(&self, rank: u32, index: usize) -> Result<Trigger, Error> {
        let words = self.words()?;
        words.triggers.get(&(rank, index)).copied().ok_or_else(|| {
            let reason = format!("transfer {index} of rank {rank}: there is none, or rank {} has no end of it", self.node.rank());
            Error::NodeArgument { argument: c"transfer", reason }
        })
    }

    /// Blocks until the last execution has finished, at most so long.
    pub fn wait(&self, patience: Duration) -> Result<(), Error> {
        self.words()?.wait(self, patience, false)
    }
}

impl Together {
    /// Whether producers store the bytes of its transfers.
    pub fn is_stored(&self) -> bool {
        self.partitioned.as_ref().is_some_and(|partitioned| partitioned.partitioning.is_stored())
    }
}
