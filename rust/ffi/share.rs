//! Memory and signals that processes of a node share.

use super::argument::{Out, array};
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_backend::{Signal, StreamHandle};
use mpgpu_core::topology::DeviceId;
use mpgpu_ipc::{Handle, handle};
use smallvec::SmallVec;
use std::ffi::c_void;

const _: () = assert!(size_of::<mp_memory_handle_t>() == handle::BYTES);

/// Exports `bytes` bytes at `pointer` to other processes of the node, which map them with `mp_memory_import`. Exporting
/// the same range again returns an equal handle. May be called from any thread.
///
/// The range must be within one allocation. It may come from `mp_alloc` (GPU memory) or `mp_alloc_shared` (host memory)
/// of this context. On CUDA it may also come from `cudaMalloc`, the virtual memory API or a memory pool; the last two
/// must be created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. If `cuMemMap` has mapped a range from several
/// chunks, each chunk is a separate allocation.
///
/// The owner keeps the allocation. Importers map the whole allocation, at any time until it is freed or the context is
/// destroyed. Handles of freed memory are rejected, even if its address is in use again. Importers should close the
/// memory before the owner frees it. On the host backend their mapping otherwise turns into zeros; on CUDA it must not
/// be used any more.
///
/// The handle is a key: any process of this user that has its bytes can read and write the allocation, and no other
/// process can. The first export of a process starts a thread that answers importers.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for memory that the context does not know, and for a range that leaves its allocation.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared. The text gives the reason and the remedy.
/// - `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_DRIVER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_export(
    context: mp_context_t,
    pointer: *const c_void,
    bytes: u64,
    handle: *mut mp_memory_handle_t,
) -> mp_status_t {
    guard(|| {
        let out = Out::new(handle, c"handle")?;
        let context = find(context)?;
        if pointer.is_null() {
            return Err(Failure::invalid(c"pointer", "pointer is NULL"));
        }
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: must be 1 or more"));
        }
        out.write(mp_memory_handle_t { bytes: context.state().export_memory(pointer.addr() as u64, bytes)?.encode() });
        Ok(())
    })
}

/// Maps the memory of a handle from `mp_memory_export`.
///
/// `*pointer` receives the address, for use in transfers. `*device` receives the device of the memory, in the numbering
/// of this context, and `*bytes` the size of the range. `device`, `in_kernels` and `bytes` may be NULL. On the host
/// backend the program can read and write the memory directly.
///
/// A handle of this process returns the address that the memory already has. An allocation is mapped once, even if
/// several handles of ranges in it are imported, and stays mapped until `mp_memory_close` has been called as often as
/// this function. The call waits for the exporter's answer, which takes a few microseconds and at most five seconds,
/// even if POSIX signals interrupt it. After the owner has freed the memory or exited, later calls that use it fail
/// with `MP_ERROR_PEER_GONE`. May be called from any thread, but not from a host function.
///
/// If `kernels` is `MP_DEVICE_AUTO`, `*in_kernels` is NULL. On CUDA, plans can use `*pointer`. For memory of
/// `cudaMalloc` and `mp_alloc`, kernels can use it too, on the GPU that is current in the calling thread or, if none is
/// current, on a GPU that the context uses.
///
/// Otherwise `kernels` is the device whose kernels access the memory, at `*in_kernels`. This works regardless of the
/// current GPU, and for memory on a GPU that is not visible to this process. `*pointer` is then not valid in transfers
/// and serves only for `mp_memory_close`; `*device` is `kernels`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL or the bytes are not a handle.
/// - `MP_ERROR_NOT_SUPPORTED` for a handle of another node, container, user or backend; for memory of a GPU that is not
///   visible to this process or that `kernels` cannot access; and for memory that another library of this process has
///   opened by CUDA IPC (docs/guide/processes.md).
/// - `MP_ERROR_PEER_GONE` if the exporter has exited or has freed the memory.
/// - `MP_ERROR_TIMEOUT` if the exporter does not answer.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_VERSION_MISMATCH`, `MP_ERROR_DRIVER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_import(
    context: mp_context_t,
    handle: *const mp_memory_handle_t,
    kernels: i32,
    pointer: *mut *mut c_void,
    device: *mut i32,
    in_kernels: *mut *mut c_void,
    bytes: *mut u64,
) -> mp_status_t {
    guard(|| {
        let out = Out::new(pointer, c"pointer")?;
        let (device, bytes) = (Out::if_wanted(device, c"device")?, Out::if_wanted(bytes, c"bytes")?);
        let in_kernels = Out::if_wanted(in_kernels, c"in_kernels")?;
        let context = find(context)?;
        let handle = handle_of(handle)?;
        let kernels = (kernels != MP_DEVICE_AUTO).then_some(DeviceId(kernels));
        let (address, on, seen) = context.state().import_memory_for(&handle, kernels).map_err(|error| {
            let failure = Failure::blame(c"handle")(error);
            Failure { argument: failure.argument.map(|own| if own == c"device" { c"kernels" } else { own }), ..failure }
        })?;
        device.write(on.0);
        bytes.write(handle.bytes);
        in_kernels.write(std::ptr::with_exposed_provenance_mut(seen as usize));
        out.write(std::ptr::with_exposed_provenance_mut(address as usize));
        Ok(())
    })
}

fn handle_of(handle: *const mp_memory_handle_t) -> Result<Handle, Failure> {
    let [handle] = array(handle, 1, c"handle", c"handle")? else {
        return Err(Failure::invalid(c"handle", "handle is NULL"));
    };
    Handle::decode(&handle.bytes).map_err(|error| Failure::from(mpgpu_contexts::Error::from(error)))
}

/// Registers memory of another process that the caller has mapped with `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`,
/// for use in transfers.
///
/// `pointer` is the address that the mapping returned, `bytes` its size, and `ipc_handle` the 64-byte handle that was
/// opened. `device` is the GPU on which the memory really is; the driver reports the GPU through which it was opened.
/// Other GPUs that copy this memory open the handle too. Call `mp_memory_close` before you close the mapping. May be
/// called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL, for 0 bytes, and if `device` is not a GPU.
/// - `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that is not on a GPU, and for memory that the context has
///   mapped itself or that is already registered.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_adopt(
    context: mp_context_t,
    pointer: *mut c_void,
    bytes: u64,
    device: i32,
    ipc_handle: *const c_void,
) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if pointer.is_null() {
            return Err(Failure::invalid(c"pointer", "pointer is NULL"));
        }
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: an allocation has 1 or more"));
        }
        let device = DeviceId(device);
        if device.is_host() {
            return Err(Failure::invalid(c"device", format!("{} is not a GPU, and CUDA IPC maps only memory of GPUs", device.in_words())));
        }
        let [payload] = array(ipc_handle.cast::<[u8; 64]>(), 1, c"ipc_handle", c"ipc_handle")? else {
            return Err(Failure::invalid(c"ipc_handle", "ipc_handle is NULL"));
        };
        Ok(context.state().adopt_memory(pointer.addr() as u64, bytes, device, *payload)?)
    })
}

/// Closes an address from `mp_memory_import`. Closing an allocation for the last time waits until all work that the
/// context has enqueued so far has finished, and unmaps the allocation. Plans that use it can no longer be executed.
/// NULL does nothing. May be called from any thread, but not from a host function.
///
/// Also closes an address from `mp_memory_adopt`, and the mappings that other GPUs have opened for the context. In this
/// case it does not wait; the caller must wait for the work before it closes its own mapping.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `mp_memory_import` of this context did not return
/// `pointer`, or if it was already closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_close(context: mp_context_t, pointer: *mut c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if pointer.is_null() {
            return Ok(());
        }
        Ok(context.state().close_memory(pointer.addr() as u64)?)
    })
}

/// Notifies the owner of imported memory that this process will set no counter in it beyond `value`, although the
/// process continues and may keep the memory mapped.
///
/// Waits for higher values then end as if this process had exited. Other waits continue. Use it in a program that stops
/// early, for example after an exception, while other processes wait for its signals. `pointer` is in memory from
/// `mp_memory_import`. Counters that other importers set must be in separate allocations. Does not wait for work of
/// this process. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not in imported memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_leave(context: mp_context_t, pointer: *const c_void, value: u64) -> mp_status_t {
    guard(|| Ok(find(context)?.state().leave_signals(pointer.addr() as u64, value)?))
}

/// Writes 16 bytes that identify a device in every process of the node, independent of its number there: the UUID of a
/// GPU; bytes derived from the number for virtual devices and host domains. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` if `uuid` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_device_uuid(context: mp_context_t, device: i32, uuid: *mut u8) -> mp_status_t {
    guard(|| {
        let out = Out::new(uuid.cast::<[u8; 16]>(), c"uuid")?;
        let context = find(context)?;
        out.write(context.state().device_uuid(DeviceId(device))?);
        Ok(())
    })
}

/// Makes all work that is enqueued in `stream` from now on wait until the counters of all `count` signals have reached
/// their values. Does not block. Data that was written before a counter was set is then visible to that work. May be
/// called from any thread.
///
/// The counters must be in memory of this context: a receiver waits in its own memory, which it has exported to the
/// process that sets the counters. `signals` is read during the call only. Calls that wait for all work of the context
/// (`mp_free`, `mp_memory_close`, `mp_context_destroy`) wait for these waits too.
///
/// If a process that has mapped a counter's memory exits without closing it, unsatisfied waits in that memory are
/// abandoned. Later work in the stream, and work of other streams that is ordered after it, then runs with stale data.
/// The error is reported as follows:
/// - The next `mp_stream_synchronize` of a stream that waits in that allocation, or that has waited for such a stream
///   by `mp_stream_wait_event`, returns `MP_ERROR_PEER_GONE` once, after its work has finished.
/// - `mp_wait`, `mp_test` and `mp_event_synchronize` return it for work that was enqueued before its stream reported
///   the error.
/// - Streams that are ordered by CUDA's own events are not recognised as dependent, and report nothing.
/// - The library does not know the stream in which a graph is launched, so every stream reports the abandoned waits
///   that were captured.
/// - Later calls whose wait in that memory would fail are rejected.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not aligned or not in memory that the context knows. The
///   text gives the index of the signal.
/// - `MP_ERROR_NOT_SUPPORTED` for a counter in imported memory, and on CUDA for a counter that is not in the memory
///   that `mp_signal_t` requires.
/// - `MP_ERROR_PEER_GONE` for a counter that is not reached and whose memory was mapped by a process that exited
///   without closing it. Nothing is enqueued.
/// - `MP_ERROR_INVALID_ARGUMENT` if `signals` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_HANDLE` for context or stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_wait_signals(
    context: mp_context_t,
    stream: mp_stream_t,
    signals: *const mp_signal_t,
    count: usize,
) -> mp_status_t {
    guard(|| {
        let signals = signals_of(signals, count)?;
        Ok(find(context)?.stream_wait_signals(StreamHandle(stream.addr()), &signals)?)
    })
}

/// Declares that kernels of the caller wait for the counters of `count` signals, from now until their memory is freed.
/// A kernel that polls such a counter then does not wait forever for a process that has exited.
///
/// If a process that has mapped the memory exits without closing it, the library sets each counter that has not reached
/// its value to that value. Every stream then reports the error when it is synchronised, as `mp_stream_wait_signals`
/// describes for captured waits. Does not wait and enqueues nothing. The highest declared value of each counter counts;
/// repeating a call only checks for errors.
///
/// The counters are subject to the rules of `mp_stream_wait_signals`. `signals` is read during the call only. May be
/// called from any thread.
///
/// Errors: the errors of `mp_stream_wait_signals`, except those about streams. `MP_ERROR_PEER_GONE` if any process that
/// had mapped a counter's memory has exited without closing it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_kernel_wait_signals(context: mp_context_t, signals: *const mp_signal_t, count: usize) -> mp_status_t {
    guard(|| {
        let signals = signals_of(signals, count)?;
        Ok(find(context)?.kernel_wait_signals(&signals)?)
    })
}

/// Sets the counters of `count` signals to their values after all work enqueued in `stream` so far. A process that sees
/// the value also sees every byte that this work has written. Does not block. May be called from any thread.
///
/// Setting a counter stores the value, so only one process may set each counter. The counter is in memory of this
/// context or in imported memory. After `mp_execute` this call completes a put with signal. `signals` is read during
/// the call only.
///
/// Errors: the errors of `mp_stream_wait_signals`, but imported memory is accepted. `MP_ERROR_PEER_GONE` if the owner
/// of the memory has exited or has freed it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_raise_signals(
    context: mp_context_t,
    stream: mp_stream_t,
    signals: *const mp_signal_t,
    count: usize,
) -> mp_status_t {
    guard(|| {
        let signals = signals_of(signals, count)?;
        Ok(find(context)?.stream_raise_signals(StreamHandle(stream.addr()), &signals)?)
    })
}

/// Sets a counter to `value` now, from the calling thread. A process that sees the value also sees everything that this
/// thread has written and seen before. Does not wait for work in streams; `mp_stream_raise_signals` does.
///
/// The counter must be in memory of this context or in imported memory, and the CPU must be able to access it: on CUDA
/// the memory that `mp_signal_t` requires, on the host backend any memory. May be called from any thread, but not from
/// a host function.
///
/// Errors: the errors of `mp_stream_raise_signals`, except those about streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_raise(context: mp_context_t, counter: *mut u64, value: u64) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        context.raise_signal(Signal { counter: counter.addr() as u64, value }).map_err(Failure::blame(c"counter"))
    })
}

/// Reads a counter into `*value`. Data that was written before the counter was set to this value is then visible to the
/// calling thread. The counter is subject to the rules of `mp_signal_raise`. May be called from any thread, but not
/// from a host function.
///
/// Errors: the errors of `mp_signal_raise`; `MP_ERROR_INVALID_ARGUMENT` if `value` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_read(context: mp_context_t, counter: *const u64, value: *mut u64) -> mp_status_t {
    guard(|| {
        let out = Out::new(value, c"value")?;
        let context = find(context)?;
        out.write(context.read_signal(counter.addr() as u64).map_err(Failure::blame(c"counter"))?);
        Ok(())
    })
}

/// Checks whether a counter has reached `value`. `*reached` receives 1 or 0; both are success. Does not wait. The
/// counter is subject to the rules of `mp_signal_synchronize`. May be called from any thread, but not from a host
/// function.
///
/// Errors: the errors of `mp_signal_synchronize` except `MP_ERROR_TIMEOUT`; `MP_ERROR_INVALID_ARGUMENT` if `reached` is
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_test(context: mp_context_t, counter: *const u64, value: u64, reached: *mut i32) -> mp_status_t {
    guard(|| {
        let out = Out::new(reached, c"reached")?;
        let context = find(context)?;
        let signal = Signal { counter: counter.addr() as u64, value };
        out.write(i32::from(context.is_signal_reached(signal).map_err(Failure::blame(c"counter"))?));
        Ok(())
    })
}

/// Blocks the calling thread until a counter has reached `value`, but at most `seconds`; with 0 it checks once. The
/// counter must be in memory of this context: in host memory, or on the host backend in any memory. May be called from
/// any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_TIMEOUT` if the value is not reached in time.
/// - `MP_ERROR_PEER_GONE` if a process that has mapped the memory has exited without closing it, and the value is not
///   reached.
/// - `MP_ERROR_INVALID_ARGUMENT` if `seconds` is negative or not a number.
/// - The other errors of `mp_stream_wait_signals`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_synchronize(context: mp_context_t, counter: *const u64, value: u64, seconds: f64) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if seconds.is_nan() || seconds < 0.0 {
            let message = format!("seconds={seconds}: must be 0 or more");
            return Err(Failure::invalid(c"seconds", message));
        }
        let signal = Signal { counter: counter.addr() as u64, value };
        context.wait_signal(signal, seconds).map_err(Failure::blame(c"counter"))
    })
}

fn signals_of(signals: *const mp_signal_t, count: usize) -> Result<SmallVec<[Signal; 8]>, Failure> {
    let signals = array(signals, count, c"signals", c"count")?;
    Ok(signals.iter().map(|signal| Signal { counter: signal.counter.addr() as u64, value: signal.value }).collect())
}
