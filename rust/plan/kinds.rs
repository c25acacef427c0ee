//! Batches of very many transfers, split kind by kind.
//!
//! A linear program takes time with a power of its size, and a halo of a hundred thousand pieces lies between a few pairs of devices. Pieces
//! between the same two memories, alike in size, are one kind: they stand in the program once, with all their bytes. Their paths' parts are
//! then handed out piece by piece, so that nearly every piece has one path: what a vertex of the large program would be. So planning takes time in
//! proportion to the transfers, and beyond it what the kinds take.

use super::Shape;
use super::candidates::{self, Candidate, Reason};
use super::choose::{Field, Share};
use crate::backend::MemoryKind;
use crate::model::PathModel;
use crate::topology::DeviceId;

/// Above so many transfers they are split by kind. Below, each for itself takes 10 ms at most.
pub(super) const MANY: usize = 256;

/// Memories and the size's power of two.
type Kind = (DeviceId, DeviceId, MemoryKind, MemoryKind, u32);

/// A batch with one transfer for each kind, of the mean size.
struct Kinds {
    batch: Vec<Shape>,
    /// How many there are of each.
    repeats: Vec<f64>,
    /// For each transfer of the whole batch the number of its kind; those without bytes have none.
    of: Vec<Option<usize>>,
}

impl Kinds {
    fn new(whole: &[Shape]) -> Kinds {
        let mut numbers: ahash::HashMap<Kind, usize> = ahash::HashMap::default();
        let mut totals: Vec<(Shape, u128, u32)> = Vec::new();
        let number = |shape: &Shape| {
            let key = (shape.dst_device, shape.src_device, shape.dst_kind, shape.src_kind, shape.bytes.checked_ilog2()?);
            let number = *numbers.entry(key).or_insert(totals.len());
            if number == totals.len() {
                totals.push((*shape, 0, 0));
            }
            totals[number].1 += u128::from(shape.bytes);
            totals[number].2 += 1;
            Some(number)
        };
        let of = whole.iter().map(number).collect();
        // A mean is no larger than the largest, which is a u64.
        let batch = totals.iter().map(|&(shape, bytes, count)| Shape { bytes: (bytes / u128::from(count)) as u64, ..shape }).collect();
        Kinds { batch, repeats: totals.iter().map(|total| f64::from(total.2)).collect(), of }
    }
}

impl Field<'_> {
    /// As [`Field::several_paths`], by kinds.
    pub(super) fn several_paths_by_kind(&mut self, without: f64) -> Option<Vec<Share>> {
        let Kinds { batch, repeats, of } = Kinds::new(self.batch);
        let mut kinds = Field::new(self.machine, &batch, self.options, repeats);
        for (transfer, shape) in batch.iter().enumerate() {
            let begin = kinds.candidates.len();
            let mut found = Vec::new();
            candidates::candidates(self.machine, transfer as u32, shape, self.options, &mut found, &mut Vec::new());
            let has_direct = found.first().is_some_and(|first| first.via.is_none());
            found.retain(|candidate| !has_direct || candidate.via.is_none() || shape.bytes as f64 >= self.crumb(&candidate.model));
            kinds.candidates.append(&mut found);
            kinds.of.push(begin..kinds.candidates.len());
        }
        kinds.out = vec![None; kinds.candidates.len()];
        let split = kinds.several_paths(without);
        let shares = self.hand_out(&kinds, split.as_deref().unwrap_or_default(), &of);
        split?;
        let staged = self.stage(self.round(&shares));
        staged.map_err(|(candidate, ring_bytes)| self.out[candidate] = Some(Reason::Staging { ring_bytes })).ok()
    }

    /// What a path carries in one hand-over. Less is not worth a pipeline of its own.
    fn crumb(&self, path: &PathModel) -> f64 {
        path.hand_over(self.machine.costs()) * path.rate
    }

    /// Bytes for each candidate: the transfers of a kind one after the other to its paths, each until it has its part.
    fn hand_out(&mut self, kinds: &Field<'_>, split: &[Share], of: &[Option<usize>]) -> Vec<f64> {
        let mut left = vec![0.0; kinds.candidates.len()];
        for share in split {
            left[share.candidate] = share.bytes as f64 * kinds.repeats[kinds.candidates[share.candidate].transfer as usize];
        }
        let mut shares = vec![0.0; self.candidates.len()];
        for (transfer, number) in of.iter().enumerate().filter_map(|(transfer, number)| Some((transfer, (*number)?))) {
            let own = self.of[transfer].clone();
            let mut bytes = self.batch[transfer].bytes as f64;
            for like in kinds.of[number].clone() {
                let Candidate { via, model, .. } = &kinds.candidates[like];
                let Some(at) = own.clone().find(|&at| self.candidates[at].via == *via) else { continue };
                let part = left[like].min(bytes);
                // Crumbs stay with what comes before or after them.
                shares[at] = match self.crumb(model) {
                    crumb if part > 0.0 && bytes - part < crumb => bytes,
                    crumb if part < crumb => 0.0,
                    _ => part,
                };
                left[like] = (left[like] - shares[at]).max(0.0);
                bytes -= shares[at];
                self.out[at] = kinds.out[like].clone();
            }
            // What rounding left over.
            let open = |&at: &usize| self.out[at].is_none();
            if let Some(first) = own.clone().find(|&at| shares[at] > 0.0).or_else(|| own.clone().find(open)) {
                shares[first] += bytes;
            }
            for at in own.filter(|&at| shares[at] == 0.0) {
                self.out[at].get_or_insert(Reason::NoShare);
            }
        }
        shares
    }
}
