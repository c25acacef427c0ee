//! Bounds of kernels that read or write host memory, which share the link and the GPU with others.

use std::sync::atomic::{AtomicU32, Ordering};

/// Bounds of kernels that have an end in host memory.
#[derive(Debug)]
pub(super) struct HostKernels {
    multiprocessors: AtomicU32,
    /// Least time of a byte that is written to host memory, for each GPU; 0 for no limit.
    femtoseconds: [AtomicU32; HostKernels::GPUS],
}

impl Default for HostKernels {
    fn default() -> Self {
        HostKernels {
            multiprocessors: AtomicU32::new(HostKernels::MULTIPROCESSORS),
            femtoseconds: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }
}

impl HostKernels {
    /// Bits of the masks of GPUs.
    const GPUS: usize = 64;
    /// Fill a PCIe 5 link in both directions (one H200, docs/results.md, "Pieces").
    const MULTIPROCESSORS: u32 = 4;

    pub fn set(&self, multiprocessors: u32, femtoseconds: &[u32]) {
        self.multiprocessors.store(multiprocessors.max(1), Ordering::Relaxed);
        for (own, value) in self.femtoseconds.iter().zip(femtoseconds) {
            own.store(*value, Ordering::Relaxed);
        }
    }

    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors.load(Ordering::Relaxed)
    }

    /// Picoseconds that each of `groups` takes for a byte at least.
    pub fn picoseconds(&self, gpu: usize, groups: u32) -> u32 {
        let femtoseconds = self.femtoseconds.get(gpu).map_or(0, |own| own.load(Ordering::Relaxed));
        u32::try_from(u64::from(femtoseconds) * u64::from(groups) / 1000).unwrap_or(u32::MAX)
    }
}
