//! Memory between the processes of a node.

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

/// Describes `bytes` bytes from `pointer` on for other processes of the node, which map them with `mp_memory_import`.
///
/// The range lies in one allocation: of `mp_alloc` of this context, or on CUDA of `cudaMalloc`, of the virtual memory
/// API or of a pool, the last two when created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. Host memory is of
/// `mp_alloc_shared`. Of a range that `cuMemMap` has mapped from several chunks each chunk is an allocation by itself. The allocation stays its owner's. It can be mapped, whole, from now until it
/// is freed or the context is destroyed; handles of freed memory are refused from then on, also where its address has
/// been given out again. Whoever has mapped it should close it first: on the host backend what they map turns into
/// zeros, on CUDA it must not be used any more. Exporting again gives an equal handle. The handle is a key: any process
/// of this user that has its bytes may read and write the allocation, and one that has not may not. The first export of
/// a process starts a thread, which answers importers. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` for memory that the context does not know and for a
/// range that leaves its allocation; `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared, with the reason and
/// the remedy; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL; `MP_ERROR_DRIVER`.
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

/// Maps the memory that a handle of `mp_memory_export` describes. `*pointer` then serves as an end of transfers, as
/// memory of the device `*device`, which is the number that the exporter's device has here; `*bytes` is the size of the
/// range. `device`, `in_kernels` and `bytes` may be NULL. On the host backend the memory can be read and written directly.
///
/// A handle of this process gives the address that the memory has. An allocation is mapped once, however many handles
/// of ranges in it are imported, and stays mapped until `mp_memory_close` was called as often as this. Waits for the
/// exporter's answer, some microseconds, at most five seconds, however often signals interrupt it. Later calls that use
/// the memory after its owner has freed it, or has ended, fail with `MP_ERROR_PEER_GONE`. Any thread, host functions
/// excepted.
///
/// With `kernels` `MP_DEVICE_AUTO`, `*in_kernels` becomes NULL. On CUDA the address is then good for plans and, of memory of
/// `cudaMalloc` and `mp_alloc`, for kernels of the GPU that is current in the calling thread; without one, of a GPU that the
/// context uses. Otherwise kernels of the device `kernels` read and write the memory at `*in_kernels`, whatever GPU is
/// current, also where it is on a GPU that this process does not see: `*pointer` is then no end of transfers, but what
/// `mp_memory_close` takes, and `*device` is `kernels`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when a pointer is NULL or the bytes are no handle;
/// `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_VERSION_MISMATCH`; `MP_ERROR_NOT_SUPPORTED` for a handle of another node, container,
/// user or backend, for memory of a GPU that this process does not see, or that `kernels` does not reach, and for what another
/// library of this process has open by CUDA IPC (docs/guide/processes.md); `MP_ERROR_PEER_GONE` when the exporter has ended or has freed the memory;
/// `MP_ERROR_TIMEOUT` when it does not answer; `MP_ERROR_DRIVER`.
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

/// Takes note of memory of another process that the caller has mapped by `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`,
/// so that it may be an end of transfers: the driver calls it memory of the GPU through which it was opened, and `device`
/// says on which it really is. `pointer` is what was returned, `bytes` how many it has been mapped with, `ipc_handle` the
/// 64 bytes that were opened; GPUs that work on it open them too. Call `mp_memory_close` before the mapping is closed.
/// Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when a pointer is NULL, for 0 bytes, and when `device`
/// is no GPU; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that no GPU has, and for
/// memory that the context has mapped itself or was told of already.
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
            return Err(Failure::invalid(c"device", format!("{} is no GPU, and CUDA IPC maps memory of GPUs alone", device.in_words())));
        }
        let [payload] = array(ipc_handle.cast::<[u8; 64]>(), 1, c"ipc_handle", c"ipc_handle")? else {
            return Err(Failure::invalid(c"ipc_handle", "ipc_handle is NULL"));
        };
        Ok(context.state().adopt_memory(pointer.addr() as u64, bytes, device, *payload)?)
    })
}

/// Gives back an address of `mp_memory_import`. With the last of an allocation, waits until all work that the context
/// has enqueued so far has finished, and unmaps it: plans that use it can no longer be executed. NULL is allowed and
/// does nothing. Any thread, host functions excepted.
///
/// Also for an address of `mp_memory_adopt`: waits for nothing, as the caller must before it closes the mapping, and
/// closes what GPUs have opened for the context.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when `mp_memory_import` of this context did not
/// return `pointer`, or when it was closed already.
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

/// Tells the owner of imported memory that this process raises no counter in it beyond `value`, though it lives on and may
/// keep the memory mapped: waits there for more end as if the process had ended, and others go on. For programs that stop
/// early, after an exception say, while others wait for their signals. `pointer` lies in memory of `mp_memory_import`; what
/// other importers raise belongs into allocations of their own. Does not wait for work of this process. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when `pointer` is not in imported memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_leave(context: mp_context_t, pointer: *const c_void, value: u64) -> mp_status_t {
    guard(|| Ok(find(context)?.state().leave_signals(pointer.addr() as u64, value)?))
}

/// Writes 16 bytes that name a device in every process of the node, whatever number it has there: a GPU's UUID; for
/// virtual devices and host domains bytes made of their number. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` when `uuid` is NULL.
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
/// their values. Does not block. What was written before a counter was raised is then visible to that work.
///
/// The counters lie in memory of this context (a receiver waits in its own memory, which it has exported to whoever
/// raises them). `signals` is read during the call only. What waits for all work of the context (`mp_free`,
/// `mp_memory_close`, `mp_context_destroy`) waits for these waits too. Any thread.
///
/// When a process that has mapped a counter's memory ends without closing it, waits in that memory that are not
/// satisfied are given up: later work in the stream runs, without the bytes that were waited for, and so does work of
/// other streams that comes after it. The next `mp_stream_synchronize` of a stream that waits in that allocation, or
/// that has come after such a one by `mp_stream_wait_event`, returns `MP_ERROR_PEER_GONE`, once, after its work has
/// finished. `mp_wait`, `mp_test` and `mp_event_synchronize` return it for what was enqueued before its stream was told
/// in one of these ways. Other streams are not concerned; streams that the caller joins by CUDA's own events are not
/// known to come after. In which stream a graph is launched is not known either: of waits that were captured every
/// stream is told. Later calls whose wait in that memory would fail are refused.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for context or stream; `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not
/// aligned or not in memory that the context knows, naming the signal by its index; `MP_ERROR_NOT_SUPPORTED` for a
/// counter in imported memory, and on CUDA for one in other memory than `mp_signal_t` says; `MP_ERROR_PEER_GONE` for a
/// counter that is not reached and whose memory was mapped by a process that has ended without closing it, and then
/// nothing is enqueued; `MP_ERROR_INVALID_ARGUMENT` when `signals` is NULL and `count` is not 0.
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

/// Says that kernels of the caller wait for the counters of `count` signals, from now until their memory is freed: when a
/// process that has mapped the memory ends without closing it, each counter that has not reached its value is raised to
/// it, and whoever synchronises any stream is told, as `mp_stream_wait_signals` says of captured waits. So a kernel that polls such a counter, for a
/// value that no process raises it to, learns that it waits in vain. Does not wait, and enqueues nothing; of each counter
/// the furthest value counts, and a call once more only looks for errors.
///
/// Counters as for `mp_stream_wait_signals`. `signals` is read during the call only. Any thread.
///
/// Errors: as `mp_stream_wait_signals`, without those of streams; `MP_ERROR_PEER_GONE` wherever a process that had mapped a
/// counter's memory has ended without closing it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_kernel_wait_signals(context: mp_context_t, signals: *const mp_signal_t, count: usize) -> mp_status_t {
    guard(|| {
        let signals = signals_of(signals, count)?;
        Ok(find(context)?.kernel_wait_signals(&signals)?)
    })
}

/// Raises the counters of `count` signals to their values after all work enqueued in `stream` so far: whoever sees the
/// value sees every byte that this work has written. Does not block.
///
/// A counter is raised by storing the value, so it has one raiser. It lies in memory of this context or in imported
/// memory. After `mp_execute` this is a put with signal. `signals` is read during the call only. Any thread.
///
/// Errors: as `mp_stream_wait_signals`, but imported memory is accepted, and `MP_ERROR_PEER_GONE` says that its owner has
/// ended or has freed it.
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

/// Raises a counter to `value` now, by the calling thread: whoever sees the value sees what this thread has written and
/// seen before. Work in streams is not waited for: `mp_stream_raise_signals` comes after it.
///
/// The counter lies in memory of this context or in imported memory, and the CPU reaches it: on CUDA as `mp_signal_t`
/// says, on the host backend in any memory. Any thread, host functions excepted.
///
/// Errors: as `mp_stream_raise_signals`, without those of streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_raise(context: mp_context_t, counter: *mut u64, value: u64) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        context.raise_signal(Signal { counter: counter.addr() as u64, value }).map_err(Failure::blame(c"counter"))
    })
}

/// Reads a counter into `*value`. What was written before it was raised to that is then visible to the calling thread.
/// Counters as for `mp_signal_raise`. Any thread, host functions excepted.
///
/// Errors: as `mp_signal_raise`; `MP_ERROR_INVALID_ARGUMENT` when `value` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_read(context: mp_context_t, counter: *const u64, value: *mut u64) -> mp_status_t {
    guard(|| {
        let out = Out::new(value, c"value")?;
        let context = find(context)?;
        out.write(context.read_signal(counter.addr() as u64).map_err(Failure::blame(c"counter"))?);
        Ok(())
    })
}

/// Tells whether a counter has reached `value`: `*reached` is 1 or 0, and neither is an error. Does not wait. Counters
/// as for `mp_signal_synchronize`. Any thread, host functions excepted.
///
/// Errors: as `mp_signal_synchronize`, without `MP_ERROR_TIMEOUT`; `MP_ERROR_INVALID_ARGUMENT` when `reached` is NULL.
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

/// Blocks the calling thread until a counter has reached `value`, at most `seconds`; with 0 it looks once. The counter
/// lies in host memory, or on the host backend in any memory, of this context. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_TIMEOUT`; `MP_ERROR_PEER_GONE` when a process that has mapped the memory has ended without closing
/// it, and the value is not reached; `MP_ERROR_INVALID_ARGUMENT` when `seconds` is negative or not a number; the others
/// of `mp_stream_wait_signals`.
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
