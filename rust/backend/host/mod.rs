//! Virtual devices on CPU threads: real bytes, CUDA's ordering, no GPU.
//!
//! Each virtual GPU and each host NUMA domain has memory of its own, which is ordinary host memory with an owner. Streams and
//! events order as CUDA's do: work of one stream runs in order, streams run concurrently, events join them. Streams created here
//! are like CUDA's non-blocking ones: they don't order with the default stream, which is one more stream of the context.
//!
//! Enqueued work is a graph of nodes that count their unfinished predecessors; a queue with a bounded number of
//! threads runs what is ready. Waits for signals, which other processes raise, are watched by one thread, so that a stream that waits
//! takes none from the others. Host functions may block, so each stream that has any runs them on a thread of its own. Threads
//! start when they are first needed.
//!
//! An error of an execution (`BackendError::DataCorruption`, or a failure inside an operation) is logged and reported by its
//! completion. It does not stop the stream: later work runs.
//!
//! A host function may enqueue work. It must not wait for work of this backend that comes after it, nor drop the backend.

mod chain;
pub mod kernel;
mod memory;
#[cfg(all(test, shuttle))]
mod model;
mod node;
mod queue;
mod run;
mod schedule;
mod streams;
mod sync;
mod times;

use self::memory::Memory;
use self::node::Node;
use self::queue::Queue;
use self::run::{HostWork, Run, Signals, Wait};
use self::schedule::Schedule;
use self::streams::{Streams, key};
use self::sync::{Mutex, held, lock};
use self::times::Times;
use super::loss::{Heard, Losses};
use super::{
    Allocation, Backend, BackendError, Completion, Departed, EventHandle, Execution, HostFunction, Identity, Signal, SignalWait,
    StreamHandle,
};
use crate::share::Shared;
use crate::topology::DeviceId;
use crate::topology::probe::Gpu;
use slotmap::{DefaultKey, Key, SlotMap};
use std::sync::{Arc, RwLock};

/// What an event stands for.
#[derive(Clone, Debug, Default)]
struct Recorded {
    /// The end of a node, or nothing that is still to come.
    end: Option<Arc<Node<HostWork>>>,
    /// What the stream had been told; `None` until the event is recorded.
    heard: Option<Heard>,
}

/// More threads than this add nothing: a few saturate a node's memory, and a program rarely has more lanes.
const MOST_THREADS: usize = 16;

/// The host backend. Dropping it waits for all enqueued work, ends its threads, and frees its memory.
#[derive(Debug)]
pub struct HostBackend {
    gpus: u32,
    hosts: u32,
    memory: Arc<Memory>,
    /// Runs the steps of executions.
    queue: Arc<Queue<HostWork>>,
    /// Watches the counters that streams wait for.
    waits: Arc<Queue<HostWork>>,
    losses: Arc<Losses>,
    streams: Streams<HostWork>,
    /// What each event stands for.
    events: RwLock<SlotMap<DefaultKey, Mutex<Recorded>>>,
}

impl HostBackend {
    /// A node of `gpus` virtual GPUs and `hosts` NUMA domains. Starts no thread yet.
    pub fn new(gpus: u32, hosts: u32) -> HostBackend {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(MOST_THREADS);
        HostBackend {
            gpus,
            hosts,
            memory: Arc::default(),
            queue: Queue::new("mpgpu-copy", threads),
            waits: Queue::watching("mpgpu-signal"),
            losses: Arc::default(),
            streams: Streams::new(),
            events: RwLock::default(),
        }
    }

    fn check_device(&self, device: DeviceId) -> Result<(), BackendError> {
        let exists = if device.is_host() { device.0.abs_diff(-1) < self.hosts } else { device.0.unsigned_abs() < self.gpus };
        if exists { Ok(()) } else { Err(BackendError::InvalidDevice(device.0)) }
    }

    /// Calls `work` with what an event stands for.
    fn with_event<T>(&self, handle: EventHandle, work: impl FnOnce(&mut Recorded) -> T) -> Result<T, BackendError> {
        let events = held(self.events.read());
        let event = key(handle.0).and_then(|key| events.get(key)).ok_or(BackendError::InvalidHandle(handle.0, "event"))?;
        Ok(work(&mut lock(event)))
    }

    /// What a stream has been told of waits in vain.
    fn heard(&self, stream: StreamHandle) -> Heard {
        self.losses.heard(|| stream.0 as u64)
    }

    fn enqueue(&self, execution: &Execution<'_>, times: Option<Times>) -> Result<Completion, BackendError> {
        self.queue.start()?;
        let run = Run {
            program: Arc::clone(execution.program),
            endpoints: Arc::clone(execution.endpoints),
            rings: Arc::clone(execution.rings),
            schedule: Schedule::new(execution.program),
            verify: execution.verify,
            times,
            losses: Arc::clone(&self.losses),
            heard: self.heard(execution.stream),
        };
        let node = Node::new(HostWork::Run(run), &self.queue);
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Node<HostWork>>().ok_or_else(|| BackendError::Driver {
                what: "execute".into(),
                reason: "an execution can only come after executions of its own backend".into(),
                code: 0,
            })?;
            earlier.precede(&node);
        }
        self.streams.with(execution.stream, |stream| {
            stream.chain.append(&node);
            Ok(())
        })?;
        Ok(node)
    }
}

impl Backend for HostBackend {
    fn name(&self) -> &'static str {
        "host"
    }

    fn identity(&self) -> Result<Identity, BackendError> {
        let gpu = |number| Gpu { uuid: format!("virtual-{number}"), name: "virtual device on CPU threads".into() };
        Ok(Identity { driver: "none".into(), gpus: (0..self.gpus).map(gpu).collect() })
    }

    /// Aligned to 4096 bytes. 0 bytes count as 1, so that every allocation has an address of its own.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.check_device(device)?;
        self.memory.allocate(device, bytes)
    }

    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.memory.free(address)
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
        self.losses.forget(|| stream.0 as u64);
        Ok(())
    }

    fn stream_count(&self, device: DeviceId) -> u64 {
        self.streams.count(device)
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        if let Some(tail) = self.streams.with(stream, |stream| Ok(stream.chain.tail()))? {
            tail.wait_finished();
        }
        self.losses.tell(|| stream.0 as u64)
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
        let key = held(self.events.write()).insert(Mutex::default());
        Ok(EventHandle(key.data().as_ffi() as usize))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        let destroyed = key(event.0).and_then(|key| held(self.events.write()).remove(key));
        destroyed.map(drop).ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        // The event's lock is held while the stream is read: of two threads that record, the later one wins with the later state.
        self.with_event(event, |recorded| {
            let heard = Some(self.heard(stream));
            *recorded = Recorded { end: self.streams.with(stream, |stream| Ok(stream.chain.tail()))?, heard };
            Ok(())
        })?
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        let awaited = self.with_event(event, |recorded| recorded.end.clone())?;
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
        let Recorded { end, heard } = self.with_event(event, |recorded| recorded.clone())?;
        if let Some(end) = end {
            end.wait_finished();
        }
        heard.map_or(Ok(()), |heard| self.losses.tell_since(heard))
    }

    fn execute(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.enqueue(execution, None)
    }

    fn execute_timed(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.enqueue(execution, Some(Times::new(execution.program.ops.len())))
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.streams.wait_finished();
        Ok(())
    }

    fn share(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        self.memory.share(allocation)
    }

    fn adopt(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.memory.adopt(&shared, allocation)
    }

    fn disown(&self, base: u64) -> Result<(), BackendError> {
        self.memory.disown(base)
    }

    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], _: SignalWait) -> Result<(), BackendError> {
        if let Some(wait) = signals.iter().find_map(|wanted| self.memory.in_vain(wanted)) {
            return Err(wait.error());
        }
        self.waits.start()?;
        self.queue.start()?;
        self.streams.with(stream, |stream| {
            let (memory, losses) = (Arc::clone(&self.memory), Arc::clone(&self.losses));
            let wait = Wait { signals: Signals::from_slice(signals), memory, losses };
            stream.chain.append(&Node::new(HostWork::Wait(wait), &self.waits));
            Ok(())
        })
    }

    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.queue.start()?;
        self.streams.with(stream, |stream| {
            stream.chain.append(&Node::new(HostWork::Raise(Signals::from_slice(signals)), &self.queue));
            Ok(())
        })
    }

    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        self.memory.read_signal(counter)
    }

    fn abandon(&self, allocation: &Allocation, peer: Departed) {
        self.memory.abandon(allocation, peer);
    }

    fn abandoned(&self, counter: u64) -> Option<Departed> {
        self.memory.abandoned(counter)
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        // Nobody else has a reference any more, so nothing is enqueued from here on.
        self.streams.end();
        self.waits.join();
        self.queue.join();
    }
}
