//! Plans transfers: candidate paths, their shares, chunks and mechanisms, and the lowering to a program.
//!
//! | file | purpose |
//! | --- | --- |
//! | `planner` | plans a batch: one path for each transfer or several, whichever the model finds faster |
//! | `options`, `planned` | input and output of planning |
//! | `demand` | equal transfers that are planned as one |
//! | `candidates` | possible paths of a transfer, and the reasons against others |
//! | `selection` | the candidates of a batch that are still open |
//! | `choose` | which of them carry bytes, and how many |
//! | `split` | bytes for each path, by linear program |
//! | `balance` | bytes with which paths end together where links are shared fairly |
//! | `shares` | whole bytes for each transfer and path |
//! | `staging` | rings, slots and the size of chunks |
//! | `alternative` | shares with their operations and modelled times |
//! | `mechanism` | plain copies, a batched call or a kernel, and who issues them |
//! | `executor` | streams or a graph |
//! | `pageable` | copies of pageable host memory by threads |
//! | `lower` | shares to a [`Program`] |
//! | `trees` | bytes that several devices forward: one source for many destinations, and paths over several relays |
//! | `network` | the devices of a machine as a network for the bytes of a batch |
//! | `ways` | the cheapest ways and trees through it under prices |
//! | `flow` | optimal flow of bytes over any number of relays, and the prices that prove it |
//! | `partition` | plans of transfers that move in partitions |
//! | `bound` | lower bound of the time of a batch, and the limiting resource |
//! | `describe`, `json`, `reasons`, `timeline` | a plan for people and for programs, in words and as a picture |
//!
//! Pure: no backend, no driver, no clock. The same machine, transfers and options give the same plan.

mod alternative;
mod balance;
mod bound;
mod candidates;
mod choose;
mod demand;
mod describe;
mod executor;
mod flow;
mod json;
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
