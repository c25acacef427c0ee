//! Memory on its way to another process.

use rustix::fd::OwnedFd;

/// Room for what a driver calls a handle: 64 bytes is what CUDA's have.
pub const PAYLOAD_BYTES: usize = 64;

/// What another process needs to map an allocation. What it means is the backend's own matter.
#[derive(Debug)]
pub struct Shared {
    /// Which of the backend's ways it is.
    pub form: u32,
    /// A file, if the way has one.
    pub descriptor: Option<OwnedFd>,
    /// Where in the file, or in what the payload names, the allocation starts.
    pub offset: u64,
    /// Bytes of the driver's.
    pub payload: [u8; PAYLOAD_BYTES],
}

impl Shared {
    /// The form that no backend uses for its own: an address of this very process, in `offset`.
    pub const SAME_PROCESS: u32 = 0;
    /// As little: memory of another process that the program itself has mapped, at the address in `offset`, by the payload.
    pub const MAPPED_BY_PROGRAM: u32 = u32::MAX;

    /// Whether it names an address of this process, which no other has to give.
    pub fn is_local(&self) -> bool {
        [Shared::SAME_PROCESS, Shared::MAPPED_BY_PROGRAM].contains(&self.form)
    }
}
