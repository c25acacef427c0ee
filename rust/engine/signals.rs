//! Signals: counters in memory that streams raise, and that streams and threads wait for.

use super::context::Context;
use super::error::Error;
use crate::backend::{InVain, Signal, StreamHandle};
use crate::share;
use std::time::{Duration, Instant};

/// What is done with a counter.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Use {
    Wait,
    Raise,
}

impl Context {
    /// Makes later work in `stream` wait until every counter has reached its value.
    pub fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(signals, Use::Wait)?;
        Ok(self.backend().stream_wait_signals(stream, signals, self.shared.config.signal_wait)?)
    }

    /// Raises every counter to its value after all work enqueued in `stream` so far.
    pub fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.check_signals(signals, Use::Raise)?;
        Ok(self.backend().stream_raise_signals(stream, signals)?)
    }

    /// Blocks until a counter has reached its value, for at most `seconds`.
    pub fn wait_signal(&self, signal: Signal, seconds: f64) -> Result<(), Error> {
        let Signal { counter, value } = signal;
        // More than an `Instant` can hold is for ever.
        let end = Duration::try_from_secs_f64(seconds).ok().and_then(|limit| Instant::now().checked_add(limit));
        let mut looks = 0_u32;
        loop {
            {
                // Not held while resting: the context can be closed meanwhile, and memory freed.
                let _open = self.shared.enter()?;
                if looks == 0 {
                    self.check_signals(&[signal], Use::Wait)?;
                }
                // Asked first: what a process has raised before it ended counts.
                let abandoned = self.backend().abandoned(counter);
                let now = self.backend().read_signal(counter)?;
                if share::signal::reached(now, value) {
                    return Ok(());
                }
                if let Some(peer) = abandoned {
                    return Err(InVain { wanted: signal, now, peer }.error().into());
                }
                if end.is_some_and(|end| Instant::now() >= end) {
                    return Err(Error::SignalTimeout { counter, now, value, seconds });
                }
            }
            share::signal::rest(looks);
            looks = looks.saturating_add(1);
        }
    }

    fn check_signals(&self, signals: &[Signal], purpose: Use) -> Result<(), Error> {
        for (index, &Signal { counter, .. }) in signals.iter().enumerate() {
            let bad = |reason| Error::BadSignal { index, counter, reason };
            if counter == 0 {
                return Err(bad("is no counter: it is NULL"));
            }
            if !counter.is_multiple_of(8) {
                return Err(bad("is not aligned to 8 bytes"));
            }
            let unknown = "is not memory that this context knows: allocate it with mp_alloc, on MP_DEVICE_HOST say";
            let allocation = self.backend().locate(counter)?.ok_or_else(|| bad(unknown))?;
            if allocation.bytes - (counter - allocation.base) < 8 {
                return Err(bad("runs out of its allocation: a counter has 8 bytes"));
            }
            if let Some(import) = self.shared.sharing.import_at(counter).filter(|import| import.is_foreign()) {
                if purpose == Use::Wait {
                    let why = format!(
                        "signal {index}: {counter:#x} is memory of another process, imported here; wait in memory of this process, and let \
                         the other raise it there"
                    );
                    return Err(share::Error::NotSupported(why).into());
                }
                import.check()?;
            }
        }
        Ok(())
    }
}
