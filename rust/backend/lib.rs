//! Execution of copies. The engine accesses backends only through [`Backend`].
//!
//! A backend owns devices, their memory, streams and events, and runs a [`Program`] in stream order. It does not plan, cache or decide: two
//! backends given the same program perform the same copies in an order that the program allows.
//!
//! | module | content |
//! | --- | --- |
//! | [`sync`] | locks, which a model checker may replace |
//! | [`host_memory`] | pages of host memory: on the right NUMA nodes, made resident by threads |
//! | [`threads`] | threads of the library, which receive no signal of the program |
//! | [`took`] | durations of steps, for the log |
//! | [`panics`] | texts of caught panics |
//! | [`fault`] | points at which a test can make the library panic |
//! | [`failed_waits`] | reports of waits for a process that has exited |
//! | [`signallers`] | processes that set counters, and those of them that are lost |
//! | [`static_program`] | detection of programs that cannot load libraries |

pub mod failed_waits;
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))]
pub mod fault;
pub mod host_memory;
pub mod panics;
mod plan_state;
mod remaining;
mod segment;
mod shared;
pub mod signallers;
pub mod static_program;
pub mod sync;
pub mod threads;
pub mod took;

pub use crate::topology::MemoryKind;
pub use failed_waits::FailedWait;
pub use plan_state::{PlanState, ProgramKey};
pub use segment::Segment;
pub use shared::{PAYLOAD_BYTES, Shared};
pub use signallers::{Abandoned, Cause, Leave, LeftPlan, Line, LostPeer, Signallers, StepFate};

use crate::headroom::NoHeadroom;
use crate::plan::{Engine, Place, Program};
use crate::topology::DeviceId;
use crate::topology::discover::Seen;
use crate::topology::{Gpu, Topology};
use mpgpu_core::{headroom, plan, topology};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// Allocation that contains an address.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Identifier, not 0 and never reused in a process, so that a freed and reused address is a different allocation.
    pub id: u64,
    /// First byte.
    pub base: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Device of the memory.
    pub device: DeviceId,
    /// Kind of the memory.
    pub kind: MemoryKind,
}

impl Allocation {
    /// Returns true if an address is inside the allocation.
    pub fn has(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
}

/// Stream of the caller, as in `mp_stream_t` (a `cudaStream_t` on CUDA). 0 is the default stream.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

/// Event of the caller, as in `mp_event_t` (on CUDA, one of [`Backend::create_event`] or any `cudaEvent_t`).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// 64-bit counter in memory that a backend locates, aligned to 8 bytes, and the value to set or wait for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Address of the counter.
    pub counter: u64,
    /// Value at which the signal counts as reached: the counter is equal or greater, compared cyclically.
    pub value: u64,
}

/// End of an execution. Cheap to clone.
pub trait CompletionState: Debug + Send + Sync {
    /// Returns true if the execution has finished, without waiting. This and `wait` report an error of the execution.
    fn is_done(&self) -> Result<bool, BackendError>;
    /// Returns true if the execution is known to have finished. May keep returning false after completion, because polling is expensive.
    fn is_known_done(&self) -> bool {
        // A failed execution has also finished. The caller of the execution gets its error.
        self.is_done().unwrap_or(true)
    }
    /// Blocks the calling thread until the execution has finished. Reports failed waits as [`Backend::synchronize_stream`] does.
    fn wait(&self) -> Result<(), BackendError>;
    /// Returns the times of each operation of an execution with [`Report::Times`]. Waits until it has finished.
    fn times(&self) -> Result<OpTimes, BackendError> {
        Err(not_timed())
    }
    /// Returns true if the execution was captured into a graph, which has its own staging memory. Later executions that use the same
    /// staging rings need not be ordered after it, and cannot be.
    fn is_captured(&self) -> bool {
        false
    }
    /// Returns the object for the backend that created it.
    fn as_any(&self) -> &dyn Any;
}

/// Times of the operations of one execution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpTimes {
    /// Begin and end of each operation of the program, in seconds from the moment at which the execution could begin.
    pub ops: Vec<(f64, f64)>,
    /// Maximum error between times of different devices, seconds. Times of one device are more precise.
    pub precision: f64,
}

/// Moment at which all earlier work of a stream had finished. An execution, which runs on the backend's own streams, counts only from the
/// point at which its end is marked.
pub trait MomentState: Debug + Send + Sync {
    /// Returns the nanoseconds from `earlier`, a moment of the same stream, to this one. `None` if this moment has not been reached. Does
    /// not wait.
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError>;
    /// Returns the object for the backend that created it.
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

/// Function that a stream runs on the CPU. Launches of one graph may call it from several threads concurrently.
pub type HostFunction = Box<dyn Fn() + Send + Sync>;

/// Method by which a stream waits for signals. A backend with only one method ignores it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum SignalWait {
    /// Stream operation, which uses no GPU resources.
    #[default]
    Operation,
    /// Kernel of one warp, which continues sooner.
    Kernel,
}

/// Element of a step that one kernel performs, in order ([`Backend::stream_run_actions`]).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait for a flag in memory of the kernel's GPU, and reset of the flag. Each block of the kernel that sets the flag increments it by
    /// one.
    Take {
        /// Address of the flag.
        flag: u64,
        /// Number of blocks of that kernel.
        blocks: u32,
    },
    /// Copy of the execution's transfer with this index.
    Copy(u32),
    /// Setting of a flag in memory of another GPU, after all earlier actions.
    Raise(u64),
    /// Barrier within one block: earlier actions complete before later ones begin. Copies have no other order among themselves.
    Order,
}

impl Action {
    /// Returns the action in the format of the kernels (`cpp/actions.hpp`), with the addresses and sizes of the execution's transfers.
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

/// Number of blocks of a kernel that executes actions, and the words that control it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionGrid {
    /// Address of [`ActionGrid::WORDS`] words of GPU memory, 0 before the first launch.
    pub words: u64,
    /// Address of a counter as for [`Backend::kernel_wait_signals`]. Once it is not 0, all waits end as lost, and this launch and later ones
    /// with the same `words` write and set nothing more. A launch that has waited for about 0.1 ms sets the next word to 1.
    pub stop: u64,
    /// Address of a word of GPU memory, 0 or 1, that selects the half of the actions that the launch performs. The launch then toggles it.
    /// With address 0 all actions are one list.
    pub turn: u64,
    /// Number of blocks; 0 for one.
    pub blocks: u32,
}

impl ActionGrid {
    /// Returns the address of the word after [`stop`](ActionGrid::stop).
    pub fn late(&self) -> u64 {
        self.stop + 8
    }

    /// Number of words of [`ActionGrid::words`].
    pub const WORDS: u64 = 3;
    /// Maximum size in bytes for which a kernel of one block is as fast as one of several blocks.
    const NARROW_BYTES: u64 = 16 << 10;
    /// Bytes that one block copies: a word of 16 bytes for each thread.
    const BLOCK_BYTES: u64 = 8 << 10;

    /// Returns the number of blocks for copies of `bytes` bytes at a time, on a GPU with `processors` multiprocessors: at most `asked`, by
    /// default at most a quarter of the multiprocessors, because programs compute concurrently.
    pub fn blocks_for(bytes: u64, asked: Option<u32>, processors: u32) -> u32 {
        let most = asked.map_or(processors / 4, |asked| asked.min(processors)).max(1);
        if bytes <= ActionGrid::NARROW_BYTES { 1 } else { bytes.div_ceil(ActionGrid::BLOCK_BYTES).min(u64::from(most)) as u32 }
    }
}

/// Access of a GPU's kernel to the ends of a program's transfers ([`Backend::action_reach`]).
#[derive(Clone, Debug)]
pub struct ActionReach {
    /// Ends of the transfers as the kernel addresses them, for [`Backend::stream_run_actions`].
    pub ends: Arc<[Endpoints]>,
    /// Maximum number of blocks that run simultaneously.
    pub processors: u32,
}

/// Maximum number of actions of one launch.
pub const MOST_ACTIONS: usize = 120;

/// Information that an execution returns.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// Nothing: only stream order shows when it has finished. Saves the backend the marking of its end.
    Nothing,
    /// A completion.
    #[default]
    End,
    /// A completion with the times of each operation. Operations are then issued one by one, even if they could form one graph.
    Times,
}

/// Arguments of one execution of a program.
#[derive(Copy, Clone, Debug)]
pub struct Execution<'a> {
    /// Program to run, accepted by `plan::validate`.
    pub program: &'a Arc<Program>,
    /// Addresses of each transfer of the batch. Shared, so that a backend can keep them for as long as the copies run.
    pub endpoints: &'a Arc<[Endpoints]>,
    /// Base address of each staging ring of the program. In a stream that is being captured the graph gets its own rings instead.
    pub rings: &'a Arc<[u64]>,
    /// Stream of the execution. It starts after all earlier work in this stream, and later work starts after it.
    pub stream: StreamHandle,
    /// Earlier executions that use the same staging rings. The execution also starts after these.
    pub after: &'a [Completion],
    /// True if every transfer's destination is compared with its source after the last copy and before completion. A difference makes the
    /// completion report [`BackendError::DataCorruption`].
    pub verify: bool,
    /// Engine that the planner has chosen; [`Engine::Auto`] means streams. A backend with only one engine ignores it.
    pub engine: Engine,
    /// State that the backend keeps for the plan, if there is a plan. All executions of a plan share it.
    pub state: Option<&'a PlanState>,
    /// Information that the caller requests.
    pub report: Report,
    /// Fate of a step of several ranks. An abandoned step copies nothing.
    pub fate: Option<&'a StepFate>,
}

impl<'a> Execution<'a> {
    /// Creates an execution on streams that is ordered only after its stream, without a plan's state, with a completion.
    pub fn new(program: &'a Arc<Program>, endpoints: &'a Arc<[Endpoints]>, rings: &'a Arc<[u64]>, stream: StreamHandle) -> Self {
        let (engine, report) = (Engine::Auto, Report::End);
        Execution { program, endpoints, rings, stream, after: &[], verify: false, engine, state: None, report, fate: None }
    }

    /// Returns the execution with other addresses, if they are given.
    pub fn with_ends(&self, ends: Option<&'a Arc<[Endpoints]>>) -> Execution<'a> {
        Execution { endpoints: ends.unwrap_or(self.endpoints), ..*self }
    }
}

/// Returns the address of a place (source, destination or staging slot) of a program in an execution.
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

/// Error of a backend.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// The device has run out of memory.
    #[error("{}: out of memory: {bytes} bytes requested", DeviceId(*device).in_words())]
    #[allow(missing_docs)]
    OutOfMemory { device: i32, bytes: u64 },
    /// The device does not exist.
    #[error("{} does not exist on this backend", DeviceId(*.0).in_words())]
    InvalidDevice(i32),
    /// The address was not allocated by this backend, or has been freed.
    #[error("{0:#x} is not the start of an allocation of this context, or was freed already")]
    InvalidPointer(u64),
    /// A range to be registered contains an unmapped address.
    #[error("there is no memory at {0:#x} that may be read: map it first, and keep it until it is unregistered")]
    NotMapped(u64),
    /// The stream or event does not exist, was destroyed, or belongs to another context.
    #[error("{0} is not a {1} of this context: it is of another context, or was destroyed already")]
    InvalidHandle(usize, &'static str),
    /// Data arrived corrupted. Checked only with `MPGPU_VERIFY=bytes`.
    #[error("transfer {transfer}: byte {offset} of the destination differs from the source after execution")]
    #[allow(missing_docs)]
    DataCorruption { transfer: u32, offset: u64 },
    /// There is no driver or no device that this backend can use.
    #[error("{0}")]
    NoDriver(String),
    /// This backend does not support the request. The text has the reason and the remedy.
    #[error("{0}")]
    NotSupported(String),
    /// Another process has exited, or has freed memory that it shared.
    #[error("{0}")]
    PeerGone(String),
    /// A message is longer than the receive buffer.
    #[error("{0}")]
    Truncated(String),
    /// An operation was cancelled before it began.
    #[error("{0}")]
    Cancelled(String),
    /// The operating system or the driver reported an error.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    Driver { what: String, reason: String, code: i64 },
}

/// Size in bytes of the pieces in which memory of programs is pinned. Pieces end at addresses that are multiples of it. Drivers from 580 on
/// reject 512 GiB in one call. Several threads that pin pieces of 1 GiB take 33 ms per GiB (two H200), one call 48 ms.
pub const REGISTERED_PIECE: u64 = 1 << 30;

/// Reason why other host memory is rejected, on every backend.
pub const HOST_MEMORY_IS_SHARED_BY: &str =
    "it is host memory that was not allocated for other processes; allocate it as memory shared between processes";

/// Default number of programs whose graphs a backend keeps.
pub const USUAL_GRAPHS: usize = 128;

/// Counters of executable graphs ("execs").
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphStatistics {
    /// Programs that currently have execs.
    pub programs: u64,
    /// Execs that currently exist, including those that are no longer used and wait for their last launch to finish.
    pub execs: u64,
    /// Graph launches.
    pub launches: u64,
    /// Launches of an exec that already had the addresses.
    pub hits: u64,
    /// Launches that first instantiated an exec or updated its addresses.
    pub misses: u64,
    /// Execs instantiated.
    pub instantiations: u64,
    /// Execs whose addresses were updated.
    pub repoints: u64,
    /// Launches that waited for an earlier launch, because all execs of the program were in use.
    pub waits: u64,
}

/// Driver and devices for which a probe's file is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Version of the driver.
    pub driver: String,
    /// GPUs in the order of their numbers.
    pub gpus: Vec<Gpu>,
}

/// Backend: devices that run programs.
///
/// All methods may be called from any thread. `submit`, `record_event`, `stream_wait_event` and `launch_host` enqueue and return; they
/// never wait for earlier work.
pub trait Backend: Send + Sync {
    /// Returns the name of the backend, `host` or `cuda`, for texts and files. Behaviour that depends on the backend is a method of this
    /// trait.
    fn name(&self) -> &'static str;
    /// Returns true if the devices are virtual: CPU threads move every byte, times are modelled, and measurements do not apply to any GPU.
    fn is_virtual(&self) -> bool {
        false
    }
    /// Returns a line for descriptions that states if times and rates are modelled, so that they are not mistaken for measurements.
    fn nature(&self) -> &'static str {
        if self.is_virtual() {
            "executed by CPU threads between virtual devices: times and rates are those of the modelled machine\n"
        } else {
            ""
        }
    }
    /// Returns the visible topology of the machine; `None` for virtual devices.
    fn discover(&self) -> Result<Option<Topology>, BackendError> {
        Ok(None)
    }
    /// Returns the GPUs of the node with these UUIDs, including those that are not visible to this process, and their visible topology.
    /// `None` if some are unknown.
    fn out_of_sight(&self, uuids: &[[u8; 16]]) -> Result<Option<(Identity, Seen)>, BackendError> {
        let _ = uuids;
        Ok(None)
    }
    /// Returns the identity of the driver and the devices.
    fn identity(&self) -> Result<Identity, BackendError> {
        Err(BackendError::NotSupported(format!(
            "the {} backend does not report its driver and devices, so its probe would not be valid for any machine",
            self.name()
        )))
    }

    /// Allocates memory of `device`, aligned to at least 256 bytes. Host memory is pinned if the backend distinguishes it, and private to
    /// this process.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Allocates memory that other processes can map. Host memory is zeroed. Returns [`BackendError::NotSupported`] if the system has no
    /// such memory.
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Frees memory. Work that uses it must have finished.
    fn free(&self, address: u64) -> Result<(), BackendError>;
    /// Pins host memory of the program. Threads make it resident, in huge pages if requested. It then belongs to one allocation of a host
    /// domain, until [`unregister`](Backend::unregister). Returns true if it is writable. Blocks. On an error nothing is pinned.
    ///
    /// A copy must not cross an address in the memory that is a multiple of [`REGISTERED_PIECE`].
    fn register(&self, _address: u64, _bytes: u64, _huge: bool) -> Result<bool, BackendError> {
        Err(BackendError::NotSupported(format!("the {} backend cannot register memory", self.name())))
    }
    /// Unpins memory that `register` pinned. Work that uses it must have finished.
    fn unregister(&self, address: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(address))
    }
    /// Returns the number of a program's first staging rings that executions may share only if the caller orders these executions. The
    /// backend gives the other rings to one execution at a time, as streams reach them.
    fn ordered_rings(&self, program: &Program) -> usize {
        program.rings.len()
    }
    /// Returns true if [`free`](Backend::free) returns immediately. Otherwise the driver may first wait for all work of the device.
    fn frees_at_once(&self) -> bool {
        false
    }
    /// Returns the allocation that contains `address`. `None` if this backend does not know it, as for pageable memory. Returns
    /// [`BackendError::NotSupported`] for memory that it knows but cannot use.
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError>;
    /// Returns the bytes that this backend has allocated on `device` and not freed; 0 for a device that does not exist.
    fn allocated_bytes(&self, device: DeviceId) -> u64;

    /// Creates a stream of `device` that is not ordered with any other stream.
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError>;
    /// Destroys a stream. Enqueued work still finishes. The default stream cannot be destroyed.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Returns the number of streams of this backend on `device`, without the default stream; 0 for a device that does not exist.
    fn stream_count(&self, device: DeviceId) -> u64;
    /// Blocks until all work enqueued so far has finished. Returns [`BackendError::PeerGone`], once per allocation, if a wait there has
    /// failed in this stream, in a stream that it was ordered after, or in a graph, whose stream is unknown.
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Runs `work` on a CPU thread in stream order, and then drops it. `work` may block, which on CUDA delays the functions of other
    /// streams. In a stream that is being captured the graph owns `work`: it runs at each launch, and is dropped when the graph and its
    /// executables are destroyed, on a thread that must not call the driver.
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError>;

    /// Creates an event that counts as completed until it is first recorded.
    fn create_event(&self) -> Result<EventHandle, BackendError>;
    /// Destroys an event. Waits that are already enqueued remain effective.
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError>;
    /// Records all work enqueued in `stream` so far.
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError>;
    /// Makes work enqueued in `stream` from now on wait for the work that is currently recorded in `event`.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError>;
    /// Blocks until the work that is currently recorded in `event` has finished. Reports failed waits until the event is recorded in a
    /// stream that has already reported them.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError>;

    /// Enqueues one run of a program, and returns its completion unless [`Report::Nothing`] is requested. After an error, no work that it
    /// has enqueued is still running.
    ///
    /// In a stream that is being captured the run becomes part of the graph. It gets its own staging memory, which exists as long as the
    /// graph and its executables. Therefore launches of one captured graph must be ordered, even launches of different executable graphs;
    /// one executable graph orders its own launches. `after` is ignored if the program has rings.
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError>;
    /// Returns the completion of all work enqueued in `stream` so far, and of `after`, by an execution that moves nothing.
    fn mark_end(&self, stream: StreamHandle, after: &[Completion], report: Report) -> Result<Option<Completion>, BackendError> {
        let (program, endpoints, rings) = (Arc::new(Program::default()), Arc::from([]), Arc::from([]));
        self.submit(&Execution { after, report, ..Execution::new(&program, &endpoints, &rings, stream) })
    }
    /// Marks the moment at which all work enqueued in `stream` so far has finished. Not allowed in a stream that is being captured.
    fn mark_moment(&self, stream: StreamHandle) -> Result<Moment, BackendError> {
        let _ = stream;
        Err(BackendError::NotSupported(format!("the {} backend does not time streams", self.name())))
    }
    /// Prepares the first such execution: creates graphs, streams and events, loads kernels and enables access to memory. Enqueues nothing
    /// and moves no data. May wait for work of the devices. Ignores `after` and `report`.
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        let _ = execution;
        Ok(())
    }
    /// Blocks until all work that was ever enqueued has finished.
    fn synchronize(&self) -> Result<(), BackendError>;

    /// Sets the number of programs whose graphs are kept, those launched last. The default is [`USUAL_GRAPHS`].
    fn keep_graphs(&self, _programs: usize) {}

    /// Returns counters of graph launches; all zero on a backend without graphs.
    fn graph_statistics(&self) -> GraphStatistics {
        GraphStatistics::default()
    }

    /// Returns the identifier of a device in every process of the node, independent of its number there: a GPU's UUID.
    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        Ok(uuid_of_number(device))
    }
    /// Returns the pairs among `pairs` that report peer access but lose bytes, as GPUs behind an IOMMU do. Tries each pair once, in both
    /// directions, with copies that it waits for only a short time. Must not be called while work is enqueued.
    fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        let _ = pairs;
        Vec::new()
    }

    /// Returns the allocation of `bytes` bytes at an address as [`Backend::locate`] does, limited to the part that other processes can map.
    /// Returns [`BackendError::NotSupported`] with the remedy if that part is smaller.
    fn exportable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let _ = bytes;
        self.locate(address)
    }
    /// Exports an allocation that [`Backend::exportable`] has returned, for mapping by another process. Returns
    /// [`BackendError::NotSupported`] with the remedy for memory that cannot be mapped there.
    fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let _ = allocation;
        Err(BackendError::NotSupported(format!("the {} backend cannot share memory", self.name())))
    }
    /// Maps an allocation that another process, or another context of this process, has exported, and returns its first byte. Ignores the
    /// id and the base of `allocation`. The backend then locates the memory as memory of its device.
    fn map(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        let _ = (shared, allocation);
        Err(BackendError::NotSupported(format!("the {} backend cannot share memory", self.name())))
    }
    /// Unmaps memory that [`Backend::map`] has returned. Work that uses it must have finished.
    fn unmap(&self, base: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(base))
    }

    /// Makes work enqueued in `stream` from now on wait until every signal's counter has reached its value. Counters must be in memory that
    /// this backend locates. Returns [`BackendError::PeerGone`] for a counter that may never be set; nothing is then enqueued.
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        let _ = (stream, signals, by);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Returns a number of a stream that is unique while the stream exists.
    fn stream_number(&self, stream: StreamHandle) -> u64 {
        stream.0 as u64
    }
    /// Returns the device of a stream; [`DeviceId::HOST`] for a default stream, which has no fixed device.
    fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, BackendError> {
        let _ = stream;
        Ok(DeviceId::HOST)
    }
    /// Returns true if `stream` is being captured into a graph, which may run later and repeatedly.
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool, BackendError> {
        let _ = stream;
        Ok(false)
    }
    /// Loads the kernels for waits and small messages. Loading them later could wait for work of a device.
    fn load_kernels(&self) {}
    /// Calls `work` with true if `stream` is being captured. The backend reuses its queries of the stream for calls of this thread until
    /// `work` returns, so that several calls cost little more than one. No capture of the stream may begin or end meanwhile.
    fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        work(self.is_capturing(stream)?);
        Ok(())
    }
    /// Returns true if all work enqueued in `stream` so far is known to have finished, so that the calling thread may perform later work
    /// itself. May return false although the work has finished.
    fn is_idle(&self, stream: StreamHandle) -> bool {
        let _ = stream;
        false
    }
    /// Sets counters after all work enqueued in `stream` so far. An observer of the value sees all writes of that work.
    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        let _ = (stream, signals);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Sets counters as [`stream_raise_signals`](Backend::stream_raise_signals) does. Then makes work enqueued in `stream` from now on wait
    /// until every flag is 1, and resets each flag to 0. Both are one call, because the driver accepts them as one operation.
    ///
    /// A flag is a counter in memory of this process from [`Backend::allocate_shared`]. It is set again only after it was reset. Unlike a
    /// wait for signals this call does not check the current value of a flag, which may belong to an earlier step. If the party that should
    /// set a flag is lost, the wait ends as lost and the step is abandoned.
    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        let _ = (stream, raises, flags, fate);
        Err(BackendError::NotSupported(format!("the {} backend does not support flags", self.name())))
    }
    /// Makes work enqueued in `stream` from now on wait until every flag is 1. The requirements for flags are those of
    /// [`stream_take_flags`](Backend::stream_take_flags). This call does not reset the flags; each step resets them before it begins.
    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        let _ = (stream, flags, fate);
        Err(BackendError::NotSupported(format!("the {} backend does not support flags", self.name())))
    }
    /// Enqueues one kernel of `device` that performs one rank's part of a step with few bytes: [actions](Action::segment), whose copies use
    /// the addresses of [`action_reach`](Backend::action_reach). Returns false, and enqueues nothing, if the stream belongs to another GPU.
    /// The step is abandoned if the signaller of a flag is lost.
    fn stream_run_actions(
        &self,
        stream: StreamHandle,
        device: DeviceId,
        actions: &[Segment],
        grid: ActionGrid,
        fate: &StepFate,
    ) -> Result<bool, BackendError> {
        let _ = (stream, device, actions, grid, fate);
        Ok(false)
    }
    /// Returns the addresses with which a kernel of `device` accesses the ends of a program's transfers. Fails if it cannot access one of
    /// them, or if this backend has no such kernel.
    fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        let _ = (device, program, ends);
        Err(BackendError::NotSupported(format!("the {} backend has no kernel that waits for flags", self.name())))
    }
    /// Records that kernels of the caller wait for these counters, from now until their memory is freed.
    /// [`fail_waits`](Backend::fail_waits) then sets each counter that is below its value, as for other waits. Fails, and records nothing,
    /// if a process that could have set a counter has exited. If `streams_wait` is true, streams wait in the same allocation and report the
    /// failure; otherwise every stream reports it.
    fn kernel_wait_signals(&self, signals: &[Signal], streams_wait: bool) -> Result<(), BackendError> {
        let _ = (signals, streams_wait);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Returns the address with which kernels of a device access `address`, which is in memory of another process that is mapped here.
    fn address_for(&self, device: DeviceId, address: u64) -> Result<u64, BackendError> {
        let _ = device;
        Ok(address)
    }
    /// Returns the ends of a program's transfers as kernels of `device` address them. Returns [`BackendError::NotSupported`] if that device
    /// cannot access one of them directly.
    fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        let _ = (device, program);
        Ok(Arc::clone(ends))
    }
    /// Returns the value of a counter. All writes before it was set to this value are then visible. Returns [`BackendError::NotSupported`]
    /// for memory that the CPU cannot read.
    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        Err(BackendError::InvalidPointer(counter))
    }
    /// Sets a counter now, after everything that the calling thread has written or seen. Errors as those of
    /// [`read_signal`](Backend::read_signal).
    fn raise_signal(&self, signal: Signal) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(signal.counter))
    }
    /// Records the parties that set the counters of an allocation, ordered by address. Called before any wait there.
    fn name_signallers(&self, allocation: &Allocation, by_address: Arc<[(u64, u32)]>) {
        let _ = (allocation, by_address);
    }
    /// Reports that a party that sets counters in this allocation has exited or left. Waits for counters that it sets
    /// ([`Signallers::concerns`]) and that are not reached then end as lost, now and later; no other waits do. Therefore no stream waits
    /// forever, and a wait for the stream returns [`BackendError::PeerGone`] once.
    fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer) {
        let _ = (allocation, party, peer);
    }
    /// Ends failed waits again whose counter another process has reset since. Called every few milliseconds after
    /// [`fail_waits`](Backend::fail_waits), for as long as it returns true.
    fn fail_waits_again(&self) -> bool {
        false
    }
    /// Returns the lost party that could have set a counter to this value, if there is one.
    fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        let _ = wanted;
        None
    }
}

impl BackendError {
    /// Creates the error for a lack of host memory, if the amount depends on numbers that the caller has chosen.
    pub fn no_headroom(NoHeadroom { bytes }: NoHeadroom) -> Self {
        BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes }
    }
}

/// Returns the error for a backend that does not implement [`Backend::submit`] correctly.
#[cold]
pub fn no_completion() -> BackendError {
    BackendError::Driver { what: "submit".into(), reason: "the backend has returned no completion".into(), code: 0 }
}

/// Returns the error for executions without [`Report::Times`].
pub fn not_timed() -> BackendError {
    BackendError::NotSupported("this execution was not timed: ask for `Report::Times`".into())
}

/// Returns the identifier of a device that has the same number in every process of the node: a virtual device, or host memory.
pub fn uuid_of_number(device: DeviceId) -> [u8; 16] {
    let mut identity = *b"mpgpu device    ";
    identity[12..].copy_from_slice(&device.0.to_le_bytes());
    identity
}
