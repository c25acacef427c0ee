//! Defines the interface of backends, which execute copies. The other crates access a backend only through [`Backend`].
//!
//! A backend owns devices with their memory, streams and events. It executes a [`Program`] in stream order, but does not plan, cache or
//! decide: two backends that execute the same program perform the same copies, in an order that the program allows.
//!
//! | module | content |
//! | --- | --- |
//! | [`sync`] | locks, which a model checker may replace |
//! | [`files`] | files that are mapped into memory and read by `pread` |
//! | [`host_memory`] | pages of host memory: on the right NUMA nodes, made resident by threads |
//! | [`threads`] | threads of the library, which receive no signal of the program |
//! | [`took`] | logging of the duration of operations that may block |
//! | [`panics`] | texts of caught panics |
//! | [`fault`] | points at which a test can make the library panic |
//! | [`failed_waits`] | reports of waits for a process that has exited |
//! | [`signallers`] | table of the processes that set counters, and of lost processes |
//! | [`static_program`] | detection of programs that cannot load libraries |

pub mod failed_waits;
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))]
pub mod fault;
pub mod files;
pub mod host_memory;
pub mod panics;
mod pieces;
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
pub use pieces::{BlockCopy, BlockEnd, Helpers, Indices, KernelBounds, Pieces, index_out_of_range};
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

/// Allocation of memory that contains a given address.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Identifier of the allocation. It is never 0 and never reused in a process, so that a later allocation at the same address has a
    /// different identifier.
    pub id: u64,
    /// Address of the first byte of the allocation.
    pub base: u64,
    /// Size of the allocation in bytes.
    pub bytes: u64,
    /// Device whose memory contains the allocation.
    pub device: DeviceId,
    /// Kind of memory of the allocation.
    pub kind: MemoryKind,
}

impl Allocation {
    /// Returns true if `address` is inside the allocation.
    pub fn has(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
}

/// Handle of a caller's stream, as in `mp_stream_t` (a `cudaStream_t` on CUDA). The value 0 is the default stream.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

/// Handle of a caller's event, as in `mp_event_t`. On CUDA it may be an event of [`Backend::create_event`] or any `cudaEvent_t`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// Signal: a 64-bit counter and the value to set or to wait for. The counter is in memory that the backend can locate, aligned to 8 bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Address of the counter of the signal.
    pub counter: u64,
    /// Value to set or to wait for. A wait ends when the counter is equal to or greater than this value. The comparison allows for the
    /// counter's overflow at 2^64.
    pub value: u64,
}

/// Completion of one execution: its state and errors. Callers share it by handles ([`Completion`]), which are cheap to copy.
pub trait CompletionState: Debug + Send + Sync {
    /// Returns true if the execution has finished, without waiting. This method and `wait` return an error of the execution.
    fn is_done(&self) -> Result<bool, BackendError>;
    /// Returns true if the execution is known to have finished. The result may remain false for some time after the end of the execution,
    /// because querying the device is expensive.
    fn is_known_done(&self) -> bool {
        // An execution that failed has also finished. The caller of the execution receives its error.
        self.is_done().unwrap_or(true)
    }
    /// Blocks the calling thread until the execution has finished. Reports failed waits as [`Backend::synchronize_stream`] does.
    fn wait(&self) -> Result<(), BackendError>;
    /// Returns the start and end times of each operation of an execution with [`Report::Times`]. Waits until the execution has finished.
    fn times(&self) -> Result<OpTimes, BackendError> {
        Err(not_timed())
    }
    /// Returns true if the execution was captured into a graph, which has its own staging memory. Later executions that use the same
    /// staging rings need not, and cannot, be ordered after it.
    fn is_captured(&self) -> bool {
        false
    }
    /// Returns this object as [`Any`], for the backend that created it.
    fn as_any(&self) -> &dyn Any;
}

/// Start and end times of the operations of one execution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpTimes {
    /// Start and end time of each operation of the program, in seconds after the moment at which the execution could start.
    pub ops: Vec<(f64, f64)>,
    /// Maximum error in seconds when times of different devices are compared. Times of one device are more precise.
    pub precision: f64,
}

/// Timestamp that a stream takes when all its earlier work has finished, including executions of programs. The difference between two
/// timestamps of one stream is the time of the work between them.
pub trait MomentState: Debug + Send + Sync {
    /// Returns the time in nanoseconds from `earlier`, a timestamp of the same stream, to this timestamp. Returns `None` if the stream has
    /// not reached this timestamp yet. Does not block.
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError>;
    /// Returns this object as [`Any`], for the backend that created it.
    fn as_any(&self) -> &dyn Any;
}

/// Owned handle to a timestamp of a stream ([`MomentState`]).
pub type Moment = Box<dyn MomentState>;

/// Shared handle to the completion of an execution ([`CompletionState`]).
pub type Completion = Arc<dyn CompletionState>;

/// Addresses of the source and the destination of one transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoints {
    /// Address of the first byte of the destination.
    pub dst: u64,
    /// Address of the first byte of the source.
    pub src: u64,
}

/// Function that runs on a CPU thread in stream order. Several threads may call it concurrently if a graph that contains it is launched
/// repeatedly.
pub type HostFunction = Box<dyn Fn() + Send + Sync>;

/// Method by which a stream waits for signals. A backend that supports only one method ignores the choice.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum SignalWait {
    /// Stream memory operation of the driver. It occupies no multiprocessor.
    #[default]
    Operation,
    /// Kernel of one warp that polls the signal. It reacts sooner, but occupies part of a multiprocessor while it waits.
    Kernel,
}

/// Action of a kernel that executes all operations of a rank in a communication step with little data ([`Backend::stream_run_actions`]).
/// The kernel executes its actions in order.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Waits until a flag in memory of the kernel's GPU is set, and resets it. Each block of the kernel that sets the flag adds 1 to the
    /// flag.
    Take {
        /// Address of the flag.
        flag: u64,
        /// Number of blocks of the kernel that sets the flag. The flag is set when it has this value.
        blocks: u32,
    },
    /// Copies the data of the execution's transfer with this index.
    Copy(u32),
    /// Sets the flag at this address in memory of another GPU, after all earlier actions.
    Raise(u64),
    /// Waits, within one block, until the earlier actions are complete before the later actions begin. Without this action, the copies
    /// before and after it would not be ordered.
    Order,
}

impl Action {
    /// Returns the action in the format of the kernels (`cpp/actions.hpp`). `ends` and `bytes` are the addresses and sizes of the
    /// execution's transfers.
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

/// Launch parameters of a kernel that executes actions: the number of its blocks, and the words in memory that control it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionGrid {
    /// Address of [`ActionGrid::WORDS`] 64-bit words of GPU memory for internal use by the kernel. The words must be 0 before the first
    /// launch.
    pub words: u64,
    /// Address of a word that stops the kernel when it is not 0. The word is a counter as described at [`Backend::kernel_wait_signals`]. If
    /// it becomes nonzero, all waits of the running launch end without success. This launch and later launches with the same `words` then
    /// write no data and set no flags. A launch that has waited for about 0.1 ms sets the word after it in memory to 1.
    pub stop: u64,
    /// Address of a word of GPU memory that is 0 or 1. It selects the half of the actions that a launch executes, and each launch toggles
    /// it. If the address is 0, each launch executes all actions.
    pub turn: u64,
    /// Number of blocks of the kernel. The value 0 means one block.
    pub blocks: u32,
}

impl ActionGrid {
    /// Returns the address of the word that a launch sets to 1 after it has waited for about 0.1 ms. It follows the word at
    /// [`stop`](ActionGrid::stop).
    pub fn late(&self) -> u64 {
        self.stop + 8
    }

    /// Number of 64-bit words at the address [`ActionGrid::words`].
    pub const WORDS: u64 = 3;
    /// Maximum size in bytes of copies for which a kernel of one block is as fast as a kernel of several blocks.
    const NARROW_BYTES: u64 = 16 << 10;
    /// Number of bytes that one block copies at a time: 16 bytes for each thread.
    const BLOCK_BYTES: u64 = 8 << 10;

    /// Returns the number of blocks of a kernel that copies `bytes` bytes in total, on a GPU with `processors` multiprocessors. The result
    /// is at most `asked`. If `asked` is `None`, the result is at most a quarter of the multiprocessors, because kernels of the program run
    /// at the same time.
    pub fn blocks_for(bytes: u64, asked: Option<u32>, processors: u32) -> u32 {
        let most = asked.map_or(processors / 4, |asked| asked.min(processors)).max(1);
        if bytes <= ActionGrid::NARROW_BYTES { 1 } else { bytes.div_ceil(ActionGrid::BLOCK_BYTES).min(u64::from(most)) as u32 }
    }
}

/// Addresses and limits with which a kernel of one GPU accesses a program's transfers ([`Backend::action_reach`]).
#[derive(Clone, Debug)]
pub struct ActionReach {
    /// Addresses of the transfers' sources and destinations, as the kernel accesses them. They are passed to
    /// [`Backend::stream_run_actions`].
    pub ends: Arc<[Endpoints]>,
    /// Number of multiprocessors of the GPU, which is the maximum number of blocks that run simultaneously.
    pub processors: u32,
}

/// Maximum number of actions in one kernel launch.
pub const MOST_ACTIONS: usize = 120;

/// Information about an execution that the caller requests.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// No information is returned. Only work that follows in the stream shows the end of the execution. The backend saves the cost of
    /// marking the end.
    Nothing,
    /// A completion is returned, by which the caller can wait for the end of the execution.
    #[default]
    End,
    /// A completion with the times of each operation is returned. The operations are then issued one by one, even if they could form one
    /// graph.
    Times,
}

/// Arguments of [`Backend::submit`] for one execution of a program.
#[derive(Copy, Clone, Debug)]
pub struct Execution<'a> {
    /// Program to execute. It must have passed `plan::validate`.
    pub program: &'a Arc<Program>,
    /// Addresses of the source and destination of each transfer. They are shared, so that the backend can keep them while the copies run.
    pub endpoints: &'a Arc<[Endpoints]>,
    /// Base address of each staging ring of the program. If the stream is being captured, the graph gets its own staging rings instead.
    pub rings: &'a Arc<[u64]>,
    /// Stream in whose order the program is executed. The execution starts after all earlier work in this stream, and later work starts
    /// after the execution.
    pub stream: StreamHandle,
    /// Earlier executions that use the same staging rings. The new execution starts after they have finished.
    pub after: &'a [Completion],
    /// True if the destination of every transfer is compared with its source after the last copy and before completion. If they differ, the
    /// completion returns [`BackendError::DataCorruption`].
    pub verify: bool,
    /// Execution method that the planner has chosen; [`Engine::Auto`] means streams. A backend that supports only one method ignores it.
    pub engine: Engine,
    /// State that the backend keeps for the plan, shared by all executions of the plan. `None` if the program does not belong to a plan.
    pub state: Option<&'a PlanState>,
    /// Information about the execution that the caller requests.
    pub report: Report,
    /// State that shows whether this communication step of several ranks was abandoned (skipped because another rank exited or left). An
    /// abandoned step copies nothing. `None` for other executions.
    pub fate: Option<&'a StepFate>,
}

impl<'a> Execution<'a> {
    /// Creates an execution that runs in streams and returns a completion. The execution belongs to no plan, and is ordered only after
    /// earlier work in its stream.
    pub fn new(program: &'a Arc<Program>, endpoints: &'a Arc<[Endpoints]>, rings: &'a Arc<[u64]>, stream: StreamHandle) -> Self {
        let (engine, report) = (Engine::Auto, Report::End);
        Execution { program, endpoints, rings, stream, after: &[], verify: false, engine, state: None, report, fate: None }
    }

    /// Returns a copy of this execution with the addresses `ends`, or with unchanged addresses if `ends` is `None`.
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

/// Error reported by a backend.
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
    /// The memory range to be pinned contains an address that is not mapped.
    #[error(
        "the memory at {0:#x} is not mapped or not readable: map it before registering it, and keep it mapped until it is unregistered"
    )]
    NotMapped(u64),
    /// The stream or event does not exist, was destroyed, or belongs to another context.
    #[error("{0} is not a {1} of this context: it belongs to another context, or was destroyed already")]
    InvalidHandle(usize, &'static str),
    /// Data were corrupted during a transfer. This is checked only with `MPGPU_VERIFY=bytes`.
    #[error("transfer {transfer}: byte {offset} of the destination differs from the source after execution")]
    #[allow(missing_docs)]
    DataCorruption { transfer: u32, offset: u64 },
    /// There is no driver or no device that this backend can use.
    #[error("{0}")]
    NoDriver(String),
    /// This backend does not support the request. The text states the reason and the remedy.
    #[error("{0}")]
    NotSupported(String),
    /// A required process has exited, or has freed memory that it shared.
    #[error("{0}")]
    PeerGone(String),
    /// A message is longer than the receive buffer.
    #[error("{0}")]
    Truncated(String),
    /// An index list of a block copy contains an index outside the array.
    #[error("{0}")]
    IndexOutOfRange(String),
    /// The operation was cancelled before it began.
    #[error("{0}")]
    Cancelled(String),
    /// The operating system or the driver reported an error.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    Driver { what: String, reason: String, code: i64 },
}

/// Size in bytes of the pieces in which host memory of programs is pinned. Pieces end at addresses that are multiples of this size. Drivers
/// from version 580 on reject a call that pins 512 GiB. On a machine with two H200, several threads that pin pieces of 1 GiB take 33 ms per
/// GiB, and one call for the whole range takes 48 ms per GiB.
pub const REGISTERED_PIECE: u64 = 1 << 30;

/// Part of an error message that explains why host memory cannot be shared with other processes. All backends use the same text.
pub const HOST_MEMORY_IS_SHARED_BY: &str =
    "the memory is host memory that was not allocated for other processes; allocate it as memory shared between processes";

/// Number of programs for which a backend keeps executable graphs by default.
pub const USUAL_GRAPHS: usize = 128;

/// Statistics of the executable CUDA graphs (`cudaGraphExec_t`, "execs") of a backend.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphStatistics {
    /// Number of programs (compiled plans) that have executable graphs now.
    pub programs: u64,
    /// Number of executable graphs that exist now. It includes graphs that are no longer used and wait for their last launch to finish.
    pub execs: u64,
    /// Number of graph launches.
    pub launches: u64,
    /// Number of launches whose executable graph already had the required addresses.
    pub hits: u64,
    /// Number of launches that first had to instantiate an executable graph or update its addresses.
    pub misses: u64,
    /// Number of executable graphs that were instantiated.
    pub instantiations: u64,
    /// Number of updates of an executable graph's addresses.
    pub repoints: u64,
    /// Number of launches that waited for an earlier launch, because all executable graphs of the program were in use.
    pub waits: u64,
}

/// Identity of the driver and the devices. The file of a probe (measurement of the machine) is valid only for this identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Version of the GPU driver.
    pub driver: String,
    /// GPUs that the backend uses, in the order of their numbers.
    pub gpus: Vec<Gpu>,
}

/// Backend: a set of devices that execute programs.
///
/// All methods may be called from any thread. `submit`, `record_event`, `stream_wait_event` and `launch_host` enqueue work and return; they
/// never wait for earlier work.
pub trait Backend: Send + Sync {
    /// Returns the name of the backend, `host` or `cuda`, for messages and files. Behaviour that depends on the backend is expressed by
    /// other methods of this trait, not by comparing names.
    fn name(&self) -> &'static str;
    /// Returns true if the devices are virtual: CPU threads move all data, times are modelled, and measurements do not apply to any GPU.
    fn is_virtual(&self) -> bool {
        false
    }
    /// Returns a line of text for descriptions which states that times and rates are modelled, so that they are not mistaken for
    /// measurements. The text is empty if the devices are not virtual.
    fn nature(&self) -> &'static str {
        if self.is_virtual() {
            "executed by CPU threads between virtual devices: times and rates are those of the modelled machine\n"
        } else {
            ""
        }
    }
    /// Returns the topology of the machine as far as the driver reports it; `None` for virtual devices.
    fn discover(&self) -> Result<Option<Topology>, BackendError> {
        Ok(None)
    }
    /// Returns the identity of the node's GPUs that have these UUIDs, and the data that the driver reports about them. The GPUs need not be
    /// visible to this process. Returns `None` if one of the GPUs is unknown.
    fn out_of_sight(&self, uuids: &[[u8; 16]]) -> Result<Option<(Identity, Seen)>, BackendError> {
        let _ = uuids;
        Ok(None)
    }
    /// Returns the identity of the driver and the devices.
    fn identity(&self) -> Result<Identity, BackendError> {
        Err(BackendError::NotSupported(format!(
            "the {} backend does not report its driver and devices, so a probe (measurement of the machine) would not be valid for any \
             machine",
            self.name()
        )))
    }

    /// Allocates memory of `device`, aligned to at least 256 bytes, and returns its address. Host memory is pinned if the backend
    /// distinguishes pinned memory. The memory is private to this process.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Allocates memory that other processes can map, and returns its address. Host memory is zeroed. Returns
    /// [`BackendError::NotSupported`] if the system has no such memory.
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
    /// Frees memory that this backend has allocated. Work that uses it must have finished.
    fn free(&self, address: u64) -> Result<(), BackendError>;
    /// Pins host memory of the program. Threads make it resident, in huge pages if `_huge` is true. The memory is then one allocation of a
    /// host device, until [`unregister`](Backend::unregister) is called. Returns true if it is writable. Blocks. If an error occurs,
    /// nothing is pinned.
    ///
    /// A copy must not cross an address in the memory that is a multiple of [`REGISTERED_PIECE`].
    fn register(&self, _address: u64, _bytes: u64, _huge: bool) -> Result<bool, BackendError> {
        Err(BackendError::NotSupported(format!("the {} backend cannot register memory", self.name())))
    }
    /// Unpins host memory that [`register`](Backend::register) has pinned. Work that uses it must have finished.
    fn unregister(&self, address: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(address))
    }
    /// Returns the number of staging rings at the start of the program's list that the caller must protect: the caller must order
    /// executions that use the same ring. The backend itself assigns each of the remaining rings to one execution at a time, in the order
    /// in which the streams reach the executions.
    fn ordered_rings(&self, program: &Program) -> usize {
        program.rings.len()
    }
    /// Returns true if [`free`](Backend::free) returns immediately. If false, the driver may first wait for all work of the device.
    fn frees_at_once(&self) -> bool {
        false
    }
    /// Returns the allocation that contains `address`, or `None` if this backend does not know the address, as for pageable memory. Returns
    /// [`BackendError::NotSupported`] for memory that the backend knows but cannot use.
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError>;
    /// Returns the amount of memory that this backend has allocated on `device` and not freed, in bytes. Returns 0 for a device that does
    /// not exist.
    fn allocated_bytes(&self, device: DeviceId) -> u64;

    /// Creates a stream of `device` that is not ordered relative to any other stream.
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError>;
    /// Destroys a stream. Work that is already enqueued still finishes. The default stream cannot be destroyed.
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Returns the number of streams of this backend on `device`, without the default stream; 0 for a device that does not exist.
    fn stream_count(&self, device: DeviceId) -> u64;
    /// Blocks until all work enqueued in `stream` so far has finished. Returns [`BackendError::PeerGone`] if a wait for a counter has
    /// failed in this stream, in a stream that this stream was ordered after, or in a graph, whose stream is unknown. Each failure is
    /// returned once for each allocation that contains such counters.
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError>;
    /// Runs `work` on a CPU thread in stream order, and then drops it. `work` may block, which on CUDA delays the functions of other
    /// streams. If the stream is being captured, the graph owns `work`: it runs at each launch, and is dropped when the graph and its
    /// executables are destroyed. It is then dropped on a thread that must not call the driver.
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError>;

    /// Creates an event that has the state completed until it is first recorded.
    fn create_event(&self) -> Result<EventHandle, BackendError>;
    /// Destroys an event. Waits for the event that are already enqueued remain effective.
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError>;
    /// Records in `event` all work enqueued in `stream` so far.
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError>;
    /// Makes all work that is enqueued in `stream` after this call wait for the work that is currently recorded in `event`.
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError>;
    /// Blocks until the work that is currently recorded in `event` has finished. If a wait for a counter has failed in that work, each call
    /// returns the error, until the event is recorded in a stream that has already reported the failure.
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError>;

    /// Enqueues one execution of a program, and returns its completion unless [`Report::Nothing`] is requested. If an error is returned, no
    /// work that this call has enqueued is still running.
    ///
    /// If the stream is being captured, the execution becomes part of the graph. It gets its own staging memory, which exists as long as
    /// the graph and its executables. Launches of different executable graphs of one captured graph must therefore be ordered by the
    /// caller. Launches of one executable graph are always ordered. `after` is ignored if the program has staging rings.
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError>;
    /// Returns the completion of all work enqueued in `stream` so far and of the executions `after`. To do so, it enqueues an execution
    /// that copies nothing. Returns `None` if `report` is [`Report::Nothing`].
    fn mark_end(&self, stream: StreamHandle, after: &[Completion], report: Report) -> Result<Option<Completion>, BackendError> {
        let (program, endpoints, rings) = (Arc::new(Program::default()), Arc::from([]), Arc::from([]));
        self.submit(&Execution { after, report, ..Execution::new(&program, &endpoints, &rings, stream) })
    }
    /// Makes `stream` take a timestamp when all work enqueued in it so far has finished. Not allowed in a stream that is being captured.
    fn mark_moment(&self, stream: StreamHandle) -> Result<Moment, BackendError> {
        let _ = stream;
        Err(BackendError::NotSupported(format!("the {} backend does not time streams", self.name())))
    }
    /// Prepares the first execution with these arguments: creates graphs, streams and events, loads kernels and enables access to memory.
    /// Enqueues nothing and moves no data. May wait for work of the devices. Ignores `after` and `report`.
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        let _ = execution;
        Ok(())
    }
    /// Enqueues the copy of many pieces in `stream`, by kernels of the stream's GPU and of its helpers, without a plan. Returns the
    /// completion unless `report` is [`Report::Nothing`]. The caller has checked that the backend knows the memory of all ends. Returns
    /// [`BackendError::NotSupported`] if the GPU cannot access an end, or if the stream is being captured and the copy has a list.
    fn copy_pieces(
        &self,
        stream: StreamHandle,
        pieces: &Pieces<'_>,
        bounds: KernelBounds<'_>,
        report: Report,
    ) -> Result<Option<Completion>, BackendError> {
        let _ = (stream, pieces, bounds, report);
        Err(BackendError::NotSupported(format!("the backend {} copies no pieces", self.name())))
    }
    /// Sets limits for kernels of plans that have an end in host memory: the number of multiprocessors, and whether writes to host memory are
    /// paced.
    fn limit_host_kernels(&self, multiprocessors: u32, is_paced: bool) {
        let _ = (multiprocessors, is_paced);
    }
    /// Blocks until all work that was ever enqueued in any stream has finished.
    fn synchronize(&self) -> Result<(), BackendError>;

    /// Sets the number of programs for which executable graphs are kept. The programs that were launched most recently keep their graphs.
    /// The default number is [`USUAL_GRAPHS`].
    fn keep_graphs(&self, _programs: usize) {}

    /// Returns statistics of graph launches; all values are zero on a backend without graphs.
    fn graph_statistics(&self) -> GraphStatistics {
        GraphStatistics::default()
    }

    /// Returns an identifier of a device that is the same in every process of the node, whatever the number of the device there. It is the
    /// UUID of a GPU.
    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        Ok(uuid_of_number(device))
    }
    /// Returns the pairs of GPUs in `pairs` between which copies lose data although the driver reports peer access, as happens behind an
    /// IOMMU. Tests each pair once, in both directions, by copies for which it waits only a short time. Must not be called while work is
    /// enqueued.
    fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        let _ = pairs;
        Vec::new()
    }

    /// Returns the allocation that contains `bytes` bytes at `address`, like [`Backend::locate`], but limited to the part of it that other
    /// processes can map. Returns `None` if this backend does not know the address. Returns [`BackendError::NotSupported`] with the remedy
    /// if the bytes are not inside that part.
    fn exportable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let _ = bytes;
        self.locate(address)
    }
    /// Exports an allocation that [`Backend::exportable`] has returned, and returns the information with which another process maps it.
    /// Returns [`BackendError::NotSupported`] with the remedy for memory that other processes cannot map.
    fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let _ = allocation;
        Err(BackendError::NotSupported(format!("the {} backend cannot share memory", self.name())))
    }
    /// Maps an allocation that another process, or another context of this process, has exported. Returns the address of its first byte.
    /// Ignores the id and the base of `allocation`. [`Backend::locate`] then reports the memory as memory of the device of `allocation`.
    fn map(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        let _ = (shared, allocation);
        Err(BackendError::NotSupported(format!("the {} backend cannot share memory", self.name())))
    }
    /// Unmaps memory that [`Backend::map`] has mapped at `base`. Work that uses it must have finished.
    fn unmap(&self, base: u64) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(base))
    }

    /// Makes all work that is enqueued in `stream` after this call wait until the counter of each signal is at least the signal's value.
    /// Counters must be in memory that this backend can locate. If a counter may never be set, the method enqueues nothing and returns
    /// [`BackendError::PeerGone`].
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        let _ = (stream, signals, by);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Returns a number that identifies a stream and is unique while the stream exists.
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
    /// Loads the kernels for waits and small messages in advance. Loading them later could wait for work of a device.
    fn load_kernels(&self) {}
    /// Calls `work` with true if `stream` is being captured, and with false otherwise. The backend caches the properties of the stream for
    /// calls of this thread until `work` returns, so that several calls cost little more than one. No capture of the stream may begin or
    /// end meanwhile.
    fn in_stream(&self, stream: StreamHandle, work: &mut dyn FnMut(bool)) -> Result<(), BackendError> {
        work(self.is_capturing(stream)?);
        Ok(())
    }
    /// Returns true if all work enqueued in `stream` so far is known to have finished. The calling thread may then perform the next work
    /// itself. May return false although the work has finished.
    fn is_idle(&self, stream: StreamHandle) -> bool {
        let _ = stream;
        false
    }
    /// Sets counters after all work enqueued in `stream` so far. A thread or kernel that observes the new value also sees all writes of
    /// that work.
    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        let _ = (stream, signals);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Sets the counters `raises` in the same way as [`stream_raise_signals`](Backend::stream_raise_signals). Then makes all work that is
    /// enqueued in `stream` after this call wait until every flag is 1, and resets each flag to 0. One call does both, because the driver
    /// accepts them as one operation.
    ///
    /// A flag is a counter in memory of this process from [`Backend::allocate_shared`]. It is set again only after it was reset. Unlike a
    /// wait for signals, this call does not check the current value of a flag, which may belong to an earlier communication step. If the
    /// process that should set a flag exits or leaves, the wait ends and the communication step is abandoned.
    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        let _ = (stream, raises, flags, fate);
        Err(BackendError::NotSupported(format!(
            "the {} backend does not support flags (words in memory that streams set and wait for)",
            self.name()
        )))
    }
    /// Makes all work that is enqueued in `stream` after this call wait until every flag is 1. The requirements for flags are those of
    /// [`stream_take_flags`](Backend::stream_take_flags). This call does not reset the flags. Each communication step resets them before it
    /// begins.
    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64], fate: &StepFate) -> Result<(), BackendError> {
        let _ = (stream, flags, fate);
        Err(BackendError::NotSupported(format!(
            "the {} backend does not support flags (words in memory that streams set and wait for)",
            self.name()
        )))
    }
    /// Enqueues one kernel of `device` that executes all operations of this rank in a communication step with little data. The kernel
    /// executes [actions](Action::segment), whose copies use the addresses of [`action_reach`](Backend::action_reach). Returns false and
    /// enqueues nothing if the stream belongs to another GPU. The communication step is abandoned if the process that should set a flag
    /// exits or leaves.
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
    /// Returns the addresses with which a kernel of `device` accesses the sources and destinations of a program's transfers. Returns an
    /// error if the kernel cannot access one of them, or if this backend has no such kernel.
    fn action_reach(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        let _ = (device, program, ends);
        Err(BackendError::NotSupported(format!("the {} backend has no kernel that waits for flags", self.name())))
    }
    /// Records that kernels of the caller wait for these counters, until the memory of the counters is freed.
    /// [`fail_waits`](Backend::fail_waits) then sets each counter that is below the value of its signal to that value, as for other waits.
    /// Returns an error and records nothing if a process that could have set a counter has exited. A failure is reported by the streams
    /// that wait for counters in the same allocation if `streams_wait` is true, and by every stream if it is false.
    fn kernel_wait_signals(&self, signals: &[Signal], streams_wait: bool) -> Result<(), BackendError> {
        let _ = (signals, streams_wait);
        Err(BackendError::NotSupported(format!("the {} backend does not support signals", self.name())))
    }
    /// Returns the address with which kernels of `device` access the memory at `address`, which belongs to another process and is mapped
    /// here.
    fn address_for(&self, device: DeviceId, address: u64) -> Result<u64, BackendError> {
        let _ = device;
        Ok(address)
    }
    /// Returns the addresses with which kernels of `device` access the sources and destinations of a program's transfers. Returns
    /// [`BackendError::NotSupported`] if that device cannot access one of them directly.
    fn kernel_ends(&self, device: DeviceId, program: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<Arc<[Endpoints]>, BackendError> {
        let _ = (device, program);
        Ok(Arc::clone(ends))
    }
    /// Returns the current value of a counter. All writes that preceded the setting of this value are then visible. Returns
    /// [`BackendError::NotSupported`] for memory that the CPU cannot read.
    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        Err(BackendError::InvalidPointer(counter))
    }
    /// Sets a counter immediately, after everything that the calling thread has written or seen. Returns the same errors as
    /// [`read_signal`](Backend::read_signal).
    fn raise_signal(&self, signal: Signal) -> Result<(), BackendError> {
        Err(BackendError::InvalidPointer(signal.counter))
    }
    /// Records which party (importing process or context) sets each counter of an allocation. `by_address` is sorted by address. Called
    /// before any wait for these counters.
    fn name_signallers(&self, allocation: &Allocation, by_address: Arc<[(u64, u32)]>) {
        let _ = (allocation, by_address);
    }
    /// Reports that a party (importing process or context) that sets counters in this allocation has exited or left. Current and later
    /// waits for its counters ([`Signallers::concerns`]) then end, with a failure, if the counter has not reached the value that the wait
    /// requires. Other waits are not affected. No stream therefore waits forever. A thread that waits for a stream with a failed wait
    /// receives [`BackendError::PeerGone`] once. If `party` is `None`, only counters for which no party is recorded are affected.
    fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer) {
        let _ = (allocation, party, peer);
    }
    /// Ends waits for processes that have exited or left again, if the program or another process has reset counters that
    /// [`fail_waits`](Backend::fail_waits) has set. To do so, sets these counters again. Called every few milliseconds after `fail_waits`,
    /// for as long as it returns true.
    fn fail_waits_again(&self) -> bool {
        false
    }
    /// Returns the process or context that has exited or left and could have set a counter to this value, or `None` if there is none.
    fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        let _ = wanted;
        None
    }
}

impl BackendError {
    /// Returns the out-of-memory error for host memory whose size depends on numbers that the caller has chosen, such as the number of
    /// transfers.
    pub fn no_headroom(NoHeadroom { bytes }: NoHeadroom) -> Self {
        BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes }
    }
}

/// Returns the error for a backend whose [`Backend::submit`] returns no completion although one was requested.
#[cold]
pub fn no_completion() -> BackendError {
    BackendError::Driver { what: "submit".into(), reason: "the backend has returned no completion".into(), code: 0 }
}

/// Returns the error for requesting the times of an execution that was not submitted with [`Report::Times`].
pub fn not_timed() -> BackendError {
    BackendError::NotSupported("this execution was not timed: ask for `Report::Times`".into())
}

/// Returns an identifier that is derived from the number of a device. It is used for virtual devices and host memory, which have the same
/// number in every process of the node.
pub fn uuid_of_number(device: DeviceId) -> [u8; 16] {
    let mut identity = *b"mpgpu device    ";
    identity[12..].copy_from_slice(&device.0.to_le_bytes());
    identity
}
