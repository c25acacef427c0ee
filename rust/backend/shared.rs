//! Allocations that are exported to other processes.

use rustix::fd::OwnedFd;

/// Size of a driver's handle: 64 bytes, as those of CUDA.
pub const PAYLOAD_BYTES: usize = 64;

/// Data with which another process maps an allocation. Only the backend interprets it.
#[derive(Debug)]
pub struct Shared {
    /// Method of sharing, in the backend's numbering.
    pub form: u32,
    /// File to send to the other process, if the method of sharing uses one.
    pub descriptor: Option<OwnedFd>,
    /// Offset of the allocation in the file, or in the object that the payload names.
    pub offset: u64,
    /// Handle of the driver.
    pub payload: [u8; PAYLOAD_BYTES],
}

impl Shared {
    /// Value of `form` for an address of this process, in `offset`. No backend uses it for its own methods.
    pub const SAME_PROCESS: u32 = 0;
    /// Value of `form` for memory of another process that the program itself has mapped at the address in `offset`, by the payload. No
    /// backend uses it for its own methods.
    pub const MAPPED_BY_PROGRAM: u32 = u32::MAX;

    /// Returns true if the form names an address of this process, which no other process can use.
    pub fn is_local(&self) -> bool {
        [Shared::SAME_PROCESS, Shared::MAPPED_BY_PROGRAM].contains(&self.form)
    }
}
