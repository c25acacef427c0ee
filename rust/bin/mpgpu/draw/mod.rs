//! Pictures: files that one can open.
//!
//! | file | one idea |
//! | --- | --- |
//! | `svg` | the writer |
//! | `cables` | the links of a topology as a person counts them |
//! | `layout` | where the nodes and links of a machine stand |
//! | `machine` | a machine, drawn |
//! | `gantt` | a timeline, drawn |
//! | `perfetto` | a timeline for a trace viewer, as JSON |

mod cables;
mod gantt;
mod layout;
mod machine;
mod perfetto;
mod svg;

pub use cables::{Cable, Together, cables};
pub use gantt::gantt;
pub use machine::machine;
pub use perfetto::perfetto;
