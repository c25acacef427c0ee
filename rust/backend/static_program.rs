//! Detects statically linked programs, which cannot load libraries at run time.

use std::ffi::{c_int, c_void};

/// Returns an error with the reason if the program is statically linked and cannot load a library.
///
/// In such a program, `dlopen` loads a second C library in addition to the one in the program, and does not initialise its state. The
/// process then crashes in the first function of the second C library that the driver calls.
pub fn check_can_load() -> Result<(), &'static str> {
    if is_static() {
        Err("this program is statically linked, and libraries cannot be loaded into it: link it without -static")
    } else {
        Ok(())
    }
}

/// Returns true if the program has no dynamic loader, that is, if no program header has the type `PT_INTERP`.
fn is_static() -> bool {
    /// Sets `*data` to true if the first object, which is the program, specifies a dynamic loader, and to false otherwise.
    unsafe extern "C" fn look(object: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
        // SAFETY: the pointers are valid for the call, as `dl_iterate_phdr` guarantees. `data` is the caller's Option.
        let (object, named) = unsafe { (&*object, &mut *data.cast::<Option<bool>>()) };
        if object.dlpi_phdr.is_null() {
            return 1;
        }
        // SAFETY: the range holds the program's headers, which stay mapped for as long as the program runs.
        let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
        *named = Some(headers.iter().any(|header| header.p_type == libc::PT_INTERP));
        1
    }
    let mut named: Option<bool> = None;
    // SAFETY: `look` is called only during the call, with a pointer to `named`.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut named).cast()) };
    // If the loader reports no headers, the program counts as dynamically linked.
    named == Some(false)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_program_that_names_a_loader_can_load_libraries() {
        // Tests for a target whose C library is static by default are statically linked.
        assert_eq!(super::check_can_load().is_ok(), !cfg!(target_feature = "crt-static"));
    }
}
