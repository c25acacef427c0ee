//! The ranks of a node that plan together: one process for each GPU, or several. Contexts know nothing of them.
//!
//! A [`NodeGroup`] is made by all ranks together, and so is each [`NodePlan`]. All ranks make the same plan from the same transfers, on a
//! machine that has the GPUs of all of them, also of those that a rank does not see. [`divide`](mpgpu_core::program::ranks::divide) gives each
//! its part; executing it takes no call to another rank.
//!
//! | file | promise |
//! | --- | --- |
//! | `group` | the ranks of a node, as one of them sees them |
//! | `exchange` | what ranks tell each other, call by call; who fails, fails on all |
//! | `rendezvous` | ranks that meet at a socket, without MPI |
//! | `transfers` | what ranks hand in to a plan |
//! | `planning` | how ranks come to a plan: that it fails on all or none |
//! | `together` | what all compute alike: the plan, everybody's part, the flags between them |
//! | `addresses`, `binding` | where everything lies in this process, and a part that is bound to it |
//! | `steps` | a plan as one rank executes it |
//! | `part` | one rank's part, enqueued |
//! | `eager` | steps in which ranks put few bytes into each other's inboxes, and nobody asks |
//! | `agreed` | which variant of a plan all ranks take in a step |
//! | `lateness` | whether a kernel or streams wait for ranks that may be late |
//! | [`message`] | messages between ranks, matched as MPI does |
//! | `partitioning` | who moves partitions, and in how many |
//! | `partitioned` | transfers that move in partitions, as these become ready |
//! | `order` | in which order streams take steps of several plans, held against that of other ranks |
//! | `trials` | which way partitions move fastest |
//! | `progress` | how far a rank has come, and those that have left |
//! | `sight` | how GPUs are joined, those out of sight included |

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
