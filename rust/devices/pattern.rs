//! Writes and checks a test pattern in host memory.

use std::marker::PhantomData;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// Range of host memory for a test pattern, with the position in the pattern of the range's first 8-byte word. The value cannot outlive the
/// owner of the memory.
pub struct Words<'a> {
    address: u64,
    first: u64,
    count: u64,
    arena: PhantomData<&'a ()>,
}

/// Returns the word at position `place` of the pattern (the finaliser of SplitMix64). No two words are equal, so that misplaced data is
/// detected.
fn word(place: u64) -> u64 {
    let mut z = place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl<'a> Words<'a> {
    /// # Safety
    ///
    /// `address` is the start of `count` 8-byte words of host memory, and is a multiple of 8. The words live as long as `'a`, and no other
    /// code uses them while this value exists.
    pub unsafe fn new(address: u64, first: u64, count: u64) -> Words<'a> {
        Words { address, first, count, arena: PhantomData }
    }

    fn write(&self, value: impl Fn(u64) -> u64) {
        let start = with_exposed_provenance_mut::<u64>(self.address as usize);
        for index in 0..self.count {
            // SAFETY: the index is below `count`, and the caller of `new` guarantees these words.
            unsafe { start.add(index as usize).write(value(self.first + index)) }
        }
    }

    /// Writes the test pattern to the memory range.
    pub fn fill(&self) {
        self.write(word);
    }

    /// Writes the bitwise complement of the test pattern to the memory range, so that every byte differs from the pattern.
    pub fn spoil(&self) {
        self.write(|place| !word(place));
    }

    /// Returns the number of bytes of the memory range that differ from the test pattern.
    pub fn wrong_bytes(&self) -> u64 {
        let start = with_exposed_provenance::<u64>(self.address as usize);
        let wrong = |index: u64| {
            // SAFETY: as in `write`. Any bits are a valid number, and the memory was initialized by a copy or by `write`.
            let difference = unsafe { start.add(index as usize).read() } ^ word(self.first + index);
            difference.to_ne_bytes().iter().filter(|byte| **byte != 0).count() as u64
        };
        (0..self.count).map(wrong).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::Words;

    #[test]
    fn a_wrong_a_missing_and_a_misplaced_word_are_counted() {
        let mut memory = [0_u64; 16];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the words cover `memory`, which nothing else uses meanwhile.
        let words = |first| unsafe { Words::new(address, first, 16) };
        words(100).fill();
        assert_eq!(words(100).wrong_bytes(), 0);
        let at = std::ptr::with_exposed_provenance_mut::<u8>(address as usize + 9);
        // SAFETY: the address is that of a byte of `memory`.
        unsafe { at.write(!at.read()) };
        assert_eq!(words(100).wrong_bytes(), 1);
        words(100).spoil();
        assert_eq!(words(100).wrong_bytes(), 128);
        words(101).fill();
        assert!(words(100).wrong_bytes() > 64);
    }
}
