//! Probing of the machine.

use super::argument::{TextOut, switch, text, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_measure::probe::ProbeOptions;
use std::ffi::c_char;
use std::path::Path;

/// Probes (measures) the machine and produces a topology file: the speed of copies between the devices of the context,
/// which copies slow each other down, the fixed cost of a copy, and whether data arrive intact. The context itself
/// keeps its current topology.
///
/// Blocks for seconds: a full probe of four H200 takes 25 to 31 s, most of it for tuning. For eight GPUs less than a
/// minute is estimated. The probe uses memory and streams on every device, and all links. Other programs that use the
/// machine at the same time distort the result. May be called from any thread, but a context runs only one probe at a
/// time.
///
/// NULL `options` selects a full probe. Its result is stored in a file that contexts of this user on these GPUs use
/// from then on. A full probe whose result is stored in this file also tunes: it executes alternative plans and stores
/// those that are faster than the model's plans. It tunes single copies from and to host memory and, with three or more
/// GPUs, all-to-all operations of all GPUs. If tuning fails, a log warning is written, and the result is stored without
/// tuning.
///
/// The probe checks its own predictions. If their median error exceeds 20 %, the result is not tuned and not stored,
/// and contexts do not use it. On the host backend the probe measures copies by CPU threads, and stores the result only
/// if `options` names a file.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid option.
/// - `MP_ERROR_TOPOLOGY` if the file cannot be written.
/// - `MP_ERROR_NOT_SUPPORTED` if the result is not stored or there is no directory for it. `mp_context_probed` still
///   returns the result.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_probe(context: mp_context_t, options: *const mp_probe_options_t) -> mp_status_t {
    guard(|| {
        let options = if options.is_null() { None } else { Some(versioned(options, c"options")?) };
        let file = options.map(|options| text(options.file, c"file")).transpose()?.flatten();
        let keep = switch(c"keep", options.map_or(0, |options| options.keep))?.unwrap_or(true);
        let quick = switch(c"quick", options.map_or(0, |options| options.quick))?.unwrap_or(false);
        let context = find(context)?;
        let mut options = if quick { ProbeOptions::quick() } else { ProbeOptions::default() };
        if file.is_some() || !keep || !context.keeps_probes() {
            options.tuned_bytes.clear();
        }
        let report = context.probe(&options, &mut |_| {})?;
        if keep {
            context.store_probe(&report, file.map(Path::new))?;
        }
        Ok(())
    })
}

/// Returns the topology file that the last `mp_context_probe` of this context produced, in TOML
/// (docs/reference/topology.md).
///
/// `*length` receives the size of the text in bytes, including the final NUL. If `text` is NULL, only `*length` is
/// written. Otherwise the text is written to the `capacity` bytes at `text`. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_TOPOLOGY` if this context has not been probed.
/// - `MP_ERROR_INVALID_ARGUMENT` if `length` is NULL or `capacity` is too small. In the latter case `*length` receives
///   the required size, and `text` is not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_context_probed(context: mp_context_t, text: *mut c_char, capacity: usize, length: *mut usize) -> mp_status_t {
    guard(|| {
        let out = TextOut::new(text, capacity, length)?;
        let context = find(context)?;
        let probed = context.probed().ok_or_else(|| {
            let message = "this context has not been probed: probe it first".to_owned();
            Failure::argument(mp_status_t::MP_ERROR_TOPOLOGY, c"context", message)
        })?;
        out.write(&probed)
    })
}
