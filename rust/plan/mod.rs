//! From transfers to a program: candidate paths, the split, chunks, lowering, and the proof that the result is right.
//!
//! | file | one idea |
//! | --- | --- |
//! | `candidates` | the paths that a transfer could take, and why others can't help |
//! | `split` | bytes for each path, by linear program |
//! | `balance` | shares of paths that end together where links are shared fairly |
//! | `choose` | the split with its chunks and slots, or one path for each transfer |
//! | `kinds` | the same for very many transfers |
//! | `mechanism` | plain copies, a batched call or a kernel, and who issues them |
//! | `executor` | streams or a graph |
//! | `lower` | shares to a [`Program`] |
//! | `validate` | the proof that a program is right |
//! | `describe` | a plan for people and for machines |
//! | `reasons` | why paths were left out, in words |
//! | `timeline` | when its operations ran, for a picture |
//!
//! Pure: no backend, no driver, no clock. The same machine, transfers and options give the same plan.

mod balance;
mod candidates;
mod choose;
mod describe;
mod executor;
mod kinds;
mod lower;
mod mechanism;
mod program;
mod reasons;
mod split;
mod timeline;
mod validate;

pub use candidates::{Reason, Rejection};
pub use program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
pub use validate::{Violation, validate};

use crate::backend::MemoryKind;
use crate::model::{Flow, GRAIN, finish_issued};
use crate::topology::{DeviceId, Machine};
use crate::units::devices;
use choose::{Field, NoRoom, Share};
pub(crate) use lower::{DirectOp, Piece, StagedPath, copying_device, lower};
use mechanism::Launch;
use smallvec::SmallVec;
use std::sync::Arc;

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
    /// Copies and fused kernels as one graph launch.
    Graph,
    /// Direct copies in batched calls.
    Batch,
    /// Direct copies between GPU memories in fused kernels.
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
    /// Whether other processes of the node plan at the same time, each for itself: then a copy between GPUs that has another path keeps off
    /// host memory, where the paths of all of them meet.
    pub alone: bool,
    /// Bytes of one chunk on staged paths, 4096 or more. Smaller where the staging bound asks for it.
    pub chunk_bytes: Option<u64>,
    /// Transfers below this size take one path.
    pub min_bytes: Option<u64>,
    /// The most staging memory on each device, bytes.
    pub staging_bytes: u64,
    /// What measurements say about the split, where a tuning file is in force.
    pub tuned: Option<Tuned>,
}

/// Corrections of the split that were measured ([`crate::tune`]). The split is the model's; what the model has wrong about the rates of
/// paths shows up in the best shares, and these factors carry it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// Weight of the shares of paths through host memory, in thousandths: 1000 leaves the model's. In [`WEIGHTS`].
    pub host_share: u16,
    /// The same for paths through another GPU.
    pub relay_share: u16,
    /// Several paths were measured to be faster than one: they are taken even where the model sees no gain in them.
    pub several: bool,
}

impl Default for Tuned {
    fn default() -> Self {
        Tuned { host_share: 1000, relay_share: 1000, several: false }
    }
}

/// Accepted weights of [`Tuned`], in thousandths: beyond them a path is better left out, or the topology is wrong.
pub const WEIGHTS: std::ops::RangeInclusive<u16> = 50..=20_000;

impl Default for Options {
    fn default() -> Self {
        Options {
            engine: Engine::Auto,
            max_paths: u32::MAX,
            host_path: true,
            alone: false,
            chunk_bytes: None,
            min_bytes: None,
            staging_bytes: 64 << 20,
            tuned: None,
        }
    }
}

/// A path of a transfer, as planned.
#[derive(Clone, Debug, PartialEq)]
pub struct PathPlan {
    /// The device whose memory the bytes are staged in; `None` for the direct path.
    pub via: Option<DeviceId>,
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
    /// Paths in use; none for zero bytes.
    pub paths: Vec<PathPlan>,
    /// Paths that were considered and left out, each with its reason.
    pub rejected: Vec<Rejection>,
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
    /// Modelled seconds from issue to the last byte.
    pub predicted: f64,
    /// The same with one path for each transfer.
    pub one_path: f64,
}

/// Why a batch can't be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("transfer {transfer}: device {} does not exist: this machine has {}", device.0, devices(*gpus, *hosts))]
    InvalidDevice { transfer: usize, device: DeviceId, gpus: u32, hosts: u32 },
    #[error(
        "transfer {transfer}: no copy engine can move bytes from device {} to device {}, neither directly nor through one other device: \
         give the topology a link between them{}",
        src.0, dst.0, if *host_path { "" } else { ", or allow the host path" }
    )]
    NoRoute { transfer: usize, src: DeviceId, dst: DeviceId, host_path: bool },
    #[error("{name}={value}: must be {least} or more")]
    Option { name: &'static str, value: u64, least: u64 },
    #[error(
        "{name}={value}: must be from {} to {} thousandths of the model's share",
        WEIGHTS.start(), WEIGHTS.end()
    )]
    Weight { name: &'static str, value: u16 },
    #[error(
        "transfer {transfer}: must be staged on another device, but staging_bytes={staging_bytes} leaves its ring {ring_bytes} bytes: \
         {} or more are needed for each ring",
        2 * GRAIN
    )]
    Staging { transfer: usize, staging_bytes: u64, ring_bytes: u64 },
    #[error("{0} transfers: a batch has at most {max}", max = u32::MAX)]
    TooManyTransfers(usize),
}

/// The least gain for which several paths are taken. Figures differ by a few per cent between hosts of the same kind, so a smaller
/// modelled gain is as likely a loss.
const LEAST_GAIN: f64 = 0.02;

/// Plans a batch of transfers together.
///
/// Never slower than one path for each transfer, as far as the model knows: several paths are used only where they are expected
/// to gain 2 % or more over it, or where [`Tuned::several`] says that they were measured to.
pub fn plan(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    check(machine, batch, options)?;
    let mut field = Field::new(machine, batch, options, Vec::new());
    let mut rejected = Vec::with_capacity(batch.len());
    for (transfer, shape) in batch.iter().enumerate() {
        let begin = field.candidates.len();
        let mut reasons = Vec::new();
        if shape.bytes > 0 {
            candidates::candidates(machine, transfer as u32, shape, options, &mut field.candidates, &mut reasons);
            if field.candidates.len() == begin {
                let (src, dst) = (shape.src_device, shape.dst_device);
                return Err(PlanError::NoRoute { transfer, src, dst, host_path: options.host_path });
            }
        }
        field.of.push(begin..field.candidates.len());
        rejected.push(reasons);
    }
    field.out = vec![None; field.candidates.len()];

    let no_room = |NoRoom { transfer, ring_bytes }| {
        let staging_bytes = options.staging_bytes;
        PlanError::Staging { transfer: transfer as usize, staging_bytes, ring_bytes }
    };
    let one_path = field.one_path().map_err(no_room)?;
    let single = Schedule::new(&field, one_path);
    let measured = options.tuned.is_some_and(|tuned| tuned.several);
    let mut chosen = None;
    if !measured && mechanism::are_turns(machine, batch, &single.launches) {
        let others = field.candidates.iter().zip(&mut field.out).filter(|(candidate, _)| candidate.via.is_some());
        others.for_each(|(_, out)| *out = Some(Reason::Turns));
    } else if let Some(shares) =
        if batch.len() > kinds::MANY { field.several_paths_by_kind(single.finish) } else { field.several_paths(single.finish) }
    {
        let several = Schedule::new(&field, shares);
        if measured || several.finish <= single.finish * (1.0 - LEAST_GAIN) {
            chosen = Some(several);
        } else {
            for share in several.shares.iter().map(|share| share.candidate) {
                let reason = Reason::NotFaster { seconds: several.finish, one_path: single.finish };
                field.out[share].get_or_insert(reason);
            }
        }
    }
    let one_path = single.finish;
    Ok(chosen.unwrap_or(single).into_plan(field, rejected, one_path))
}

fn check(machine: &Machine, batch: &[Shape], options: &Options) -> Result<(), PlanError> {
    if u32::try_from(batch.len()).is_err() {
        return Err(PlanError::TooManyTransfers(batch.len()));
    }
    if options.max_paths == 0 {
        return Err(PlanError::Option { name: "max_paths", value: 0, least: 1 });
    }
    if let Some(value) = options.chunk_bytes.filter(|&bytes| bytes < GRAIN) {
        return Err(PlanError::Option { name: "chunk_bytes", value, least: GRAIN });
    }
    if let Some(tuned) = options.tuned {
        for (name, value) in [("host_share", tuned.host_share), ("relay_share", tuned.relay_share)] {
            if !WEIGHTS.contains(&value) {
                return Err(PlanError::Weight { name, value });
            }
        }
    }
    for (transfer, shape) in batch.iter().enumerate() {
        if let Some(device) = [shape.src_device, shape.dst_device].into_iter().find(|&device| !machine.contains(device)) {
            return Err(PlanError::InvalidDevice { transfer, device, gpus: machine.gpu_count(), hosts: machine.host_count() });
        }
    }
    Ok(())
}

/// Shares with their operations and modelled times.
struct Schedule {
    shares: Vec<Share>,
    launches: Vec<Launch>,
    /// For each share its mechanism and its modelled end.
    ends: Vec<(Mechanism, f64)>,
    finish: f64,
}

impl Schedule {
    fn new(field: &Field<'_>, shares: Vec<Share>) -> Self {
        let Field { machine, batch, options, candidates, .. } = field;
        let costs = machine.costs();
        let launches = mechanism::launches(machine, batch, options, candidates, &shares);
        let flows: Vec<(usize, Flow)> = mechanism::flows(machine, batch, candidates, &shares, mechanism::issued(&launches));
        let mut operations = launches.len();
        let mut ends = vec![(Mechanism::Copy, 0.0); shares.len()];
        for launch in &launches {
            launch.shares.iter().for_each(|&at| ends[at].0 = launch.op.mechanism);
        }
        // Pipelines start after the direct operations, one after the other.
        let staged = (0..shares.len()).filter(|&at| candidates[shares[at].candidate].via.is_some());
        let issue = executor::issue(options, costs);
        for (at, flow) in &flows {
            ends[*at].1 = flow.alone(costs);
        }
        // Paths that share a ring are one pipeline.
        let mut pipelines: Vec<Flow> = Vec::new();
        for at in staged {
            let share = &shares[at];
            if share.ring as usize == pipelines.len() {
                let head = costs.copy + issue * (launches.len() + 2 * pipelines.len()) as f64;
                pipelines.push(Flow { path: &candidates[share.candidate].model, bytes: 0, chunks: 0, head, efficiency: 1.0 });
            }
            let pipeline = &mut pipelines[share.ring as usize];
            (pipeline.bytes, pipeline.chunks) = (pipeline.bytes + share.bytes, pipeline.chunks.saturating_add(share.chunks()));
            ends[at].1 = pipeline.alone(costs);
            operations += 2 * share.chunks() as usize;
        }
        let issue = if operations > launches.len() { issue } else { costs.issue };
        let issued = if operations == 0 { 0.0 } else { costs.copy + issue * (operations - 1) as f64 };
        // The caller's stream is on one GPU, and what others issue is joined with it, as staged paths are.
        let joins = operations == launches.len() && mechanism::joins(&launches);
        let finish = finish_issued(machine, flows.into_iter().map(|flow| flow.1).chain(pipelines), issued)
            + if joins { costs.gpu_join } else { 0.0 };
        Schedule { shares, launches, ends, finish }
    }

    fn into_plan(self, field: Field<'_>, rejected: Vec<Vec<Rejection>>, one_path: f64) -> Plan {
        let Field { machine, batch, candidates, of, out, options, .. } = field;
        let mut transfers: Vec<TransferPlan> =
            batch.iter().zip(rejected).map(|(&shape, rejected)| TransferPlan { shape, paths: Vec::new(), rejected }).collect();
        let mut used = vec![false; candidates.len()];
        let mut staged: Vec<StagedPath> = Vec::new();
        for (share, &(mechanism, seconds)) in self.shares.iter().zip(&self.ends) {
            used[share.candidate] = true;
            let candidate = &candidates[share.candidate];
            let Share { offset, bytes, chunk_bytes, slots, slot_bytes, ring, .. } = *share;
            let shape = &batch[candidate.transfer as usize];
            transfers[candidate.transfer as usize].paths.push(PathPlan {
                via: candidate.via,
                offset,
                bytes,
                chunks: share.chunks(),
                chunk_bytes,
                slots,
                mechanism,
                seconds,
            });
            if let Some(via) = candidate.via {
                if ring as usize == staged.len() {
                    let lanes = [copying_device(shape.src_device, via), copying_device(via, shape.dst_device)];
                    staged.push(StagedPath { pieces: SmallVec::new(), lanes, ring: Ring { device: via, slot_bytes, slots } });
                }
                staged[ring as usize].pieces.push((Piece { transfer: candidate.transfer, offset, bytes }, chunk_bytes));
            }
        }
        for (transfer, of) in of.into_iter().enumerate() {
            let left_out =
                of.filter(|&i| !used[i]).map(|i| Rejection { via: candidates[i].via, reason: out[i].clone().unwrap_or(Reason::NoShare) });
            transfers[transfer].rejected.extend(left_out);
        }
        let direct: Vec<_> = self.launches.into_iter().map(|launch| launch.op).collect();
        let bytes = batch.iter().map(|shape| shape.bytes).collect();
        let program = lower(bytes, &direct, mechanism::lane_key(machine, batch, &direct), &staged);
        let executor = executor::executor(machine, batch, options, &program);
        Plan { transfers, program: Arc::new(program), options: *options, executor, predicted: self.finish, one_path }
    }
}
