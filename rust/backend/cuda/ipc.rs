//! Memory of another process that is mapped by CUDA IPC.
//!
//! Such a mapping belongs to the GPU in whose context it was opened, and lies at another address for each. For the driver it is memory
//! of that GPU. Kernels of others fault there, and copies that others issue to it start late: 8 bytes from GPU 0 to memory on GPU 1 took
//! 18.5 us where it was opened through GPU 1, and 8.7 us where it was opened through GPU 0 (one way, signal included; two H200, driver
//! 580). So memory is opened through each GPU that works on it, when a plan first has it do so, and every lane uses the address of its
//! own GPU. The address that an import returns is that of one of them ([`Core::through`]).

use super::Core;
use super::driver::{CUdeviceptr, OutsideCapture, call_optional};
use super::share::Source;
use crate::backend::{Allocation, BackendError, Endpoints};
use crate::share::PAYLOAD_BYTES;
use cudarc::driver::sys;
use smallvec::{SmallVec, smallvec};
use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An allocation of another process.
#[derive(Debug)]
pub(super) struct Opened {
    payload: [u8; PAYLOAD_BYTES],
    /// The GPU that has the memory.
    owner: usize,
    /// Each GPU that it was opened through, and the address there; the first is the one that the import has returned. `None` where the
    /// driver would not: the exporter may have freed the memory, which whoever uses it will be told.
    through: SmallVec<[(usize, Option<u64>); 2]>,
}

impl Opened {
    fn at(&self, gpu: usize) -> Option<Option<u64>> {
        self.through.iter().find(|(through, _)| *through == gpu).map(|(_, base)| *base)
    }
}

impl Core {
    /// Opens memory of CUDA IPC.
    pub fn open(&self, payload: &[u8; PAYLOAD_BYTES], allocation: &Allocation) -> Result<(u64, Source), BackendError> {
        let owner = allocation.device.0 as usize;
        let gpu = self.through(owner);
        let base = self.open_through(gpu, payload)?;
        self.sharing.has_opened.store(true, Ordering::Release);
        Ok((base, Source::Ipc(Opened { payload: *payload, owner, through: smallvec![(gpu, Some(base))] })))
    }

    fn open_through(&self, gpu: usize, payload: &[u8; PAYLOAD_BYTES]) -> Result<u64, BackendError> {
        const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
        let ipc = sys::CUipcMemHandle { reserved: payload.map(|byte| byte as _) };
        let mut base: CUdeviceptr = 0;
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.primary(gpu)?.enter()?;
        // SAFETY: the output is valid for the call; a handle that is none is refused by the driver.
        unsafe { call_optional!(self.driver, cuIpcOpenMemHandle(&mut base, ipc, LAZY_ENABLE_PEER_ACCESS)) }?;
        Ok(base)
    }

    /// Closes all of it. Whoever closes vouches that work which uses it has finished.
    pub fn close(&self, opened: &Opened) -> Result<(), BackendError> {
        let mut result = Ok(());
        for (gpu, base) in opened.through.iter().filter_map(|&(gpu, base)| Some((gpu, base?))) {
            // Whatever became of the others.
            result = result.and(self.close_through(gpu, base));
        }
        result
    }

    fn close_through(&self, gpu: usize, base: u64) -> Result<(), BackendError> {
        if self.is_lost(gpu) {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(self.driver);
        let primary = self.primary(gpu)?;
        // Tried twice: nobody else would close it, and only this context can.
        let _current = primary.enter().or_else(|_| primary.enter())?;
        // SAFETY: opened through this GPU.
        unsafe { call_optional!(self.driver, cuIpcCloseMemHandle(base)) }
    }

    /// The address at which `gpu` has the byte that an import has at `address`: `None` if it is not memory of CUDA IPC, `Some(None)` if
    /// the GPU cannot have it. Opens it through that GPU if that was not done.
    pub fn opened_for(&self, gpu: usize, address: u64) -> Option<Option<u64>> {
        if !self.sharing.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let known = self.sharing.at(address, |held| match &held.source {
            Source::Ipc(opened) => Some((held.allocation, opened.at(gpu), opened.payload, opened.owner)),
            _ => None,
        });
        let (allocation, known, payload, owner) = known.flatten()?;
        let offset = address - allocation.base;
        if let Some(base) = known {
            return Some(base.map(|base| base + offset));
        }
        let base = if self.can_reach(gpu, owner) { self.open_through(gpu, &payload) } else { Err(BackendError::InvalidDevice(gpu as i32)) };
        let base = base.inspect_err(|error| log::debug!("memory of another process is not opened through GPU {gpu}: {error}")).ok();
        let kept = {
            let mut held = self.sharing.held_mut();
            let held = held.get_mut(&allocation.base).filter(|held| held.allocation.id == allocation.id);
            match held.map(|held| &mut held.source) {
                Some(Source::Ipc(opened)) => match opened.at(gpu) {
                    Some(kept) => kept,
                    None => {
                        opened.through.push((gpu, base));
                        return Some(base.map(|base| base + offset));
                    }
                },
                _ => None,
            }
        };
        // Another thread was faster, or the memory was closed meanwhile, against the rules. The driver counts how often a GPU has opened the same
        // memory, which has one address there.
        if let Some(Err(error)) = base.map(|base| self.close_through(gpu, base)) {
            log::warn!("{error}");
        }
        Some(kept.map(|base| base + offset))
    }

    /// The ends of a plan as `gpu` has them; `None` where these are the addresses that the plan was made for.
    pub fn ends_for(&self, gpu: usize, ends: &[Endpoints]) -> Option<Arc<[Endpoints]>> {
        if !self.sharing.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let seen = |address| self.opened_for(gpu, address).flatten().unwrap_or(address);
        let own: Arc<[Endpoints]> = ends.iter().map(|ends| Endpoints { dst: seen(ends.dst), src: seen(ends.src) }).collect();
        (*own != *ends).then_some(own)
    }
}

#[cfg(test)]
mod tests {
    use super::super::double::{self, calls, node};
    use super::super::{CudaBackend, Driver};
    use crate::backend::{Backend, Endpoints, Execution, MemoryKind};
    use crate::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, Place, Program};
    use crate::topology::DeviceId;
    use smallvec::smallvec;
    use std::ptr::with_exposed_provenance;
    use std::sync::Arc;

    const GPU1: DeviceId = DeviceId::gpu(1);
    const BYTES: u64 = 10_000;

    /// What another process has on GPU 1: its own address of it, and the import.
    fn import(backend: &CudaBackend) -> (u64, u64) {
        let theirs = node(|node| node.give_shareable(BYTES as usize, 1)).expect("memory");
        let allocation = backend.locate(theirs).expect("an answer").expect("known");
        assert_eq!((allocation.device, allocation.kind), (GPU1, MemoryKind::Device));
        let shared = backend.0.share(&allocation).expect("shared");
        (theirs, backend.0.adopt(&shared, &allocation).expect("opened"))
    }

    fn on(driver: &'static Driver) -> CudaBackend {
        double::start(2, true);
        CudaBackend::on(driver, 1).expect("the double has GPUs")
    }

    /// One transfer in two copies, the first on GPU 0 and the second on GPU 1.
    fn halves() -> Arc<Program> {
        let half = |lane: u32| {
            let offset = BYTES / 2 * u64::from(lane);
            let copy =
                Copy { from: Place::Source { transfer: 0, offset }, to: Place::Destination { transfer: 0, offset }, bytes: BYTES / 2 };
            Op { lane: LaneId(lane), mechanism: Mechanism::Copy, copies: smallvec![copy], after: smallvec![] }
        };
        let lanes = vec![Lane::new(DeviceId::gpu(0)), Lane::new(GPU1)];
        let program = Program { transfers: vec![BYTES], lanes, rings: vec![], ops: vec![half(0), half(1)] };
        plan::validate(&program, 0).expect("a valid program");
        Arc::new(program)
    }

    fn put(backend: &CudaBackend, dst: u64) {
        let src = backend.allocate(DeviceId::gpu(0), BYTES).expect("memory");
        // SAFETY: memory of the double is host memory, of this size.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(src as usize), BYTES as usize) }.fill(0x5A);
        let stream = backend.create_stream(DeviceId::gpu(0)).expect("a stream");
        let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
        let execution =
            Execution { program: &halves(), endpoints: &endpoints, rings: &rings, stream, after: &[], verify: false, engine: Engine::Auto };
        backend.execute(&execution).expect("enqueued").wait().expect("it runs");
    }

    #[track_caller]
    fn assert_arrived(address: u64) {
        // SAFETY: as above.
        let arrived = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(address as usize), BYTES as usize) };
        assert!(arrived.iter().all(|byte| *byte == 0x5A));
    }

    #[test]
    fn each_gpu_works_on_memory_of_another_process_at_its_own_address() {
        let backend = on(double::driver());
        backend.allocate(DeviceId::gpu(0), 1).expect("memory");
        let (theirs, ours) = import(&backend);
        assert_eq!(calls("cuIpcOpenMemHandle"), 1);
        put(&backend, ours);
        assert_arrived(theirs);
        assert_eq!((calls("cuIpcOpenMemHandle"), node(|node| node.strangers)), (2, 0));
        put(&backend, ours);
        assert_eq!((calls("cuIpcOpenMemHandle"), calls("cuIpcCloseMemHandle"), node(|node| node.strangers)), (2, 0, 0));
        assert!(backend.0.release_held(ours).expect("closed"));
        assert_eq!(calls("cuIpcCloseMemHandle"), 2);
    }

    #[test]
    fn memory_is_opened_through_the_threads_own_gpu_or_one_in_use_before_the_one_that_has_it() {
        let backend = on(double::driver());
        for gpu in [GPU1, DeviceId::gpu(0)] {
            backend.allocate(gpu, 1).expect("memory");
        }
        assert_eq!(backend.0.through(1), 0, "in use, and not the owner");
        let _current = backend.0.primary(1).expect("in use").enter().expect("current");
        assert_eq!(backend.0.through(1), 1, "the thread's own");
    }

    #[test]
    fn a_gpu_that_cannot_open_the_memory_leaves_the_work_to_one_that_has() {
        let backend = on(double::driver());
        backend.allocate(DeviceId::gpu(0), 1).expect("memory");
        let (theirs, ours) = import(&backend);
        const MAP_FAILED: i32 = 205;
        // GPU 0 has opened it, so the next to be refused is GPU 1.
        node(|node| node.refusals.insert("cuIpcOpenMemHandle", MAP_FAILED));
        put(&backend, ours);
        put(&backend, ours);
        assert_arrived(theirs);
        assert_eq!((calls("cuIpcOpenMemHandle"), node(|node| node.strangers)), (1, 0));
    }
}
