//! Memory that can be shared because it is a memory file from the start, and mappings of other processes' files.
//!
//! A memory file (`memfd_create`) has no name, so nothing is left of it when the last process that has it open or mapped ends. Each
//! allocation has one of its own: whoever is given its descriptor reaches that allocation and nothing else. The file is sealed, so that
//! it stays as long as it is, and so that nobody who is given it can seal it further. Descriptors are few in many systems, and the
//! program's in the first place, so the library keeps half of them at most; beyond that, memory cannot be shared.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page, and what allocations start and end on.
pub const PAGE: u64 = 4096;

/// More memory files than this are not kept open, whatever the limit: each is a mapping too, of which a process has 65,530.
const MOST_FILES: u64 = 16384;

/// `f_type` of what memory files lie in. Those of huge pages may have no page when one is touched, which ends the process.
const TMPFS: i64 = 0x0102_1994;

/// The descriptor of a memory file, counted.
#[derive(Debug)]
struct File {
    descriptor: OwnedFd,
}

static FILES: AtomicU64 = AtomicU64::new(0);

/// Pages mapped into this process, unmapped when dropped.
#[derive(Debug)]
struct Pages {
    base: u64,
    bytes: u64,
}

/// Memory of this process that can be mapped by others.
#[derive(Debug)]
pub struct Region {
    pages: Pages,
    file: File,
}

/// Memory of another process, mapped here.
#[derive(Debug)]
pub struct Mapping {
    pages: Pages,
}

/// Memory of this process alone.
#[derive(Debug)]
pub struct Private {
    pages: Pages,
}

/// `bytes` in whole pages.
fn pages_of(bytes: u64) -> Result<u64> {
    bytes.max(1).checked_next_multiple_of(PAGE).filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or(Errno::NOMEM)
}

impl Pages {
    /// Maps the first `bytes`, whole pages, of `file`; of no file where there is none.
    fn map(file: Option<&OwnedFd>, bytes: u64) -> Result<Pages> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so nothing that exists is replaced.
        let base = unsafe {
            match file {
                Some(file) => rustix::mm::mmap(null_mut(), length, access, MapFlags::SHARED, file, 0)?,
                None => rustix::mm::mmap_anonymous(null_mut(), length, access, MapFlags::PRIVATE | MapFlags::NORESERVE)?,
            }
        };
        Ok(Pages { base: base.expose_provenance() as u64, bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let base: *mut c_void = with_exposed_provenance_mut(self.base as usize);
        // SAFETY: mapped by `map` with this length, and whoever drops the owner vouches that nothing uses it any more.
        let unmapped = unsafe { rustix::mm::munmap(base, self.bytes as usize) };
        debug_assert_eq!(unmapped, Ok(()), "a mapping of our own");
    }
}

/// How many memory files this process keeps open at most: half of the descriptors that it could have at first use.
fn most_files() -> u64 {
    static MOST: OnceLock<u64> = OnceLock::new();
    *MOST.get_or_init(|| getrlimit(Resource::Nofile).current.map_or(MOST_FILES, |limit| (limit / 2).min(MOST_FILES)))
}

/// Why memory has no file, and the remedy.
pub fn why_none(reason: Errno) -> String {
    if reason == Errno::MFILE {
        return format!(
            "there was no descriptor for it when it was allocated. Each allocation that can be shared takes one, and {} of them at most are \
             for that, half of what ulimit -n says when the first is made: raise it (ulimit -n), or make fewer and larger allocations",
            most_files()
        );
    }
    format!("the system gave no memory file when it was allocated ({reason}); allow memfd_create, and look at ulimit -f")
}

/// A memory file of `bytes`, whole pages, which come when they are touched. It keeps its size, and nobody can seal it further.
pub(super) fn file(bytes: u64) -> Result<OwnedFd> {
    // Past this limit the system would not refuse, but end the process with SIGXFSZ.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| bytes > limit) {
        return Err(Errno::FBIG);
    }
    let file = rustix::fs::memfd_create("mpgpu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

impl File {
    fn new(bytes: u64) -> Result<File> {
        let took = FILES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |files| (files < most_files()).then_some(files + 1));
        took.map_err(|_| Errno::MFILE)?;
        file(bytes).map(|descriptor| File { descriptor }).inspect_err(|_| File::gave_back())
    }

    fn gave_back() {
        FILES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        File::gave_back();
    }
}

impl Region {
    /// Zeroed memory of `bytes` bytes, aligned to a page. [`Errno::MFILE`] where too few descriptors are left.
    pub fn new(bytes: u64) -> Result<Region> {
        let bytes = pages_of(bytes)?;
        let file = File::new(bytes)?;
        Ok(Region { pages: Pages::map(Some(&file.descriptor), bytes)?, file })
    }

    /// Its first byte.
    pub fn base(&self) -> u64 {
        self.pages.base
    }

    /// Its file, for whoever may read and write all of it.
    pub fn file(&self) -> Result<OwnedFd> {
        rustix::io::fcntl_dupfd_cloexec(&self.file.descriptor, 0)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Gives the pages back now, and not only when the last peer that maps them has unmapped them. It finds zeros there.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file.descriptor, hole, 0, self.pages.bytes) {
            log::debug!("freed shared memory stays until every process has unmapped it: {error}");
        }
    }
}

impl Mapping {
    /// Maps the first `bytes` bytes of another process's memory file. Refuses a file that is shorter, that could shrink, or whose pages
    /// may be missing.
    pub fn new(file: &OwnedFd, bytes: u64) -> Result<Mapping> {
        let bytes = pages_of(bytes)?;
        let size = u64::try_from(rustix::fs::fstat(file.as_fd())?.st_size).unwrap_or(0);
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        let plain = rustix::fs::fstatfs(file)?.f_type as i64 == TMPFS;
        if !sealed || !plain || bytes > size {
            return Err(Errno::INVAL);
        }
        Ok(Mapping { pages: Pages::map(Some(file), bytes)? })
    }

    /// Its first byte.
    pub fn base(&self) -> u64 {
        self.pages.base
    }
}

impl Private {
    /// Zeroed memory of `bytes` bytes, aligned to a page.
    pub fn new(bytes: u64) -> Result<Private> {
        Ok(Private { pages: Pages::map(None, pages_of(bytes)?)? })
    }

    /// Its first byte.
    pub fn base(&self) -> u64 {
        self.pages.base
    }
}
