//! Tests the log callback. A callback applies to the whole process, so this is a test program of its own.

mod node;

use mpgpu::abi::*;
use node::*;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

#[test]
fn a_context_that_is_destroyed_with_memory_left_warns_and_frees_it() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    unsafe extern "C" fn collect(level: i32, target: *const c_char, message: *const c_char, user: *mut c_void) {
        // SAFETY: the library passes strings, and the pointer that was set.
        let (target, message) = unsafe { (CStr::from_ptr(target).to_string_lossy(), CStr::from_ptr(message).to_string_lossy()) };
        assert!(target.starts_with("mpgpu") && user.addr() == 42);
        // Inside the callback the library refuses to change the callback, because the call would wait for itself. SAFETY: no pointers.
        assert_eq!(unsafe { mp_log_set_callback(0, None, null_mut()) }, MP_ERROR_INVALID_ARGUMENT);
        LINES.lock().expect("no panic above").push(format!("{level} {message}"));
    }
    // SAFETY: the callback takes any `user`.
    unsafe { ok(mp_log_set_callback(3, Some(collect), std::ptr::without_provenance_mut(42))) };
    let node = Node::new(c"beluga");
    node.alloc(0, 12_345);
    node.alloc(MP_DEVICE_HOST, 1);
    ok(mp_context_destroy(node.context));
    // SAFETY: no pointers.
    unsafe { ok(mp_log_set_callback(0, None, null_mut())) };
    let lines = LINES.lock().expect("no panic above").clone();
    assert!(lines.iter().any(|line| line.starts_with("2 ") && line.contains("2 allocations (12346 bytes)")), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("3 ") && line.contains("host backend")), "{lines:?}");
    let count = lines.len();
    drop(Node::new(c"beluga"));
    assert_eq!(LINES.lock().expect("no panic above").len(), count, "a callback was called after its removal");
}
