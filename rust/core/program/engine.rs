//! Methods of executing a program.

/// Method by which a backend executes a plan's program.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Method that the model predicts to be fastest.
    #[default]
    Auto,
    /// Individual copies on internal streams, ordered by events.
    Stream,
    /// One graph launch that contains all copies and fused kernels.
    Graph,
    /// Calls of the driver's batched copy, without staging.
    Batch,
    /// Fused kernels that copy directly between GPU memories.
    Kernel,
}
