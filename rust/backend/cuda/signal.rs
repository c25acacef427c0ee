//! Signals: counters in pinned memory files, which GPUs of every process that maps them read and write, and which the CPU reads.
//!
//! A stream waits by a wait-value and raises by a write-value operation. A write-value comes after all earlier work of the stream, with
//! a barrier of the whole system between. A wait that the CPU finds reached when it is asked for is not enqueued: by itself it takes a
//! stream as long as one that is not, about 6 us on H200, and whoever sees the value sees the bytes. Where the program asks for it
//! (`MPGPU_SIGNAL_WAIT=kernel`) a warp waits in place of the operation, which goes on 4 us sooner. A stream cannot be told to give up, so
//! when a process that might have raised a counter has ended, the counter is raised here to what is waited for, and whoever synchronises
//! a stream is told that it was in vain. It is raised again for as long as it is there: a process that lives may still raise it, to less.
//!
//! A wait is known here before the driver has it, and no lock is held while the driver takes it, because that blocks while the stream's
//! queue is full: whoever lets the stream go on after a peer's end finds every wait that may be in vain, and need not wait for one. A wait
//! that is captured runs whenever the graph is launched, and the program may set its counter back between launches; so it is known until
//! its memory goes.

use super::Core;
use super::device::{Primary, lock};
use super::driver::{CUstream, call_optional};
use super::kernel::SIGNALS_PER_WAIT;
use super::share::Sharing;
use crate::backend::loss::Heard;
use crate::backend::{Allocation, BackendError, Departed, InVain, MemoryKind, Signal, SignalWait, StreamHandle};
use crate::share::signal;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::atomic::Ordering;

/// The driver takes so many operations in one call.
const MOST_OPERATIONS: usize = 256;

/// Waits that streams have been given, or are about to be, and that may not be satisfied yet.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pending: Vec<Signal>,
    /// Those that graphs hold: for each counter the value that is furthest, which includes the others.
    captured: HashMap<u64, u64>,
    /// What was raised here in place of a process that has gone. A raise is a store, so another process that raises the same counter, and is not
    /// that far, sets it back; a stream that had not come to its wait by then would wait for ever.
    in_vain: Vec<Signal>,
}

impl Waits {
    /// A graph waits for it from now on.
    fn capture(&mut self, Signal { counter, value }: Signal) {
        let furthest = self.captured.entry(counter).or_insert(value);
        if signal::reached(value, *furthest) {
            *furthest = value;
        }
    }

    /// Takes out waits that the driver has not taken. Those that were raised by now are not there any more.
    fn take_back(&mut self, signals: &[Signal]) {
        for signal in signals {
            if let Some(index) = self.pending.iter().rposition(|pending| pending == signal) {
                self.pending.swap_remove(index);
            }
        }
    }

    /// Takes out what lies in an allocation that is about to go.
    pub fn forget(&mut self, allocation: &Allocation) {
        self.captured.retain(|counter, _| !contains(allocation, *counter));
        self.pending.retain(|wanted| !contains(allocation, wanted.counter));
        self.in_vain.retain(|wanted| !contains(allocation, wanted.counter));
    }
}

fn contains(allocation: &Allocation, address: u64) -> bool {
    address.checked_sub(allocation.base).is_some_and(|offset| offset < allocation.bytes)
}

impl Sharing {
    /// What the counter at an address stands at.
    pub fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        let read = |held: &super::share::Held| {
            // SAFETY: the engine has checked alignment and range, and what is held stays mapped meanwhile.
            (held.allocation.kind == MemoryKind::Pinned).then(|| unsafe { signal::load(counter) })
        };
        self.at(counter, read).flatten().ok_or_else(|| {
            BackendError::NotSupported(format!(
                "the signal at {counter:#x} is not in host memory of mp_alloc that can be shared: on CUDA signals lie there, so that GPUs of all \
                 processes and the CPU reach them; allocate it on MP_DEVICE_HOST, in less than 4 MiB"
            ))
        })
    }

    pub fn abandoned(&self, counter: u64) -> Option<Departed> {
        self.at(counter, |held| held.abandoned).flatten()
    }

    /// Lets the streams go on that wait for counters in an allocation.
    pub fn abandon(&self, allocation: &Allocation, peer: Departed) {
        let mut waits = lock(&self.waits);
        self.mark_abandoned(allocation, peer);
        let Waits { pending, captured, in_vain } = &mut *waits;
        for wanted in pending.extract_if(.., |wanted| contains(allocation, wanted.counter)) {
            // Before the stream goes on, so that whoever sees it finished is told.
            if self.raise_here(wanted, |now| self.losses.note(InVain { wanted, now, peer })) {
                in_vain.push(wanted);
            }
        }
        for (counter, value) in captured.extract_if(|counter, _| contains(allocation, *counter)) {
            let wanted = Signal { counter, value };
            self.raise_here(wanted, |now| self.losses.note(InVain { wanted, now, peer }));
            // Reached or not: the program may set it back, and launch the graph again.
            in_vain.push(wanted);
        }
    }

    /// Raises again what was raised in vain and set back since, and what a graph is to find raised. True for as long as there is such a
    /// counter left to look after.
    pub fn tend(&self) -> bool {
        let waits = lock(&self.waits);
        for &wanted in &waits.in_vain {
            self.raise_here(wanted, |now| {
                if let Some(peer) = self.abandoned(wanted.counter) {
                    self.losses.note(InVain { wanted, now, peer });
                }
            });
        }
        !waits.in_vain.is_empty()
    }

    /// Raises a counter by the CPU where it is not reached; what it stood at is told before.
    fn raise_here(&self, wanted: Signal, before: impl FnOnce(u64)) -> bool {
        match self.read_signal(wanted.counter) {
            Ok(now) if !signal::reached(now, wanted.value) => {
                before(now);
                // SAFETY: just read, and held until it is forgotten, which takes the lock that the caller has.
                unsafe { signal::store(wanted.counter, wanted.value) };
                true
            }
            _ => false,
        }
    }
}

/// What is done with the counters.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Use {
    Wait,
    Raise,
}

/// One operation, as the driver takes it.
fn operation(purpose: Use, Signal { counter, value }: Signal) -> sys::CUstreamBatchMemOpParams {
    // SAFETY: a union of integers, for which zero is a value. Zero flags: at least, cyclically; with a barrier before a write.
    let mut params: sys::CUstreamBatchMemOpParams = unsafe { std::mem::zeroed() };
    match purpose {
        Use::Wait => {
            params.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64;
            // SAFETY: the operation says which member it is; all of them start with it, and all are integers.
            let wait = unsafe { &mut params.waitValue };
            wait.address = counter;
            wait.__bindgen_anon_1.value64 = value;
        }
        Use::Raise => {
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
        let pending = self.expect(stream, signals)?;
        if pending.is_empty() {
            return Ok(());
        }
        self.load_kernels();
        let mut taken = 0;
        let enqueued = self.with_stream(stream, |primary, raw| {
            let kernel = primary.kernel().filter(|_| by == SignalWait::Kernel);
            for some in pending.chunks(if kernel.is_some() { SIGNALS_PER_WAIT } else { MOST_OPERATIONS }) {
                match kernel {
                    // SAFETY: counters are pinned memory that has one address for the CPU and all GPUs (`share`), and that the caller keeps for
                    // as long as the stream works.
                    Some(kernel) => unsafe { kernel.wait(self.driver, some, raw) }?,
                    None => self.operate(raw, Use::Wait, some)?,
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

    /// Notes the waits that a stream is about to be given: those that are not reached, and in a capture all.
    fn expect(&self, stream: StreamHandle, signals: &[Signal]) -> Result<Vec<Signal>, BackendError> {
        // What is captured runs when the counter may have been set back.
        let is_captured = self.is_captured(stream)?;
        let mut waits = lock(&self.sharing.waits);
        waits.pending.retain(|wanted| self.sharing.read_signal(wanted.counter).is_ok_and(|now| !signal::reached(now, wanted.value)));
        let mut pending = Vec::with_capacity(signals.len());
        for &wanted in signals {
            let abandoned = self.sharing.abandoned(wanted.counter);
            let now = self.sharing.read_signal(wanted.counter)?;
            if is_captured || !signal::reached(now, wanted.value) {
                if let Some(peer) = abandoned {
                    return Err(InVain { wanted, now, peer }.error());
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

    /// Loads the kernels of all GPUs in use, and from now on those of a GPU when it comes into use. Before anything waits, also where an
    /// operation will: loading waits for the device, and what that waits for may be for whoever loads to raise.
    fn load_kernels(&self) {
        self.sharing.has_waits.store(true, Ordering::SeqCst);
        let used = self.used.load(Ordering::SeqCst);
        for (_, device) in self.devices.iter().enumerate().filter(|(gpu, _)| used >> gpu & 1 != 0) {
            device.used().and_then(Primary::kernel);
        }
    }

    /// Whether the stream is being captured. What the driver does not tell, as of default streams during a capture, counts as such.
    fn is_captured(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        self.with_stream(stream, |_, raw| {
            let mut status = 0;
            // SAFETY: the caller's stream; the output is valid for the call.
            let code = unsafe { (self.driver.cuStreamIsCapturing)(raw, &mut status) };
            Ok(code != 0 || status != 0)
        })
    }

    /// What tells a stream apart for [`Losses`](crate::backend::loss::Losses), while its context is current: a number that is never given
    /// out again, as handles are; the handle, which default streams share, where the driver is older than such numbers.
    pub fn number_of(&self, raw: CUstream) -> u64 {
        self.number_outside_capture(raw).unwrap_or(raw.addr() as u64)
    }

    /// What a stream has been told of waits in vain.
    pub fn heard(&self, stream: StreamHandle) -> Heard {
        self.sharing.losses.heard(|| self.with_stream(stream, |_, raw| Ok(self.number_of(raw))).unwrap_or(stream.0 as u64))
    }

    pub fn raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        for signal in signals {
            self.sharing.read_signal(signal.counter)?;
        }
        self.with_stream(stream, |_, raw| self.operate(raw, Use::Raise, signals))
    }

    fn operate(&self, raw: CUstream, purpose: Use, signals: &[Signal]) -> Result<(), BackendError> {
        for some in signals.chunks(MOST_OPERATIONS) {
            let mut operations: Vec<_> = some.iter().map(|signal| operation(purpose, *signal)).collect();
            // SAFETY: a list of this length, read during the call; the counters are pinned memory that the caller keeps for as long as the
            // stream works.
            unsafe { call_optional!(self.driver, cuStreamBatchMemOp(raw, operations.len() as c_uint, operations.as_mut_ptr(), 0)) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_laid_out_as_the_driver_reads_them() {
        // cuda.h: operation, address, value, flags, alias, as 4, 8, 8, 4 and 8 bytes.
        for (purpose, number) in [(Use::Wait, 4), (Use::Raise, 5)] {
            let params = operation(purpose, Signal { counter: 0x7000_1008, value: 0xFFFF_0000_0001 });
            // SAFETY: every member is integers, and all bytes were zeroed.
            let words = unsafe { params.pad };
            assert_eq!(words[..4], [number, 0x7000_1008, 0xFFFF_0000_0001, 0]);
        }
    }

    #[test]
    fn of_each_counter_the_furthest_captured_wait_is_kept_however_often_it_is_captured() {
        let mut waits = Waits::default();
        for value in (0..10_000).chain(0..10) {
            [0x1000, 0x1008].into_iter().for_each(|counter| waits.capture(Signal { counter, value }));
        }
        assert_eq!(waits.captured, HashMap::from([(0x1000, 9999), (0x1008, 9999)]));
        // Counters run over.
        waits.capture(Signal { counter: 0x1000, value: u64::MAX });
        waits.capture(Signal { counter: 0x1000, value: 3 });
        assert_eq!(waits.captured[&0x1000], 9999);
        waits.capture(Signal { counter: 0x1010, value: u64::MAX });
        waits.capture(Signal { counter: 0x1010, value: 3 });
        assert_eq!(waits.captured[&0x1010], 3);
    }
}
