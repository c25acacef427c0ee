//! Pictures: files that one can open.
//!
//! | file | one idea |
//! | --- | --- |
//! | `cables` | the links of a topology as a person counts them |
//! | `machine` | a machine, drawn |
//! | `gantt` | a timeline, drawn |
//! | `heat` | speed-ups as colours |
//! | `svg` | the writer of these three |
//! | `perfetto` | a timeline for a trace viewer, as JSON |

mod cables;
mod gantt;
mod heat;
mod machine;
mod perfetto;
mod svg;

pub use cables::{Cable, Together, cables};
pub use gantt::gantt;
pub use heat::{HeatMap, heat};
pub use machine::machine;
pub use perfetto::perfetto;
