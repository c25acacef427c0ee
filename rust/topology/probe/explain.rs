//! From a set of copies that is slower than predicted to the resource behind it.
//!
//! Copies that a resource slows down together stay slow when the others are taken away. So the set is *shrunk* to a core in which no
//! copy can be spared: every copy of it draws on the resource, and its capacity is their bytes over their time. Then the core is *extended*:
//! a hop that draws on the resource too makes the core later by its bytes over the capacity, and one that does not leaves it
//! as it was. Nothing is assumed about the hardware.

use super::Rig;
use super::session::Session;
use super::sharing::{Resource, Sample};

/// A probe of the extension takes this part of the core's time alone. Then a hop that shares another, unknown capacity with one
/// copy of the core, even all of it, is done before the core is.
const PROBE: f64 = 0.5;
/// The core's lateness, as a part of its time, below which a hop cannot be told from noise.
const VISIBLE: f64 = 0.03;
/// The part of the expected lateness from which a hop is a member.
const MEMBER: f64 = 0.65;

/// Copies that are slow together, and none of which can be spared.
struct Core {
    hops: Vec<usize>,
    /// Bytes/s.
    capacity: f64,
    /// Time together over time alone.
    slowdown: f64,
}

impl<R: Rig> Session<'_, R> {
    /// Measures these hops together and finds resources until the time is explained, or nothing more comes of it.
    pub fn explain(&mut self, hops: &[usize]) -> Result<(), R::Error> {
        const ROUNDS: usize = 6;
        if hops.len() < 2 || !self.may_measure() {
            return Ok(());
        }
        let mut sample = self.equal(hops)?;
        if self.excess(&sample) > self.options.tolerance {
            // Seen twice before it is believed: whatever disturbs a measurement makes it longer.
            sample = self.faster(sample, hops)?;
        }
        for _ in 0..ROUNDS {
            if self.excess(&sample) <= self.options.tolerance {
                return Ok(());
            }
            let Some(core) = self.shrink(hops, self.excess(&sample))? else { break };
            let resource = self.extend(&core)?;
            self.sharing.resources.push(resource);
        }
        self.unexplained += u32::from(self.excess(&sample) > self.options.tolerance);
        Ok(())
    }

    fn faster(&mut self, sample: Sample, hops: &[usize]) -> Result<Sample, R::Error> {
        let again = self.equal(hops)?;
        Ok(if again.seconds < sample.seconds { again } else { sample })
    }

    /// The fewest of these hops that are still late by half as much (or by 30 %): halves are left out first, then quarters, down to single
    /// hops (delta debugging: Zeller and Hildebrandt 2002).
    fn shrink(&mut self, hops: &[usize], excess: f64) -> Result<Option<Core>, R::Error> {
        let late = (excess / 2.0).clamp(self.options.tolerance, 0.3);
        let mut core = hops.to_vec();
        let mut sample = None;
        let mut piece = core.len().div_ceil(2);
        loop {
            let mut at = 0;
            while at < core.len() && core.len() > 2 {
                if !self.may_measure() {
                    return Ok(None);
                }
                let end = (at + piece).min(core.len());
                let rest: Vec<usize> = core[..at].iter().chain(&core[end..]).copied().collect();
                if rest.len() >= 2 {
                    let tried = self.equal(&rest)?;
                    if self.excess(&tried) > late {
                        (core, sample) = (rest, Some(tried));
                        continue;
                    }
                }
                at = end;
            }
            if piece == 1 {
                break;
            }
            piece = piece.div_ceil(2);
        }
        let first = match sample {
            Some(sample) => sample,
            None => self.equal(&core)?,
        };
        let sample = self.faster(first, &core)?;
        if self.excess(&sample) <= late / 2.0 {
            return Ok(None);
        }
        let bytes: f64 = sample.copies.iter().map(|copy| copy.1).sum();
        let unit = sample.copies.iter().map(|&(hop, bytes)| bytes / self.sharing.rates[hop]).fold(0.0, f64::max);
        Ok(Some(Core { hops: core, capacity: bytes / sample.seconds, slowdown: sample.seconds / unit }))
    }

    /// Every hop that draws on the core's resource.
    fn extend(&mut self, core: &Core) -> Result<Resource, R::Error> {
        let mut resource = Resource { members: vec![false; self.hops.len()], capacity: core.capacity };
        core.hops.iter().for_each(|&hop| resource.members[hop] = true);
        let touches = |hop: &usize| {
            let (from, to) = self.hops[*hop];
            core.hops.iter().any(|&other| self.hops[other].0 == from || self.hops[other].1 == to)
        };
        let others = (0..self.hops.len()).filter(|hop| !resource.members[*hop]);
        // Those that leave or enter the same devices are likelier members; the rest is mostly ruled out in a few steps.
        let (near, far): (Vec<usize>, Vec<usize>) = others.partition(touches);
        for group in [near, far] {
            let candidates = group.into_iter().map(|hop| (hop, self.probe_units(core, hop)));
            let visible = |(hop, units): &(usize, f64)| units * self.sharing.rates[*hop] / core.capacity > VISIBLE * core.slowdown;
            let candidates: Vec<(usize, f64)> = candidates.filter(visible).collect();
            self.add_members(core, &candidates, &mut resource)?;
        }
        Ok(resource)
    }

    /// How long a probe of `hop` may take alone, so that no capacity that is known makes it later than the core.
    fn probe_units(&self, core: &Core, hop: usize) -> f64 {
        let copies: Vec<(usize, f64)> = core.hops.iter().map(|&hop| (hop, self.sharing.rates[hop])).collect();
        let left = self.sharing.resources.iter().filter(|resource| resource.members[hop]).map(|resource| {
            // As near to the core's end as noise allows.
            (0.97 * core.slowdown * resource.capacity - resource.load(&copies)) / self.sharing.rates[hop]
        });
        left.fold(PROBE * core.slowdown, f64::min)
    }

    fn add_members(&mut self, core: &Core, candidates: &[(usize, f64)], resource: &mut Resource) -> Result<(), R::Error> {
        let Some(least) = candidates.iter().map(|&(hop, units)| units * self.sharing.rates[hop] / core.capacity).reduce(f64::min) else {
            return Ok(());
        };
        if !self.may_measure() {
            return Ok(());
        }
        let parts: Vec<(usize, f64)> = core.hops.iter().map(|&hop| (hop, 1.0)).chain(candidates.iter().copied()).collect();
        let copies: Vec<(usize, f64)> = parts.iter().map(|&(hop, units)| (hop, units * self.sharing.rates[hop])).collect();
        // Several candidates may be late for a reason of their own: then only single ones tell.
        if candidates.len() == 1 || self.sharing.seconds(&copies) <= core.slowdown {
            let mut later = self.later(core, &parts)?;
            if candidates.len() == 1 && (0.3..1.0).contains(&(later / least)) {
                later = later.min(self.later(core, &parts)?);
            }
            if later < if candidates.len() == 1 { MEMBER * least } else { 0.5 * least } {
                return Ok(());
            }
        }
        if let [(hop, _)] = candidates {
            resource.members[*hop] = true;
            return Ok(());
        }
        let (first, second) = candidates.split_at(candidates.len() / 2);
        self.add_members(core, first, resource)?;
        self.add_members(core, second, resource)
    }

    /// By how much these are later than the core alone, in its unit.
    fn later(&mut self, core: &Core, parts: &[(usize, f64)]) -> Result<f64, R::Error> {
        let (sample, scale) = self.together(parts)?;
        Ok(sample.seconds / scale - core.slowdown)
    }
}
