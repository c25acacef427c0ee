//! Which transfers a tuned value holds for.
//!
//! A tuner measures a few batches; a context plans any. Two batches are alike if their bytes go between the same kinds of memory, in the
//! same pattern, over direct links of the same rate. Batches that are like no tuned one are planned by the model.

use crate::plan::Shape;
use crate::topology::{DeviceId, Machine, MemoryKind};
use serde::Deserialize;
use smallvec::SmallVec;

/// What holds the bytes at one end.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Memory of a GPU.
    Gpu,
    /// Pinned host memory.
    Host,
}

impl Side {
    fn of(device: DeviceId) -> Side {
        if device.is_host() { Side::Host } else { Side::Gpu }
    }

    /// As in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            Side::Gpu => "gpu",
            Side::Host => "host",
        }
    }
}

/// How many transfers there are, and who takes part.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One transfer.
    Single,
    /// Two transfers, there and back.
    BothWays,
    /// Several; no device sends or receives more than one.
    Shift,
    /// Every GPU of the machine to every other. The results do not apply to fewer GPUs, because the gain of several paths depends on who else
    /// uses host memory.
    Exchange,
}

impl Pattern {
    /// As in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Single => "single",
            Pattern::BothWays => "both-ways",
            Pattern::Shift => "shift",
            Pattern::Exchange => "exchange",
        }
    }
}

/// Batches that one tuned value holds for.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Class {
    /// Where the bytes come from.
    pub from: Side,
    /// Where they go.
    pub to: Side,
    /// How many transfers, and whose.
    pub pattern: Pattern,
    /// Bytes/s of the slowest direct route among the transfers; 0 where one has none.
    pub direct: f64,
}

/// Part of a rate by which routes of one class may differ: less than between links of one and two lanes, more than between two readings.
const ALIKE: f64 = 0.05;

impl Class {
    /// The class of a batch, and the bytes of its largest transfer. `None` where nothing that is tuned stands for it: copies inside a
    /// device, pageable memory, transfers in different directions between GPUs and host, two transfers between the same two devices (a
    /// halo of faces and edges), several of which some device sends or receives more than one (unless all GPUs send to all), or sizes that
    /// differ by more than a factor of two. O(n log n), and nothing on the heap for 16 transfers.
    pub fn of(machine: &Machine, batch: &[Shape]) -> Option<(Class, u64)> {
        let first = batch.first()?;
        let (from, to) = (Side::of(first.src_device), Side::of(first.dst_device));
        let mut direct = f64::INFINITY;
        let (mut least, mut most) = (u64::MAX, 0);
        let mut pairs: SmallVec<[(DeviceId, DeviceId); 16]> = SmallVec::with_capacity(batch.len());
        for shape in batch {
            let pair = (shape.src_device, shape.dst_device);
            let pageable = [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
            if pageable || pair.0 == pair.1 || (Side::of(pair.0), Side::of(pair.1)) != (from, to) || (from, to) == (Side::Host, Side::Host)
            {
                return None;
            }
            direct = direct.min(machine.route(pair.0, pair.1).map_or(0.0, |route| route.bandwidth));
            (least, most) = (least.min(shape.bytes), most.max(shape.bytes));
            pairs.push(pair);
        }
        if most == 0 || least < most.div_ceil(2) {
            return None;
        }
        pairs.sort_unstable();
        let repeats = |of: &mut dyn Iterator<Item = DeviceId>| {
            let mut devices: SmallVec<[DeviceId; 16]> = of.collect();
            devices.sort_unstable();
            devices.windows(2).any(|two| two[0] == two[1])
        };
        let pattern = match pairs.as_slice() {
            [_] => Pattern::Single,
            &[(a, b), back] if back == (b, a) => Pattern::BothWays,
            pairs if pairs.windows(2).any(|two| two[0] == two[1]) => return None,
            pairs if repeats(&mut pairs.iter().map(|p| p.0)) || repeats(&mut pairs.iter().map(|p| p.1)) => {
                // Different pairs of GPUs, so many: all.
                let gpus = machine.gpu_count() as usize;
                if (from, to) != (Side::Gpu, Side::Gpu) || pairs.len() != gpus * (gpus - 1) {
                    return None;
                }
                Pattern::Exchange
            }
            _ => Pattern::Shift,
        };
        Some((Class { from, to, pattern, direct }, most))
    }

    /// Whether what holds for the one holds for the other.
    pub fn is_like(&self, other: &Class) -> bool {
        (self.from, self.to, self.pattern) == (other.from, other.to, other.pattern)
            && (self.direct - other.direct).abs() <= ALIKE * self.direct.max(other.direct)
    }
}
