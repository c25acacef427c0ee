//! Implements node-plan transfers that move in partitions. Each partition moves as soon as the kernel that produces its data marks it as
//! ready.
//!
//! A step has two calls. [`arm`](super::NodePlan::arm) comes before the producing kernels, and [`enqueue`](super::NodePlan::enqueue) after
//! them. Until the second call, no work that waits for a producing kernel is enqueued. So a wait on the GPU is never in front of a kernel
//! in the same hardware queue, however few queues there are. Destroying a plan that was armed and never executed leaves no waiting work.
//!
//! Streams wait for flags in host memory, as in every node plan. A producing kernel of the caller sets the flags by its own stores through
//! a [`Trigger`] (`mpgpu/trigger.cuh`).

use super::addresses::{Bindings, FLAG_BYTES, Held};
use super::part::{Armed, ProducerOrders};
use super::partitioning::Partitioned;
use super::progress::Progress;
use crate::backend::{Backend, BackendError, Completion, Endpoints, Execution, Signal};
use crate::contexts::state::{EndsFirst, LAST_PATIENCE};
use crate::contexts::{Context, Error};
use crate::ipc::signal;
use crate::plan::{Lane, LaneId, Mechanism, Op, Place, Program};
use crate::program::ranks::{FlagId, Part};
use crate::program::{Copy, PartitionMove, Partitions};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::topology::DeviceId;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ptr::with_exposed_provenance_mut;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Interval at which flags that mark partitions as ready are set again while a plan is being destroyed before its kernels have set them.
/// Setting these flags once is not enough, because a stream that starts its wait late resets the flags first.
const RAISED_AGAIN: Duration = Duration::from_millis(5);

/// Addresses and layout of one partitioned transfer, for the kernels that produce or receive its data.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Trigger {
    /// Address of two words in GPU memory, which are set when a step is armed (begun before its data is produced). The first word is the
    /// address to which producing kernels write: the source, or the destination if they store the data there themselves. The second word is
    /// 1 if these kernels must count what they have written, and otherwise 0. The field is 0 on all ranks except the rank of the source.
    pub step: u64,
    /// Address of the flags that mark partitions as ready to be sent, one for each partition. The field is 0 on all ranks except the rank
    /// of the source.
    pub ready: u64,
    /// Address of the flags that mark partitions as arrived. The field is 0 if arrivals are not signalled, and on all ranks except the rank
    /// of the destination.
    pub arrived: u64,
    /// Address of one 64-bit counter for each partition, in which producing kernels count what they have written. The counters are 0
    /// between steps.
    pub counters: u64,
    /// Number and sizes of the partitions of the transfer.
    pub partitions: Partitions,
    /// Number of flags that signal the arrival of each partition.
    pub arrived_flags: u32,
}

/// State of the current step of a plan whose transfers move in partitions. A step is first armed, then its data is produced, and then it is
/// executed.
#[derive(Debug, Default)]
struct ArmedState {
    /// State of the step that was armed (begun before its data is produced) and not yet executed. `Some(true)` if it was armed during a
    /// stream capture. `None` if no step is armed.
    armed: Option<bool>,
    /// Completion of the last execution of the plan. `None` before the first execution.
    last: Option<Completion>,
}

/// Words in the memory of one GPU that producing kernels read ([`Trigger::step`]). Host memory contains the values of these words for each
/// [`PartitionMove`] (method of moving partitions). Each step copies the values for its method to the GPU.
struct StepWords {
    transfer: u32,
    device: DeviceId,
    address: u64,
    choices: u64,
}

/// Size in bytes of the two words at the address [`Trigger::step`].
const STEP_BYTES: u64 = 16;

/// Flags and counters of all partitions that one rank sends or receives.
pub(super) struct PartitionWords {
    /// Trigger (addresses for the caller's kernels) of each transfer that this rank sends or receives. The key is the rank that has passed
    /// the transfer to the plan, and the transfer's number among those of that rank.
    pub triggers: BTreeMap<(u32, usize), Trigger>,
    /// Flags of partitions in this rank's memory: the address of the first flag, and the total size in bytes.
    flags: (u64, u64),
    /// Address of a block of zeros that is copied to the flags of partitions to reset them. The block is as large as the flags, and on a
    /// device that can make this copy.
    zeros: u64,
    /// Words in GPU memory that tell producing kernels how the current communication step moves the partitions.
    steps: Vec<StepWords>,
    /// Instruction ([`PartitionMove`] as a number) that producing kernels read at present. See [`ProducerOrders::said`].
    said: Arc<AtomicU32>,
    device: DeviceId,
    context: Arc<Context>,
    progress: Arc<Progress>,
    /// True if producing kernels store the data at the destination themselves, so that no copy is needed.
    is_stored: bool,
    state: Mutex<ArmedState>,
}

impl PartitionWords {
    /// Allocates the flags and counters of partitions that this rank needs. Returns `None` if the transfers do not move in partitions.
    pub fn new(at: &Bindings<'_>, progress: &Arc<Progress>, held: &mut Held) -> Result<Option<Arc<PartitionWords>>, Error> {
        let Some(partitioned) = &at.together.partitioned else { return Ok(None) };
        let (rank, context) = (at.node.rank(), at.node.context());
        let mut allocate = |device: DeviceId, bytes: u64| {
            let address = context.allocate_shared(device, bytes)?;
            held.allocations.push(address);
            Ok::<u64, Error>(address)
        };
        let all = || partitioned.names.iter().zip(&partitioned.partitions).zip(&partitioned.flags).zip(&at.together.transfers).enumerate();
        // Memory to be cleared, each as device, address and size in bytes.
        let mut cleared: Vec<(DeviceId, u64, u64)> = Vec::new();
        let (mut triggers, mut flags, mut steps) = (BTreeMap::new(), (u64::MAX, 0), Vec::new());
        let mut own = |first: u32, count: u32| {
            let address = at.flag_address(FlagId(first));
            flags = (flags.0.min(address), flags.1 + u64::from(count) * FLAG_BYTES);
            address
        };
        for (index, (((name, partitions), of), transfer)) in all() {
            let mut trigger = Trigger { partitions: *partitions, arrived_flags: of.writers, ..Trigger::default() };
            if transfer.src.rank == rank && partitions.count > 0 {
                let (device, counted) = (at.node.device_here(at.together.src_devices[index]), u64::from(partitions.count) * 8);
                trigger.counters = allocate(device, counted + STEP_BYTES)?;
                cleared.push((device, trigger.counters, counted));
                // If producing kernels store the data at the destination, the ready flags are in the receiver's memory.
                trigger.ready = if at.together.is_stored() { at.flag_address(FlagId(of.ready)) } else { own(of.ready, partitions.count) };
                trigger.step = trigger.counters + counted;
                steps.push(StepWords { transfer: index as u32, device, address: trigger.step, choices: 0 });
            }
            if transfer.dst.rank == rank && partitions.count * of.writers > 0 {
                trigger.arrived = own(of.arrived, partitions.count * of.writers);
                // Records which rank sets these flags, so that kernels that wait for the flags are released if that rank ends.
                let flags = (0..u64::from(partitions.count * of.writers)).map(|flag| trigger.arrived + flag * FLAG_BYTES);
                let waits: Vec<Signal> = flags.map(|counter| Signal { counter, value: 1 }).collect();
                at.node.context.backend().kernel_wait_signals(&waits, true)?;
            }
            if [transfer.src.rank, transfer.dst.rank].contains(&rank) {
                triggers.insert(*name, trigger);
            }
        }
        // A device of this rank is used, because it must be able to copy.
        let device = at.node.own_device();
        let zeros = if flags.1 > 0 { allocate(device, flags.1)? } else { 0 };
        cleared.extend((flags.1 > 0).then_some((device, zeros, flags.1)));
        clear(at, &cleared, &mut allocate)?;
        let each = STEP_BYTES * (PartitionMove::Stored as u64 + 1);
        let choices = if steps.is_empty() { 0 } else { allocate(DeviceId::HOST, each * steps.len() as u64)? };
        (0..).zip(&mut steps).for_each(|(number, words): (u64, _)| words.choices = choices + each * number);
        let (context, progress, is_stored) = (Arc::clone(context), Arc::clone(progress), at.together.is_stored());
        let (said, state) = (Arc::new(AtomicU32::new(partitioned.how as u32)), Mutex::default());
        let words = PartitionWords { triggers, flags, zeros, steps, said, device, context, progress, is_stored, state };
        if let Some(ProducerOrders { copies: (program, ends), .. }) = words.orders(at, partitioned)? {
            run_now(words.context.backend(), device, &program, &ends)?;
        }
        let words = Arc::new(words);
        let first: Weak<dyn EndsFirst> = Arc::<PartitionWords>::downgrade(&words);
        words.context.state().end_first(first)?;
        Ok(Some(words))
    }

    /// Returns the work that one plan variant enqueues in each step before the kernels that produce the data.
    pub fn armed(&self, partitioned: &Partitioned, part: &Part, at: &Bindings<'_>) -> Result<Armed, Error> {
        let reset = || copy_of(self.device, self.flags.1, Endpoints { dst: self.flags.0, src: self.zeros });
        Ok(Armed {
            takes: part.arms.iter().map(|flag| at.flag_address(*flag)).collect(),
            reset: (partitioned.counts() && self.flags.1 > 0).then(reset),
            orders: self.orders(at, partitioned)?,
            is_after: partitioned.how == PartitionMove::After,
        })
    }

    /// Returns the instructions that one plan variant gives to this rank's producing kernels in each step. Fails with
    /// [`BackendError::NotSupported`] if these kernels would have to store to memory that their GPU cannot access.
    fn orders(&self, at: &Bindings<'_>, partitioned: &Partitioned) -> Result<Option<ProducerOrders>, Error> {
        let how = partitioned.how;
        let copies = self.steps.iter().map(|words| {
            let StepWords { transfer, device, address, choices } = *words;
            let source = at.address(Place::Source { transfer, offset: 0 });
            let to = if how == PartitionMove::Stored {
                let ends = Endpoints { dst: at.address(Place::Destination { transfer, offset: 0 }), src: source };
                let (program, ends) = copy_of(device, at.together.transfers[transfer as usize].bytes, ends);
                let ends = if device.is_host() { ends } else { self.context.backend().kernel_ends(device, &program, &ends)? };
                ends[0].dst
            } else {
                source
            };
            let choice = choices + how as u64 * STEP_BYTES;
            // SAFETY: the address is aligned and in host memory that lives as long as this plan. All readers read the same type.
            unsafe { with_exposed_provenance_mut::<[u64; 2]>(choice as usize).write([to, u64::from(partitioned.counts())]) };
            Ok((STEP_BYTES, Endpoints { dst: address, src: choice }))
        });
        let copies = copies.collect::<Result<Vec<_>, BackendError>>()?;
        let said = Arc::clone(&self.said);
        Ok((!copies.is_empty()).then(|| ProducerOrders { copies: copies_of(self.device, &copies), how, said }))
    }

    /// Records that a step is armed: it has begun, and the kernels that produce its data follow. Returns an error if another step is armed
    /// and not yet executed.
    pub fn arm(&self, is_captured: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        if state.armed.is_some() {
            let reason = "the plan is armed already: execute it after the work that makes its partitions ready".into();
            return Err(Error::NodeArgument { argument: c"plan", reason });
        }
        state.armed = Some(is_captured);
        Ok(())
    }

    /// Records that no step is armed (begun before its data is produced), because an error has occurred while a step was being armed.
    pub fn disarm(&self) {
        lock(&self.state).armed = None;
    }

    /// Records that the armed step (begun before its data was produced) is executed. Returns an error if no step is armed.
    pub fn take_armed(&self, is_captured: bool) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let refuse = |reason: &str| Err(Error::NodeArgument { argument: c"plan", reason: reason.into() });
        match state.armed {
            None => refuse(
                "the plan moves its transfers in partitions, so each execution begins with arm, but the plan is not armed: call arm \
                 before you enqueue the kernels that produce the data",
            ),
            Some(armed) if armed != is_captured => {
                refuse("the plan was armed outside of this capture: arm and execute it in the same capture")
            }
            Some(_) => {
                state.armed = None;
                Ok(())
            }
        }
    }

    /// Records `end` as the completion of the last execution.
    pub fn note(&self, end: Completion) {
        lock(&self.state).last = Some(end);
    }

    /// Waits until the last execution has finished, for at most `patience`. On a time-out, returns an error that names the partitions for
    /// which the execution is waiting.
    pub fn wait(&self, patience: Duration, is_ended: bool) -> Result<(), Error> {
        let Some(last) = lock(&self.state).last.clone() else { return Ok(()) };
        let begin = Instant::now();
        let mut looks = 0_u32;
        while !last.is_done()? {
            if begin.elapsed() >= patience {
                let missing = self.missing()?;
                return Err(Error::PartitionTimeout { missing, seconds: patience.as_secs_f64(), is_ended });
            }
            signal::rest(looks);
            looks = looks.saturating_add(1);
        }
        last.wait().map_err(Error::from)
    }

    /// Waits for the last execution before the plan is destroyed. If the execution has not finished at the time `until`, this function sets
    /// the ready flags that the producing kernels have not set. The execution then finishes without the data of these partitions.
    pub fn finish(&self, until: Instant) -> Result<(), Error> {
        let waited = self.wait(until.saturating_duration_since(Instant::now()), true);
        // If producing kernels store the data, the flags signal arrival to the receiver, and this rank waits for none of them.
        if matches!(waited, Err(Error::PartitionTimeout { .. })) && !self.is_stored {
            let raise = |flag| self.context.backend().raise_signal(Signal { counter: flag, value: 1 });
            let raise_all =
                || self.triggers.values().filter(|trigger| trigger.ready != 0).flat_map(Trigger::ready_flags).try_for_each(raise);
            raise_all()?;
            // A stream that starts its wait late resets the flags first, so the flags are set again.
            let end = Instant::now() + LAST_PATIENCE;
            while matches!(self.wait(RAISED_AGAIN, true), Err(Error::PartitionTimeout { .. })) && Instant::now() < end {
                raise_all()?;
            }
        }
        if lock(&self.state).armed.take().is_some() {
            // The other ranks may have begun a step that this rank will not finish.
            self.progress.fail();
        }
        waited
    }

    /// Returns a text that names the partitions for which the last execution is waiting.
    fn missing(&self) -> Result<String, Error> {
        let backend = self.context.backend();
        let mut text = String::new();
        // Returns true for each partition whose `flags` flags are all set. Returns an empty list for a transfer without such flags.
        let ups = |first: u64, flags: u32, count: u32| -> Result<Vec<bool>, Error> {
            let is_up = |partition: u32| {
                (0..flags).try_fold(true, |up, flag| {
                    Ok::<bool, Error>(up & (backend.read_signal(first + u64::from(partition * flags + flag) * FLAG_BYTES)? != 0))
                })
            };
            (0..if first == 0 { 0 } else { count }).map(is_up).collect()
        };
        // Producers have counted in the last step only in these cases.
        let counts = self.is_stored || self.said.load(Ordering::Relaxed) == PartitionMove::Early as u32;
        for (name, trigger) in self.triggers.iter().filter(|_| counts) {
            let count = trigger.partitions.count;
            let ready = ups(trigger.ready, 1, count)?;
            let arrived = ups(trigger.arrived, trigger.arrived_flags, count)?;
            for (up, what) in [(ready, "was not made ready"), (arrived, "has not arrived")] {
                let mut missing = (0..).zip(up).filter(|(_, is_up)| !is_up).map(|(partition, _): (u32, _)| partition);
                if let Some(first) = missing.next() {
                    let (comma, rest) = (if text.is_empty() { "" } else { ", " }, missing.count());
                    let more = if rest > 0 { format!(" (and {rest} more)") } else { String::new() };
                    let (rank, index) = name;
                    // Writing to a String cannot fail.
                    let _ = write!(text, "{comma}partition {first}{more} of transfer {index} of rank {rank} {what}");
                }
            }
        }
        Ok(if text.is_empty() {
            "the step has not ended, although all partitions that this rank sees are ready or have arrived".into()
        } else {
            text
        })
    }
}

impl EndsFirst for PartitionWords {
    fn take_back(&self) {}

    fn end(&self, until: Instant) {
        if let Err(error) = self.finish(until) {
            log::warn!("could not destroy a node plan together with its context: {error}");
        }
    }

    fn close(&self) {}
}

impl Trigger {
    /// Returns the addresses of the flags by which producing kernels mark partitions as ready.
    fn ready_flags(&self) -> impl Iterator<Item = u64> {
        (0..u64::from(self.partitions.count)).map(|partition| self.ready + partition * FLAG_BYTES)
    }
}

/// Sets device memory to 0 and waits until this is done. Shared host memory is 0 when it is new.
fn clear(
    at: &Bindings<'_>,
    ranges: &[(DeviceId, u64, u64)],
    allocate: &mut impl FnMut(DeviceId, u64) -> Result<u64, Error>,
) -> Result<(), Error> {
    let of_devices = || ranges.iter().filter(|(device, ..)| !device.is_host());
    let Some(most) = of_devices().map(|(.., bytes)| *bytes).max() else { return Ok(()) };
    let zeros = allocate(DeviceId::HOST, most)?;
    of_devices()
        .try_for_each(|&(device, dst, bytes)| Ok(copy_now(at.node.context().backend(), device, bytes, Endpoints { dst, src: zeros })?))
}

/// Copies `bytes` bytes between the addresses in `ends`, and waits until the copy has finished.
pub(super) fn copy_now(backend: &dyn Backend, device: DeviceId, bytes: u64, ends: Endpoints) -> Result<(), BackendError> {
    let (program, endpoints) = copy_of(device, bytes, ends);
    run_now(backend, device, &program, &endpoints)
}

/// Executes `program` and waits until it has finished.
fn run_now(backend: &dyn Backend, device: DeviceId, program: &Arc<Program>, endpoints: &Arc<[Endpoints]>) -> Result<(), BackendError> {
    let stream = backend.create_stream(device)?;
    let submitted = backend.submit(&Execution::new(program, endpoints, &Arc::from([]), stream));
    let done = submitted.and_then(|end| end.map_or(Ok(()), |end| end.wait()));
    done.and(backend.destroy_stream(stream))
}

/// Returns a program that makes one copy of `bytes` bytes on `device`, with the source and destination addresses of the copy.
pub(super) fn copy_of(device: DeviceId, bytes: u64, ends: Endpoints) -> (Arc<Program>, Arc<[Endpoints]>) {
    copies_of(device, &[(bytes, ends)])
}

/// Returns a program that makes copies one after the other on `device`, with the source and destination addresses of the copies.
fn copies_of(device: DeviceId, copies: &[(u64, Endpoints)]) -> (Arc<Program>, Arc<[Endpoints]>) {
    let op = |(transfer, (bytes, _)): (u32, &(u64, Endpoints))| {
        let copy = Copy { from: Place::Source { transfer, offset: 0 }, to: Place::Destination { transfer, offset: 0 }, bytes: *bytes };
        Op { lane: LaneId(0), mechanism: Mechanism::Copy, copies: [copy].into_iter().collect(), after: Default::default() }
    };
    let (transfers, ends) = copies.iter().copied().unzip::<u64, Endpoints, Vec<_>, Vec<_>>();
    let ops = (0..).zip(copies).map(op).collect();
    let program = Program { sources: Vec::new(), transfers, lanes: vec![Lane::new(device)], rings: Vec::new(), ops };
    (Arc::new(program), ends.into())
}
