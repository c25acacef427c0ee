//! Whether bytes arrive that GPUs copy to each other.
//!
//! GPUs behind an IOMMU, or behind PCIe switches that redirect peer requests (ACS), may report peer access and succeed in copies that
//! move nothing. So the first plan that relies on a pair of GPUs has it tried: a pattern goes each way, by the copy engine of either end, and
//! comes back to be compared. What was found holds for the process, or where bytes were lost for the backend.
//!
//! This waits for its own copies, in streams of its own, for [`PATIENCE`] at most: it is called when plans are made and never where work is enqueued.
//! What it allocates stays until the backend goes, because freeing memory waits for all work of a GPU.

use super::device::{Primary, handle, lock};
use super::driver::{CUdeviceptr, OutsideCapture, call, code};
use super::{Core, MOST_DEVICES};
use crate::backend::BackendError;
use crate::backend::rig::pattern::Words;
use crate::ffi::bridge::Segment;
use crate::topology::DeviceId;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a pattern.
const BYTES: u64 = 64 << 10;
/// For all copies of one pair, which take less than a millisecond on an idle machine.
const PATIENCE: Duration = Duration::from_secs(1);

/// Pairs of GPUs between which nothing was lost: one bit for each GPU of higher number.
static INTACT: [AtomicU64; MOST_DEVICES] = [const { AtomicU64::new(0) }; MOST_DEVICES];

/// Who moves the bytes of a pair.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The copy engine of the source.
    Push,
    /// The copy engine of the destination.
    Pull,
    /// A kernel of the source.
    Kernel,
}

impl fmt::Display for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mover::Push => "its copy engine",
            Mover::Pull => "the other's copy engine",
            Mover::Kernel => "a kernel",
        })
    }
}

/// Bytes that did not arrive.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// From this GPU.
    pub from: usize,
    /// To this one.
    pub to: usize,
    /// Moved by this.
    pub mover: Mover,
    /// So many did not arrive.
    pub wrong: u64,
    /// Of so many.
    pub of: u64,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loss { from, to, mover, wrong, of } = self;
        write!(f, "of {of} bytes from GPU {from} to GPU {to}, moved by {mover}, {wrong} did not arrive")
    }
}

/// What was found of a pair.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Tried {
    /// The driver reports no access, and stages copies by itself.
    NoAccess,
    /// All bytes arrived.
    Intact,
    /// The first loss.
    Lost(Loss),
}

/// What a backend has tried.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// By numbers, the lower first. `false` also for pairs that could not be tried.
    loses: HashMap<(usize, usize), bool>,
    /// Pinned memory, of [`BYTES`] what leaves and what comes back.
    host: Option<u64>,
    /// Of each GPU the same.
    device: HashMap<usize, u64>,
    /// Copies came to no end in time, and may still come.
    given_up: bool,
}

/// A GPU that takes part, with memory and a stream.
struct End<'a> {
    gpu: usize,
    primary: &'a Primary,
    stream: usize,
    out: u64,
    into: u64,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.primary.retire_stream(self.stream);
    }
}

impl Core {
    /// Those of these pairs that lose bytes.
    pub fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        let gpu = |device: DeviceId| usize::try_from(device.0).ok().filter(|gpu| *gpu < self.devices.len());
        let loses = |a: DeviceId, b: DeviceId| match (gpu(a), gpu(b)) {
            (Some(a), Some(b)) if a != b => self.loses(a.min(b), a.max(b)),
            _ => false,
        };
        pairs.iter().copied().filter(|(a, b)| loses(*a, *b)).collect()
    }

    fn loses(&self, a: usize, b: usize) -> bool {
        // Each test has a node of its own.
        if !cfg!(test) && INTACT[a].load(Ordering::Relaxed) >> b & 1 != 0 {
            return false;
        }
        let mut checks = lock(&self.checks);
        if let Some(known) = checks.loses.get(&(a, b)) {
            return *known;
        }
        let tried = self.try_pair(&mut checks, a, b, false);
        match &tried {
            Ok(Tried::Intact) => {
                INTACT[a].fetch_or(1 << b, Ordering::Relaxed);
            }
            Ok(Tried::NoAccess) => {}
            Ok(Tried::Lost(loss)) => {
                log::error!(
                    "GPU {a} and GPU {b} report peer access and lose bytes: {loss}; plans keep off this pair from now on, which is slow. Turn the \
                     IOMMU off or let devices pass it (intel_iommu=off or iommu=pt for the kernel), or turn ACS off on the PCIe switches between them; \
                     `mpgpu doctor` tries all pairs"
                );
                for (one, other) in [(a, b), (b, a)] {
                    if let Some(primary) = self.devices[one].used() {
                        primary.access.fetch_and(!(1 << other), Ordering::AcqRel);
                    }
                }
            }
            Err(error) => log::warn!("whether bytes arrive between GPU {a} and GPU {b} could not be tried: {error}"),
        }
        let loses = matches!(tried, Ok(Tried::Lost(_)));
        checks.loses.insert((a, b), loses);
        loses
    }

    /// Tries one pair now, whatever is known of it, and by kernels too.
    pub fn try_peers(&self, a: usize, b: usize) -> Result<Tried, BackendError> {
        self.try_pair(&mut lock(&self.checks), a, b, true)
    }

    fn try_pair(&self, checks: &mut Checks, a: usize, b: usize, by_kernels: bool) -> Result<Tried, BackendError> {
        if checks.given_up {
            return Err(BackendError::NotSupported("earlier copies of this kind came to no end".into()));
        }
        let _outside = OutsideCapture::enter(self.driver);
        // Access between GPUs in use, hence both first.
        self.primary(a)?;
        self.primary(b)?;
        if !self.has_access(a, b)? && !self.has_access(b, a)? {
            return Ok(Tried::NoAccess);
        }
        let memory = [self.memory_for(checks, a)?, self.memory_for(checks, b)?];
        let host = self.host_memory_for(checks, a)?;
        let one = self.end(a, memory[0])?;
        let other = self.end(b, memory[1])?;
        let until = Instant::now() + PATIENCE;
        let found = self.try_ends([&one, &other], host, by_kernels, until);
        checks.given_up = Instant::now() >= until;
        found.map(|loss| loss.map_or(Tried::Intact, Tried::Lost))
    }

    fn try_ends(&self, [one, other]: [&End<'_>; 2], host: u64, by_kernels: bool, until: Instant) -> Result<Option<Loss>, BackendError> {
        let mut place = 0;
        for (from, to) in [(one, other), (other, one)] {
            for mover in [Mover::Push, Mover::Pull, Mover::Kernel] {
                let kernel = match mover {
                    Mover::Kernel if !by_kernels || !self.has_access(from.gpu, to.gpu)? => continue,
                    Mover::Kernel => match from.primary.kernel() {
                        Some(kernel) => Some(kernel),
                        None => continue,
                    },
                    _ => None,
                };
                // Another part of the pattern each time, so that nothing passes for what came before.
                place += BYTES;
                // SAFETY: pinned memory of so many bytes that this alone uses, under the lock; every copy is waited for before.
                let words = |address| unsafe { Words::new(address, place / 8, BYTES / 8) };
                words(host).fill();
                words(host + BYTES).spoil();
                self.move_now(from, from.out, host, until)?;
                self.move_now(to, to.into, host + BYTES, until)?;
                match kernel {
                    Some(kernel) => {
                        let _current = from.primary.enter()?;
                        let segment = Segment { dst: to.into, src: from.out, bytes: BYTES };
                        // SAFETY: memory of both ends, which this GPU reaches, and a stream of the kernel's context.
                        unsafe { kernel.launch(self.driver, &[segment], handle(from.stream)) }?;
                        self.wait_for(from, until)?;
                    }
                    None => self.move_now(if mover == Mover::Push { from } else { to }, to.into, from.out, until)?,
                }
                self.move_now(to, host + BYTES, to.into, until)?;
                let wrong = words(host + BYTES).wrong_bytes();
                if wrong > 0 {
                    return Ok(Some(Loss { from: from.gpu, to: to.gpu, mover, wrong, of: BYTES }));
                }
            }
        }
        Ok(None)
    }

    /// A copy in the stream of `end`, waited for.
    fn move_now(&self, end: &End<'_>, dst: u64, src: u64, until: Instant) -> Result<(), BackendError> {
        let _current = end.primary.enter()?;
        // SAFETY: memory that `checks` holds; a stream of the current context.
        unsafe { call!(self.driver, cuMemcpyAsync(dst, src, BYTES as usize, handle(end.stream))) }?;
        self.wait_for(end, until)
    }

    /// Asks again and again, because waiting would have no end behind work that waits for this thread.
    fn wait_for(&self, end: &End<'_>, until: Instant) -> Result<(), BackendError> {
        loop {
            // SAFETY: a stream of this backend's.
            match unsafe { (self.driver.cuStreamQuery)(handle(end.stream)) } {
                code::NOT_READY if Instant::now() >= until => {
                    return Err(BackendError::NotSupported(format!("its copies came to no end in {} s", PATIENCE.as_secs())));
                }
                code::NOT_READY => std::thread::yield_now(),
                code => return self.driver.check("cuStreamQuery", code),
            }
        }
    }

    fn end(&self, gpu: usize, memory: u64) -> Result<End<'_>, BackendError> {
        let primary = self.reach(gpu)?;
        Ok(End { gpu, primary, stream: primary.caller_stream()?, out: memory, into: memory + BYTES })
    }

    fn memory_for(&self, checks: &mut Checks, gpu: usize) -> Result<u64, BackendError> {
        if let Some(base) = checks.device.get(&gpu) {
            return Ok(*base);
        }
        let _current = self.primary(gpu)?.enter()?;
        let mut base: CUdeviceptr = 0;
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuMemAlloc(&mut base, 2 * BYTES as usize)) }?;
        checks.device.insert(gpu, base);
        Ok(base)
    }

    fn host_memory_for(&self, checks: &mut Checks, gpu: usize) -> Result<u64, BackendError> {
        if let Some(base) = checks.host {
            return Ok(base);
        }
        const PORTABLE: u32 = 1;
        let _current = self.primary(gpu)?.enter()?;
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuMemHostAlloc(&mut base, 2 * BYTES as usize, PORTABLE)) }?;
        Ok(*checks.host.insert(base.expose_provenance() as u64))
    }

    /// Frees what was used. All work has finished.
    pub fn release_checks(&self) {
        let checks = std::mem::take(&mut *lock(&self.checks));
        // Of a GPU that was reset they are gone. Otherwise tried also where no context can be made current: nobody else would.
        for (gpu, base) in checks.device {
            if let Some(primary) = self.devices[gpu].used().filter(|primary| !primary.is_lost()) {
                let _current = primary.enter();
                // SAFETY: allocated in `memory_for`, in this context; nothing is enqueued any more.
                unsafe { (self.driver.cuMemFree)(base) };
            }
        }
        if let Some(base) = checks.host
            && !self.has_lost()
        {
            let _current = self.devices.iter().find_map(|device| device.used()).map(Primary::enter);
            // SAFETY: as above, in `host_memory_for`.
            unsafe { (self.driver.cuMemFreeHost)(handle(base as usize)) };
        }
    }
}
