//! Finds better planning options than those of the performance model by measuring or simulating plans, and stores them in a file.
//!
//! The papers on which this library builds search their configuration offline and exhaustively: the number of paths, the number of chunks
//! of each path, and the use of host memory, for each message size, once for streams and once for graphs (Sojoodi et al. 2024, section 3.2;
//! 2026, section 4.4). Here the search starts from the model's plan, so a few dozen scores are enough. The full grid serves as a check.
//!
//! | file | contents |
//! | --- | --- |
//! | `cases` | the communication steps that are tuned |
//! | `class` | classes of transfers that share tuned values |
//! | `score` | measures the time of a plan; compares plans in the presence of noise |
//! | `simulated` | scores in virtual time |
//! | `trial` | scored plans; no plan is scored twice |
//! | `short` | the search that starts from the model |
//! | `grid` | the exhaustive search |
//! | `partitions` | the search for the number of partitions of a transfer |
//! | `campaign` | all cases and sizes, and the size from which several paths gain |
//! | `tuning` | results of tuning, and the advice for a batch |
//! | `file` | the TOML form of a tuning |
//!
//! The module is pure: no backend, no driver, no clock. An implementation of [`Score`] may use all three.

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
