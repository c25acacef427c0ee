//! Implements signals: counters in memory that streams or threads set to a value, and for which streams and threads wait.

use super::error::Error;
use super::lifetime::Context;
use crate::backend::{FailedWait, Signal, StreamHandle};
use crate::ipc;
use std::time::{Duration, Instant};

/// Purpose for which a caller passes the address of a counter. It determines the checks of the address and the text of the error.
#[derive(Copy, Clone, PartialEq, Eq)]
enum SignalUse {
    Wait,
    Raise,
    Read,
}

impl Context {
    /// Makes later work in `stream` wait until every counter in `signals` has reached the value given with it.
    pub fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(signals, SignalUse::Wait)?;
        Ok(self.backend().stream_wait_signals(stream, signals, self.shared.config.signal_wait.unwrap_or_default())?)
    }

    /// Sets each counter in `signals` to the value given with it, after all work enqueued in `stream` so far.
    pub fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(signals, SignalUse::Raise)?;
        Ok(self.backend().stream_raise_signals(stream, signals)?)
    }

    /// Announces that kernels of the program will wait for these counters. This holds until the memory of the counters is freed.
    pub fn kernel_wait_signals(&self, signals: &[Signal]) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(signals, SignalUse::Wait)?;
        Ok(self.backend().kernel_wait_signals(signals, false)?)
    }

    /// Sets a counter to a value immediately. A thread or stream that sees the new value also sees all data that the calling thread has
    /// written or seen before.
    pub fn raise_signal(&self, signal: Signal) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(&[signal], SignalUse::Raise)?;
        Ok(self.backend().raise_signal(signal)?)
    }

    /// Returns the current value of a counter. Data that was written before the counter was set to this value is visible to the caller.
    pub fn read_signal(&self, counter: u64) -> Result<u64, Error> {
        let _open = self.shared.enter()?;
        self.check_signals(&[Signal { counter, value: 0 }], SignalUse::Read)?;
        Ok(self.backend().read_signal(counter)?)
    }

    /// True if a counter has reached the value given with it.
    pub fn is_signal_reached(&self, signal: Signal) -> Result<bool, Error> {
        let _open = self.shared.enter()?;
        self.check_signals(&[signal], SignalUse::Wait)?;
        Ok(self.look(signal)?.1)
    }

    /// Blocks until a counter has reached the value given with it. Fails if this takes longer than `seconds`.
    pub fn wait_signal(&self, signal: Signal, seconds: f64) -> Result<(), Error> {
        let Signal { counter, value } = signal;
        // A time limit beyond the range of `Instant` counts as no limit.
        let end = Duration::try_from_secs_f64(seconds).ok().and_then(|limit| Instant::now().checked_add(limit));
        let mut looks = 0_u32;
        loop {
            {
                // The guard is released between polls, so that the context can be closed and memory freed while this thread waits.
                let _open = self.shared.enter()?;
                if looks == 0 {
                    self.check_signals(&[signal], SignalUse::Wait)?;
                }
                let (now, is_reached) = self.look(signal)?;
                if is_reached {
                    return Ok(());
                }
                if end.is_some_and(|end| Instant::now() >= end) {
                    return Err(Error::SignalTimeout { counter, now, value, seconds });
                }
            }
            ipc::signal::rest(looks);
            looks = looks.saturating_add(1);
        }
    }

    /// Returns the value of a counter, and true if that is at least the wanted value. Fails if the counter can no longer reach the wanted
    /// value, because the process that would set it has exited.
    fn look(&self, wanted: Signal) -> Result<(u64, bool), Error> {
        // Check for the peer's exit first, then read the counter, because a signal that the peer sent before its exit is valid.
        let lost_peer = self.backend().lost_peer(wanted);
        let now = self.backend().read_signal(wanted.counter)?;
        let is_reached = ipc::signal::reached(now, wanted.value);
        match lost_peer {
            Some(peer) if !is_reached => Err(FailedWait { wanted, now, peer }.error().into()),
            _ => Ok((now, is_reached)),
        }
    }

    fn check_signals(&self, signals: &[Signal], purpose: SignalUse) -> Result<(), Error> {
        for (index, &Signal { counter, .. }) in signals.iter().enumerate() {
            let bad = |reason| Error::BadSignal { index, counter, reason };
            if counter == 0 {
                return Err(bad("is not a counter: it is NULL"));
            }
            if !counter.is_multiple_of(8) {
                return Err(bad("is not aligned to 8 bytes"));
            }
            let unknown = "is not memory that this context knows: allocate it as memory shared between processes";
            let allocation = self.shared.locate(counter)?.ok_or_else(|| bad(unknown))?;
            if allocation.bytes - (counter - allocation.base) < 8 {
                return Err(bad("extends past the end of its allocation: a counter has 8 bytes"));
            }
            if let Some(import) = self.shared.sharing.import_at(counter).filter(|import| import.is_foreign()) {
                if purpose == SignalUse::Wait {
                    let why = format!(
                        "signal {index}: {counter:#x} is memory of another process that was imported here; wait for a counter in memory \
                         of this process, which the other process sets"
                    );
                    return Err(ipc::IpcError::NotSupported(why).into());
                }
                import.check()?;
            }
        }
        Ok(())
    }
}
