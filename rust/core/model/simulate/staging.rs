//! Places rings in simulated staging memory and finds the executions that must not overlap. The rules are those of real contexts
//! (`rust/contexts/staging.rs`).

use crate::program::Ring;
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Alignment of staging rings in bytes, as in real contexts.
const ALIGNMENT: u64 = 256;

/// Range of one device's staging memory, in one context.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    context: usize,
    device: DeviceId,
    start: u64,
    end: u64,
}

pub(super) type Regions = SmallVec<[Region; 4]>;

/// Allocator of staging memory. It has one cursor for each context and device, which wraps around to 0 at the limit.
#[derive(Clone, Debug)]
pub(super) struct Arenas {
    bound: u64,
    cursors: BTreeMap<(usize, DeviceId), u64>,
}

impl Arenas {
    pub fn new(bound: u64) -> Self {
        Arenas { bound, cursors: BTreeMap::new() }
    }

    /// Places a plan's rings and returns their region on each device. The error names a device on which the rings exceed the limit.
    pub fn place(&mut self, context: usize, rings: &[Ring]) -> Result<Regions, DeviceId> {
        let mut regions = Regions::new();
        let mut devices: SmallVec<[DeviceId; 8]> = rings.iter().map(|ring| ring.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let rings = rings.iter().filter(|ring| ring.device == device);
            let exact = rings.clone().map(Ring::bytes).fold(0_u64, u64::saturating_add);
            let aligned = rings.map(|ring| ring.bytes().next_multiple_of(ALIGNMENT)).fold(0_u64, u64::saturating_add);
            let bytes = if aligned <= self.bound { aligned } else { exact };
            if bytes > self.bound {
                return Err(device);
            }
            let cursor = self.cursors.entry((context, device)).or_insert(0);
            let mut start = cursor.next_multiple_of(ALIGNMENT);
            if start > self.bound || bytes > self.bound - start {
                start = 0;
            }
            *cursor = start + bytes;
            regions.push(Region { context, device, start, end: start + bytes });
        }
        Ok(regions)
    }
}

/// Last execution that used each range of staging memory. A later user of a byte replaces the earlier one, because waiting for
/// the later execution includes waiting for the earlier one.
#[derive(Clone, Debug, Default)]
pub(super) struct Users(Vec<(Region, usize)>);

impl Users {
    /// Records that `execution` uses these regions. Returns the earlier executions that must finish first, without duplicates.
    pub fn next(&mut self, regions: &[Region], execution: usize) -> SmallVec<[usize; 4]> {
        let mut after = SmallVec::new();
        for region in regions {
            let mut kept = Vec::with_capacity(self.0.len() + 2);
            for (used, by) in self.0.drain(..) {
                if (used.context, used.device) != (region.context, region.device) || used.end <= region.start || region.end <= used.start {
                    kept.push((used, by));
                    continue;
                }
                if !after.contains(&by) {
                    after.push(by);
                }
                let before = Region { end: region.start, ..used };
                let behind = Region { start: region.end, ..used };
                kept.extend([before, behind].into_iter().filter(|rest| rest.start < rest.end).map(|rest| (rest, by)));
            }
            self.0 = kept;
        }
        self.0.extend(regions.iter().map(|&region| (region, execution)));
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_wait_for_the_last_users_of_their_bytes() {
        let ring = |slots| [Ring { device: DeviceId::gpu(1), slot_bytes: 1 << 20, slots }];
        let mut arenas = Arenas::new(8 << 20);
        let [a, b, c] = [4, 4, 6].map(|slots| arenas.place(0, &ring(slots)).expect("room"));
        let mut users = Users::default();
        assert!(users.next(&a, 0).is_empty() && users.next(&b, 1).is_empty(), "side by side");
        assert_eq!(users.next(&c, 2).as_slice(), [0, 1], "the cursor wrapped");
        assert_eq!(users.next(&a, 3).as_slice(), [2]);
        assert_eq!(users.next(&b, 4).as_slice(), [1, 2], "two of its slots were not used since");
        let elsewhere = arenas.place(1, &ring(8)).expect("room");
        assert!(users.next(&elsewhere, 5).is_empty(), "another process has staging memory of its own");
        assert_eq!(arenas.place(0, &ring(9)), Err(DeviceId::gpu(1)));
    }
}
