//! From shares to a program: the one place where operations are made.

use crate::program::{Copy, Gpus, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use crate::topology::DeviceId;
use smallvec::{SmallVec, smallvec};

/// Copies that one operation does on the direct route: whole transfers, or a transfer's direct share.
#[derive(Clone, Debug, PartialEq)]
pub struct DirectOp {
    /// As [`Lane::device`].
    pub device: DeviceId,
    /// As [`Lane::also`]; the same for all operations of a lane.
    pub also: Gpus,
    /// How the bytes are moved.
    pub mechanism: Mechanism,
    /// What is moved.
    pub pieces: SmallVec<[Piece; 1]>,
}

/// A range of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the transfer in its batch.
    pub transfer: u32,
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// The work of a pipeline: pieces between the same two devices that follow each other through one ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedPath {
    /// In the order in which they pass. A chunk is as large as a slot of the ring.
    pub pieces: SmallVec<[Piece; 1]>,
    /// Devices whose copy engines do the first and the second hop.
    pub lanes: [DeviceId; 2],
    /// The slots that they pass through.
    pub ring: Ring,
}

/// The device that issues a copy: the source where it is a GPU, because pushing over NVLink is never slower than pulling
/// (378 against 372 GB/s at 64 MiB in the readings), else the destination.
pub fn copying_device(src: DeviceId, dst: DeviceId) -> DeviceId {
    if src.is_host() { dst } else { src }
}

/// Direct operations stand first: they are few and long, so the issuing thread starts them before it feeds the pipelines, whose
/// chunks then follow round-robin over the paths.
pub fn lower<K: PartialEq>(transfers: Vec<u64>, direct: &[DirectOp], lane_key: impl Fn(&DirectOp) -> K, staged: &[StagedPath]) -> Program {
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

    let mut pipelines: Vec<Pipeline<'_>> = staged
        .iter()
        .map(|path| {
            let lanes = path.lanes.map(|device| program.lane(Lane::new(device)));
            let ring = RingId(program.rings.len() as u32);
            program.rings.push(path.ring);
            let chunk_bytes = path.ring.slot_bytes;
            Pipeline { pieces: &path.pieces, chunk_bytes, begin: 0, lanes, ring, next: 0, freed: vec![None; path.ring.slots as usize] }
        })
        .collect();
    while !pipelines.is_empty() {
        pipelines.retain_mut(|pipeline| pipeline.push_chunk(&mut program));
    }
    program
}

/// A staged path of which the first chunks are in the program.
struct Pipeline<'a> {
    /// The one whose chunks come next stands first.
    pieces: &'a [Piece],
    chunk_bytes: u64,
    /// Bytes of it that are in the program.
    begin: u64,
    lanes: [LaneId; 2],
    ring: RingId,
    /// The slot of the next chunk.
    next: usize,
    /// For each slot the second hop of the last chunk in it.
    freed: Vec<Option<OpId>>,
}

impl Pipeline<'_> {
    /// Appends both hops of the next chunk; false if there is none.
    fn push_chunk(&mut self, program: &mut Program) -> bool {
        let Some((&piece, rest)) = self.pieces.split_first() else { return false };
        let (begin, number) = (self.begin, self.next);
        let bytes = self.chunk_bytes.min(piece.bytes - begin);
        (self.begin, self.pieces) = if begin + bytes < piece.bytes { (begin + bytes, self.pieces) } else { (0, rest) };
        self.next = (number + 1) % self.freed.len();
        let slot = Place::Slot { ring: self.ring, slot: number as u32 };
        let copy = piece.copy(piece.source(begin), slot, bytes);
        let arrived = program.push(self.lanes[0], Mechanism::Copy, smallvec![copy], self.freed[number].into_iter().collect());
        let copy = piece.copy(slot, piece.destination(begin), bytes);
        self.freed[number] = Some(program.push(self.lanes[1], Mechanism::Copy, smallvec![copy], smallvec![arrived]));
        true
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
