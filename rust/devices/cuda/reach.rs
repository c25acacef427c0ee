//! Which GPUs reach the memory of a plan by themselves. Found out once for each plan, because asking the driver for an address takes about
//! as long as a launch.

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
    /// The copy kernel of `gpu`, where there is one and it reaches every end of the execution.
    pub fn kernel_for<'a>(&self, execution: &Execution<'_>, primary: &'a Primary, gpu: usize) -> Result<Option<Copier<'a>>, BackendError> {
        if !self.plan_is_reached(execution, gpu)? {
            return Ok(None);
        }
        let host = lock(&self.reached).of(execution.endpoints).map_or(HostEnds::Written, |reach| reach.host);
        Ok(primary.kernel().map(|kernel| kernel.copier(host)))
    }

    /// The GPU that does in place of `gpu` what a lane is for: itself, unless there is memory that it may not enter and another GPU whose
    /// memory is in the plan may enter all. Memory of pools and mappings is open to its own GPU alone until the caller lets others in,
    /// and that one reaches theirs.
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

    /// [`plan_is_reached`](Core::plan_is_reached), for a plan that keeps the answer.
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

    /// Whether `gpu` reads and writes every end of the execution by itself, as its kernels do. Found out once for a plan.
    pub fn plan_is_reached(&self, execution: &Execution<'_>, gpu: usize) -> Result<bool, BackendError> {
        if let Some(reach) = lock(&self.reached).of(execution.endpoints).filter(|reach| reach.known >> gpu & 1 != 0) {
            return Ok(reach.all >> gpu & 1 != 0);
        }
        // For all GPUs in use at once, because asking the driver for an end is what takes time. Memory of CUDA IPC is opened for those alone
        // that work on it.
        let used = if self.sharing.has_opened.load(Ordering::Acquire) { 0 } else { self.gpus.used.load(Ordering::Acquire) };
        let mut asked = used | 1 << gpu;
        let (mut all, mut shut_out) = (asked, 0);
        let bits = |mask: u64| (0..self.gpus.devices.len()).filter(move |gpu| mask >> gpu & 1 != 0);
        let mut host = HostEnds::None;
        // What was found of an end holds for all of its allocation. The latest few, because many small pieces lie in few allocations.
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
                        // For whoever asks for that GPU.
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
            log::debug!("GPU {gpu} cannot reach all memory of a plan: no kernels, and copies by the GPUs that own it");
        }
        let own = self.sharing.ends_for(&self.gpus, gpu, execution.endpoints).map(|ends| (gpu, ends));
        lock(&self.reached).note(execution.endpoints, asked, all, shut_out, own).host = host;
        Ok(reached)
    }

    /// Whether there is memory in a plan that not even copies of `gpu` may enter. Whether it reaches all has been asked.
    pub fn is_shut_out(&self, execution: &Execution<'_>, gpu: usize) -> bool {
        lock(&self.reached).of(execution.endpoints).is_some_and(|reach| reach.shut_out >> gpu & 1 != 0)
    }

    /// The ends of an execution as `gpu` has them, where they are not those of the execution. Whether it reaches them has been asked.
    pub fn own_ends(&self, execution: &Execution<'_>, gpu: usize) -> Option<Arc<[Endpoints]>> {
        if !self.sharing.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let reached = lock(&self.reached);
        reached.of(execution.endpoints)?.ends.iter().find(|(of, _)| *of == gpu).map(|(_, ends)| ends.clone())
    }

    /// The GPU that makes a copy in place of `gpu`: itself, or else one that has an end of it and may enter the other.
    pub fn able_to_copy(&self, gpu: usize, Segment { dst, src, bytes }: Segment) -> Result<usize, BackendError> {
        let ends = [(src, self.gpus.attributes(src)?), (dst, self.gpus.attributes(dst)?)];
        let owners = ends.iter().filter_map(|(_, known)| known.gpu()).filter(|owner| *owner < self.gpus.devices.len());
        for one in iter::once(gpu).chain(owners) {
            if self.copies_reach(one, src, bytes, &ends[0].1)? && self.copies_reach(one, dst, bytes, &ends[1].1)? {
                return Ok(one);
            }
        }
        Err(BackendError::NotSupported(format!(
            "no GPU may enter both {src:#x} and {dst:#x}: let the GPU of one into the pool or mapping of the other with cudaMemPoolSetAccess \
             or cuMemSetAccess"
        )))
    }
}
