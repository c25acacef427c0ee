//! Host memory that several GPUs read and write at once: huge pages, spread over the sockets or put on one of them.
//!
//! The pages of `cuMemHostAlloc` lie on the socket of the thread that asks for them, and every GPU then goes through that socket's
//! memory: eight H200 together read 157 and wrote 96 GB/s. In a buffer of huge pages first touched by eight threads they read 285 and
//! wrote 180 GB/s (one host, one run, 2026-11-20). First touch places a page on the node of the thread that touches it, so the threads
//! here are spread over the CPUs that the calling thread may use, and take turns piece by piece: every part of the buffer that is
//! larger than a few pieces lies on all sockets.
//!
//! In a virtual machine that hides its NUMA nodes the same is done over all CPUs, because that is all that can be seen. On one with four H200 and 64
//! CPUs (2026-11-21) it made no difference: buffers of 512 MiB touched by sixteen threads, by one thread on each of eight CPUs, or got from
//! `cuMemHostAlloc` were read by all GPUs at 171 to 207 GB/s and written at 142 to 156, and loads from each page took GPUs and CPUs equally
//! long: all of that machine's memory is on one node.
//!
//! Memory of the program's own that is to be pinned is brought in by threads too ([`PageRange::bring_in`]), with what it holds. Threads that copy it
//! go to where it lies ([`NearMemory`]).
//!
//! This is the operating system's half and knows no driver.

use crate::BackendError;
use crate::threads::without_signals;
use std::io;
use std::path::Path;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Threads that touch pages: more than fill the memory channels of two sockets add nothing.
const MOST_THREADS: usize = 16;
/// What a thread touches before the next one's turn, where huge pages are larger than makes sense for the buffer, or are not known.
const PIECE: usize = 2 << 20;
/// What a thread brings in before the next one's turn.
const TURN: usize = 64 << 20;

/// What the system does for such memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// The setting for huge pages, `always`, `madvise` or `never`, where the system tells.
    pub huge: Option<String>,
    /// NUMA nodes that have CPUs, and those of them whose CPUs this process may use.
    pub nodes: (usize, usize),
    /// Whether pages can be put on a node, tried on one.
    pub placing: Result<(), String>,
}

impl HostFacts {
    /// As it is now.
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

/// Pages of host memory, all resident and zero at first. They go back to the system when this is dropped.
#[derive(Debug)]
pub struct HostPages(PageRange);

/// Whole pages that somebody has mapped.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Address of the first byte.
    pub base: usize,
    /// Size in bytes.
    pub bytes: usize,
}

impl HostPages {
    /// At least `bytes` bytes, placed as [`PageRange::settle`] does it. Blocks until all pages are there.
    pub fn new(bytes: usize, domain: Option<usize>) -> io::Result<HostPages> {
        let page = page_bytes();
        let length = bytes.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?;
        let huge = huge_page_bytes().unwrap_or(PIECE);
        // A buffer smaller than a huge page has none.
        let pages = HostPages::map(length, if length >= huge { huge } else { page }, page)?;
        // A page that a child of `fork` shares is replaced by another when the parent writes to it, and the GPUs go on with the old one.
        pages.0.advise(libc::MADV_DONTFORK, "MADV_DONTFORK");
        pages.0.settle(domain)?;
        Ok(pages)
    }

    /// Address of the first byte.
    pub fn base(&self) -> usize {
        self.0.base
    }

    /// Size in bytes: what was asked for, in whole pages.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Address space that starts at a multiple of `align`, itself a multiple of `page`. No page is there yet.
    fn map(length: usize, align: usize, page: usize) -> io::Result<HostPages> {
        let whole = length.checked_add(align - page).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the system's choice.
        let start = unsafe { libc::mmap(null_mut(), whole, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.expose_provenance();
        let base = start.next_multiple_of(align);
        let unmap = |from: usize, to: usize| {
            if to > from {
                // SAFETY: whole pages of the mapping just made, which nobody has seen.
                unsafe { libc::munmap(with_exposed_provenance_mut(from), to - from) };
            }
        };
        unmap(start, base);
        unmap(base + length, start + whole);
        Ok(HostPages(PageRange { base, bytes: length }))
    }
}

impl PageRange {
    /// Makes all pages resident, in huge pages where the system has them. `domain` counts the NUMA nodes that have CPUs: the pages lie on that
    /// one as far as it has room; `None` spreads them. Nobody else uses the pages yet.
    ///
    /// More than the system has available is refused: pages are taken one by one, and whoever takes the last is ended by the system.
    pub fn settle(self, domain: Option<usize>) -> io::Result<()> {
        let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_bytes(&text));
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
                    // Threads elsewhere place the pages there too, only more slowly.
                    if groups.iter().any(|(group, _)| group == number) {
                        groups.retain(|(group, _)| group == number);
                    }
                }
                None => log::debug!("host domain {domain} is no NUMA node that can be seen: its memory is spread over those that can"),
            }
        }
        let huge = huge_page_bytes().unwrap_or(PIECE);
        let piece = if self.bytes >= 2 * huge { huge } else { PIECE };
        let groups: Vec<Vec<usize>> = groups.into_iter().map(|(_, cpus)| cpus).collect();
        self.touch(piece, page_bytes(), &spread(&groups, self.bytes.div_ceil(piece).min(MOST_THREADS)));
        Ok(())
    }

    /// The pages that so many bytes lie in. `None` where the last would end after the address space.
    pub fn around(address: usize, bytes: usize) -> Option<PageRange> {
        let page = page_bytes();
        let base = address - address % page;
        let end = address.checked_add(bytes)?.checked_next_multiple_of(page)?;
        Some(PageRange { base, bytes: end - base })
    }

    /// Cut where addresses are multiples of `piece`, itself one of the size of a page.
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

    /// Makes all pages resident, with what they hold, in huge pages where that is asked for and the system has them: by threads, which hand each
    /// piece ([`pieces`](PageRange::pieces)) to `done` as soon as it is there, with whether it may be written. Blocks. The first error ends it,
    /// and pieces that are under way with other threads are done before that is returned.
    ///
    /// On a machine with two H200 sixteen threads take 85 ms a GiB, 48 in huge pages, where the driver's own thread takes 310 and 135.
    pub fn bring_in(
        self,
        piece: usize,
        huge: bool,
        done: impl Fn(PageRange, bool) -> Result<(), BackendError> + Sync,
    ) -> Result<(), BackendError> {
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
        let of_piece = |(of, range): (usize, PageRange)| {
            let left = turns.iter().filter(|(other, _)| *other == of).count();
            Piece { range, left: AtomicUsize::new(left), is_written: AtomicBool::new(true) }
        };
        let pieces: Vec<Piece> = self.pieces(piece).enumerate().map(of_piece).collect();
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

    /// Makes all pages resident with what they hold; whether they may be written. A system before Linux 5.14 leaves that to whoever uses them.
    fn come(self) -> Result<bool, BackendError> {
        let written = self.populate(libc::MADV_POPULATE_WRITE);
        let code = if written == libc::EINVAL { self.populate(libc::MADV_POPULATE_READ) } else { written };
        match code {
            0 => Ok(written == 0),
            libc::EINVAL if !can_populate() && self.is_mapped() => Ok(true),
            code => Err(self.missing(code)),
        }
    }

    /// 0, or what the system says: EINVAL of memory that may not be used so, and of all where it is too old.
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

    /// Whether something is mapped at each page.
    fn is_mapped(self) -> bool {
        let mut resident = vec![0_u8; self.bytes.div_ceil(page_bytes())];
        // SAFETY: the system checks the range; the output has a byte for each page.
        unsafe { libc::mincore(with_exposed_provenance_mut(self.base), self.bytes, resident.as_mut_ptr()) == 0 }
    }

    /// Why the system says `code` of these pages; of the first that is not there, or may not be read.
    fn missing(self, code: i32) -> BackendError {
        let page = page_bytes();
        let mut pages = (self.base..self.base + self.bytes).step_by(page).map(|base| PageRange { base, bytes: page });
        let is_missing = |page: &PageRange| if can_populate() { page.populate(libc::MADV_POPULATE_READ) != 0 } else { !page.is_mapped() };
        let address = pages.find(is_missing).map_or(self.base, |page| page.base) as u64;
        match code {
            libc::ENOMEM | libc::EFAULT | libc::EINVAL => BackendError::NotMapped(address),
            code => BackendError::Driver {
                what: format!("bringing in host memory at {address:#x}"),
                reason: io::Error::from_raw_os_error(code).to_string(),
                code: i64::from(code),
            },
        }
    }

    /// Advice: without it the memory may be slower, it is not wrong.
    fn advise(&self, advice: libc::c_int, name: &str) {
        // SAFETY: whole pages of a mapping.
        if unsafe { libc::madvise(with_exposed_provenance_mut(self.base), self.bytes, advice) } != 0 {
            log::debug!("madvise({name}): {}", io::Error::last_os_error());
        }
    }

    /// Places the pages on a NUMA node for as long as it has room. Not `MPOL_BIND`: where a node is full, that ends the process.
    fn prefer(&self, node: u32) -> io::Result<()> {
        // Of the register's width, as is every number here: the call takes whatever is in them.
        const MPOL_PREFERRED: libc::c_ulong = 1;
        const NO_FLAGS: libc::c_ulong = 0;
        let mut mask = vec![0 as libc::c_ulong; node as usize / BITS + 1];
        mask[node as usize / BITS] |= 1 << (node as usize % BITS);
        // The kernel takes one bit less than it is told.
        let bits = mask.len() * BITS + 1;
        // SAFETY: whole pages of a mapping, and a mask of so many bits, which is read during the call.
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

    /// Makes all pages resident: a thread on each of `cpus`, by turns of one piece each.
    fn touch(&self, piece: usize, page: usize, cpus: &[usize]) {
        let workers = cpus.len().max(1);
        let pieces = self.bytes.div_ceil(piece);
        let turns = |worker: usize| {
            for first in (worker..pieces).step_by(workers).map(|turn| turn * piece) {
                for at in (first..self.bytes.min(first + piece)).step_by(page) {
                    // SAFETY: inside of the mapping, in a piece that is this worker's alone. Nobody else uses it yet.
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
        // SAFETY: the whole mapping, whose only owner this is.
        if unsafe { libc::munmap(with_exposed_provenance_mut(base), bytes) } != 0 {
            log::error!("munmap of {bytes} bytes at {base:#x}: {}", io::Error::last_os_error());
        }
    }
}

/// Whether the system brings pages in when it is asked, tried on one of the stack.
fn can_populate() -> bool {
    let here = 0_u8;
    PageRange::around((&raw const here).expose_provenance(), 1).is_some_and(|page| page.populate(libc::MADV_POPULATE_READ) == 0)
}

/// Bits of a word of a CPU or node mask.
const BITS: usize = libc::c_ulong::BITS as usize;

fn page_bytes() -> usize {
    // SAFETY: no argument is a pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Size of a transparent huge page: 2 MiB, or 512 MiB with base pages of 64 KiB. `None` where the system has none.
fn huge_page_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
    text.trim().parse().ok().filter(|bytes: &usize| bytes.is_power_of_two())
}

/// What /proc/meminfo says can be taken without swapping.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The CPUs that the calling thread may use: of its cpuset, and of what it has been bound to. None where the system does not tell.
fn allowed_cpus() -> Vec<usize> {
    // The system refuses a mask that is shorter than its own.
    for words in [16_usize, 64, 256, 1024, 4096] {
        let mut mask = vec![0 as libc::c_ulong; words];
        // SAFETY: the mask has as many bytes as the call is told.
        let told = unsafe { libc::sched_getaffinity(0, size_of_val(&*mask), mask.as_mut_ptr().cast()) };
        if told == 0 {
            return (0..words * BITS).filter(|cpu| mask[cpu / BITS] & (1 << (cpu % BITS)) != 0).collect();
        }
    }
    log::debug!("sched_getaffinity: {}", io::Error::last_os_error());
    Vec::new()
}

/// Does the work of each number on a thread of its own, bound to its CPU; here where no thread is to be had, or no CPU is named. Waits for all.
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

/// Binds the calling thread. One that the system does not bind works from where it is.
fn stay_on(cpus: &[usize]) {
    let mut mask = vec![0 as libc::c_ulong; cpus.iter().max().map_or(0, |cpu| cpu / BITS + 1)];
    cpus.iter().for_each(|cpu| mask[cpu / BITS] |= 1 << (cpu % BITS));
    // SAFETY: the mask has as many bytes as the call is told.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&*mask), mask.as_ptr().cast()) } != 0 {
        log::debug!("sched_setaffinity to CPUs {cpus:?}: {}", io::Error::last_os_error());
    }
}

/// Moves threads to the NUMA nodes of the memory that they copy. Each thread has one of its own.
#[derive(Debug)]
pub struct NearMemory {
    /// Of each node the CPUs that the process may use; none where these are all of one node.
    groups: Vec<(u32, Vec<usize>)>,
    /// Where the thread is bound to.
    node: Option<u32>,
}

impl NearMemory {
    /// For the calling thread, and the CPUs that it may use now.
    pub fn of_this_thread() -> NearMemory {
        let groups = group(&allowed_cpus(), &nodes(Path::new("/sys/devices/system/node")));
        NearMemory { groups: if groups.len() > 1 { groups } else { Vec::new() }, node: None }
    }

    /// Binds the thread to the node of the page at an address. It stays where it is if there is no such page yet, since whoever touches it first gets
    /// it, if the process may use no CPU there, and if the system does not tell.
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

/// The NUMA node of the page at an address; `None` where there is none, or where the system does not say, as in containers.
fn node_of(address: u64) -> Option<u32> {
    let page: *mut u8 = with_exposed_provenance_mut(usize::try_from(address).ok()? / page_bytes() * page_bytes());
    let (one, itself, stay): (libc::c_ulong, libc::c_ulong, libc::c_ulong) = (1, 0, 0);
    let mut node: libc::c_int = -1;
    // SAFETY: one address and one result, valid for the call; without a list of nodes nothing is moved.
    let told = unsafe { libc::syscall(libc::SYS_move_pages, itself, one, &raw const page, null_mut::<u8>(), &raw mut node, stay) };
    u32::try_from(node).ok().filter(|_| told == 0)
}

/// The NUMA nodes that have CPUs, in the order of their numbers. Memory of a GPU or behind CXL may be a node without.
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

/// `0-3,8` as the kernel writes it.
fn cpu_list(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

/// The allowed CPUs of each node that has some. One group where nodes cannot be seen.
fn group(allowed: &[usize], nodes: &[(u32, Vec<usize>)]) -> Vec<(u32, Vec<usize>)> {
    let of_node = |cpus: &[usize]| cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect::<Vec<_>>();
    let groups = nodes.iter().map(|(number, cpus)| (*number, of_node(cpus))).filter(|(_, cpus)| !cpus.is_empty());
    let groups: Vec<(u32, Vec<usize>)> = groups.collect();
    if groups.is_empty() && !allowed.is_empty() { vec![(0, allowed.to_vec())] } else { groups }
}

/// CPUs for at most `count` threads, one node after the other, so that neighbouring pieces lie on different nodes.
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

/// Which of `cpus` CPUs the `index`th of `count` threads takes: evenly spread, and even and odd ones by turns. Where nodes cannot be seen,
/// machines number the CPUs of two sockets one socket after the other or by turns, and both have to come out spread.
fn pick(index: usize, count: usize, cpus: usize) -> usize {
    let spread = index * cpus / count;
    if cpus >= 2 * count { spread + ((spread ^ index) & 1) } else { spread }
}

#[cfg(test)]
#[path = "../../tests/rust/host_memory.rs"]
mod tests;
