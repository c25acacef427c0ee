//! How much of the full rounds and sizes the tests do: `GPU_TEST_SCALE`, above 0 and at most 1, 1 where it is not set. The
//! name has not the library's prefix, because the library refuses variables with it that it does not know.
//!
//! Under `compute-sanitizer` a call of the driver takes 10 to 100 times as long, and a kernel more. A smaller scale lets every test run there,
//! with the same calls on the same kinds of memory; each names the least that it still shows something with.

use std::sync::OnceLock;

fn scale() -> f64 {
    static SCALE: OnceLock<f64> = OnceLock::new();
    *SCALE.get_or_init(|| {
        let Some(text) = std::env::var_os("GPU_TEST_SCALE") else { return 1.0 };
        let scale = text.to_str().and_then(|text| text.parse().ok()).filter(|scale| *scale > 0.0 && *scale <= 1.0);
        scale.unwrap_or_else(|| panic!("GPU_TEST_SCALE={}: must be above 0 and at most 1", text.display()))
    })
}

/// So many rounds or bytes, or the part of them that the scale says, but not fewer than `least`.
pub fn scaled(full: u64, least: u64) -> u64 {
    ((full as f64 * scale()) as u64).clamp(least.min(full), full)
}

/// Whether the tests do less than all.
pub fn is_reduced() -> bool {
    scale() < 1.0
}
