//! Implements virtual devices on CPU threads. They make real copies in CUDA's stream order without a GPU.
//!
//! Each virtual GPU and each host NUMA domain has its own memory, which is host memory that is assigned to the device. Streams and events
//! order work as in CUDA: the work of one stream runs in order, different streams run concurrently, and events order streams. Streams
//! created here behave like CUDA's non-blocking streams. They are not ordered with the default stream, which is one more stream of the
//! context.
//!
//! Enqueued work is a graph of nodes that count their unfinished predecessors. A queue with a limited number of threads runs the ready
//! nodes. One separate thread polls for signals that other processes set, so a waiting stream occupies no thread of the queue. Host
//! functions may block, so each stream with host functions runs them on a thread of its own. Threads start when they are first needed.
//!
//! An error of an execution (`BackendError::DataCorruption`, or a failure inside an operation) is logged, and the completion of the
//! execution reports it. The error does not stop the stream, and later work runs.
//!
//! A host function may enqueue work. It must neither wait for work of this backend that follows the function in its stream, nor drop the
//! backend.

mod chain;
pub mod kernel;
#[cfg(all(test, shuttle))]
mod loss_model;
mod memory;
#[cfg(all(test, shuttle))]
mod model;
mod moment;
mod node;
mod pieces;
mod queue;
mod rings;
mod run;
mod schedule;
mod streams;
mod times;

use self::memory::HostMemory;
use self::moment::Passed;
use self::node::Node;
use self::pieces::PieceWork;
use self::queue::Queue;
use self::rings::{RingBytes, Rings};
use self::run::{HostWork, Run, Signals, Wait};
use self::schedule::Schedule;
use self::streams::{StreamTable, next_handle};
use self::times::Times;
use crate::backend::Shared;
use crate::backend::failed_waits::{Behind, FailedWaits};
use crate::backend::uuid_of_number;
use crate::backend::{
    Allocation, Backend, BackendError, Completion, EventHandle, Execution, HostFunction, Identity, KernelBounds, LostPeer, Moment, Pieces,
    Report, Signal, SignalWait, StepFate, StreamHandle,
};
use crate::plan::Program;
use crate::sync::{Mutex, held, lock};
use crate::topology::DeviceId;
use crate::topology::Gpu;
use ahash::RandomState;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, RwLock};

/// Most recent recording of an event.
#[derive(Clone, Debug, Default)]
struct Recorded {
    /// Graph node whose end completes the event. `None` if all work before the event had finished when the event was recorded.
    end: Option<Arc<Node<HostWork>>>,
    /// Waits for signals that precede the event in its stream. If one of them has failed, a thread that waits for the event gets the error.
    behind: Behind,
}

/// Maximum number of threads that run executions. More threads would not help, because a few threads saturate the memory bandwidth of the
/// node, and a program rarely uses more streams.
const MOST_THREADS: usize = 16;

/// Backend whose devices are CPU threads. Dropping the backend waits for all enqueued work, ends the threads, and frees the memory.
#[derive(Debug)]
pub struct HostBackend {
    /// Number of each visible virtual GPU, counted over all virtual GPUs of the machine.
    gpus: Vec<u32>,
    hosts: u32,
    memory: Arc<HostMemory>,
    /// Queue whose threads run the operations of executions.
    queue: Arc<Queue<HostWork>>,
    /// Queue whose thread polls the counters for which streams wait.
    waits: Arc<Queue<HostWork>>,
    /// Byte ranges of staging rings that executions use or wait for. One execution at a time may use a byte range.
    rings: Arc<Rings<HostWork>>,
    failed_waits: Arc<FailedWaits>,
    streams: StreamTable<HostWork>,
    /// Most recent recording of each event, by event handle.
    events: RwLock<HashMap<usize, Mutex<Recorded>, RandomState>>,
}

impl HostBackend {
    /// Creates a backend for a node with `gpus` virtual GPUs and `hosts` NUMA domains. No thread starts yet.
    pub fn new(gpus: u32, hosts: u32) -> HostBackend {
        HostBackend::showing((0..gpus).collect(), hosts)
    }

    /// Creates a backend for a node on which only the GPUs with the numbers in `gpus` are visible, in this order. `hosts` is the number of
    /// NUMA domains of the node.
    pub fn showing(gpus: Vec<u32>, hosts: u32) -> HostBackend {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(MOST_THREADS);
        HostBackend {
            gpus,
            hosts,
            memory: Arc::default(),
            queue: Queue::new("mpgpu-copy", threads),
            waits: Queue::watching("mpgpu-signal"),
            rings: Arc::new(Rings::new()),
            failed_waits: Arc::default(),
            streams: StreamTable::new(),
            events: RwLock::default(),
        }
    }

    fn check_device(&self, device: DeviceId) -> Result<(), BackendError> {
        let exists = if device.is_host() { device.0.abs_diff(-1) < self.hosts } else { (device.0 as usize) < self.gpus.len() };
        if exists { Ok(()) } else { Err(BackendError::InvalidDevice(device.0)) }
    }

    /// Calls `work` with the most recent recording of an event, and returns the result of `work`.
    fn with_event<T>(&self, handle: EventHandle, work: impl FnOnce(&mut Recorded) -> T) -> Result<T, BackendError> {
        let events = held(self.events.read());
        let event = events.get(&handle.0).ok_or(BackendError::InvalidHandle(handle.0, "event"))?;
        Ok(work(&mut lock(event)))
    }

    /// Returns the waits for signals that were enqueued in a stream so far. If one of these waits has failed, the completions of later work
    /// in the stream report the failure.
    fn behind(&self, stream: StreamHandle) -> Behind {
        self.failed_waits.behind(|| stream.0 as u64)
    }

    /// Enqueues a wait of a stream for signals. If `takes` is true, the stream resets the signals' counters to 0 after the wait. `fate` is
    /// the state of the communication step to which the signals belong, or `None` if they belong to no step.
    fn wait(&self, stream: StreamHandle, signals: Signals, takes: bool, fate: Option<&StepFate>) -> Result<(), BackendError> {
        self.waits.start()?;
        self.queue.start()?;
        self.streams.with(stream, |found| {
            // A signal that has arrived stays set, so a wait for it cannot fail.
            let may_fail = |wanted: &&Signal| fate.is_some() || !self.memory.is_reached(wanted).unwrap_or(false);
            let lines = signals.iter().filter(may_fail).filter_map(|wanted| self.memory.line_of(wanted.counter));
            self.failed_waits.wait(stream.0 as u64, lines);
            let (memory, failed_waits) = (Arc::clone(&self.memory), Arc::clone(&self.failed_waits));
            let wait = Wait { signals, takes, fate: fate.cloned(), lost: OnceLock::new(), memory, failed_waits };
            found.chain.append(&Node::new(HostWork::Wait(wait), &self.waits));
            Ok(())
        })
    }

    /// Enqueues an operation that sets signals after the stream's earlier work. `fate` is the state of the communication step to which the
    /// signals belong, or `None` if they belong to no step. The signals of an abandoned step are not set.
    fn raise(&self, stream: StreamHandle, signals: &[Signal], fate: Option<&StepFate>) -> Result<(), BackendError> {
        self.queue.start()?;
        self.streams.with(stream, |stream| {
            stream.chain.append(&Node::new(HostWork::Raise(Signals::from_slice(signals), fate.cloned()), &self.queue));
            Ok(())
        })
    }

    fn enqueue(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.queue.start()?;
        let known = execution.state.map(|state| &state.memory).filter(|memory| memory.len() == 2 * execution.endpoints.len());
        let run = Run {
            program: Arc::clone(execution.program),
            endpoints: Arc::clone(execution.endpoints),
            rings: Arc::clone(execution.rings),
            memory: known.map_or_else(|| self.memory.of_ends(execution.endpoints), Arc::clone),
            schedule: Schedule::new(execution.program),
            verify: execution.verify,
            times: (execution.report == Report::Times).then(|| Times::new(execution.program.ops.len())),
            failed_waits: Arc::clone(&self.failed_waits),
            behind: self.behind(execution.stream),
            fate: execution.fate.cloned(),
        };
        let node = Node::new(HostWork::Run(Box::new(run)), &self.queue);
        let bytes: RingBytes =
            (execution.rings.iter().zip(&execution.program.rings)).map(|(base, ring)| *base..base + ring.bytes()).collect();
        let claim = (!bytes.is_empty()).then(|| Node::new(HostWork::Claim(Arc::clone(&self.rings), Arc::clone(&node), bytes), &self.queue));
        // If the execution uses staging rings, its claim waits for the earlier executions instead of the execution itself. An execution
        // that has exclusive use of rings must not wait, because the earlier executions may still need the same rings.
        let first = claim.as_ref().unwrap_or(&node);
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Node<HostWork>>().ok_or_else(|| BackendError::Driver {
                what: "submit".into(),
                reason: "an execution can only wait for executions of the same backend".into(),
                code: 0,
            })?;
            earlier.precede(first);
        }
        self.streams.with(execution.stream, |stream| {
            let end = claim.as_ref().map(|_| Node::new(HostWork::GiveBack(Arc::clone(&self.rings), Arc::clone(&node)), &self.queue));
            match &end {
                None => stream.chain.append(&node),
                Some(end) => {
                    node.precede(end);
                    stream.chain.append_row(first, Some(end));
                }
            }
            Ok(())
        })?;
        Ok(node)
    }
}

impl Backend for HostBackend {
    fn name(&self) -> &'static str {
        "host"
    }

    fn is_virtual(&self) -> bool {
        true
    }

    fn identity(&self) -> Result<Identity, BackendError> {
        let gpu = |number: &u32| Gpu { uuid: format!("virtual-{number}"), name: "virtual device on CPU threads".into() };
        Ok(Identity { driver: "none".into(), gpus: self.gpus.iter().map(gpu).collect() })
    }

    /// Allocates memory that is aligned to 4096 bytes, and returns its address. A size of 0 is treated as 1 byte, so that every allocation
    /// has its own address.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.check_device(device)?;
        self.memory.allocate(device, bytes, false)
    }

    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.check_device(device)?;
        self.memory.allocate(device, bytes, true)
    }

    fn free(&self, address: u64) -> Result<(), BackendError> {
        let gone = self.memory.locate(address);
        self.memory.free(address)?;
        gone.into_iter().for_each(|allocation| self.failed_waits.forget_allocation(allocation.id));
        Ok(())
    }

    fn frees_at_once(&self) -> bool {
        true
    }

    fn register(&self, address: u64, bytes: u64, huge: bool) -> Result<bool, BackendError> {
        self.memory.register(address, bytes, huge)
    }

    fn unregister(&self, address: u64) -> Result<(), BackendError> {
        self.memory.unregister(address)
    }

    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        Ok(self.memory.locate(address))
    }

    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.memory.allocated_bytes(device)
    }

    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.check_device(device)?;
        Ok(self.streams.create(device))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.streams.destroy(stream)?;
        self.failed_waits.forget(|| stream.0 as u64);
        Ok(())
    }

    fn ordered_rings(&self, _: &Program) -> usize {
        0
    }

    fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, BackendError> {
        self.streams.with(stream, |stream| Ok(stream.device.unwrap_or(DeviceId::HOST)))
    }

    fn stream_count(&self, device: DeviceId) -> u64 {
        self.streams.count(device)
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        let began = self.failed_waits.begin();
        if let Some(tail) = self.streams.with(stream, |stream| Ok(stream.chain.tail()))? {
            tail.wait_finished();
        }
        self.failed_waits.report(|| stream.0 as u64, began)
    }

    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        self.streams.with(stream, |stream| {
            let queue = stream.functions.get_or_init(|| Queue::new("mpgpu-function", 1));
            queue.start()?;
            stream.chain.append(&Node::new(HostWork::Function(Mutex::new(Some(work))), queue));
            Ok(())
        })
    }

    fn create_event(&self) -> Result<EventHandle, BackendError> {
        let handle = next_handle();
        held(self.events.write()).insert(handle, Mutex::default());
        Ok(EventHandle(handle))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        let destroyed = held(self.events.write()).remove(&event.0);
        destroyed.map(drop).ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        // The event stays locked while the stream is read. If two threads record the event at the same time, the later one therefore stores
        // the later state.
        self.with_event(event, |recorded| {
            let behind = self.behind(stream);
            *recorded = Recorded { end: self.streams.with(stream, |stream| Ok(stream.chain.tail()))?, behind };
            Ok(())
        })?
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        let Recorded { end: awaited, behind } = self.with_event(event, |recorded| recorded.clone())?;
        self.failed_waits.join(|| stream.0 as u64, &behind);
        self.streams.with(stream, |stream| {
            if let Some(awaited) = awaited.filter(|awaited| !awaited.is_finished()) {
                let join = Node::new(HostWork::Join, &self.queue);
                awaited.precede(&join);
                stream.chain.append(&join);
            }
            Ok(())
        })
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        let Recorded { end, behind } = self.with_event(event, |recorded| recorded.clone())?;
        if let Some(end) = end {
            end.wait_finished();
        }
        self.failed_waits.report_behind(&behind)
    }

    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        self.enqueue(execution).map(|end| (execution.report != Report::Nothing).then_some(end))
    }

    fn copy_pieces(
        &self,
        stream: StreamHandle,
        pieces: &Pieces<'_>,
        _: KernelBounds<'_>,
        report: Report,
    ) -> Result<Option<Completion>, BackendError> {
        self.queue.start()?;
        let node = Node::new(HostWork::Pieces(PieceWork::new(pieces)), &self.queue);
        self.streams.with(stream, |stream| {
            stream.chain.append(&node);
            Ok(())
        })?;
        Ok((report != Report::Nothing).then_some(node))
    }

    fn mark_moment(&self, stream: StreamHandle) -> Result<Moment, BackendError> {
        self.queue.start()?;
        let moment = Passed::default();
        self.streams.with(stream, |stream| {
            stream.chain.append(&Node::new(HostWork::Moment(moment.clone()), &self.queue));
            Ok(())
        })?;
        Ok(Box::new(moment))
    }

    /// Starts the threads that the execution needs.
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.streams.with(execution.stream, |_| self.queue.start())
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.streams.wait_finished();
        Ok(())
    }

    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        let number = self.gpus.get(device.0 as usize).filter(|_| !device.is_host());
        Ok(uuid_of_number(number.map_or(device, |number| DeviceId::gpu(*number))))
    }

    fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        self.memory.export(allocation)
    }

    fn map(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.memory.map(&shared, allocation)
    }

    fn unmap(&self, base: u64) -> Result<(), BackendError> {
        self.memory.unmap(base)
    }

    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], _: SignalWait) -> Result<(), BackendError> {
        if let Some(wait) = signals.iter().find_map(|wanted| self.memory.failed_wait(wanted)) {
            return Err(wait.error());
        }
        self.wait(stream, Signals::from_slice(signals), false, None)
    }

    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        if !raises.is_empty() {
            self.raise(stream, raises, Some(fate))?;
        }
        if flags.is_empty() {
            return Ok(());
        }
        self.wait(stream, flags.iter().map(|flag| Signal { counter: *flag, value: 1 }).collect(), true, Some(fate))
    }

    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        self.wait(stream, flags.iter().map(|flag| Signal { counter: *flag, value: 1 }).collect(), false, Some(fate))
    }

    fn is_idle(&self, stream: StreamHandle) -> bool {
        self.streams.with(stream, |stream| Ok(stream.chain.tail().is_none())).unwrap_or(false)
    }

    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.raise(stream, signals, None)
    }

    fn kernel_wait_signals(&self, signals: &[Signal], streams_wait: bool) -> Result<(), BackendError> {
        for wanted in signals {
            if let Some(line) = self.memory.line_of(wanted.counter).filter(|_| !streams_wait) {
                self.failed_waits.wait_unseen(line);
            }
            self.memory.kernel_wait_signal(*wanted)?;
        }
        Ok(())
    }

    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        self.memory.read_signal(counter)
    }

    fn raise_signal(&self, signal: Signal) -> Result<(), BackendError> {
        self.memory.raise_signal(signal)
    }

    fn name_signallers(&self, allocation: &Allocation, by_address: Arc<[(u64, u32)]>) {
        self.memory.name_signallers(allocation, by_address);
    }

    fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer) {
        self.memory.fail_waits(allocation, party, peer, |line, wait| self.failed_waits.note(line, wait));
    }

    fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        self.memory.lost_peer(wanted)
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        // Nothing more is enqueued, because no other reference to the backend exists.
        self.streams.end();
        self.waits.join();
        self.queue.join();
    }
}
