//! A plan: what is done about a batch.

use super::candidates::Rejection;
use super::options::Options;
use crate::model::simulate::Rank;
use crate::program::{Engine, Mechanism, Program, Shape};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::sync::Arc;

/// A path of a transfer, as planned.
#[derive(Clone, Debug, PartialEq)]
pub struct PathPlan {
    /// The device whose memory the bytes are staged in, or, without slots, that passes on what it has itself received; `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Devices that the bytes are staged in before, from the source on; none where one relay is all.
    pub earlier: SmallVec<[DeviceId; 1]>,
    /// First byte of the transfer on this path.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// Pieces that they are cut into.
    pub chunks: u32,
    /// Bytes of each piece but the last.
    pub chunk_bytes: u64,
    /// Slots of its staging ring, which paths between the same two devices may share; 0 on the direct path.
    pub slots: u32,
    /// How the bytes are moved.
    pub mechanism: Mechanism,
    /// Modelled seconds from the start of the plan until this path, and what passes its ring before it, is done, had they their links to themselves.
    pub seconds: f64,
}

/// The paths of one transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferPlan {
    /// What is moved.
    pub shape: Shape,
    /// Paths in use; none for zero bytes. Transfers alike may share the list.
    pub paths: Arc<Vec<PathPlan>>,
    /// Paths that were considered and left out, each with its reason. Transfers alike share the list.
    pub rejected: Arc<Vec<Rejection>>,
}

/// How threads move the pageable ends of a plan.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ThreadUse {
    /// How many may work at once.
    pub threads: u32,
    /// Bytes of a chunk, at most.
    pub chunk_bytes: u64,
    /// Pinned memory that the chunks pass through.
    pub ring_bytes: u64,
}

/// What is done about a batch, and what the model expects of it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One for each transfer of the batch.
    pub transfers: Vec<TransferPlan>,
    /// The operations.
    pub program: Arc<Program>,
    /// The options that it was planned with.
    pub options: Options,
    /// Who runs the program: the options' engine, or for [`Engine::Auto`] the one that takes least to issue.
    pub executor: Engine,
    /// Where threads move pageable ends.
    pub threads: Option<ThreadUse>,
    /// Modelled seconds from issue to the last byte.
    pub predicted: f64,
    /// The same with one path for each transfer.
    pub one_path: f64,
}

impl Plan {
    /// What a process that runs it does in a step, for the simulator.
    pub fn as_rank(&self) -> Rank {
        let shapes = self.transfers.iter().map(|transfer| transfer.shape).collect();
        Rank { program: Arc::clone(&self.program), engine: self.executor, staging_bytes: self.options.staging_bytes, shapes, kernel: 0.0 }
    }
}
