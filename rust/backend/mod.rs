//! Where bytes move. The engine knows backends by [`Backend`] alone.
//!
//! A backend owns devices, their memory, streams and events, and runs a [`Program`](crate::plan::Program) in stream order. It
//! does not plan, cache or decide: two backends given the same program do the same copies in an order that the program allows.

pub mod cuda;
pub mod host;
mod loss;
pub(crate) mod nvtx;
pub mod rig;

pub use cuda::{GraphStatistics, Kept};
pub use loss::{Departed, InVain};

use crate::plan::{Engine, Place, Program};
use crate::share::Shared;
use crate::topology::DeviceId;
use crate::topology::probe::Gpu;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// What kind of memory an address lies in, as far as planning cares.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of a GPU.
    Device,
    /// Host memory that a GPU's copy engine reads and writes directly.
    Pinned,
    /// Host memory that the driver stages by itself: never split over several paths.
    Pageable,
}

/// The allocation that an address lies in.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Not 0, and never used twice in a process, so that a freed and reused address is a different allocation.
    pub id: u64,
    /// First byte.
    pub base: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Whose memory it is.
    pub device: DeviceId,
    /// Its kind.
    pub kind: MemoryKind,
}

/// A caller's stream: what `mp_stream_t` holds (a `cudaStream_t` on CUDA). 0 is the default stream.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

/// A caller's event: what `mp_event_t` holds (on CUDA, one of [`Backend::create_event`] or any `cudaEvent_t`).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// A counter of 64 bits in memory that a backend locates, aligned to 8, and a value that it is raised to or waited for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Its address.
    pub counter: u64,
    /// Reached when the counter is at least this, counted cyclically ([`reached`](crate::share::signal::reached)).
    pub value: u64,
}

/// The moment at which an execution has finished. Cheap to clone.
pub trait CompletionState: Debug + Send + Sync {
    /// Whether it has finished, without waiting. An error that struck the execution is reported here and by `wait`.
    fn is_done(&self) -> Result<bool, BackendError>;
    /// Whether it is known to have finished. Where asking costs more than coming after it once more, this may say no for long.
    fn is_known_done(&self) -> bool {
        // One that failed has finished too: its error is its caller's to hear.
        self.is_done().unwrap_or(true)
    }
    /// Blocks the calling thread until it has finished. Reports waits in vain as [`Backend::synchronize_stream`] does.
    fn wait(&self) -> Result<(), BackendError>;
    /// When each operation ran, of an execution of [`Backend::execute_timed`]. Waits until it has finished.
    fn times(&self) -> Result<OpTimes, BackendError> {
        Err(BackendError::NotSupported("this execution was not timed: enqueue it by `execute_timed`".into()))
    }
    /// For the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// When the operations of one execution ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpTimes {
    /// Begin and end of each operation of the program, in seconds from the moment at which the execution could begin.
    pub ops: Vec<(f64, f64)>,
    /// By how many seconds times of different devices may be off against each other; times of one device are better than that.
    pub precision: f64,
}

/// Shared handle to a [`CompletionState`].
pub type Completion = Arc<dyn CompletionState>;

/// Addresses of one transfer of the batch that a program moves.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoints {
    /// First byte of the destination.
    pub dst: u64,
    /// First byte of the source.
    pub src: u64,
}

/// Work of a stream for the CPU. Launches of one graph may call it from several threads at once.
pub type HostFunction = Box<dyn Fn() + Send + Sync>;

/// How a stream waits for signals. A backend that has one way only ignores it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum SignalWait {
    /// By an operation of the stream, which takes nothing of the GPU.
    #[default]
    Operation,
    /// By a kernel of one warp, which goes on sooner.
    Kernel,
}

/// Everything that one execution of a program needs.
#[derive(Debug)]
pub struct Execution<'a> {
    /// What to do. Valid: `plan::validate` has accepted it.
    pub program: &'a Arc<Program>,
    /// One per transfer of the batch. Shared, so that a backend can keep it for as long as the copies run.
    pub endpoints: &'a Arc<[Endpoints]>,
    /// Base address of each ring of the program.
    pub rings: &'a Arc<[u64]>,
    /// The execution starts after all earlier work in this stream, and later work in it starts after the execution.
    pub stream: StreamHandle,
    /// It also starts after these: earlier executions that share staging memory with it.
    pub after: &'a [Completion],
    /// Compare every transfer's destination with its source after the last copy and before completion; a difference makes the
    /// completion report [`BackendError::DataCorruption`].
    pub verify: bool,
    /// How the plan is to be run, decided by the planner: [`Engine::Auto`] is streams. A backend that has one way only ignores it.
    pub engine: Engine,
}

impl<'a> Execution<'a> {
    /// The same with other addresses of its ends, if there are any.
    fn with_ends(&self, ends: Option<&'a Arc<[Endpoints]>>) -> Execution<'a> {
        Execution { endpoints: ends.unwrap_or(self.endpoints), ..*self }
    }
}

/// The address that a place of a program stands for, given what an execution binds it to.
fn address(program: &Program, endpoints: &[Endpoints], rings: &[u64], place: Place) -> u64 {
    match place {
        Place::Source { transfer, offset } => endpoints[transfer as usize].src + offset,
        Place::Destination { transfer, offset } => endpoints[transfer as usize].dst + offset,
        Place::Slot { ring, slot } => {
            let ring = ring.0 as usize;
            rings[ring] + u64::from(slot) * program.rings[ring].slot_bytes
        }
    }
}

/// Why a backend could not do something.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// The device has no memory left.
    #[error("device {device}: out of memory: {bytes} bytes asked for")]
    #[allow(missing_docs)]
    OutOfMemory { device: i32, bytes: u64 },
    /// There is no such device.
    #[error("device {0} does not exist on this backend")]
    InvalidDevice(i32),
    /// The address was not given out by this backend, or has been freed.
    #[error("{0:#x} is not the start of an allocation of this context, or was freed already")]
    InvalidPointer(u64),
    /// The stream or event does not exist, or was destroyed.
    #[error("{0} is not a {1} of this context, or was destroyed already")]
    InvalidHandle(usize, &'static str),
    /// Bytes arrived wrong; only with `MPGPU_VERIFY=bytes`.
    #[error("transfer {transfer}: byte {offset} of the destination differs from the source after execution")]
    #[allow(missing_docs)]
    DataCorruption { transfer: u32, offset: u64 },
    /// There is no driver or no device that this backend could use.
    #[error("{0}")]
    NoDriver(String),
    /// This backend cannot do it; the text says why, and what can be done instead.
    #[error("{0}")]
    NotSupported(String),
    /// Another process has ended, or has freed what it shared.
    #[error("{0}")]
    PeerGone(String),
    /// The operating system or the driver refused.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    Driver { what: String, reason: String, code: i64 },
}

/// What a backend runs on: what a probe's file is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The driver's version.
    pub driver: String,
    /// In the order of their numbers.
    pub gpus: Vec<Gpu>,
}

/// A place where programs run.
///
/// All methods may be called from any thread. `execute`, `record_event`, `stream_wait_event` and `launch_host` enqueue and return:
/// they never wait for earlier work.
pub trait Backend: Send + Sync {
    /// `host`, `cuda`.
    fn name(&self) -> &'static str;
    /// What it runs on.
    fn identity(&self) -> Result<Identity, BackendError> {
        Err(BackendError::NotSupported(format!(
            "the {} backend does not say what it runs on, so a probe of it would be valid nowhere",
            self.name()
        )))
    }

    /// Memory of `device`, aligned to at least 256 bytes; host memory is pinned where the backend knows the difference.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Gives memory back. Work that uses it must have finished.
    fn free(&self, address: u64) -> Result<(), BackendError>;
    /// The allocation that `address` lies in; `None` where this backend does not know it, as ordinary host memory.
    /// [`BackendError::NotSupported`] for memory that it knows and cannot serve.
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError>;
    /// Bytes that this backend has given out on `device` and that were not freed; 0 for a device that does not exist.
    fn allocated_bytes(&self, device: DeviceId) -> u64;

    /// A stream of `device` that orders with no other stream.
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError>;
    /// Enqueued work still finishes. The default stream cannot be destroyed.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Streams that this backend holds on `device`, the default stream not among them; 0 for a device that does not exist.
    fn stream_count(&self, device: DeviceId) -> u64;
    /// Blocks until all work enqueued so far has finished. [`BackendError::PeerGone`], once for each peer, where a stream of this backend
    /// has waited for signals in vain: this one may have come after it.
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Runs `work` on a CPU thread in stream order, and drops it after that. `work` may block; other streams go on. In a stream that is
    /// being captured it is the graph's: it runs at each launch, and is dropped when the graph and what was instantiated of it are gone,
    /// on a thread that must not call the driver.
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError>;

    /// An event that counts as done until it is first recorded.
    fn create_event(&self) -> Result<EventHandle, BackendError>;
    /// Waits that were enqueued still hold.
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError>;
    /// The event stands for all work enqueued in `stream` so far.
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError>;
    /// Work enqueued in `stream` from now on starts after what `event` stands for now.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError>;
    /// Blocks until what `event` stands for now has finished. Reports waits in vain until the event is recorded in a stream that was
    /// told of them.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError>;

    /// Enqueues one run of a program.
    fn execute(&self, execution: &Execution<'_>) -> Result<Completion, BackendError>;
    /// The same for a run that nobody waits for by itself, but only in stream order. Spares a backend the marking of its end.
    fn enqueue(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.execute(execution).map(drop)
    }
    /// [`execute`](Backend::execute) of a plan that keeps at hand what the backend has made for it: `kept` is the plan's own.
    fn execute_kept(&self, execution: &Execution<'_>, kept: &Kept) -> Result<Completion, BackendError> {
        let _ = kept;
        self.execute(execution)
    }
    /// [`enqueue`](Backend::enqueue) of such a plan.
    fn enqueue_kept(&self, execution: &Execution<'_>, kept: &Kept) -> Result<(), BackendError> {
        let _ = kept;
        self.enqueue(execution)
    }
    /// The same, and the completion knows the [`times`](CompletionState::times) of the operations. Each is issued by itself: what would
    /// go as one graph goes over streams, and takes a little longer than without timestamps.
    fn execute_timed(&self, _: &Execution<'_>) -> Result<Completion, BackendError> {
        Err(BackendError::NotSupported(format!("the {} backend does not time operations", self.name())))
    }
    /// Blocks until everything ever enqueued has finished.
    fn synchronize(&self) -> Result<(), BackendError>;

    /// What has been launched as graphs; all zero on a backend that has none.
    fn graph_statistics(&self) -> GraphStatistics {
        GraphStatistics::default()
    }

    /// Names a device so that every process of the node knows it, whatever number it has there: a GPU's UUID.
    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        Ok(uuid_of_number(device))
    }
    /// Those of these pairs of devices that report peer access and lose bytes all the same, as GPUs behind an IOMMU do. Each pair is tried once, in both
    /// directions, by copies that are waited for, but not for long: not to be called where work is enqueued.
    fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        let _ = pairs;
        Vec::new()
    }

    /// As [`Backend::locate`], of memory of `bytes` at an address, as much of the allocation as can be shared. [`BackendError::NotSupported`]
    /// with the remedy where that is less than those bytes.
    fn shareable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let _ = bytes;
        self.locate(address)
    }
    /// What another process needs to map an allocation that [`Backend::shareable`] has returned. [`BackendError::NotSupported`] with the
    /// remedy for memory that cannot be shared.
    fn share(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let _ = allocation;
        Err(BackendError::NotSupported(format!("the backend {} shares no memory", self.name())))
    }
    /// Maps what another process, or another context of this one, has shared. The id and the base of `allocation` have no meaning.
    /// From now on it is located as memory of its device. Returns its first byte.
    fn adopt(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        let _ = (shared, allocation);
        Err(BackendError::NotSupported(format!("the backend {} shares no memory", self.name())))
    }
    /// Unmaps what [`Backend::adopt`] has returned. Work that uses it must have finished.
    fn disown(&self, base: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(base))
    }

    /// Work enqueued in `stream` from now on starts when every signal's counter has reached its value. Counters lie in memory that this
    /// backend locates. [`BackendError::PeerGone`] for one that may never be raised: then nothing is enqueued.
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        let _ = (stream, signals, by);
        Err(BackendError::NotSupported(format!("the backend {} has no signals", self.name())))
    }
    /// Raises counters after all work enqueued in `stream` so far: whoever sees the value sees what that work has written.
    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        let _ = (stream, signals);
        Err(BackendError::NotSupported(format!("the backend {} has no signals", self.name())))
    }
    /// What a counter stands at, for a thread that waits for it. [`BackendError::NotSupported`] for memory that the CPU cannot read.
    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        Err(BackendError::InvalidPointer(counter))
    }
    /// A process that might have raised counters in this allocation has ended. Waits for counters there that are not reached by then
    /// end, now and later: no stream waits for ever, and each is told once.
    fn abandon(&self, allocation: &Allocation, peer: Departed) {
        let _ = (allocation, peer);
    }
    /// Called every few milliseconds after [`abandon`](Backend::abandon), for as long as it returns true: where the end of a wait in vain can be
    /// undone by a process that lives, sees to it that the stream goes on all the same.
    fn tend(&self) -> bool {
        false
    }
    /// Why counters at this address may never be raised, if that is so.
    fn abandoned(&self, counter: u64) -> Option<Departed> {
        let _ = counter;
        None
    }
}

/// The identity of a device that every process of the node knows by the same number: a virtual one, or host memory.
pub(crate) fn uuid_of_number(device: DeviceId) -> [u8; 16] {
    let mut identity = *b"mpgpu device    ";
    identity[12..].copy_from_slice(&device.0.to_le_bytes());
    identity
}
