//! Checks that the system has enough memory for lists whose length a caller determines. If the system refuses memory to a growing list, the
//! process ends. A function that is about to fill many lists therefore first allocates their total size and frees it again.

/// Number of list items up to which available memory is not checked. This many items need about 10 KiB.
const FEW: usize = 64;

/// Minimum size of the trial allocation in bytes. The C library allocates each block of more than 32 MiB by `mmap` and returns it to the
/// system when it is freed. Freeing a smaller block that was allocated by `mmap` raises the threshold from which the C library uses `mmap`.
/// The C library then keeps that much memory in the heap of each thread.
const LEAST: usize = (32 << 20) + 4096;

/// Error returned if the system cannot currently provide the requested memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoHeadroom {
    /// Size in bytes of the allocation that the system has refused.
    pub bytes: u64,
}

/// Checks that memory for `count` items of `each` bytes is available now. Other threads may use this memory before the caller allocates it.
pub fn headroom(count: usize, each: usize) -> Result<(), NoHeadroom> {
    if count <= FEW {
        return Ok(());
    }
    let bytes = count.checked_mul(each).ok_or(NoHeadroom { bytes: u64::MAX })?;
    let mut all: Vec<u8> = Vec::new();
    let got = all.try_reserve_exact(bytes.max(LEAST));
    // Without this call, the compiler could remove the unused allocation.
    std::hint::black_box(&all);
    got.map_err(|_| NoHeadroom { bytes: bytes as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_any_address_space_holds_is_refused_and_few_are_not_asked_for() {
        headroom(FEW, usize::MAX).expect("few");
        headroom(1000, 1000).expect("a megabyte");
        assert_eq!(headroom(FEW + 1, 1 << 56).expect_err("too many").bytes, 65 << 56);
        assert_eq!(headroom(1 << 40, 1 << 40).expect_err("more than can be counted").bytes, u64::MAX);
    }
}
