//! Why the engine refused or failed. Every text names the value and, where there is one, the remedy.

use crate::backend::BackendError;
use crate::ipc;
use crate::plan::{PlanError, Violation};
use crate::program::ranks::PartViolation;
use crate::topology::{DeviceId, TopologyError};
use crate::tune::TuningError;
use crate::units::devices;
use std::fmt;

/// Which end of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Where the bytes go.
    Destination,
    /// Where they come from.
    Source,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            End::Destination => "destination",
            End::Source => "source",
        })
    }
}

/// The engine's one error type.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// A variable of the environment is unknown or has a value that is not accepted.
    #[error("{variable}={value}: {reason}")]
    Environment { variable: String, value: String, reason: String },
    /// An option of a call has a value that is not accepted.
    #[error("{name}={value}: {reason}")]
    Option { name: &'static str, value: String, reason: String },
    /// Asked for something that this build does not have.
    #[error("{0}")]
    NotSupported(String),
    /// A device of a transfer does not exist.
    #[error("transfer {transfer}: {end} {} does not exist: this context has {}", DeviceId(*device).in_words(), devices(*gpus, *hosts))]
    UnknownDevice { transfer: usize, end: End, device: i32, gpus: u32, hosts: u32 },
    /// A device of a call does not exist.
    #[error("{} does not exist: this context has {}", DeviceId(*device).in_words(), devices(*gpus, *hosts))]
    NoSuchDevice { device: i32, gpus: u32, hosts: u32 },
    /// More transfers than a program can number.
    #[error("{0} transfers: one batch holds at most {max}", max = u32::MAX)]
    TooManyTransfers(usize),
    /// A null address where bytes are to be read or written.
    #[error("transfer {transfer}: {end} is null, but {bytes} bytes are to be moved")]
    NullPointer { transfer: usize, end: End, bytes: u64 },
    /// The last byte lies beyond the address space.
    #[error("transfer {transfer}: {end} {address:#x} plus {bytes} bytes runs past the end of the address space")]
    AddressOverflow { transfer: usize, end: End, address: u64, bytes: u64 },
    /// Memory of a GPU was expected.
    #[error(
        "transfer {transfer}: {end} {address:#x} ({bytes} bytes) is not memory of {} that this context knows; allocate it in this context",
        DeviceId(*device).in_words()
    )]
    NotDeviceMemory { transfer: usize, end: End, address: u64, bytes: u64, device: i32 },
    /// The address belongs to another device.
    #[error(
        "transfer {transfer}: {end} {address:#x} ({bytes} bytes) lies in memory of {} (allocation {base:#x}, {size} bytes), not of {}",
        DeviceId(*actual).in_words(), DeviceId(*device).in_words()
    )]
    WrongDevice { transfer: usize, end: End, address: u64, bytes: u64, device: i32, actual: i32, base: u64, size: u64 },
    /// The range leaves its allocation.
    #[error("transfer {transfer}: {end} {address:#x} ({bytes} bytes) runs out of its allocation ({base:#x}, {size} bytes)")]
    OutOfAllocation { transfer: usize, end: End, address: u64, bytes: u64, base: u64, size: u64 },
    /// Two transfers of the batch touch the same bytes and at least one writes them.
    #[error(
        "transfer {first} and transfer {second}: the {first_end} of the one ({first_address:#x}, {first_bytes} bytes) overlaps the \
         {second_end} of the other ({second_address:#x}, {second_bytes} bytes); transfers of a batch run in no particular order, so \
         put them into two plans"
    )]
    Overlap {
        first: usize,
        first_end: End,
        first_address: u64,
        first_bytes: u64,
        second: usize,
        second_end: End,
        second_address: u64,
        second_bytes: u64,
    },
    /// The source and the destination of one transfer overlap.
    #[error(
        "transfer {transfer}: its destination ({dst:#x}, {bytes} bytes) overlaps its own source ({src:#x}); source and destination of a transfer must be apart"
    )]
    OverlapsItself { transfer: usize, dst: u64, src: u64, bytes: u64 },
    /// The memory that a plan was made for has been freed since.
    #[error("transfer {transfer}: {end} {address:#x} was freed or unregistered after the plan was made; plan again")]
    MemoryFreed { transfer: usize, end: End, address: u64 },
    /// Address that this context has not allocated.
    #[error("{0:#x} was not allocated in this context, or was freed already")]
    NotAllocated(u64),
    /// Memory that cannot be registered.
    #[error("{address:#x} ({bytes} bytes) cannot be registered: {reason}")]
    NotRegistrable { address: u64, bytes: u64, reason: String },
    /// An address that was not registered.
    #[error("{0:#x} was not registered with this context, or was unregistered already")]
    NotRegistered(u64),
    /// Bytes would be written where none may be.
    #[error("transfer {transfer}: {end} {address:#x} is memory that may not be written and was registered so; map it writable")]
    ReadOnly { transfer: usize, end: End, address: u64 },
    /// An address that lies in no memory that the backend knows.
    #[error(
        "{address:#x} ({bytes} bytes) is not memory of a device that this context knows; allocate it in this context, or on CUDA with cudaMalloc"
    )]
    NotShareable { address: u64, bytes: u64 },
    /// The range leaves its allocation.
    #[error("{address:#x} ({bytes} bytes) runs out of its allocation ({base:#x}, {size} bytes)")]
    OutOfMemoryRange { address: u64, bytes: u64, base: u64, size: u64 },
    /// An address that importing has not returned, or not as often as it was closed.
    #[error("{0:#x} was not imported by this context, or was closed already")]
    NotImported(u64),
    /// The address of a counter is not one.
    #[error("signal {index}: {counter:#x} {reason}")]
    BadSignal { index: usize, counter: u64, reason: &'static str },
    /// A counter was not raised in time.
    #[error("the signal at {counter:#x} stands at {now} and has not reached {value} in {seconds} s")]
    SignalTimeout { counter: u64, now: u64, value: u64, seconds: f64 },
    /// Partitions of a plan that nobody has made ready, or that have not arrived.
    #[error("{missing}, after {seconds} s{}", if *.is_ended { ": their plan ends without them, and what it was to write is undefined" } else { "" })]
    PartitionTimeout { missing: String, seconds: f64, is_ended: bool },
    /// Memory of another process could not be had, or was given to nobody.
    #[error("{0}")]
    Share(#[from] ipc::IpcError),
    /// The context was destroyed.
    #[error("the context was destroyed")]
    ContextDestroyed,
    /// The context is of the process that this one was forked from.
    #[error(
        "this is a child of fork, and the context is its parent's: a child has neither its threads nor its GPUs; create a context in the \
         child, fork before the first context is created, or start the child as a program of its own (exec)"
    )]
    Forked,
    /// Another rank could not do its part of what all ranks do together.
    #[error("rank {rank}: {reason}")]
    RankFailed { rank: u32, reason: String },
    /// The caller's allgather has failed.
    #[error("allgather: {0}")]
    Allgather(String),
    /// An argument of a call that all ranks make.
    #[error("{reason}")]
    NodeArgument { argument: &'static std::ffi::CStr, reason: String },
    /// No room for another operation or message.
    #[error("{0}")]
    QueueFull(String),
    /// The parts of a program do not go together. Nothing was executed.
    #[error("internal error: the ranks' parts are not right and were not run: {0}")]
    InvalidParts(#[from] PartViolation),
    /// The machine could not be described.
    #[error("{0}")]
    Topology(#[from] TopologyError),
    /// The tuning file cannot be used.
    #[error("{0}")]
    Tuning(#[from] TuningError),
    /// No plan could be made.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// The backend failed.
    #[error("{0}")]
    Backend(#[from] BackendError),
    /// The planner used more staging than it was given. Nothing was executed.
    #[error("internal error: a plan needs more than {bound} bytes of staging on {}", DeviceId(*device).in_words())]
    StagingBound { device: i32, bound: u64 },
    /// The planner made a program that its own validator refuses. Nothing was executed.
    #[error("internal error: the program is not valid and was not run: {0}")]
    InvalidProgram(#[from] Violation),
}

impl Error {
    /// Whether something is not there to be had, wherever that was found.
    pub fn is_not_supported(&self) -> bool {
        use crate::ipc::IpcError;
        matches!(self, Error::NotSupported(_) | Error::Backend(BackendError::NotSupported(_)) | Error::Share(IpcError::NotSupported(_)))
    }
}
