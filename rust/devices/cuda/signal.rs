//! Signals: counters in pinned memory files, which GPUs of every process that maps them read and write, and which the CPU reads.
//!
//! A stream waits by a wait-value and raises by a write-value operation. A write-value comes after all earlier work of the stream, with
//! a barrier of the whole system between. A wait that the CPU finds reached when it is asked for is not enqueued: by itself it takes a
//! stream as long as one that is not, about 6 us on H200, and a value that is visible implies that the bytes are. With
//! [`SignalWait::Kernel`] a warp waits in place of the operation, which goes on 4 us sooner.
//!
//! A stream's wait cannot be cancelled. So when a process that might have raised a counter has ended, this process raises the counter to
//! the awaited value, and reports the failed wait to those that synchronise (`failed_waits`). It raises it again for as long as the
//! memory is mapped, because another process may set it to less.
//!
//! A wait is entered in the table before the driver gets it, and no lock is held while the driver takes it, because that blocks while the
//! stream's queue is full. So the thread that ends the waits of a lost peer finds all of them, and never blocks on one. A captured wait
//! runs at every launch of its graph, and the program may set its counter back between launches; so it stays in the table until its memory
//! is unmapped.

use super::driver::{CUstream, OutsideCapture, call_optional, handle, lock};
use super::gpus::Gpus;
use super::kernel::SIGNALS_PER_WAIT;
use super::parts::Core;
use super::streams::Found;
use crate::backend::{
    ActionGrid, ActionReach, BackendError, Endpoints, Execution, FailedWait, MOST_ACTIONS, Signal, SignalWait, StreamHandle,
};
use crate::bridge::Segment;
use crate::ipc::signal;
use crate::plan::Program;
use crate::topology::DeviceId;
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::ffi::c_uint;
use std::sync::Arc;

/// The driver takes so many operations in one call.
const MOST_OPERATIONS: usize = 256;

/// What is done with the counters.
#[derive(Copy, Clone, PartialEq, Eq)]
enum SignalOperation {
    Wait,
    Raise,
}

/// One operation, as the driver takes it.
fn operation(purpose: SignalOperation, Signal { counter, value }: Signal) -> sys::CUstreamBatchMemOpParams {
    // SAFETY: a union of integers, for which zero is a value. Zero flags: at least, cyclically; with a barrier before a write.
    let mut params: sys::CUstreamBatchMemOpParams = unsafe { std::mem::zeroed() };
    match purpose {
        SignalOperation::Wait => {
            params.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64;
            // SAFETY: the operation says which member it is; all of them start with it, and all are integers.
            let wait = unsafe { &mut params.waitValue };
            wait.address = counter;
            wait.__bindgen_anon_1.value64 = value;
        }
        SignalOperation::Raise => {
            params.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
            // SAFETY: as above.
            let write = unsafe { &mut params.writeValue };
            write.address = counter;
            write.__bindgen_anon_1.value64 = value;
        }
    }
    params
}

impl Core {
    pub fn wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        let pending = self.register_waits(stream, signals)?;
        if pending.is_empty() {
            return Ok(());
        }
        self.gpus.load_kernels();
        let mut taken = 0;
        let enqueued = self.with_stream(stream, |primary, raw| {
            let kernel = primary.kernel().filter(|_| by == SignalWait::Kernel);
            for some in pending.chunks(if kernel.is_some() { SIGNALS_PER_WAIT } else { MOST_OPERATIONS }) {
                match kernel {
                    // SAFETY: counters are pinned memory that has one address for the CPU and all GPUs (`share`), and that the caller keeps for
                    // as long as the stream works.
                    Some(kernel) => unsafe { kernel.wait(self.gpus.driver, some, raw) }?,
                    None => self.gpus.operate(raw, SignalOperation::Wait, some)?,
                }
                taken += some.len();
            }
            Ok(())
        });
        if enqueued.is_err() {
            lock(&self.sharing.waits).take_back(&pending[taken..]);
        }
        enqueued
    }

    /// Has a stream raise counters, then wait for flags and set each back. Nothing is looked at now, and every wait is enqueued: a flag that is up may be for an
    /// earlier step, whose wait is still in the queue. So these are entered as captured waits are, once and for all.
    pub fn take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64]) -> Result<(), BackendError> {
        raises.iter().try_for_each(|signal| self.sharing.read_signal(signal.counter).map(drop))?;
        self.enter_flags(stream, flags.iter().copied())?;
        self.with_stream(stream, |_, raw| {
            let raises = raises.iter().map(|signal| operation(SignalOperation::Raise, *signal));
            let takes = flags.iter().flat_map(|&flag| {
                let of = |purpose, value| operation(purpose, Signal { counter: flag, value });
                [of(SignalOperation::Wait, 1), of(SignalOperation::Raise, 0)]
            });
            self.gpus.operate_all(raw, raises.chain(takes))
        })
    }

    /// The same, and the flags stay up.
    pub fn await_flags(&self, stream: StreamHandle, flags: &[u64]) -> Result<(), BackendError> {
        self.enter_flags(stream, flags.iter().copied())?;
        self.with_stream(stream, |_, raw| {
            let waits = flags.iter().map(|&flag| operation(SignalOperation::Wait, Signal { counter: flag, value: 1 }));
            self.gpus.operate_all(raw, waits)
        })
    }

    fn enter_flags(&self, stream: StreamHandle, flags: impl Iterator<Item = u64> + Clone) -> Result<(), BackendError> {
        self.note_waits(stream, flags.clone())?;
        self.sharing.capture_waits(flags.map(|flag| Signal { counter: flag, value: 1 }))
    }

    /// Flags and copies of one rank by one kernel, which waits in place of the stream.
    pub fn run_actions(&self, stream: StreamHandle, device: DeviceId, actions: &[Segment], grid: ActionGrid) -> Result<bool, BackendError> {
        if actions.len() > MOST_ACTIONS {
            return Ok(false);
        }
        self.with_stream(stream, |primary, raw| {
            let Some(kernel) = primary.kernel().filter(|_| device == DeviceId(primary.gpu() as i32)) else {
                return Ok(false);
            };
            self.enter_flags(stream, [grid.stop].into_iter())?;
            // SAFETY: as `action_reach` has found, the GPU reaches every end and all flags. `stop` is pinned memory that has one address for the CPU
            // and all GPUs (`share`). The caller keeps all of it for as long as the stream works.
            unsafe { kernel.run(self.gpus.driver, actions, grid, raw) }?;
            Ok(true)
        })
    }

    /// How actions reach the ends of a program's transfers.
    pub fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        self.gpus.check_device(device)?;
        self.gpus.load_kernels();
        let gpu = device.0 as usize;
        let processors = self.gpus.peered(gpu)?.kernel().map(|kernel| kernel.processors());
        let processors = processors.ok_or_else(|| no_kernel(gpu, "its driver does not load the library's kernels"))?;
        Ok(ActionReach { ends: self.kernel_ends(device, program, ends)?, processors })
    }

    /// The ends of a program's transfers as kernels of a GPU have them.
    pub fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        self.gpus.check_device(device)?;
        let (gpu, nothing) = (device.0 as usize, Arc::from([]));
        let execution = Execution::new(program, ends, &nothing, StreamHandle(0));
        if !self.plan_is_reached(&execution, gpu)? {
            return Err(no_kernel(gpu, "it does not reach all destinations by its own stores"));
        }
        Ok(self.own_ends(&execution, gpu).unwrap_or_else(|| Arc::clone(ends)))
    }

    /// Notes the waits that a stream is about to be given: those that are not reached, and in a capture all.
    fn register_waits(&self, stream: StreamHandle, signals: &[Signal]) -> Result<Vec<Signal>, BackendError> {
        // What is captured runs when the counter may have been set back.
        let is_captured = self.is_captured(stream)?;
        let may_fail =
            |wanted: &&Signal| is_captured || self.sharing.read_signal(wanted.counter).is_ok_and(|now| !signal::reached(now, wanted.value));
        let counters: SmallVec<[u64; 8]> = signals.iter().filter(may_fail).map(|wanted| wanted.counter).collect();
        if !counters.is_empty() {
            self.note_waits(stream, counters.into_iter())?;
        }
        let mut waits = lock(&self.sharing.waits);
        waits.pending.retain(|wanted| self.sharing.read_signal(wanted.counter).is_ok_and(|now| !signal::reached(now, wanted.value)));
        let mut pending = Vec::with_capacity(signals.len());
        for &wanted in signals {
            let lost_peer = self.sharing.lost_peer(wanted.counter);
            let now = self.sharing.read_signal(wanted.counter)?;
            if is_captured || !signal::reached(now, wanted.value) {
                if let Some(peer) = lost_peer {
                    return Err(FailedWait { wanted, now, peer }.error());
                }
                pending.push(wanted);
            }
        }
        if is_captured {
            pending.iter().for_each(|wanted| waits.capture(*wanted));
        } else {
            waits.pending.extend_from_slice(&pending);
        }
        Ok(pending)
    }

    /// Whether the stream is being captured. What the driver does not tell, as of default streams during a capture, counts as such.
    pub fn is_captured(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        if let Some(known) = self.streams.find(&self.gpus, stream)?.is_capturing {
            return Ok(known);
        }
        self.with_stream(stream, |_, raw| Ok(self.gpus.is_captured_now(raw)))
    }

    /// [`Backend::in_stream`](crate::backend::Backend::in_stream).
    pub fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let _current = self.gpus.primary(found.gpu)?.enter()?;
        let is_captured = found.is_capturing.unwrap_or_else(|| self.gpus.is_captured_now(handle(stream.0)));
        let _held = (!is_captured).then(|| self.streams.hold(stream, Found { is_capturing: Some(false), ..found }));
        work(is_captured);
        Ok(())
    }

    /// [`Backend::is_idle`](crate::backend::Backend::is_idle).
    pub fn is_idle(&self, stream: StreamHandle) -> bool {
        let asked = self.streams.find(&self.gpus, stream).and_then(|found| {
            if found.number.is_none() || found.is_capturing != Some(false) {
                return Ok(false);
            }
            let driver = self.gpus.driver;
            let _outside = OutsideCapture::enter(driver);
            let _current = self.gpus.primary(found.gpu)?.enter()?;
            let mut flags = 0;
            // SAFETY: the caller's stream; the output is valid for the call.
            unsafe { call_optional!(driver, cuStreamGetFlags(handle(stream.0), &mut flags)) }?;
            let is_apart = flags & sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint != 0;
            // SAFETY: as above, and it is not being captured.
            Ok(is_apart && unsafe { (driver.cuStreamQuery)(handle(stream.0)) } == 0)
        });
        asked.unwrap_or(false)
    }

    pub fn raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.with_stream(stream, |_, raw| {
            // After a reset, which finding the stream notices, other memory may lie where the counters were.
            signals.iter().try_for_each(|signal| self.sharing.read_signal(signal.counter).map(drop))?;
            self.gpus.operate(raw, SignalOperation::Raise, signals)
        })
    }
}

impl Gpus {
    /// Whether a stream, whose context is current, is being captured.
    fn is_captured_now(&self, raw: CUstream) -> bool {
        let mut status = 0;
        // SAFETY: the caller's stream; the output is valid for the call.
        let code = unsafe { (self.driver.cuStreamIsCapturing)(raw, &mut status) };
        code != 0 || status != 0
    }

    /// Has a stream wait for words that the library's threads set, which is in no table: they always do.
    pub fn wait_for_threads(&self, raw: CUstream, words: impl Iterator<Item = u64>, value: u64) -> Result<(), BackendError> {
        self.operate_all(raw, words.map(|counter| operation(SignalOperation::Wait, Signal { counter, value })))
    }

    /// Has a stream set a word for which a thread of the library waits.
    pub fn tell_threads(&self, raw: CUstream, word: u64, value: u64) -> Result<(), BackendError> {
        self.operate(raw, SignalOperation::Raise, &[Signal { counter: word, value }])
    }

    fn operate(&self, raw: CUstream, purpose: SignalOperation, signals: &[Signal]) -> Result<(), BackendError> {
        self.operate_all(raw, signals.iter().map(|signal| operation(purpose, *signal)))
    }

    fn operate_all(&self, raw: CUstream, operations: impl Iterator<Item = sys::CUstreamBatchMemOpParams>) -> Result<(), BackendError> {
        let mut operations: SmallVec<[_; 4]> = operations.collect();
        for some in operations.chunks_mut(MOST_OPERATIONS) {
            // SAFETY: a list of this length, read during the call; the counters are pinned memory that the caller keeps for as long as the
            // stream works.
            unsafe { call_optional!(self.driver, cuStreamBatchMemOp(raw, some.len() as c_uint, some.as_mut_ptr(), 0)) }?;
        }
        Ok(())
    }
}

fn no_kernel(gpu: usize, reason: &str) -> BackendError {
    BackendError::NotSupported(format!("kernels of GPU {gpu} cannot move the bytes: {reason}; let copy engines move them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_laid_out_as_the_driver_reads_them() {
        // cuda.h: operation, address, value, flags, alias, as 4, 8, 8, 4 and 8 bytes.
        for (purpose, number) in [(SignalOperation::Wait, 4), (SignalOperation::Raise, 5)] {
            let params = operation(purpose, Signal { counter: 0x7000_1008, value: 0xFFFF_0000_0001 });
            // SAFETY: every member is integers, and all bytes were zeroed.
            let words = unsafe { params.pad };
            assert_eq!(words[..4], [number, 0x7000_1008, 0xFFFF_0000_0001, 0]);
        }
    }
}
