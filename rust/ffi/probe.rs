//! Probing of the machine.

use super::argument::{TextOut, switch, text, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_measure::probe::ProbeOptions;
use std::ffi::c_char;
use std::path::Path;

/// Measures the machine of a context: the speed of copies between its devices, which copies slow each other down, fixed
/// costs of copies, and whether the bytes arrive. The result is a topology file. The context itself keeps its current
/// topology.
///
/// NULL `options` means all defaults: a full probe, stored in a file that contexts of this user on these GPUs find from
/// then on. Only such a probe is also tuned: it searches for better plans than the model's by executing them, for
/// single copies from and to host memory and, with three or more GPUs, for all-to-alls of all GPUs. Contexts that find
/// the probe also use its tuned plans. If the search fails, the log has a warning and the probe is stored without
/// tuning.
///
/// The probe takes seconds: a full probe of four H200 takes 25 to 31 s, most of it tuning; less than a minute is
/// estimated for eight GPUs. It uses memory and streams on every device, and all links. Other programs that run
/// meanwhile distort the result. On the host backend the probe measures copies by CPU threads, and stores them only in
/// a file that `options` names. A probe that predicts its own check with a median error of more than 20 % is neither
/// tuned nor stored, and contexts do not use it. Blocks. May be called from any thread, but only one probe of a context
/// at a time.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an option.
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

/// Returns the topology file of the last `mp_context_probe` of this context, as TOML (docs/reference/topology.md).
///
/// `*length` receives the size of the text including its final NUL, bytes. If `text` is NULL, nothing else is written;
/// otherwise the text is written to `text`, which has `capacity` bytes. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_TOPOLOGY` if this context has not been probed.
/// `MP_ERROR_INVALID_ARGUMENT` if `length` is NULL or `capacity` is too small; in the latter case `*length` still
/// receives the required size, and `text` is not written.
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
