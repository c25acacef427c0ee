//! Implements node plans. The ranks of a node plan their transfers together once, and then execute the plan together in each communication
//! step, without calls to each other in the time loop.
//!
//! A rank is usually a process that uses one GPU. All ranks create a [`NodeGroup`] together, and from it each [`NodePlan`]. Rank 0 plans the
//! transfers of all ranks and sends the plan to the other ranks. The planned machine contains the GPUs of all ranks, including GPUs that are
//! not visible to some of them. Only if the transfers move in partitions, every rank computes the plan itself, with the same result.
//! [`divide`](mpgpu_core::program::ranks::divide) splits the plan into one part per rank, which contains the operations that this rank
//! performs. Executing a part needs no call to another rank, because flags in shared memory order the parts. The
//! crate `contexts` does not depend on this crate.
//!
//! | file | content |
//! | --- | --- |
//! | `group` | the group of all ranks of a node: how they connect, and which rank uses each GPU |
//! | `exchange` | collective calls: the data that ranks exchange, and the rule that a failure on one rank fails the call on all |
//! | `rendezvous` | an allgather over a Unix socket, for ranks without MPI |
//! | `transfers` | the transfers and memory windows (memory ranges) that ranks pass to a plan |
//! | `planning` | creation of a plan, which succeeds or fails on all ranks |
//! | `together` | the values that are identical on every rank: the plan, the parts, and the flags that order them |
//! | `wire` | conversion of a plan to the numbers that rank 0 sends, and back |
//! | `addresses`, `binding` | the addresses of a plan in this process, and one rank's part bound to these addresses |
//! | `steps` | the execution of a plan on one rank |
//! | `part` | the streams and the kernel that execute one rank's part |
//! | `eager` | steps with small transfers, in which ranks write into each other's inboxes without a handshake |
//! | `agreed` | the agreement of all ranks on the plan variant of each step |
//! | `lateness` | the choice between a kernel and streams for waiting on ranks that may be late |
//! | [`message`] | messages between ranks, with MPI's matching rules |
//! | `partitioning` | the options of partitioned transfers: what moves the partitions, and the number of partitions |
//! | `partitioned` | transfers whose partitions move as soon as they are ready |
//! | `order` | detection of ranks that enqueue steps of several plans in different orders |
//! | `trials` | measurement of the fastest way to move partitions |
//! | `progress` | the step counters of a rank, and the reports of ranks that have stopped executing a plan |
//! | `sight` | the connections of the node's GPUs, including GPUs that are not visible here |

mod addresses;
mod agreed;
mod binding;
mod eager;
mod exchange;
mod group;
mod lateness;
pub mod message;
mod order;
mod part;
mod partitioned;
mod partitioning;
mod planning;
mod progress;
mod rendezvous;
mod sight;
mod steps;
mod together;
mod transfers;
mod trials;
mod wire;

pub use exchange::{Allgather, Alone, Collective, MOST_RANKS};
pub use group::{NodeGroup, meet_at};
pub use partitioned::Trigger;
pub use partitioning::{Agent, Partitioning};
pub use steps::NodePlan;
pub use transfers::{NodeEnd, NodeTransfer, Window};
pub use trials::{PartitionTrials, Produce};

use mpgpu_backend as backend;
use mpgpu_backend::sync;
use mpgpu_contexts as contexts;
use mpgpu_core::{adapt, headroom, plan, program, rank, topology, units};
use mpgpu_ipc as ipc;
use mpgpu_measure::tune;
