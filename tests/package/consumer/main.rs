//! A Rust program that knows the library alone, by its C ABI: a copy between two virtual GPUs, every byte compared.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

#[repr(C)]
struct Transfer {
    dst: *mut c_void,
    dst_device: i32,
    src: *const c_void,
    src_device: i32,
    bytes: usize,
}

#[link(name = "mpgpu")]
unsafe extern "C" {
    fn mp_version() -> u32;
    fn mp_context_create_versioned(options: *const c_void, version: u32, context: *mut *mut c_void) -> c_int;
    fn mp_alloc(context: *mut c_void, device: i32, bytes: usize, memory: *mut *mut c_void) -> c_int;
    fn mp_plan(context: *mut c_void, transfers: *const Transfer, count: usize, options: *const c_void, plan: *mut *mut c_void) -> c_int;
    fn mp_execute(plan: *mut c_void, stream: *mut c_void, request: *mut *mut c_void) -> c_int;
    fn mp_wait(request: *mut *mut c_void, info: *mut c_void) -> c_int;
    fn mp_free(context: *mut c_void, memory: *mut c_void) -> c_int;
    fn mp_context_destroy(context: *mut c_void) -> c_int;
}

fn main() {
    const BYTES: usize = (8 << 20) + 13;
    let check = |status: c_int| assert_eq!(status, 0);
    let (mut context, mut src, mut dst, mut plan, mut request) = (null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: the declarations are those of mpgpu.h; memory of virtual GPUs is ordinary memory, and lives until the context goes.
    unsafe {
        check(mp_context_create_versioned(null(), mp_version(), &mut context));
        check(mp_alloc(context, 0, BYTES, &mut src));
        check(mp_alloc(context, 1, BYTES, &mut dst));
        let (from, to) = (std::slice::from_raw_parts_mut(src.cast::<u8>(), BYTES), dst.cast::<u8>());
        from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 + (i >> 9)) as u8);
        to.write_bytes(0xa5, BYTES);
        let transfer = Transfer { dst, dst_device: 1, src, src_device: 0, bytes: BYTES };
        check(mp_plan(context, &transfer, 1, null(), &mut plan));
        check(mp_execute(plan, null_mut(), &mut request));
        check(mp_wait(&mut request, null_mut()));
        assert!(std::slice::from_raw_parts(to, BYTES) == from, "the copy arrived with wrong bytes");
        check(mp_free(context, src));
        check(mp_free(context, dst));
        check(mp_context_destroy(context));
    }
    println!("copied");
}
