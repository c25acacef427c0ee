//! Pictures, as SVG.
//!
//! | file | one idea |
//! | --- | --- |
//! | `svg` | the writer |
//! | `cables` | the links of a topology as a person counts them |
//! | `layout` | where the nodes and links of a machine stand |
//! | `machine` | a machine, drawn |

mod cables;
mod layout;
mod machine;
mod svg;

pub use cables::{Cable, cables};
pub use machine::machine;
