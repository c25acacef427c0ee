//! A plan as numbers, in which rank 0 sends it to the other ranks.
//!
//! The batch and the common options are not sent, because every rank has them. The reasons for rejected paths stay with rank 0.

use crate::plan::{
    Copy, Engine, Gpus, Lane, LaneId, Mechanism, Op, OpId, Options, Passing, PathPlan, Place, Plan, Program, Relays, Ring, RingId, Shape,
    TransferPlan, Tuned,
};
use crate::topology::DeviceId;
use std::sync::Arc;

const MECHANISMS: [Mechanism; 4] = [Mechanism::Copy, Mechanism::Batch, Mechanism::Kernel, Mechanism::Thread];
const ENGINES: [Engine; 5] = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];
const PASSING: [Passing; 3] = [Passing::Off, Passing::CopyEngines, Passing::Kernels];

/// Returns the numbers of a plan without copy threads.
pub(super) fn encode(plan: &Plan) -> Vec<u64> {
    let mut out = Writer(Vec::new());
    out.options(&plan.options);
    out.place_in(&ENGINES, plan.executor);
    out.0.extend([plan.predicted.to_bits(), plan.one_path.to_bits()]);
    for transfer in &plan.transfers {
        out.list(transfer.paths.iter(), Writer::path);
    }
    let Program { transfers, sources, lanes, rings, ops } = &*plan.program;
    out.list(transfers.iter(), |out, bytes| out.0.push(*bytes));
    out.list(sources.iter(), |out, source| out.0.push(u64::from(*source)));
    out.list(lanes.iter(), |out, lane| {
        out.device(lane.device);
        out.list(lane.also.iter(), |out, gpu| out.device(gpu));
    });
    out.list(rings.iter(), |out, ring| {
        out.device(ring.device);
        out.0.extend([ring.slot_bytes, u64::from(ring.slots)]);
    });
    out.list(ops.iter(), |out, op| {
        out.0.push(u64::from(op.lane.0));
        out.place_in(&MECHANISMS, op.mechanism);
        out.list(op.copies.iter(), |out, copy| {
            out.place(copy.from);
            out.place(copy.to);
            out.0.push(copy.bytes);
        });
        out.list(op.after.iter(), |out, before| out.0.push(u64::from(before.0)));
    });
    out.0
}

/// Returns the plan of a batch from its numbers. `options` are common to all ranks. `None` if the numbers do not describe such a plan.
pub(super) fn decode(numbers: &[u64], batch: &[Shape], options: &Options) -> Option<Plan> {
    let mut from = Reader(numbers);
    let options = from.options(options)?;
    let executor = from.one_of(&ENGINES)?;
    let [predicted, one_path] = [f64::from_bits(from.number()?), f64::from_bits(from.number()?)];
    let transfer =
        |shape: &Shape| Some(TransferPlan { shape: *shape, paths: Arc::new(from.list(Reader::path)?), rejected: Arc::default() });
    let transfers = batch.iter().map(transfer).collect::<Option<Vec<TransferPlan>>>()?;
    let program = Program {
        transfers: from.list(Reader::number)?,
        sources: from.list(Reader::small)?,
        lanes: from.list(|from| Some(Lane { device: from.device()?, also: from.list(Reader::device)?.into_iter().collect::<Gpus>() }))?,
        rings: from.list(|from| Some(Ring { device: from.device()?, slot_bytes: from.number()?, slots: from.small()? }))?,
        ops: from.list(|from| {
            Some(Op {
                lane: LaneId(from.small()?),
                mechanism: from.one_of(&MECHANISMS)?,
                copies: from.list(|from| Some(Copy { from: from.place()?, to: from.place()?, bytes: from.number()? }))?.into(),
                after: from.list(|from| from.small().map(OpId))?.into(),
            })
        })?,
    };
    let is_whole = from.0.is_empty() && program.transfers.len() == batch.len();
    is_whole.then(|| Plan { transfers, program: Arc::new(program), options, executor, threads: None, predicted, one_path })
}

struct Writer(Vec<u64>);

impl Writer {
    fn list<T>(&mut self, items: impl Iterator<Item = T> + Clone, write: impl Fn(&mut Writer, T)) {
        self.0.push(items.clone().count() as u64);
        items.for_each(|item| write(self, item));
    }

    fn place_in<T: PartialEq>(&mut self, all: &[T], one: T) {
        self.0.push(all.iter().position(|known| *known == one).map_or(u64::MAX, |at| at as u64));
    }

    fn device(&mut self, device: DeviceId) {
        self.0.push(u64::from(device.0 as u32));
    }

    fn place(&mut self, place: Place) {
        self.0.extend(match place {
            Place::Source { transfer, offset } => [0, u64::from(transfer), offset],
            Place::Destination { transfer, offset } => [1, u64::from(transfer), offset],
            Place::Slot { ring, slot } => [2, u64::from(ring.0), u64::from(slot)],
        });
    }

    fn path(&mut self, path: &PathPlan) {
        self.list(path.earlier.iter().chain(&path.via), |out, via| out.device(*via));
        self.0.extend([path.offset, path.bytes, u64::from(path.chunks), path.chunk_bytes, u64::from(path.slots)]);
        self.place_in(&MECHANISMS, path.mechanism);
        self.0.push(path.seconds.to_bits());
    }

    /// Writes the options in which variants of a plan differ.
    fn options(&mut self, options: &Options) {
        self.0.extend([u64::from(options.max_paths), u64::from(options.host_path), u64::from(options.threads)]);
        self.place_in(&PASSING, options.passing);
        self.0.push(u64::from(options.relays == Relays::ALL));
        self.list((0..Relays::NAMED).map(DeviceId::gpu).filter(|gpu| options.relays.has(*gpu)), Writer::device);
        self.list(options.tuned.iter(), |out, tuned| {
            out.0.extend([u64::from(tuned.host_share), u64::from(tuned.relay_share), u64::from(tuned.several)]);
        });
    }
}

struct Reader<'a>(&'a [u64]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    fn list<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = usize::try_from(self.number()?).ok()?;
        // Each item is one number at least.
        (count <= self.0.len()).then(|| (0..count).map(|_| read(self)).collect())?
    }

    fn one_of<T: std::marker::Copy>(&mut self, all: &[T]) -> Option<T> {
        all.get(usize::try_from(self.number()?).ok()?).copied()
    }

    fn device(&mut self) -> Option<DeviceId> {
        self.small().map(|device| DeviceId(device as i32))
    }

    fn place(&mut self) -> Option<Place> {
        let [kind, first, second] = [self.number()?, self.number()?, self.number()?];
        let number = u32::try_from(first).ok()?;
        match kind {
            0 => Some(Place::Source { transfer: number, offset: second }),
            1 => Some(Place::Destination { transfer: number, offset: second }),
            2 => Some(Place::Slot { ring: RingId(number), slot: second.try_into().ok()? }),
            _ => None,
        }
    }

    fn path(&mut self) -> Option<PathPlan> {
        let mut vias = self.list(Reader::device)?;
        let via = vias.pop();
        Some(PathPlan {
            via,
            earlier: vias.into(),
            offset: self.number()?,
            bytes: self.number()?,
            chunks: self.small()?,
            chunk_bytes: self.number()?,
            slots: self.small()?,
            mechanism: self.one_of(&MECHANISMS)?,
            seconds: f64::from_bits(self.number()?),
        })
    }

    fn options(&mut self, options: &Options) -> Option<Options> {
        let (max_paths, host_path, threads) = (self.small()?, self.number()? != 0, self.small()?);
        let passing = self.one_of(&PASSING)?;
        let (is_all, named) = (self.number()? != 0, self.list(|from| from.small())?);
        let relays = if is_all { Relays::ALL } else { named.into_iter().collect() };
        let tuned = self.list(|from| {
            let [host_share, relay_share] = [from.number()?.try_into().ok()?, from.number()?.try_into().ok()?];
            Some(Tuned { host_share, relay_share, several: from.number()? != 0 })
        })?;
        Some(Options { max_paths, host_path, threads, passing, relays, tuned: tuned.first().copied(), ..*options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::plan;
    use crate::topology::{Machine, MemoryKind, preset};

    #[test]
    fn a_plan_is_the_same_after_it_was_numbers() {
        for (name, bytes) in [("dgx1-v100", 64 << 20), ("hgx-h200", 1 << 20), ("beluga", 256 << 20)] {
            let machine = Machine::new(preset(name).expect("a preset")).expect("well formed");
            let kind = MemoryKind::Device;
            let gpus = || (0..machine.gpu_count()).map(DeviceId::gpu);
            let pairs = gpus().flat_map(|src| gpus().filter(move |dst| *dst != src).map(move |dst| (src, dst)));
            let shape = |(src_device, dst_device): (DeviceId, DeviceId)| Shape {
                source: 1 + src_device.0 as u32,
                dst_device,
                src_device,
                dst_kind: kind,
                src_kind: kind,
                bytes,
            };
            let batch: Vec<Shape> = pairs.map(shape).collect();
            let base = Options { threads: 0, ..Options::default() };
            let tuned = Tuned { host_share: 500, ..Tuned::default() };
            let others = [Options { relays: [1, 3].into_iter().collect(), ..base }, Options { tuned: Some(tuned), max_paths: 2, ..base }];
            for options in [base].into_iter().chain(others) {
                let made = plan(&machine, &batch, &options).expect("a plan");
                let numbers = encode(&made);
                let told = decode(&numbers, &batch, &base).expect("a plan");
                assert_eq!((&told.program, told.options, told.executor), (&made.program, made.options, made.executor));
                assert_eq!((told.predicted, told.one_path), (made.predicted, made.one_path));
                assert!(
                    told.transfers.iter().zip(&made.transfers).all(|(told, made)| (told.shape, &told.paths) == (made.shape, &made.paths))
                );
                // Numbers that were cut off are no plan, nor are those of another batch.
                assert!((0..numbers.len()).step_by(7).all(|count| decode(&numbers[..count], &batch, &base).is_none()));
                assert!(decode(&numbers, &batch[1..], &base).is_none());
            }
        }
    }
}
