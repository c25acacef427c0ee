//! Classes of batches to which the same tuned values apply.
//!
//! A tuner measures a few batches, but a context plans arbitrary batches. Two batches belong to one class if their data goes between the
//! same kinds of memory, in the same pattern, over direct links of the same rate. For batches that are not in a class of any tuned batch,
//! the model decides.

use crate::plan::Shape;
use crate::topology::{DeviceId, Machine, MemoryKind};
use serde::Deserialize;
use smallvec::SmallVec;

/// Kind of memory at one end of a transfer.
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

    /// Returns the name of this kind of memory in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            Side::Gpu => "gpu",
            Side::Host => "host",
        }
    }
}

/// Number of transfers in a batch, and the way in which they connect devices.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// The batch has one transfer.
    Single,
    /// Two transfers between two devices, in opposite directions.
    BothWays,
    /// Several transfers, such that no device sends or receives more than one of them.
    Shift,
    /// Every GPU of the machine sends to every other GPU. The results do not apply to fewer GPUs, because the gain of several paths depends
    /// on how many other GPUs use host memory.
    Exchange,
}

impl Pattern {
    /// Returns the name of the pattern in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Single => "single",
            Pattern::BothWays => "both-ways",
            Pattern::Shift => "shift",
            Pattern::Exchange => "exchange",
        }
    }
}

/// Class of batches to which the same tuned values apply.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Class {
    /// Kind of memory at the sources of all transfers.
    pub from: Side,
    /// Kind of memory at the destinations of all transfers.
    pub to: Side,
    /// Number of transfers, and the way in which they connect devices.
    pub pattern: Pattern,
    /// Rate in bytes/s of the slowest direct route among the transfers. The value is 0 if one of the transfers has no direct route.
    pub direct: f64,
}

/// Largest relative difference between the rates of direct routes of batches in one class. It is smaller than the difference between one
/// NVLink and two, and larger than the difference between two measurements of one link.
const ALIKE: f64 = 0.05;

impl Class {
    /// Returns the class of a batch and the size in bytes of its largest transfer. Takes O(n log n) time, and no heap allocation for up to
    /// 16 transfers.
    ///
    /// Returns `None` if no tuned batch can represent the batch. This is so for:
    ///
    /// - copies inside a device, or pageable memory;
    /// - transfers in different directions between GPUs and host;
    /// - two transfers between the same two devices (a halo of faces and edges);
    /// - several transfers in which a device sends or receives more than once, unless every GPU sends to every other GPU;
    /// - sizes that differ by more than a factor of two.
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
                // The number of different pairs equals the number of all ordered pairs of GPUs.
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

    /// True if tuned values of one of the two classes also apply to the other.
    pub fn is_like(&self, other: &Class) -> bool {
        (self.from, self.to, self.pattern) == (other.from, other.to, other.pattern)
            && (self.direct - other.direct).abs() <= ALIKE * self.direct.max(other.direct)
    }
}
