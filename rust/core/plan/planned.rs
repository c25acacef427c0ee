//! Defines plans: the result of planning a batch.

use super::candidates::Rejection;
use super::options::Options;
use crate::model::simulate::Rank;
use crate::program::{Engine, Mechanism, Program, Shape};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::sync::Arc;

/// Path of a transfer in a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PathPlan {
    /// Relay of the path: the device that stages the data, or, if `slots` is 0, a destination of the same source that forwards the data it
    /// received. `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Devices that stage the data before `via`, in order from the source; empty if the path has at most one relay.
    pub earlier: SmallVec<[DeviceId; 1]>,
    /// Offset in the transfer of the first byte on this path.
    pub offset: u64,
    /// Number of bytes that the path carries.
    pub bytes: u64,
    /// Number of chunks into which the path's data is cut.
    pub chunks: u32,
    /// Size of each chunk except the last, bytes.
    pub chunk_bytes: u64,
    /// Number of slots of the path's staging ring; 0 on a path without staging. Several paths between the same two devices may share the
    /// ring.
    pub slots: u32,
    /// Mechanism that moves the data on this path.
    pub mechanism: Mechanism,
    /// Modelled time in seconds from the start of the plan until this path is done, if no other path used its links. It includes earlier
    /// work in the same staging ring.
    pub seconds: f64,
}

/// Plan of one transfer: paths that it uses, and rejected paths.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferPlan {
    /// Devices, memory kinds and size of the transfer, without addresses.
    pub shape: Shape,
    /// Paths that the transfer uses; empty for zero bytes. Equal transfers may share the list.
    pub paths: Arc<Vec<PathPlan>>,
    /// Paths that the transfer does not use, each with the reason. Equal transfers share the list.
    pub rejected: Arc<Vec<Rejection>>,
}

/// CPU threads and pinned memory that copy the pageable ends of a plan's transfers.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    /// Largest number of threads that copy concurrently.
    pub threads: u32,
    /// Largest size of a chunk that a thread copies, bytes.
    pub chunk_bytes: u64,
    /// Total size of the rings of pinned memory that the chunks pass through, bytes.
    pub ring_bytes: u64,
}

/// Plan of a batch: paths of each transfer, program, and modelled times.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Plan of each transfer, in the order of the batch.
    pub transfers: Vec<TransferPlan>,
    /// Program that executes the plan.
    pub program: Arc<Program>,
    /// Options that the plan was created with.
    pub options: Options,
    /// Executor of the program: that of the options, or for [`Engine::Auto`] the executor with the shortest simulated time.
    pub executor: Engine,
    /// CPU threads that copy the pageable ends of transfers; `None` if no threads are used.
    pub threads: Option<ThreadUse>,
    /// Modelled time from issue to arrival of the last byte, seconds. It is the simulated time, or a longer time if the driver or CPU
    /// threads copy pageable memory.
    pub predicted: f64,
    /// Modelled time of a plan with one path for each transfer, for comparison, seconds.
    pub one_path: f64,
}

impl Plan {
    /// Returns the work of a process that executes the plan once in each step, as input for the simulator.
    pub fn as_rank(&self) -> Rank {
        let shapes = self.transfers.iter().map(|transfer| transfer.shape).collect();
        Rank { program: Arc::clone(&self.program), engine: self.executor, staging_bytes: self.options.staging_bytes, shapes, kernel: 0.0 }
    }
}
