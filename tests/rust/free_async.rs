//! Tests memory that is freed in stream order. No call blocks, earlier work can still use the memory, and later calls refuse the memory
//! immediately.

use crate::node::*;
use mpgpu::abi::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

/// Host function that blocks a stream until the gate is opened.
struct Gate(Box<AtomicBool>);

impl Gate {
    fn close(node: &Node, stream: mp_stream_t) -> Gate {
        unsafe extern "C" fn wait(opened: *mut c_void) {
            // SAFETY: the gate's flag, which outlives this call: see `drop`.
            while !unsafe { &*opened.cast::<AtomicBool>() }.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        let gate = Gate(Box::new(AtomicBool::new(false)));
        // SAFETY: as above.
        ok(unsafe { mp_stream_launch_host(node.context, stream, Some(wait), (&raw const *gate.0).cast_mut().cast(), None) });
        gate
    }

    fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

fn free_async(node: &Node, memory: *mut u8, stream: mp_stream_t) -> mp_status_t {
    // SAFETY: the library must check whether the address is an allocation.
    unsafe { mp_free_async(node.context, memory.cast(), stream) }
}

fn held(node: &Node, device: i32) -> u64 {
    let mut held = device_statistics();
    // SAFETY: a whole struct of the right size.
    ok(unsafe { mp_context_device_statistics(node.context, device, &mut held) });
    held.allocated_bytes
}

#[test]
fn earlier_work_keeps_the_memory_and_the_caller_does_not_wait() {
    const BYTES: usize = 3 << 20;
    let node = Node::new(c"beluga");
    let (src, dst, stream) = (node.alloc(0, BYTES), node.alloc(1, BYTES), node.stream(0));
    // SAFETY: memory of the host backend, of this size.
    unsafe { std::slice::from_raw_parts_mut(src, BYTES) }.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
    let plan = node.plan(&[transfer(dst, 1, src, 0, BYTES)]);
    let gate = Gate::close(&node, stream);
    // SAFETY: the plan's memory exists.
    ok(unsafe { mp_execute(plan, stream, null_mut()) });
    ok(free_async(&node, src, stream)); // would never return if it waited for the stream
    assert_eq!(held(&node, 0), 0, "the caller holds it no more");
    let other = node.alloc(0, BYTES);
    assert_ne!(other, src, "memory that is still to be read was given out again");
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(other, BYTES) }.fill(0xEE);
    gate.open();
    ok(mp_stream_synchronize(node.context, stream));
    // SAFETY: as above, and the copy is done.
    let arrived = unsafe { std::slice::from_raw_parts(dst, BYTES) };
    assert!(arrived.iter().enumerate().all(|(i, byte)| *byte == (i % 251) as u8), "bytes arrived wrong");
    node.free(other);
    node.free(dst);
    node.still_works();
}

#[test]
fn from_the_call_on_it_counts_as_freed() {
    let node = Node::new(c"beluga");
    let (a, b, stream) = (node.alloc(0, 4096), node.alloc(1, 4096), node.stream(0));
    let counter = node.alloc(-1, 8);
    let plan = node.plan(&[transfer(b, 1, a, 0, 4096)]);
    let mut handle = mp_memory_handle_t { bytes: [0; 128] };
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        ok(mp_memory_export(node.context, a.cast(), 4096, &mut handle));
        let gate = Gate::close(&node, stream);
        ok(free_async(&node, a, stream));
        ok(free_async(&node, counter, stream));
        refused(mp_execute(plan, stream, null_mut()), MP_ERROR_INVALID_POINTER);
        refused(node.try_plan(&[transfer(b, 1, a, 0, 4096)], null_mut()).0, MP_ERROR_INVALID_POINTER);
        refused(mp_memory_export(node.context, a.cast(), 8, &mut handle), MP_ERROR_INVALID_POINTER);
        let mut pointer = null_mut();
        refused(
            mp_memory_import(node.context, &handle, MP_DEVICE_AUTO, &mut pointer, null_mut(), null_mut(), null_mut()),
            MP_ERROR_PEER_GONE,
        );
        let signal = mp_signal_t { counter: counter.cast(), value: 1 };
        refused(mp_stream_raise_signals(node.context, stream, &signal, 1), MP_ERROR_INVALID_POINTER);
        refused(free_async(&node, a, stream), MP_ERROR_INVALID_POINTER);
        refused(mp_free(node.context, a.cast()), MP_ERROR_INVALID_POINTER);
        gate.open();
        ok(mp_stream_synchronize(node.context, stream));
    }
    node.free(b);
    node.still_works();
}

#[test]
fn a_refused_call_leaves_the_memory_with_the_caller() {
    let node = Node::new(c"beluga");
    let a = node.alloc(0, 64);
    refused(free_async(&node, a, poison()), MP_ERROR_INVALID_HANDLE);
    assert_eq!(last_argument().as_deref(), Some("stream"));
    refused(free_async(&node, a.wrapping_add(1), null_mut()), MP_ERROR_INVALID_POINTER);
    assert_eq!(last_argument().as_deref(), Some("memory"));
    assert_eq!(held(&node, 0), 64);
    node.free(a);
}

#[test]
fn a_context_that_ends_takes_it_along() {
    let node = Node::new(c"beluga");
    let stream = node.stream(2);
    for _ in 0..100 {
        ok(free_async(&node, node.alloc(2, 1 << 16), stream));
    }
    let gate = Gate::close(&node, stream);
    ok(free_async(&node, node.alloc(2, 1 << 16), stream));
    gate.open();
    ok(mp_context_destroy(node.context));
}
