//! Pictures: files that one can open.
//!
//! | file | one idea |
//! | --- | --- |
//! | `cables` | the links of a topology as a person counts them |
//! | `dot` | a machine, for Graphviz |
//! | `gantt` | a timeline, drawn |
//! | `heat` | speed-ups as colours |
//! | `svg` | the writer of these two |
//! | `perfetto` | a timeline for a trace viewer, as JSON |

mod cables;
mod dot;
mod gantt;
mod heat;
mod perfetto;
mod svg;

pub use cables::{Cable, Together, cables};
pub use dot::dot;
pub use gantt::gantt;
pub use heat::{HeatMap, heat};
pub use perfetto::perfetto;
