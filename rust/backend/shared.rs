//! Describes allocations that are exported to other processes.

use rustix::fd::OwnedFd;

/// Size in bytes of a driver's handle for shared memory. Handles of CUDA have 64 bytes.
pub const PAYLOAD_BYTES: usize = 64;

/// Information with which another process maps an allocation. Only the backend interprets it.
#[derive(Debug)]
pub struct Shared {
    /// Number that identifies the sharing method, as defined by the backend.
    pub form: u32,
    /// File descriptor to send to the other process; `None` if the sharing method uses no file.
    pub descriptor: Option<OwnedFd>,
    /// Offset in bytes of the allocation in the file, or in the object that the payload identifies.
    pub offset: u64,
    /// Handle of the driver that identifies the shared object.
    pub payload: [u8; PAYLOAD_BYTES],
}

impl Shared {
    /// Value of `form` for memory of this process whose address is in `offset`. No backend uses this number for its own methods.
    pub const SAME_PROCESS: u32 = 0;
    /// Value of `form` for memory of another process that the program itself has already mapped at the address in `offset`. The payload is
    /// the handle with which the program has mapped it. No backend uses this number for its own methods.
    pub const MAPPED_BY_PROGRAM: u32 = u32::MAX;

    /// Returns true if the information is an address of this process, which no other process can use.
    pub fn is_local(&self) -> bool {
        [Shared::SAME_PROCESS, Shared::MAPPED_BY_PROGRAM].contains(&self.form)
    }
}
