//! Transfers that are planned as one.
//!
//! A linear program takes time with a power of its size, and a halo of a hundred thousand pieces lies between a few pairs of devices. In a
//! batch of very many transfers those between the same two memories, alike in size, are one demand: they stand in the program once, with all
//! their bytes. So planning takes time in proportion to the transfers, and beyond it what the demands take.

use crate::program::Shape;
use crate::topology::DeviceId;
use crate::topology::MemoryKind;

/// Batches of more transfers are aggregated. Below, each for itself takes 10 ms at most.
pub(super) const MANY: usize = 256;

/// Bytes that go from one memory to another.
pub(super) struct Demand {
    /// Its transfer; of several the mean size.
    pub shape: Shape,
    /// How many transfers it stands for.
    pub count: u32,
}

/// The demands of a batch.
pub(super) struct Demands {
    pub all: Vec<Demand>,
    /// For each transfer the index of its demand; none for a transfer of no bytes.
    pub of: Vec<Option<u32>>,
    /// Whether a demand may stand for several transfers.
    pub aggregated: bool,
}

/// Memories, and the power of two of the size.
type Alike = (DeviceId, DeviceId, MemoryKind, MemoryKind, u32);

impl Demands {
    pub fn new(batch: &[Shape]) -> Demands {
        if batch.len() > MANY { Demands::aggregated(batch) } else { Demands::one_by_one(batch) }
    }

    fn one_by_one(batch: &[Shape]) -> Demands {
        let mut all = Vec::with_capacity(batch.len());
        let number = |shape: &Shape| {
            (shape.bytes > 0).then(|| {
                all.push(Demand { shape: *shape, count: 1 });
                all.len() as u32 - 1
            })
        };
        let of = batch.iter().map(number).collect();
        Demands { all, of, aggregated: false }
    }

    fn aggregated(batch: &[Shape]) -> Demands {
        let mut numbers: ahash::HashMap<Alike, u32> = ahash::HashMap::default();
        let mut all: Vec<Demand> = Vec::new();
        let mut totals: Vec<u128> = Vec::new();
        let number = |shape: &Shape| {
            let key = (shape.dst_device, shape.src_device, shape.dst_kind, shape.src_kind, shape.bytes.checked_ilog2()?);
            let number = *numbers.entry(key).or_insert(all.len() as u32);
            if number as usize == all.len() {
                all.push(Demand { shape: *shape, count: 0 });
                totals.push(0);
            }
            all[number as usize].count += 1;
            totals[number as usize] += u128::from(shape.bytes);
            Some(number)
        };
        let of = batch.iter().map(number).collect();
        for (demand, total) in all.iter_mut().zip(totals) {
            // A mean is no larger than the largest, which is a u64.
            demand.shape.bytes = (total / u128::from(demand.count)) as u64;
        }
        Demands { all, of, aggregated: true }
    }
}
