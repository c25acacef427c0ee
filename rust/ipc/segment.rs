//! Allocates memory in memory files, which other processes can map, and maps the memory files of other processes.
//!
//! A memory file (`memfd_create`) has no name, so nothing remains after the exit of the last process that has it open or mapped. Each
//! allocation has its own file, so a process that receives the descriptor can access that allocation and nothing else. The file is sealed,
//! so its size is fixed and no process can add seals. Descriptors are scarce on many systems, and the program needs some too. The library
//! therefore uses at most half of the process's limit. Memory allocated beyond that cannot be shared.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Page size in bytes. Allocations in memory files start and end at multiples of the page size.
pub const PAGE: u64 = 4096;

/// Maximum number of open memory files, even if the descriptor limit is higher. Each memory file is also a mapping, and a process can have
/// 65,530 mappings.
const MOST_FILES: u64 = 16384;

/// Type number (`f_type`) of the file system that contains memory files. Files with huge pages have another type and are refused: if a page
/// cannot be allocated when it is accessed, the system kills the process.
const TMPFS: i64 = 0x0102_1994;

/// Memory file that this process has open. The counter [`FILES`] includes it.
#[derive(Debug)]
struct MemoryFile {
    descriptor: OwnedFd,
}

static FILES: AtomicU64 = AtomicU64::new(0);

/// Pages that are mapped into this process. Dropping this value unmaps them.
#[derive(Debug)]
struct MappedPages {
    base: u64,
    bytes: u64,
}

/// Allocation of this process in a memory file, which other processes can map.
#[derive(Debug)]
pub struct SharedRegion {
    pages: MappedPages,
    file: MemoryFile,
}

/// Memory file of another process, mapped into this process.
#[derive(Debug)]
pub struct Mapping {
    pages: MappedPages,
}

/// Allocation of this process that other processes cannot map.
#[derive(Debug)]
pub struct Private {
    pages: MappedPages,
}

/// Returns `bytes` rounded up to a multiple of the page size, at least one page. Returns an error if the result does not fit.
fn pages_of(bytes: u64) -> Result<u64> {
    bytes.max(1).checked_next_multiple_of(PAGE).filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or(Errno::NOMEM)
}

impl MappedPages {
    /// Maps the first `bytes` bytes (whole pages) of `file`. If `file` is `None`, maps anonymous memory.
    fn map(file: Option<&OwnedFd>, bytes: u64) -> Result<MappedPages> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is requested, so no existing mapping is replaced.
        let base = unsafe {
            match file {
                Some(file) => rustix::mm::mmap(null_mut(), length, access, MapFlags::SHARED, file, 0)?,
                None => rustix::mm::mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE | MapFlags::NORESERVE)?,
            }
        };
        Ok(MappedPages { base: base.expose_provenance() as u64, bytes })
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        let base: *mut c_void = with_exposed_provenance_mut(self.base as usize);
        // SAFETY: `map` created the mapping with this length. The owner drops it only when it is no longer used.
        let unmapped = unsafe { rustix::mm::munmap(base, self.bytes as usize) };
        debug_assert_eq!(unmapped, Ok(()), "a mapping of our own");
    }
}

/// Returns the maximum number of memory files that this process keeps open. It is half of the descriptor limit at the time of the first
/// call.
fn most_files() -> u64 {
    static MOST: OnceLock<u64> = OnceLock::new();
    *MOST.get_or_init(|| getrlimit(Resource::Nofile).current.map_or(MOST_FILES, |limit| (limit / 2).min(MOST_FILES)))
}

/// Returns a text that explains why memory could not be allocated in a memory file, and what to do about it.
pub fn why_none(reason: Errno) -> String {
    if reason == Errno::MFILE {
        return format!(
            "no file descriptor was available for the memory when it was allocated. Each allocation that can be shared uses one, and at \
             most {} are used (half of ulimit -n at the first such allocation): raise the limit, or make fewer and larger allocations",
            most_files()
        );
    }
    format!("the system provided no memory file when the memory was allocated ({reason}); allow memfd_create, and check ulimit -f")
}

/// Creates a memory file of `bytes` bytes (whole pages), whose size is sealed. Pages are allocated at the first access.
pub(super) fn file(bytes: u64) -> Result<OwnedFd> {
    // Beyond this limit the system would kill the process by SIGXFSZ instead of returning an error.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| bytes > limit) {
        return Err(Errno::FBIG);
    }
    let file = rustix::fs::memfd_create("mpgpu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

impl MemoryFile {
    fn new(bytes: u64) -> Result<MemoryFile> {
        let took = FILES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |files| (files < most_files()).then_some(files + 1));
        took.map_err(|_| Errno::MFILE)?;
        file(bytes).map(|descriptor| MemoryFile { descriptor }).inspect_err(|_| MemoryFile::gave_back())
    }

    fn gave_back() {
        FILES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        MemoryFile::gave_back();
    }
}

impl SharedRegion {
    /// Allocates `bytes` bytes of zeroed memory, aligned to a page, in a new memory file. Returns [`Errno::MFILE`] if too few descriptors
    /// are left.
    pub fn new(bytes: u64) -> Result<SharedRegion> {
        let bytes = pages_of(bytes)?;
        let file = MemoryFile::new(bytes)?;
        Ok(SharedRegion { pages: MappedPages::map(Some(&file.descriptor), bytes)?, file })
    }

    /// Returns the address of the first byte of the allocation.
    pub fn base(&self) -> u64 {
        self.pages.base
    }

    /// Returns the size in bytes of the allocation: the requested size, rounded up to whole pages.
    pub fn bytes(&self) -> u64 {
        self.pages.bytes
    }

    /// Returns a duplicate of the memory file's descriptor. Any process that holds it may read and write the whole allocation.
    pub fn file(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.file.descriptor, 0)
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // Punching a hole frees the pages immediately, even if peers still map them. Peers then read zeros.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file.descriptor, hole, 0, self.pages.bytes) {
            log::debug!("freed shared memory stays until every process has unmapped it: {error}");
        }
    }
}

impl Mapping {
    /// Maps the first `bytes` bytes of another process's memory file. Refuses a file that is too short, that could shrink, or that has huge
    /// pages.
    pub fn new(file: &OwnedFd, bytes: u64) -> Result<Mapping> {
        let bytes = pages_of(bytes)?;
        let size = u64::try_from(rustix::fs::fstat(file.as_fd())?.st_size).unwrap_or(0);
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        let plain = rustix::fs::fstatfs(file)?.f_type as i64 == TMPFS;
        if !sealed || !plain || bytes > size {
            return Err(Errno::INVAL);
        }
        Ok(Mapping { pages: MappedPages::map(Some(file), bytes)? })
    }

    /// Returns the address in this process of the first mapped byte.
    pub fn base(&self) -> u64 {
        self.pages.base
    }
}

impl Private {
    /// Allocates `bytes` bytes of zeroed memory, aligned to a page, that other processes cannot map.
    pub fn new(bytes: u64) -> Result<Private> {
        Ok(Private { pages: MappedPages::map(None, pages_of(bytes)?)? })
    }

    /// Returns the address of the first byte of the allocation.
    pub fn base(&self) -> u64 {
        self.pages.base
    }
}
