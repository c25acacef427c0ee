//! From transfers to a program: candidate paths, the split, chunks, lowering, and the proof that the result is right.
//!
//! Pure: no backend, no driver, no clock. The same machine, transfers and options give the same plan.

mod program;

pub use program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};

use crate::backend::MemoryKind;
use crate::topology::{DeviceId, Machine};

/// What the planner needs to know of one transfer. Addresses do not matter to it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Where the bytes go.
    pub dst_device: DeviceId,
    /// Where they come from.
    pub src_device: DeviceId,
    /// The kind of memory that they go to.
    pub dst_kind: MemoryKind,
    /// The kind of memory that they come from.
    pub src_kind: MemoryKind,
    /// How many.
    pub bytes: u64,
}

/// Which executor a plan is made for.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The one that the model finds fastest.
    #[default]
    Auto,
    /// Copies on internal streams, joined by events.
    Stream,
    /// The same copies as one graph launch.
    Graph,
    /// Direct copies in batched calls.
    Batch,
    /// Direct copies in fused kernels.
    Kernel,
}

/// How to plan. `None` leaves the choice to the model.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Executor.
    pub engine: Engine,
    /// The most paths that one transfer may use, 1 or more.
    pub max_paths: u32,
    /// Whether a copy between GPUs may pass through host memory.
    pub host_path: bool,
    /// Bytes of one chunk on staged paths.
    pub chunk_bytes: Option<u64>,
    /// Transfers below this size take one path.
    pub min_bytes: Option<u64>,
    /// The most staging memory on each device, bytes.
    pub staging_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { engine: Engine::Auto, max_paths: u32::MAX, host_path: true, chunk_bytes: None, min_bytes: None, staging_bytes: 64 << 20 }
    }
}

// Interface that the engine relies on (to be implemented beside the types):
//
// pub fn plan(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError>;
// pub struct Plan { pub program: Arc<Program>, pub predicted: f64 /* s */, pub direct: f64 /* s */, … }  Debug + Clone
// impl Plan { pub fn describe(&self, machine: &Machine) -> String; pub fn to_json(&self, machine: &Machine) -> serde_json::Value }
// pub fn validate(program: &Program, staging_bytes: u64) -> Result<(), Violation>;
// PlanError (thiserror): NoRoute{transfer, src, dst}, InvalidDevice{transfer, device}, … each Display names value and remedy.
