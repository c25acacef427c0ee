//! Encodes a memory range of one process as bytes that can be sent to another process.

use super::AllocationKey;
use super::error::IpcError;
use super::process::ProcessIdentity;
use crate::topology::MemoryKind;

/// Size in bytes of an encoded handle. It is equal in all versions of the library.
pub const BYTES: usize = 128;

/// Version of the format of an encoded handle. It applies to the fields after the checksum; the magic number, the version and the checksum
/// are at equal positions in every version.
pub const VERSION: u16 = 2;

const MAGIC: [u8; 8] = *b"mpgpu-mh";

/// Random number in a handle. It proves to the exporter that a process has received the handle.
#[derive(Copy, Clone)]
pub struct Secret(pub [u8; 16]);

impl Secret {
    /// Creates an unpredictable secret.
    pub(super) fn draw() -> Result<Secret, IpcError> {
        let mut bytes = [0; 16];
        // The call either returns these few bytes completely or fails.
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(IpcError::system("getrandom"))?;
        Ok(Secret(bytes))
    }
}

/// Compares in constant time, so that a secret cannot be guessed byte by byte from the response time.
impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |bits, (a, b)| std::hint::black_box(bits | (a ^ b)));
        differing == 0
    }
}

impl Eq for Secret {}

/// Prints the type name only, so that the secret does not appear in logs.
impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Decoded handle: a memory range of another process and the information needed to import it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Process that owns the memory range.
    pub origin: ProcessIdentity,
    /// Key of the allocation that contains the memory range, among the allocations of the owning process.
    pub key: AllocationKey,
    /// Size in bytes of the allocation that contains the memory range.
    pub allocation_bytes: u64,
    /// Offset in bytes of the memory range from the start of its allocation.
    pub offset: u64,
    /// Size in bytes of the memory range.
    pub bytes: u64,
    /// UUID of the device whose memory contains the range. It does not depend on the device numbering in the importing process.
    pub device: [u8; 16],
    /// Device number in the exporting process. It is used only in messages.
    pub number: i32,
    /// Kind of memory that contains the range.
    pub kind: MemoryKind,
    /// Secret by which the exporter recognizes that a process has received this handle, and may therefore map the allocation.
    pub secret: Secret,
}

impl Handle {
    /// Returns the encoded handle, including the checksum.
    pub fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(10, &[self.key.backend, self.kind as u8]);
        put(16, &self.origin.boot);
        put(32, &self.origin.token);
        put(48, &self.origin.network.to_le_bytes());
        put(52, &self.number.to_le_bytes());
        put(56, &self.origin.user.to_le_bytes());
        put(60, &self.origin.process.to_le_bytes());
        put(64, &self.key.allocation.to_le_bytes());
        put(72, &self.allocation_bytes.to_le_bytes());
        put(80, &self.offset.to_le_bytes());
        put(88, &self.bytes.to_le_bytes());
        put(96, &self.device);
        put(112, &self.secret.0);
        seal(&mut bytes);
        bytes
    }

    /// Decodes a handle. The contents are not trusted. They only form a request to the exporter, which validates them.
    pub fn decode(bytes: &[u8; BYTES]) -> Result<Handle, IpcError> {
        if bytes[..8] != MAGIC {
            let found: String = bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            return Err(IpcError::Corrupt(format!("the handle starts with {found}, so it is not a handle of exported memory")));
        }
        if number(bytes, 12) != checksum(bytes) {
            return Err(IpcError::Corrupt(
                "the checksum of the handle is wrong: its bytes were lost or changed on the way from the exporter".into(),
            ));
        }
        let version = u16::from_le_bytes(array(bytes, 8));
        if version != VERSION {
            return Err(IpcError::Version(format!(
                "the handle has version {version}, but this library uses version {VERSION}: link both programs with the same mpgpu"
            )));
        }
        let kind = match bytes[11] {
            0 => MemoryKind::Device,
            1 => MemoryKind::Pinned,
            2 => MemoryKind::Pageable,
            other => return Err(IpcError::Corrupt(format!("the handle describes memory of kind {other}, which does not exist"))),
        };
        let handle = Handle {
            origin: ProcessIdentity {
                boot: array(bytes, 16),
                token: array(bytes, 32),
                network: number(bytes, 48),
                user: number(bytes, 56),
                process: number(bytes, 60),
            },
            key: AllocationKey { backend: bytes[10], allocation: u64::from_le_bytes(array(bytes, 64)) },
            allocation_bytes: u64::from_le_bytes(array(bytes, 72)),
            offset: u64::from_le_bytes(array(bytes, 80)),
            bytes: u64::from_le_bytes(array(bytes, 88)),
            device: array(bytes, 96),
            number: i32::from_le_bytes(array(bytes, 52)),
            kind,
            secret: Secret(array(bytes, 112)),
        };
        if handle.bytes == 0 || handle.offset.checked_add(handle.bytes).is_none_or(|end| end > handle.allocation_bytes) {
            return Err(IpcError::Corrupt(format!(
                "the handle describes {} bytes from byte {} of an allocation of {} bytes",
                handle.bytes, handle.offset, handle.allocation_bytes
            )));
        }
        Ok(handle)
    }
}

/// Computes the checksum of an encoded handle and writes it into the handle.
pub fn seal(bytes: &mut [u8; BYTES]) {
    let sum = checksum(bytes);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
}

/// Returns the FNV-1a checksum (RFC 9923) of an encoded handle, computed from all bytes except the checksum itself. It detects accidental
/// changes, but not deliberate ones.
fn checksum(bytes: &[u8; BYTES]) -> u32 {
    let all = bytes[..12].iter().chain(&bytes[16..]);
    all.fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}
