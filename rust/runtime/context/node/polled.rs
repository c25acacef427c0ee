//! The kernels that move a rank's partitions in place of copy engines: one for each of its GPUs that sends, launched in every step.
//!
//! Each has a list in memory of its GPU (`cpp/polled_copy.hpp`), which is written once. Flags that producers raise lie there too, because many
//! threads that look at host memory take its link from copies; those that tell of arrival lie with the receiver, as for other agents.

use super::super::error::Error;
use super::binding::{Bindings, FLAG_BYTES};
use super::partitioned::Partitioned;
use crate::backend::{Endpoints, POLLED_WORDS, PolledList};
use crate::plan::{Place, Program};
use crate::program::ranks::{FlagId, Part};
use crate::topology::DeviceId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a lane launches in place of the copies of its steps.
#[derive(Copy, Clone, Debug)]
pub(super) struct PolledLane {
    pub list: PolledList,
    pub blocks: u32,
}

/// Words to be written to memory of a device before the first step.
pub(super) type Filling = (DeviceId, u64, Vec<u64>);

/// Bytes that a block takes at once: 16 KiB are four words for each lane, and a block moves 256 KiB in about 6 us (H200).
const TILE_BYTES: std::ops::RangeInclusive<u64> = 16 << 10..=256 << 10;

/// What the kernels of a rank share.
pub(super) struct PolledWords {
    pub blocks: u32,
    /// Where the flags of each transfer begin that its producers raise.
    pub ready: BTreeMap<u32, u64>,
    /// A word in host memory that ends the wait for them.
    pub stop: u64,
}

/// The kernels of a part, by lane.
pub(super) fn bind_polled(
    at: &Bindings<'_>,
    part: &Part,
    partitioned: &Partitioned,
    PolledWords { blocks, ready, stop }: PolledWords,
    mut allocate: impl FnMut(DeviceId, u64) -> Result<u64, Error>,
    fillings: &mut Vec<Filling>,
) -> Result<BTreeMap<u32, PolledLane>, Error> {
    let mut bound = BTreeMap::new();
    for (lane, device) in (0..).zip(&part.lanes) {
        let device = at.node.device_here(*device);
        let copies = || part.steps.iter().filter(|step| step.lane == lane).flat_map(|step| &step.copies);
        let count = copies().count() as u64;
        if count == 0 {
            continue;
        }
        let ends: Arc<[Endpoints]> = copies().map(|copy| Endpoints { dst: at.address(copy.to), src: at.address(copy.from) }).collect();
        let program = Program { transfers: copies().map(|copy| copy.bytes).collect(), ..Program::default() };
        let ends = at.node.context().backend().polled_ends(device, &Arc::new(program), &ends)?;
        let mut words = Vec::new();
        for (copy, ends) in copies().zip(ends.iter()) {
            let Place::Source { transfer, offset } = copy.from else { continue };
            let partition = (offset / partitioned.partitions[transfer as usize].bytes.max(1)) as u32;
            let ready = ready.get(&transfer).map_or(0, |first| first + u64::from(partition) * FLAG_BYTES);
            let arrived = at.flag_address(FlagId(partitioned.flags[transfer as usize].arrived + partition));
            // Several tiles for each block, so that all end at about the same time.
            let tile = (copy.bytes / (u64::from(blocks) * 4)).next_multiple_of(256).clamp(*TILE_BYTES.start(), *TILE_BYTES.end());
            words.extend([ends.dst, ends.src, copy.bytes, tile, ready, arrived, 0, 0]);
        }
        // And the count of blocks that have ended.
        let bytes = count * POLLED_WORDS * 8;
        let partitions = allocate(device, bytes + 8)?;
        words.push(0);
        fillings.push((device, partitions, words));
        bound.insert(lane, PolledLane { list: PolledList { partitions, count, ended: partitions + bytes, stop }, blocks });
    }
    Ok(bound)
}

#[cfg(test)]
#[path = "../../../../tests/rust/polled.rs"]
mod tests;
