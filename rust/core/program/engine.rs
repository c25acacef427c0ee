//! Who runs a program.

/// Which executor a plan is made for.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The one that the model finds fastest.
    #[default]
    Auto,
    /// Copies on internal streams, joined by events.
    Stream,
    /// Copies and fused kernels as one graph launch.
    Graph,
    /// Direct copies in batched calls.
    Batch,
    /// Direct copies between GPU memories in fused kernels.
    Kernel,
}
