//! Version numbers of the header and the library.

use std::ffi::c_char;

/// Major version of this header. It increases with incompatible changes.
pub const MP_VERSION_MAJOR: u32 = 0;
/// Minor version of this header. It increases with new functions and, before version 1.0, also with incompatible
/// changes.
pub const MP_VERSION_MINOR: u32 = 1;
/// Patch version of this header.
pub const MP_VERSION_PATCH: u32 = 0;
/// Version of this header as one number that can be compared: 10000 * major + 100 * minor + patch.
pub const MP_VERSION: u32 = MP_VERSION_MAJOR * 10000 + MP_VERSION_MINOR * 100 + MP_VERSION_PATCH;

/// Returns the version of the library as a number in the format of `MP_VERSION`. May be called from any thread. Never
/// fails.
#[unsafe(no_mangle)]
pub extern "C" fn mp_version() -> u32 {
    MP_VERSION
}

/// Returns the version of the library as text, for example `0.1.0`. The text has static storage and must not be freed.
/// May be called from any thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn mp_version_string() -> *const c_char {
    const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    TEXT.as_ptr().cast()
}
