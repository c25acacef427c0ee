//! Checks the transfers that a caller requests, and describes them to the planner.

use super::error::{End, Error};
use crate::backend::{Allocation, Backend, BackendError, MemoryKind};
use crate::plan::{LEAST_SHARED_BYTES, Shape};
use crate::topology::{DeviceId, Machine};
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};
use std::num::NonZeroU64;

/// One copy that the caller requests.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Address of the first destination byte.
    pub dst: u64,
    /// Device whose memory holds the destination, or [`Transfer::AUTO`].
    pub dst_device: DeviceId,
    /// Address of the first source byte.
    pub src: u64,
    /// Device whose memory holds the source, or [`Transfer::AUTO`].
    pub src_device: DeviceId,
    /// Size of the transfer in bytes. If it is 0, nothing is copied and both addresses are ignored.
    pub bytes: u64,
}

impl Transfer {
    /// Value for a device field that lets the library determine the device from the address, by looking up the allocation that contains it.
    /// An address that the backend does not know is treated as pageable host memory.
    pub const AUTO: DeviceId = DeviceId::AUTO;
}

/// Transfer with the allocations, devices and memory kinds that the backend found for its source and destination. Two equal values describe
/// the same request. If memory is freed and allocated again at the same address, the new allocation has a different number, so the values
/// differ.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Address of the first destination byte.
    pub dst: u64,
    /// Address of the first source byte.
    pub src: u64,
    /// Identifier of the allocation that contains the destination; `None` if the backend does not know the memory.
    pub dst_allocation: Option<NonZeroU64>,
    /// Identifier of the allocation that contains the source; `None` if the backend does not know the memory.
    pub src_allocation: Option<NonZeroU64>,
    /// Devices, memory kinds and size of the transfer, as the planner receives them.
    pub shape: Shape,
}

/// Hashes only the addresses and the size, because they distinguish almost all requests. Equality also compares the other fields.
impl Hash for Located {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u128(u128::from(self.dst) << 64 | u128::from(self.src ^ self.shape.bytes.rotate_left(32)));
    }
}

/// Transfers of one request, with their allocations. Up to four transfers are stored without a heap allocation.
pub type Batch = SmallVec<[Located; 4]>;

/// Device, memory kind and allocation of the source or the destination of a transfer.
#[derive(Copy, Clone)]
struct Place {
    device: DeviceId,
    kind: MemoryKind,
    allocation: Option<Allocation>,
}

impl Place {
    /// True if the `bytes` bytes at `address` lie inside this allocation and the backend knows where the allocation ends. (If the end is
    /// unknown, the stored end is that of the address space.)
    fn holds(&self, address: u64, bytes: u64) -> bool {
        self.allocation.is_some_and(|Allocation { base, bytes: size, .. }| {
            let is_inside = || base <= address && bytes <= size && address - base <= size - bytes;
            bytes > 0 && address != 0 && base + size < u64::MAX && is_inside()
        })
    }
}

/// Function that looks up the allocation that contains an address. It returns `None` if the address is unknown.
type Find<'a> = &'a dyn Fn(u64) -> Result<Option<Allocation>, BackendError>;

/// Looks up the source and the destination of every transfer and appends the results to `batch`. Returns an error for a transfer that
/// cannot be planned. Further checks are made by [`check`]. They are needed only when a request is planned, not when its plan is found in
/// the cache.
pub fn locate(transfers: &[Transfer], machine: &Machine, find: Find<'_>, batch: &mut Batch) -> Result<(), Error> {
    if u32::try_from(transfers.len()).is_err() {
        return Err(Error::TooManyTransfers(transfers.len()));
    }
    batch.reserve_exact(transfers.len());
    let (mut last_dst, mut last_src) = (LastPlaces::new(), LastPlaces::new());
    for (index, t) in transfers.iter().enumerate() {
        let dst = near(&mut last_dst, t.dst, t.dst_device, t.bytes, || {
            place(index, End::Destination, t.dst, t.dst_device, t.bytes, machine, find)
        })?;
        let src =
            near(&mut last_src, t.src, t.src_device, t.bytes, || place(index, End::Source, t.src, t.src_device, t.bytes, machine, find))?;
        batch.push(Located {
            dst: t.dst,
            src: t.src,
            dst_allocation: dst.allocation.and_then(|a| NonZeroU64::new(a.id)),
            src_allocation: src.allocation.and_then(|a| NonZeroU64::new(a.id)),
            shape: Shape {
                source: 0,
                dst_device: dst.device,
                src_device: src.device,
                dst_kind: dst.kind,
                src_kind: src.kind,
                bytes: t.bytes,
            },
        });
    }
    Ok(())
}

/// Result of the last look-up on each device. Consecutive transfers often copy parts of the same array, even if they alternate between
/// devices, so reusing these results avoids most look-ups.
type LastPlaces = SmallVec<[(DeviceId, Place); 2]>;

/// Returns the result of the last look-up on the device if the `bytes` bytes at `address` lie in the allocation that it found. Otherwise
/// calls `look`.
#[inline]
fn near(
    last: &mut LastPlaces,
    address: u64,
    device: DeviceId,
    bytes: u64,
    look: impl FnOnce() -> Result<Place, Error>,
) -> Result<&Place, Error> {
    let known = last.iter().position(|(asked, _)| *asked == device);
    let at = match known {
        Some(at) if last[at].1.holds(address, bytes) => at,
        Some(at) => {
            last[at].1 = look()?;
            at
        }
        None => {
            last.push((device, look()?));
            last.len() - 1
        }
    };
    Ok(&last[at].1)
}

fn place(transfer: usize, end: End, address: u64, device: DeviceId, bytes: u64, machine: &Machine, find: Find<'_>) -> Result<Place, Error> {
    let inferred = device == Transfer::AUTO;
    // A device that is to be inferred is the host if no allocation is known at the address.
    let device = if inferred { DeviceId::HOST } else { device };
    if !machine.contains(device) {
        return Err(Error::UnknownDevice { transfer, end, device: device.0, gpus: machine.gpu_count(), hosts: machine.host_count() });
    }
    let assumed = if device.is_host() { MemoryKind::Pageable } else { MemoryKind::Device };
    if bytes == 0 {
        return Ok(Place { device, kind: assumed, allocation: None });
    }
    if address == 0 {
        return Err(Error::NullPointer { transfer, end, bytes });
    }
    // A range may end exactly at the last address of the address space, but not beyond it.
    if address.checked_add(bytes - 1).is_none() {
        return Err(Error::AddressOverflow { transfer, end, address, bytes });
    }
    let Some(allocation) = find(address)? else {
        if !device.is_host() {
            return Err(Error::NotDeviceMemory { transfer, end, address, bytes, device: device.0 });
        }
        return Ok(Place { device, kind: MemoryKind::Pageable, allocation: None });
    };
    // A caller that specifies host memory need not specify the right NUMA domain. If the backend knows the domain, the plan uses the domain
    // that the backend reports.
    if !inferred && allocation.device != device && !(allocation.device.is_host() && device.is_host()) {
        return Err(Error::WrongDevice {
            transfer,
            end,
            address,
            bytes,
            device: device.0,
            actual: allocation.device.0,
            base: allocation.base,
            size: allocation.bytes,
        });
    }
    let offset = address - allocation.base;
    if bytes > allocation.bytes - offset {
        return Err(Error::OutOfAllocation { transfer, end, address, bytes, base: allocation.base, size: allocation.bytes });
    }
    Ok(Place { device: allocation.device, kind: allocation.kind, allocation: Some(allocation) })
}

/// Gives the transfers that read the same source a common source number in `shapes`. Small sources get no number, because they are copied
/// to each destination separately.
pub fn number_sources(batch: &[Located], shapes: &mut [Shape]) {
    let mut found: ahash::HashMap<(u64, u64), (u32, usize)> = ahash::HashMap::default();
    for (at, t) in batch.iter().enumerate().filter(|(_, t)| t.shape.bytes >= LEAST_SHARED_BYTES) {
        let next = found.len() as u32 + 1;
        let (number, first) = *found.entry((t.src, t.shape.bytes)).or_insert((next, at));
        if first != at {
            (shapes[first].source, shapes[at].source) = (number, number);
        }
    }
}

/// Returns an error if pageable host memory extends into an allocation of the backend, or if a destination overlaps another transfer or its
/// own source.
pub fn check(batch: &[Located], backend: &dyn Backend) -> Result<(), Error> {
    for (transfer, t) in batch.iter().enumerate().filter(|(_, t)| t.shape.bytes > 0) {
        for (end, first, allocation) in [(End::Destination, t.dst, t.dst_allocation), (End::Source, t.src, t.src_allocation)] {
            if allocation.is_none()
                && let Some(other) = backend.locate(first + (t.shape.bytes - 1))?
            {
                return Err(Error::OutOfAllocation {
                    transfer,
                    end,
                    address: first,
                    bytes: t.shape.bytes,
                    base: other.base,
                    size: other.bytes,
                });
            }
        }
    }
    let range = |transfer, end, first, bytes: u64| {
        let range = ByteRange { space: 0, first, last: first.wrapping_add(bytes.wrapping_sub(1)), transfer, end };
        (bytes > 0).then_some(range)
    };
    let all = || batch.iter().enumerate();
    let written = all().filter_map(|(transfer, t)| range(transfer, End::Destination, t.dst, t.shape.bytes));
    let read = all().filter_map(|(transfer, t)| range(transfer, End::Source, t.src, t.shape.bytes));
    first_overlap(written, read).map_or(Ok(()), |(a, b)| Err(overlap(batch, a, b)))
}

/// Range of bytes that one transfer of a batch reads or writes.
#[derive(Copy, Clone)]
pub struct ByteRange {
    /// Number that identifies the address space in which the addresses are valid. Equal addresses in different spaces are different memory.
    /// The number is a rank of the node, so it is below 2^24.
    pub space: u32,
    /// First address of the range.
    pub first: u64,
    /// Last address of the range, inclusive, so that a range can extend to the end of the address space.
    pub last: u64,
    /// Index, in the batch, of the transfer that reads or writes the range.
    pub transfer: usize,
    /// Source or destination of the transfer, depending on which of them the range is.
    pub end: End,
}

/// Finds two overlapping ranges of which at least one is written. Returns the range of the earlier transfer first, or `None` if no such
/// ranges overlap. Takes O(n log n) time.
pub fn first_overlap(
    written: impl Iterator<Item = ByteRange> + Clone,
    read: impl Iterator<Item = ByteRange>,
) -> Option<(ByteRange, ByteRange)> {
    // A source outside the hull (smallest range that contains all destinations) overlaps no destination, so it need not be sorted. This
    // halves the work for long lists.
    let mut hulls: SmallVec<[ByteRange; 2]> = SmallVec::new();
    let (mut last, mut in_order) = (None, true);
    for range in written.clone() {
        match hulls.iter_mut().find(|hull| hull.space == range.space) {
            Some(hull) => (hull.first, hull.last) = (hull.first.min(range.first), hull.last.max(range.last)),
            None => hulls.push(range),
        }
        in_order &= last.replace((range.space, range.last)) < Some((range.space, range.first));
    }
    let is_near =
        |range: &ByteRange| hulls.iter().any(|hull| hull.space == range.space && hull.first <= range.last && range.first <= hull.last);
    let near: SmallVec<[ByteRange; 8]> = read.filter(is_near).collect();
    if in_order && near.is_empty() {
        return None;
    }
    let ranges: SmallVec<[ByteRange; 8]> = written.chain(near).collect();
    // The sort moves integers instead of ranges. Each integer packs the number of the address space (below 2^24), the first address and the
    // index in the list.
    let number = |(at, range): (usize, &ByteRange)| u128::from(range.space) << 104 | u128::from(range.first) << 40 | at as u128;
    let mut order: SmallVec<[u128; 8]> = ranges.iter().enumerate().map(number).collect();
    order.sort_unstable();
    // In a list that is sorted by first address, a range overlaps an earlier range exactly if it overlaps the earlier range that ends last.
    let mut reach: Option<&ByteRange> = None;
    let mut most_written: Option<&ByteRange> = None;
    for range in order.into_iter().map(|number| &ranges[(number as u64 & ((1 << 40) - 1)) as usize]) {
        let earlier = if range.end == End::Destination { reach } else { most_written };
        if let Some(earlier) = earlier.filter(|e| (e.space, e.last) >= (range.space, range.first)) {
            let in_order = (earlier.transfer, earlier.end as u8) <= (range.transfer, range.end as u8);
            return Some(if in_order { (*earlier, *range) } else { (*range, *earlier) });
        }
        if reach.is_none_or(|r| (r.space, r.last) < (range.space, range.last)) {
            reach = Some(range);
        }
        if range.end == End::Destination && most_written.is_none_or(|w| (w.space, w.last) < (range.space, range.last)) {
            most_written = Some(range);
        }
    }
    None
}

fn overlap(batch: &[Located], a: ByteRange, b: ByteRange) -> Error {
    let bytes = |r: ByteRange| batch[r.transfer].shape.bytes;
    if a.transfer == b.transfer {
        return Error::OverlapsItself { transfer: a.transfer, dst: a.first, src: b.first, bytes: bytes(a) };
    }
    Error::Overlap {
        first: a.transfer,
        first_end: a.end,
        first_address: a.first,
        first_bytes: bytes(a),
        second: b.transfer,
        second_end: b.end,
        second_address: b.first,
        second_bytes: bytes(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn meet(a: &ByteRange, b: &ByteRange) -> bool {
        a.space == b.space && a.first <= b.last && b.first <= a.last && [a.end, b.end].contains(&End::Destination)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

        /// The test uses consecutive ranges with gaps, as in paged caches, and some ranges at random addresses.
        #[test]
        fn an_overlap_is_found_where_one_is_and_nowhere_else(
            gaps in prop::collection::vec((0_u64..3, 1_u64..20), 0..40),
            anywhere in prop::collection::vec((0_u32..2, 0_u64..900, 1_u64..20, any::<bool>()), 0..6),
            is_reversed in any::<bool>(),
        ) {
            let mut next = 0;
            let mut pieces: Vec<_> = gaps.into_iter().map(|(gap, bytes)| {
                next += gap + bytes;
                (0, next - bytes, bytes, true)
            }).collect();
            pieces.extend(anywhere);
            if is_reversed {
                pieces.reverse();
            }
            let range = |(transfer, (space, first, bytes, is_written)): (usize, (u32, u64, u64, bool))| {
                let end = if is_written { End::Destination } else { End::Source };
                ByteRange { space, first, last: first + bytes - 1, transfer, end }
            };
            let ranges: Vec<ByteRange> = pieces.into_iter().enumerate().map(range).collect();
            let of = |end| ranges.iter().copied().filter(move |range| range.end == end);
            let is_one = (0..ranges.len()).any(|at| ranges[..at].iter().any(|other| meet(other, &ranges[at])));
            match first_overlap(of(End::Destination), of(End::Source)) {
                None => prop_assert!(!is_one),
                Some((a, b)) => prop_assert!(meet(&a, &b) && a.transfer < b.transfer),
            }
        }
    }
}
