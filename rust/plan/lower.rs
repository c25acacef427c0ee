//! From shares to a program: the one place where operations are made.

use super::program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use crate::topology::DeviceId;
use smallvec::{SmallVec, smallvec};

/// Copies that one operation does on the direct route: whole transfers, or a transfer's direct share.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DirectOp {
    pub device: DeviceId,
    /// As [`Lane::also`]; the same for all operations of a lane.
    pub also: Option<DeviceId>,
    pub mechanism: Mechanism,
    pub pieces: SmallVec<[Piece; 1]>,
}

/// A range of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub transfer: u32,
    pub offset: u64,
    pub bytes: u64,
}

/// A staged path's work.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct StagedPath {
    pub piece: Piece,
    pub via: DeviceId,
    /// Devices whose copy engines do the first and the second hop.
    pub lanes: [DeviceId; 2],
    pub chunk_bytes: u64,
    pub slots: u32,
}

/// The device that issues a copy: the source where it is a GPU, because pushing over NVLink is never slower than pulling
/// (378 against 372 GB/s at 64 MiB in the readings), else the destination.
pub(crate) fn copying_device(src: DeviceId, dst: DeviceId) -> DeviceId {
    if src.is_host() { dst } else { src }
}

/// Direct operations stand first: they are few and long, so the issuing thread starts them before it feeds the pipelines, whose
/// chunks then follow round-robin over the paths.
pub(crate) fn lower<K: PartialEq>(
    transfers: Vec<u64>,
    direct: &[DirectOp],
    lane_key: impl Fn(&DirectOp) -> K,
    staged: &[StagedPath],
) -> Program {
    let mut program = Program { transfers, ..Program::default() };
    // A lane costs a stream and an event.
    let mut lanes: Vec<(K, LaneId)> = Vec::new();
    for op in direct {
        let key = lane_key(op);
        let lane = match lanes.iter().find(|lane| lane.0 == key) {
            Some(&(_, lane)) => lane,
            None => {
                let lane = program.lane(Lane { device: op.device, also: op.also });
                lanes.push((key, lane));
                lane
            }
        };
        let copies = op.pieces.iter().map(|p| p.copy(p.source(0), p.destination(0), p.bytes)).collect();
        program.push(lane, op.mechanism, copies, SmallVec::new());
    }

    struct Pipeline {
        path: StagedPath,
        lanes: [LaneId; 2],
        ring: RingId,
        /// The second hop of each chunk so far: what frees its slot.
        freed: Vec<OpId>,
    }
    let mut pipelines: Vec<Pipeline> = staged
        .iter()
        .map(|&path| {
            let lanes = path.lanes.map(|device| program.lane(Lane::new(device)));
            let ring = RingId(program.rings.len() as u32);
            program.rings.push(Ring { device: path.via, slot_bytes: path.chunk_bytes, slots: path.slots });
            Pipeline { path, lanes, ring, freed: Vec::with_capacity(path.chunks()) }
        })
        .collect();
    for chunk in 0..staged.iter().map(StagedPath::chunks).max().unwrap_or(0) {
        for pipeline in pipelines.iter_mut().filter(|p| chunk < p.path.chunks()) {
            let StagedPath { piece, chunk_bytes, slots, .. } = pipeline.path;
            let begin = chunk as u64 * chunk_bytes;
            let bytes = chunk_bytes.min(piece.bytes - begin);
            let slot = Place::Slot { ring: pipeline.ring, slot: chunk as u32 % slots };
            let reused = chunk.checked_sub(slots as usize).map(|earlier| pipeline.freed[earlier]);
            let arrived = program.push(
                pipeline.lanes[0],
                Mechanism::Copy,
                smallvec![piece.copy(piece.source(begin), slot, bytes)],
                reused.into_iter().collect(),
            );
            let copy = piece.copy(slot, piece.destination(begin), bytes);
            pipeline.freed.push(program.push(pipeline.lanes[1], Mechanism::Copy, smallvec![copy], smallvec![arrived]));
        }
    }
    program
}

impl StagedPath {
    pub fn chunks(&self) -> usize {
        self.piece.bytes.div_ceil(self.chunk_bytes) as usize
    }
}

impl Piece {
    fn source(&self, begin: u64) -> Place {
        Place::Source { transfer: self.transfer, offset: self.offset + begin }
    }
    fn destination(&self, begin: u64) -> Place {
        Place::Destination { transfer: self.transfer, offset: self.offset + begin }
    }
    fn copy(&self, from: Place, to: Place, bytes: u64) -> Copy {
        Copy { from, to, bytes }
    }
}

impl Program {
    fn lane(&mut self, lane: Lane) -> LaneId {
        self.lanes.push(lane);
        LaneId(self.lanes.len() as u32 - 1)
    }
    fn push(&mut self, lane: LaneId, mechanism: Mechanism, copies: SmallVec<[Copy; 1]>, after: SmallVec<[OpId; 2]>) -> OpId {
        self.ops.push(Op { lane, mechanism, copies, after });
        OpId(self.ops.len() as u32 - 1)
    }
}
