//! Memory on the devices of a context.

use super::argument::Out;
use super::context::find;
use super::guard::{Failure, guard};
use super::stream::stream_of;
use super::types::*;
use mpgpu_contexts::{Caching, Context, Error};
use mpgpu_core::topology::DeviceId;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;

/// Allocates `bytes` bytes on `device`. The memory is aligned to at least 256 bytes, and its contents are undefined.
///
/// If `device` is a GPU, this is GPU memory, which other processes can map. The CPU can access it on the host backend,
/// but not on CUDA. If `device` is a host domain, this is pinned host memory, which GPUs access directly. On CUDA
/// larger host buffers are distributed over the CPU sockets (docs/guide/gpus.md). For host memory that other processes
/// can map, use `mp_alloc_shared`.
///
/// The caller owns `*memory` until `mp_free`. Destroying the context also frees it. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_OUT_OF_MEMORY`; `MP_ERROR_INVALID_ARGUMENT`
/// if `bytes` is 0 or `memory` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    allocate(context, bytes, memory, |context| context.allocate(DeviceId(device), bytes))
}

/// Allocates memory that other processes can map after `mp_memory_export`. Parameters and ownership are those of
/// `mp_alloc`. The caller frees the memory with `mp_free`. May be called from any thread.
///
/// Host memory: use this function if another process has to map it, because host memory from `mp_alloc` cannot be
/// shared. The memory is zeroed. Each allocation uses one file descriptor. On CUDA, all pages of an allocation of 4 MiB
/// or more are resident when the call returns. The pages are distributed over the CPU sockets, or are on the NUMA node
/// that `device` states.
///
/// GPU memory: sizes are rounded up to multiples of 2 MiB. Other processes can map the memory even if another library,
/// for example UCX inside MPI, has already opened it. MPI itself is slower with this memory than with memory from
/// `mp_alloc`.
///
/// Errors: the errors of `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` if the system cannot create the shared memory file or has
/// no free file descriptor (`ulimit -n`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_alloc_shared(context: mp_context_t, device: i32, bytes: u64, memory: *mut *mut c_void) -> mp_status_t {
    allocate(context, bytes, memory, |context| context.allocate_shared(DeviceId(device), bytes))
}

fn allocate(context: mp_context_t, bytes: u64, memory: *mut *mut c_void, from: impl FnOnce(&Context) -> Result<u64, Error>) -> mp_status_t {
    guard(|| {
        let out = Out::new(memory, c"memory")?;
        let context = find(context)?;
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: must be 1 or more"));
        }
        out.write(std::ptr::with_exposed_provenance_mut(from(&context)? as usize));
        Ok(())
    })
}

/// Frees memory from `mp_alloc` or `mp_alloc_shared`. NULL does nothing.
///
/// Like `cudaFree`, the call blocks until all work that the context has enqueued so far has finished. It does not wait
/// for work in a stream that is being captured. Plans that use the memory can no longer be executed. No other thread
/// may enqueue work that uses the memory during the call. May be called from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if this context did not allocate `memory`, or if it
/// was already freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_free(context: mp_context_t, memory: *mut c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if memory.is_null() {
            return Ok(());
        }
        context.free(memory.addr() as u64).map_err(Failure::blame(c"memory"))
    })
}

/// Frees memory from `mp_alloc` or `mp_alloc_shared` in stream order: after all work that is now enqueued in `stream`.
/// Does not block. NULL does nothing.
///
/// As with `cudaFreeAsync`, work in other streams that uses the memory must be ordered before that point, for example
/// by events. As soon as the call returns, the memory counts as freed: plans and exported handles that use it are
/// rejected. May be called from any thread, but not from a host function.
///
/// The memory is returned to the driver later, and that may block. On CUDA it is returned by a later `mp_free` or
/// `mp_context_destroy`, or by an `mp_alloc` that finds no free memory. On the host backend the next allocation returns
/// it.
///
/// Errors, after which the caller still owns the memory:
/// - `MP_ERROR_INVALID_HANDLE` for the context or the stream.
/// - `MP_ERROR_INVALID_POINTER` under the conditions of `mp_free`.
/// - `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_free_async(context: mp_context_t, memory: *mut c_void, stream: mp_stream_t) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if memory.is_null() {
            return Ok(());
        }
        Ok(context.free_async(memory.addr() as u64, stream_of(stream))?)
    })
}

/// Pins `bytes` bytes of host memory that the program has allocated itself, for example an array, a mapped file or
/// memory of another library. Plans created afterwards copy this memory directly, over all links.
///
/// The caller keeps ownership. Until `mp_memory_unregister`, the memory must stay mapped at the same address, because
/// copies keep using the pinned pages. Read-only memory can be a source if the driver can pin it. Whole pages are
/// pinned. Other processes cannot map this memory.
///
/// Blocks while threads of the library make all pages resident and pin them. If `huge_pages` is 1, huge pages are used
/// if the system supports them. Time per GiB on two H200 (2026-11-27): 85 ms to make pages resident and 33 ms to pin
/// them; with huge pages 48 ms and 22 ms.
///
/// The range is pinned in segments that end at multiples of 1 GiB. A copy that spans several segments counts as several
/// transfers of its plan. A window (`mp_window_t`) must be within one segment.
///
/// May be called from any thread, but not from a host function.
///
/// Errors, after which nothing is pinned:
/// - `MP_ERROR_INVALID_ARGUMENT` if `bytes` is 0, or if `huge_pages` is neither 0 nor 1.
/// - `MP_ERROR_INVALID_POINTER` for NULL, and if the range contains memory of the context, memory of the driver, or
///   unmapped addresses.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver cannot pin.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_register(context: mp_context_t, pointer: *mut c_void, bytes: u64, huge_pages: i32) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if bytes == 0 {
            return Err(Failure::invalid(c"bytes", "bytes=0: must be 1 or more"));
        }
        if !(0..=1).contains(&huge_pages) {
            return Err(Failure::invalid(c"huge_pages", format!("huge_pages={huge_pages}: must be 0 or 1")));
        }
        context.register_memory(pointer.addr() as u64, bytes, huge_pages == 1).map_err(Failure::blame(c"pointer"))
    })
}

/// Unpins memory that was pinned by `mp_memory_register`. NULL does nothing.
///
/// Blocks until all work that the context has enqueued so far has finished. Existing plans that use the memory can no
/// longer be executed. New plans treat it as pageable memory. No other thread may enqueue work that uses the memory
/// during the call. May be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_POINTER` if no memory registered with this context starts at `pointer`.
/// - `MP_ERROR_DRIVER`, after which the memory counts as unregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_memory_unregister(context: mp_context_t, pointer: *mut c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if pointer.is_null() {
            return Ok(());
        }
        context.unregister_memory(pointer.addr() as u64).map_err(Failure::blame(c"pointer"))
    })
}

/// Maps a regular file read-only. Any part of the mapping can be the source of transfers. `*data` is the address of the
/// first byte of the file, and `*bytes` its size. Copies do not access the mapping: several threads read the file, which
/// causes no page faults.
///
/// `descriptor` must be open for reading. It is duplicated, so the caller may close it.
///
/// If `bypass_cache` is 1, bytes that the page cache of the system does not contain are read by direct I/O, and the
/// page cache is left unchanged. File systems without direct I/O are read through the page cache, with a warning in the
/// log. If `bypass_cache` is 0, bytes are read through the page cache, as by `read`.
///
/// The context owns the mapping until `mp_file_unmap`. Destroying the context also removes it. If the file is truncated
/// or cannot be read, executions that need the missing bytes fail with `MP_ERROR_DRIVER`. If the file is modified during
/// an execution, the destination may contain a mixture of old and new bytes. If the program itself accesses the mapping
/// beyond the end of the file, it receives `SIGBUS`. May be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if `descriptor` is negative, if `bypass_cache` is neither 0 nor 1, or if `data` or
///   `bytes` is NULL.
/// - `MP_ERROR_NOT_SUPPORTED` if the file is empty, is not a regular file, is not open for reading, or is on a file
///   system that cannot map files.
/// - `MP_ERROR_DRIVER` if `descriptor` is not open, or if the system cannot map the file for another reason.
/// - `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_file_map(
    context: mp_context_t,
    descriptor: i32,
    bypass_cache: i32,
    data: *mut *const c_void,
    bytes: *mut u64,
) -> mp_status_t {
    guard(|| {
        let (data, bytes) = (Out::new(data, c"data")?, Out::new(bytes, c"bytes")?);
        let context = find(context)?;
        let caching = match bypass_cache {
            0 => Caching::Keep,
            1 => Caching::Bypass,
            other => return Err(Failure::invalid(c"bypass_cache", format!("bypass_cache={other}: must be 0 or 1"))),
        };
        if descriptor < 0 {
            return Err(Failure::invalid(
                c"descriptor",
                format!("descriptor={descriptor}: must be a file descriptor that is open for reading"),
            ));
        }
        // SAFETY: the descriptor is only duplicated. If it is not open, the system reports an error.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let (address, size) = context.map_file(descriptor, caching).map_err(Failure::blame(c"descriptor"))?;
        data.write(std::ptr::with_exposed_provenance(address as usize));
        bytes.write(size);
        Ok(())
    })
}

/// Removes a mapping that `mp_file_map` has made. NULL has no effect.
///
/// Blocks until all work that the context has enqueued so far has finished. Plans whose source is in the mapping fail if
/// they are executed afterwards. No other thread may enqueue work that uses the mapping during the call. May be called
/// from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `data` is not the address of a mapping of this
/// context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_file_unmap(context: mp_context_t, data: *const c_void) -> mp_status_t {
    guard(|| {
        let context = find(context)?;
        if data.is_null() {
            return Ok(());
        }
        context.unmap_file(data.addr() as u64).map_err(Failure::blame(c"data"))
    })
}
