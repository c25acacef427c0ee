//! Measures the overview of `mpgpu bench`: one line for each kind of copy, in which mpgpu is compared with the fastest plain method.

use super::cases::{self, HOST_BACKEND_LARGEST};
use super::compare::{Comparison, Spread};
use super::memory::Pattern;
use super::{Bench, Failure, is_on_gpus, plain};
use mpgpu_contexts::Context;
use std::cell::RefCell;

/// Kinds of copy in the overview. Each entry holds the name of the benchmark case and the description in the output. The case `all_to_all`
/// needs three GPUs.
pub const LOOKS: [(&str, &str); 8] = [
    ("d2d", "GPU 0 to GPU 1"),
    ("d2d_bidir", "GPU 0 and GPU 1, both directions"),
    ("all_to_all", "all GPUs to all"),
    ("put_paths", "GPU 0 to GPU 1 of another process"),
    ("h2d", "pinned host memory to GPU 0"),
    ("d2h", "GPU 0 to pinned host memory"),
    ("h2d_pageable", "pageable host memory to GPU 0"),
    ("d2h_pageable", "GPU 0 to pageable host memory"),
];

/// Default size in bytes of one transfer in the overview of `mpgpu bench`.
const BYTES: u64 = 256 << 20;

/// One line of the overview.
pub struct Row {
    /// Name of the benchmark case that was measured.
    pub case: &'static str,
    /// Description of the kind of copy in the output.
    pub what: &'static str,
    /// Size of one transfer of the case in bytes.
    pub bytes: u64,
    /// Result of measuring this kind of copy.
    pub result: Looked,
}

/// Result of measuring one kind of copy.
pub enum Looked {
    /// The measurement was made, and all data was correct.
    Measured {
        /// Rate of the fastest plain method, in bytes/s.
        plain: f64,
        /// Rate of mpgpu, in bytes/s.
        mpgpu: f64,
        /// Total number of paths of mpgpu's plan.
        paths: usize,
    },
    /// The measurement is not possible on this machine. Contains the reason.
    Left(String),
    /// The copy failed, or some bytes were wrong. Contains the error.
    Failed(String),
}

/// Measures every kind of copy and returns one row for each. Calls `done` with each row as soon as it is measured. `bytes` is the size of
/// one transfer, or `None` for the default. Transfers of an all-to-all have a quarter of this size.
pub fn look(context: &Context, bytes: Option<u64>, mut done: impl FnMut(&Row)) -> Result<Vec<Row>, Failure> {
    let on_gpus = is_on_gpus(context);
    let gpus = context.machine().gpu_count();
    let bytes = bytes.unwrap_or(if on_gpus { BYTES } else { HOST_BACKEND_LARGEST });
    let transfers = (gpus * gpus.saturating_sub(1)).max(2) as usize;
    let bench = Bench {
        context,
        plain: RefCell::new(plain::of(context)),
        pattern: Pattern::new(context, bytes, transfers)?,
        repeat: None,
        narrow_blocks: 1,
    };
    let mut rows = Vec::new();
    for (name, what) in LOOKS {
        let case = cases::find(name)?;
        let bytes = if name == "all_to_all" { (bytes / 4).max(1) } else { bytes };
        let result = match case.missing(gpus, on_gpus) {
            Some(why) => Looked::Left(why),
            None => (case.run)(&bench, case, bytes).map_or_else(|error| Looked::Failed(error.to_string()), |found| Looked::of(&found)),
        };
        rows.push(Row { case: name, what, bytes, result });
        rows.last().into_iter().for_each(&mut done);
    }
    Ok(rows)
}

/// Runs the peer, which is the second process of a case of two processes. Returns when standard input of this process ends.
pub fn peer(context: &Context, seed: u64, bytes: u64) -> Result<(), Failure> {
    super::peer::run(context, seed, bytes)
}

impl Looked {
    fn of(found: &[Comparison]) -> Looked {
        let Some(first) = found.first() else { return Looked::Failed("nothing was measured".into()) };
        let rate = |seconds: &[f64]| first.bytes as f64 / Spread::of(seconds).median;
        let plain = first.against.iter().map(|plain| rate(&plain.total)).fold(0.0, f64::max);
        let paths = first.plan.as_ref().map_or(1, |plan| plan.paths());
        Looked::Measured { plain, mpgpu: rate(&first.mpgpu.total), paths }
    }
}
