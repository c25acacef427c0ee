//! Provides a context, memory of its devices and other objects for the tests of the C ABI, all of which are created by the C functions.
//!
//! Each test program uses only a part of this module.
#![allow(dead_code)]

use mpgpu::abi::*;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

pub use mpgpu::abi::mp_status_t::*;

/// Returns the text of this thread's last error.
pub fn last_error() -> String {
    // SAFETY: never NULL, and valid until the next failure on this thread.
    unsafe { CStr::from_ptr(mp_last_error()) }.to_str().expect("messages are UTF-8").to_owned()
}

/// Returns the name of the parameter to which the last error refers, or `None`.
pub fn last_argument() -> Option<String> {
    let mut info = error_info();
    // SAFETY: a whole struct of the right size.
    assert_eq!(unsafe { mp_last_error_info(&mut info) }, MP_SUCCESS);
    // SAFETY: NULL or a string of the library.
    (!info.argument.is_null()).then(|| unsafe { CStr::from_ptr(info.argument) }.to_str().expect("ASCII").to_owned())
}

#[track_caller]
pub fn ok(status: mp_status_t) {
    assert_eq!(status, MP_SUCCESS, "{}", last_error());
}

/// Checks that a call was refused, and returns the message.
#[track_caller]
pub fn refused(status: mp_status_t, expected: mp_status_t) -> String {
    assert_eq!(status, expected, "the last error says: {}", last_error());
    let message = last_error();
    assert!(!message.is_empty());
    message
}

/// Returns options for the host backend. It is used even on machines with GPUs, because these tests access device memory directly.
pub fn context_options() -> mp_context_options_t {
    mp_context_options_t {
        size: size_of::<mp_context_options_t>(),
        backend: 1,
        topology: null(),
        staging_bytes: 0,
        cache_plans: 0,
        signal_wait: 0,
        host_threads: 0,
        cache_graphs: 0,
    }
}

pub fn plan_options() -> mp_plan_options_t {
    mp_plan_options_t {
        size: size_of::<mp_plan_options_t>(),
        engine: 0,
        max_paths: 0,
        host_path: 0,
        chunk_bytes: 0,
        min_bytes: 0,
        staging_bytes: 0,
        relay_gpus: 0,
        adapt: 0,
        relay_chunks: 0,
        host_chunks: 0,
    }
}

/// Returns a copy of no blocks.
pub fn blocks() -> mp_blocks_t {
    mp_blocks_t {
        size: size_of::<mp_blocks_t>(),
        dst: null(),
        src: null(),
        layers: 0,
        block_bytes: 0,
        count: 0,
        dst_stride: 0,
        src_stride: 0,
        dst_blocks: 0,
        src_blocks: 0,
        dst_index: null(),
        src_index: null(),
        index_bytes: 8,
        reserved: 0,
    }
}

pub fn piece_options() -> mp_piece_options_t {
    mp_piece_options_t { size: size_of::<mp_piece_options_t>(), multiprocessors: 0, paced: 0, relay_gpus: 0 }
}

/// Returns options for partitions whose number the model chooses, and which this agent moves.
pub fn partition_options(agent: i32) -> mp_partition_options_t {
    mp_partition_options_t { size: size_of::<mp_partition_options_t>(), count: 0, agent, arrivals: 0, stores: 0 }
}

/// Returns tuning options that try these agents, which are given as a bit mask.
pub fn partition_tuning(agents: u32) -> mp_partition_tuning_t {
    mp_partition_tuning_t { size: size_of::<mp_partition_tuning_t>(), agents, rounds: 1, arrivals: 0, blocks: 0, file: std::ptr::null() }
}

/// Returns an empty output for information about a message.
pub fn message_info() -> mp_message_info_t {
    mp_message_info_t {
        size: size_of::<mp_message_info_t>(),
        tag: 0,
        bytes: 0,
        rank: u32::MAX,
        metadata_bytes: 0,
        metadata: null_mut(),
        metadata_capacity: 0,
    }
}

/// Returns an empty output for a trigger.
pub fn trigger() -> mp_trigger_t {
    mp_trigger_t {
        size: size_of::<mp_trigger_t>(),
        step: std::ptr::null(),
        ready: std::ptr::null_mut(),
        arrived: std::ptr::null(),
        counters: std::ptr::null_mut(),
        bytes: 0,
        partition_bytes: 0,
        partitions: 0,
        arrived_flags: 0,
    }
}

pub fn plan_info() -> mp_plan_info_t {
    mp_plan_info_t {
        size: size_of::<mp_plan_info_t>(),
        predicted_seconds: 0.0,
        direct_seconds: 0.0,
        bytes: 0,
        paths: 0,
        operations: 0,
        staging_bytes: 0,
        measured_seconds: 0.0,
        measured_direct_seconds: 0.0,
    }
}

pub fn statistics() -> mp_statistics_t {
    mp_statistics_t {
        size: size_of::<mp_statistics_t>(),
        plan_cache_hits: 0,
        plan_cache_misses: 0,
        plan_cache_evictions: 0,
        plan_cache_entries: 0,
        executions: 0,
        bytes: 0,
        plan_cache_shape_hits: 0,
        graph_launches: 0,
        graph_hits: 0,
        graph_misses: 0,
        graph_instantiations: 0,
        graph_repoints: 0,
        graph_waits: 0,
        graph_programs: 0,
        graph_entries: 0,
    }
}

pub fn device_statistics() -> mp_device_statistics_t {
    mp_device_statistics_t { size: size_of::<mp_device_statistics_t>(), staging_bytes: 0, allocated_bytes: 0, streams: 0 }
}

pub fn error_info() -> mp_error_info_t {
    mp_error_info_t { size: size_of::<mp_error_info_t>(), status: MP_SUCCESS, driver_code: 0, argument: null(), message: null() }
}

/// Context on the host backend, which is destroyed when the value is dropped.
pub struct Node {
    pub context: mp_context_t,
}

// A handle is a number, valid on any thread.
// SAFETY: the library permits the use of contexts on any thread.
unsafe impl Send for Node {}
// SAFETY: as above.
unsafe impl Sync for Node {}

impl Node {
    pub fn new(topology: &CStr) -> Node {
        Node::with(mp_context_options_t { topology: topology.as_ptr(), ..context_options() })
    }

    pub fn with(options: mp_context_options_t) -> Node {
        let mut context = null_mut();
        // SAFETY: all pointers are valid for the call.
        ok(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) });
        assert!(!context.is_null());
        Node { context }
    }

    pub fn alloc(&self, device: i32, bytes: usize) -> *mut u8 {
        let mut memory = null_mut();
        // SAFETY: the output is valid for the call.
        ok(unsafe { mp_alloc(self.context, device, bytes as u64, &mut memory) });
        memory.cast()
    }

    pub fn alloc_shared(&self, device: i32, bytes: usize) -> *mut u8 {
        let mut memory = null_mut();
        // SAFETY: the output is valid for the call.
        ok(unsafe { mp_alloc_shared(self.context, device, bytes as u64, &mut memory) });
        memory.cast()
    }

    pub fn free(&self, memory: *mut u8) {
        // SAFETY: the tests free what they no longer use.
        ok(unsafe { mp_free(self.context, memory.cast()) });
    }

    pub fn stream(&self, device: i32) -> mp_stream_t {
        let mut stream = null_mut();
        // SAFETY: the output is valid for the call.
        ok(unsafe { mp_stream_create(self.context, device, &mut stream) });
        stream
    }

    pub fn plan(&self, transfers: &[mp_transfer_t]) -> mp_plan_t {
        let mut plan = null_mut();
        // SAFETY: all pointers are valid for the call.
        ok(unsafe { mp_plan(self.context, transfers.as_ptr(), transfers.len(), null(), &mut plan) });
        plan
    }

    /// Calls `mp_plan` with an output whose initial value is `before`. Returns the status and the value of the output afterwards.
    pub fn try_plan(&self, transfers: &[mp_transfer_t], before: mp_plan_t) -> (mp_status_t, mp_plan_t) {
        let mut plan = before;
        // SAFETY: all pointers are valid for the call.
        let status = unsafe { mp_plan(self.context, transfers.as_ptr(), transfers.len(), null(), &mut plan) };
        (status, plan)
    }

    pub fn run(&self, plan: mp_plan_t) {
        let mut request = null_mut();
        // SAFETY: the output is valid for the calls, and so is the plan's memory.
        ok(unsafe { mp_execute(plan, null_mut(), &mut request) });
        // SAFETY: as above.
        ok(unsafe { mp_wait(&mut request, null_mut()) });
        assert!(request.is_null());
    }

    pub fn statistics(&self) -> mp_statistics_t {
        let mut result = statistics();
        // SAFETY: a whole struct of the right size.
        ok(unsafe { mp_context_statistics(self.context, &mut result) });
        result
    }

    /// Checks that the context still works: copies between two GPUs, and compares every byte of the destination and around it.
    pub fn still_works(&self) {
        const BYTES: usize = 100_003;
        const AROUND: usize = 64;
        let (src, dst) = (self.alloc(0, BYTES), self.alloc(1, BYTES + 2 * AROUND));
        // SAFETY: memory of the host backend is host memory; both are of these sizes, and nothing else uses them yet.
        let (from, to) = unsafe { (std::slice::from_raw_parts_mut(src, BYTES), std::slice::from_raw_parts_mut(dst, BYTES + 2 * AROUND)) };
        from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 % 251) as u8);
        to.fill(0xEE);
        let plan = self.plan(&[transfer(dst.wrapping_add(AROUND), 1, src, 0, BYTES)]);
        self.run(plan);
        ok(mp_plan_destroy(plan));
        assert!(to[AROUND..AROUND + BYTES] == *from, "bytes arrived wrong");
        assert!(to[..AROUND].iter().chain(&to[AROUND + BYTES..]).all(|byte| *byte == 0xEE), "bytes around the destination were written");
        self.free(src);
        self.free(dst);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // This fails if the test has already destroyed the context.
        let _ = mp_context_destroy(self.context);
    }
}

pub fn transfer(dst: *mut u8, dst_device: i32, src: *const u8, src_device: i32, bytes: usize) -> mp_transfer_t {
    mp_transfer_t { dst: dst.cast(), dst_device, src: src.cast(), src_device, bytes: bytes as u64 }
}

/// Returns a pointer that no call has returned, as initial value of outputs.
pub fn poison<T>() -> *mut T {
    std::ptr::without_provenance_mut(0xDEAD_BEE8)
}

/// Returns the text of a description. `call` is called twice: to get the length, and to get the text.
pub fn describe(call: impl Fn(*mut c_char, usize, *mut usize) -> mp_status_t) -> String {
    let mut length = 0;
    ok(call(null_mut(), 0, &mut length));
    let mut text = vec![0_u8; length];
    ok(call(text.as_mut_ptr().cast(), text.len(), &mut length));
    assert_eq!(length, text.len());
    CStr::from_bytes_with_nul(&text).expect("one NUL, at the end").to_str().expect("descriptions are UTF-8").to_owned()
}

/// Callback that no test may reach.
pub unsafe extern "C" fn nothing(_: *mut c_void) {}
