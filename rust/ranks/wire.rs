//! Converts a plan to numbers, which rank 0 sends to the other ranks, and back.
//!
//! The numbers do not contain the batch and the options that are equal on all ranks, because every rank has them. They do not contain
//! rejected paths either, because the plan of several ranks has none.

use crate::plan::{
    Copy, Engine, Gpus, Lane, LaneId, Mechanism, Op, OpId, Options, Passing, PathPlan, Place, Plan, Program, Relays, Ring, RingId, Shape,
    TransferPlan, Tuned,
};
use crate::topology::DeviceId;
use ahash::HashMap;
use std::sync::Arc;

/// Largest amount of memory that a decoded plan needs for each number, bytes.
pub(super) const NUMBER_BYTES: usize = 64;

const MECHANISMS: [Mechanism; 4] = [Mechanism::Copy, Mechanism::Batch, Mechanism::Kernel, Mechanism::Thread];
const ENGINES: [Engine; 5] = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];
const PASSING: [Passing; 3] = [Passing::Off, Passing::CopyEngines, Passing::Kernels];

/// Marker of a copy that moves all bytes of one transfer. Any other copy begins with the kind of its source ([`Writer::place`]) in place of
/// the marker.
const WHOLE: u64 = 3;

/// Returns the numbers of a plan that uses no copy threads.
pub(super) fn encode(plan: &Plan) -> Vec<u64> {
    let mut out = Writer(Vec::new());
    out.options(&plan.options);
    out.place_in(&ENGINES, plan.executor);
    out.0.extend([plan.predicted.to_bits(), plan.one_path.to_bits()]);
    // Equal lists of paths are sent once. In an all-to-all, most transfers have equal lists.
    let (mut lists, mut numbers) = (Vec::new(), HashMap::default());
    let mut number = |paths: &[PathPlan]| {
        let mut list = Writer(Vec::new());
        list.list(paths.iter(), Writer::path);
        *numbers.entry(list.0).or_insert_with_key(|list| {
            lists.push(list.clone());
            lists.len() as u64 - 1
        })
    };
    let of_transfers: Vec<u64> = plan.transfers.iter().map(|transfer| number(&transfer.paths)).collect();
    out.list(lists.iter(), |out, list| out.0.extend(list));
    out.0.extend(of_transfers);
    let Program { transfers, sources, lanes, rings, ops } = &*plan.program;
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
        out.list(op.copies.iter(), |out, copy| match *copy {
            Copy { from: Place::Source { transfer, offset: 0 }, to, bytes }
                if to == (Place::Destination { transfer, offset: 0 }) && Some(&bytes) == transfers.get(transfer as usize) =>
            {
                out.0.extend([WHOLE, u64::from(transfer)]);
            }
            Copy { from, to, bytes } => {
                out.place(from);
                out.place(to);
                out.0.push(bytes);
            }
        });
        out.list(op.after.iter(), |out, before| out.0.push(u64::from(before.0)));
    });
    out.0
}

/// Returns the plan of the batch `batch` that the numbers contain. `options` are the options that are equal on all ranks. Returns `None` if
/// the numbers do not contain a plan of this batch. The program of the plan is not validated.
pub(super) fn decode(numbers: &[u64], batch: &[Shape], options: &Options) -> Option<Plan> {
    let mut from = Reader(numbers);
    let options = from.options(options)?;
    let executor = from.one_of(&ENGINES)?;
    let [predicted, one_path] = [f64::from_bits(from.number()?), f64::from_bits(from.number()?)];
    let lists: Vec<Arc<Vec<PathPlan>>> = from.list(|from| from.list(Reader::path).map(Arc::new))?;
    let mut transfer = |shape: &Shape| {
        let paths = lists.get(usize::try_from(from.number()?).ok()?)?;
        Some(TransferPlan { shape: *shape, paths: Arc::clone(paths), rejected: Arc::default() })
    };
    let transfers = batch.iter().map(&mut transfer).collect::<Option<Vec<TransferPlan>>>()?;
    let program = Program {
        transfers: batch.iter().map(|shape| shape.bytes).collect(),
        sources: from.list(Reader::small)?,
        lanes: from.list(|from| Some(Lane { device: from.device()?, also: from.list(Reader::device)?.into_iter().collect::<Gpus>() }))?,
        rings: from.list(|from| Some(Ring { device: from.device()?, slot_bytes: from.number()?, slots: from.small()? }))?,
        ops: from.list(|from| {
            Some(Op {
                lane: LaneId(from.small()?),
                mechanism: from.one_of(&MECHANISMS)?,
                copies: from.list(|from| from.copy(batch))?.into(),
                after: from.list(|from| from.small().map(OpId))?.into(),
            })
        })?,
    };
    let has_sources = [0, batch.len()].contains(&program.sources.len());
    let is_whole = from.0.is_empty() && has_sources;
    is_whole.then(|| Plan { transfers, program: Arc::new(program), options, executor, threads: None, predicted, one_path })
}

/// Encoder of a plan: the numbers that are written so far.
struct Writer(Vec<u64>);

impl Writer {
    /// Appends a list: its length, then each item, which `write` encodes.
    fn list<T>(&mut self, items: impl Iterator<Item = T> + Clone, write: impl Fn(&mut Writer, T)) {
        self.0.push(items.clone().count() as u64);
        items.for_each(|item| write(self, item));
    }

    /// Appends the position of `one` among all values of its type.
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

    /// Appends the options in which variants of a plan differ.
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

/// Numbers of a plan that are not decoded yet.
struct Reader<'a>(&'a [u64]);

impl Reader<'_> {
    fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Returns the next number, or `None` if it has more than 32 bits.
    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    /// Returns the items of a list, each of which `read` decodes.
    fn list<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = usize::try_from(self.number()?).ok()?;
        // Each item has at least one number. A count that exceeds the remaining numbers is refused before memory is allocated for it.
        (count <= self.0.len()).then(|| (0..count).map(|_| read(self)).collect())?
    }

    /// Returns the value whose position among all values of its type is the next number.
    fn one_of<T: std::marker::Copy>(&mut self, all: &[T]) -> Option<T> {
        all.get(usize::try_from(self.number()?).ok()?).copied()
    }

    fn device(&mut self) -> Option<DeviceId> {
        self.small().map(|device| DeviceId(device as i32))
    }

    fn place(&mut self) -> Option<Place> {
        let kind = self.number()?;
        self.place_of(kind)
    }

    fn place_of(&mut self, kind: u64) -> Option<Place> {
        let (number, second) = (self.small()?, self.number()?);
        match kind {
            0 => Some(Place::Source { transfer: number, offset: second }),
            1 => Some(Place::Destination { transfer: number, offset: second }),
            2 => Some(Place::Slot { ring: RingId(number), slot: second.try_into().ok()? }),
            _ => None,
        }
    }

    fn copy(&mut self, batch: &[Shape]) -> Option<Copy> {
        match self.number()? {
            WHOLE => {
                let transfer = self.small()?;
                let bytes = batch.get(transfer as usize)?.bytes;
                Some(Copy { from: Place::Source { transfer, offset: 0 }, to: Place::Destination { transfer, offset: 0 }, bytes })
            }
            kind => Some(Copy { from: self.place_of(kind)?, to: self.place()?, bytes: self.number()? }),
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
    use crate::plan::{plan, validate};
    use crate::program::ranks::{EndRanks, RankedBatch, check_parts, divide};
    use crate::topology::{Machine, MemoryKind, preset};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    fn machine(name: &str) -> Machine {
        Machine::new(preset(name).expect("a preset")).expect("well formed")
    }

    /// Returns a batch in which every GPU sends this number of bytes to every other GPU. With `is_one_source`, it sends the same bytes to
    /// all of them.
    fn all_to_all(machine: &Machine, bytes: u64, is_one_source: bool) -> Vec<Shape> {
        let gpus = || (0..machine.gpu_count()).map(DeviceId::gpu);
        let pairs = gpus().flat_map(|src| gpus().filter(move |dst| *dst != src).map(move |dst| (src, dst)));
        let kind = MemoryKind::Device;
        let shape = |(src_device, dst_device): (DeviceId, DeviceId)| Shape {
            source: if is_one_source { 1 + src_device.0 as u32 } else { 0 },
            dst_device,
            src_device,
            dst_kind: kind,
            src_kind: kind,
            bytes,
        };
        pairs.map(shape).collect()
    }

    fn lists(plan: &Plan) -> usize {
        plan.transfers.iter().map(|transfer| Arc::as_ptr(&transfer.paths)).collect::<std::collections::BTreeSet<_>>().len()
    }

    #[test]
    fn a_plan_is_equal_after_it_was_numbers() {
        for (name, bytes, is_one_source) in [("dgx1-v100", 64 << 20, true), ("hgx-h200", 1 << 20, false), ("beluga", 256 << 20, false)] {
            let machine = machine(name);
            let batch = all_to_all(&machine, bytes, is_one_source);
            let base = Options::default();
            let tuned = Tuned { host_share: 500, ..Tuned::default() };
            let others = [
                Options { relays: [1, 3].into_iter().collect(), ..base },
                Options { tuned: Some(tuned), max_paths: 2, passing: Passing::Off, ..base },
                Options { host_path: false, relays: Relays::NONE, passing: Passing::Kernels, ..base },
            ];
            for options in [base].into_iter().chain(others) {
                let made = plan(&machine, &batch, &options).expect("a plan");
                let numbers = encode(&made);
                let told = decode(&numbers, &batch, &base).expect("a plan");
                assert_eq!((&told.program, told.options, told.executor), (&made.program, made.options, made.executor));
                assert_eq!((told.predicted, told.one_path), (made.predicted, made.one_path));
                assert!(told.threads.is_none() && lists(&told) <= lists(&made));
                let paths =
                    |plan: &Plan| plan.transfers.iter().map(|transfer| (transfer.shape, transfer.paths.clone())).collect::<Vec<_>>();
                assert_eq!(paths(&told), paths(&made));
                // Decoding fails if numbers are missing at the end, if the batch is another one, or if a number is appended.
                assert!((0..numbers.len()).step_by(numbers.len() / 64 + 1).all(|count| decode(&numbers[..count], &batch, &base).is_none()));
                assert!(decode(&numbers, &batch[1..], &base).is_none());
                assert!(decode(&[&numbers[..], &[0]].concat(), &batch, &base).is_none());
            }
        }
    }

    #[test]
    fn equal_lists_of_paths_and_whole_transfers_take_few_numbers() {
        let machine = machine("gb200-nvl72");
        let batch = all_to_all(&machine, 65536, false);
        let made = plan(&machine, &batch, &Options::default()).expect("a plan");
        let numbers = encode(&made);
        // Each transfer has a number for its list of paths, and two for its copy.
        assert!(numbers.len() < 4 * batch.len(), "{} numbers for {} transfers", numbers.len(), batch.len());
        let told = decode(&numbers, &batch, &Options::default()).expect("a plan");
        assert!(lists(&told) < 100 && told.program == made.program, "{} lists", lists(&told));
    }

    /// Batch on a machine, with the numbers of its plan.
    static ENCODED: LazyLock<(Machine, Vec<Shape>, Vec<u64>)> = LazyLock::new(|| {
        let machine = machine("beluga");
        let batch = all_to_all(&machine, 8 << 20, true);
        let made = plan(&machine, &batch, &Options::default()).expect("a plan");
        let numbers = encode(&made);
        (machine, batch, numbers)
    });

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0..40_u64, any::<u64>(), any::<u32>().prop_map(u64::from), (0..64_u32).prop_map(|bit| 1 << bit)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn no_numbers_make_the_decoder_or_the_division_among_ranks_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), number()), 1..4),
            cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        ) {
            let (machine, batch, numbers) = &*ENCODED;
            let mut numbers = numbers.clone();
            for (at, number) in changes {
                let at = at.index(numbers.len());
                numbers[at] = number;
            }
            if let Some(cut) = cut {
                numbers.truncate(cut.index(numbers.len()));
            }
            if let Some(told) = decode(&numbers, batch, &Options::default())
                && validate(&told.program, told.options.staging_bytes).is_ok()
            {
                let ends: Vec<EndRanks> =
                    batch.iter().map(|shape| EndRanks { src: shape.src_device.0 as u32, dst: shape.dst_device.0 as u32 }).collect();
                let owners: Vec<u32> = (0..machine.gpu_count()).collect();
                let ranked = RankedBatch { ranks: machine.gpu_count(), shapes: batch, ends: &ends, owners: &owners };
                let parts = divide(&told.program, &ranked);
                let _ = check_parts(&told.program, &ranked, &parts);
                let _ = told.describe(machine);
            }
        }

        #[test]
        fn random_numbers_are_no_plan(numbers in prop::collection::vec(number(), 0..200)) {
            let (_, batch, _) = &*ENCODED;
            prop_assert!(decode(&numbers, batch, &Options::default()).is_none());
        }
    }
}
