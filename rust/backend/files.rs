//! Files that are mapped into memory and read by `pread`.
//!
//! A thread that reads a file by `pread` instead of accessing its mapping causes no page faults, and gets an error instead of `SIGBUS` if
//! the file was truncated. `process_vm_readv` returns the same error, but reached only 0.65 to 0.9 of the rate of `pread` (files in tmpfs
//! and in the page cache of ext4, one and two threads, virtual machine with 2 CPUs, 2026-11-30).
//!
//! [`map`] maps a file for the caller of the library. [`MappedFile::behind`] finds the file of a mapping that the program has made itself.
//!
//! Copies from a file that is mapped with [`Caching::Bypass`] add no pages to the page cache: bytes that the page cache already contains
//! are copied from there, and all others are read by direct I/O into a buffer of the reading thread. `mincore` reports which pages the page
//! cache contains, and `preadv2` with `RWF_NOWAIT` reads only these. For other pages, it would start read-ahead, which adds pages to the
//! page cache (Linux 6.18).

use super::BackendError;
use super::host_memory::page_bytes;
use super::sync::held;
use smallvec::{SmallVec, smallvec};
use std::cell::RefCell;
use std::ffi::CString;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, RwLock};

/// Size and alignment in bytes of the blocks in which direct I/O reads files. Common disks require no larger alignment.
const BLOCK: u64 = 4096;
/// Maximum number of bytes that one call of direct I/O reads. A chunk of a plan has at most this size.
const DIRECT_BYTES: usize = 2 << 20;

/// Mappings that [`map`] has made, in ascending order of their addresses.
static MAPPED: RwLock<Vec<Arc<MappedFile>>> = RwLock::new(Vec::new());
/// Number of entries of [`MAPPED`]. A copy reads it first, so that it needs no lock if no file is mapped.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Use of the operating system's page cache when a file is read.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Bytes are read through the page cache, as by `read`.
    Keep,
    /// Bytes that the page cache does not contain are read by direct I/O.
    Bypass,
}

/// File, and the address range at which a part of it is mapped.
#[derive(Debug)]
pub struct MappedFile {
    /// Addresses of the mapping.
    addresses: Range<u64>,
    /// Offset in the file of the first byte of the mapping.
    offset: u64,
    file: File,
    /// Second descriptor of the file, for direct I/O. `None` if the file is read through the page cache.
    direct: Option<File>,
    /// True if `mincore` reports to this process which pages of the file are in the page cache. If not, and `direct` is present, direct I/O
    /// reads all bytes. Always false if `direct` is `None`.
    shows_cached: bool,
    /// True if the mapping is private. Pages that the program has modified then differ from the file.
    is_private: bool,
}

/// Reason why bytes of a file could not be read.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// The file ends before the last requested byte, or the destination is not accessible.
    Memory,
    /// The system could not read the file. The number is its error code (`errno`).
    System(i32),
}

/// Mapping that [`map`] has made. Dropping it removes the mapping.
#[derive(Debug)]
pub struct FileMapping(Arc<MappedFile>);

/// Maps a whole file read-only. The descriptor is duplicated, so the caller may close its own.
pub fn map(descriptor: BorrowedFd<'_>, caching: Caching) -> Result<FileMapping, BackendError> {
    let failed = |what: &str, error: io::Error| BackendError::Driver {
        what: format!("file descriptor {}: {what}", descriptor.as_raw_fd()),
        reason: error.to_string(),
        code: i64::from(error.raw_os_error().unwrap_or(0)),
    };
    let refused = |why: String| Err(BackendError::NotSupported(format!("file descriptor {}: {why}", descriptor.as_raw_fd())));
    let file = File::from(descriptor.try_clone_to_owned().map_err(|error| failed("it cannot be duplicated", error))?);
    let metadata = file.metadata().map_err(|error| failed("its size cannot be read", error))?;
    if !metadata.is_file() {
        return refused("it is not a regular file; open a regular file".into());
    }
    let bytes = metadata.len();
    if bytes == 0 {
        return refused("the file is empty, so there is nothing to copy".into());
    }
    // SAFETY: the call creates a new mapping.
    let base = unsafe { libc::mmap(null_mut(), bytes as usize, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EACCES) => refused("it is not open for reading; open it with O_RDONLY or O_RDWR".into()),
            Some(libc::ENODEV) => refused("its file system cannot map files; read the file into memory, and copy from this memory".into()),
            _ => Err(failed("the file cannot be mapped", error)),
        };
    }
    let begin = base.expose_provenance() as u64;
    let direct = if caching == Caching::Bypass { reopen_direct(&file) } else { None };
    let shows_cached = direct.is_some() && shows_cached(&file, &metadata);
    let new = Arc::new(MappedFile { addresses: begin..begin + bytes, offset: 0, file, direct, shows_cached, is_private: false });
    let mut mapped = held(MAPPED.write());
    let at = mapped.partition_point(|other| other.addresses.start < begin);
    mapped.insert(at, Arc::clone(&new));
    COUNT.store(mapped.len(), Ordering::Release);
    Ok(FileMapping(new))
}

/// True if the process owns a file or may write to it. `mincore` then reports to the process which pages of the file are in the page cache.
fn shows_cached(file: &File, metadata: &Metadata) -> bool {
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    // SAFETY: the path ends with a zero byte. Both calls only return information.
    unsafe { libc::geteuid() == metadata.uid() || libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// Opens a file a second time, for direct I/O. If the file system does not support it, logs a warning and returns `None`.
fn reopen_direct(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    match File::options().read(true).custom_flags(libc::O_DIRECT).open(&path) {
        Ok(direct) => Some(direct),
        Err(error) => {
            let name = std::fs::read_link(&path).unwrap_or_default();
            log::warn!(
                "{}: the file system does not support direct I/O ({error}): the file is read through the page cache",
                name.display()
            );
            None
        }
    }
}

/// Returns the mapping made by [`map`] that contains the `bytes` bytes from `address` on. Returns `None` if there is none.
pub fn mapped_at(address: u64, bytes: u64) -> Option<Arc<MappedFile>> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let mapped = held(MAPPED.read());
    let after = mapped.partition_point(|file| file.addresses.start <= address);
    let file = &mapped[after.checked_sub(1)?];
    file.has(address, bytes).then(|| Arc::clone(file))
}

impl FileMapping {
    /// Returns the address of the first byte of the mapping.
    pub fn address(&self) -> u64 {
        self.0.addresses.start
    }

    /// Returns the size of the mapping in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.addresses.end - self.0.addresses.start
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        let mut mapped = held(MAPPED.write());
        mapped.retain(|file| !Arc::ptr_eq(file, &self.0));
        COUNT.store(mapped.len(), Ordering::Release);
        // The mapping is removed last, because another thread may then map a file at the same addresses and must find no old entry there.
        // SAFETY: `map` made this mapping, and only its owner removes it.
        unsafe { libc::munmap(with_exposed_provenance_mut(self.address() as usize), self.bytes() as usize) };
    }
}

impl MappedFile {
    /// Opens the file of a mapping that the program has made, by the path, device and inode that the operating system reports for the
    /// mapping. Returns `None` if the path leads to another file or to no file, or if the process has no permission to read the file.
    pub fn behind(addresses: Range<u64>, offset: u64, path: &Path, identity: (u64, u64), is_private: bool) -> Option<MappedFile> {
        // Opening a device or a FIFO may have side effects. With `O_PATH`, the file is only looked up.
        let found = File::options().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(path).ok()?;
        let metadata = found.metadata().ok()?;
        if !metadata.is_file() || (metadata.dev(), metadata.ino()) != identity {
            return None;
        }
        let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()?;
        Some(MappedFile { addresses, offset, file, direct: None, shows_cached: false, is_private })
    }

    fn has(&self, address: u64, bytes: u64) -> bool {
        address >= self.addresses.start && address.checked_add(bytes).is_some_and(|end| end <= self.addresses.end)
    }

    /// Reads the `bytes` bytes at the address `from` of the mapping into the memory at `to`. Returns `None`, and reads nothing, if the
    /// mapping does not contain these bytes, or if they may differ from the file because the program has modified a private mapping.
    ///
    /// # Safety
    ///
    /// No other thread accesses the destination during the call.
    pub unsafe fn read(&self, to: u64, from: u64, bytes: usize) -> Option<Result<(), ReadFault>> {
        if !self.has(from, bytes as u64) || (self.is_private && !is_unwritten(from, bytes)) {
            return None;
        }
        let offset = self.offset + (from - self.addresses.start);
        let read = match &self.direct {
            // SAFETY: guaranteed by the caller.
            Some(direct) => unsafe { self.read_direct(direct, to, offset, bytes) },
            // SAFETY: guaranteed by the caller.
            None => unsafe { self.read_all(to, offset, bytes) },
        };
        Some(read)
    }

    unsafe fn read_all(&self, to: u64, offset: u64, bytes: usize) -> Result<(), ReadFault> {
        let mut done = 0;
        while done < bytes {
            let (to, at) = (with_exposed_provenance_mut(to as usize + done), (offset + done as u64) as libc::off_t);
            // SAFETY: the system checks whether the destination is accessible.
            let count = unsafe { libc::pread(self.file.as_raw_fd(), to, bytes - done, at) };
            match usize::try_from(count) {
                Ok(0) => return Err(ReadFault::Memory),
                Ok(count) => done += count,
                Err(_) => match io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                    libc::EINTR => {}
                    libc::EFAULT => return Err(ReadFault::Memory),
                    code => return Err(ReadFault::System(code)),
                },
            }
        }
        Ok(())
    }

    /// Reads bytes without adding pages to the page cache.
    unsafe fn read_direct(&self, direct: &File, to: u64, offset: u64, bytes: usize) -> Result<(), ReadFault> {
        let mut done = 0;
        while done < bytes {
            // SAFETY: guaranteed by the caller.
            done += unsafe { self.read_cached(to + done as u64, offset + done as u64, bytes - done) };
            if done < bytes {
                // SAFETY: guaranteed by the caller.
                done += unsafe { self.read_blocks(direct, to + done as u64, offset + done as u64, bytes - done) }?;
            }
        }
        Ok(())
    }

    /// Reads the leading bytes of a range that the page cache contains. Returns their number.
    unsafe fn read_cached(&self, to: u64, offset: u64, bytes: usize) -> usize {
        let from = self.addresses.start + (offset - self.offset);
        let bytes = if self.shows_cached { cached(from, bytes) } else { 0 };
        let own = libc::iovec { iov_base: with_exposed_provenance_mut(to as usize), iov_len: bytes };
        // SAFETY: the system checks whether the destination is accessible.
        let read = unsafe { libc::preadv2(self.file.as_raw_fd(), &own, 1, offset as libc::off_t, libc::RWF_NOWAIT) };
        // A call that fails has read nothing. Direct I/O then reads the bytes, or reports the error if that fails too.
        usize::try_from(read).unwrap_or(0)
    }

    /// Reads the leading bytes of a range by direct I/O, as many as fit into the buffer. Returns their number, which is at least 1.
    unsafe fn read_blocks(&self, direct: &File, to: u64, offset: u64, bytes: usize) -> Result<usize, ReadFault> {
        let begin = offset / BLOCK * BLOCK;
        let ahead = (offset - begin) as usize;
        DIRECT_BUFFER.with_borrow_mut(|buffer| {
            let buffer = buffer.bytes();
            let wanted = (ahead + bytes).next_multiple_of(BLOCK as usize).min(buffer.len());
            let read = loop {
                match direct.read_at(&mut buffer[..wanted], begin) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        // The disk requires larger blocks. The bytes are read through the page cache.
                        let count = bytes.min(buffer.len());
                        // SAFETY: guaranteed by the caller.
                        return unsafe { self.read_all(to, offset, count) }.map(|()| count);
                    }
                    read => break read.map_err(|error| ReadFault::System(error.raw_os_error().unwrap_or(0)))?,
                }
            };
            let count = read.saturating_sub(ahead).min(bytes);
            if count == 0 {
                return Err(ReadFault::Memory);
            }
            // SAFETY: the buffer is memory of this thread. The caller guarantees that no other thread accesses the destination.
            unsafe { copy_checked(&buffer[ahead..ahead + count], to) }?;
            Ok(count)
        })
    }
}

/// Returns the number of leading bytes of a range that are in the page cache. The range consists of `bytes` bytes at `address`, in a file
/// mapping.
fn cached(address: u64, bytes: usize) -> usize {
    let (page, address) = (page_bytes(), address as usize);
    let begin = address / page * page;
    let mut pages: SmallVec<[u8; 1024]> = smallvec![0; (address + bytes - begin).div_ceil(page)];
    // SAFETY: the system writes one byte for each page of the range.
    if unsafe { libc::mincore(with_exposed_provenance_mut(begin), pages.len() * page, pages.as_mut_ptr()) } != 0 {
        return 0;
    }
    let leading = pages.iter().take_while(|state| **state & 1 == 1).count();
    (leading * page).saturating_sub(address - begin).min(bytes)
}

/// Copies bytes to memory that might be inaccessible.
///
/// # Safety
///
/// No other thread accesses the destination during the call. The destination is accessible if `process_vm_writev` is not available.
unsafe fn copy_checked(bytes: &[u8], to: u64) -> Result<(), ReadFault> {
    let mut done = 0;
    while done < bytes.len() {
        let own = libc::iovec { iov_base: bytes[done..].as_ptr().cast_mut().cast(), iov_len: bytes.len() - done };
        let other = libc::iovec { iov_base: with_exposed_provenance_mut(to as usize + done), iov_len: bytes.len() - done };
        // SAFETY: the system checks both ranges.
        let written = unsafe { libc::process_vm_writev(std::process::id() as libc::pid_t, &own, 1, &other, 1, 0) };
        match usize::try_from(written) {
            Ok(count) if count > 0 => done += count,
            Err(_) if matches!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                let to = with_exposed_provenance_mut::<u8>(to as usize + done);
                // SAFETY: guaranteed by the caller.
                unsafe { to.copy_from_nonoverlapping(bytes[done..].as_ptr(), bytes.len() - done) };
                return Ok(());
            }
            _ => return Err(ReadFault::Memory),
        }
    }
    Ok(())
}

/// Aligned buffer of a thread for direct I/O. It is allocated at the first use.
#[derive(Default)]
struct DirectBuffer(Vec<Block>);

#[derive(Clone)]
#[repr(align(4096))]
#[expect(dead_code, reason = "all bytes are accessed through the buffer")]
struct Block([u8; BLOCK as usize]);

thread_local! {
    static DIRECT_BUFFER: RefCell<DirectBuffer> = RefCell::default();
}

impl DirectBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        // An unaligned range of `DIRECT_BYTES` bytes lies in one block more than an aligned one.
        self.0.resize(DIRECT_BYTES / BLOCK as usize + 1, Block([0; BLOCK as usize]));
        let bytes = self.0.len() * BLOCK as usize;
        // SAFETY: the blocks are consecutive arrays of bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes) }
    }
}

/// Returns true if the program has modified no page of a private mapping that contains these bytes. Returns false if this cannot be
/// determined.
fn is_unwritten(address: u64, bytes: usize) -> bool {
    static PAGE_MAP: LazyLock<Option<File>> = LazyLock::new(|| File::open("/proc/self/pagemap").ok());
    let Some(page_map) = &*PAGE_MAP else { return false };
    // Bits of an entry (Documentation/admin-guide/mm/pagemap.rst of Linux). A page that the program has modified is either swapped
    // out, or present and not a page of the file.
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    let page = page_bytes() as u64;
    let (first, end) = (address / page, (address + bytes as u64).div_ceil(page));
    let mut entries = [0_u8; 4096];
    let mut at = first;
    while at < end {
        let part = &mut entries[..((end - at) as usize * 8).min(4096)];
        if page_map.read_exact_at(part, at * 8).is_err() {
            return false;
        }
        let (entries, _) = part.as_chunks::<8>();
        let is_written = |entry: u64| entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & OF_FILE == 0);
        if entries.iter().any(|entry| is_written(u64::from_ne_bytes(*entry))) {
            return false;
        }
        at += entries.len() as u64;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::path::PathBuf;

    /// File in a folder of its own. Dropping it removes both.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, bytes: usize) -> (Scratch, Vec<u8>) {
            let folder = std::env::temp_dir().join(format!("mpgpu-files-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&folder).expect("a folder");
            let contents: Vec<u8> = (0..bytes).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
            let scratch = Scratch(folder.join("file with spaces"));
            std::fs::write(&scratch.0, &contents).expect("a file");
            (scratch, contents)
        }

        fn map(&self, caching: Caching) -> FileMapping {
            map(File::open(&self.0).expect("the file").as_fd(), caching).expect("a mapping")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.0.parent().expect("a folder"));
        }
    }

    fn read(file: &MappedFile, from: u64, bytes: usize) -> Option<Result<Vec<u8>, ReadFault>> {
        let mut to = vec![0_u8; bytes];
        // SAFETY: the vector is large enough, and no other thread knows it.
        let read = unsafe { file.read(to.as_mut_ptr().expose_provenance() as u64, from, bytes) }?;
        Some(read.map(|()| to))
    }

    #[test]
    fn any_range_of_a_file_is_read_through_the_page_cache_and_past_it() {
        let (scratch, contents) = Scratch::new("ranges", (5 << 20) + 4097);
        for caching in [Caching::Keep, Caching::Bypass] {
            // Clean pages leave the page cache here, so that part of the ranges is read by direct I/O.
            let file = File::open(&scratch.0).expect("the file");
            file.sync_all().expect("written to the disk");
            // SAFETY: the call only gives advice.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 1 << 20, 2 << 20, libc::POSIX_FADV_DONTNEED) };
            let opened = scratch.map(caching);
            assert_eq!(opened.bytes(), contents.len() as u64);
            let (base, last) = (opened.address(), contents.len());
            let in_cache = || (0..last).step_by(page_bytes()).filter(|at| cached(base + *at as u64, 1) == 1).count();
            let before = in_cache();
            for (from, to) in [(0, last), (1, 2), (4095, 8193), ((1 << 20) - 3, (3 << 20) + 5), (last - 1, last), (2 << 20, 4 << 20)] {
                let found = mapped_at(base + from as u64, (to - from) as u64).expect("a mapped file");
                assert_eq!(read(&found, base + from as u64, to - from), Some(Ok(contents[from..to].to_vec())), "{caching:?} {from}..{to}");
            }
            assert!(caching == Caching::Keep || in_cache() == before, "{before} pages were in the page cache, and now {}", in_cache());
            assert!(mapped_at(base + 1, last as u64).is_none() && mapped_at(base.wrapping_sub(1), 1).is_none());
            drop(opened);
            assert!(mapped_at(base, 1).is_none());
        }
    }

    #[test]
    fn a_file_that_has_become_shorter_and_a_destination_that_is_not_there_are_reported() {
        let (scratch, contents) = Scratch::new("shorter", 3 << 20);
        for caching in [Caching::Keep, Caching::Bypass] {
            std::fs::write(&scratch.0, &contents).expect("a file");
            let opened = scratch.map(caching);
            let (base, file) = (opened.address(), mapped_at(opened.address(), 3 << 20).expect("a mapped file"));
            File::options().write(true).open(&scratch.0).and_then(|file| file.set_len((1 << 20) + 10)).expect("a shorter file");
            assert_eq!(read(&file, base, (1 << 20) + 11), Some(Err(ReadFault::Memory)), "{caching:?}");
            assert_eq!(read(&file, base, (1 << 20) + 10), Some(Ok(contents[..(1 << 20) + 10].to_vec())), "{caching:?}");
            assert_eq!(read(&file, base + (2 << 20), 1), Some(Err(ReadFault::Memory)), "{caching:?}");
            // The first page of the address space is never mapped.
            // SAFETY: no thread accesses memory there.
            assert_eq!(unsafe { file.read(8, base, 64) }, Some(Err(ReadFault::Memory)), "{caching:?}");
        }
    }

    #[test]
    fn what_cannot_be_mapped_is_refused_with_a_remedy() {
        let (scratch, _) = Scratch::new("refused", 0);
        let refused = |file: File| map(file.as_fd(), Caching::Keep).map(|_| ()).expect_err("nothing to map").to_string();
        assert!(refused(File::open(&scratch.0).expect("a file")).contains("the file is empty"));
        assert!(refused(File::open("/dev/null").expect("a device")).contains("not a regular file"));
        assert!(refused(File::open(scratch.0.parent().expect("a folder")).expect("a folder")).contains("not a regular file"));
        std::fs::write(&scratch.0, b"contents").expect("a file");
        assert!(refused(File::options().write(true).open(&scratch.0).expect("a file")).contains("open it with O_RDONLY"));
        // SAFETY: nothing is accessed. No descriptor has this number.
        let closed = unsafe { BorrowedFd::borrow_raw(1 << 20) };
        assert!(map(closed, Caching::Keep).expect_err("no descriptor").to_string().starts_with("file descriptor 1048576: "));
    }

    #[test]
    fn pages_of_a_private_mapping_that_the_program_has_written_are_not_read_from_the_file() {
        let (scratch, contents) = Scratch::new("private", 4 << 20);
        let file = File::open(&scratch.0).expect("the file");
        let identity = file.metadata().map(|of| (of.dev(), of.ino())).expect("a file");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the call creates a new mapping.
        let mapped = unsafe { libc::mmap(null_mut(), 4 << 20, access, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        let base = mapped.expose_provenance() as u64;
        let behind = |path: &Path, identity| MappedFile::behind(base..base + (4 << 20), 0, path, identity, true);
        let known = behind(&scratch.0, identity).expect("the file");
        assert_eq!(read(&known, base, 4 << 20), Some(Ok(contents.clone())));
        // SAFETY: the mapping has this byte, and no other thread uses it.
        unsafe {
            assert_eq!(*mapped.cast::<u8>().add(70_000), contents[70_000]);
            *mapped.cast::<u8>().add(70_001) = 1;
        }
        assert_eq!(read(&known, base, 4 << 20), None);
        assert_eq!(read(&known, base, 65536), Some(Ok(contents[..65536].to_vec())));
        assert_eq!(read(&known, base + (4 << 20) - 1, 2), None);
        // The path leads to another file, or to none.
        assert!(behind(&scratch.0, (identity.0, identity.1 + 1)).is_none());
        assert!(behind(Path::new("/dev/zero"), identity).is_none() && behind(Path::new("/nowhere"), identity).is_none());
        // SAFETY: nothing uses the mapping any more.
        unsafe { libc::munmap(mapped, 4 << 20) };
    }
}
