//! Which streams of a context copy now, as far as can be said without asking a device.
//!
//! Copies of several streams take bandwidth from each other, and what is fastest for one of them alone may be slow for all: a relay's link is
//! another stream's direct one. So plans know whether others copy ([`variants`](super::variants)). A stream counts for several times what its
//! last execution takes: programs keep some in flight, and a wrong answer costs no byte, only that the time of an execution is counted with others.

use crate::backend::StreamHandle;
use crate::sync::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Streams that are told apart. Of more, those that have not copied for the longest are forgotten.
const STREAMS: usize = 16;

/// How long a stream counts, by what its last execution takes.
const TIMES: u32 = 8;

#[derive(Debug)]
pub(super) struct ActiveStreams {
    since: Instant,
    streams: [ActiveStream; STREAMS],
}

/// Written by whoever executes; where two threads take one place at once, one of them is forgotten.
#[derive(Debug, Default)]
struct ActiveStream {
    handle: AtomicU64,
    /// Nanoseconds since the beginning up to which it counts; 0 for a free place.
    until: AtomicU64,
}

impl ActiveStreams {
    pub fn new() -> ActiveStreams {
        ActiveStreams { since: Instant::now(), streams: Default::default() }
    }

    /// An execution that takes about so long goes into `stream`: whether another stream copies now.
    pub fn enters(&self, stream: StreamHandle, takes: Duration) -> bool {
        self.enters_at(self.since.elapsed(), stream.0 as u64, takes)
    }

    fn enters_at(&self, now: Duration, handle: u64, takes: Duration) -> bool {
        let nanoseconds = |time: Duration| time.as_nanos().min(u128::from(u64::MAX)) as u64;
        let (now, until) = (nanoseconds(now), nanoseconds(now + TIMES * takes));
        let (mut own, mut others, mut oldest) = (None, false, (&self.streams[0], u64::MAX));
        for stream in &self.streams {
            let its = stream.until.load(Ordering::Relaxed);
            if its != 0 && stream.handle.load(Ordering::Relaxed) == handle {
                own = Some(stream);
            } else {
                others |= its > now;
                if its < oldest.1 {
                    oldest = (stream, its);
                }
            }
        }
        let place = own.unwrap_or(oldest.0);
        place.handle.store(handle, Ordering::Relaxed);
        place.until.store(until, Ordering::Relaxed);
        others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_counts_for_others_until_its_copies_are_over_and_never_for_itself() {
        let (active, ms) = (ActiveStreams::new(), Duration::from_millis);
        assert!(!active.enters_at(ms(0), 1, ms(5)) && !active.enters_at(ms(1), 1, ms(5)));
        assert!(active.enters_at(ms(2), 2, ms(1)), "stream 1 copies until 41");
        assert!(active.enters_at(ms(9), 1, ms(5)), "stream 2 until 10");
        assert!(!active.enters_at(ms(10), 1, ms(5)));
        assert!(!active.enters_at(ms(50), 2, ms(1)));
    }

    #[test]
    fn of_many_streams_those_that_copied_last_are_known() {
        let (active, ms) = (ActiveStreams::new(), Duration::from_millis);
        for stream in 0..100 {
            assert_eq!(active.enters_at(ms(stream), stream, ms(5)), stream > 0);
        }
        assert!(active.enters_at(ms(138), 7, ms(1)), "stream 99 copies until 139");
        assert!(!active.enters_at(ms(200), 7, ms(1)));
    }
}
