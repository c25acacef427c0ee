//! Memory that can be shared because it is a range of a memory file from the start, and mappings of other processes' ranges.
//!
//! A memory file (`memfd_create`) has no name, so nothing is left of it when the last process that has it open or mapped ends. One
//! file, a segment, holds many allocations, so that a process with thousands of them does not run out of descriptors. A range of a
//! segment is given out once: whoever still maps freed memory finds zeros there, never another allocation.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Resource;
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// A page, and what allocations start and end on.
pub const PAGE: u64 = 4096;

/// A segment that has given out this much is not used further. Larger allocations get one of their own.
const SEGMENT_BYTES: u64 = 1 << 32;

/// A memory file. Closed, and its memory gone, when its last allocation is.
#[derive(Debug)]
struct Segment {
    file: OwnedFd,
}

/// Gives out shared memory.
#[derive(Debug, Default)]
pub struct Pool {
    /// The segment that is given out from, and how much of it is gone.
    current: Mutex<Option<(Arc<Segment>, u64)>>,
}

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
    segment: Arc<Segment>,
    offset: u64,
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
    /// Maps `bytes`, whole pages, of `file` from `offset` on; of no file where there is none.
    fn map(file: Option<(&OwnedFd, u64)>, bytes: u64) -> Result<Pages> {
        let length = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so nothing that exists is replaced.
        let base = unsafe {
            match file {
                Some((file, offset)) => rustix::mm::mmap(null_mut(), length, access, MapFlags::SHARED, file, offset)?,
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

impl Segment {
    fn new() -> Result<Segment> {
        let file = rustix::fs::memfd_create("mpgpu", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // A peer that maps it need not fear that it shrinks under its feet.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        Ok(Segment { file })
    }

    /// Makes the file reach to `end`. Its pages come when they are touched.
    fn grow(&self, end: u64) -> Result<()> {
        // Past this limit the system would not refuse, but end the process with SIGXFSZ.
        if rustix::process::getrlimit(Resource::Fsize).current.is_some_and(|limit| end > limit) {
            return Err(Errno::FBIG);
        }
        rustix::fs::ftruncate(&self.file, end)
    }
}

impl Pool {
    /// Zeroed memory of `bytes` bytes, aligned to a page.
    pub fn allocate(&self, bytes: u64) -> Result<Region> {
        let bytes = pages_of(bytes)?;
        if bytes > SEGMENT_BYTES {
            return Region::new(&Arc::new(Segment::new()?), 0, bytes);
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let (segment, offset) = match current.take().filter(|(_, used)| used + bytes <= SEGMENT_BYTES) {
            Some(current) => current,
            None => (Arc::new(Segment::new()?), 0),
        };
        let region = Region::new(&segment, offset, bytes);
        *current = Some((segment, if region.is_ok() { offset + bytes } else { offset }));
        region
    }
}

impl Region {
    fn new(segment: &Arc<Segment>, offset: u64, bytes: u64) -> Result<Region> {
        // Mapped first: a size that does not fit into the address space must not make the file grow.
        let pages = Pages::map(Some((&segment.file, offset)), bytes)?;
        segment.grow(offset + bytes)?;
        Ok(Region { pages, segment: Arc::clone(segment), offset })
    }

    /// Its first byte.
    pub fn base(&self) -> u64 {
        self.pages.base
    }

    /// The file that it lies in, and where. For whoever may read and write all that lies there.
    pub fn file(&self) -> Result<(OwnedFd, u64)> {
        Ok((rustix::io::fcntl_dupfd_cloexec(&self.segment.file, 0)?, self.offset))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Gives the pages back now, and not only when the segment's last allocation is freed.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.segment.file, hole, self.offset, self.pages.bytes) {
            log::debug!("freed shared memory stays with the process until its segment goes: {error}");
        }
    }
}

impl Mapping {
    /// Maps `bytes` bytes from `offset` on of another process's segment. Refuses a file that is shorter, or that could shrink.
    pub fn new(file: &OwnedFd, offset: u64, bytes: u64) -> Result<Mapping> {
        let bytes = pages_of(bytes)?;
        let size = u64::try_from(rustix::fs::fstat(file.as_fd())?.st_size).unwrap_or(0);
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        if !sealed || offset.checked_add(bytes).is_none_or(|end| end > size) || !offset.is_multiple_of(PAGE) {
            return Err(Errno::INVAL);
        }
        Ok(Mapping { pages: Pages::map(Some((file, offset)), bytes)? })
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
