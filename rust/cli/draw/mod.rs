//! Draws pictures and writes SVG and JSON files.
//!
//! | file | contents |
//! | --- | --- |
//! | `cables` | the links of a topology, grouped into cables |
//! | `machine` | drawing of a machine |
//! | `gantt` | drawing of a timeline |
//! | `heat` | speed-ups as colours |
//! | `svg` | SVG writer of the drawings |
//! | `perfetto` | a timeline for a trace viewer, as JSON |

mod cables;
mod gantt;
mod heat;
mod machine;
mod perfetto;
mod svg;

pub use cables::{Cable, Together, cables};
pub use gantt::{Chart, gantt, last_copy};
pub use heat::{HeatMap, heat};
pub use machine::machine;
pub use perfetto::perfetto;
