//! Determines which GPUs help with copies of pieces over their own links to host memory.

use super::config::{Config, PlanOptions};
use crate::plan::{self, PathPlan, Relays};
use crate::program::Shape;
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, Machine, MemoryKind};
use ahash::HashMap;
use std::sync::Arc;

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
pub struct PiecePaths(Mutex<HashMap<PathKey, Shares>>);

/// GPUs that help, each with its share of the bytes.
type Shares = Arc<[(u32, f64)]>;

/// Destination, source, binary logarithm of the size in bytes, and permitted GPUs.
type PathKey = (DeviceId, DeviceId, u32, Option<Relays>);

impl PiecePaths {
    /// Returns the GPU end of a copy between host memory and one GPU, and the GPUs that help, each with its share of the bytes. Returns
    /// `None` if no GPU helps.
    pub fn shares(
        &self,
        machine: &Machine,
        config: &Config,
        devices: (EndDevice, EndDevice),
        bytes: u64,
        relays: Option<Relays>,
    ) -> Option<(u32, Shares)> {
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
        (!shares.is_empty()).then_some((gpu.0 as u32, shares))
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
