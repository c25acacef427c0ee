//! Implements the [`Backend`] interface for NVIDIA GPUs.

use super::discover;
use super::driver::{Driver, call};
use super::host_function::launch_host;
use super::identity::identity;
use super::parts::Core;
use crate::backend::Shared;
use crate::backend::{
    ActionGrid, ActionReach, Allocation, Backend, BackendError, Completion, Endpoints, EventHandle, Execution, GraphStatistics,
    HostFunction, Identity, KernelBounds, LostPeer, Moment, Pieces, Report, Segment, Signal, SignalWait, StepFate, StreamHandle,
};
use crate::plan::Program;
use crate::topology::discover::Seen;
use crate::topology::{DeviceId, Topology};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// CUDA backend. Its resources live until the backend and the last completion are dropped. The last drop waits for all work of the GPUs in
/// use, and destroys the objects that the backend created. The primary contexts stay for the rest of the process.
pub struct CudaBackend(pub(super) Arc<Core>);

impl Drop for CudaBackend {
    fn drop(&mut self) {
        self.0.graphs.forget_launches();
    }
}

impl CudaBackend {
    /// Creates a backend for the GPUs that are visible to the driver, and for `hosts` host NUMA domains. Returns [`BackendError::NoDriver`]
    /// with the reason if there is no GPU. Creates no context.
    pub fn new(hosts: u32) -> Result<CudaBackend, BackendError> {
        CudaBackend::on(Driver::get()?, hosts)
    }

    /// Creates a backend like [`new`](CudaBackend::new), but with a driver that lacks the optional function `function`, for example
    /// `cuMemcpyBatchAsync`.
    #[cfg(feature = "fault-injection")]
    pub fn without(function: &str, hosts: u32) -> Result<CudaBackend, BackendError> {
        // The altered drivers are kept for the rest of the process, like the driver itself.
        static LACKING: std::sync::Mutex<Vec<&'static Driver>> = std::sync::Mutex::new(Vec::new());
        let driver: &'static Driver = Box::leak(Box::new(Driver::get()?.clone().without(function)));
        super::driver::lock(&LACKING).push(driver);
        CudaBackend::on(driver, hosts)
    }

    pub(super) fn on(driver: &'static Driver, hosts: u32) -> Result<CudaBackend, BackendError> {
        Ok(CudaBackend(Arc::new(Core::new(driver, hosts)?)))
    }

    /// True if the driver can copy several segments by one call. Otherwise, operations of
    /// [`Mechanism::Batch`](crate::plan::Mechanism::Batch) use one call for each segment.
    pub fn has_batched_copy(&self) -> bool {
        self.0.gpus.driver.cuMemcpyBatchAsync.is_some()
    }

    /// True if `gpu` can run the fused copy kernel, which the call loads if necessary. Otherwise, operations of
    /// [`Mechanism::Kernel`](crate::plan::Mechanism::Kernel) use single copies.
    pub fn has_copy_kernel(&self, gpu: u32) -> Result<bool, BackendError> {
        Ok(self.0.gpus.primary(gpu as usize)?.kernel().is_some())
    }

    /// Limits every later launch of the fused copy kernel on `gpu` to `blocks` thread blocks; 0 is treated as 1. Benchmarks use a kernel
    /// with few blocks to emulate a slow link. Returns false if the GPU cannot run the kernel.
    pub fn limit_copy_kernel(&self, gpu: u32, blocks: u32) -> Result<bool, BackendError> {
        Ok(self.0.gpus.primary(gpu as usize)?.kernel().map(|kernel| kernel.limit(blocks)).is_some())
    }

    /// Returns the number of GPUs whose primary context this backend has retained.
    pub fn devices_in_use(&self) -> u32 {
        self.0.gpus.used.load(Ordering::Acquire).count_ones()
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn discover(&self) -> Result<Option<Topology>, BackendError> {
        discover::discover().map(Some)
    }

    fn out_of_sight(&self, uuids: &[[u8; 16]]) -> Result<Option<(Identity, Seen)>, BackendError> {
        discover::out_of_sight(uuids)
    }

    fn identity(&self) -> Result<Identity, BackendError> {
        identity()
    }

    /// Allocates memory of `device`. For a GPU, this is memory of `cuMemAlloc`. For a host NUMA domain, it is pinned memory that every GPU
    /// can access directly. Pinned memory of 4 MiB or more uses huge pages. The memory of domain 0 is distributed over all NUMA nodes, and
    /// any other domain denotes the NUMA node with that number. A size of 0 is treated as 1 byte.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.0.allocate(device, bytes, false)
    }

    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.0.allocate(device, bytes, true)
    }

    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.0.free(address)
    }

    fn register(&self, address: u64, bytes: u64, huge: bool) -> Result<bool, BackendError> {
        self.0.register(address, bytes, huge)
    }

    /// Returns the number of staging rings that only streams use, and copy threads do not.
    fn ordered_rings(&self, program: &Program) -> usize {
        program.own_rings()
    }

    fn unregister(&self, address: u64) -> Result<(), BackendError> {
        self.0.unregister(address)
    }

    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.0.locate(address)
    }

    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.0.memory.allocated_bytes(device)
    }

    /// Creates a non-blocking stream on `device`. If `device` is a host NUMA domain, the stream belongs to a GPU in use, or else to the
    /// first GPU.
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.0.streams.create(&self.0.gpus, device)
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.0.streams.destroy(&self.0.gpus, &self.0.sharing.failed_waits, stream)
    }

    fn stream_count(&self, device: DeviceId) -> u64 {
        self.0.streams.count(device)
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        let failed_waits = &self.0.sharing.failed_waits;
        let began = failed_waits.begin();
        // SAFETY: The caller passes a valid stream.
        self.0.with_stream(stream, |_, raw| unsafe { call!(self.0.gpus.driver, cuStreamSynchronize(raw)) })?;
        failed_waits.report(|| self.0.number_of(stream), began)
    }

    /// Enqueues the host function `work`. It runs on a thread of the driver and must call neither CUDA nor this backend. A panic of the
    /// function is logged. Returns [`BackendError::NotSupported`] if the stream is being captured and the driver is older than CUDA 11.3.
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        let _turn = self.0.turn(stream)?;
        self.0.with_stream(stream, |_, raw| launch_host(self.0.gpus.driver, raw, work))
    }

    fn create_event(&self) -> Result<EventHandle, BackendError> {
        Ok(self.0.events.create())
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.0.events.destroy(event)
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.0.record_event(event, stream)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.0.stream_wait_event(stream, event)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.0.synchronize_event(event)
    }

    /// Enqueues an execution. With [`Report::Times`](crate::backend::Report::Times), its operations run on streams and not in a graph, and
    /// timestamps are recorded around each operation. Timed and verified executions cannot be captured.
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        self.0.submit(execution)
    }

    fn copy_pieces(
        &self,
        stream: StreamHandle,
        pieces: &Pieces<'_>,
        bounds: KernelBounds<'_>,
        report: Report,
    ) -> Result<Option<Completion>, BackendError> {
        self.0.copy_pieces(stream, pieces, bounds, report)
    }

    fn limit_host_kernels(&self, multiprocessors: u32, is_paced: bool) {
        self.0.host_blocks.store(multiprocessors.max(1), Ordering::Relaxed);
        self.0.paces_host.store(is_paced, Ordering::Relaxed);
    }

    fn mark_moment(&self, stream: StreamHandle) -> Result<Moment, BackendError> {
        self.0.mark_moment(stream)
    }

    /// Loads and creates the resources that an execution needs. If the stream is being captured, these are the resources for operations on
    /// streams, because a capture allocates the graph's staging memory itself. The call may load a kernel, which waits for the GPU.
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.0.prepare(execution)
    }

    /// Waits for all work of every GPU in use, including work that this backend did not enqueue, like `cudaDeviceSynchronize`. Work that is
    /// being captured is excluded.
    fn synchronize(&self) -> Result<(), BackendError> {
        self.0.gpus.drain()
    }

    fn keep_graphs(&self, programs: usize) {
        self.0.graphs.most_programs.store(programs, Ordering::Relaxed);
    }

    fn graph_statistics(&self) -> GraphStatistics {
        self.0.graphs.statistics()
    }

    /// Returns the UUID of a GPU. For a host NUMA domain, returns an identifier that is derived from the domain's number.
    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        self.0.gpus.device_uuid(device)
    }

    fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        self.0.checks.losing_pairs(&self.0.gpus, pairs)
    }

    fn exportable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        self.0.exportable(address, bytes)
    }

    fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        self.0.export(allocation)
    }

    fn map(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.0.map(&shared, allocation)
    }

    fn unmap(&self, base: u64) -> Result<(), BackendError> {
        if self.0.sharing.release(&self.0.gpus, base)? { Ok(()) } else { Err(BackendError::InvalidPointer(base)) }
    }

    /// Enqueues a wait for signals. The counters of the signals must be in shareable host memory that this process or another process has
    /// allocated by `mp_alloc`.
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        self.0.wait_signals(stream, signals, by)
    }

    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64], _: &StepFate) -> Result<(), BackendError> {
        self.0.await_flags(stream, flags)
    }

    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64], _: &StepFate) -> Result<(), BackendError> {
        if flags.is_empty() {
            return self.0.raise_signals(stream, raises);
        }
        self.0.take_flags(stream, raises, flags)
    }

    fn stream_run_actions(
        &self,
        stream: StreamHandle,
        device: DeviceId,
        actions: &[Segment],
        grid: ActionGrid,
        fate: &StepFate,
    ) -> Result<bool, BackendError> {
        self.0.run_actions(stream, device, actions, grid, fate)
    }

    fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        self.0.action_reach(device, program, ends)
    }

    fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, BackendError> {
        let found = self.0.streams.find(&self.0.gpus, stream)?;
        Ok(if stream.0 <= 2 { DeviceId::HOST } else { DeviceId::gpu(found.gpu as u32) })
    }

    fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        self.0.kernel_ends(device, program, ends)
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        self.0.is_captured(stream)
    }

    fn load_kernels(&self) {
        self.0.gpus.load_kernels();
    }

    /// Calls `work` while the context of the stream's GPU is current.
    fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        self.0.in_stream(stream, work)
    }

    /// True if the stream has no pending work. The result is always false for blocking and default streams, because their work is also
    /// ordered with work of the default stream or other streams.
    fn is_idle(&self, stream: StreamHandle) -> bool {
        self.0.is_idle(stream)
    }

    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.0.raise_signals(stream, signals)
    }

    fn kernel_wait_signals(&self, signals: &[Signal], streams_wait: bool) -> Result<(), BackendError> {
        let sharing = &self.0.sharing;
        let lines = signals.iter().filter_map(|wanted| sharing.line_of(wanted.counter)).filter(|_| !streams_wait);
        lines.for_each(|line| sharing.failed_waits.wait_unseen(line));
        sharing.capture_waits(signals.iter().copied())
    }

    fn stream_number(&self, stream: StreamHandle) -> u64 {
        let found = self.0.streams.find(&self.0.gpus, stream);
        found.ok().and_then(|found| found.number).unwrap_or_else(|| self.0.number_of(stream))
    }

    fn address_for(&self, device: DeviceId, address: u64) -> Result<u64, BackendError> {
        match self.0.sharing.opened_for(&self.0.gpus, device.0 as usize, address) {
            None => Ok(address),
            Some(Some(opened)) => Ok(opened),
            Some(None) => Err(BackendError::NotSupported(format!(
                "kernels of GPU {} cannot reach {address:#x}, memory of another process: there is no peer access between their GPUs",
                device.0
            ))),
        }
    }

    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        self.0.sharing.read_signal(counter)
    }

    fn raise_signal(&self, signal: Signal) -> Result<(), BackendError> {
        self.0.sharing.raise_signal(signal)
    }

    fn name_signallers(&self, allocation: &Allocation, by_address: Arc<[(u64, u32)]>) {
        self.0.sharing.change(allocation, |held| held.signallers.name(by_address));
    }

    fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer) {
        self.0.sharing.fail_waits(allocation, party, peer);
    }

    fn fail_waits_again(&self) -> bool {
        self.0.sharing.fail_waits_again()
    }

    fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        self.0.sharing.lost_peer(wanted)
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
