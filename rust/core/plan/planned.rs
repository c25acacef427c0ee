//! Plans: the result of planning a batch.

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
    /// Device that stages the bytes, or, if the path has no slots, that forwards bytes that it has received itself. `None` for the direct
    /// path.
    pub via: Option<DeviceId>,
    /// Devices that stage the bytes before `via`, in order from the source; empty if there is at most one relay.
    pub earlier: SmallVec<[DeviceId; 1]>,
    /// First byte of the transfer on this path.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of chunks.
    pub chunks: u32,
    /// Size of each chunk but the last, bytes.
    pub chunk_bytes: u64,
    /// Number of slots of the staging ring, which several paths between the same two devices may share; 0 on a path without staging.
    pub slots: u32,
    /// Mechanism that moves the bytes.
    pub mechanism: Mechanism,
    /// Modelled time in seconds from the start of the plan until this path is done, if no other path used its links. Includes earlier work
    /// that passes through the same staging ring.
    pub seconds: f64,
}

/// Paths of one transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferPlan {
    /// Transfer without addresses.
    pub shape: Shape,
    /// Paths in use; none for zero bytes. Equal transfers may share the list.
    pub paths: Arc<Vec<PathPlan>>,
    /// Rejected paths, each with its reason. Equal transfers share the list.
    pub rejected: Arc<Vec<Rejection>>,
}

/// Threads that copy the pageable ends of a plan.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    /// Largest number of concurrent threads.
    pub threads: u32,
    /// Largest size of a chunk, bytes.
    pub chunk_bytes: u64,
    /// Size of the pinned memory that the chunks pass through, bytes.
    pub ring_bytes: u64,
}

/// Plan of a batch: paths, program and modelled times.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Plan of each transfer of the batch.
    pub transfers: Vec<TransferPlan>,
    /// Program that executes the plan.
    pub program: Arc<Program>,
    /// Options of the plan.
    pub options: Options,
    /// Executor of the program: that of the options, or for [`Engine::Auto`] the one that is issued fastest.
    pub executor: Engine,
    /// Threads that copy pageable ends, if there are any.
    pub threads: Option<ThreadUse>,
    /// Modelled time from issue to the last byte, seconds.
    pub predicted: f64,
    /// Modelled time with one path for each transfer, seconds.
    pub one_path: f64,
}

impl Plan {
    /// Returns the work of a process that executes the plan in each step, for the simulator.
    pub fn as_rank(&self) -> Rank {
        let shapes = self.transfers.iter().map(|transfer| transfer.shape).collect();
        Rank { program: Arc::clone(&self.program), engine: self.executor, staging_bytes: self.options.staging_bytes, shapes, kernel: 0.0 }
    }
}
