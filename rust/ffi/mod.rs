//! Scaffold.
pub(crate) mod bridge;
