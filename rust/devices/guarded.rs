//! Copies pageable host memory and returns an error if the memory does not exist. A plain memory access would kill the process in this
//! case.
//!
//! Pageable memory may be missing when it is copied: the program may have unmapped it, or a mapped file may have been truncated. There are
//! three ways of copying, from the fastest to the slowest:
//!
//! | memory | way of copying |
//! | --- | --- |
//! | large ranges of anonymous memory (memory without a file behind it) | memory accesses |
//! | sources in files that the library has mapped for the program, and in large mappings of files that the program has made | `pread` ([`files`]) |
//! | other memory | `process_vm_readv` or `process_vm_writev` |
//!
//! The system calls return an error for missing memory. Memory accesses need no check: anonymous memory exists until the program unmaps it,
//! which the program must not do before the execution has completed.

use crate::backend::BackendError;
use crate::backend::files::{self, MappedFile, ReadFault};
use crate::backend::host_memory::PageRange;
use std::ops::Range;
use std::path::PathBuf;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Failed access to host memory. The memory is not mapped, or the file behind it is too short.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub address: u64,
    /// True if `address` belongs to the source of the copy, false if it belongs to the destination.
    pub is_source: bool,
    /// Error code of the operating system (`errno`).
    pub code: i32,
}

impl Fault {
    /// Converts the failed access to the error of an execution. `transfer` is the index of the transfer whose copy failed.
    pub fn error(&self, transfer: u32) -> BackendError {
        let reason = match self.code {
            libc::EFAULT => {
                "the memory was unmapped, or its file became shorter, while an execution used it; keep it mapped until the execution \
                             has completed"
                    .into()
            }
            code => {
                format!("the system could not read the file that is mapped at this address: {}", std::io::Error::from_raw_os_error(code))
            }
        };
        BackendError::Driver {
            what: format!("transfer {transfer}: {} host memory at {:#x}", if self.is_source { "reading" } else { "writing" }, self.address),
            reason,
            code: i64::from(self.code),
        }
    }
}

/// Smallest number of bytes of a copy for which reading the address ranges of the process takes less time than the system call loses.
const LOOK_BYTES: usize = 4 << 20;

/// Minimum size in bytes of a file mapping that is read by `pread`. For smaller mappings, opening the file takes longer than `pread` saves.
const FILE_BYTES: u64 = 4 << 20;

/// Address ranges of the process that can be copied without `process_vm_readv`: readable anonymous memory and mappings of files. Both lists
/// are in ascending order of their addresses.
#[derive(Debug, Default)]
pub(crate) struct AddressRanges {
    /// Ranges of anonymous memory: begin, end, and a boolean that is true if the range is writable.
    private: Vec<(u64, u64, bool)>,
    files: Vec<FileRange>,
}

/// File mapping that the program has made.
#[derive(Debug)]
struct FileRange {
    addresses: Range<u64>,
    offset: u64,
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
    is_private: bool,
    /// The file, which the first thread that copies from the mapping opens.
    file: OnceLock<Option<MappedFile>>,
}

impl AddressRanges {
    /// Reads the address ranges of the process from the operating system.
    pub fn look() -> AddressRanges {
        AddressRanges::parse(&std::fs::read("/proc/self/maps").unwrap_or_default())
    }

    /// Parses text in the format of `/proc/self/maps` (proc(5)), whose lines are `begin-end access offset device inode name`. Adjacent
    /// ranges of anonymous memory with the same access are merged.
    fn parse(text: &[u8]) -> AddressRanges {
        let mut found = AddressRanges::default();
        for line in text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok()) {
            found.add(line);
        }
        found
    }

    /// Adds the range that a line of `/proc/self/maps` describes, if it is readable anonymous memory or a large file mapping. Other ranges
    /// are not added. The returned value has no meaning.
    fn add(&mut self, line: &str) -> Option<()> {
        // The name, which may contain spaces, is the rest of the line after five fields.
        let mut words = line.splitn(6, ' ');
        let (range, access, offset, device, inode) = (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
        let name = words.next().unwrap_or_default().trim_start();
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let (begin, end) = range.split_once('-')?;
        let (begin, end) = (number(begin)?, number(end)?);
        let &[b'r', write, execute, sharing] = access.as_bytes() else { return None };
        let (is_writable, is_private) = (write == b'w', sharing == b'p');
        if inode == "0" {
            // Names in brackets denote the heap, stacks, and pages of the system. Of these, only pages of the system are excluded.
            if !name.is_empty() && name != "[heap]" && !name.starts_with("[stack") && !name.starts_with("[anon") {
                return None;
            }
            match self.private.last_mut().filter(|last| last.1 == begin && last.2 == is_writable) {
                Some(last) => last.1 = end,
                None => self.private.push((begin, end, is_writable)),
            }
        } else if name.starts_with('/') && execute != b'x' && (is_private || !is_writable) && end - begin >= FILE_BYTES {
            let (major, minor) = device.split_once(':')?;
            let device = libc::makedev(number(major)? as u32, number(minor)? as u32);
            let (path, identity) = (PathBuf::from(name), (device, inode.parse().ok()?));
            self.files.push(FileRange {
                addresses: begin..end,
                offset: number(offset)?,
                path,
                identity,
                is_private,
                file: OnceLock::new(),
            });
        }
        Some(())
    }

    /// True if the `bytes` bytes at `address` are readable anonymous memory. If `written` is true, this memory must also be writable.
    pub fn has(&self, address: u64, bytes: u64, written: bool) -> bool {
        let after = self.private.partition_point(|range| range.0 <= address);
        let before = after.checked_sub(1).map(|at| self.private[at]);
        before.is_some_and(|(_, end, writes)| address.checked_add(bytes).is_some_and(|last| last <= end) && (writes || !written))
    }

    /// Returns the file of the mapping that contains `address`. Returns `None` if there is no such mapping, or if the file cannot be opened
    /// by its path.
    fn file(&self, address: u64) -> Option<&MappedFile> {
        let after = self.files.partition_point(|range| range.addresses.start <= address);
        let range = &self.files[after.checked_sub(1)?];
        let open = || MappedFile::behind(range.addresses.clone(), range.offset, &range.path, range.identity, range.is_private);
        if range.addresses.contains(&address) { range.file.get_or_init(open).as_ref() } else { None }
    }

    /// Copies from a file mapping that the program has made, by reading the file. The result is that of [`read_file`].
    ///
    /// # Safety
    ///
    /// No other thread accesses the ranges during the call.
    pub unsafe fn read_mapped(&self, to: u64, from: u64, bytes: usize) -> Option<Result<(), Fault>> {
        // SAFETY: guaranteed by the caller.
        unsafe { read(self.file(from)?, to, from, bytes) }
    }
}

/// Copies from a file that the library has mapped for the program, by reading the file. Returns `None` if the source is in no such file, if
/// the file ends before the last requested byte, or if the destination is not accessible. In the last two cases, the caller copies in
/// another way, which reports the error.
///
/// # Safety
///
/// No other thread accesses the ranges during the call.
pub(crate) unsafe fn read_file(to: u64, from: u64, bytes: usize) -> Option<Result<(), Fault>> {
    // SAFETY: guaranteed by the caller.
    unsafe { read(&*files::mapped_at(from, bytes as u64)?, to, from, bytes) }
}

unsafe fn read(file: &MappedFile, to: u64, from: u64, bytes: usize) -> Option<Result<(), Fault>> {
    // SAFETY: guaranteed by the caller.
    match unsafe { file.read(to, from, bytes) }? {
        Ok(()) => Some(Ok(())),
        Err(ReadFault::Memory) => None,
        Err(ReadFault::System(code)) => Some(Err(Fault { address: from, is_source: true, code })),
    }
}

/// Copies `bytes` bytes from the address `from` to the address `to`. `is_pageable` contains two booleans. The first is true if the
/// destination is in pageable memory, and the second is true if the source is.
///
/// # Safety
///
/// A source or destination that is not pageable is valid for `bytes` bytes. The ranges do not overlap, and no other thread accesses them.
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: usize, is_pageable: [bool; 2]) -> Result<(), Fault> {
    let [to_is_pageable, from_is_pageable] = is_pageable;
    // SAFETY: guaranteed by the caller.
    if from_is_pageable && let Some(read) = unsafe { read_file(to, from, bytes) } {
        return read;
    }
    // The ranges are read for each copy, because a file may have been mapped at the address of former anonymous memory.
    let has_pageable = to_is_pageable || from_is_pageable;
    let ranges = if !has_pageable || bytes < LOOK_BYTES { AddressRanges::default() } else { AddressRanges::look() };
    let is_there = |address: u64, written: bool| {
        let pages = || PageRange::around(address as usize, bytes).is_some_and(PageRange::is_mapped);
        ranges.has(address, bytes as u64, written) && pages()
    };
    if (!to_is_pageable || is_there(to, true)) && (!from_is_pageable || is_there(from, false)) {
        // SAFETY: guaranteed by the caller. The caller of the execution keeps anonymous memory mapped until the execution has completed.
        unsafe { copy_in_process(to, from, bytes) };
        return Ok(());
    }
    // SAFETY: guaranteed by the caller.
    if from_is_pageable && let Some(read) = unsafe { ranges.read_mapped(to, from, bytes) } {
        return read;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { copy_by_system(to, from, bytes, from_is_pageable) }
}

/// Copies bytes by memory accesses of this process, without a system call.
///
/// # Safety
///
/// Source and destination are valid for `bytes` bytes and do not overlap.
pub(crate) unsafe fn copy_in_process(to: u64, from: u64, bytes: usize) {
    let (to, from) = (with_exposed_provenance_mut::<u8>(to as usize), with_exposed_provenance::<u8>(from as usize));
    // SAFETY: guaranteed by the caller.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

/// Copies bytes by a system call that returns an error for missing memory. If `reads` is true, the call checks the source, otherwise it
/// checks the destination. The operating system can access the other range in any case, even if a device has mapped it.
///
/// # Safety
///
/// The ranges do not overlap, and no other thread accesses them. If the system call is not available, the caller guarantees that source and
/// destination are valid.
pub(crate) unsafe fn copy_by_system(to: u64, from: u64, bytes: usize, reads: bool) -> Result<(), Fault> {
    static HAS_CALL: AtomicBool = AtomicBool::new(true);
    let mut done = 0;
    while done < bytes && HAS_CALL.load(Ordering::Relaxed) {
        let part = |base: u64| libc::iovec { iov_base: with_exposed_provenance_mut(base as usize + done), iov_len: bytes - done };
        let (own, other) = if reads { (part(to), part(from)) } else { (part(from), part(to)) };
        // SAFETY: the system checks both ranges.
        let moved = unsafe { transfer(&own, &other, reads) };
        match usize::try_from(moved) {
            Ok(0) => return Err(fault(to, from, done, reads, libc::EFAULT)),
            Ok(moved) => done += moved,
            Err(_) => match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                // This process is not permitted to make the system call, for example because of a seccomp filter.
                libc::ENOSYS | libc::EPERM => HAS_CALL.store(false, Ordering::Relaxed),
                code => return Err(fault(to, from, done, reads, code)),
            },
        }
    }
    // SAFETY: the system call, which would check the ranges, is not available. The caller of `execute` keeps its buffers valid until
    // completion.
    unsafe { copy_in_process(to + done as u64, from + done as u64, bytes - done) };
    Ok(())
}

/// Copies between the local range `own` and the range `other`, which the operating system checks. If `reads` is true, `other` is the
/// source, otherwise it is the destination. Returns the number of bytes copied, or -1 on an error.
///
/// # Safety
///
/// No other thread accesses the mapped parts of the two ranges.
unsafe fn transfer(own: &libc::iovec, other: &libc::iovec, reads: bool) -> isize {
    let process = std::process::id() as libc::pid_t;
    // SAFETY: each list has one range and is valid for the call. The system checks the ranges themselves.
    unsafe {
        if reads { libc::process_vm_readv(process, own, 1, other, 1, 0) } else { libc::process_vm_writev(process, own, 1, other, 1, 0) }
    }
}

/// Returns the description of a copy that failed after `done` bytes: the address that is not accessible, and whether it belongs to the
/// source or to the destination.
#[cold]
fn fault(to: u64, from: u64, done: usize, reads: bool, code: i32) -> Fault {
    let mut byte = 0_u8;
    let own = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let source = libc::iovec { iov_base: with_exposed_provenance_mut(from as usize + done), iov_len: 1 };
    // SAFETY: one local byte is written, and the other range is only read.
    let is_source = reads && unsafe { transfer(&own, &source, true) } != 1;
    Fault { address: done as u64 + if is_source { from } else { to }, is_source, code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_what_no_file_stands_behind_and_the_process_may_touch() {
        let text =
            b"1000-2000 r--p 00000000 08:01 77 /usr/lib/x.so\n2000-3000 rw-p 00000000 00:00 0\n3000-5000 rw-p 00000000 00:00 0 [heap]\n\
            5000-6000 ---p 00000000 00:00 0\n6000-7000 r--p 00000000 00:00 0\n7000-8000 rw-s 00000000 00:01 9 /dev/shm/y (deleted)\n\
            8000-9000 r--p 00000000 00:00 0 [vvar]\n";
        let private = AddressRanges::parse(text);
        let has = |address, bytes, written| private.has(address, bytes, written);
        assert!(has(0x2000, 0x3000, true) && has(0x4fff, 1, true) && has(0x6000, 0x1000, false));
        for (address, bytes, written) in [(0x1800, 8, false), (0x4fff, 2, false), (0x5000, 8, false), (0x6000, 8, true), (0x7000, 8, false)]
        {
            assert!(!has(address, bytes, written), "{address:#x}");
        }
        assert!(!has(0x8000, 8, false) && !has(0x2fff, 0x3000, true) && !has(u64::MAX, 2, false) && !has(0, 8, false));
        assert!(private.files.is_empty(), "all of these mappings are small");
        let own = vec![1_u8; 100_000];
        assert!(AddressRanges::look().has(own.as_ptr().expose_provenance() as u64, 100_000, true));
    }

    #[test]
    fn large_mappings_of_files_are_those_that_no_other_mapping_can_make_differ_from_their_file() {
        let text = b"10000000-10400000 r--s 00200000 fe:01 77 /data/a model.bin\n20000000-20400000 rw-p 00000000 00:2a 78 /data/b\n\
            30000000-30400000 rw-s 00000000 fe:01 79 /data/c\n40000000-40400000 r-xp 00000000 fe:01 80 /data/d.so\n\
            50000000-503ff000 r--s 00000000 fe:01 81 /data/small\n60000000-60400000 -w-s 00000000 fe:01 82 /data/e\n";
        let found: Vec<_> = AddressRanges::parse(text)
            .files
            .into_iter()
            .map(|file| (file.addresses, file.offset, file.path, file.identity, file.is_private))
            .collect();
        let of = |major, minor| libc::makedev(major, minor);
        assert_eq!(
            found,
            [
                (0x1000_0000..0x1040_0000, 0x20_0000, PathBuf::from("/data/a model.bin"), (of(0xfe, 1), 77), false),
                (0x2000_0000..0x2040_0000, 0, PathBuf::from("/data/b"), (of(0, 0x2a), 78), true),
            ]
        );
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_the_rest_is_copied() {
        let page = 4096;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the call creates a new mapping.
        let ordinary = unsafe { libc::mmap(std::ptr::null_mut(), 4 * page, access, kind, -1, 0) };
        assert_ne!(ordinary, libc::MAP_FAILED);
        // SAFETY: the range consists of whole pages of the mapping just made.
        unsafe {
            ordinary.cast::<u8>().write_bytes(7, 4 * page);
            // The page is made inaccessible instead of being unmapped, because another thread could map memory into the gap, which the test
            // would then overwrite.
            libc::mprotect(ordinary.byte_add(3 * page), page, libc::PROT_NONE);
        }
        let mut own = vec![0_u8; 4 * page];
        let (to, from) = (own.as_mut_ptr().expose_provenance() as u64, ordinary.expose_provenance() as u64);
        let (end, code) = (from + 3 * page as u64, libc::EFAULT);
        // SAFETY: the vector is large enough.
        unsafe {
            assert_eq!(copy_by_system(to, from, 3 * page, true), Ok(()));
            assert_eq!(copy_by_system(to, from, 4 * page, true), Err(Fault { address: end, is_source: true, code }));
            // The destination is reported as missing, whichever range the system call checks.
            for reads in [false, true] {
                assert_eq!(copy_by_system(from, to, 4 * page, reads), Err(Fault { address: end, is_source: false, code }));
            }
            assert_eq!(copy(to, from, 3 * page, [true; 2]), Ok(()));
        }
        assert!(own[..3 * page].iter().all(|byte| *byte == 7));
        // SAFETY: the range is the whole mapping, which is not used any more.
        unsafe { libc::munmap(ordinary, 4 * page) };
    }
}
