//! Tests whether copies between GPUs deliver their data.
//!
//! GPUs behind an IOMMU, or behind PCIe switches that redirect peer requests (ACS), may report peer access and successful copies although
//! the data does not arrive. The first plan that relies on a pair of GPUs therefore tests the pair. A pattern is copied in each direction
//! by the copy engines of both GPUs, and is then copied back for comparison. A good result is valid for the rest of the process, and a bad
//! result for the lifetime of the backend.
//!
//! The test waits for its own copies in its own streams, for at most [`PATIENCE`]. Tests run only when plans are created, never when work
//! is enqueued. The memory of the tests stays allocated until the backend is dropped, because freeing memory waits for all work of a GPU.

use super::device::Primary;
use super::driver::{CUdeviceptr, OutsideCapture, call, code, handle, lock};
use super::gpus::{Gpus, MOST_DEVICES};
use super::kernel::HostEnds;
use crate::backend::BackendError;
use crate::bridge::Segment;
use crate::pattern::Words;
use crate::took::took;
use crate::topology::DeviceId;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Size in bytes of a test pattern.
const BYTES: u64 = 64 << 10;
const MOVERS: [Mover; 3] = [Mover::Push, Mover::Pull, Mover::Kernel];
/// Number of areas for test patterns in each GPU's memory: one for the source, and one destination for each kind of [`Mover`].
const PLACES: u64 = 1 + MOVERS.len() as u64;
/// Time limit for all test copies of one pair of GPUs. On an idle machine they take less than a millisecond.
const PATIENCE: Duration = Duration::from_secs(1);

/// Pairs of GPUs that have passed the test. The index is the lower GPU number of a pair. Each element is a bit mask of the higher GPU
/// numbers.
static INTACT: [AtomicU64; MOST_DEVICES] = [const { AtomicU64::new(0) }; MOST_DEVICES];

/// Engine that makes a test copy between two GPUs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Mover {
    /// Copy engine of the source GPU.
    Push,
    /// Copy engine of the destination GPU.
    Pull,
    /// Kernel that runs on the source GPU.
    Kernel,
}

impl fmt::Display for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mover::Push => "the copy engine of the source GPU",
            Mover::Pull => "the copy engine of the destination GPU",
            Mover::Kernel => "a kernel of the source GPU",
        })
    }
}

/// Test copy whose data did not arrive, or did not arrive completely.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Index of the GPU from which the test pattern was copied.
    pub from: usize,
    /// Index of the GPU to which the test pattern was copied.
    pub to: usize,
    /// Engine that made the test copy.
    pub mover: Mover,
    /// Number of bytes at the destination that differ from the test pattern.
    pub wrong: u64,
    /// Total number of bytes that the test copy should have written.
    pub of: u64,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loss { from, to, mover, wrong, of } = self;
        write!(f, "of {of} bytes from GPU {from} to GPU {to}, moved by {mover}, {wrong} did not arrive")
    }
}

/// Result of testing the copies between two GPUs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Tried {
    /// The driver reports no peer access between the two GPUs, so it copies between them through host memory.
    NoAccess,
    /// The data of all test copies arrived completely.
    Intact,
    /// The data of at least one test copy did not arrive completely. Contains the first such copy.
    Lost(Loss),
}

/// Results of the test copies that a backend has made between pairs of GPUs.
#[derive(Debug, Default)]
pub(super) struct Checks(Mutex<CheckState>);

#[derive(Debug, Default)]
struct CheckState {
    /// Test results by pair of GPU numbers, the lower number first. A result is true if copies of the pair lose data. It is false if they
    /// do not, or if the pair could not be tested.
    loses: HashMap<(usize, usize), bool>,
    /// Address of each GPU's memory for [`PLACES`] test patterns, by GPU number.
    device: HashMap<usize, u64>,
    /// Address of pinned host memory for the patterns of both GPUs of a pair. `None` before the first test.
    host: Option<u64>,
    /// True after test copies have exceeded the time limit. These copies may still be running and using the memory of the tests, so no
    /// further test is made.
    given_up: bool,
}

/// One GPU of a pair that is tested, with the memory and the stream that the test uses on this GPU.
struct CheckEnd<'a> {
    gpu: usize,
    primary: &'a Primary,
    stream: usize,
    memory: u64,
}

impl CheckEnd<'_> {
    fn place(&self, place: u64) -> u64 {
        self.memory + place * BYTES
    }
}

impl Drop for CheckEnd<'_> {
    fn drop(&mut self) {
        self.primary.retire_stream(self.stream);
    }
}

impl Checks {
    /// Returns the pairs in `pairs` whose copies lose data. Tests each pair that has not been tested yet.
    pub fn losing_pairs(&self, gpus: &Gpus, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        let gpu = |device: DeviceId| usize::try_from(device.0).ok().filter(|gpu| *gpu < gpus.devices.len());
        let loses = |a: DeviceId, b: DeviceId| match (gpu(a), gpu(b)) {
            (Some(a), Some(b)) if a != b => self.loses(gpus, a.min(b), a.max(b)),
            _ => false,
        };
        pairs.iter().copied().filter(|(a, b)| loses(*a, *b)).collect()
    }

    fn loses(&self, gpus: &Gpus, a: usize, b: usize) -> bool {
        // In unit tests, each test has its own simulated node. Results of other tests therefore do not apply.
        if !cfg!(test) && INTACT[a].load(Ordering::Relaxed) >> b & 1 != 0 {
            return false;
        }
        let mut checks = lock(&self.0);
        if let Some(known) = checks.loses.get(&(a, b)) {
            return *known;
        }
        let tried = took(format_args!("GPU {a} and GPU {b} tried"), || checks.try_pair(gpus, a, b, false));
        match &tried {
            Ok(Tried::Intact) => {
                INTACT[a].fetch_or(1 << b, Ordering::Relaxed);
            }
            Ok(Tried::NoAccess) => {}
            Ok(Tried::Lost(loss)) => {
                log::error!(
                    "GPU {a} and GPU {b} report peer access, but copies between them lose bytes: {loss}; plans do not use peer access of \
                     this pair from now on, which is slow. Disable the \
                     IOMMU or set it to pass-through (intel_iommu=off or iommu=pt for the kernel), or disable ACS on the PCIe switches between them; \
                     `mpgpu doctor` tests all pairs"
                );
                for (one, other) in [(a, b), (b, a)] {
                    if let Some(primary) = gpus.devices[one].used() {
                        primary.access.fetch_and(!(1 << other), Ordering::AcqRel);
                    }
                }
            }
            Err(error) => log::warn!("copies between GPU {a} and GPU {b} could not be tested: {error}"),
        }
        let loses = matches!(tried, Ok(Tried::Lost(_)));
        checks.loses.insert((a, b), loses);
        loses
    }

    /// Tests the copies between two GPUs, including copies by kernels. The result of an earlier test is ignored.
    pub fn try_peers(&self, gpus: &Gpus, a: usize, b: usize) -> Result<Tried, BackendError> {
        lock(&self.0).try_pair(gpus, a, b, true)
    }

    /// Frees the memory of the test copies. All work that uses this memory must have finished.
    pub fn release(&self, gpus: &Gpus) {
        let checks = std::mem::take(&mut *lock(&self.0));
        // The memory of a GPU that was reset no longer exists. Other memory is freed even if no context can be made current, because no
        // other code would free it.
        for (gpu, base) in checks.device {
            if let Some(primary) = gpus.devices[gpu].used().filter(|primary| !primary.is_lost()) {
                let _current = primary.enter();
                // SAFETY: `memory_for` allocated the memory in this context. No enqueued work uses it any more.
                unsafe { (gpus.driver.cuMemFree)(base) };
            }
        }
        if let Some(base) = checks.host
            && !gpus.has_lost()
        {
            let _current = gpus.devices.iter().find_map(|device| device.used()).map(Primary::enter);
            // SAFETY: `host_memory_for` allocated the memory. No enqueued work uses it any more.
            unsafe { (gpus.driver.cuMemFreeHost)(handle(base as usize)) };
        }
    }
}

impl CheckState {
    fn try_pair(&mut self, gpus: &Gpus, a: usize, b: usize, by_kernels: bool) -> Result<Tried, BackendError> {
        if self.given_up {
            return Err(BackendError::NotSupported("earlier test copies did not finish".into()));
        }
        let _outside = OutsideCapture::enter(gpus.driver);
        // Access is enabled only between GPUs in use. The primary contexts of both GPUs are therefore retained first.
        gpus.primary(a)?;
        gpus.primary(b)?;
        if !gpus.has_access(a, b)? && !gpus.has_access(b, a)? {
            return Ok(Tried::NoAccess);
        }
        let memory = [self.memory_for(gpus, a)?, self.memory_for(gpus, b)?];
        let host = self.host_memory_for(gpus, a)?;
        let one = end(gpus, a, memory[0])?;
        let other = end(gpus, b, memory[1])?;
        let until = Instant::now() + PATIENCE;
        let found = try_ends(gpus, [&one, &other], host, by_kernels, until);
        // The test of the next pair uses the same memory, so these copies must have finished before.
        let is_idle = found.is_ok() || [&one, &other].into_iter().all(|end| wait_for(gpus, end, until).is_ok());
        self.given_up = !is_idle || Instant::now() >= until;
        found.map(|loss| loss.map_or(Tried::Intact, Tried::Lost))
    }

    fn memory_for(&mut self, gpus: &Gpus, gpu: usize) -> Result<u64, BackendError> {
        if let Some(base) = self.device.get(&gpu) {
            return Ok(*base);
        }
        let _current = gpus.primary(gpu)?.enter()?;
        let mut base: CUdeviceptr = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(gpus.driver, cuMemAlloc(&mut base, (PLACES * BYTES) as usize)) }?;
        self.device.insert(gpu, base);
        Ok(base)
    }

    fn host_memory_for(&mut self, gpus: &Gpus, gpu: usize) -> Result<u64, BackendError> {
        if let Some(base) = self.host {
            return Ok(base);
        }
        const PORTABLE: u32 = 1;
        let _current = gpus.primary(gpu)?.enter()?;
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut base, (2 * PLACES * BYTES) as usize, PORTABLE)) }?;
        Ok(*self.host.insert(base.expose_provenance() as u64))
    }
}

/// Copies the pattern in both directions and returns the first copy that lost data, or `None` if all data arrived. The copies of both GPUs
/// are enqueued before the function waits for any of them. On a GPU that is busy with copies of the application, each wait takes as long as
/// one of these copies, so there should be few waits.
fn try_ends(gpus: &Gpus, ends: [&CheckEnd<'_>; 2], host: u64, by_kernels: bool, until: Instant) -> Result<Option<Loss>, BackendError> {
    let image = |end: usize, place: u64| host + (end as u64 * PLACES + place) * BYTES;
    // The two GPUs send different parts of the pattern.
    // SAFETY: The pinned memory has this size and is accessed only here, under the lock. Every copy has finished before the CPU accesses
    // its words.
    let words = |end, place, leaves: usize| unsafe { Words::new(image(end, place), (1 + leaves as u64) * BYTES / 8, BYTES / 8) };
    let wait = || ends.into_iter().try_for_each(|end| wait_for(gpus, end, until));
    for (index, end) in ends.into_iter().enumerate() {
        words(index, 0, index).fill();
        (1..PLACES).for_each(|place| words(index, place, 1 - index).spoil());
        (0..PLACES).try_for_each(|place| enqueue(gpus, end, end.place(place), image(index, place)))?;
    }
    wait()?;
    let mut has_kernel = [false; 2];
    for (index, (from, to)) in [(ends[0], ends[1]), (ends[1], ends[0])].into_iter().enumerate() {
        enqueue(gpus, from, to.place(1), from.place(0))?;
        enqueue(gpus, to, to.place(2), from.place(0))?;
        let kernel = if by_kernels && gpus.has_access(from.gpu, to.gpu)? { from.primary.kernel() } else { None };
        if let Some(kernel) = kernel {
            let _current = from.primary.enter()?;
            let segment = Segment { dst: to.place(3), src: from.place(0), bytes: BYTES };
            // SAFETY: The GPU can access the memory of both ends, and the stream belongs to the kernel's context.
            unsafe { kernel.copier(HostEnds::None, 1, false).launch(gpus.driver, &[segment], handle(from.stream)) }?;
            has_kernel[index] = true;
        }
    }
    wait()?;
    for (index, end) in ends.into_iter().enumerate() {
        (1..PLACES).try_for_each(|place| enqueue(gpus, end, image(index, place), end.place(place)))?;
    }
    wait()?;
    for (from, to) in [(0, 1), (1, 0)] {
        for (place, mover) in (1..).zip(MOVERS).filter(|(_, mover)| *mover != Mover::Kernel || has_kernel[from]) {
            let wrong = words(to, place, from).wrong_bytes();
            if wrong > 0 {
                return Ok(Some(Loss { from: ends[from].gpu, to: ends[to].gpu, mover, wrong, of: BYTES }));
            }
        }
    }
    Ok(None)
}

/// Enqueues a copy of one test pattern in the test stream of `end`.
fn enqueue(gpus: &Gpus, end: &CheckEnd<'_>, dst: u64, src: u64) -> Result<(), BackendError> {
    let _current = end.primary.enter()?;
    // SAFETY: `checks` keeps both buffers allocated, and the stream belongs to the current context.
    unsafe { call!(gpus.driver, cuMemcpyAsync(dst, src, BYTES as usize, handle(end.stream))) }
}

/// Polls until the stream of `end` is idle, or until the time `until`. A blocking wait might never return if work in front of the copies
/// waits for this thread.
fn wait_for(gpus: &Gpus, end: &CheckEnd<'_>, until: Instant) -> Result<(), BackendError> {
    loop {
        // SAFETY: The stream belongs to this backend, which keeps it valid.
        match unsafe { (gpus.driver.cuStreamQuery)(handle(end.stream)) } {
            code::NOT_READY if Instant::now() >= until => {
                return Err(BackendError::NotSupported(format!("test copies did not finish in {} s", PATIENCE.as_secs())));
            }
            code::NOT_READY => std::thread::yield_now(),
            code => return gpus.driver.check("cuStreamQuery", code),
        }
    }
}

fn end(gpus: &Gpus, gpu: usize, memory: u64) -> Result<CheckEnd<'_>, BackendError> {
    let primary = gpus.peered(gpu)?;
    Ok(CheckEnd { gpu, primary, stream: primary.caller_stream()?, memory })
}
