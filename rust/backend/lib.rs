//! Where bytes move. The engine knows backends by [`Backend`] alone.
//!
//! A backend owns devices, their memory, streams and events, and runs a [`Program`] in stream order. It
//! does not plan, cache or decide: two backends given the same program do the same copies in an order that the program allows.
//!
//! | module | promise |
//! | --- | --- |
//! | [`sync`] | locks, which a model checker may replace |
//! | [`host_memory`] | pages of host memory: on the right NUMA nodes, brought in by threads |
//! | [`threads`] | threads of the library, which take no signal of the program |
//! | [`took`] | how long steps take, for the log |
//! | [`panics`] | what is left of a panic that was caught |
//! | [`fault`] | points at which a test can make the library panic |
//! | [`failed_waits`] | who is told of a process that has ended and was waited for |

pub mod failed_waits;
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))]
pub mod fault;
pub mod host_memory;
pub mod panics;
mod plan_state;
mod remaining;
mod segment;
mod shared;
pub mod sync;
pub mod threads;
pub mod took;

pub use crate::topology::MemoryKind;
pub use failed_waits::{FailedWait, Leave, LeftPlan, LostPeer};
pub use plan_state::{PlanState, ProgramKey};
pub use segment::Segment;
pub use shared::{PAYLOAD_BYTES, Shared};

use crate::headroom::NoHeadroom;
use crate::plan::{Engine, Place, Program};
use crate::topology::DeviceId;
use crate::topology::discover::Seen;
use crate::topology::{Gpu, Topology};
use mpgpu_core::{headroom, plan, topology};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

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

impl Allocation {
    /// Whether a byte lies in it.
    pub fn has(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
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
    /// Reached when the counter is at least this, counted cyclically.
    pub value: u64,
}

/// The moment at which an execution has finished. Cheap to clone.
pub trait CompletionState: Debug + Send + Sync {
    /// Whether it has finished, without waiting. An error that struck the execution is reported here and by `wait`.
    fn is_done(&self) -> Result<bool, BackendError>;
    /// Whether it is known to have finished. May keep returning false after completion, because polling is expensive.
    fn is_known_done(&self) -> bool {
        // One that failed has finished too: its error is its caller's to hear.
        self.is_done().unwrap_or(true)
    }
    /// Blocks the calling thread until it has finished. Reports failed waits as [`Backend::synchronize_stream`] does.
    fn wait(&self) -> Result<(), BackendError>;
    /// When each operation ran, of an execution with [`Report::Times`]. Waits until it has finished.
    fn times(&self) -> Result<OpTimes, BackendError> {
        Err(not_timed())
    }
    /// Whether the execution was captured into a graph, which has staging memory of its own: later executions that use the same rings
    /// need not come after it, and cannot.
    fn is_captured(&self) -> bool {
        false
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

/// When all work that came before it in a stream had finished. Not that of an execution, which goes on beside it over streams of the backend's own
/// until its end is marked.
pub trait MomentState: Debug + Send + Sync {
    /// Nanoseconds from `earlier`, a moment of the same stream, to this one; `None` while this one has not come. Does not wait.
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError>;
    /// For the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// Handle to a [`MomentState`].
pub type Moment = Box<dyn MomentState>;

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

/// What a small part of a step is made of, in order ([`Backend::stream_run_actions`]).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Waits for a flag in memory of the kernel's GPU, and sets it back: each block of the kernel that raises it counts one more.
    Take {
        /// Its address.
        flag: u64,
        /// Of that kernel.
        blocks: u32,
    },
    /// Copies the transfer of this number of the execution.
    Copy(u32),
    /// Raises a flag in memory of another GPU, after all that comes before.
    Raise(u64),
    /// What comes before is done before what comes after, of one block alone. Copies have no other order among themselves.
    Order,
}

impl Action {
    /// As kernels take it (`cpp/actions.hpp`), with the ends and the bytes of the execution's transfers.
    pub fn segment(self, ends: &[Endpoints], bytes: &[u64]) -> Segment {
        match self {
            Action::Take { flag, blocks } => Segment { dst: flag, src: u64::from(blocks), bytes: 0 },
            Action::Raise(flag) => Segment { dst: 0, src: flag, bytes: 0 },
            Action::Order => Segment { dst: 0, src: 0, bytes: 0 },
            Action::Copy(transfer) => {
                let Endpoints { dst, src } = ends[transfer as usize];
                Segment { dst, src, bytes: bytes[transfer as usize] }
            }
        }
    }
}

/// How wide a kernel of actions is, and what ends its waits.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionGrid {
    /// Of several blocks: [`ActionGrid::WORDS`] words of the GPU's memory, which stand at 0 between launches that follow each other.
    pub words: u64,
    /// A counter as for [`Backend::kernel_wait_signals`], which ends all waits once it is not 0. The word behind it is set to 1 by a launch that has
    /// waited for 0.1 ms or so.
    pub stop: u64,
    /// A word of the GPU's memory, 0 or 1: which half of the actions the launch does. It is the other one then. With 0 all actions are one list.
    pub turn: u64,
    /// How many blocks; 0 for one.
    pub blocks: u32,
}

impl ActionGrid {
    /// The address of the word behind [`stop`](ActionGrid::stop).
    pub fn late(&self) -> u64 {
        self.stop + 8
    }

    /// See [`ActionGrid::words`].
    pub const WORDS: u64 = 2;
    /// Up to so many bytes one block is as fast as several.
    const NARROW_BYTES: u64 = 16 << 10;
    /// A word of 16 bytes for each lane of a block.
    const BLOCK_BYTES: u64 = 8 << 10;

    /// Blocks for so many bytes that are copied at a time, on a GPU of so many multiprocessors; of these a quarter at most, because programs compute
    /// beside it, or as many as are asked for.
    pub fn blocks_for(bytes: u64, asked: Option<u32>, processors: u32) -> u32 {
        let most = asked.map_or(processors / 4, |asked| asked.min(processors)).max(1);
        if bytes <= ActionGrid::NARROW_BYTES { 1 } else { bytes.div_ceil(ActionGrid::BLOCK_BYTES).min(u64::from(most)) as u32 }
    }
}

/// How a GPU's kernel reaches the ends of a program's transfers ([`Backend::action_reach`]).
#[derive(Clone, Debug)]
pub struct ActionReach {
    /// As [`Backend::stream_run_actions`] has them there.
    pub ends: Arc<[Endpoints]>,
    /// The most blocks that run at once.
    pub processors: u32,
}

/// Actions of one launch.
pub const MOST_ACTIONS: usize = 120;

/// What an execution is asked to report.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// Nothing: only stream order tells when it has finished. Spares a backend the marking of its end.
    Nothing,
    /// A completion.
    #[default]
    End,
    /// A completion that knows when each operation ran. Operations are then issued one by one, also where they would go as one graph.
    Times,
}

/// Everything that one execution of a program needs.
#[derive(Copy, Clone, Debug)]
pub struct Execution<'a> {
    /// What to do. Valid: `plan::validate` has accepted it.
    pub program: &'a Arc<Program>,
    /// One per transfer of the batch. Shared, so that a backend can keep it for as long as the copies run.
    pub endpoints: &'a Arc<[Endpoints]>,
    /// Base address of each ring of the program. In a stream that is being captured the graph gets rings of its own in place of these.
    pub rings: &'a Arc<[u64]>,
    /// The execution starts after all earlier work in this stream, and later work in it starts after the execution.
    pub stream: StreamHandle,
    /// It also starts after these: earlier executions that use the same rings.
    pub after: &'a [Completion],
    /// Compare every transfer's destination with its source after the last copy and before completion; a difference makes the
    /// completion report [`BackendError::DataCorruption`].
    pub verify: bool,
    /// How the plan is to be run, decided by the planner: [`Engine::Auto`] is streams. A backend that has one way only ignores it.
    pub engine: Engine,
    /// What the backend keeps for the plan, if there is one: the same for all executions of a plan, and of no other.
    pub state: Option<&'a PlanState>,
    /// What the caller wants to know of it.
    pub report: Report,
}

impl<'a> Execution<'a> {
    /// One that comes after nothing but its stream, on streams, without a plan's state, and with a completion.
    pub fn new(program: &'a Arc<Program>, endpoints: &'a Arc<[Endpoints]>, rings: &'a Arc<[u64]>, stream: StreamHandle) -> Self {
        let (engine, report) = (Engine::Auto, Report::End);
        Execution { program, endpoints, rings, stream, after: &[], verify: false, engine, state: None, report }
    }

    /// The same with other addresses of its ends, if there are any.
    pub fn with_ends(&self, ends: Option<&'a Arc<[Endpoints]>>) -> Execution<'a> {
        Execution { endpoints: ends.unwrap_or(self.endpoints), ..*self }
    }
}

/// The address that a place of a program stands for, given what an execution binds it to.
pub fn address(program: &Program, endpoints: &[Endpoints], rings: &[u64], place: Place) -> u64 {
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
    #[error("{}: out of memory: {bytes} bytes asked for", DeviceId(*device).in_words())]
    #[allow(missing_docs)]
    OutOfMemory { device: i32, bytes: u64 },
    /// There is no such device.
    #[error("{} does not exist on this backend", DeviceId(*.0).in_words())]
    InvalidDevice(i32),
    /// The address was not given out by this backend, or has been freed.
    #[error("{0:#x} is not the start of an allocation of this context, or was freed already")]
    InvalidPointer(u64),
    /// There is no memory at an address, in a range that was to be registered.
    #[error("there is no memory at {0:#x} that may be read: map it first, and keep it until it is unregistered")]
    NotMapped(u64),
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
    /// A message is longer than the buffer that it was to go to.
    #[error("{0}")]
    Truncated(String),
    /// An operation was cancelled before it began.
    #[error("{0}")]
    Cancelled(String),
    /// The operating system or the driver refused.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    Driver { what: String, reason: String, code: i64 },
}

/// Memory that programs register is pinned in pieces that end at multiples of this address: drivers from 580 on refuse 512 GiB in one call, and several
/// threads that pin pieces of 1 GiB take 33 ms a GiB (two H200), one call for all 48.
pub const REGISTERED_PIECE: u64 = 1 << 30;

/// Why other host memory is refused, on every backend.
pub const HOST_MEMORY_IS_SHARED_BY: &str =
    "it is host memory that was not allocated for other processes; allocate it as memory shared between processes";

/// Programs whose graphs a backend keeps where nobody says how many.
pub const USUAL_GRAPHS: usize = 128;

/// What has been launched as executable graphs ("execs").
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphStatistics {
    /// Programs with execs at present.
    pub programs: u64,
    /// Execs at present, those included that are no longer of use and wait for their last launch to finish.
    pub execs: u64,
    /// Graph launches.
    pub launches: u64,
    /// Launches of an exec that had the addresses already.
    pub hits: u64,
    /// Launches that had to instantiate or re-point.
    pub misses: u64,
    /// Execs instantiated.
    pub instantiations: u64,
    /// Execs re-pointed to other addresses.
    pub repoints: u64,
    /// Launches that had to come after another one, because all execs of the program were at work.
    pub waits: u64,
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
/// All methods may be called from any thread. `submit`, `record_event`, `stream_wait_event` and `launch_host` enqueue and return:
/// they never wait for earlier work.
pub trait Backend: Send + Sync {
    /// `host`, `cuda`: for texts and files. What depends on the backend is a method of this trait.
    fn name(&self) -> &'static str;
    /// Whether its devices are virtual: CPU threads move every byte, times are a model's, and what is measured says nothing of any GPU.
    fn is_virtual(&self) -> bool {
        false
    }
    /// A line for each description where times and rates are a model's, which must not pass for measurements.
    fn nature(&self) -> &'static str {
        if self.is_virtual() {
            "executed by CPU threads between virtual devices: times and rates are those of the modelled machine\n"
        } else {
            ""
        }
    }
    /// What can be seen of the machine; `None` where its devices are virtual.
    fn discover(&self) -> Result<Option<Topology>, BackendError> {
        Ok(None)
    }
    /// GPUs of the node by their UUIDs, also those that this process does not see: who they are, and what can be seen of them. `None` where they
    /// are not all known.
    fn out_of_sight(&self, uuids: &[[u8; 16]]) -> Result<Option<(Identity, Seen)>, BackendError> {
        let _ = uuids;
        Ok(None)
    }
    /// What it runs on.
    fn identity(&self) -> Result<Identity, BackendError> {
        Err(BackendError::NotSupported(format!(
            "the {} backend does not say what it runs on, so a probe of it would be valid nowhere",
            self.name()
        )))
    }

    /// Memory of `device`, aligned to at least 256 bytes; host memory is pinned where the backend knows the difference, and this process's alone.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// The same in a form that other processes can map. Zero where it is host memory. [`BackendError::NotSupported`] where
    /// the system has no such memory.
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Gives memory back. Work that uses it must have finished.
    fn free(&self, address: u64) -> Result<(), BackendError>;
    /// Pins host memory of the program's own, brought in by threads, in huge pages where that is asked for: it then belongs to one allocation of a
    /// host domain, until [`unregister`](Backend::unregister). Whether it may be written. Blocks. On an error nothing is pinned.
    ///
    /// A copy must not pass an address that is a multiple of [`REGISTERED_PIECE`] within it.
    fn register(&self, _address: u64, _bytes: u64, _huge: bool) -> Result<bool, BackendError> {
        Err(BackendError::NotSupported(format!("the {} backend registers no memory", self.name())))
    }
    /// Takes that back. Work that uses it must have finished.
    fn unregister(&self, address: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(address))
    }
    /// Whether [`free`](Backend::free) returns at once. A driver may wait for all work of the device first.
    fn frees_at_once(&self) -> bool {
        false
    }
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
    /// Blocks until all work enqueued so far has finished. [`BackendError::PeerGone`], once for each allocation, where a wait there has failed in
    /// this stream or in one that it was joined to, or in a graph, whose stream is not known.
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
    /// Blocks until what `event` stands for now has finished. Reports failed waits until the event is recorded in a stream whose own
    /// were reported.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError>;

    /// Enqueues one run of a program, and returns its completion unless [`Report::Nothing`] is asked for. When it fails, nothing that it
    /// has enqueued is still at work.
    ///
    /// In a stream that is being captured the run becomes part of the graph, with staging memory of its own, which lives as long as the
    /// graph and all that is instantiated of it. So launches of one captured graph must be ordered, also by different executable graphs;
    /// one executable graph orders its own launches. `after` is ignored where the program has rings.
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError>;
    /// The end of all work enqueued in `stream` so far, and of `after`: of an execution that moves nothing.
    fn mark_end(&self, stream: StreamHandle, after: &[Completion], report: Report) -> Result<Option<Completion>, BackendError> {
        let (program, endpoints, rings) = (Arc::new(Program::default()), Arc::from([]), Arc::from([]));
        self.submit(&Execution { after, report, ..Execution::new(&program, &endpoints, &rings, stream) })
    }
    /// Marks the moment at which all work enqueued in `stream` so far has finished. Not in a stream that is being captured.
    fn mark_moment(&self, stream: StreamHandle) -> Result<Moment, BackendError> {
        let _ = stream;
        Err(BackendError::NotSupported(format!("the backend {} does not time streams", self.name())))
    }
    /// Makes what the first such execution would otherwise make, and later ones find: graphs, streams, events, kernels, access to memory.
    /// Enqueues nothing and moves no byte. May wait for work of the devices. `after` and `report` have no meaning here.
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        let _ = execution;
        Ok(())
    }
    /// Blocks until everything ever enqueued has finished.
    fn synchronize(&self) -> Result<(), BackendError>;

    /// Keeps the graphs of so many programs, those that were launched last, in place of [`USUAL_GRAPHS`].
    fn keep_graphs(&self, _programs: usize) {}

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

    /// As [`Backend::locate`], of memory of `bytes` at an address, as much of the allocation as other processes can map.
    /// [`BackendError::NotSupported`] with the remedy where that is less than those bytes.
    fn exportable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let _ = bytes;
        self.locate(address)
    }
    /// What another process needs to map an allocation that [`Backend::exportable`] has returned. [`BackendError::NotSupported`] with the
    /// remedy for memory that cannot be mapped there.
    fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let _ = allocation;
        Err(BackendError::NotSupported(format!("the backend {} shares no memory", self.name())))
    }
    /// Maps what another process, or another context of this one, has exported. The id and the base of `allocation` have no meaning.
    /// From now on it is located as memory of its device. Returns its first byte.
    fn map(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        let _ = (shared, allocation);
        Err(BackendError::NotSupported(format!("the backend {} shares no memory", self.name())))
    }
    /// Unmaps what [`Backend::map`] has returned. Work that uses it must have finished.
    fn unmap(&self, base: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(base))
    }

    /// Work enqueued in `stream` from now on starts when every signal's counter has reached its value. Counters lie in memory that this
    /// backend locates. [`BackendError::PeerGone`] for one that may never be raised: then nothing is enqueued.
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        let _ = (stream, signals, by);
        Err(BackendError::NotSupported(format!("the backend {} has no signals", self.name())))
    }
    /// A number of a stream that no other has while it lives.
    fn stream_number(&self, stream: StreamHandle) -> u64 {
        stream.0 as u64
    }
    /// The device of a stream; [`DeviceId::HOST`] for a default stream, which is of no device for good.
    fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, BackendError> {
        let _ = stream;
        Ok(DeviceId::HOST)
    }
    /// Whether `stream` is being captured into a graph, which may run later, and again.
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        let _ = stream;
        Ok(false)
    }
    /// Makes what waits and small messages need, whose making may wait for work of a device.
    fn load_kernels(&self) {}
    /// Calls `work` with whether `stream` is being captured. What was found out of the stream holds for calls of this thread until `work`
    /// returns, so that several cost little more than one: a capture of it neither begins nor ends meanwhile.
    fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        work(self.is_capturing(stream)?);
        Ok(())
    }
    /// Whether all work enqueued in `stream` so far is known to have finished: what is to come after it may be done by the calling
    /// thread. `false` where that is not known.
    fn is_idle(&self, stream: StreamHandle) -> bool {
        let _ = stream;
        false
    }
    /// Raises counters after all work enqueued in `stream` so far: whoever sees the value sees what that work has written.
    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        let _ = (stream, signals);
        Err(BackendError::NotSupported(format!("the backend {} has no signals", self.name())))
    }
    /// Raises counters as [`stream_raise_signals`](Backend::stream_raise_signals) does, and takes flags: work enqueued in `stream` from now
    /// on starts when every flag has been raised to 1, and each is set back to 0 then. One call, because the driver takes both as one. A flag is a counter
    /// in memory of this process that lies in [`Backend::allocate_shared`]; it is raised again only after it was set back. Unlike a wait for
    /// signals this looks at no flag now: what it stands at may be for an earlier step. Where the process that was to raise one has ended, it
    /// ends as a wait for signals does.
    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64]) -> Result<(), BackendError> {
        let _ = (stream, raises, flags);
        Err(BackendError::NotSupported(format!("the backend {} has no flags", self.name())))
    }
    /// Work enqueued in `stream` from now on starts when every flag has been raised to 1. Flags as for
    /// [`stream_take_flags`](Backend::stream_take_flags), but that they stay as they are: a step sets them back before it begins.
    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64]) -> Result<(), BackendError> {
        let _ = (stream, flags);
        Err(BackendError::NotSupported(format!("the backend {} has no flags", self.name())))
    }
    /// Enqueues as one kernel of `device` what one rank does in a step in which little is moved: [actions](Action::segment), whose copies' ends are as
    /// [`action_reach`](Backend::action_reach) has them. `false`, and nothing is enqueued, where the stream is of another GPU.
    fn stream_run_actions(
        &self,
        stream: StreamHandle,
        device: DeviceId,
        actions: &[Segment],
        grid: ActionGrid,
    ) -> Result<bool, BackendError> {
        let _ = (stream, device, actions, grid);
        Ok(false)
    }
    /// How a kernel of `device` reaches the ends of a program's transfers. An error where it does not, or this backend has no such kernel.
    fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        let _ = (device, program, ends);
        Err(BackendError::NotSupported(format!("the backend {} has no kernel that waits for flags", self.name())))
    }
    /// Kernels of the caller's wait for these counters, from now until their memory is freed: [`fail_waits`](Backend::fail_waits) raises each that is
    /// below its value then, as that of a wait. An error where a process that might have raised one has ended, and then none is entered.
    /// Whoever synchronises any stream is told, unless `streams_wait` in the same allocation, which are told.
    fn kernel_wait_signals(&self, signals: &[Signal], streams_wait: bool) -> Result<(), BackendError> {
        let _ = (signals, streams_wait);
        Err(BackendError::NotSupported(format!("the backend {} has no signals", self.name())))
    }
    /// The address at which kernels of a device reach what lies at `address`, memory of another process that is mapped here.
    fn address_for(&self, device: DeviceId, address: u64) -> Result<u64, BackendError> {
        let _ = device;
        Ok(address)
    }
    /// The ends of a program's transfers as kernels of `device` have them. [`BackendError::NotSupported`] where that device does not reach one
    /// of them by itself.
    fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        let _ = (device, program);
        Ok(Arc::clone(ends))
    }
    /// What a counter stands at, and with it everything that was written before it was raised. [`BackendError::NotSupported`] for memory
    /// that the CPU cannot read.
    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        Err(BackendError::InvalidPointer(counter))
    }
    /// Raises a counter now, after everything that the calling thread has written or seen. Errors as those of
    /// [`read_signal`](Backend::read_signal).
    fn raise_signal(&self, signal: Signal) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(signal.counter))
    }
    /// A process that might have raised counters in this allocation has ended, or has left. Waits for counters there that are not reached by
    /// then end, now and later: no stream waits for ever, and whoever waits for the stream gets [`BackendError::PeerGone`] once.
    fn fail_waits(&self, allocation: &Allocation, peer: LostPeer) {
        let _ = (allocation, peer);
    }
    /// Ends failed waits once more whose counter another process has set back since. Called every few milliseconds after
    /// [`fail_waits`](Backend::fail_waits), for as long as it returns true.
    fn fail_waits_again(&self) -> bool {
        false
    }
    /// The process that has ended and might have raised counters at this address, if there is one.
    fn lost_peer(&self, counter: u64) -> Option<LostPeer> {
        let _ = counter;
        None
    }
}

impl BackendError {
    /// Host memory for what a caller counts is not to be had.
    pub fn no_headroom(NoHeadroom { bytes }: NoHeadroom) -> Self {
        BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes }
    }
}

/// For backends that do not do what [`Backend::submit`] says.
#[cold]
pub fn no_completion() -> BackendError {
    BackendError::Driver { what: "submit".into(), reason: "the backend has returned no completion".into(), code: 0 }
}

/// For executions without [`Report::Times`].
pub fn not_timed() -> BackendError {
    BackendError::NotSupported("this execution was not timed: ask for `Report::Times`".into())
}

/// The identity of a device that every process of the node knows by the same number: a virtual one, or host memory.
pub fn uuid_of_number(device: DeviceId) -> [u8; 16] {
    let mut identity = *b"mpgpu device    ";
    identity[12..].copy_from_slice(&device.0.to_le_bytes());
    identity
}
