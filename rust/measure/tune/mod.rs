//! Better options than the model's, found by scoring plans, and the file that keeps them.
//!
//! The papers that this library grew out of search their configuration offline and exhaustively: number of paths, number of chunks of each
//! path, with and without the host, for each message size, once for streams and once for graphs (Sojoodi et al. 2024, section 3.2; 2026,
//! section 4.4). Here the search starts from the model's plan, so a few dozen scores are enough; the full grid serves to check it.
//!
//! | file | one idea |
//! | --- | --- |
//! | `cases` | the communication steps that are tuned |
//! | `class` | which transfers a tuned value holds for |
//! | `score` | what a plan takes: a trait, decided by noise where there is any |
//! | `simulated` | the score in virtual time |
//! | `trial` | plans that were scored, none of them twice |
//! | `short` | the search that starts from the model |
//! | `grid` | the exhaustive search |
//! | `partitions` | in how many partitions a transfer moves |
//! | `campaign` | all cases and sizes, and the size from which several paths pay |
//! | `tuning` | what was found, and what it says about a batch |
//! | `file` | the same as TOML |
//!
//! Pure: no backend, no driver, no clock. An implementation of [`Score`] may use all three.

mod campaign;
mod cases;
mod class;
mod error;
mod file;
mod grid;
mod partitions;
mod score;
mod short;
mod simulated;
mod trial;
mod tuning;

pub use campaign::{Campaign, EngineResult, Search, TunedPoint};
pub use cases::Case;
pub use class::{Class, Pattern, Side};
pub use error::{TuneError, TuningError};
pub use file::{MAX_FILE_BYTES, load, parse, read};
pub use grid::grid;
pub use partitions::{search_partitions, spread_partitions};
pub use score::{Score, Verdict};
pub use short::short;
pub use simulated::Simulated;
pub use trial::{Found, Trial, Trials};
pub use tuning::{
    Advice, ClassTuning, EngineTuning, Origin, PartitionMover, PartitionTrial, PartitionTuning, Preference, Setting, SizeTuning, Tuning,
    digest, shape_of,
};
