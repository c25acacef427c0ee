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

/// Exports `bytes` bytes at `pointer`, so that other processes on the machine can map them with `mp_memory_import`.
/// Exporting the same range again returns an equal handle. Does not block. May be called from any thread.
///
/// The range must be within one allocation. It may come from `mp_alloc` (GPU memory) or `mp_alloc_shared` (host memory)
/// of this context. On CUDA it may also come from `cudaMalloc`, from the virtual memory API or from a memory pool.
/// Memory of the virtual memory API and memory pools must have been created with the handle type
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. If `cuMemMap` has mapped several chunks into one range, each chunk is a
/// separate allocation.
///
/// The caller keeps ownership of the allocation. Importers map the whole allocation. They can map it until it is freed
/// or the context is destroyed. Handles of freed memory are rejected, even if the address is in use again.
///
/// Importers should close the memory before the owner frees it. If the owner frees it first, the importers' mapping
/// contains zeros on the host backend, and must no longer be used on CUDA.
///
/// The handle works like a key: every process of this user that has it can read and write the allocation. Processes of
/// other users cannot. The first export starts a thread that answers importers.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for memory that the context does not know, and for a range that extends beyond its
///   allocation.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared. The text contains the reason and the remedy.
/// - `MP_ERROR_INVALID_ARGUMENT` if `bytes` is 0 or a pointer is NULL.
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

/// Maps memory that another process has exported with `mp_memory_export`. Blocks until the exporting process answers,
/// which takes a few microseconds and at most five seconds. May be called from any thread, but not from a host
/// function.
///
/// Outputs:
/// - `*pointer` receives the address. Use it in transfers. On the host backend the program can also access it directly.
/// - `*device` receives the device of the memory, in the numbering of this context. `device` may be NULL.
/// - `*bytes` receives the size of the exported range. `bytes` may be NULL.
/// - `*in_kernels` receives the address for kernels of the device `kernels`, or NULL if `kernels` is `MP_DEVICE_AUTO`.
///   `in_kernels` may be NULL.
///
/// `kernels` selects who accesses the memory:
/// - `MP_DEVICE_AUTO`: transfers use `*pointer`. On CUDA, kernels can use `*pointer` too if the memory is from
///   `cudaMalloc` or `mp_alloc`. These kernels must run on the GPU through which this call maps the memory: the GPU
///   that is current in the calling thread or, if none is current or it cannot access the memory, another GPU that the
///   context uses.
/// - A device: kernels of this device use `*in_kernels`, regardless of the current GPU. This also works for memory on a
///   GPU that is not visible to this process. `*device` receives `kernels`. `*pointer` is then not valid in transfers;
///   pass it only to `mp_memory_close`.
///
/// The caller closes the memory with `mp_memory_close`. Several imports of one allocation share a mapping, which exists
/// until `mp_memory_close` was called as often as this function. If the handle was exported by this process itself,
/// `*pointer` is the original address. After the owner has freed the memory or exited, calls that use the memory fail
/// with `MP_ERROR_PEER_GONE`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a required pointer is NULL or `*handle` is not a handle.
/// - `MP_ERROR_NOT_SUPPORTED` if the handle is from another machine, container, user or backend.
/// - `MP_ERROR_NOT_SUPPORTED` if the memory is on a GPU that is not visible to this process or that `kernels` cannot
///   access.
/// - `MP_ERROR_NOT_SUPPORTED` if another library of this process has opened the memory by CUDA IPC
///   (docs/guide/processes.md).
/// - `MP_ERROR_PEER_GONE` if the exporting process has exited or has freed the memory.
/// - `MP_ERROR_TIMEOUT` if the exporting process does not answer.
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

/// Registers a CUDA IPC mapping for use in transfers: memory of another process that the caller has mapped with
/// `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`. Does not block. May be called from any thread, but not from a host
/// function.
///
/// `pointer` is the address of the mapping, `bytes` its size, and `ipc_handle` the 64-byte handle that the caller
/// opened. `device` is the GPU that contains the memory. The driver may report another GPU, namely the one through
/// which the mapping was opened. Other GPUs that copy this memory also open the handle.
///
/// The caller keeps ownership of the mapping. Call `mp_memory_close` before closing the mapping.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL, if `bytes` is 0, or if `device` is not a GPU.
/// - `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that is not on a GPU, and for memory that this context
///   has imported or already registered.
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

/// Closes memory that was imported with `mp_memory_import` or registered with `mp_memory_adopt`. NULL does nothing. May
/// be called from any thread, but not from a host function.
///
/// For imported memory, the last close of an allocation blocks until all work that the context has enqueued so far has
/// finished, and then unmaps the allocation. Plans that use it can no longer be executed.
///
/// For memory from `mp_memory_adopt` the call does not block. It closes the mappings that other GPUs have opened, but
/// not the caller's own mapping. Before the caller closes its own mapping, it must wait for all work that uses the
/// mapping.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not the address of open memory of this
/// kind in this context.
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

/// Announces to the owner of imported memory that this process will not set any counter in that memory to a value
/// greater than `value`. The process continues to run and may keep the memory mapped.
///
/// Waits for greater values are then abandoned, as if this process had exited. Other waits continue. Use this function
/// if the program stops early, for example after an exception, while other processes wait for its signals.
///
/// `pointer` is an address in memory from `mp_memory_import`. Counters that other importers set must be in separate
/// allocations. Does not block and does not wait for work of this process. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not in imported memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_leave(context: mp_context_t, pointer: *const c_void, value: u64) -> mp_status_t {
    guard(|| Ok(find(context)?.state().leave_signals(pointer.addr() as u64, value)?))
}

/// Writes a 16-byte identifier of a device to `uuid`. The identifier is equal in all processes on the machine, even if
/// they number the device differently. For a GPU it is the UUID. For a virtual device or a host domain it is derived
/// from the device number. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `uuid` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_device_uuid(context: mp_context_t, device: i32, uuid: *mut u8) -> mp_status_t {
    guard(|| {
        let out = Out::new(uuid.cast::<[u8; 16]>(), c"uuid")?;
        let context = find(context)?;
        out.write(context.state().device_uuid(DeviceId(device))?);
        Ok(())
    })
}

/// Makes all work that is enqueued in `stream` from now on wait until the counter of each signal in `signals` is at
/// least the value of the signal (`mp_signal_t::value`). The later work sees all data that were written before the
/// counters were set. Does not block. May be called from any thread.
///
/// The counters must be in memory of this context. The receiver therefore waits in its own memory, which it has
/// exported to the process that sets the counter. `signals` has `count` elements and is read during the call only.
/// Functions that wait for all work of the context (`mp_free`, `mp_memory_close`, `mp_context_destroy`) block until
/// these waits have ended.
///
/// If a process that has mapped the memory of a counter exits without closing it, waits for counters in this memory are
/// abandoned, unless the counters have already reached the values of the signals. Later work in the stream, and work in
/// other streams that is ordered after it, then runs with stale data. The error `MP_ERROR_PEER_GONE` reports abandoned
/// waits as follows:
/// - The next `mp_stream_synchronize` returns the error once, after the work has finished. This applies to a stream
///   whose wait was abandoned, and to a stream that has waited for such a stream by `mp_stream_wait_event`.
/// - `mp_wait`, `mp_test` and `mp_event_synchronize` return the error for work that was enqueued before the stream of
///   this work reported the error.
/// - Streams that are ordered by CUDA's own events do not report the error, because the library does not know this
///   order.
/// - If the abandoned wait was captured in a graph, every stream reports the error, because the library does not know
///   the stream in which the graph was launched.
/// - Later calls are rejected if they would wait for a counter in this memory that can no longer reach the value of the
///   signal.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not aligned or not in memory that the context knows. The
///   text contains the index of the signal.
/// - `MP_ERROR_NOT_SUPPORTED` for a counter in imported memory, and on CUDA for a counter outside of the memory that
///   `mp_signal_t` requires.
/// - `MP_ERROR_PEER_GONE` if a counter has not reached the value of its signal and a process that had mapped its memory
///   has exited without closing it. Nothing is enqueued.
/// - `MP_ERROR_INVALID_ARGUMENT` if `signals` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_HANDLE` for the context or the stream.
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

/// Declares that kernels of the program poll the counters of `signals`, from now until the memory of the counters is
/// freed. The library can then end the polling if the process that sets a counter exits. Enqueues nothing and does not
/// block. May be called from any thread.
///
/// If a process that has mapped the memory exits without closing it, the library sets each counter that is less than
/// the value of its signal to that value. Every stream then reports `MP_ERROR_PEER_GONE` when it is synchronised, as
/// `mp_stream_wait_signals` describes for captured waits.
///
/// If a counter is declared several times, the greatest value is used. Declaring the same value again only checks for
/// errors. The requirements on the counters are those of `mp_stream_wait_signals`. `signals` has `count` elements and
/// is read during the call only.
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

/// Sets the counter of each signal in `signals` to the value of the signal (`mp_signal_t::value`), after all work that
/// is enqueued in `stream` so far. A process that sees the new value also sees all data that this work has written.
/// Does not block. May be called from any thread.
///
/// The counters are in memory of this context or in imported memory. The value is stored, not added, so only one
/// process may set each counter. After `mp_execute`, this call notifies the receiver that the data have arrived.
/// `signals` has `count` elements and is read during the call only.
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

/// Sets the counter at `counter` to `value` immediately, from the calling thread. A process that sees the value also
/// sees all data that this thread has written or seen before. Does not block, and does not wait for work in streams
/// (`mp_stream_raise_signals` does). May be called from any thread, but not from a host function.
///
/// The counter must be in memory of this context or in imported memory, and the CPU must be able to access it. On CUDA
/// it must be in host memory from `mp_alloc_shared`.
///
/// Errors: the errors of `mp_stream_raise_signals`, except those about streams.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_signal_raise(context: mp_context_t, counter: *mut u64, value: u64) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        context.raise_signal(Signal { counter: counter.addr() as u64, value }).map_err(Failure::blame(c"counter"))
    })
}

/// Reads the counter at `counter` into `*value`. The calling thread then sees all data that were written before the
/// counter was set to this value. Does not block. The requirements on the counter are those of `mp_signal_raise`. May
/// be called from any thread, but not from a host function.
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

/// Checks whether the counter at `counter` has reached `value`. `*reached` receives 1 if it has, otherwise 0. Does not
/// block. The requirements on the counter are those of `mp_signal_synchronize`. May be called from any thread, but not
/// from a host function.
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

/// Blocks until the counter at `counter` has reached `value`, but at most `seconds` seconds. With 0 seconds it checks
/// once. The counter must be in host memory of this context, or on the host backend in any memory of this context. May
/// be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_TIMEOUT` if the counter does not reach the value in time.
/// - `MP_ERROR_PEER_GONE` if the counter has not reached the value, and a process that had mapped its memory has exited
///   without closing it.
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
