//! Scales the rounds and sizes of the tests by the environment variable `GPU_TEST_SCALE`. The value is above 0 and at most 1, and the
//! default is 1. The name does not have the library's prefix, because the library refuses unknown variables with this prefix.
//!
//! Under `compute-sanitizer` a call of the driver takes 10 to 100 times as long, and a kernel even longer. A smaller scale lets every test
//! run there, with the same calls on the same kinds of memory. Each test specifies the minimum that is still meaningful.

use std::sync::OnceLock;

fn scale() -> f64 {
    static SCALE: OnceLock<f64> = OnceLock::new();
    *SCALE.get_or_init(|| {
        let Some(text) = std::env::var_os("GPU_TEST_SCALE") else { return 1.0 };
        let scale = text.to_str().and_then(|text| text.parse().ok()).filter(|scale| *scale > 0.0 && *scale <= 1.0);
        scale.unwrap_or_else(|| panic!("GPU_TEST_SCALE={}: must be above 0 and at most 1", text.display()))
    })
}

/// Returns the number of rounds or bytes multiplied by the scale, but at least `least`.
pub fn scaled(full: u64, least: u64) -> u64 {
    ((full as f64 * scale()) as u64).clamp(least.min(full), full)
}

/// Returns true if the tests are scaled down.
pub fn is_reduced() -> bool {
    scale() < 1.0
}
