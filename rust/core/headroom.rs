//! Whether memory can be had for what grows with a caller's counts. Lists that grow one by one end the process where the system refuses them, so
//! whoever is about to fill many asks for all of it beforehand, and gives it back at once.

/// Fewer are not asked for: they take some ten KiB.
const FEW: usize = 64;

/// What is asked for at least, bytes. The C library maps more than 32 MiB apart and unmaps it at once; whenever it gives back less that it has mapped
/// apart, it keeps as much in each thread's heap from then on.
const LEAST: usize = (32 << 20) + 4096;

/// The system does not give so many bytes now.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoHeadroom {
    /// At once.
    pub bytes: u64,
}

/// Whether there is memory for `count` things of `each` bytes now. Other threads may take it meanwhile.
pub fn headroom(count: usize, each: usize) -> Result<(), NoHeadroom> {
    if count <= FEW {
        return Ok(());
    }
    let bytes = count.checked_mul(each).ok_or(NoHeadroom { bytes: u64::MAX })?;
    let mut all: Vec<u8> = Vec::new();
    let got = all.try_reserve_exact(bytes.max(LEAST));
    // A compiler may leave out what is allocated and not used.
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
