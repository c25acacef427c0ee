//! Combines equal transfers of a large batch so that they are planned together.
//!
//! The time to solve a linear program grows faster than linearly with its size, but a halo exchange of a hundred thousand pieces has only a
//! few pairs of devices. In very large batches, transfers of similar size between the same two memories are combined to one demand. A
//! demand appears in the linear program once, with the sum of the bytes. So planning time grows only linearly with the number of transfers.

use crate::program::Shape;
use crate::topology::DeviceId;
use crate::topology::MemoryKind;

/// Largest number of transfers in a batch that are planned separately, which takes at most 10 ms. In larger batches, similar transfers are
/// combined.
pub(super) const MANY: usize = 256;

/// One transfer, or several similar transfers that are planned together.
pub(super) struct Demand {
    /// Representative transfer. If the demand consists of several transfers, the size is their mean.
    pub shape: Shape,
    /// Number of transfers that the demand consists of.
    pub count: u32,
}

/// Demands of a batch: groups of similar transfers that are planned together.
pub(super) struct Demands {
    pub all: Vec<Demand>,
    /// Demand that each transfer belongs to, as an index into `all`; `None` for a transfer of zero bytes.
    pub of: Vec<Option<u32>>,
    /// True if a demand may consist of several transfers.
    pub aggregated: bool,
}

/// Key of similar transfers: destination and source device, their memory kinds, and the binary logarithm of the size, rounded down.
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
            // The mean is no larger than the largest size, which is a u64.
            demand.shape.bytes = (total / u128::from(demand.count)) as u64;
        }
        Demands { all, of, aggregated: true }
    }
}
