//! Implements a test backend that allocates addresses but no memory, for tests of the bookkeeping of contexts.

use mpgpu_backend::*;
use mpgpu_core::topology::DeviceId;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Backend whose allocations are addresses without memory, which must not be dereferenced. A new allocation follows the last live one, so
/// that a freed address is soon reused. Executions are refused if a completion is requested, and ignored otherwise.
#[derive(Default)]
pub struct Addresses(Mutex<Live>);

#[derive(Default)]
struct Live {
    allocations: BTreeMap<u64, Allocation>,
    given_out: u64,
    located: usize,
}

impl Addresses {
    /// Returns the live allocations, by address.
    pub fn live(&self) -> Vec<Allocation> {
        self.0.lock().expect("no panic").allocations.values().copied().collect()
    }

    /// Returns the number of look-ups of allocations that were made so far.
    pub fn located(&self) -> usize {
        self.0.lock().expect("no panic").located
    }
}

impl Backend for Addresses {
    fn name(&self) -> &'static str {
        "addresses"
    }
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        let mut live = self.0.lock().expect("no panic");
        if device == DeviceId::gpu(9) {
            return Err(BackendError::OutOfMemory { device: device.0, bytes });
        }
        let base = live.allocations.last_key_value().map_or(1 << 20, |(base, last)| (base + last.bytes).next_multiple_of(256) + 4096);
        live.given_out += 1;
        let kind = if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
        let id = live.given_out;
        live.allocations.insert(base, Allocation { id, base, bytes, device, kind });
        Ok(base)
    }
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.allocate(device, bytes)
    }
    fn free(&self, address: u64) -> Result<(), BackendError> {
        let mut live = self.0.lock().expect("no panic");
        live.allocations.remove(&address).map(drop).ok_or(BackendError::InvalidPointer(address))
    }
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        let mut live = self.0.lock().expect("no panic");
        live.located += 1;
        Ok(live.allocations.range(..=address).next_back().map(|(_, a)| *a).filter(|a| address - a.base < a.bytes))
    }
    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        let live = self.0.lock().expect("no panic");
        live.allocations.values().filter(|a| a.device == device).map(|a| a.bytes).sum()
    }
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        Err(BackendError::InvalidDevice(device.0))
    }
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        Err(BackendError::InvalidHandle(stream.0, "stream"))
    }
    fn stream_count(&self, _: DeviceId) -> u64 {
        0
    }
    fn synchronize_stream(&self, _: StreamHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn launch_host(&self, _: StreamHandle, _: HostFunction) -> Result<(), BackendError> {
        Ok(())
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        Ok(EventHandle(1))
    }
    fn destroy_event(&self, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn record_event(&self, _: EventHandle, _: StreamHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn stream_wait_event(&self, _: StreamHandle, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn synchronize_event(&self, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        match execution.report {
            Report::Nothing => Ok(None),
            _ => Err(BackendError::Driver { what: "submit".into(), reason: "this backend has no memory".into(), code: 0 }),
        }
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}
