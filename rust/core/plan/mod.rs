//! From transfers to a program: candidate paths, their shares, chunks, mechanisms, lowering.
//!
//! | file | one idea |
//! | --- | --- |
//! | `planner` | plans a batch: complete plans are proposed, and the fastest is taken |
//! | `canonical` | the order of devices and transfers in which batches are planned |
//! | `apart` | transfers that share nothing, planned by themselves |
//! | `judge` | plays what is proposed in the simulator |
//! | `options`, `planned` | what goes in; what comes out |
//! | `demand` | transfers that are planned as one |
//! | `candidates` | the paths that a transfer could take, and why others can't help |
//! | `selection` | the candidates of a batch that are still open |
//! | `choose` | which of them may carry bytes, and how many |
//! | `split` | bytes for each path, by linear program |
//! | `balance` | bytes with which paths end together where links are shared fairly |
//! | `shares` | whole bytes for each transfer and path |
//! | `staging` | rings, slots and the size of chunks |
//! | `alternative` | shares with their operations |
//! | `mechanism` | plain copies, a batched call or a kernel, and who issues them |
//! | `executor` | what issuing costs while it is open who issues |
//! | `pageable` | ordinary host memory, which threads copy to and from |
//! | `lower` | shares to a [`Program`] |
//! | `trees` | bytes that several devices pass on: one source for many destinations, and paths over several relays |
//! | `network` | the devices of a machine as a network for the bytes of a batch |
//! | `ways` | the cheapest ways and trees through it under prices |
//! | `flow` | how bytes flow best over any number of relays, and the prices that prove it |
//! | `partition` | the same for transfers that move in partitions |
//! | `bound` | how soon a batch could be done at best, and what limits it |
//! | `describe`, `json`, `reasons`, `timeline` | a plan for people and for programs, in words and as a picture |
//!
//! Pure: no backend, no driver, no clock. The same machine, transfers and options give the same plan.

mod alternative;
mod apart;
mod balance;
mod bound;
mod candidates;
mod canonical;
mod choose;
mod demand;
mod describe;
mod executor;
mod flow;
mod json;
mod judge;
mod lower;
mod mechanism;
mod network;
mod options;
mod pageable;
mod partition;
mod planned;
mod planner;
mod reasons;
mod selection;
mod shares;
mod split;
mod staging;
mod timeline;
mod trees;
mod ways;

pub use crate::program::{Copy, Engine, Gpus, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape, Violation, validate};
pub use bound::TimeBound;
pub use candidates::{Reason, Rejection};
pub use json::PlanJson;
pub use lower::{DirectOp, Piece, StagedPath, copying_device, lower};
pub use options::{Options, Passing, PlanError, Relays, Tuned, WEIGHTS};
pub use partition::{PartitionForecast, PartitionVariant, forecast_engines, partition, partition_variants};
pub use planned::{PathPlan, Plan, ThreadUse, TransferPlan};
pub use planner::plan;
pub use timeline::OpPaths;
pub use trees::LEAST_BYTES as LEAST_SHARED_BYTES;
