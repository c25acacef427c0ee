//! Conversion of C arguments to references and values, with all checks of null pointers, alignment, size and handles.
//!
//! Every function here receives a pointer as the caller passed it, and checks everything that can be checked. A pointer
//! that is neither null nor misaligned must point to the object that the header describes. This is the caller's
//! obligation, and the `unsafe` blocks rely on it.

use super::guard::{Failure, c_text};
use super::types::mp_status_t::MP_ERROR_INVALID_HANDLE;
use mpgpu_backend::BackendError;
use mpgpu_core::headroom::headroom;
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

/// Name of a parameter as in the C header, for error texts.
pub(super) type Name = &'static CStr;

fn spell(name: Name) -> std::borrow::Cow<'static, str> {
    name.to_string_lossy()
}

fn check_pointer<T>(pointer: *const T, name: Name) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::invalid(name, format!("{} is NULL", spell(name))));
    }
    if !pointer.is_aligned() {
        let message = format!("{} is {pointer:p}, which is not aligned to {} bytes", spell(name), align_of::<T>());
        return Err(Failure::invalid(name, message));
    }
    Ok(())
}

/// Output parameter. It is written only after everything else has succeeded. If the call consumes a handle, the handle is
/// also read from this parameter.
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub fn new(pointer: *mut T, name: Name) -> Result<Self, Failure> {
        check_pointer(pointer, name).map(|()| Out(pointer))
    }

    /// Creates an output from a pointer that may be NULL. NULL means that the caller does not want the output.
    pub fn if_wanted(pointer: *mut T, name: Name) -> Result<Self, Failure> {
        if pointer.is_null() { Ok(Out(pointer)) } else { Out::new(pointer, name) }
    }

    pub fn read(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: not null and aligned. In all callers of this function, the header requires that the parameter holds a
        // value.
        unsafe { self.0.read() }
    }

    pub fn write(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null and aligned, and the header requires that it is writable.
            unsafe { self.0.write(value) }
        }
    }
}

impl Out<u8> {
    /// Writes several bytes to the output.
    ///
    /// # Safety
    /// The memory of the output must be large enough for all of `bytes`.
    pub unsafe fn write_all(self, bytes: &[u8]) {
        // SAFETY: not null, and the caller guarantees that the memory is large enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0, bytes.len()) }
    }
}

/// Returns an input array as a slice. NULL is allowed if `count` is 0.
pub(super) fn array<'a, T>(pointer: *const T, count: usize, name: Name, count_name: Name) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(pointer, name)?;
    let bytes = count.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    // An array must not wrap around the end of the address space.
    if bytes.is_none_or(|bytes| pointer.addr().checked_add(bytes).is_none()) || u32::try_from(count).is_err() {
        let message = format!("{} is {count}, more than fit into memory", spell(count_name));
        return Err(Failure::invalid(count_name, message));
    }
    // Callers build lists from the array, so this checks that there is enough memory for such lists.
    headroom(count, 4 * size_of::<T>()).map_err(BackendError::no_headroom)?;
    // SAFETY: not null, aligned, and not larger than an object can be. The header requires `count` readable elements.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Returns an input text, or `None` if the pointer is NULL.
pub(super) fn text<'a>(pointer: *const c_char, name: Name) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the header requires a string that ends with NUL.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| {
        let message = format!("{}={:?} is not valid UTF-8", spell(name), text.to_string_lossy());
        Failure::invalid(name, message)
    })
}

/// C struct whose first member is `size_t size`: the size of the struct in the header with which the caller was compiled.
/// The other members are integers and pointers.
///
/// # Safety
/// The first field must be a `usize`, and all-zero bytes must be a valid value of the type.
pub(super) unsafe trait Versioned: Copy {
    /// Name of the struct in the header.
    const NAME: &'static str;
    /// Name of the macro in the header that initialises the struct.
    const INIT: &'static str;
    /// Size in bytes of the struct in the first release that had it. This value never changes.
    const FIRST_SIZE: usize;
}

/// Largest plausible size of a struct in bytes. If `size` is larger, the caller has not initialised it.
const LARGEST: usize = 4096;

fn check_size<T: Versioned>(pointer: *const T, name: Name) -> Result<usize, Failure> {
    check_pointer(pointer, name)?;
    // SAFETY: not null and aligned; the first field is a usize.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size < T::FIRST_SIZE || size > LARGEST {
        let (bound, bytes) = if size < T::FIRST_SIZE { ("at least", T::FIRST_SIZE) } else { ("about", size_of::<T>()) };
        let (of, init) = (T::NAME, T::INIT);
        let message = format!("{}->size is {size}, but {of} has {bound} {bytes} bytes; initialise it with {init}", spell(name));
        return Err(Failure::invalid(name, message));
    }
    // A size that is not a multiple of the alignment would end inside a field, and a partly copied pointer is invalid.
    if !size.is_multiple_of(align_of::<T>()) {
        let (multiple, of, init) = (align_of::<T>(), T::NAME, T::INIT);
        let message = format!("{}->size is {size}, and a size of {of} is a multiple of {multiple}; initialise it with {init}", spell(name));
        return Err(Failure::invalid(name, message));
    }
    Ok(size)
}

/// Reads a versioned struct. Fields that are missing in the struct of an older caller become zero. Fields of a newer
/// caller that this version of the library does not know must be zero.
pub(super) fn versioned<T: Versioned>(pointer: *const T, name: Name) -> Result<T, Failure> {
    let size = check_size(pointer, name)?;
    let known = size.min(size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the header requires `size` readable bytes, and `known` fits into both.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known) };
    // SAFETY: the rest of the `size` readable bytes.
    let rest = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let message = format!(
            "{}->size is {size}, but in this library {} has {} bytes, and the program has set a field after these bytes; use a library that \
             is at least as new as the header",
            spell(name),
            T::NAME,
            size_of::<T>()
        );
        return Err(Failure::invalid(name, message));
    }
    // SAFETY: zero or copied from the caller. Integers and pointers have no invalid values.
    Ok(unsafe { value.assume_init() })
}

/// Output struct of the caller that begins with its size. It is filled only after everything else has succeeded.
pub(super) struct VersionedOut<T> {
    pointer: *mut T,
    size: usize,
}

impl<T: Versioned> VersionedOut<T> {
    pub fn new(pointer: *mut T, name: Name) -> Result<Self, Failure> {
        check_size(pointer, name).map(|size| VersionedOut { pointer, size })
    }

    /// Writes the fields that both the caller and the library know. `size` keeps the caller's value.
    pub fn write(self, value: T) {
        let skip = size_of::<usize>();
        let bytes = self.size.min(size_of::<T>()) - skip;
        // SAFETY: the header requires `size` writable bytes. Both ranges start after the first field and end within
        // their structs.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>().add(skip), self.pointer.cast::<u8>().add(skip), bytes);
        }
    }
}

/// Output parameters for a text: buffer, capacity and length. If the buffer is NULL, only the length is returned.
pub(super) struct TextOut {
    text: *mut c_char,
    capacity: usize,
    length: Out<usize>,
}

impl TextOut {
    pub fn new(text: *mut c_char, capacity: usize, length: *mut usize) -> Result<Self, Failure> {
        Ok(TextOut { text, capacity, length: Out::new(length, c"length")? })
    }

    /// Writes the length of the text including the final NUL. Also writes the text if the buffer is large enough for
    /// all of it.
    pub fn write(self, content: &str) -> Result<(), Failure> {
        let content = c_text(content);
        let bytes = content.as_bytes_with_nul();
        self.length.write(bytes.len());
        if self.text.is_null() {
            return Ok(());
        }
        if self.capacity < bytes.len() {
            let message = format!("capacity is {}, but the text needs {} bytes with its final NUL", self.capacity, bytes.len());
            return Err(Failure::invalid(c"capacity", message));
        }
        // SAFETY: not null, and the header requires `capacity` writable bytes, which are enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.text.cast::<u8>(), bytes.len()) };
        Ok(())
    }
}

/// Returns the error for a handle that is NULL or not in the table of live handles.
pub(super) fn bad_handle(handle: usize, name: Name) -> Failure {
    let message = if handle == 0 {
        format!("{} is NULL", spell(name))
    } else {
        format!("{} is {handle:#x}, which is not a {0} handle or was destroyed already", spell(name))
    };
    Failure::argument(MP_ERROR_INVALID_HANDLE, name, message)
}

/// Converts an `mp_switch_t`. Returns `None` if the value selects the default.
pub(super) fn switch(name: Name, value: i32) -> Result<Option<bool>, Failure> {
    match value {
        0 => Ok(None),
        1 => Ok(Some(true)),
        2 => Ok(Some(false)),
        other => Err(bad_value(name, other, "0 (MP_DEFAULT), 1 (MP_ON) or 2 (MP_OFF)")),
    }
}

/// Returns the error for an unknown value of an enumeration.
pub(super) fn bad_value(name: Name, value: i32, accepted: &str) -> Failure {
    Failure::invalid(name, format!("{}={value}: must be {accepted}", spell(name)))
}
