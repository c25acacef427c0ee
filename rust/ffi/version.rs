//! Version numbers of the header and the library.

use std::ffi::c_char;

/// Major version of this header. Increases with incompatible changes.
pub const MP_VERSION_MAJOR: u32 = 0;
/// Minor version of this header. Increases with new functions; before 1.0 also with incompatible changes.
pub const MP_VERSION_MINOR: u32 = 1;
/// Patch version of this header.
pub const MP_VERSION_PATCH: u32 = 0;
/// Version of this header as one comparable number: 10000 for each major version plus 100 for each minor version plus
/// the patch version.
pub const MP_VERSION: u32 = MP_VERSION_MAJOR * 10000 + MP_VERSION_MINOR * 100 + MP_VERSION_PATCH;

/// Returns the version of the library, comparable with `MP_VERSION` of the header. May be called from any thread; never
/// fails.
#[unsafe(no_mangle)]
pub extern "C" fn mp_version() -> u32 {
    MP_VERSION
}

/// Returns the version of the library as text, for example `0.1.0`. The text has static storage. May be called from any
/// thread; never fails.
#[unsafe(no_mangle)]
pub extern "C" fn mp_version_string() -> *const c_char {
    const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    TEXT.as_ptr().cast()
}
