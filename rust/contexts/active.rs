//! Estimates which streams of a context are copying now, without querying a device.
//!
//! Copies of several streams take bandwidth from each other. The variant of a plan that is fastest for an isolated stream may slow down all
//! streams, because the link to a relay GPU may be the direct link of another stream. Before each execution of a plan, this module
//! therefore returns which GPUs the copies of other streams write and read ([`choosing`](super::choosing)). A stream counts as active for
//! several times the duration of its last execution, because programs keep several executions in flight. A wrong estimate never affects
//! results: the measured time of an execution is then only filed under the wrong kind of timing (isolated, or while other streams copy).

use crate::backend::StreamHandle;
use crate::sync::{AtomicU64, Ordering};
use crate::topology::DeviceId;
use std::time::{Duration, Instant};

/// Maximum number of streams that are tracked. If more streams copy, the stream whose copies are expected to end first is forgotten.
const STREAMS: usize = 16;

/// Factor for the time for which a stream counts as active after its last execution was enqueued: this time is the factor times the
/// expected duration of the execution.
const TIMES: u32 = 8;

#[derive(Debug)]
pub(super) struct ActiveStreams {
    since: Instant,
    streams: [ActiveStream; STREAMS],
}

/// Copies of other streams that were estimated to be in progress when an execution was enqueued.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OtherCopies {
    pub any: bool,
    pub ends: GpuEnds,
}

/// GPUs at the two ends of one or several copies: the GPUs that are written to, and the GPUs that are read from.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuEnds {
    pub to: GpuSet,
    pub from: GpuSet,
}

impl GpuEnds {
    pub fn all(self) -> GpuSet {
        GpuSet(self.to.0 | self.from.0)
    }
}

/// Set of GPUs, one bit for each GPU. All GPUs with number 63 or higher share bit 63.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuSet(u64);

impl GpuSet {
    pub fn of(devices: impl IntoIterator<Item = DeviceId>) -> GpuSet {
        let gpus = devices.into_iter().filter(|device| !device.is_host());
        GpuSet(gpus.fold(0, |set, gpu| set | 1 << u64::from(gpu.0.unsigned_abs()).min(63)))
    }

    pub fn meets(self, other: GpuSet) -> bool {
        self.0 & other.0 != 0
    }
}

/// Entry of the table of active streams: one stream, and the GPUs that its last execution writes and reads. The thread that enqueues the
/// execution writes the entry. If two threads claim the same entry at the same time, the data of one of them is lost.
#[derive(Debug, Default)]
struct ActiveStream {
    handle: AtomicU64,
    /// Bit mask ([`GpuSet`]) of the GPUs that the stream's last execution writes to.
    to: AtomicU64,
    from: AtomicU64,
    /// Time until which the stream counts as active, in nanoseconds after [`ActiveStreams::since`]; 0 if the entry is free.
    until: AtomicU64,
}

impl ActiveStreams {
    pub fn new() -> ActiveStreams {
        ActiveStreams { since: Instant::now(), streams: Default::default() }
    }

    /// Records that an execution is enqueued in `stream`. `takes` is its expected duration, and `ends` holds the GPUs between which it
    /// copies. Returns the copies that other streams have in progress.
    pub fn enters(&self, stream: StreamHandle, takes: Duration, ends: GpuEnds) -> OtherCopies {
        self.enters_at(self.since.elapsed(), stream.0 as u64, takes, ends)
    }

    fn enters_at(&self, now: Duration, handle: u64, takes: Duration, ends: GpuEnds) -> OtherCopies {
        let nanoseconds = |time: Duration| time.as_nanos().min(u128::from(u64::MAX)) as u64;
        let (now, until) = (nanoseconds(now), nanoseconds(now + TIMES * takes));
        let (mut own, mut others, mut oldest) = (None, OtherCopies::default(), (&self.streams[0], u64::MAX));
        for stream in &self.streams {
            let its = stream.until.load(Ordering::Relaxed);
            if its == 0 {
                // Entries are filled in order, so all entries after this free one are free too.
                oldest = (stream, 0);
                break;
            }
            if stream.handle.load(Ordering::Relaxed) == handle {
                own = Some(stream);
                continue;
            }
            if its > now {
                others.any = true;
                others.ends.to.0 |= stream.to.load(Ordering::Relaxed);
                others.ends.from.0 |= stream.from.load(Ordering::Relaxed);
            }
            if its < oldest.1 {
                oldest = (stream, its);
            }
        }
        let place = own.unwrap_or(oldest.0);
        place.handle.store(handle, Ordering::Relaxed);
        place.to.store(ends.to.0, Ordering::Relaxed);
        place.from.store(ends.from.0, Ordering::Relaxed);
        place.until.store(until, Ordering::Relaxed);
        others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn gpus<const N: usize>(gpus: [i32; N]) -> GpuSet {
        GpuSet::of(gpus.map(DeviceId))
    }

    #[test]
    fn a_stream_counts_for_others_until_its_copies_are_over_and_never_for_itself() {
        let active = ActiveStreams::new();
        let ends = |stream| GpuEnds { to: gpus([stream as i32]), from: gpus([0]) };
        let enters = |now, stream, takes| {
            let others = active.enters_at(MS(now), stream, MS(takes), ends(stream));
            assert_eq!(others.ends.from, if others.any { gpus([0]) } else { gpus([]) });
            others.ends.to
        };
        assert_eq!([enters(0, 1, 5), enters(1, 1, 5)], [gpus([]); 2]);
        assert_eq!(enters(2, 2, 1), gpus([1]), "until 41");
        assert_eq!(enters(3, 3, 1), gpus([1, 2]));
        assert_eq!(enters(9, 1, 5), gpus([2, 3]), "until 10 and 11");
        assert_eq!([enters(10, 1, 5), enters(11, 1, 5)], [gpus([3]), gpus([])]);
    }

    #[test]
    fn of_many_streams_those_that_copied_last_are_known() {
        let active = ActiveStreams::new();
        for stream in 0..100 {
            assert_eq!(active.enters_at(MS(stream), stream, MS(5), GpuEnds::default()).any, stream > 0);
        }
        assert!(active.enters_at(MS(138), 7, MS(1), GpuEnds::default()).any, "stream 99 copies until 139");
        assert!(!active.enters_at(MS(200), 7, MS(1), GpuEnds::default()).any);
    }

    #[test]
    fn sets_of_gpus_hold_no_host_memory() {
        assert!(gpus([0, 3]).meets(gpus([3, 7])) && !gpus([0, 3]).meets(gpus([1, 2])));
        assert_eq!(GpuSet::of([DeviceId::HOST]), GpuSet::default());
        assert!(gpus([100]).meets(gpus([63])), "rather plain copies than a relay at work");
    }
}
