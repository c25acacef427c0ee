//! Draws pictures and writes SVG and JSON files.
//!
//! | file | contents |
//! | --- | --- |
//! | `cables` | links of a topology, grouped into cables (both directions between two nodes) |
//! | `machine` | drawing of a machine as SVG |
//! | `gantt` | drawing of a timeline as SVG |
//! | `heat` | heat map of speed-ups as SVG |
//! | `svg` | writer of SVG files |
//! | `perfetto` | timeline as JSON for a trace viewer |

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
