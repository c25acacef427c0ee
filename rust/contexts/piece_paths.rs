//! Determines which GPUs help with copies of pieces over their own links to host memory.

use super::active::{ActiveStreams, GpuEnds, GpuSet};
use super::config::{Config, PlanOptions};
use crate::backend::StreamHandle;
use crate::plan::{self, PathPlan, Relays};
use crate::program::Shape;
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, Machine, MemoryKind};
use ahash::HashMap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

/// Device of one end (destination or source) of all pieces of a copy.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum EndDevice {
    /// No device, because no piece was added.
    #[default]
    None,
    /// One device, which is the same for all pieces.
    One(DeviceId),
    /// Several devices: not all pieces have the same device.
    Several,
}

impl EndDevice {
    pub fn add(&mut self, device: DeviceId) {
        *self = match *self {
            EndDevice::None => EndDevice::One(device),
            EndDevice::One(own) if own == device => return,
            _ => EndDevice::Several,
        };
    }
}

/// Cache of the shares of bytes that helpers copy. The key consists of the devices, the size and the permitted GPUs. The shares are those
/// of a plan for one contiguous copy, whose size is that of the pieces rounded down to a power of two.
#[derive(Debug, Default)]
pub(super) struct PiecePaths(Mutex<HashMap<PathKey, Shares>>);

/// GPUs that help, each with its share of the bytes.
type Shares = Arc<[(u32, f64)]>;

/// Destination, source, binary logarithm of the size in bytes, and permitted GPUs.
type PathKey = (DeviceId, DeviceId, u32, Option<Relays>);

/// GPUs that help with a copy, each with its share of the bytes.
type GpuShares = SmallVec<[(u32, f64); 4]>;

impl PiecePaths {
    /// Returns the GPU end of a copy between host memory and one GPU, and the GPUs that help, each with its share of the bytes. Returns
    /// `None` if no GPU helps. A GPU does not help while another stream copies from or to it, because that stream would lose what this one
    /// gains. Records in `active` that `stream` copies.
    pub(super) fn shares(
        &self,
        machine: &Machine,
        config: &Config,
        devices: (EndDevice, EndDevice),
        bytes: u64,
        relays: Option<Relays>,
        (stream, active): (StreamHandle, &ActiveStreams),
    ) -> Option<(u32, GpuShares)> {
        let (EndDevice::One(dst), EndDevice::One(src)) = devices else { return None };
        if machine.gpu_count() < 2 || dst.is_host() == src.is_host() {
            return None;
        }
        let gpu = if dst.is_host() { src } else { dst };
        let key = (dst, src, bytes.ilog2(), relays);
        let known = lock(&self.0).get(&key).cloned();
        let shares = known.unwrap_or_else(|| {
            let planned: Shares = planned_shares(machine, config, dst, src, 1 << bytes.ilog2(), relays).into();
            lock(&self.0).insert(key, Arc::clone(&planned));
            planned
        });
        if shares.is_empty() {
            return None;
        }
        let rate = machine.route(src, dst).map_or(f64::INFINITY, |route| route.bandwidth);
        let ends = GpuEnds { to: GpuSet::of([dst]), from: GpuSet::of([src]) };
        let others = active.enters(stream, Duration::from_secs_f64(bytes as f64 / rate), ends).ends.all();
        let is_free = |gpu: u32| !GpuSet::of([DeviceId::gpu(gpu)]).meets(others);
        Some((gpu.0 as u32, shares.iter().copied().filter(|(gpu, _)| is_free(*gpu)).collect()))
    }
}

/// Returns the GPUs through which a plan would send parts of a copy, each with its share of the bytes.
fn planned_shares(machine: &Machine, config: &Config, dst: DeviceId, src: DeviceId, bytes: u64, relays: Option<Relays>) -> Vec<(u32, f64)> {
    let options = PlanOptions { relays, ..PlanOptions::default() };
    let kind = |device: DeviceId| if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
    let shape = Shape { dst_device: dst, src_device: src, dst_kind: kind(dst), src_kind: kind(src), bytes, source: 0 };
    let planned = options.resolve(config).ok().and_then(|options| plan::plan(machine, &[shape], &options).ok());
    let paths = planned.map(|planned| Arc::clone(&planned.transfers[0].paths)).unwrap_or_default();
    let helps = |path: &&PathPlan| path.earlier.is_empty() && path.via.is_some_and(|via| !via.is_host());
    paths.iter().filter(helps).filter_map(|path| Some((path.via?.0 as u32, path.bytes as f64 / bytes as f64))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::preset;

    #[test]
    fn gpus_help_with_large_copies_between_host_memory_and_one_gpu_unless_another_stream_copies_from_or_to_them() {
        let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("well formed");
        let (paths, active, config) = (PiecePaths::default(), ActiveStreams::new(), Config::default());
        let shares = |dst: EndDevice, bytes, relays| {
            let gpus = paths.shares(&machine, &config, (dst, EndDevice::One(DeviceId::HOST)), bytes, relays, (StreamHandle(1), &active));
            gpus.map(|(of, gpus)| (of, gpus.iter().map(|(gpu, share)| (*gpu, *share > 0.05 && *share < 0.6)).collect::<Vec<_>>()))
        };
        let (gpu0, one) = (EndDevice::One(DeviceId::gpu(0)), Some([1].into_iter().collect()));
        assert_eq!(shares(gpu0, 64 << 20, one), Some((0, vec![(1, true)])));
        assert_eq!(shares(gpu0, 64 << 20, Some(Relays::NONE)), None);
        assert_eq!(shares(gpu0, 4096, one), None);
        assert_eq!(shares(EndDevice::Several, 64 << 20, one), None);
        assert_eq!(shares(EndDevice::One(DeviceId::HOST), 64 << 20, one), None);
        let other = GpuEnds { to: GpuSet::of([DeviceId::gpu(1)]), from: GpuSet::default() };
        active.enters(StreamHandle(2), Duration::from_secs(100), other);
        assert_eq!(shares(gpu0, 64 << 20, one), Some((0, vec![])));
    }
}
