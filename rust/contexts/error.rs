//! Errors of contexts. Every message states the invalid value and, if there is one, the remedy.

use crate::backend::BackendError;
use crate::ipc;
use crate::plan::{PlanError, Violation};
use crate::program::ranks::PartViolation;
use crate::topology::{DeviceId, TopologyError};
use crate::tune::TuningError;
use crate::units::devices;
use std::fmt;

/// Source or destination of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Memory to which the transfer writes.
    Destination,
    /// Memory that the transfer reads.
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

/// Error of a context, a plan or the ranks of a node.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// An environment variable has a value that is not accepted.
    #[error("{variable}={value}: {reason}")]
    Environment { variable: String, value: String, reason: String },
    /// An option of a call has a value that is not accepted.
    #[error("{name}={value}: {reason}")]
    Option { name: &'static str, value: String, reason: String },
    /// The requested feature is not supported by this build, backend or machine.
    #[error("{0}")]
    NotSupported(String),
    /// A transfer specifies a device that does not exist.
    #[error("transfer {transfer}: {end} {} does not exist: this context has {}", DeviceId(*device).in_words(), devices(*gpus, *hosts))]
    UnknownDevice { transfer: usize, end: End, device: i32, gpus: u32, hosts: u32 },
    /// A call specifies a device that does not exist.
    #[error("{} does not exist: this context has {}", DeviceId(*device).in_words(), devices(*gpus, *hosts))]
    NoSuchDevice { device: i32, gpus: u32, hosts: u32 },
    /// The batch has more transfers than can be numbered with 32 bits.
    #[error("{0} transfers: one batch holds at most {max}", max = u32::MAX)]
    TooManyTransfers(usize),
    /// A transfer of at least one byte has a null address.
    #[error("transfer {transfer}: {end} is null, but {bytes} bytes are to be moved")]
    NullPointer { transfer: usize, end: End, bytes: u64 },
    /// The range of a transfer extends beyond the end of the address space.
    #[error("transfer {transfer}: {end} {address:#x} plus {bytes} bytes runs past the end of the address space")]
    AddressOverflow { transfer: usize, end: End, address: u64, bytes: u64 },
    /// The address of a transfer is not in GPU memory that the context knows.
    #[error(
        "transfer {transfer}: {end} {address:#x} ({bytes} bytes) is not memory of {} that this context knows; allocate it in this context",
        DeviceId(*device).in_words()
    )]
    NotDeviceMemory { transfer: usize, end: End, address: u64, bytes: u64, device: i32 },
    /// The address of a transfer is in memory of another device than the transfer specifies.
    #[error(
        "transfer {transfer}: {end} {address:#x} ({bytes} bytes) lies in memory of {} (allocation {base:#x}, {size} bytes), not of {}",
        DeviceId(*actual).in_words(), DeviceId(*device).in_words()
    )]
    WrongDevice { transfer: usize, end: End, address: u64, bytes: u64, device: i32, actual: i32, base: u64, size: u64 },
    /// The range of a transfer extends beyond the end of its allocation.
    #[error("transfer {transfer}: {end} {address:#x} ({bytes} bytes) extends past the end of its allocation ({base:#x}, {size} bytes)")]
    OutOfAllocation { transfer: usize, end: End, address: u64, bytes: u64, base: u64, size: u64 },
    /// Two transfers of one batch access the same bytes, and at least one of the transfers writes them.
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
        "transfer {transfer}: its destination ({dst:#x}, {bytes} bytes) overlaps its own source ({src:#x}); source and destination of a transfer must not overlap"
    )]
    OverlapsItself { transfer: usize, dst: u64, src: u64, bytes: u64 },
    /// The plan's memory has been freed or unregistered since the plan was made.
    #[error("transfer {transfer}: {end} {address:#x} was freed or unregistered after the plan was made; create the plan again")]
    MemoryFreed { transfer: usize, end: End, address: u64 },
    /// The context did not allocate memory at this address.
    #[error("{0:#x} was not allocated in this context, or was freed already")]
    NotAllocated(u64),
    /// The host memory cannot be registered (pinned).
    #[error("{address:#x} ({bytes} bytes) cannot be registered: {reason}")]
    NotRegistrable { address: u64, bytes: u64, reason: String },
    /// No memory is registered at this address.
    #[error("{0:#x} was not registered with this context, or was unregistered already")]
    NotRegistered(u64),
    /// No file is mapped at this address.
    #[error("{0:#x} is not the start address of a file mapping of this context, or the file was unmapped already")]
    NotMapped(u64),
    /// The destination of a transfer is registered memory that must not be written.
    #[error("transfer {transfer}: {end} {address:#x} is registered memory that may not be written; map it writable")]
    ReadOnly { transfer: usize, end: End, address: u64 },
    /// The address is not in memory of a device that the backend knows.
    #[error(
        "{address:#x} ({bytes} bytes) is not memory of a device that this context knows; allocate it in this context, or on CUDA with cudaMalloc"
    )]
    NotShareable { address: u64, bytes: u64 },
    /// A range of memory extends beyond the end of its allocation.
    #[error("{address:#x} ({bytes} bytes) extends past the end of its allocation ({base:#x}, {size} bytes)")]
    OutOfMemoryRange { address: u64, bytes: u64, base: u64, size: u64 },
    /// The address was not returned by an import, or has already been closed as often as it was returned.
    #[error("{0:#x} was not imported by this context, or was closed already")]
    NotImported(u64),
    /// The address of a signal is not that of a counter that can be set or waited for.
    #[error("signal {index}: {counter:#x} {reason}")]
    BadSignal { index: usize, counter: u64, reason: &'static str },
    /// A counter did not reach the expected value in time.
    #[error("the signal at {counter:#x} has the value {now} and has not reached {value} in {seconds} s")]
    SignalTimeout { counter: u64, now: u64, value: u64, seconds: f64 },
    /// Partitions of a plan were not marked ready, or did not arrive, within the time limit.
    #[error("{missing}, after {seconds} s{}", if *.is_ended { ": their plan ends without them, and the contents of its destinations are undefined" } else { "" })]
    PartitionTimeout { missing: String, seconds: f64, is_ended: bool },
    /// Memory of another process could not be mapped, or memory could not be exported.
    #[error("{0}")]
    Share(#[from] ipc::IpcError),
    /// The context has been destroyed.
    #[error("the context was destroyed")]
    ContextDestroyed,
    /// The context was created by the parent of this process, before `fork`. A child process cannot use it.
    #[error(
        "this is a child of fork, and the context belongs to its parent: a child has neither the threads nor the GPUs of its parent; \
         create a context in the child, fork before the first context is created, or start the child as a program of its own (exec)"
    )]
    Forked,
    /// Another rank failed in a collective call.
    #[error("rank {rank}: {reason}")]
    RankFailed { rank: u32, reason: String },
    /// The allgather function that the caller supplied failed.
    #[error("allgather: {0}")]
    Allgather(String),
    /// An argument of a collective call is not accepted.
    #[error("{reason}")]
    NodeArgument { argument: &'static std::ffi::CStr, reason: String },
    /// An argument of a copy of pieces is invalid.
    #[error("{reason}")]
    Pieces { argument: &'static std::ffi::CStr, reason: String },
    /// An end of a copy of pieces is in memory that pieces cannot use.
    #[error("{reason}")]
    PieceMemory { argument: &'static std::ffi::CStr, reason: String },
    /// A queue is full and cannot accept another operation or message.
    #[error("{0}")]
    QueueFull(String),
    /// The operations that the ranks of a node would execute for a common plan are inconsistent with each other. Nothing was executed.
    #[error("internal error: the operations of the ranks are inconsistent and were not executed: {0}")]
    InvalidParts(#[from] PartViolation),
    /// The machine's topology is invalid or could not be read.
    #[error("{0}")]
    Topology(#[from] TopologyError),
    /// The tuning file cannot be used.
    #[error("{0}")]
    Tuning(#[from] TuningError),
    /// The planner could not make a plan.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// The backend reported an error.
    #[error("{0}")]
    Backend(#[from] BackendError),
    /// An execution of a plan needs more staging memory than the limit that was computed when the plan was created. Nothing was executed.
    #[error("internal error: a plan needs more than {bound} bytes of staging memory on {}", DeviceId(*device).in_words())]
    StagingBound { device: i32, bound: u64 },
    /// The planner made a program that the plan validator rejects. Nothing was executed.
    #[error("internal error: the operation list of the plan is invalid and was not executed: {0}")]
    InvalidProgram(#[from] Violation),
}

impl Error {
    /// True if the error reports an unsupported operation, whichever layer of the library has detected it.
    pub fn is_not_supported(&self) -> bool {
        use crate::ipc::IpcError;
        matches!(self, Error::NotSupported(_) | Error::Backend(BackendError::NotSupported(_)) | Error::Share(IpcError::NotSupported(_)))
    }
}
