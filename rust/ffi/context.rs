//! Functions of the C ABI for contexts.

use super::argument::{Out, TextOut, VersionedOut, bad_value, text, versioned};
use super::guard::{Failure, guard};
use super::table::Table;
use super::types::*;
use super::version::{MP_VERSION, MP_VERSION_MAJOR, MP_VERSION_MINOR, MP_VERSION_PATCH};
use super::{log, message, node, plan, request};
use mpgpu_backend::SignalWait;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, MOST_THREADS};
use mpgpu_core::topology::DeviceId;
use std::ffi::c_char;
use std::sync::Arc;

static CONTEXTS: Table<Arc<Context>> = Table::new(1);

/// Returns the context of a handle. The returned reference keeps the context alive while a call uses it.
pub(super) fn find(context: mp_context_t) -> Result<Arc<Context>, Failure> {
    CONTEXTS.with(context.addr(), c"context", Arc::clone)
}

/// Creates a context: chooses the backend, reads the topology, and reads the environment variables. `header_version` is
/// the `MP_VERSION` of the header with which the program was compiled. Programs call `mp_context_create` instead, which
/// passes this version.
///
/// NULL `options` selects all defaults. The caller owns `*context` and destroys it with `mp_context_destroy`. A process
/// may create several contexts; they share no state. Threads that the library starts block all POSIX signals, except
/// those that report a fault of the thread itself, such as SIGSEGV. May be called from any thread.
///
/// `fork`: in the child, the parent's handles cannot be used. Destroying the parent's contexts, plans and requests does
/// nothing there, and every other call with them fails with `MP_ERROR_INVALID_HANDLE`. The child may create its own
/// contexts. On CUDA this works only if the child was forked before the parent first used the driver, or after the
/// child has called `exec`.
///
/// Errors:
/// - `MP_ERROR_VERSION_MISMATCH` if the header and the library are incompatible.
/// - `MP_ERROR_ENVIRONMENT` if an environment variable of the library has an invalid value. An unknown variable whose
///   name starts with `MPGPU_` only causes a log warning.
/// - `MP_ERROR_NOT_SUPPORTED` for a backend or a setting that this build does not support.
/// - `MP_ERROR_TOPOLOGY`, `MP_ERROR_INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_create_versioned(
    options: *const mp_context_options_t,
    header_version: u32,
    context: *mut mp_context_t,
) -> mp_status_t {
    guard(|| {
        check_version(header_version)?;
        let out = Out::new(context, c"context")?;
        let options = if options.is_null() { ContextOptions::default() } else { context_options(&versioned(options, c"options")?)? };
        let environment = Config::from_environment()?;
        log::configure(environment.log);
        let context = Context::open(&options, environment)?;
        out.write(std::ptr::without_provenance_mut(CONTEXTS.insert(Arc::new(context))?));
        Ok(())
    })
}

fn check_version(header: u32) -> Result<(), Failure> {
    let (major, minor) = (header / 10000, header / 100 % 100);
    // Before 1.0 a minor version may be incompatible with an earlier one.
    if major == MP_VERSION_MAJOR && (major > 0 || minor == MP_VERSION_MINOR) {
        return Ok(());
    }
    let message = format!(
        "the program was compiled with mpgpu.h {major}.{minor}.{}, but the library is {MP_VERSION_MAJOR}.{MP_VERSION_MINOR}.{MP_VERSION_PATCH} \
         ({MP_VERSION}); compile and link with the same version",
        header % 100
    );
    Err(Failure::argument(mp_status_t::MP_ERROR_VERSION_MISMATCH, c"header_version", message))
}

fn context_options(options: &mp_context_options_t) -> Result<ContextOptions, Failure> {
    let backend = match options.backend {
        0 => None,
        1 => Some(BackendChoice::Host),
        2 => Some(BackendChoice::Cuda),
        other => return Err(bad_value(c"backend", other, "from 0 (MP_BACKEND_AUTO) to 2 (MP_BACKEND_CUDA)")),
    };
    let signal_wait = match options.signal_wait {
        0 => None,
        1 => Some(SignalWait::Operation),
        2 => Some(SignalWait::Kernel),
        other => return Err(bad_value(c"signal_wait", other, "from 0 (MP_SIGNAL_WAIT_DEFAULT) to 2 (MP_SIGNAL_WAIT_KERNEL)")),
    };
    let host_threads = match options.host_threads {
        0 => None,
        -1 => Some(0),
        threads => match u32::try_from(threads).ok().filter(|threads| *threads <= MOST_THREADS) {
            Some(threads) => Some(threads),
            None => {
                return Err(bad_value(c"host_threads", threads, "from 1 to 256, -1 for none, or 0 for the value of MPGPU_HOST_THREADS"));
            }
        },
    };
    let entries = |count: u64| (count > 0).then(|| usize::try_from(count).unwrap_or(usize::MAX));
    Ok(ContextOptions {
        backend,
        topology: text(options.topology, c"topology")?.map(str::to_owned),
        staging_bytes: (options.staging_bytes > 0).then_some(options.staging_bytes),
        cache_plans: entries(options.cache_plans),
        cache_graphs: entries(options.cache_graphs),
        signal_wait,
        host_threads,
    })
}

/// Destroys a context. Blocks until all of its work has finished, then frees its staging buffers and all objects that
/// the caller has not destroyed. If memory from `mp_alloc` was not freed, a log warning lists it. Plans and requests of
/// the context become invalid handles.
///
/// The call first cancels operations that wait for another process or kernel: messages without a match, and executions
/// whose partitions were not marked ready. These operations end within 10 seconds. The call still blocks while a stream
/// of the context waits for a signal. It also blocks while a stream waits for another rank that is running but does not
/// execute its part of a plan of `mp_node_plan`, or does not post the matching send or receive.
///
/// May be called from any thread, but not from a host function (`mp_stream_launch_host`) or a log callback. Calls that
/// other threads make with the context during this call fail with `MP_ERROR_INVALID_HANDLE`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. Any other error is the first failure of outstanding work or of freeing resources.
/// The context is destroyed even then.
#[unsafe(no_mangle)]
pub extern "C" fn mp_context_destroy(context: mp_context_t) -> mp_status_t {
    guard(|| {
        if CONTEXTS.is_inherited(context.addr()) {
            return Ok(());
        }
        let context = CONTEXTS.remove(context.addr(), c"context")?;
        let closed = context.close();
        // The handles are removed after the context is closed, because no call can add a handle of a closed context.
        request::forget_all(&context);
        message::forget_all(&context);
        plan::forget_all(&context);
        node::forget_all(&context);
        Ok(closed?)
    })
}

/// Returns the backend and the numbers of devices of a context.
///
/// `*backend` receives `MP_BACKEND_HOST` or `MP_BACKEND_CUDA`. GPUs are numbered from 0 to `*gpus - 1`. The host memory
/// of the NUMA domains has the device numbers `MP_DEVICE_HOST_NUMA(0)` to `MP_DEVICE_HOST_NUMA(*host_domains - 1)`.
/// Each output pointer may be NULL. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_get_info(
    context: mp_context_t,
    backend: *mut mp_backend_t,
    gpus: *mut i32,
    host_domains: *mut i32,
) -> mp_status_t {
    guard(|| {
        let (gpus, host_domains) = (Out::if_wanted(gpus, c"gpus")?, Out::if_wanted(host_domains, c"host_domains")?);
        let backend = Out::if_wanted(backend, c"backend")?;
        let context = find(context)?;
        let is_virtual = context.backend().is_virtual();
        backend.write(if is_virtual { mp_backend_t::MP_BACKEND_HOST } else { mp_backend_t::MP_BACKEND_CUDA });
        gpus.write(i32::try_from(context.machine().gpu_count()).unwrap_or(i32::MAX));
        host_domains.write(i32::try_from(context.machine().host_count()).unwrap_or(i32::MAX));
        Ok(())
    })
}

/// Writes a description of the context: version, backend, topology, settings, and the tuning file if one is in use.
///
/// `*length` receives the size of the text in bytes, including the final NUL. If `text` is NULL, only `*length` is
/// written. Otherwise the text is written to the `capacity` bytes at `text`. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if the format is unknown or `length` is NULL.
/// - `MP_ERROR_INVALID_ARGUMENT` also if `capacity` is too small. `*length` then receives the required size, and `text`
///   is not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_describe(
    context: mp_context_t,
    format: mp_format_value,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> mp_status_t {
    guard(|| {
        let out = TextOut::new(text, capacity, length)?;
        let context = find(context)?;
        out.write(&describe(format, || context.describe(), || context.to_json())?)
    })
}

/// Returns the description of an object as text or as JSON, as `format` requests.
pub(super) fn describe(
    format: mp_format_value,
    text: impl FnOnce() -> String,
    json: impl FnOnce() -> serde_json::Value,
) -> Result<String, Failure> {
    match format {
        0 => Ok(text()),
        1 => Ok(json().to_string()),
        other => Err(bad_value(c"format", other, "0 (MP_FORMAT_TEXT) or 1 (MP_FORMAT_JSON)")),
    }
}

/// Fills `*statistics` with the statistics of the context since its creation. Calls that run concurrently on other
/// threads may not be counted yet. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or `statistics->size` is
/// wrong.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_statistics(context: mp_context_t, statistics: *mut mp_statistics_t) -> mp_status_t {
    guard(|| {
        let out = VersionedOut::new(statistics, c"statistics")?;
        let statistics = find(context)?.statistics();
        out.write(mp_statistics_t {
            size: size_of::<mp_statistics_t>(),
            plan_cache_hits: statistics.cache.hits,
            plan_cache_misses: statistics.cache.misses,
            plan_cache_evictions: statistics.cache.evictions,
            plan_cache_entries: statistics.cache.entries,
            executions: statistics.executions,
            bytes: statistics.bytes,
            plan_cache_shape_hits: statistics.cache.shape_hits,
            graph_launches: statistics.graphs.launches,
            graph_hits: statistics.graphs.hits,
            graph_misses: statistics.graphs.misses,
            graph_instantiations: statistics.graphs.instantiations,
            graph_repoints: statistics.graphs.repoints,
            graph_waits: statistics.graphs.waits,
            graph_programs: statistics.graphs.programs,
            graph_entries: statistics.graphs.execs,
        });
        Ok(())
    })
}

/// Fills `*statistics` with the resources that the context holds on `device` now. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or
/// `statistics->size` is wrong.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_device_statistics(
    context: mp_context_t,
    device: i32,
    statistics: *mut mp_device_statistics_t,
) -> mp_status_t {
    guard(|| {
        let out = VersionedOut::new(statistics, c"statistics")?;
        let statistics = find(context)?.device_statistics(DeviceId(device))?;
        out.write(mp_device_statistics_t {
            size: size_of::<mp_device_statistics_t>(),
            staging_bytes: statistics.staging_bytes,
            allocated_bytes: statistics.allocated_bytes,
            streams: statistics.streams,
        });
        Ok(())
    })
}
