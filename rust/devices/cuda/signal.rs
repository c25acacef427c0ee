//! Implements signals. A signal is a counter in pinned memory files. The CPU and the GPUs of every process that maps the file can read and
//! set the counter.
//!
//! A stream waits for a counter by a wait-value operation and sets a counter by a write-value operation. The write happens after all
//! earlier work of the stream and after a system-wide memory barrier. If the counter has already reached its value when a wait is
//! requested, no wait is enqueued. A wait would take about 6 us on H200 even in this case. It is not needed, because the data that a value
//! announces is visible as soon as the value is. With [`SignalWait::Kernel`], a kernel of one warp waits in place of the wait-value
//! operation, and the stream continues 4 us sooner.
//!
//! A stream's wait cannot be cancelled. If the process that should have set a counter has exited, this process sets the counter to the
//! awaited value, and reports the failed wait to threads that synchronize (`failed_waits`). Another process may lower the counter
//! afterwards, so this process sets it again as long as the memory is mapped. A wait is entered into the table before it is passed to the
//! driver. No lock is held during the driver's call, because the call blocks while the stream's queue is full. The thread that ends the
//! waits for a lost peer therefore finds all waits and never blocks on one of them. A captured wait runs at every launch of its graph, and
//! the program may reset its counter between launches. Captured waits therefore stay in the table until their memory is unmapped.

use super::driver::{CUstream, OutsideCapture, call_optional, handle, lock};
use super::gpus::Gpus;
use super::kernel::SIGNALS_PER_WAIT;
use super::parts::Core;
use super::streams::Found;
use crate::backend::{
    ActionGrid, ActionReach, BackendError, Endpoints, Execution, FailedWait, MOST_ACTIONS, Signal, SignalWait, StepFate, StreamHandle,
};
use crate::bridge::Segment;
use crate::ipc::signal;
use crate::plan::Program;
use crate::topology::DeviceId;
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::ffi::c_uint;
use std::sync::Arc;

/// Maximum number of operations on counters that are passed to the driver in one call.
const MOST_OPERATIONS: usize = 256;

/// Kind of a stream operation on a counter: waiting for a value, or setting the counter to a value.
#[derive(Copy, Clone, PartialEq, Eq)]
enum SignalOperation {
    Wait,
    Raise,
}

/// Returns a stream operation on a counter in the driver's format: a wait, or a write.
fn operation(purpose: SignalOperation, Signal { counter, value }: Signal) -> sys::CUstreamBatchMemOpParams {
    // SAFETY: The structure is a union of integers, for which zero is a valid value. Flags of zero mean a wait for a cyclically greater or
    // equal value, and a write after a memory barrier.
    let mut params: sys::CUstreamBatchMemOpParams = unsafe { std::mem::zeroed() };
    match purpose {
        SignalOperation::Wait => {
            params.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64;
            // SAFETY: The operation selects this member of the union. Every member starts with the operation and consists of integers.
            let wait = unsafe { &mut params.waitValue };
            wait.address = counter;
            wait.__bindgen_anon_1.value64 = value;
        }
        SignalOperation::Raise => {
            params.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
            // SAFETY: The operation selects this member of the union. Every member starts with the operation and consists of integers.
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
        let _turn = self.turn(stream)?;
        let enqueued = self.with_stream(stream, |primary, raw| {
            let kernel = primary.kernel().filter(|_| by == SignalWait::Kernel);
            for some in pending.chunks(if kernel.is_some() { SIGNALS_PER_WAIT } else { MOST_OPERATIONS }) {
                match kernel {
                    // SAFETY: The counters are in pinned memory, which has the same address for the CPU and all GPUs (`sharing`). The
                    // caller keeps this memory allocated until the work of the stream has finished.
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

    /// Enqueues operations that set the counters in `raises`, and then operations that wait for each flag in `flags` and reset it. The
    /// flags are not checked before enqueueing, because a flag that is set now may belong to an earlier communication step whose wait is
    /// still in the stream's queue. Like captured waits, these waits stay in the table of waits until their memory is unmapped.
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

    /// Enqueues operations that wait for flags but do not reset them.
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

    /// Enqueues one kernel that executes a list of actions: it waits for flags, copies, and sets flags. The stream needs no wait operation,
    /// because the kernel waits for the flags. Returns false if the kernel is not available or there are too many actions.
    pub fn run_actions(
        &self,
        stream: StreamHandle,
        device: DeviceId,
        actions: &[Segment],
        grid: ActionGrid,
        fate: &StepFate,
    ) -> Result<bool, BackendError> {
        if actions.len() > MOST_ACTIONS {
            return Ok(false);
        }
        self.with_stream(stream, |primary, raw| {
            let Some(kernel) = primary.kernel().filter(|_| device == DeviceId(primary.gpu() as i32)) else {
                return Ok(false);
            };
            // The communication step is registered first. If a peer is lost before the kernel is enqueued, the step is therefore abandoned
            // as well.
            lock(&self.sharing.waits).stops.entry(grid.stop).or_insert_with(|| fate.clone());
            self.enter_flags(stream, [grid.stop].into_iter())?;
            // SAFETY: `action_reach` has determined that the GPU can access every end and all flags. `stop` is in pinned memory, which has
            // the same address for the CPU and all GPUs (`sharing`). The caller keeps all this memory allocated until the work of the
            // stream has finished.
            unsafe { kernel.run(self.gpus.driver, actions, grid, raw) }?;
            Ok(true)
        })
    }

    /// Returns the sources and destinations of a program's transfers as addresses that action kernels of `device` use, and the maximum
    /// number of blocks per launch. Returns an error if such kernels cannot execute the program.
    pub fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        self.gpus.check_device(device)?;
        self.gpus.load_kernels();
        let gpu = device.0 as usize;
        let processors = self.gpus.peered(gpu)?.kernel().map(|kernel| kernel.processors());
        let processors = processors.ok_or_else(|| no_kernel(gpu, "the driver of the GPU cannot load the kernels of mpgpu"))?;
        Ok(ActionReach { ends: self.kernel_ends(device, program, ends)?, processors })
    }

    /// Returns the sources and destinations of a program's transfers as addresses that kernels of `device` use. Returns an error if these
    /// kernels cannot access all of them.
    pub fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        self.gpus.check_device(device)?;
        let (gpu, nothing) = (device.0 as usize, Arc::from([]));
        let execution = Execution::new(program, ends, &nothing, StreamHandle(0));
        if !self.plan_is_reached(&execution, gpu)? {
            return Err(no_kernel(gpu, "the GPU cannot write to all destinations"));
        }
        Ok(self.own_ends(&execution, gpu).unwrap_or_else(|| Arc::clone(ends)))
    }

    /// Registers waits that are about to be enqueued, and returns the registered waits. Outside a capture, these are the waits whose
    /// counters have not reached the required values yet. In a capture, these are all waits.
    fn register_waits(&self, stream: StreamHandle, signals: &[Signal]) -> Result<Vec<Signal>, BackendError> {
        // A captured wait runs later, and its counter may have been reset until then.
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
            let lost_peer = self.sharing.lost_peer(wanted);
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

    /// True if the stream is being captured. Also true if the driver cannot report this, as for default streams while another stream is
    /// being captured.
    pub fn is_captured(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        if let Some(known) = self.streams.find(&self.gpus, stream)?.is_capturing {
            return Ok(known);
        }
        self.with_stream(stream, |_, raw| Ok(self.gpus.is_captured_now(raw)))
    }

    /// Calls `work` while the context of the stream's GPU is current. Implements
    /// [`Backend::in_stream`](crate::backend::Backend::in_stream).
    pub fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let _current = self.gpus.primary(found.gpu)?.enter()?;
        let is_captured = found.is_capturing.unwrap_or_else(|| self.gpus.is_captured_now(handle(stream.0)));
        let _held = (!is_captured).then(|| self.streams.hold(stream, Found { is_capturing: Some(false), ..found }));
        work(is_captured);
        Ok(())
    }

    /// True if a non-blocking stream has no pending work. False for other streams, and for streams that are being captured. Implements
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
            // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
            unsafe { call_optional!(driver, cuStreamGetFlags(handle(stream.0), &mut flags)) }?;
            let is_apart = flags & sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint != 0;
            // SAFETY: The caller passes a valid stream, which is not being captured.
            Ok(is_apart && unsafe { (driver.cuStreamQuery)(handle(stream.0)) } == 0)
        });
        asked.unwrap_or(false)
    }

    pub fn raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.with_stream(stream, |_, raw| {
            // Finding the stream detects a reset of the device. After a reset, other memory may be at the addresses of the counters.
            signals.iter().try_for_each(|signal| self.sharing.read_signal(signal.counter).map(drop))?;
            self.gpus.operate(raw, SignalOperation::Raise, signals)
        })
    }
}

impl Gpus {
    /// True if a stream is being captured. The stream's context must be current.
    fn is_captured_now(&self, raw: CUstream) -> bool {
        let mut status = 0;
        // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
        let code = unsafe { (self.driver.cuStreamIsCapturing)(raw, &mut status) };
        code != 0 || status != 0
    }

    /// Enqueues waits for words that the copy threads of the library set to `value`. These waits are not registered, because copy threads
    /// always set their words.
    pub fn wait_for_threads(&self, raw: CUstream, words: impl Iterator<Item = u64>, value: u64) -> Result<(), BackendError> {
        self.operate_all(raw, words.map(|counter| operation(SignalOperation::Wait, Signal { counter, value })))
    }

    /// Enqueues an operation that sets the word at the address `word` to `value`. A copy thread of the library waits for this word.
    pub fn tell_threads(&self, raw: CUstream, word: u64, value: u64) -> Result<(), BackendError> {
        self.operate(raw, SignalOperation::Raise, &[Signal { counter: word, value }])
    }

    fn operate(&self, raw: CUstream, purpose: SignalOperation, signals: &[Signal]) -> Result<(), BackendError> {
        self.operate_all(raw, signals.iter().map(|signal| operation(purpose, *signal)))
    }

    fn operate_all(&self, raw: CUstream, operations: impl Iterator<Item = sys::CUstreamBatchMemOpParams>) -> Result<(), BackendError> {
        let mut operations: SmallVec<[_; 4]> = operations.collect();
        for some in operations.chunks_mut(MOST_OPERATIONS) {
            // SAFETY: The list has the given length, and the driver reads it during the call. The counters are in pinned memory, which the
            // caller keeps allocated until the work of the stream has finished.
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
        // Layout in cuda.h: operation, address, value, flags and alias, with 4, 8, 8, 4 and 8 bytes.
        for (purpose, number) in [(SignalOperation::Wait, 4), (SignalOperation::Raise, 5)] {
            let params = operation(purpose, Signal { counter: 0x7000_1008, value: 0xFFFF_0000_0001 });
            // SAFETY: Every member of the union consists of integers, and all bytes were zeroed.
            let words = unsafe { params.pad };
            assert_eq!(words[..4], [number, 0x7000_1008, 0xFFFF_0000_0001, 0]);
        }
    }
}
