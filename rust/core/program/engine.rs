//! Executors of programs.

/// Executor that a plan is made for.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Executor that the model finds fastest.
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
