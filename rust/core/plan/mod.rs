//! Plans a batch of transfers: selects paths, divides the data among them, chooses chunk sizes and copy mechanisms, and creates a program.
//!
//! | file | purpose |
//! | --- | --- |
//! | `planner` | plans a batch: proposes complete plans and returns the fastest |
//! | `options`, `planned` | input and output of the planner |
//! | `judge` | simulates the proposed programs and keeps the fastest |
//! | `canonical` | order of GPUs and transfers in which a batch is planned, so that the caller's order does not change the plan |
//! | `apart` | parts of a batch that share no resource, and their common plan |
//! | `demand` | combines equal transfers so that they are planned together |
//! | `candidates` | possible paths of a transfer, and the reasons why other paths are excluded |
//! | `selection` | candidate paths of a batch that have not been excluded |
//! | `choose` | chooses the candidates that carry data, and the number of bytes for each |
//! | `split` | computes the bytes for each path with a linear program |
//! | `balance` | adjusts the bytes so that all paths finish together if links are shared fairly |
//! | `shares` | rounds to whole bytes for each transfer and path |
//! | `staging` | staging rings, their slots, and the size of chunks |
//! | `alternative` | plan that may be proposed: division of the data, operations and program |
//! | `mechanism` | chooses individual copies, a batched call or a kernel, and the GPU that issues them |
//! | `pageable` | copies of pageable host memory by CPU threads |
//! | `lower` | converts the division of the data to a [`Program`] |
//! | `trees` | data that several devices forward: one source for many destinations, and paths over several relays |
//! | `rounds` | schedule of a broadcast in blocks: each device sends and receives at most one block at a time |
//! | `network` | devices and copies of a machine as a flow network |
//! | `ways` | cheapest paths and trees through the network under given resource prices |
//! | `flow` | optimal flow over any number of relays, and the resource prices that prove it optimal |
//! | `partition` | plans of transfers whose data becomes ready in partitions |
//! | `bound` | lower bound of the time of a batch, and the resources that limit it |
//! | `describe`, `json`, `reasons`, `timeline` | output of a plan as text, as JSON and as a picture |
//!
//! The planner is pure: it uses no backend, no driver and no clock. The same machine, transfers and options give the same plan.

mod alternative;
mod apart;
mod balance;
mod bound;
mod candidates;
mod canonical;
mod choose;
mod demand;
mod describe;
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
mod rounds;
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
