//! One line for each kind of copy, against the fastest plain way: what `mpgpu bench` shows.

use super::cases::{self, HOST_BACKEND_LARGEST};
use super::compare::{Comparison, Spread};
use super::memory::Pattern;
use super::{Bench, Failure, is_on_gpus, plain};
use mpgpu_contexts::Context;
use std::cell::RefCell;

/// The kinds of copies: case, and what a reader calls it. `all_to_all` needs three GPUs.
pub const LOOKS: [(&str, &str); 8] = [
    ("d2d", "GPU 0 to GPU 1"),
    ("d2d_bidir", "GPU 0 and GPU 1, both directions"),
    ("all_to_all", "all GPUs to all"),
    ("put_paths", "GPU 0 to GPU 1 of another process"),
    ("h2d", "pinned host memory to GPU 0"),
    ("d2h", "GPU 0 to pinned host memory"),
    ("h2d_pageable", "ordinary host memory to GPU 0"),
    ("d2h_pageable", "GPU 0 to ordinary host memory"),
];

/// Bytes of one transfer where nobody names them.
const BYTES: u64 = 256 << 20;

/// A kind of copy that was looked at.
pub struct Row {
    /// Its name as a case.
    pub case: &'static str,
    /// What a reader calls it.
    pub what: &'static str,
    /// Of one transfer.
    pub bytes: u64,
    /// What came of it.
    pub result: Looked,
}

/// What came of it.
pub enum Looked {
    /// Every byte was right.
    Measured {
        /// Bytes/s of the fastest plain way.
        plain: f64,
        /// Bytes/s of mpgpu.
        mpgpu: f64,
        /// Paths of the plan.
        paths: usize,
    },
    /// It cannot be done here.
    Left(String),
    /// It was refused, or bytes were wrong.
    Failed(String),
}

/// Measures every kind of copy. A transfer has so many bytes, one of an all-to-all a quarter.
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

/// Is the other process of a look or a benchmark, until its standard input ends.
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
