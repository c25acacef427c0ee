//! Determines which GPUs can access all memory of a plan. The result is cached for each plan, because the driver takes about as long to
//! query an address as to launch work.

use super::device::Primary;
use super::driver::lock;
use super::kernel::{Copier, HostEnds};
use super::parts::Core;
use crate::backend::{BackendError, Endpoints, Execution, PlanState};
use crate::bridge::Segment;
use std::collections::VecDeque;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Core {
    /// Returns the copy kernel of `gpu`, or `None` if the GPU has none or cannot access every source and destination of the execution.
    pub fn kernel_for<'a>(&self, execution: &Execution<'_>, primary: &'a Primary, gpu: usize) -> Result<Option<Copier<'a>>, BackendError> {
        if !self.plan_is_reached(execution, gpu)? {
            return Ok(None);
        }
        let host = lock(&self.reached).of(execution.endpoints).map_or(HostEnds::Written, |reach| reach.host);
        Ok(primary
            .kernel()
            .map(|kernel| kernel.copier(host, self.host_blocks.load(Ordering::Relaxed), self.paces_host.load(Ordering::Relaxed))))
    }

    /// Returns the GPU that runs a lane (sequence of operations) planned for `gpu`. Usually this is `gpu` itself. If `gpu` cannot access
    /// some memory of the plan, the lane runs on a GPU that owns memory of the plan and can access all memory of the plan, if such a GPU
    /// exists. Memory of pools and of the virtual memory API may be inaccessible to `gpu`, because at first only its owner can access it,
    /// until the application grants access to other GPUs. The owner can usually access the memory of other GPUs as well.
    pub fn reaching(&self, execution: &Execution<'_>, gpu: usize, kept: &PlanState) -> Result<usize, BackendError> {
        if self.is_reached(execution, gpu, kept)? {
            return Ok(gpu);
        }
        for ends in execution.endpoints.iter() {
            for address in [ends.dst, ends.src] {
                if let Some(owner) = self.gpus.attributes(address)?.gpu()
                    && owner < self.gpus.devices.len()
                    && self.is_reached(execution, owner, kept)?
                {
                    return Ok(owner);
                }
            }
        }
        Ok(gpu)
    }

    /// True if kernels of `gpu` can access every source and destination of the execution. A positive result is cached in the plan's state.
    /// See [`plan_is_reached`](Core::plan_is_reached).
    pub fn is_reached(&self, execution: &Execution<'_>, gpu: usize, kept: &PlanState) -> Result<bool, BackendError> {
        if kept.is_reached(gpu) {
            return Ok(true);
        }
        let is_reached = self.plan_is_reached(execution, gpu)?;
        if is_reached {
            kept.note_reached(gpu);
        }
        Ok(is_reached)
    }

    /// True if kernels of `gpu` can access every source and destination of the execution, and the staging rings in GPU memory. The result
    /// is determined once for each plan and GPU.
    pub fn plan_is_reached(&self, execution: &Execution<'_>, gpu: usize) -> Result<bool, BackendError> {
        if let Some(reach) = lock(&self.reached).of(execution.endpoints).filter(|reach| reach.known >> gpu & 1 != 0) {
            return Ok(reach.all >> gpu & 1 != 0);
        }
        // All GPUs in use are examined together, because querying the memory of the sources and destinations takes most of the time. If
        // memory was opened by CUDA IPC, only `gpu` is examined, because such memory is opened only for GPUs that work on it.
        let used = if self.sharing.has_opened.load(Ordering::Acquire) { 0 } else { self.gpus.used.load(Ordering::Acquire) };
        let mut asked = used | 1 << gpu;
        let (mut all, mut shut_out) = (asked, 0);
        let bits = |mask: u64| (0..self.gpus.devices.len()).filter(move |gpu| mask >> gpu & 1 != 0);
        let mut host = HostEnds::None;
        // The result for one address is valid for its whole allocation. The most recent results are kept, because a plan may have many
        // small pieces of memory in few allocations.
        const LATEST: usize = 8;
        let mut found: VecDeque<(Range<u64>, bool)> = VecDeque::with_capacity(LATEST);
        for (ends, &bytes) in execution.endpoints.iter().zip(&execution.program.transfers).filter(|(_, bytes)| **bytes > 0) {
            for (address, in_host) in [(ends.dst, HostEnds::Written), (ends.src, HostEnds::Read)] {
                if let Some((_, is_device)) = found.iter().find(|(range, _)| range.contains(&address)) {
                    host = host.max(if *is_device { HostEnds::None } else { in_host });
                    continue;
                }
                let known = self.gpus.attributes(address)?;
                host = host.max(if known.is_device() { HostEnds::None } else { in_host });
                found.truncate(LATEST - 1);
                known.uniform_range().into_iter().for_each(|range| found.push_front((range, known.is_device())));
                for one in bits(asked & !shut_out) {
                    let reaches = self.kernel_reaches(one, address, bytes, &known);
                    if one != gpu && reaches.is_err() {
                        // The error is reported when a caller requests the result for that GPU.
                        asked &= !(1 << one);
                        all &= asked;
                    } else if !reaches? {
                        all &= !(1 << one);
                        shut_out |= u64::from(!self.copies_reach(one, address, bytes, &known)?) << one;
                    }
                }
            }
        }
        for ring in execution.program.rings.iter().filter(|ring| !ring.device.is_host()) {
            for one in bits(all) {
                if !self.gpus.has_access(one, ring.device.0 as usize)? {
                    all &= !(1 << one);
                }
            }
        }
        let reached = all >> gpu & 1 != 0;
        if !reached {
            log::debug!(
                "GPU {gpu} cannot access all memory of a plan: the plan uses no kernels, and the GPUs that own the memory issue the copies"
            );
        }
        let own = self.sharing.ends_for(&self.gpus, gpu, execution.endpoints).map(|ends| (gpu, ends));
        lock(&self.reached).note(execution.endpoints, asked, all, shut_out, own).host = host;
        Ok(reached)
    }

    /// True if `gpu` cannot access some memory of the plan, not even by copies. Must be called after
    /// [`plan_is_reached`](Core::plan_is_reached) for this GPU.
    pub fn is_shut_out(&self, execution: &Execution<'_>, gpu: usize) -> bool {
        lock(&self.reached).of(execution.endpoints).is_some_and(|reach| reach.shut_out >> gpu & 1 != 0)
    }

    /// Returns the sources and destinations of the execution's transfers as addresses that `gpu` uses. Returns `None` if these are the
    /// addresses of the execution. Must be called after [`plan_is_reached`](Core::plan_is_reached) for this GPU.
    pub fn own_ends(&self, execution: &Execution<'_>, gpu: usize) -> Option<Arc<[Endpoints]>> {
        if !self.sharing.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let reached = lock(&self.reached);
        reached.of(execution.endpoints)?.ends.iter().find(|(of, _)| *of == gpu).map(|(_, ends)| ends.clone())
    }

    /// Returns the GPU that makes one copy of a lane (sequence of operations) planned for `gpu`. This is `gpu` itself if it may access both
    /// the source and the destination. Otherwise, it is the GPU that owns the source, or else the GPU that owns the destination, if that
    /// GPU may access both. Returns an error if there is no such GPU.
    pub fn able_to_copy(&self, gpu: usize, Segment { dst, src, bytes }: Segment) -> Result<usize, BackendError> {
        let ends = [(src, self.gpus.attributes(src)?), (dst, self.gpus.attributes(dst)?)];
        let owners = ends.iter().filter_map(|(_, known)| known.gpu()).filter(|owner| *owner < self.gpus.devices.len());
        for one in iter::once(gpu).chain(owners) {
            if self.copies_reach(one, src, bytes, &ends[0].1)? && self.copies_reach(one, dst, bytes, &ends[1].1)? {
                return Ok(one);
            }
        }
        Err(BackendError::NotSupported(format!(
            "no GPU may access both {src:#x} and {dst:#x}: give the GPU of either address access to the pool or mapping of the other with \
             cudaMemPoolSetAccess \
             or cuMemSetAccess"
        )))
    }
}
