//! Defines the communication steps that are tuned: the steps in the figures of the papers on which this library builds, and copies from and
//! to host memory.

use super::class::Class;
use crate::plan::Shape;
use crate::topology::{DeviceId, Machine, MemoryKind};

/// Communication step that is tuned.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Case {
    /// One copy between two GPUs.
    D2d,
    /// One copy from pinned host memory to a GPU.
    H2d,
    /// One copy from a GPU to pinned host memory.
    D2h,
    /// Two GPUs that send to each other at the same time.
    Bidir,
    /// Every GPU sends to the next GPU, and the last sends to the first.
    Ring,
    /// Every GPU sends to every other GPU.
    AllToAll,
}

impl Case {
    /// All cases (communication steps) that are tuned.
    pub const ALL: [Case; 6] = [Case::D2d, Case::H2d, Case::D2h, Case::Bidir, Case::Ring, Case::AllToAll];

    /// Returns the name of the case: `d2d`, `h2d`, `d2h`, `bidir`, `ring` or `all_to_all`.
    pub const fn name(self) -> &'static str {
        match self {
            Case::D2d => "d2d",
            Case::H2d => "h2d",
            Case::D2h => "d2h",
            Case::Bidir => "bidir",
            Case::Ring => "ring",
            Case::AllToAll => "all_to_all",
        }
    }

    /// Returns the case with this name, or `None` if there is none.
    pub fn named(name: &str) -> Option<Case> {
        Case::ALL.into_iter().find(|case| case.name() == name)
    }

    /// Returns batches of transfers with `bytes` bytes each, one batch for each class of this case on the machine. For example, pairs of
    /// GPUs with one NVLink and pairs with two are different classes. Returns an empty list if the machine has too few GPUs.
    pub fn batches(self, machine: &Machine, bytes: u64) -> Vec<Vec<Shape>> {
        let gpus: Vec<DeviceId> = (0..machine.gpu_count()).map(DeviceId::gpu).collect();
        let hosts: Vec<DeviceId> = (0..machine.host_count()).map(DeviceId::host).collect();
        let pairs = |from: &[DeviceId], to: &[DeviceId]| -> Vec<(DeviceId, DeviceId)> {
            from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b))).filter(|(a, b)| a != b).collect()
        };
        let all: Vec<Vec<(DeviceId, DeviceId)>> = match self {
            Case::D2d => pairs(&gpus, &gpus).into_iter().map(|pair| vec![pair]).collect(),
            Case::H2d => pairs(&hosts, &gpus).into_iter().map(|pair| vec![pair]).collect(),
            Case::D2h => pairs(&gpus, &hosts).into_iter().map(|pair| vec![pair]).collect(),
            Case::Bidir => pairs(&gpus, &gpus).into_iter().filter(|(a, b)| a < b).map(|(a, b)| vec![(a, b), (b, a)]).collect(),
            Case::Ring if gpus.len() > 2 => vec![(0..gpus.len()).map(|i| (gpus[i], gpus[(i + 1) % gpus.len()])).collect()],
            Case::AllToAll if gpus.len() > 2 => vec![pairs(&gpus, &gpus)],
            Case::Ring | Case::AllToAll => Vec::new(),
        };
        let mut classes: Vec<Class> = Vec::new();
        let mut batches = Vec::new();
        for pairs in all {
            let batch: Vec<Shape> = pairs.into_iter().map(|(src, dst)| shape(src, dst, bytes)).collect();
            if let Some((class, _)) = Class::of(machine, &batch)
                && !classes.iter().any(|known| known.is_like(&class))
            {
                classes.push(class);
                batches.push(batch);
            }
        }
        batches
    }
}

fn shape(src_device: DeviceId, dst_device: DeviceId, bytes: u64) -> Shape {
    let kind = |device: DeviceId| if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device, src_device, dst_kind: kind(dst_device), src_kind: kind(src_device), bytes }
}
