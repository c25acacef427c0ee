//! Methods of executing a program.

/// Method by which a backend executes a plan's program.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Execution method with the shortest predicted time.
    #[default]
    Auto,
    /// Individual copies on several internal streams, ordered by events.
    Stream,
    /// Copies and fused copy kernels, launched as one CUDA graph.
    Graph,
    /// Direct copies without staging, submitted by batched driver calls.
    Batch,
    /// Direct copies without staging, performed by fused copy kernels.
    Kernel,
}
