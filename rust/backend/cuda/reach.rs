//! Which GPUs reach the memory of a plan by themselves. Found out once for each plan, because asking the driver for an address takes about
//! as long as a launch.

use super::Core;
use super::device::{Primary, lock};
use super::graph::Kept;
use super::kernel::Kernel;
use crate::backend::{BackendError, Endpoints, Execution};
use crate::ffi::bridge::Segment;
use std::collections::HashMap;
use std::iter;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// What was found out, plan by plan.
#[derive(Debug, Default)]
pub(super) struct Reached {
    /// By the address of the plan's endpoints.
    plans: HashMap<usize, Reach, ahash::RandomState>,
    /// With this many, those that are gone are dropped.
    sweep_at: usize,
}

#[derive(Debug)]
pub(super) struct Reach {
    /// Keeps the address from being used for another plan.
    plan: Weak<[Endpoints]>,
    /// The GPUs of which it is known: one bit for each.
    pub known: u64,
    /// Those whose kernels reach all ends.
    pub all: u64,
    /// Those whose copies may not enter all of them either.
    pub shut_out: u64,
    /// The ends as a GPU has them that has them at other addresses.
    pub ends: Vec<(usize, Arc<[Endpoints]>)>,
}

impl Reached {
    /// What is known of a plan with these ends.
    pub fn of(&self, ends: &Arc<[Endpoints]>) -> Option<&Reach> {
        self.plans.get(&Arc::as_ptr(ends).cast::<u8>().addr())
    }

    /// Notes what was found out of the GPUs in `known`, of one of them with ends of its own.
    pub fn note(&mut self, ends: &Arc<[Endpoints]>, known: u64, all: u64, shut_out: u64, own: Option<(usize, Arc<[Endpoints]>)>) {
        const SWEEP_FROM: usize = 1024;
        if self.plans.len() >= self.sweep_at.max(SWEEP_FROM) {
            self.plans.retain(|_, reach| reach.plan.strong_count() > 0);
            // At twice what lives, however much that is: a sweep looks at every one.
            self.sweep_at = 2 * self.plans.len();
        }
        let new = || Reach { plan: Arc::downgrade(ends), known: 0, all: 0, shut_out: 0, ends: Vec::new() };
        let reach = self.plans.entry(Arc::as_ptr(ends).cast::<u8>().addr()).or_insert_with(new);
        reach.all = reach.all & !known | all;
        reach.shut_out = reach.shut_out & !known | shut_out & known;
        reach.known |= known;
        reach.ends.retain(|(gpu, _)| own.as_ref().is_none_or(|own| own.0 != *gpu));
        reach.ends.extend(own);
    }
}

impl Core {
    /// The copy kernel of `gpu`, where there is one and it reaches every end of the execution.
    pub fn kernel_for<'a>(&self, execution: &Execution<'_>, primary: &'a Primary, gpu: usize) -> Result<Option<&'a Kernel>, BackendError> {
        Ok(if self.plan_is_reached(execution, gpu)? { primary.kernel() } else { None })
    }

    /// The GPU that does in place of `gpu` what a lane is for: itself, unless there is memory that it may not enter and another GPU whose
    /// memory is in the plan may enter all. Memory of pools and mappings is open to its own GPU alone until the caller lets others in,
    /// and that one reaches theirs.
    pub fn reaching(&self, execution: &Execution<'_>, gpu: usize, kept: &Kept) -> Result<usize, BackendError> {
        if self.is_reached(execution, gpu, kept)? {
            return Ok(gpu);
        }
        for ends in execution.endpoints.iter() {
            for address in [ends.dst, ends.src] {
                if let Some(owner) = self.attributes(address)?.gpu()
                    && owner < self.devices.len()
                    && self.is_reached(execution, owner, kept)?
                {
                    return Ok(owner);
                }
            }
        }
        Ok(gpu)
    }

    /// [`plan_is_reached`](Core::plan_is_reached), for a plan that keeps the answer.
    pub fn is_reached(&self, execution: &Execution<'_>, gpu: usize, kept: &Kept) -> Result<bool, BackendError> {
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
        let used = if self.sharing.has_opened.load(Ordering::Acquire) { 0 } else { self.used.load(Ordering::Acquire) };
        let mut asked = used | 1 << gpu;
        let (mut all, mut shut_out) = (asked, 0);
        let bits = |mask: u64| (0..self.devices.len()).filter(move |gpu| mask >> gpu & 1 != 0);
        for (ends, _) in execution.endpoints.iter().zip(&execution.program.transfers).filter(|(_, bytes)| **bytes > 0) {
            for address in [ends.dst, ends.src] {
                let known = self.attributes(address)?;
                for one in bits(asked & !shut_out) {
                    let reaches = self.kernel_reaches(one, address, &known);
                    if one != gpu && reaches.is_err() {
                        // For whoever asks for that GPU.
                        asked &= !(1 << one);
                        all &= asked;
                    } else if !reaches? {
                        all &= !(1 << one);
                        shut_out |= u64::from(!self.copies_reach(one, address, &known)?) << one;
                    }
                }
            }
        }
        for ring in execution.program.rings.iter().filter(|ring| !ring.device.is_host()) {
            for one in bits(all) {
                if !self.has_access(one, ring.device.0 as usize)? {
                    all &= !(1 << one);
                }
            }
        }
        let reached = all >> gpu & 1 != 0;
        if !reached {
            log::debug!("GPU {gpu} cannot reach all memory of a plan: no kernels, and copies by the GPUs that own it");
        }
        let own = self.ends_for(gpu, execution.endpoints).map(|ends| (gpu, ends));
        lock(&self.reached).note(execution.endpoints, asked, all, shut_out, own);
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
    pub fn able_to_copy(&self, gpu: usize, Segment { dst, src, .. }: Segment) -> Result<usize, BackendError> {
        let ends = [(src, self.attributes(src)?), (dst, self.attributes(dst)?)];
        let owners = ends.iter().filter_map(|(_, known)| known.gpu()).filter(|owner| *owner < self.devices.len());
        for one in iter::once(gpu).chain(owners) {
            if self.copies_reach(one, src, &ends[0].1)? && self.copies_reach(one, dst, &ends[1].1)? {
                return Ok(one);
            }
        }
        Err(BackendError::NotSupported(format!(
            "no GPU may enter both {src:#x} and {dst:#x}: let the GPU of one into the pool or mapping of the other with cudaMemPoolSetAccess \
             or cuMemSetAccess"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(address: u64) -> Arc<[Endpoints]> {
        Arc::new([Endpoints { dst: address, src: address }])
    }

    #[test]
    fn what_is_noted_of_gpus_one_after_the_other_is_known_together() {
        let (plan, own, other) = (ends(1), ends(2), ends(3));
        let mut reached = Reached::default();
        assert!(reached.of(&plan).is_none());
        reached.note(&plan, 0b011, 0b001, 0b010, None);
        let before = reached.of(&plan).map(|reach| (reach.all, reach.shut_out));
        assert_eq!(before, Some((0b001, 0b010)));
        reached.note(&plan, 0b110, 0b110, 0, Some((2, own.clone())));
        reached.note(&plan, 0b100, 0b100, 0, Some((2, other.clone())));
        let reach = reached.of(&plan).expect("noted");
        assert_eq!((reach.known, reach.all, reach.shut_out), (0b111, 0b111, 0));
        assert!(matches!(&reach.ends[..], [(2, ends)] if Arc::ptr_eq(ends, &other)));
        assert!(reached.of(&own).is_none());
    }

    #[test]
    fn plans_that_are_gone_are_dropped_and_those_that_live_are_not_looked_at_again_and_again() {
        let mut reached = Reached::default();
        let alive: Vec<_> = (0..3000).map(ends).collect();
        for (count, plan) in alive.iter().enumerate() {
            reached.note(plan, 1, 1, 0, None);
            assert_eq!(reached.plans.len(), count + 1);
        }
        // After 1024 and 2048, so not before twice as many.
        assert_eq!(reached.sweep_at, 4096);
        for address in 0..10_000 {
            reached.note(&ends(address), 1, 1, 0, None);
            assert!(reached.plans.len() <= 6000, "{}", reached.plans.len());
        }
        assert!(alive.iter().all(|plan| reached.of(plan).is_some()));
    }
}
