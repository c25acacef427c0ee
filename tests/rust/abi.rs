//! Tests that the C ABI refuses invalid arguments: each call returns a status and a message that names the argument, writes nothing, and
//! leaves the library usable.
//!
//! All calls go through the C functions. After each refusal the context makes a copy, whose bytes are compared.

use crate::node::*;
use mpgpu::abi::*;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::offset_of;
use std::process::Command;
use std::ptr::{null, null_mut};

const HEADER: &str = include_str!("../../include/mpgpu/mpgpu.h");

/// Returns the names of all functions that the header declares.
fn functions() -> BTreeSet<&'static str> {
    let declared = HEADER.lines().filter(|line| !line.starts_with([' ', '/', '#', '*', 't', 's'])).filter_map(|line| line.split_once('('));
    declared.filter_map(|(before, _)| before.rsplit([' ', '*']).next()).filter(|name| name.starts_with("mp_")).collect()
}

unsafe extern "C" fn ignore(_: *mut c_void, _: i32) {}

/// Allgather function of a node with one rank.
unsafe extern "C" fn alone(_: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32 {
    // SAFETY: both buffers are large enough for the data of the only rank.
    unsafe { receive.cast::<u8>().copy_from_nonoverlapping(send.cast(), bytes) };
    0
}

/// Returns a misaligned pointer, as a wrong argument for an output that may be NULL.
fn misaligned<T>() -> *mut T {
    std::ptr::without_provenance_mut(align_of::<T>() + 1)
}

/// Imports the memory of a handle and requests neither device nor size.
unsafe fn import_by(
    context: mp_context_t,
    handle: *const mp_memory_handle_t,
    kernels: i32,
    pointer: *mut *mut c_void,
    in_kernels: *mut *mut c_void,
) -> mp_status_t {
    // SAFETY: the caller's guarantees are those of this function.
    unsafe { mp_memory_import(context, handle, kernels, pointer, null_mut(), in_kernels, null_mut()) }
}

#[test]
fn null_handles_and_pointers_are_refused_by_every_function() {
    let node = Node::new(c"beluga");
    let c = node.context;
    let memory = node.alloc(0, 64);
    let one = [transfer(memory, 0, memory.wrapping_add(32), 0, 8)];
    let plan = node.plan(&one);
    let mut event = null_mut();
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_event_create(c, &mut event) });
    let (mut length, mut number, mut backend) = (77_usize, 77_i32, mp_backend_t::MP_BACKEND_AUTO);
    let (mut out_plan, mut out_memory, mut out_stream, mut out_event) = (poison(), poison(), poison(), poison());
    let (mut no_request, mut info) = (null_mut(), plan_info());
    let (mut counts, mut device) = (statistics(), device_statistics());
    let ipc = [0_u8; 64];
    let (mut shared, mut uuid) = (mp_memory_handle_t { bytes: [0; 128] }, [0_u8; 16]);
    let mut counted = 77_u64;
    let (mut mapped, mut size) = (poison::<c_void>().cast_const(), 77_u64);
    let (mut ranks, mut out_node, mut none) = (null_mut(), poison(), null_mut());
    let (bad_agent, defaults, mut trigger) = (partition_options(3), partition_options(0), trigger());
    unsafe extern "C" fn no_producer(_: *mut c_void, _: *const mp_trigger_t, _: usize, _: mp_stream_t) -> i32 {
        0
    }
    let (all_agents, mut best) = (partition_tuning(u32::MAX), partition_options(0));
    let (mut messenger, mut out_messenger, mut execution) = (null_mut(), poison(), null_mut());
    let mut none_such = null_mut();
    let (none_copied, one_copied) = (blocks(), mp_blocks_t { layers: 1, ..blocks() });
    let (mut own_gpus, mut own_count) = ([0_i32; 1], 0_usize);
    let (mut told, mut descriptor) = (message_info(), mp_message_descriptor_t { bytes: [0; 64] });
    let mut nowhere = mp_message_info_t { metadata_capacity: 1, ..told };
    // SAFETY: the output is valid for the call, and a node of one rank receives its own bytes.
    ok(unsafe { mp_node_create(c, 0, 1, Some(alone), null_mut(), null(), &mut ranks) });
    // SAFETY: as above.
    ok(unsafe { mp_messenger_create(ranks, null(), &mut messenger) });
    // SAFETY: as above.
    ok(unsafe { mp_execute(plan, null_mut(), &mut execution) });
    use mp_status_t::{MP_ERROR_INVALID_ARGUMENT as ARGUMENT, MP_ERROR_INVALID_HANDLE as HANDLE};
    // SAFETY: every pointer is NULL, or valid for the call.
    let calls: Vec<(&str, mp_status_t, &str, mp_status_t)> = unsafe {
        vec![
            ("mp_last_error_info", mp_last_error_info(null_mut()), "info", ARGUMENT),
            ("mp_last_error_set", mp_last_error_set(0, 0, null(), null()), "status", ARGUMENT),
            ("mp_last_error_set", mp_last_error_set(23, 0, null(), null()), "status", ARGUMENT),
            ("mp_node_create", mp_node_create(null_mut(), 0, 1, Some(alone), null_mut(), null(), &mut out_node), "context", HANDLE),
            ("mp_node_create", mp_node_create(c, 0, 2, None, null_mut(), null(), &mut out_node), "allgather", ARGUMENT),
            ("mp_node_create", mp_node_create(c, 1, 1, Some(alone), null_mut(), null(), &mut out_node), "rank", ARGUMENT),
            ("mp_node_create", mp_node_create(c, 0, 1, Some(alone), null_mut(), null(), null_mut()), "node", ARGUMENT),
            ("mp_node_plan", mp_node_plan(null_mut(), null(), 0, null(), 0, null(), null(), &mut none), "node", HANDLE),
            ("mp_node_plan", mp_node_plan(ranks, null(), 1, null(), 0, null(), null(), &mut none), "windows", ARGUMENT),
            ("mp_node_plan", mp_node_plan(ranks, null(), 0, null(), 1, null(), null(), &mut none), "transfers", ARGUMENT),
            ("mp_node_plan", mp_node_plan(ranks, null(), 0, null(), 0, null(), null(), null_mut()), "plan", ARGUMENT),
            ("mp_node_plan", mp_node_plan(ranks, null(), 0, null(), 0, &bad_agent, null(), &mut none), "agent", ARGUMENT),
            ("mp_node_plan", mp_node_plan(ranks, null(), 0, null(), 0, &defaults, null(), null_mut()), "plan", ARGUMENT),
            (
                "mp_node_tune_partitions",
                mp_node_tune_partitions(null_mut(), null(), 0, null(), 0, Some(no_producer), null_mut(), null(), null(), &mut best),
                "node",
                HANDLE,
            ),
            (
                "mp_node_tune_partitions",
                mp_node_tune_partitions(ranks, null(), 0, null(), 0, None, null_mut(), null(), null(), &mut best),
                "produce",
                ARGUMENT,
            ),
            (
                "mp_node_tune_partitions",
                mp_node_tune_partitions(ranks, null(), 0, null(), 0, Some(no_producer), null_mut(), &all_agents, null(), &mut best),
                "agents",
                ARGUMENT,
            ),
            (
                "mp_node_tune_partitions",
                mp_node_tune_partitions(ranks, null(), 0, null(), 0, Some(no_producer), null_mut(), null(), null(), null_mut()),
                "best",
                ARGUMENT,
            ),
            ("mp_plan_arm", mp_plan_arm(null_mut(), null_mut()), "plan", HANDLE),
            ("mp_plan_arm", mp_plan_arm(plan, null_mut()), "plan", ARGUMENT),
            ("mp_plan_get_trigger", mp_plan_get_trigger(null_mut(), 0, 0, &mut trigger), "plan", HANDLE),
            ("mp_plan_get_trigger", mp_plan_get_trigger(plan, 0, 0, &mut trigger), "plan", ARGUMENT),
            ("mp_plan_get_trigger", mp_plan_get_trigger(plan, 0, 0, null_mut()), "trigger", ARGUMENT),
            ("mp_plan_synchronize", mp_plan_synchronize(null_mut(), 0.0), "plan", HANDLE),
            ("mp_plan_synchronize", mp_plan_synchronize(plan, 0.0), "plan", ARGUMENT),
            ("mp_plan_synchronize", mp_plan_synchronize(plan, -1.0), "seconds", ARGUMENT),
            ("mp_node_fail", mp_node_fail(null_mut(), null()), "node", HANDLE),
            ("mp_node_allgather", mp_node_allgather(null_mut(), c"a call".as_ptr(), null(), null_mut(), 0), "node", HANDLE),
            ("mp_node_allgather", mp_node_allgather(ranks, null(), null(), null_mut(), 0), "call", ARGUMENT),
            ("mp_node_allgather", mp_node_allgather(ranks, c"".as_ptr(), null(), null_mut(), 0), "call", ARGUMENT),
            ("mp_node_allgather", mp_node_allgather(ranks, c"a call".as_ptr(), null(), null_mut(), 8), "receive", ARGUMENT),
            ("mp_node_device", mp_node_device(null_mut(), own_gpus.as_mut_ptr()), "node", HANDLE),
            ("mp_node_device", mp_node_device(ranks, null_mut()), "device", ARGUMENT),
            ("mp_node_devices", mp_node_devices(null_mut(), null_mut(), 0, &mut own_count), "node", HANDLE),
            ("mp_node_devices", mp_node_devices(ranks, null_mut(), 0, null_mut()), "count", ARGUMENT),
            ("mp_node_devices", mp_node_devices(ranks, own_gpus.as_mut_ptr(), 0, &mut own_count), "capacity", ARGUMENT),
            ("mp_node_destroy", mp_node_destroy(null_mut()), "node", HANDLE),
            ("mp_messenger_create", mp_messenger_create(null_mut(), null(), &mut out_messenger), "node", HANDLE),
            ("mp_messenger_create", mp_messenger_create(ranks, null(), null_mut()), "messenger", ARGUMENT),
            ("mp_messenger_destroy", mp_messenger_destroy(null_mut()), "messenger", HANDLE),
            ("mp_send", mp_send(null_mut(), null(), 0, 0, 0, null(), 0, null_mut(), &mut none_such), "messenger", HANDLE),
            ("mp_send", mp_send(messenger, null(), 8, 0, 0, null(), 0, null_mut(), &mut none_such), "data", ARGUMENT),
            ("mp_send", mp_send(messenger, null(), 0, 1, 0, null(), 0, null_mut(), &mut none_such), "rank", ARGUMENT),
            ("mp_send", mp_send(messenger, null(), 0, 0, 0, null(), 1, null_mut(), &mut none_such), "metadata", ARGUMENT),
            ("mp_send", mp_send(messenger, null(), 0, 0, 0, null(), 0, poison(), &mut none_such), "stream", HANDLE),
            ("mp_receive", mp_receive(null_mut(), null_mut(), 0, 0, 0, 0, null_mut(), &mut none_such), "messenger", HANDLE),
            ("mp_receive", mp_receive(messenger, null_mut(), 8, 0, 0, 0, null_mut(), &mut none_such), "data", ARGUMENT),
            ("mp_receive", mp_receive(messenger, null_mut(), 0, -2, 0, 0, null_mut(), &mut none_such), "rank", ARGUMENT),
            ("mp_receive", mp_receive(messenger, null_mut(), 0, 0, 0, 0, poison(), &mut none_such), "stream", HANDLE),
            ("mp_message_probe", mp_message_probe(null_mut(), 0, 0, 0, &mut number, &mut told), "messenger", HANDLE),
            ("mp_message_probe", mp_message_probe(messenger, 0, 0, 0, null_mut(), &mut told), "found", ARGUMENT),
            ("mp_message_probe", mp_message_probe(messenger, 0, 0, 0, &mut number, &mut nowhere), "metadata", ARGUMENT),
            ("mp_message_get_info", mp_message_get_info(null_mut(), &mut number, &mut told), "request", HANDLE),
            ("mp_message_get_info", mp_message_get_info(execution, null_mut(), &mut told), "matched", ARGUMENT),
            ("mp_message_get_info", mp_message_get_info(execution, &mut number, &mut told), "request", ARGUMENT),
            ("mp_wait", mp_wait(&mut execution, &mut told), "info", ARGUMENT),
            ("mp_wait", mp_wait(&mut none_such, &mut told), "request", HANDLE),
            ("mp_test", mp_test(&mut execution, &mut number, &mut told), "info", ARGUMENT),
            ("mp_test", mp_test(&mut none_such, &mut number, &mut told), "request", HANDLE),
            ("mp_test", mp_test(&mut none_such, &mut number, &mut nowhere), "metadata", ARGUMENT),
            ("mp_request_cancel", mp_request_cancel(null_mut(), &mut number), "request", HANDLE),
            ("mp_request_cancel", mp_request_cancel(execution, null_mut()), "cancelled", ARGUMENT),
            (
                "mp_message_describe",
                mp_message_describe(null_mut(), null(), 0, null_mut(), &mut descriptor, &mut none_such),
                "messenger",
                HANDLE,
            ),
            (
                "mp_message_describe",
                mp_message_describe(messenger, null(), 0, null_mut(), null_mut(), &mut none_such),
                "descriptor",
                ARGUMENT,
            ),
            ("mp_message_fetch", mp_message_fetch(null_mut(), &descriptor, null_mut(), 0, null_mut(), &mut none_such), "messenger", HANDLE),
            ("mp_message_fetch", mp_message_fetch(messenger, null(), null_mut(), 0, null_mut(), &mut none_such), "descriptor", ARGUMENT),
            (
                "mp_message_fetch",
                mp_message_fetch(messenger, &descriptor, null_mut(), 0, null_mut(), &mut none_such),
                "descriptor",
                ARGUMENT,
            ),
            ("mp_copy_blocks", mp_copy_blocks(null_mut(), &none_copied, null(), null_mut(), &mut none_such), "context", HANDLE),
            ("mp_copy_blocks", mp_copy_blocks(c, null(), null(), null_mut(), &mut none_such), "blocks", ARGUMENT),
            ("mp_copy_blocks", mp_copy_blocks(c, &none_copied, null(), poison(), &mut none_such), "stream", HANDLE),
            ("mp_copy_blocks", mp_copy_blocks(c, &one_copied, null(), null_mut(), &mut none_such), "dst", ARGUMENT),
            ("mp_copy_blocks", mp_copy_blocks(c, &none_copied, null(), null_mut(), misaligned()), "request", ARGUMENT),
            ("mp_copy_pieces", mp_copy_pieces(null_mut(), null(), 0, null(), null_mut(), &mut none_such), "context", HANDLE),
            ("mp_copy_pieces", mp_copy_pieces(c, null(), 1, null(), null_mut(), &mut none_such), "pieces", ARGUMENT),
            ("mp_copy_pieces", mp_copy_pieces(c, null(), 0, null(), poison(), &mut none_such), "stream", HANDLE),
            ("mp_copy_pieces", mp_copy_pieces(c, null(), 0, null(), null_mut(), misaligned()), "request", ARGUMENT),
            ("mp_stream_wait_request", mp_stream_wait_request(null_mut(), poison()), "request", HANDLE),
            ("mp_stream_wait_request", mp_stream_wait_request(poison(), execution), "stream", HANDLE),
            ("mp_request_set_callback", mp_request_set_callback(null_mut(), Some(ignore), null_mut()), "request", HANDLE),
            ("mp_request_set_callback", mp_request_set_callback(execution, None, null_mut()), "function", ARGUMENT),
            ("mp_log_set_callback", mp_log_set_callback(6, None, null_mut()), "max_level", ARGUMENT),
            ("mp_context_create_versioned", mp_context_create_versioned(null(), MP_VERSION, null_mut()), "context", ARGUMENT),
            ("mp_context_destroy", mp_context_destroy(null_mut()), "context", HANDLE),
            ("mp_context_get_info", mp_context_get_info(null_mut(), &mut backend, null_mut(), null_mut()), "context", HANDLE),
            ("mp_context_get_info", mp_context_get_info(c, misaligned(), null_mut(), null_mut()), "backend", ARGUMENT),
            ("mp_context_get_info", mp_context_get_info(c, null_mut(), misaligned(), &mut number), "gpus", ARGUMENT),
            ("mp_context_get_info", mp_context_get_info(c, null_mut(), &mut number, misaligned()), "host_domains", ARGUMENT),
            ("mp_context_describe", mp_context_describe(null_mut(), 0, null_mut(), 0, &mut length), "context", HANDLE),
            ("mp_context_describe", mp_context_describe(c, 0, null_mut(), 0, null_mut()), "length", ARGUMENT),
            ("mp_context_describe", mp_context_describe(c, 2, null_mut(), 0, &mut length), "format", ARGUMENT),
            ("mp_context_probe", mp_context_probe(null_mut(), null()), "context", HANDLE),
            ("mp_context_probed", mp_context_probed(null_mut(), null_mut(), 0, &mut length), "context", HANDLE),
            ("mp_context_probed", mp_context_probed(c, null_mut(), 0, null_mut()), "length", ARGUMENT),
            ("mp_context_statistics", mp_context_statistics(null_mut(), &mut counts), "context", HANDLE),
            ("mp_context_statistics", mp_context_statistics(c, null_mut()), "statistics", ARGUMENT),
            ("mp_context_device_statistics", mp_context_device_statistics(null_mut(), 0, &mut device), "context", HANDLE),
            ("mp_context_device_statistics", mp_context_device_statistics(c, 0, null_mut()), "statistics", ARGUMENT),
            ("mp_plan", mp_plan(null_mut(), one.as_ptr(), 1, null(), &mut out_plan), "context", HANDLE),
            ("mp_plan", mp_plan(c, null(), 1, null(), &mut out_plan), "transfers", ARGUMENT),
            ("mp_plan", mp_plan(c, one.as_ptr(), 1, null(), null_mut()), "plan", ARGUMENT),
            ("mp_plan_destroy", mp_plan_destroy(null_mut()), "plan", HANDLE),
            ("mp_plan_describe", mp_plan_describe(null_mut(), 0, null_mut(), 0, &mut length), "plan", HANDLE),
            ("mp_plan_describe", mp_plan_describe(plan, 0, null_mut(), 0, null_mut()), "length", ARGUMENT),
            ("mp_plan_describe", mp_plan_describe(plan, -1, null_mut(), 0, &mut length), "format", ARGUMENT),
            ("mp_plan_get_info", mp_plan_get_info(null_mut(), &mut info), "plan", HANDLE),
            ("mp_plan_get_info", mp_plan_get_info(plan, null_mut()), "info", ARGUMENT),
            ("mp_plan_prepare", mp_plan_prepare(null_mut(), null_mut()), "plan", HANDLE),
            ("mp_plan_prepare", mp_plan_prepare(plan, poison()), "stream", HANDLE),
            ("mp_execute", mp_execute(null_mut(), null_mut(), &mut no_request), "plan", HANDLE),
            ("mp_execute", mp_execute(plan, poison(), &mut no_request), "stream", HANDLE),
            ("mp_wait", mp_wait(null_mut(), null_mut()), "request", ARGUMENT),
            ("mp_test", mp_test(null_mut(), &mut number, null_mut()), "request", ARGUMENT),
            ("mp_test", mp_test(&mut no_request, null_mut(), null_mut()), "done", ARGUMENT),
            ("mp_request_destroy", mp_request_destroy(null_mut()), "request", ARGUMENT),
            ("mp_alloc", mp_alloc(null_mut(), 0, 8, &mut out_memory), "context", HANDLE),
            ("mp_alloc", mp_alloc(c, 0, 8, null_mut()), "memory", ARGUMENT),
            ("mp_alloc", mp_alloc(c, 0, 0, &mut out_memory), "bytes", ARGUMENT),
            ("mp_alloc_shared", mp_alloc_shared(null_mut(), 0, 8, &mut out_memory), "context", HANDLE),
            ("mp_alloc_shared", mp_alloc_shared(c, 0, 8, null_mut()), "memory", ARGUMENT),
            ("mp_alloc_shared", mp_alloc_shared(c, 0, 0, &mut out_memory), "bytes", ARGUMENT),
            ("mp_free", mp_free(null_mut(), memory.cast()), "context", HANDLE),
            ("mp_free_async", mp_free_async(null_mut(), memory.cast(), null_mut()), "context", HANDLE),
            ("mp_free_async", mp_free_async(c, memory.cast(), poison()), "stream", HANDLE),
            ("mp_memory_export", mp_memory_export(null_mut(), memory.cast(), 8, &mut shared), "context", HANDLE),
            ("mp_memory_export", mp_memory_export(c, null(), 8, &mut shared), "pointer", ARGUMENT),
            ("mp_memory_export", mp_memory_export(c, memory.cast(), 0, &mut shared), "bytes", ARGUMENT),
            ("mp_memory_export", mp_memory_export(c, memory.cast(), 8, null_mut()), "handle", ARGUMENT),
            ("mp_memory_import", import_by(null_mut(), &shared, 0, &mut out_memory, null_mut()), "context", HANDLE),
            ("mp_memory_import", import_by(c, null(), 0, &mut out_memory, null_mut()), "handle", ARGUMENT),
            ("mp_memory_import", import_by(c, &shared, 0, null_mut(), null_mut()), "pointer", ARGUMENT),
            ("mp_memory_import", import_by(c, &shared, 0, &mut out_memory, misaligned()), "in_kernels", ARGUMENT),
            ("mp_memory_import", import_by(c, &shared, MP_DEVICE_AUTO, &mut out_memory, null_mut()), "handle", ARGUMENT),
            ("mp_memory_adopt", mp_memory_adopt(null_mut(), memory.cast(), 8, 0, ipc.as_ptr().cast()), "context", HANDLE),
            ("mp_memory_adopt", mp_memory_adopt(c, null_mut(), 8, 0, ipc.as_ptr().cast()), "pointer", ARGUMENT),
            ("mp_memory_adopt", mp_memory_adopt(c, memory.cast(), 0, 0, ipc.as_ptr().cast()), "bytes", ARGUMENT),
            ("mp_memory_adopt", mp_memory_adopt(c, memory.cast(), 8, -1, ipc.as_ptr().cast()), "device", ARGUMENT),
            ("mp_memory_adopt", mp_memory_adopt(c, memory.cast(), 8, 0, null()), "ipc_handle", ARGUMENT),
            ("mp_memory_close", mp_memory_close(null_mut(), null_mut()), "context", HANDLE),
            ("mp_memory_leave", mp_memory_leave(null_mut(), memory.cast(), 1), "context", HANDLE),
            ("mp_memory_leave", mp_memory_leave(c, null_mut(), 1), "pointer", mp_status_t::MP_ERROR_INVALID_POINTER),
            ("mp_memory_register", mp_memory_register(null_mut(), memory.cast(), 8, 0), "context", HANDLE),
            ("mp_memory_register", mp_memory_register(c, null_mut(), 8, 0), "pointer", mp_status_t::MP_ERROR_INVALID_POINTER),
            ("mp_memory_register", mp_memory_register(c, memory.cast(), 0, 0), "bytes", ARGUMENT),
            ("mp_memory_register", mp_memory_register(c, memory.cast(), 8, -1), "huge_pages", ARGUMENT),
            ("mp_memory_unregister", mp_memory_unregister(null_mut(), null_mut()), "context", HANDLE),
            ("mp_memory_unregister", mp_memory_unregister(c, poison()), "pointer", mp_status_t::MP_ERROR_INVALID_POINTER),
            ("mp_file_map", mp_file_map(null_mut(), 0, 0, &mut mapped, &mut size), "context", HANDLE),
            ("mp_file_map", mp_file_map(c, 0, 0, null_mut(), &mut size), "data", ARGUMENT),
            ("mp_file_map", mp_file_map(c, 0, 0, &mut mapped, null_mut()), "bytes", ARGUMENT),
            ("mp_file_map", mp_file_map(c, 0, 2, &mut mapped, &mut size), "bypass_cache", ARGUMENT),
            ("mp_file_map", mp_file_map(c, -1, 0, &mut mapped, &mut size), "descriptor", ARGUMENT),
            ("mp_file_unmap", mp_file_unmap(null_mut(), null_mut()), "context", HANDLE),
            ("mp_file_unmap", mp_file_unmap(c, poison()), "data", mp_status_t::MP_ERROR_INVALID_POINTER),
            ("mp_stream_wait_signals", mp_stream_wait_signals(null_mut(), null_mut(), null(), 0), "context", HANDLE),
            ("mp_stream_wait_signals", mp_stream_wait_signals(c, poison(), null(), 0), "stream", HANDLE),
            ("mp_stream_wait_signals", mp_stream_wait_signals(c, null_mut(), null(), 1), "signals", ARGUMENT),
            ("mp_kernel_wait_signals", mp_kernel_wait_signals(null_mut(), null(), 0), "context", HANDLE),
            ("mp_kernel_wait_signals", mp_kernel_wait_signals(c, null(), 1), "signals", ARGUMENT),
            ("mp_stream_get_info", mp_stream_get_info(null_mut(), null_mut(), &mut number, null_mut()), "context", HANDLE),
            ("mp_stream_get_info", mp_stream_get_info(c, poison(), &mut number, null_mut()), "stream", HANDLE),
            ("mp_stream_get_info", mp_stream_get_info(c, null_mut(), misaligned(), null_mut()), "device", ARGUMENT),
            ("mp_stream_get_info", mp_stream_get_info(c, null_mut(), null_mut(), misaligned()), "capturing", ARGUMENT),
            ("mp_stream_raise_signals", mp_stream_raise_signals(null_mut(), null_mut(), null(), 0), "context", HANDLE),
            ("mp_stream_raise_signals", mp_stream_raise_signals(c, poison(), null(), 0), "stream", HANDLE),
            ("mp_stream_raise_signals", mp_stream_raise_signals(c, null_mut(), null(), 1), "signals", ARGUMENT),
            ("mp_signal_raise", mp_signal_raise(null_mut(), memory.cast(), 0), "context", HANDLE),
            ("mp_signal_raise", mp_signal_raise(c, null_mut(), 0), "counter", MP_ERROR_INVALID_POINTER),
            ("mp_signal_read", mp_signal_read(null_mut(), memory.cast(), &mut counted), "context", HANDLE),
            ("mp_signal_read", mp_signal_read(c, null(), &mut counted), "counter", MP_ERROR_INVALID_POINTER),
            ("mp_signal_read", mp_signal_read(c, memory.cast(), null_mut()), "value", ARGUMENT),
            ("mp_signal_test", mp_signal_test(null_mut(), memory.cast(), 0, &mut number), "context", HANDLE),
            ("mp_signal_test", mp_signal_test(c, null(), 0, &mut number), "counter", MP_ERROR_INVALID_POINTER),
            ("mp_signal_test", mp_signal_test(c, memory.cast(), 0, null_mut()), "reached", ARGUMENT),
            ("mp_signal_synchronize", mp_signal_synchronize(null_mut(), memory.cast(), 0, 0.0), "context", HANDLE),
            ("mp_signal_synchronize", mp_signal_synchronize(c, memory.cast(), 0, -1.0), "seconds", ARGUMENT),
            ("mp_device_uuid", mp_device_uuid(null_mut(), 0, uuid.as_mut_ptr()), "context", HANDLE),
            ("mp_device_uuid", mp_device_uuid(c, 0, null_mut()), "uuid", ARGUMENT),
            ("mp_collective", mp_collective(0, 2, 0, 8, null(), null_mut(), 0, null_mut()), "count", ARGUMENT),
            ("mp_stream_create", mp_stream_create(null_mut(), 0, &mut out_stream), "context", HANDLE),
            ("mp_stream_create", mp_stream_create(c, 0, null_mut()), "stream", ARGUMENT),
            ("mp_stream_destroy", mp_stream_destroy(null_mut(), null_mut()), "context", HANDLE),
            ("mp_stream_destroy", mp_stream_destroy(c, null_mut()), "stream", HANDLE),
            ("mp_stream_synchronize", mp_stream_synchronize(null_mut(), null_mut()), "context", HANDLE),
            ("mp_stream_synchronize", mp_stream_synchronize(c, poison()), "stream", HANDLE),
            (
                "mp_stream_launch_host",
                mp_stream_launch_host(null_mut(), null_mut(), Some(nothing), null_mut(), Some(nothing)),
                "context",
                HANDLE,
            ),
            ("mp_stream_launch_host", mp_stream_launch_host(c, null_mut(), None, null_mut(), None), "function", ARGUMENT),
            ("mp_stream_launch_host", mp_stream_launch_host(c, poison(), Some(nothing), null_mut(), None), "stream", HANDLE),
            ("mp_event_create", mp_event_create(null_mut(), &mut out_event), "context", HANDLE),
            ("mp_event_create", mp_event_create(c, null_mut()), "event", ARGUMENT),
            ("mp_event_destroy", mp_event_destroy(null_mut(), event), "context", HANDLE),
            ("mp_event_destroy", mp_event_destroy(c, null_mut()), "event", HANDLE),
            ("mp_event_record", mp_event_record(null_mut(), event, null_mut()), "context", HANDLE),
            ("mp_event_record", mp_event_record(c, null_mut(), null_mut()), "event", HANDLE),
            ("mp_event_record", mp_event_record(c, event, poison()), "stream", HANDLE),
            ("mp_event_synchronize", mp_event_synchronize(null_mut(), event), "context", HANDLE),
            ("mp_event_synchronize", mp_event_synchronize(c, null_mut()), "event", HANDLE),
            ("mp_stream_wait_event", mp_stream_wait_event(null_mut(), null_mut(), event), "context", HANDLE),
            ("mp_stream_wait_event", mp_stream_wait_event(c, null_mut(), null_mut()), "event", HANDLE),
            ("mp_stream_wait_event", mp_stream_wait_event(c, poison(), event), "stream", HANDLE),
        ]
    };
    for (function, status, argument, expected) in &calls {
        assert_eq!(status, expected, "{function}, {argument}");
    }
    // The text of the last error is still available here. The tests below check the text of each error.
    assert_eq!(last_argument().as_deref(), Some("stream"));
    assert_eq!((length, number, counted), (77, 77, 77), "an output was written");
    assert!([out_plan.addr(), out_memory.addr(), out_stream.addr(), out_event.addr()].iter().all(|at| *at == poison::<u8>().addr()));
    assert!(no_request.is_null() && none.is_null() && out_node == poison());
    assert!(out_messenger == poison() && none_such.is_null() && (told.bytes, descriptor.bytes) == (0, [0; 64]));
    ok(mp_messenger_destroy(messenger));
    // SAFETY: as above.
    ok(unsafe { mp_wait(&mut execution, null_mut()) });
    ok(mp_node_destroy(ranks));
    assert_eq!((shared.bytes, uuid), ([0; 128], [0; 16]));
    assert_eq!((counts.plan_cache_misses, device.allocated_bytes, info.bytes), (0, 0, 0));

    let tested: BTreeSet<&str> = calls.iter().map(|call| call.0).collect();
    let cannot_fail = ["mp_version", "mp_version_string", "mp_status_string", "mp_last_error"];
    let missing: Vec<_> = functions().into_iter().filter(|f| !tested.contains(f) && !cannot_fail.contains(f)).collect();
    assert!(missing.is_empty(), "not tested with NULL: {missing:?}");
    assert!(functions().len() > 30, "the header was not read: {:?}", functions());
    node.still_works();
}

#[test]
fn null_is_accepted_where_the_header_says_so() {
    let node = Node::new(c"beluga");
    let mut nothing_to_wait_for = null_mut();
    let mut done = -1;
    let mut plan = null_mut();
    // SAFETY: every pointer is NULL, or valid for the call.
    unsafe {
        ok(mp_free(node.context, null_mut()));
        ok(mp_free_async(node.context, null_mut(), null_mut()));
        ok(mp_memory_close(node.context, null_mut()));
        ok(mp_memory_unregister(node.context, null_mut()));
        ok(mp_wait(&mut nothing_to_wait_for, null_mut()));
        ok(mp_test(&mut nothing_to_wait_for, &mut done, null_mut()));
        ok(mp_request_destroy(&mut nothing_to_wait_for));
        assert_eq!(done, 1);
        ok(mp_plan(node.context, null(), 0, null(), &mut plan));
        ok(mp_execute(plan, null_mut(), null_mut()));
        ok(mp_stream_synchronize(node.context, null_mut()));
    }
    let mut info = plan_info();
    // SAFETY: a whole struct of the right size.
    ok(unsafe { mp_plan_get_info(plan, &mut info) });
    assert_eq!((info.bytes, info.paths, info.operations, info.staging_bytes), (0, 0, 0, 0));
    ok(mp_plan_destroy(plan));
    node.still_works();
}

#[test]
fn a_misaligned_pointer_is_refused() {
    let node = Node::new(c"beluga");
    let mut bytes = [0_u64; 4];
    let odd = bytes.as_mut_ptr().cast::<u8>().wrapping_add(1);
    // SAFETY: the pointers are refused before they are dereferenced.
    unsafe {
        let message = refused(mp_alloc(node.context, 0, 8, odd.cast()), MP_ERROR_INVALID_ARGUMENT);
        assert!(message.contains("not aligned to 8 bytes"), "{message}");
        refused(mp_wait(odd.cast(), null_mut()), MP_ERROR_INVALID_ARGUMENT);
        refused(mp_context_statistics(node.context, odd.cast()), MP_ERROR_INVALID_ARGUMENT);
        let mut plan = poison();
        refused(mp_plan(node.context, odd.cast(), 1, null(), &mut plan), MP_ERROR_INVALID_ARGUMENT);
    }
    assert_eq!(bytes, [0; 4]);
    node.still_works();
}

/// Struct of the C API inside a larger one, like the struct of a program that was compiled with a newer header.
#[repr(C)]
#[derive(Copy, Clone)]
struct Newer<T> {
    known: T,
    unknown: [u8; 16],
}

#[test]
fn struct_sizes_are_checked() {
    let node = Node::new(c"beluga");
    let mut plan: mp_plan_t = poison();
    let empty = [transfer(null_mut(), 0, null(), 1, 0)];
    let mut try_size = |size: usize| {
        let options = Newer { known: mp_plan_options_t { size, ..plan_options() }, unknown: [0; 16] };
        // SAFETY: all pointers are valid for the call. Sizes that no version of the struct has are refused before it is read.
        unsafe { mp_plan(node.context, empty.as_ptr(), 1, &options.known, &mut plan) }
    };
    for size in [0, 1, 47] {
        let message = refused(try_size(size), MP_ERROR_INVALID_ARGUMENT);
        let expected =
            format!("options->size is {size}, but mp_plan_options_t has at least 48 bytes; initialise it with MP_PLAN_OPTIONS_INIT");
        assert_eq!(message, expected);
    }
    for size in [4097, usize::MAX] {
        let message = refused(try_size(size), MP_ERROR_INVALID_ARGUMENT);
        assert!(message.contains(&size.to_string()) && message.contains("72 bytes"), "{message}");
    }
    // With these sizes a field would be cut, so that half of a pointer would be read from the caller's memory.
    for size in [49, 52, 63, 65, 4095] {
        let message = refused(try_size(size), MP_ERROR_INVALID_ARGUMENT);
        let expected =
            format!("options->size is {size}, and a size of mp_plan_options_t is a multiple of 8; initialise it with MP_PLAN_OPTIONS_INIT");
        assert_eq!(message, expected);
    }
    ok(try_size(72 + 16));
    assert!(plan.addr() != poison::<u8>().addr());
    ok(mp_plan_destroy(plan));

    let mut newer = Newer { known: mp_plan_options_t { size: 72 + 16, ..plan_options() }, unknown: [0; 16] };
    newer.unknown[15] = 1;
    let mut plan = poison();
    // SAFETY: all pointers are valid for the call.
    let message = refused(unsafe { mp_plan(node.context, empty.as_ptr(), 1, &newer.known, &mut plan) }, MP_ERROR_INVALID_ARGUMENT);
    assert!(message.contains("options->size is 88") && message.contains("has 72 bytes"), "{message}");
    assert_eq!(plan.addr(), poison::<u8>().addr());

    // If an output struct is larger than the library knows, the library fills the known fields. The remaining bytes and the size field do
    // not change.
    let mut larger = Newer { known: mp_statistics_t { size: 128 + 16, ..statistics() }, unknown: [0xAB; 16] };
    // SAFETY: a whole struct of its size.
    ok(unsafe { mp_context_statistics(node.context, &mut larger.known) });
    assert_eq!((larger.known.size, larger.known.plan_cache_misses, larger.unknown), (144, 1, [0xAB; 16]));
    // The struct of the first release has no fields for graphs. The library fills only the fields that it has.
    let mut older = mp_statistics_t { size: 64, graph_launches: 0xAB, graph_entries: 0xAB, ..statistics() };
    // SAFETY: a whole struct of more than its size.
    ok(unsafe { mp_context_statistics(node.context, &mut older) });
    assert_eq!((older.size, older.plan_cache_misses, older.graph_launches, older.graph_entries), (64, 1, 0xAB, 0xAB));
    let mut smaller = mp_statistics_t { size: 8, ..statistics() };
    // SAFETY: as above.
    let message = refused(unsafe { mp_context_statistics(node.context, &mut smaller) }, MP_ERROR_INVALID_ARGUMENT);
    assert!(message.contains("statistics->size is 8") && message.contains("64 bytes"), "{message}");
    assert_eq!(smaller.plan_cache_misses, 0);
    node.still_works();
}

#[test]
fn layouts_are_those_of_the_first_release() {
    assert_eq!(size_of::<mp_transfer_t>(), 40);
    assert_eq!(
        [
            offset_of!(mp_transfer_t, dst),
            offset_of!(mp_transfer_t, dst_device),
            offset_of!(mp_transfer_t, src),
            offset_of!(mp_transfer_t, src_device),
            offset_of!(mp_transfer_t, bytes)
        ],
        [0, 8, 16, 24, 32]
    );
    assert_eq!((size_of::<mp_context_options_t>(), offset_of!(mp_context_options_t, cache_plans)), (56, 32));
    assert_eq!(offset_of!(mp_context_options_t, signal_wait), 40, "behind those of the first release");
    assert_eq!(offset_of!(mp_context_options_t, host_threads), 44);
    assert_eq!((size_of::<mp_plan_options_t>(), offset_of!(mp_plan_options_t, staging_bytes)), (72, 40));
    assert_eq!((offset_of!(mp_plan_options_t, relay_chunks), offset_of!(mp_plan_options_t, host_chunks)), (60, 64));
    assert_eq!((size_of::<mp_plan_info_t>(), offset_of!(mp_plan_info_t, staging_bytes)), (64, 40));
    assert_eq!((offset_of!(mp_statistics_t, plan_cache_shape_hits), offset_of!(mp_statistics_t, graph_launches)), (56, 64));
    assert_eq!((size_of::<mp_statistics_t>(), offset_of!(mp_statistics_t, graph_entries)), (128, 120));
    assert_eq!((size_of::<mp_device_statistics_t>(), offset_of!(mp_device_statistics_t, streams)), (32, 24));
    assert_eq!((size_of::<mp_signal_t>(), offset_of!(mp_signal_t, value)), (16, 8));
    assert_eq!((size_of::<mp_message_info_t>(), offset_of!(mp_message_info_t, metadata)), (48, 32));
    assert_eq!((size_of::<mp_memory_handle_t>(), align_of::<mp_memory_handle_t>()), (128, 1));
    assert_eq!((size_of::<mp_error_info_t>(), offset_of!(mp_error_info_t, message)), (40, 32));
}

#[test]
fn statuses_have_their_names_and_numbers_for_good() {
    let names: Vec<String> = (0..=22)
        // SAFETY: static texts.
        .map(|status| unsafe { CStr::from_ptr(mp_status_string(status)) }.to_string_lossy().into_owned())
        .collect();
    let expected = "MP_SUCCESS MP_ERROR_INVALID_ARGUMENT MP_ERROR_INVALID_HANDLE MP_ERROR_INVALID_DEVICE MP_ERROR_INVALID_POINTER \
                    MP_ERROR_OVERLAP MP_ERROR_NO_ROUTE MP_ERROR_OUT_OF_MEMORY MP_ERROR_NOT_SUPPORTED MP_ERROR_NO_DRIVER MP_ERROR_DRIVER \
                    MP_ERROR_TOPOLOGY MP_ERROR_ENVIRONMENT MP_ERROR_VERSION_MISMATCH MP_ERROR_DATA_CORRUPTION MP_ERROR_INTERNAL \
                    MP_ERROR_PEER_GONE MP_ERROR_TIMEOUT MP_ERROR_RANK_FAILED MP_ERROR_ALLGATHER MP_ERROR_MESSAGE_TRUNCATED MP_ERROR_CANCELLED \
                    MP_ERROR_QUEUE_FULL";
    assert_eq!(names.join(" "), expected);
    for (number, name) in names.iter().enumerate() {
        assert!(HEADER.contains(&format!("    {name} = {number},")), "{name}");
    }
    for other in [-1, 23, i32::MIN, i32::MAX] {
        // SAFETY: a static text.
        assert_eq!(unsafe { CStr::from_ptr(mp_status_string(other)) }, c"unknown status");
    }
}

#[test]
fn versions_agree_and_others_are_refused() {
    let mut parts = env!("CARGO_PKG_VERSION").split('.').map(|part| part.parse::<u32>().expect("a number"));
    assert_eq!([(); 3].map(|()| parts.next().expect("three parts")), [MP_VERSION_MAJOR, MP_VERSION_MINOR, MP_VERSION_PATCH]);
    assert_eq!(mp_version(), MP_VERSION);
    // SAFETY: a static text.
    assert_eq!(unsafe { CStr::from_ptr(mp_version_string()) }.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    for (header, name) in [(10_100, "1.1.0"), (MP_VERSION + 100, "0.2.0"), (0, "0.0.0"), (u32::MAX, "429496.72.95")] {
        let mut context = poison();
        // SAFETY: the output is valid for the call.
        let status = unsafe { mp_context_create_versioned(null(), header, &mut context) };
        let message = refused(status, MP_ERROR_VERSION_MISMATCH);
        assert!(
            message.contains(&format!("mpgpu.h {name}")) && message.contains(&format!("library is {}", env!("CARGO_PKG_VERSION"))),
            "{message}"
        );
        assert_eq!(context.addr(), poison::<u8>().addr());
    }
    let mut context = null_mut();
    // SAFETY: the output is valid for the call. A newer patch version of the header adds nothing that this library lacks.
    ok(unsafe { mp_context_create_versioned(null(), MP_VERSION + 7, &mut context) });
    ok(mp_context_destroy(context));
}

#[test]
fn a_context_names_its_backend() {
    let node = Node::new(c"beluga");
    let mut backend = mp_backend_t::MP_BACKEND_AUTO;
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_context_get_info(node.context, &mut backend, null_mut(), null_mut()) });
    assert_eq!(backend, mp_backend_t::MP_BACKEND_HOST);
}

#[test]
fn unknown_devices_are_refused() {
    let node = Node::new(c"beluga");
    let (mut gpus, mut hosts) = (0, 0);
    // SAFETY: the outputs are valid for the call.
    ok(unsafe { mp_context_get_info(node.context, null_mut(), &mut gpus, &mut hosts) });
    assert_eq!(gpus, 4);
    let named = ["device 4", "host NUMA domain 1", "device 2147483647", "host NUMA domain 2147483647"];
    for (device, name) in [gpus, -1 - hosts, i32::MAX, i32::MIN].into_iter().zip(named) {
        let (mut memory, mut stream, mut held) = (poison(), poison(), device_statistics());
        // SAFETY: the outputs are valid for the calls.
        unsafe {
            let message = refused(mp_alloc(node.context, device, 8, &mut memory), MP_ERROR_INVALID_DEVICE);
            assert!(message.starts_with(&format!("{name} does not exist: this context has GPUs 0 to 3")), "{message}");
            refused(mp_stream_create(node.context, device, &mut stream), MP_ERROR_INVALID_DEVICE);
            refused(mp_context_device_statistics(node.context, device, &mut held), MP_ERROR_INVALID_DEVICE);
            refused(mp_device_uuid(node.context, device, [0_u8; 16].as_mut_ptr()), MP_ERROR_INVALID_DEVICE);
        }
        assert_eq!((memory.addr(), stream.addr(), held.streams), (poison::<u8>().addr(), poison::<u8>().addr(), 0));
        assert_eq!(last_argument().as_deref(), Some("device"));
        let a = node.alloc(0, 64);
        // The address is refused even if nothing is copied.
        for bytes in [8, 0] {
            let (status, plan) = node.try_plan(&[transfer(a, 0, a, 0, 0), transfer(a, device, a, 0, bytes)], poison());
            let message = refused(status, MP_ERROR_INVALID_DEVICE);
            assert!(message.starts_with(&format!("transfer 1: destination {name} does not exist")), "{message}");
            assert_eq!(plan.addr(), poison::<u8>().addr());
        }
        node.free(a);
    }
    node.still_works();
}

#[test]
fn enumerations_are_checked_by_value() {
    let node = Node::new(c"beluga");
    let empty = [transfer(null_mut(), 0, null(), 1, 0)];
    let refusals = [
        (mp_plan_options_t { engine: 5, ..plan_options() }, "engine=5: must be from 0 (MP_ENGINE_AUTO) to 4 (MP_ENGINE_KERNEL)"),
        (mp_plan_options_t { engine: -1, ..plan_options() }, "engine=-1: must be"),
        (mp_plan_options_t { host_path: 3, ..plan_options() }, "host_path=3: must be 0 (MP_DEFAULT), 1 (MP_ON) or 2 (MP_OFF)"),
        (mp_plan_options_t { chunk_bytes: 5, ..plan_options() }, "chunk_bytes=5: must be 4096 or more"),
        (mp_plan_options_t { staging_bytes: 1 << 40, ..plan_options() }, "staging_bytes=1099511627776: must not exceed"),
    ];
    for (options, expected) in refusals {
        let mut plan = poison();
        // SAFETY: all pointers are valid for the call.
        let message = refused(unsafe { mp_plan(node.context, empty.as_ptr(), 1, &options, &mut plan) }, MP_ERROR_INVALID_ARGUMENT);
        assert!(message.starts_with(expected), "{message}");
        assert_eq!(plan.addr(), poison::<u8>().addr());
    }
    let of_kind = "signal_wait=3: must be from 0 (MP_SIGNAL_WAIT_DEFAULT) to 2 (MP_SIGNAL_WAIT_KERNEL)";
    for (options, expected) in [
        (mp_context_options_t { backend: 3, ..context_options() }, "backend=3: must be from 0 (MP_BACKEND_AUTO) to 2 (MP_BACKEND_CUDA)"),
        (mp_context_options_t { backend: i32::MIN, ..context_options() }, "backend=-2147483648"),
        (mp_context_options_t { signal_wait: 3, ..context_options() }, of_kind),
        (mp_context_options_t { signal_wait: -1, ..context_options() }, "signal_wait=-1"),
        (
            mp_context_options_t { host_threads: 257, ..context_options() },
            "host_threads=257: must be from 1 to 256, -1 for none, or 0 for the value of MPGPU_HOST_THREADS",
        ),
        (mp_context_options_t { host_threads: -2, ..context_options() }, "host_threads=-2"),
    ] {
        let mut context = poison();
        // SAFETY: all pointers are valid for the call.
        let status = unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) };
        let message = refused(status, MP_ERROR_INVALID_ARGUMENT);
        assert!(message.starts_with(expected), "{message}");
        assert_eq!(context.addr(), poison::<u8>().addr());
    }
    node.still_works();
}

#[test]
fn destroyed_handles_and_handles_of_another_kind_are_refused() {
    let node = Node::new(c"beluga");
    let (a, b) = (node.alloc(0, 64), node.alloc(1, 64));
    let plan = node.plan(&[transfer(b, 1, a, 0, 64)]);
    let mut request = null_mut();
    // SAFETY: the output is valid for the call, and so is the plan's memory.
    ok(unsafe { mp_execute(plan, null_mut(), &mut request) });
    let copy_of_request = request;
    // SAFETY: the request is valid for the call.
    ok(unsafe { mp_wait(&mut request, null_mut()) });
    assert!(request.is_null());
    let mut again = copy_of_request;
    let mut done = 77;
    // SAFETY: the pointers are valid for the calls; the handle need not be.
    unsafe {
        let message = refused(mp_wait(&mut again, null_mut()), MP_ERROR_INVALID_HANDLE);
        assert!(message.starts_with("request is 0x") && message.contains("destroyed already"), "{message}");
        refused(mp_test(&mut again, &mut done, null_mut()), MP_ERROR_INVALID_HANDLE);
        refused(mp_request_destroy(&mut again), MP_ERROR_INVALID_HANDLE);
    }
    assert_eq!((again, done), (copy_of_request, 77));

    // A plan handle is refused as a context, and a context handle as a plan, even after a cast.
    refused(mp_context_destroy(plan.cast()), MP_ERROR_INVALID_HANDLE);
    refused(mp_plan_destroy(node.context.cast()), MP_ERROR_INVALID_HANDLE);

    ok(mp_plan_destroy(plan));
    refused(mp_plan_destroy(plan), MP_ERROR_INVALID_HANDLE);
    let mut out = poison();
    // SAFETY: the output is valid for the call; the plan is gone.
    refused(unsafe { mp_execute(plan, null_mut(), &mut out) }, MP_ERROR_INVALID_HANDLE);
    assert_eq!(out.addr(), poison::<u8>().addr());
    // A new plan that takes over the internal number of a destroyed plan does not make the old handle valid again.
    let newer = node.plan(&[transfer(b, 1, a, 0, 32)]);
    assert_ne!(newer, plan);
    refused(mp_plan_destroy(plan), MP_ERROR_INVALID_HANDLE);

    let stream = node.stream(0);
    ok(mp_stream_destroy(node.context, stream));
    refused(mp_stream_destroy(node.context, stream), MP_ERROR_INVALID_HANDLE);
    refused(mp_stream_synchronize(node.context, stream), MP_ERROR_INVALID_HANDLE);
    let mut event = null_mut();
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_event_create(node.context, &mut event) });
    ok(mp_event_record(node.context, event, null_mut()));
    ok(mp_event_synchronize(node.context, event));
    ok(mp_event_destroy(node.context, event));
    refused(mp_event_destroy(node.context, event), MP_ERROR_INVALID_HANDLE);
    refused(mp_event_record(node.context, event, null_mut()), MP_ERROR_INVALID_HANDLE);

    node.free(a);
    // SAFETY: the address was freed, and the test expects a refusal.
    let message = refused(unsafe { mp_free(node.context, a.cast()) }, MP_ERROR_INVALID_POINTER);
    assert!(message.contains("was not allocated in this context, or was freed already"), "{message}");
    // SAFETY: the address is inside an allocation but not its start, and the test expects a refusal.
    refused(unsafe { mp_free(node.context, b.wrapping_add(1).cast()) }, MP_ERROR_INVALID_POINTER);
    node.still_works();

    let other = Node::new(c"beluga");
    // Destroying a context destroys its plans and requests, but not those of other contexts.
    let kept = other.plan(&[]);
    let empty = node.plan(&[]);
    // SAFETY: the output is valid for the call, and an empty plan has no memory.
    ok(unsafe { mp_execute(empty, null_mut(), &mut request) });
    ok(mp_context_destroy(node.context));
    refused(mp_context_destroy(node.context), MP_ERROR_INVALID_HANDLE);
    refused(mp_plan_destroy(newer), MP_ERROR_INVALID_HANDLE);
    // SAFETY: the pointer is valid; the request is gone.
    refused(unsafe { mp_wait(&mut request, null_mut()) }, MP_ERROR_INVALID_HANDLE);
    let mut memory = poison();
    // SAFETY: the output is valid for the call.
    refused(unsafe { mp_alloc(node.context, 0, 8, &mut memory) }, MP_ERROR_INVALID_HANDLE);
    assert_eq!(memory.addr(), poison::<u8>().addr());
    ok(mp_plan_destroy(kept));
    other.still_works();
}

#[test]
fn ranges_outside_their_allocation_are_refused() {
    let node = Node::new(c"beluga");
    let (a, b, h) = (node.alloc(0, 4096), node.alloc(1, 4096), node.alloc(MP_DEVICE_HOST, 4096));
    // The test allocates this memory itself, so that no other allocation follows it directly.
    let mut own = vec![0_u8; 64];
    let outside = own.as_mut_ptr();
    let cases = [
        (
            transfer(b, 1, a, 0, 4097),
            format!("transfer 0: destination {b:p} (4097 bytes) extends past the end of its allocation ({b:p}, 4096 bytes)"),
        ),
        (transfer(b.wrapping_add(4090), 1, a, 0, 8), "transfer 0: destination".to_owned()),
        (transfer(b, 1, a.wrapping_add(1), 0, 4096), format!("transfer 0: source {:p} (4096 bytes) extends past", a.wrapping_add(1))),
        (transfer(b, 1, outside, 0, 8), format!("transfer 0: source {outside:p} (8 bytes) is not memory of device 0")),
        (transfer(a, 1, b, 1, 8), format!("transfer 0: destination {a:p} (8 bytes) lies in memory of device 0")),
        (transfer(h, 1, a, 0, 8), format!("transfer 0: destination {h:p} (8 bytes) lies in memory of the host")),
        (transfer(a, MP_DEVICE_HOST, b, 1, 8), "transfer 0: destination".to_owned()),
        (transfer(h, MP_DEVICE_HOST, b, 1, 4097), "transfer 0: destination".to_owned()),
        (transfer(b, 1, null(), 0, 8), "transfer 0: source is null, but 8 bytes are to be moved".to_owned()),
        (transfer(null_mut(), 1, a, 0, 8), "transfer 0: destination is null".to_owned()),
        (transfer(null_mut(), MP_DEVICE_HOST, a, 0, 8), "transfer 0: destination is null".to_owned()),
        (transfer(b, 1, a, 0, usize::MAX), "transfer 0: destination".to_owned()),
        (transfer(outside, MP_DEVICE_HOST, a, 0, usize::MAX), "transfer 0: destination".to_owned()),
        // Pageable host memory whose range would extend into an allocation of the context.
        (transfer(h.wrapping_sub(8), MP_DEVICE_HOST, a, 0, 16), "transfer 0: destination".to_owned()),
    ];
    for (t, expected) in &cases {
        let (status, plan) = node.try_plan(std::slice::from_ref(t), poison());
        let message = refused(status, MP_ERROR_INVALID_POINTER);
        assert!(message.starts_with(expected), "{message}");
        assert_eq!((plan.addr(), last_argument().as_deref()), (poison::<u8>().addr(), Some("transfers")));
    }
    let message = refused(node.try_plan(&[transfer(b, 1, a, 0, 8), cases[3].0], poison()).0, MP_ERROR_INVALID_POINTER);
    assert!(message.starts_with("transfer 1: source"), "{message}");
    assert!(own.iter().all(|byte| *byte == 0));
    node.still_works();
}

#[test]
fn messages_name_devices_in_words_of_no_language() {
    let node = Node::new(c"beluga");
    let (mut memory, mut ranks, mut messenger) = (null_mut(), null_mut(), null_mut());
    for (device, name) in [(MP_DEVICE_AUTO, "an automatic device"), (-5, "host NUMA domain 4"), (9, "device 9")] {
        let expected = format!("{name} does not exist: this context has GPUs 0 to 3 and the host");
        // SAFETY: the output is valid for the call.
        assert_eq!(refused(unsafe { mp_alloc(node.context, device, 8, &mut memory) }, MP_ERROR_INVALID_DEVICE), expected);
    }
    let (a, b) = (node.alloc(0, 8), node.alloc(1, 8));
    let message = refused(node.try_plan(&[transfer(a, 0, b, -5, 8)], null_mut()).0, MP_ERROR_INVALID_DEVICE);
    assert!(message.starts_with("transfer 0: source host NUMA domain 4 does not exist"), "{message}");
    let mut options =
        mp_node_options_t { size: size_of::<mp_node_options_t>(), devices: null(), device_count: 1, socket: null(), failure: null() };
    let host = [MP_DEVICE_HOST];
    for (devices, message) in [(null(), "devices is NULL"), (host.as_ptr(), "the host is not a GPU")] {
        options.devices = devices;
        // SAFETY: the output is valid for the call.
        let status = unsafe { mp_node_create(node.context, 0, 1, None, null_mut(), &options, &mut ranks) };
        assert_eq!((refused(status, MP_ERROR_INVALID_ARGUMENT).as_str(), last_argument().as_deref()), (message, Some("devices")));
    }
    // SAFETY: the output is valid for the call.
    let status = unsafe { mp_node_create(node.context, -1_i32 as u32, 4, Some(alone), null_mut(), null(), &mut ranks) };
    let message = refused(status, MP_ERROR_INVALID_ARGUMENT);
    assert!(message.starts_with("rank -1 of 4"), "{message}");
    // SAFETY: the outputs are valid for the calls.
    ok(unsafe { mp_node_create(node.context, 0, 1, None, null_mut(), null(), &mut ranks) });
    // SAFETY: as above.
    ok(unsafe { mp_messenger_create(ranks, null(), &mut messenger) });
    // SAFETY: nothing is sent.
    let sent = unsafe { mp_send(messenger, null(), 0, MP_ANY_RANK as u32, 0, null(), 0, null_mut(), null_mut()) };
    assert_eq!(refused(sent, MP_ERROR_INVALID_ARGUMENT), "rank=any: only receives and probes accept it; must be 0 to 0");
    ranks_that_are_none_are_refused(ranks, messenger);
    ok(mp_messenger_destroy(messenger));
    ok(mp_node_destroy(ranks));
    node.still_works();
}

/// Computes the value of the macro `MP_RANK_ELSEWHERE` as the header does.
fn elsewhere(rank: i32) -> i32 {
    MP_FIRST_ELSEWHERE - rank
}

/// Tests that each call that takes a rank refuses a number that is no rank of the node, with an explanation.
fn ranks_that_are_none_are_refused(ranks: mp_node_t, messenger: mp_messenger_t) {
    let end = |rank: i32, window| mp_node_end_t { rank: rank as u32, window, offset: 3 };
    let cases = [
        (elsewhere(5), "rank 5 is on another node: use MPI, or mpgpu's halo::plan"),
        (-2, "rank=-2: must be 0 to 0, a rank of the node; make no call for a neighbour that does not exist"),
        (1, "rank=1: must be 0 to 0, a rank of the node"),
    ];
    for (rank, expected) in cases {
        let (mut request, mut found, mut plan) = (null_mut(), 0, null_mut());
        // SAFETY: nothing is moved, and the outputs are valid for the calls.
        let statuses = unsafe {
            [
                mp_send(messenger, null(), 0, rank as u32, 0, null(), 0, null_mut(), null_mut()),
                mp_receive(messenger, null_mut(), 0, rank, 0, u64::MAX, null_mut(), &mut request),
                mp_message_probe(messenger, rank, 0, u64::MAX, &mut found, null_mut()),
            ]
        };
        for status in statuses {
            assert_eq!(status, MP_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: as above.
        let probed = unsafe { mp_message_probe(messenger, rank, 0, u64::MAX, &mut found, null_mut()) };
        assert_eq!(refused(probed, MP_ERROR_INVALID_ARGUMENT), expected);
        let window = mp_window_t { memory: null_mut(), bytes: 0 };
        for dst in [end(rank, MP_BY_TAG), end(rank, 0)] {
            let transfer = mp_node_transfer_t { dst, src: end(0, 0), bytes: 0 };
            // SAFETY: as above.
            let status = unsafe { mp_node_plan(ranks, &window, 1, &transfer, 1, null(), null(), &mut plan) };
            assert_eq!(refused(status, MP_ERROR_INVALID_ARGUMENT), format!("transfer 0 has an invalid rank: {expected}"));
        }
        let (mut pieces, mut count) = ([], 0);
        // SAFETY: as above.
        let status = unsafe { mp_collective(0, 1, rank as u32, 8, null(), pieces.as_mut_ptr(), 0, &mut count) };
        let message = refused(status, MP_ERROR_INVALID_ARGUMENT);
        assert!(rank > -3 || message == expected, "{message}");
        assert!(rank < -3 || message.starts_with(&format!("root {rank} is not one of the 1 participants")), "{message}");
    }
}

#[test]
fn streams_and_events_of_another_context_are_refused_by_name() {
    let (here, there) = (Node::new(c"beluga"), Node::new(c"beluga"));
    // Both contexts have the same number of streams and events.
    let (ours, theirs) = (here.stream(0), there.stream(0));
    let (mut event, mut other) = (null_mut(), null_mut());
    // SAFETY: the outputs are valid for the calls.
    ok(unsafe { mp_event_create(here.context, &mut event) });
    // SAFETY: as above.
    ok(unsafe { mp_event_create(there.context, &mut other) });
    let (a, b) = (here.alloc(0, 8), here.alloc(1, 8));
    let plan = here.plan(&[transfer(b, 1, a, 0, 8)]);
    let expected = format!("{} is not a stream of this context: it belongs to another context, or was destroyed already", theirs.addr());
    for status in [
        // SAFETY: the plan exists.
        unsafe { mp_execute(plan, theirs, null_mut()) },
        mp_stream_synchronize(here.context, theirs),
        mp_event_record(here.context, event, theirs),
        mp_stream_destroy(here.context, theirs),
    ] {
        assert_eq!(refused(status, MP_ERROR_INVALID_HANDLE), expected);
        assert_eq!(last_argument().as_deref(), Some("stream"));
    }
    let message = refused(mp_stream_wait_event(here.context, ours, other), MP_ERROR_INVALID_HANDLE);
    assert!(message.ends_with("is not a event of this context: it belongs to another context, or was destroyed already"), "{message}");
    ok(mp_plan_destroy(plan));
    ok(mp_event_destroy(here.context, event));
    ok(mp_event_destroy(there.context, other));
    here.still_works();
    there.still_works();
}

#[test]
fn the_device_of_an_address_is_found_on_request() {
    let node = Node::new(c"summit");
    assert!(HEADER.contains(&format!("#define MP_DEVICE_AUTO {MP_DEVICE_AUTO:#x}\n")));
    const BYTES: usize = 5000;
    let auto = |dst: *mut u8, src: *const u8| transfer(dst, MP_DEVICE_AUTO, src, MP_DEVICE_AUTO, BYTES);
    let ends = |plan: mp_plan_t| {
        // SAFETY: `describe` passes a buffer of its capacity.
        let text = describe(|text, capacity, length| unsafe { mp_plan_describe(plan, 0, text, capacity, length) });
        text.lines().find(|line| line.starts_with("transfer 0: ")).expect("a line for the transfer").to_owned()
    };
    let (a, b, near, far) = (node.alloc(1, BYTES), node.alloc(4, BYTES), node.alloc(MP_DEVICE_HOST, BYTES), node.alloc(-2, BYTES));
    let mut own: Vec<u8> = (0..BYTES).map(|i| (i * 7) as u8).collect();
    let expected = own.clone();
    // From pageable host memory to a GPU, another GPU, both host domains, and back.
    for (dst, src, said) in [
        (a, own.as_mut_ptr(), "host0 to gpu1"),
        (b, a, "gpu1 to gpu4"),
        (near, b, "gpu4 to host0"),
        (far, near, "host0 to host1"),
        (own.as_mut_ptr(), far, "host1 to host0"),
    ] {
        let plan = node.plan(&[auto(dst, src)]);
        assert!(ends(plan).contains(said), "{} is not {said}", ends(plan));
        if dst == own.as_mut_ptr() {
            own.fill(0);
        }
        node.run(plan);
        ok(mp_plan_destroy(plan));
    }
    assert!(own == expected, "bytes arrived wrong");
    // The inferred transfer is the same request as the transfer with explicit devices, so it is found in the cache.
    let before = node.statistics();
    ok(mp_plan_destroy(node.plan(&[transfer(b, 4, a, 1, BYTES)])));
    assert_eq!(node.statistics().plan_cache_hits, before.plan_cache_hits + 1);
    // First one end is inferred and the other end has a wrong device. Then an address is outside its allocation. Then an address is NULL.
    for (t, status, expected) in [
        (transfer(b, MP_DEVICE_AUTO, a, 0, BYTES), MP_ERROR_INVALID_POINTER, "lies in memory of device 1"),
        (transfer(b, MP_DEVICE_AUTO, a, 1, BYTES + 1), MP_ERROR_INVALID_POINTER, "extends past the end of its allocation"),
        (transfer(b, 4, null(), MP_DEVICE_AUTO, BYTES), MP_ERROR_INVALID_POINTER, "is null"),
    ] {
        let message = refused(node.try_plan(&[t], poison()).0, status);
        assert!(message.contains(expected), "{message}");
    }
    // Nothing is copied, so the addresses are not checked.
    ok(mp_plan_destroy(node.plan(&[transfer(null_mut(), MP_DEVICE_AUTO, null(), MP_DEVICE_AUTO, 0)])));
    // The value "infer the device" is refused here, because only a transfer has an address from which a device can be inferred.
    let mut memory = poison();
    // SAFETY: the output is valid for the call.
    refused(unsafe { mp_alloc(node.context, MP_DEVICE_AUTO, 8, &mut memory) }, MP_ERROR_INVALID_DEVICE);
    for memory in [a, b, near, far] {
        node.free(memory);
    }
}

#[test]
fn overflowing_sizes_are_refused() {
    let node = Node::new(c"beluga");
    let one = [transfer(null_mut(), 0, null(), 1, 0)];
    for count in [usize::MAX, usize::MAX / 40, isize::MAX as usize / 40 + 1, 1 << 32] {
        let mut plan = poison();
        // SAFETY: the count is refused before the array is read.
        let message = refused(unsafe { mp_plan(node.context, one.as_ptr(), count, null(), &mut plan) }, MP_ERROR_INVALID_ARGUMENT);
        assert!(message.contains(&format!("count is {count}")), "{message}");
        assert_eq!((plan.addr(), last_argument().as_deref()), (poison::<u8>().addr(), Some("count")));
    }
    for bytes in [u64::MAX, u64::MAX - 4096, 1 << 62] {
        let mut memory = poison();
        // SAFETY: the output is valid for the call.
        let message = refused(unsafe { mp_alloc(node.context, 0, bytes, &mut memory) }, MP_ERROR_OUT_OF_MEMORY);
        assert!(message.contains(&bytes.to_string()), "{message}");
        assert_eq!(memory.addr(), poison::<u8>().addr());
    }
    node.still_works();
}

#[test]
fn overlaps_are_refused_with_both_transfers_named() {
    let node = Node::new(c"beluga");
    let (a, b) = (node.alloc(0, 4096), node.alloc(1, 4096));
    let at = |memory: *mut u8, offset: usize| memory.wrapping_add(offset);
    let apart = transfer(at(b, 2048), 1, at(a, 2048), 0, 8);
    let cases: [(&[mp_transfer_t], &[&str]); 6] = [
        // Two overlapping destinations.
        (&[transfer(b, 1, a, 0, 100), apart, transfer(at(b, 99), 1, at(a, 200), 0, 10)], &["transfer 0", "transfer 2"]),
        (&[transfer(b, 1, a, 0, 100), transfer(b, 1, at(a, 200), 0, 100)], &["transfer 0", "transfer 1"]),
        // A destination that overlaps another transfer's source, in both orders.
        (&[apart, transfer(b, 1, a, 0, 100), transfer(at(a, 50), 0, at(b, 200), 1, 10)], &["transfer 1", "transfer 2"]),
        (&[transfer(at(a, 50), 0, at(b, 200), 1, 10), transfer(b, 1, a, 0, 100)], &["transfer 0", "transfer 1"]),
        // A long range starts far before the range that it overlaps, and a short range lies between the two starts.
        (
            &[transfer(b, 1, a, 0, 2000), transfer(at(a, 3000), 0, at(b, 3000), 1, 8), transfer(at(b, 1990), 1, at(a, 3500), 0, 100)],
            &["transfer 0", "transfer 2"],
        ),
        // A transfer whose source and destination overlap.
        (&[apart, transfer(at(a, 8), 0, a, 0, 16)], &["transfer 1: its destination", "its own source"]),
    ];
    for (transfers, names) in cases {
        let (status, plan) = node.try_plan(transfers, poison());
        let message = refused(status, MP_ERROR_OVERLAP);
        assert!(names.iter().all(|name| message.contains(name)), "{message}");
        assert_eq!(plan.addr(), poison::<u8>().addr());
    }
    // Sources may overlap, ranges may be adjacent, and empty transfers overlap nothing.
    let fine = [transfer(b, 1, a, 0, 100), transfer(at(b, 100), 1, at(a, 50), 0, 100), transfer(at(b, 20), 1, b, 1, 0)];
    let plan = node.plan(&fine);
    // SAFETY: nothing else uses this memory.
    unsafe { std::slice::from_raw_parts_mut(a, 4096) }.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
    node.run(plan);
    // SAFETY: as above, and the copies have finished.
    let written = unsafe { std::slice::from_raw_parts(b, 200) };
    assert!(written.iter().enumerate().all(|(i, byte)| *byte == if i < 100 { i } else { i - 50 } as u8));
    ok(mp_plan_destroy(plan));
    node.still_works();
}

#[test]
fn a_plan_whose_memory_was_freed_is_refused() {
    let node = Node::new(c"beluga");
    let (a, b, unrelated) = (node.alloc(0, 4096), node.alloc(1, 4096), node.alloc(1, 4096));
    let plan = node.plan(&[transfer(b, 1, a, 0, 4096)]);
    node.run(plan);
    node.free(unrelated);
    node.run(plan);
    node.free(b);
    let mut request = poison();
    // SAFETY: the output is valid for the call. The memory is not, and the test expects a refusal.
    let message = refused(unsafe { mp_execute(plan, null_mut(), &mut request) }, MP_ERROR_INVALID_POINTER);
    assert!(message.starts_with(&format!("transfer 0: destination {b:p} was freed or unregistered after the plan was made")), "{message}");
    assert_eq!(refused(mp_plan_prepare(plan, null_mut()), MP_ERROR_INVALID_POINTER), message);
    assert_eq!(request.addr(), poison::<u8>().addr());
    // A new allocation at the same address is not the memory for which the plan was created.
    let again: Vec<*mut u8> = (0..64).map(|_| node.alloc(1, 4096)).collect();
    // SAFETY: as above.
    refused(unsafe { mp_execute(plan, null_mut(), &mut request) }, MP_ERROR_INVALID_POINTER);
    again.into_iter().for_each(|memory| node.free(memory));
    ok(mp_plan_destroy(plan));
    node.still_works();
}

#[test]
fn descriptions_tell_their_length_and_fit_or_are_refused() {
    let node = Node::new(c"beluga");
    let (a, b) = (node.alloc(0, 1 << 20), node.alloc(1, 1 << 20));
    let plan = node.plan(&[transfer(b, 1, a, 0, 1 << 20)]);
    // SAFETY: `describe` passes a buffer of its capacity.
    let text = describe(|text, capacity, length| unsafe { mp_context_describe(node.context, 0, text, capacity, length) });
    assert!(text.contains("beluga") && text.contains("host backend"), "{text}");
    // SAFETY: as above.
    let json = describe(|text, capacity, length| unsafe { mp_context_describe(node.context, 1, text, capacity, length) });
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["topology"]["gpus"], 4);
    assert_eq!(json["settings"]["staging_bytes"], 64 << 20);
    // SAFETY: as above.
    let json = describe(|text, capacity, length| unsafe { mp_plan_describe(plan, 1, text, capacity, length) });
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok_and(|value| value.is_object()), "{json}");
    // SAFETY: as above.
    let text = describe(|text, capacity, length| unsafe { mp_plan_describe(plan, 0, text, capacity, length) });
    let needed = text.len() + 1;

    let mut buffer = vec![0xEE_u8; needed + 8];
    for capacity in [0, 1, needed - 1] {
        let mut length = 0;
        // SAFETY: the buffer has at least this capacity.
        let status = unsafe { mp_plan_describe(plan, 0, buffer.as_mut_ptr().cast(), capacity, &mut length) };
        let message = refused(status, MP_ERROR_INVALID_ARGUMENT);
        assert_eq!(message, format!("capacity is {capacity}, but the text needs {needed} bytes with its final NUL"));
        assert_eq!(length, needed);
        assert!(buffer.iter().all(|byte| *byte == 0xEE), "text was written");
    }
    let mut length = 0;
    // SAFETY: as above.
    ok(unsafe { mp_plan_describe(plan, 0, buffer.as_mut_ptr().cast(), needed, &mut length) });
    assert_eq!((&buffer[..needed - 1], buffer[needed - 1], buffer[needed]), (text.as_bytes(), 0, 0xEE));
    ok(mp_plan_destroy(plan));
}

#[test]
fn errors_are_of_the_thread_that_met_them() {
    refused(mp_context_destroy(null_mut()), MP_ERROR_INVALID_HANDLE);
    let here = last_error();
    std::thread::spawn(|| {
        assert_eq!(last_error(), "");
        let mut info = error_info();
        // SAFETY: a whole struct of the right size.
        ok(unsafe { mp_last_error_info(&mut info) });
        assert_eq!((info.status, info.argument), (MP_SUCCESS, null()));
        refused(mp_plan_destroy(poison()), MP_ERROR_INVALID_HANDLE);
    })
    .join()
    .expect("no assertion failed");
    // The text of the last error is not changed by an error of another thread, nor by a successful call.
    drop(Node::new(c"beluga"));
    assert_eq!(last_error(), here);
    let mut info = error_info();
    // SAFETY: a whole struct of the right size; the texts are valid until the next failure.
    ok(unsafe { mp_last_error_info(&mut info) });
    assert_eq!((info.status, info.driver_code, info.message), (MP_ERROR_INVALID_HANDLE, 0, mp_last_error()));
    assert_eq!(last_argument().as_deref(), Some("context"));
}

#[test]
fn an_error_of_another_library_becomes_the_last_error() {
    let mut info = error_info();
    let text = |address: *const c_char| {
        // SAFETY: the library owns the text, which is valid until the next failure.
        (!address.is_null()).then(|| unsafe { CStr::from_ptr(address) }.to_str().expect("valid UTF-8").to_owned())
    };
    {
        let (argument, message) = (CString::new("fields").expect("no NUL"), CString::new("9 fields: must be 1 to 8").expect("no NUL"));
        // SAFETY: the texts end with NUL, and the library copies them.
        ok(unsafe { mp_last_error_set(10, 700, argument.as_ptr(), message.as_ptr()) });
    }
    // SAFETY: a whole struct of the right size.
    ok(unsafe { mp_last_error_info(&mut info) });
    assert_eq!((info.status, info.driver_code), (MP_ERROR_DRIVER, 700));
    assert_eq!((text(info.argument).as_deref(), text(info.message).as_deref()), (Some("fields"), Some("9 fields: must be 1 to 8")));
    // SAFETY: both texts may be NULL.
    ok(unsafe { mp_last_error_set(22, 0, null(), null()) });
    // SAFETY: a whole struct of the right size.
    ok(unsafe { mp_last_error_info(&mut info) });
    assert_eq!(
        (info.status, info.driver_code, info.argument, last_error().as_str()),
        (MP_ERROR_QUEUE_FULL, 0, null(), "MP_ERROR_QUEUE_FULL")
    );
}

#[test]
fn bad_topologies_are_refused() {
    let folder = std::env::temp_dir().join(format!("mpgpu-abi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let texts: [(&str, &[u8]); 6] = [
        ("empty.toml", b""),
        ("not-toml.toml", b"name = \nfoo]["),
        ("unknown-key.toml", b"name = \"x\"\ncoffee = true\n"),
        ("wrong-type.toml", b"name = 7\n"),
        ("not-utf8.toml", b"name = \"\xff\xfe\"\n"),
        ("deep.toml", &[b'['; 4096]),
    ];
    let mut names: Vec<CString> =
        vec![c"no-such-preset".to_owned(), c"".to_owned(), CString::new(folder.to_str().expect("UTF-8")).expect("no NUL")];
    for (name, text) in texts {
        let path = folder.join(name);
        std::fs::write(&path, text).expect("the file can be written");
        names.push(CString::new(path.to_str().expect("UTF-8")).expect("no NUL"));
    }
    for name in &names {
        let options = mp_context_options_t { topology: name.as_ptr(), ..context_options() };
        let mut context = poison();
        // SAFETY: all pointers are valid for the call.
        let message = refused(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) }, MP_ERROR_TOPOLOGY);
        assert!(message.contains(name.to_str().expect("UTF-8")), "{name:?}: {message}");
        assert_eq!((context.addr(), last_argument().as_deref()), (poison::<u8>().addr(), Some("topology")));
    }
    let options = mp_context_options_t { topology: c"\xff".as_ptr(), ..context_options() };
    let mut context = poison();
    // SAFETY: all pointers are valid for the call.
    refused(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) }, MP_ERROR_INVALID_ARGUMENT);
    std::fs::remove_dir_all(&folder).expect("the folder was the test's own");
    Node::new(c"beluga").still_works();
}

/// Creates a context and prints the result. Runs only in a child process, which the test below starts with a chosen environment.
#[test]
#[ignore = "a process that other tests start"]
fn child_creates_a_context() {
    if std::env::var_os("ABI_TEST_CHILD").is_none() {
        return;
    }
    let mut context = poison();
    // SAFETY: the output is valid for the call.
    let status = unsafe { mp_context_create_versioned(null(), MP_VERSION, &mut context) };
    if status == MP_SUCCESS {
        let node = Node { context };
        node.still_works();
        // SAFETY: `describe` passes a buffer of its capacity.
        let json = describe(|text, capacity, length| unsafe { mp_context_describe(node.context, 1, text, capacity, length) });
        println!("RESULT 0 {json}");
    } else {
        assert_eq!(context.addr(), poison::<u8>().addr());
        println!("RESULT {} {}", status as i32, last_error());
    }
}

fn context_in(environment: &[(&str, &str)]) -> (i32, String) {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child
        .args(["--ignored", "--exact", "abi::child_creates_a_context", "--nocapture"])
        .env("ABI_TEST_CHILD", "1")
        .env("MPGPU_BACKEND", "host");
    for (name, value) in environment {
        child.env(name, value);
    }
    let output = child.output().expect("this program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let result = text.lines().find_map(|line| line.split_once("RESULT ")).expect("the child tells its result").1;
    let (status, rest) = result.split_once(' ').expect("status and text");
    (status.parse().expect("a number"), rest.to_owned())
}

#[test]
fn the_environment_is_read_when_a_context_is_created() {
    let (status, json) = context_in(&[
        ("MPGPU_TOPOLOGY", "beluga"),
        ("MPGPU_MAX_PATHS", "2"),
        ("MPGPU_STAGING_BYTES", "1M"),
        ("MPGPU_VERIFY", "program"),
        ("MPGPU_ROOT", "/opt"),
    ]);
    assert_eq!(status, 0, "{json}");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["topology"]["name"], &json["settings"]["max_paths"]), (&"beluga".into(), &2.into()));
    assert_eq!((&json["settings"]["staging_bytes"], &json["settings"]["verify"]), (&(1 << 20).into(), &"program".into()));
}

#[test]
fn bad_environments_are_refused() {
    let environment = MP_ERROR_ENVIRONMENT as i32;
    assert_eq!(context_in(&[("MPGPU_MAX_PATHS", "0")]), (environment, "MPGPU_MAX_PATHS=0: must be 1 or more".to_owned()));
    let (status, message) = context_in(&[("MPGPU_STAGING_BYTES", "64MB")]);
    assert_eq!((status, message.starts_with("MPGPU_STAGING_BYTES=64MB: must be")), (environment, true), "{message}");
    let (status, message) = context_in(&[("MPGPU_TUNING_FILE", "x.toml")]);
    assert_eq!((status, message.starts_with("tuning file x.toml")), (environment, true), "{message}");
    let (status, message) = context_in(&[("MPGPU_TOPOLOGY", "belugga")]);
    assert_eq!((status, message.contains("belugga")), (MP_ERROR_TOPOLOGY as i32, true), "{message}");
}

#[test]
fn cuda_without_a_driver_is_refused_with_the_reason() {
    // The driver hides all GPUs, so this holds on every machine.
    let (status, message) = context_in(&[("MPGPU_BACKEND", "cuda"), ("CUDA_VISIBLE_DEVICES", "-1")]);
    let reasons = ["libcuda", "CUDA_VISIBLE_DEVICES", "cuInit"];
    assert_eq!((status, reasons.iter().any(|reason| message.contains(reason))), (MP_ERROR_NO_DRIVER as i32, true), "{message}");
    let (status, json) = context_in(&[("MPGPU_BACKEND", "auto"), ("CUDA_VISIBLE_DEVICES", "-1")]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((status, &json["backend"]), (0, &"host".into()), "{json}");
}

#[cfg(feature = "fault-injection")]
mod faults {
    use super::*;
    use mpgpu_backend::fault;

    /// Tests that a panic at the fault-injection point `point` during `call` is returned as an error status, and that `call` reaches this
    /// point exactly once.
    fn strike(point: &'static str, call: impl FnOnce() -> mp_status_t) {
        fault::arm(point);
        let message = refused(call(), MP_ERROR_INTERNAL);
        assert!(!fault::is_armed(), "{point} was not reached");
        assert!(message.contains(&format!("fault injected at {point}")), "{message}");
    }

    #[test]
    fn a_panic_inside_becomes_a_status_and_the_context_stays_usable() {
        let node = Node::with(mp_context_options_t { topology: c"beluga".as_ptr(), staging_bytes: 1 << 20, ..context_options() });
        const BYTES: usize = 64 << 20;
        let (a, b) = (node.alloc(0, BYTES), node.alloc(1, BYTES));
        let large = [transfer(b, 1, a, 0, BYTES)];
        let mut plan = poison();
        // SAFETY: all pointers are valid for the call.
        strike("planner", || unsafe { mp_plan(node.context, large.as_ptr(), 1, null(), &mut plan) });
        assert_eq!(plan.addr(), poison::<u8>().addr());
        node.still_works();

        let plan = node.plan(&large);
        let mut info = plan_info();
        // SAFETY: a whole struct of the right size.
        ok(unsafe { mp_plan_get_info(plan, &mut info) });
        assert!(info.staging_bytes > 0, "the plan must stage for this test to reach the staging lock");
        let executions = node.statistics().executions;
        for point in ["execute", "staging"] {
            let mut request = poison();
            // SAFETY: the output is valid for the call, and so is the plan's memory.
            strike(point, || unsafe { mp_execute(plan, null_mut(), &mut request) });
            assert_eq!(request.addr(), poison::<u8>().addr());
            node.still_works();
        }
        // A thread panicked while it held the staging lock. The same plan still runs and copies the right bytes.
        // SAFETY: nothing else uses this memory.
        unsafe { std::slice::from_raw_parts_mut(a, BYTES) }.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        node.run(plan);
        node.run(plan);
        // SAFETY: as above, and the copies have finished.
        assert!(unsafe { std::slice::from_raw_parts(a, BYTES) == std::slice::from_raw_parts(b, BYTES) });
        assert_eq!(node.statistics().executions, executions + 2 + 2, "executions that failed are counted");
        ok(mp_plan_destroy(plan));
        ok(mp_context_destroy(node.context));
    }
}
