//! Probing the machine.

use super::argument::{TextOut, switch, text, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_measure::probe::ProbeOptions;
use std::ffi::c_char;
use std::path::Path;

/// Measures the machine of a context: how fast copies between its devices are, which of them slow each other down, what
/// copies cost besides, and whether their bytes arrive. The result is a topology file; the context itself goes on with
/// the topology that it has.
///
/// `options` NULL means all defaults: a full probe, kept where contexts of this user on these GPUs find it from then
/// on. Only such a probe is also tuned: better plans than the model's are looked for, by executing them, for single
/// copies from and to host memory and for all-to-alls of all GPUs, if there are three or more, and contexts that take
/// the probe by themselves take what was found with it. Where that search fails the log has a warning, and the probe is
/// kept without.
///
/// Takes seconds (a full probe of four H200 25 to 31, most of it tuning; estimated for eight GPUs: less than a minute),
/// memory and streams on every device, and all links: nothing else should run on the machine meanwhile, or it is
/// measured too. On the host backend copies by CPU threads are measured, and kept in a named file only. A probe that
/// predicts its own check with a median error of more than 20 % is not tuned from and not kept, and contexts do not take
/// it. Blocks. Any thread, but one probe of a context at a time.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for an option; `MP_ERROR_OUT_OF_MEMORY`;
/// `MP_ERROR_TOPOLOGY` when the file cannot be written, `MP_ERROR_NOT_SUPPORTED` when the result is not kept, or there is
/// no directory for it: it is then still to be had from `mp_context_probed`; `MP_ERROR_DRIVER`.
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

/// Gives the file that the last `mp_context_probe` of this context made: TOML, as docs/reference/topology.md describes it.
///
/// `*length` receives the bytes of the text with its final NUL. With `text` NULL that is all; else the text is written to
/// `text`, which has `capacity` bytes. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_TOPOLOGY` when this context has not been probed;
/// `MP_ERROR_INVALID_ARGUMENT` when `length` is NULL, or for too little room: then `*length` still has what is needed,
/// and nothing is written to `text`.
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
