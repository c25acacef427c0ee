//! Allocates the buffers for a case at one size, and verifies every copied byte.
//!
//! Sources contain random bytes that differ between transfers. Before a check the destinations are filled with wrong bytes (poison), and
//! the device is synchronized. Afterwards every byte is compared on the CPU, including some bytes after the end of each destination, which
//! must still be poison.

use super::Failure;
use super::cases::Leg;
use super::plain::Plain;
use mpgpu_contexts::{Context, Transfer};
use mpgpu_core::topology::DeviceId;
use std::hash::{BuildHasher, RandomState};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// Number of bytes after the end of each destination that are checked after each copy. No copy may change these bytes.
const GUARD: u64 = 256;
const POISON: u8 = 0xA5;
/// Offset in bytes, within the random pattern, between the data of successive sources. It is odd, so that data in the wrong place is
/// detected.
const STRIDE: u64 = 4099;
/// Number of bytes that are copied back to host memory and compared at a time.
const BLOCK: u64 = 64 << 20;

/// Random bytes in host memory with which all sources are filled, with a buffer into which copied data is read back for comparison.
pub struct Pattern<'a> {
    context: &'a Context,
    address: u64,
    bytes: u64,
    back: u64,
    seed: u64,
}

impl<'a> Pattern<'a> {
    /// Creates a pattern from a new random seed, for `transfers` transfers of at most `largest` bytes each.
    pub fn new(context: &'a Context, largest: u64, transfers: usize) -> Result<Pattern<'a>, Failure> {
        // The seed is different in each run.
        Pattern::of_seed(context, largest, transfers, RandomState::new().hash_one(largest))
    }

    /// Creates a pattern from a seed. The same seed gives the same bytes in every process.
    pub fn of_seed(context: &'a Context, largest: u64, transfers: usize, seed: u64) -> Result<Pattern<'a>, Failure> {
        let bytes = (largest + transfers as u64 * STRIDE).next_multiple_of(8);
        let address = context.allocate(DeviceId::HOST, bytes)?;
        let mut pattern = Pattern { context, address, bytes, back: 0, seed };
        pattern.back = context.allocate(DeviceId::HOST, BLOCK)?;
        // SAFETY: just allocated with this size in host memory, aligned to 256 bytes, and not used elsewhere yet.
        let words = unsafe {
            let start = with_exposed_provenance_mut::<u64>(address as usize);
            start.write_bytes(0, bytes as usize / 8);
            std::slice::from_raw_parts_mut(start, bytes as usize / 8)
        };
        // The generator is Marsaglia's xorshift (2003), whose state must not be 0.
        let mut state = seed | 1;
        for word in words {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state;
        }
        Ok(pattern)
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    fn of(&self, transfer: usize) -> u64 {
        self.address + transfer as u64 * STRIDE
    }

    fn expected(&self, transfer: usize, offset: u64, bytes: u64) -> &[u8] {
        let at = self.of(transfer) + offset;
        debug_assert!(at + bytes <= self.address + self.bytes);
        // SAFETY: inside the pattern, which is initialized and not written any more.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(at as usize), bytes as usize) }
    }
}

/// Buffers that are allocated for the copies of one case at one size.
pub struct Buffers<'a> {
    context: &'a Context,
    pub transfers: Vec<Transfer>,
    /// Buffers in pageable host memory.
    ordinary: Vec<Vec<u8>>,
}

impl<'a> Buffers<'a> {
    /// Allocates the source and the destination of every copy and fills the sources.
    pub fn new(context: &'a Context, plain: &mut dyn Plain, pattern: &Pattern<'_>, legs: &[Leg]) -> Result<Buffers<'a>, Failure> {
        let mut buffers = Buffers { context, transfers: Vec::new(), ordinary: Vec::new() };
        for (index, leg) in legs.iter().enumerate() {
            let src = buffers.allocate(leg.src, leg.bytes, leg.pageable)?;
            // From here on `buffers` owns the memory, so that an error below frees it.
            buffers.transfers.push(Transfer { dst: 0, dst_device: leg.dst, src, src_device: leg.src, bytes: leg.bytes });
            buffers.transfers[index].dst = buffers.allocate(leg.dst, leg.bytes + GUARD, leg.pageable)?;
            let device = if leg.src.is_host() { leg.dst } else { leg.src };
            plain.copy_now(device, src, pattern.of(index), leg.bytes)?;
        }
        Ok(buffers)
    }

    fn allocate(&mut self, device: DeviceId, bytes: u64, pageable: bool) -> Result<u64, Failure> {
        if !(pageable && device.is_host()) {
            return Ok(self.context.allocate(device, bytes)?);
        }
        // The memory is filled so that the operating system allocates its pages now.
        let mut memory = vec![POISON; usize::try_from(bytes)?];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        self.ordinary.push(memory);
        Ok(address)
    }

    /// Fills every destination with bytes that differ from those of its source.
    pub fn poison(&self, plain: &mut dyn Plain) -> Result<(), Failure> {
        self.transfers.iter().try_for_each(|t| plain.set_now(t.dst_device, t.dst, POISON, t.bytes + GUARD))
    }

    /// Compares every destination byte with the expected byte of the pattern, and checks the bytes after each destination.
    pub fn check(&self, plain: &mut dyn Plain, pattern: &Pattern<'_>) -> Result<(), Failure> {
        for (index, t) in self.transfers.iter().enumerate() {
            let mut offset = 0;
            while offset < t.bytes + GUARD {
                let bytes = (t.bytes + GUARD - offset).min(BLOCK);
                let device = if t.dst_device.is_host() { DeviceId::gpu(0) } else { t.dst_device };
                plain.copy_now(device, pattern.back, t.dst + offset, bytes)?;
                // SAFETY: the block is large enough, and the bytes were just written.
                let back: &[u8] = unsafe { std::slice::from_raw_parts(with_exposed_provenance(pattern.back as usize), bytes as usize) };
                let (inside, guard) = back.split_at(t.bytes.saturating_sub(offset).min(bytes) as usize);
                let expected = pattern.expected(index, offset, inside.len() as u64);
                if inside != expected
                    && let Some(at) = inside.iter().zip(expected).position(|(is, should)| is != should)
                {
                    return Err(format!("transfer {index}: byte {} of {} is wrong", offset + at as u64, t.bytes).into());
                }
                if guard.iter().any(|byte| *byte != POISON) {
                    return Err(format!("transfer {index}: bytes past the end of the destination were written").into());
                }
                offset += bytes;
            }
        }
        Ok(())
    }
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        let is_ordinary = |address: &u64| self.ordinary.iter().any(|memory| memory.as_ptr().addr() as u64 == *address);
        free(self.context, self.transfers.iter().flat_map(|t| [t.src, t.dst]).filter(|address| !is_ordinary(address)));
    }
}

impl Drop for Pattern<'_> {
    fn drop(&mut self) {
        free(self.context, [self.address, self.back].into_iter());
    }
}

/// Frees the allocations at these addresses. Addresses that are 0 are skipped, because nothing was allocated for them.
pub fn free(context: &Context, addresses: impl Iterator<Item = u64>) {
    for address in addresses.filter(|address| *address != 0) {
        if let Err(error) = context.free(address) {
            log::warn!("could not free a buffer of the benchmark: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain::OnHost;
    use mpgpu_contexts::{BackendChoice, Config, ContextOptions};

    #[test]
    fn a_missing_a_wrong_and_a_surplus_byte_are_found() {
        let options = ContextOptions { backend: Some(BackendChoice::Host), ..ContextOptions::default() };
        let context = Context::open(&options, Config::default()).expect("the host backend");
        let mut plain = OnHost::default();
        let legs = [100, 5000].map(|bytes| Leg { src: DeviceId::gpu(0), dst: DeviceId::gpu(1), bytes, pageable: false });
        let pattern = Pattern::new(&context, 5000, 2).expect("memory");
        let buffers = Buffers::new(&context, &mut plain, &pattern, &legs).expect("memory");
        let mut after = |change: &dyn Fn(&mut OnHost)| {
            buffers.poison(&mut plain).expect("poisoned");
            for t in &buffers.transfers {
                plain.copy_now(t.dst_device, t.dst, t.src, t.bytes).expect("copied");
            }
            change(&mut plain);
            buffers.check(&mut plain, &pattern).map_err(|error| error.to_string())
        };
        let [first, second] = [buffers.transfers[0], buffers.transfers[1]];
        assert_eq!(after(&|_| {}), Ok(()));
        // The new value always differs from the old one.
        let flip = |address: u64| {
            // SAFETY: a byte of a buffer of this test.
            unsafe { *with_exposed_provenance_mut::<u8>(address as usize) ^= 1 }
        };
        assert_eq!(after(&|_| flip(second.dst + 4999)), Err("transfer 1: byte 4999 of 5000 is wrong".into()));
        assert_eq!(after(&|_| flip(first.dst + 100)), Err("transfer 0: bytes past the end of the destination were written".into()));
        let error = after(&|plain| plain.set_now(first.dst_device, first.dst, POISON, 100).expect("set")).expect_err("not copied");
        assert!(error.starts_with("transfer 0: byte "), "{error}");
    }
}
