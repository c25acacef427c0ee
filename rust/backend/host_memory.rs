//! Allocates host memory that several GPUs read and write concurrently, before a backend pins it. The memory has huge pages, which are
//! spread over the sockets or placed on one socket.
//!
//! `cuMemHostAlloc` places pages on the socket of the calling thread, and all GPUs then use only that socket's memory: eight H200 together
//! read 157 GB/s and wrote 96 GB/s. In a buffer of huge pages first touched by eight threads they read 285 GB/s and wrote 180 GB/s (one
//! host, one run, 2026-11-20). The first access places a page on the NUMA node of the accessing thread. The threads of this module are
//! therefore spread over the CPUs that the calling thread may use, and successive pieces of the buffer are first accessed by different
//! threads. Every section of the buffer that is larger than a few pieces is then spread over all sockets.
//!
//! In a virtual machine that hides its NUMA nodes, the threads are spread over all CPUs, because no other information is available. On a
//! virtual machine with four H200 and 64 CPUs (2026-11-21) this made no difference. Buffers of 512 MiB touched by sixteen threads, by one
//! thread on each of eight CPUs, or allocated by `cuMemHostAlloc` were read by all GPUs at 171 to 207 GB/s and written at 142 to 156 GB/s.
//! Loads from each page took GPUs and CPUs equally long, so all of that machine's memory is on one node.
//!
//! Threads of this module also make memory that the program has allocated resident before it is pinned, without changing its contents
//! ([`PageRange::bring_in`]). Threads that copy memory are moved to its NUMA node ([`NearMemory`]).
//!
//! This module uses only the operating system. It does not call the GPU driver.

use crate::BackendError;
use crate::threads::without_signals;
use crate::topology::DeviceId;
use std::io;
use std::path::Path;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Maximum number of threads that make pages resident. Additional threads do not help once the memory channels of two sockets are
/// saturated.
const MOST_THREADS: usize = 16;
/// Size in bytes of the part of a new buffer that a thread writes to before it continues with another part. This size is used if the size
/// of huge pages is unknown or too large for the buffer.
const PIECE: usize = 2 << 20;
/// Size in bytes of the part of the program's memory that a thread makes resident before it continues with another part.
const TURN: usize = 64 << 20;

/// Properties of the system that matter for placing host memory: huge pages and NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Setting for transparent huge pages: `always`, `madvise` or `never`. `None` if the system does not report it.
    pub huge: Option<String>,
    /// Number of NUMA nodes that have CPUs, followed by the number of these nodes whose CPUs this process may use.
    pub nodes: (usize, usize),
    /// Result of a trial in which a page was placed on a NUMA node: `Ok`, or the reason for the failure.
    pub placing: Result<(), String>,
}

impl HostFacts {
    /// Returns the current properties of the system.
    pub fn gather() -> HostFacts {
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
        let nodes = nodes(Path::new("/sys/devices/system/node"));
        let page = page_bytes();
        let node = nodes.first().map_or(0, |(number, _)| *number);
        let placed = HostPages::map(page, page, page).and_then(|pages| pages.0.prefer(node));
        HostFacts {
            huge: huge.and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
            nodes: (nodes.len(), if nodes.is_empty() { 0 } else { group(&allowed_cpus(), &nodes).len() }),
            placing: placed.map_err(|error| error.to_string()),
        }
    }
}

impl Default for HostFacts {
    fn default() -> Self {
        HostFacts { huge: None, nodes: (0, 0), placing: Ok(()) }
    }
}

/// Allocation of host memory whose pages are all resident and initially zero. Dropping it returns the pages to the system.
#[derive(Debug)]
pub struct HostPages(PageRange);

/// Range of whole mapped pages. The range does not own the pages.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Address of the first byte of the range.
    pub base: usize,
    /// Size of the range in bytes.
    pub bytes: usize,
}

impl HostPages {
    /// Allocates at least `bytes` bytes of host memory and makes all pages resident. [`PageRange::settle`] describes the placement on NUMA
    /// nodes and the meaning of `domain`. Blocks until all pages are resident.
    pub fn new(bytes: usize, domain: Option<usize>) -> io::Result<HostPages> {
        let page = page_bytes();
        let length = bytes.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?;
        let huge = huge_page_bytes().unwrap_or(PIECE);
        // A buffer that is smaller than a huge page uses normal pages.
        let pages = HostPages::map(length, if length >= huge { huge } else { page }, page)?;
        // When the parent writes to a page that it shares with a child of `fork`, the system replaces the page in the parent. The GPUs
        // would continue to use the old page.
        pages.0.advise(libc::MADV_DONTFORK, "MADV_DONTFORK");
        pages.0.settle(domain)?;
        Ok(pages)
    }

    /// Returns the address of the first byte of the allocation.
    pub fn base(&self) -> usize {
        self.0.base
    }

    /// Returns the size in bytes: the requested size, rounded up to whole pages.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Reserves address space that starts at a multiple of `align`, which is a multiple of `page`. No page is resident yet.
    fn map(length: usize, align: usize, page: usize) -> io::Result<HostPages> {
        let whole = length.checked_add(align - page).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the call creates a new mapping at an address that the system chooses.
        let start = unsafe { libc::mmap(null_mut(), whole, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.expose_provenance();
        let base = start.next_multiple_of(align);
        let unmap = |from: usize, to: usize| {
            if to > from {
                // SAFETY: the range consists of whole pages of the mapping just created, which no other code uses.
                unsafe { libc::munmap(with_exposed_provenance_mut(from), to - from) };
            }
        };
        unmap(start, base);
        unmap(base + length, start + whole);
        Ok(HostPages(PageRange { base, bytes: length }))
    }
}

impl PageRange {
    /// Makes all pages resident, in huge pages if the system supports them. `domain` is an index into the list of NUMA nodes that have
    /// CPUs: the pages are placed on that node while it has free memory. If it is `None`, the pages are spread over all nodes. No other
    /// code may use the pages yet.
    ///
    /// The function fails if the system has less available memory than requested. The check is necessary because pages are allocated one by
    /// one, and the system kills a process that exhausts the memory.
    pub fn settle(self, domain: Option<usize>) -> io::Result<()> {
        let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| entry_bytes(&text, "MemAvailable:"));
        if available.is_some_and(|available| self.bytes as u64 > available) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.advise(libc::MADV_HUGEPAGE, "MADV_HUGEPAGE");
        let nodes = nodes(Path::new("/sys/devices/system/node"));
        let mut groups = group(&allowed_cpus(), &nodes);
        if let Some(domain) = domain {
            match nodes.get(domain) {
                Some((number, _)) => {
                    if let Err(error) = self.prefer(*number) {
                        log::debug!("mbind to NUMA node {number}: {error}");
                    }
                    // If possible, only threads on the requested node are used. Threads on other nodes could also place pages there, but
                    // more slowly.
                    if groups.iter().any(|(group, _)| group == number) {
                        groups.retain(|(group, _)| group == number);
                    }
                }
                None => log::debug!(
                    "host domain {domain} is not a NUMA node that this process can use: its memory is spread over the nodes that it can use"
                ),
            }
        }
        let huge = huge_page_bytes().unwrap_or(PIECE);
        let piece = if self.bytes >= 2 * huge { huge } else { PIECE };
        let groups: Vec<Vec<usize>> = groups.into_iter().map(|(_, cpus)| cpus).collect();
        self.touch(piece, page_bytes(), &spread(&groups, self.bytes.div_ceil(piece).min(MOST_THREADS)));
        Ok(())
    }

    /// Returns the range of whole pages that contains the given bytes, or `None` if this range exceeds the address space.
    pub fn around(address: usize, bytes: usize) -> Option<PageRange> {
        let page = page_bytes();
        let base = address - address % page;
        let end = address.checked_add(bytes)?.checked_next_multiple_of(page)?;
        Some(PageRange { base, bytes: end - base })
    }

    /// Splits the range at all addresses that are multiples of `piece`, which is a multiple of the page size. Returns the pieces.
    pub fn pieces(self, piece: usize) -> impl Iterator<Item = PageRange> + Clone {
        let end = self.base + self.bytes;
        let mut base = self.base;
        std::iter::from_fn(move || {
            let next = end.min((base / piece).saturating_add(1).saturating_mul(piece));
            let range = PageRange { base, bytes: next - base };
            base = next;
            (range.bytes > 0).then_some(range)
        })
    }

    /// Makes all pages resident and keeps their contents, in huge pages if requested and supported. Several threads do the work. As soon as
    /// a piece of the range ([`pieces`](PageRange::pieces)) is resident, a thread calls `done` with the piece, and with true if the piece
    /// is writable. Blocks until all pieces are done. After the first error, no further piece is started, and the error is returned.
    ///
    /// On a machine with two H200, sixteen threads take 85 ms per GiB, or 48 ms per GiB with huge pages. The driver, which uses one thread,
    /// takes 310 ms per GiB, or 135 ms per GiB with huge pages.
    pub fn bring_in(
        self,
        piece: usize,
        huge: bool,
        done: impl Fn(PageRange, bool) -> Result<(), BackendError> + Sync,
    ) -> Result<(), BackendError> {
        self.check()?;
        if huge {
            self.advise(libc::MADV_HUGEPAGE, "MADV_HUGEPAGE");
        }
        let turns: Vec<(usize, PageRange)> =
            (0..).zip(self.pieces(piece)).flat_map(|(of, piece)| piece.pieces(TURN).map(move |turn| (of, turn))).collect();
        struct Piece {
            range: PageRange,
            left: AtomicUsize,
            is_written: AtomicBool,
        }
        let of_piece =
            |range: PageRange| Piece { range, left: AtomicUsize::new(range.pieces(TURN).count()), is_written: AtomicBool::new(true) };
        let pieces: Vec<Piece> = self.pieces(piece).map(of_piece).collect();
        let (next, failed) = (AtomicUsize::new(0), std::sync::Mutex::new(None));
        let work = |_| {
            while let Some((of, turn)) = turns.get(next.fetch_add(1, Ordering::Relaxed)) {
                let piece = &pieces[*of];
                let came = turn.come().and_then(|may_write| {
                    piece.is_written.fetch_and(may_write, Ordering::Relaxed);
                    let is_last = piece.left.fetch_sub(1, Ordering::AcqRel) == 1;
                    if is_last { done(piece.range, piece.is_written.load(Ordering::Relaxed)) } else { Ok(()) }
                });
                if let Err(error) = came {
                    next.store(turns.len(), Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        };
        let groups: Vec<Vec<usize>> =
            group(&allowed_cpus(), &nodes(Path::new("/sys/devices/system/node"))).into_iter().map(|(_, cpus)| cpus).collect();
        let cpus = if groups.is_empty() { Vec::new() } else { spread(&groups, turns.len().min(MOST_THREADS)) };
        on_each(&cpus, work);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Makes all pages of this range resident and keeps their contents. Returns true if they are writable. Linux before version 5.14 cannot
    /// make pages resident on request. The function then only checks that the pages are mapped, and they become resident when they are
    /// first used.
    fn come(self) -> Result<bool, BackendError> {
        let written = self.populate(libc::MADV_POPULATE_WRITE);
        let code = if written == libc::EINVAL { self.populate(libc::MADV_POPULATE_READ) } else { written };
        match code {
            0 => Ok(written == 0),
            libc::EINVAL if !can_populate() && self.is_mapped() => Ok(true),
            code => Err(self.missing(code)),
        }
    }

    /// Makes all pages resident by `madvise`. Returns 0 or the system's error code: EINVAL if the memory or the version of the system does
    /// not support the advice.
    fn populate(self, advice: libc::c_int) -> i32 {
        loop {
            // SAFETY: the system checks the range, and changes nothing in it.
            if unsafe { libc::madvise(with_exposed_provenance_mut(self.base), self.bytes, advice) } == 0 {
                return 0;
            }
            match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL) {
                libc::EINTR | libc::EAGAIN => {}
                code => return code,
            }
        }
    }

    /// Returns true if every page is mapped. Reads no byte of the range, so that tools which detect uninitialised memory report nothing.
    pub fn is_mapped(self) -> bool {
        const PAGES: usize = 4096; // one stack buffer for each call
        let (page, mut is_resident) = (page_bytes(), [0_u8; PAGES]);
        let mapped = |at: usize| {
            let bytes = (PAGES * page).min(self.bytes - at);
            // SAFETY: the system checks the range, and writes one byte for each page of it.
            unsafe { libc::mincore(with_exposed_provenance_mut(self.base + at), bytes, is_resident.as_mut_ptr()) == 0 }
        };
        (0..self.bytes).step_by(PAGES * page).all(mapped)
    }

    /// Returns the address of the first unmapped page. Called only if some pages of the range are not mapped.
    fn first_unmapped(self) -> u64 {
        let page = page_bytes();
        let (mut mapped, mut not) = (0, self.bytes / page);
        while not - mapped > 1 {
            let half = mapped + (not - mapped) / 2;
            if (PageRange { base: self.base, bytes: half * page }).is_mapped() { mapped = half } else { not = half }
        }
        (self.base + mapped * page) as u64
    }

    /// Returns an error if a page of the range is not mapped, or if the range is larger than the system's memory.
    fn check(self) -> Result<(), BackendError> {
        if !self.is_mapped() {
            return Err(BackendError::NotMapped(self.first_unmapped()));
        }
        let total = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| entry_bytes(&text, "MemTotal:"));
        if total.is_some_and(|total| self.bytes as u64 > total) {
            return Err(BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes: self.bytes as u64 });
        }
        Ok(())
    }

    /// Returns the error for a system error code, with the address of the first page that is missing or not readable.
    fn missing(self, code: i32) -> BackendError {
        let page = page_bytes();
        let mut pages = (self.base..self.base + self.bytes).step_by(page).map(|base| PageRange { base, bytes: page });
        let is_missing = |page: &PageRange| if can_populate() { page.populate(libc::MADV_POPULATE_READ) != 0 } else { !page.is_mapped() };
        let address = pages.find(is_missing).map_or(self.base, |page| page.base) as u64;
        match code {
            libc::ENOMEM | libc::EFAULT | libc::EINVAL => BackendError::NotMapped(address),
            code => BackendError::Driver {
                what: format!("allocating the pages of host memory at {address:#x}"),
                reason: io::Error::from_raw_os_error(code).to_string(),
                code: i64::from(code),
            },
        }
    }

    /// Gives advice about the pages to the system. If the system rejects the advice, accesses may be slower but remain correct.
    fn advise(&self, advice: libc::c_int, name: &str) {
        // SAFETY: the range consists of whole pages of a mapping.
        if unsafe { libc::madvise(with_exposed_provenance_mut(self.base), self.bytes, advice) } != 0 {
            log::debug!("madvise({name}): {}", io::Error::last_os_error());
        }
    }

    /// Makes the system place the pages on a NUMA node while it has free memory. `MPOL_BIND` is not used, because the system kills the
    /// process if the node is full.
    fn prefer(&self, node: u32) -> io::Result<()> {
        // All arguments here are as wide as a register, because the system call reads entire registers.
        const MPOL_PREFERRED: libc::c_ulong = 1;
        const NO_FLAGS: libc::c_ulong = 0;
        let mut mask = vec![0 as libc::c_ulong; node as usize / BITS + 1];
        mask[node as usize / BITS] |= 1 << (node as usize % BITS);
        // The kernel uses one bit less than the number of bits that the argument states.
        let bits = mask.len() * BITS + 1;
        // SAFETY: the range consists of whole pages of a mapping. The mask has that many bits and is read during the call.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                with_exposed_provenance_mut::<u8>(self.base),
                self.bytes,
                MPOL_PREFERRED,
                mask.as_ptr(),
                bits,
                NO_FLAGS,
            )
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Makes all pages resident by writing to them. One thread runs on each of `cpus`, and successive pieces of `piece` bytes are processed
    /// by different threads.
    fn touch(&self, piece: usize, page: usize, cpus: &[usize]) {
        let workers = cpus.len().max(1);
        let pieces = self.bytes.div_ceil(piece);
        let turns = |worker: usize| {
            for first in (worker..pieces).step_by(workers).map(|turn| turn * piece) {
                for at in (first..self.bytes.min(first + piece)).step_by(page) {
                    // SAFETY: the address is inside the mapping, in a piece that only this worker uses. No other code uses the mapping yet.
                    unsafe { with_exposed_provenance_mut::<u8>(self.base + at).write_volatile(0) };
                }
            }
        };
        on_each(cpus, turns);
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        let PageRange { base, bytes } = self.0;
        // SAFETY: the range is the whole mapping, which only this object owns.
        if unsafe { libc::munmap(with_exposed_provenance_mut(base), bytes) } != 0 {
            log::error!("munmap of {bytes} bytes at {base:#x}: {}", io::Error::last_os_error());
        }
    }
}

/// Returns true if the system can make pages resident on request. The function tries it on a page of the stack.
fn can_populate() -> bool {
    let here = 0_u8;
    PageRange::around((&raw const here).expose_provenance(), 1).is_some_and(|page| page.populate(libc::MADV_POPULATE_READ) == 0)
}

/// Number of bits in one word of a bit mask of CPUs or NUMA nodes.
const BITS: usize = libc::c_ulong::BITS as usize;

pub(crate) fn page_bytes() -> usize {
    // SAFETY: no argument is a pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Returns the size of a transparent huge page in bytes: 2 MiB, or 512 MiB with base pages of 64 KiB. `None` if the system has no huge
/// pages.
fn huge_page_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
    text.trim().parse().ok().filter(|bytes: &usize| bytes.is_power_of_two())
}

/// Returns the value of an entry of /proc/meminfo in bytes. Returns `None` if the entry is missing or malformed.
fn entry_bytes(meminfo: &str, entry: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(entry))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the CPUs that the calling thread may use according to its cpuset and its affinity. The list is empty if the system does not
/// report them.
fn allowed_cpus() -> Vec<usize> {
    // The system rejects a bit mask that is shorter than the system's own mask, so longer masks are tried until one is accepted.
    for words in [16_usize, 64, 256, 1024, 4096] {
        let mut mask = vec![0 as libc::c_ulong; words];
        // SAFETY: the size that is passed to the call is the size of the mask.
        let told = unsafe { libc::sched_getaffinity(0, size_of_val(&*mask), mask.as_mut_ptr().cast()) };
        if told == 0 {
            return (0..words * BITS).filter(|cpu| mask[cpu / BITS] & (1 << (cpu % BITS)) != 0).collect();
        }
    }
    log::debug!("sched_getaffinity: {}", io::Error::last_os_error());
    Vec::new()
}

/// Runs `work` once for each entry of `cpus`, with the index of the entry, and waits until all calls have returned. Each call runs on its
/// own thread, which is bound to the CPU. If no thread can be created or `cpus` is empty, the work runs on the calling thread.
fn on_each(cpus: &[usize], work: impl Fn(usize) + Sync) {
    let work = &work;
    std::thread::scope(|scope| {
        for (worker, cpu) in cpus.iter().enumerate() {
            let run = move || {
                stay_on(&[*cpu]);
                work(worker);
            };
            let named = std::thread::Builder::new().name("mpgpu-touch".into());
            if without_signals(|| named.spawn_scoped(scope, run)).is_err() {
                work(worker);
            }
        }
        if cpus.is_empty() {
            work(0);
        }
    });
}

/// Binds the calling thread to the given CPUs. If this fails, the thread stays on its current CPU.
fn stay_on(cpus: &[usize]) {
    let mut mask = vec![0 as libc::c_ulong; cpus.iter().max().map_or(0, |cpu| cpu / BITS + 1)];
    cpus.iter().for_each(|cpu| mask[cpu / BITS] |= 1 << (cpu % BITS));
    // SAFETY: the size that is passed to the call is the size of the mask.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&*mask), mask.as_ptr().cast()) } != 0 {
        log::debug!("sched_setaffinity to CPUs {cpus:?}: {}", io::Error::last_os_error());
    }
}

/// Binding of a thread to the NUMA node of the memory that it copies. Each thread uses a separate object.
#[derive(Debug)]
pub struct NearMemory {
    /// NUMA nodes with the CPUs that the process may use on each. The list is empty if all these CPUs belong to one node.
    groups: Vec<(u32, Vec<usize>)>,
    /// NUMA node to which the thread is currently bound; `None` if it is not bound.
    node: Option<u32>,
}

impl NearMemory {
    /// Creates an object for the calling thread. The thread may later be bound to any CPUs that it can use now.
    pub fn of_this_thread() -> NearMemory {
        let groups = group(&allowed_cpus(), &nodes(Path::new("/sys/devices/system/node")));
        NearMemory { groups: if groups.len() > 1 { groups } else { Vec::new() }, node: None }
    }

    /// Binds the thread to the NUMA node of the page at an address. The binding stays unchanged in three cases: the page does not exist yet
    /// (the first access will place it), the process may not use a CPU of that node, or the system does not report the node.
    pub fn go_to(&mut self, address: u64) {
        if self.groups.is_empty() {
            return;
        }
        let Some(node) = node_of(address).filter(|node| self.node != Some(*node)) else { return };
        if let Some((_, cpus)) = self.groups.iter().find(|group| group.0 == node) {
            stay_on(cpus);
            self.node = Some(node);
        }
    }
}

/// Returns the number of the NUMA node that contains the page at an address. `None` if the page does not exist, or if the system does not
/// report the node, as in containers.
fn node_of(address: u64) -> Option<u32> {
    let page: *mut u8 = with_exposed_provenance_mut(usize::try_from(address).ok()? / page_bytes() * page_bytes());
    let (one, itself, stay): (libc::c_ulong, libc::c_ulong, libc::c_ulong) = (1, 0, 0);
    let mut node: libc::c_int = -1;
    // SAFETY: the call gets one address and space for one result, both valid for the call. Without a list of nodes nothing is moved.
    let told = unsafe { libc::syscall(libc::SYS_move_pages, itself, one, &raw const page, null_mut::<u8>(), &raw mut node, stay) };
    u32::try_from(node).ok().filter(|_| told == 0)
}

/// Returns the NUMA nodes that have CPUs, in ascending order, each with its CPUs. GPU memory and CXL memory may be nodes without CPUs.
fn nodes(folder: &Path) -> Vec<(u32, Vec<usize>)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut nodes: Vec<(u32, Vec<usize>)> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = cpu_list(&std::fs::read_to_string(entry.path().join("cpulist")).ok()?);
            (!cpus.is_empty()).then_some((number, cpus))
        })
        .collect();
    nodes.sort_unstable();
    nodes
}

/// Parses a CPU list in the format of the kernel, for example `0-3,8`.
fn cpu_list(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

/// Returns the NUMA nodes that have allowed CPUs, each with these CPUs. Returns a single group if the nodes are not visible.
fn group(allowed: &[usize], nodes: &[(u32, Vec<usize>)]) -> Vec<(u32, Vec<usize>)> {
    let of_node = |cpus: &[usize]| cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect::<Vec<_>>();
    let groups = nodes.iter().map(|(number, cpus)| (*number, of_node(cpus))).filter(|(_, cpus)| !cpus.is_empty());
    let groups: Vec<(u32, Vec<usize>)> = groups.collect();
    if groups.is_empty() && !allowed.is_empty() { vec![(0, allowed.to_vec())] } else { groups }
}

/// Returns CPUs for at most `count` threads. Successive CPUs are on different NUMA nodes, so that neighbouring pieces of a buffer are
/// placed on different nodes.
fn spread(groups: &[Vec<usize>], count: usize) -> Vec<usize> {
    let count = count.min(groups.iter().map(Vec::len).sum());
    let nodes = groups.len();
    (0..count)
        .map(|worker| {
            let (group, index) = (&groups[worker % nodes], worker / nodes);
            group[pick(index, (count - worker % nodes).div_ceil(nodes), group.len())]
        })
        .collect()
}

/// Returns the index of the CPU for thread `index` of `count` threads, if there are `cpus` CPUs. The indices are evenly spread and
/// alternate between even and odd numbers. If NUMA nodes are not visible, the CPUs of two sockets may be numbered consecutively or
/// alternately. In both cases the threads must be spread over the sockets.
fn pick(index: usize, count: usize, cpus: usize) -> usize {
    let spread = index * cpus / count;
    if cpus >= 2 * count { spread + ((spread ^ index) & 1) } else { spread }
}

#[cfg(test)]
#[path = "../../tests/rust/host_memory.rs"]
mod tests;
