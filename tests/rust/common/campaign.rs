//! Random numbers and settings of campaigns, also for unit tests of other crates.
#![allow(dead_code)]

/// SplitMix64 generator (Steele, Lea, Flood 2014): small, and equal on all platforms.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Returns a random number from 0 to `n` - 1, or 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Returns the integer value of an environment variable, or `usual` if it is not set. Such names do not start with `MPGPU_`, because the
/// library reports unknown variables with this prefix.
pub fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: must be a whole number")))
}

/// True if the environment requests long test runs (`LONG_TESTS=1`).
pub fn is_long() -> bool {
    std::env::var("LONG_TESTS").is_ok_and(|value| value == "1")
}
