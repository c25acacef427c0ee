//! From a set of copies that is slower than predicted to the resource behind it.
//!
//! Copies that a resource slows down together stay slow when the others are taken away. So the set is *shrunk* to a core in which no
//! copy can be spared: every copy of it draws on the resource, and its capacity is their bytes over their time. Then the core is *extended*.
//! A hop that draws on the resource too makes the core later when it is added, by its bytes over the capacity; all that do not are ruled
//! out together. What remains must stand in: a member can take the place of any copy of the core, and the core is as late as before.
//! Nothing is assumed about the hardware.

use super::session::Session;
use super::sharing::{Resource, Sample};
use super::{Rig, order};

/// A copy beside the core takes this part of the core's time alone. Then one that shares another, unknown capacity with a copy of the core,
/// even all of it, is done before the core is.
const BESIDE: f64 = 0.5;
/// How much later than expected a set with a member in it may be.
const TOO_LATE: f64 = 0.15;
/// What a member must add to the core's time, as a part of it, to be told from noise.
const VISIBLE: f64 = 0.04;

/// A hop, and how long its copy takes alone, in units of the set.
type Part = (usize, f64);

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
        let earlier = self.samples.iter().filter(|sample| sample.is_of(hops));
        let sample = match earlier.min_by(|a, b| self.excess(a).total_cmp(&self.excess(b))) {
            Some(sample) => sample.clone(),
            None => self.seen_twice(hops)?,
        };
        let mut failures = 0;
        for _ in 0..ROUNDS {
            if self.excess(&sample) <= self.options.tolerance || failures == 2 {
                break;
            }
            match self.shrink(hops, self.excess(&sample))? {
                Some(core) => {
                    let resource = self.extend(&core)?;
                    self.sharing.resources.push(resource);
                }
                None => failures += 1,
            }
        }
        self.unexplained += u32::from(self.excess(&sample) > self.options.tolerance);
        Ok(())
    }

    /// Measures these hops together, and where they are late asks whether all of them draw on one capacity: then without each of them the
    /// others take as much less as it carried. What many copies share is told apart from what fewer of them share before noise decides where
    /// a set that is late can be cut; and it is asked of sets that one piece of hardware serves.
    ///
    /// Memory slows down before it is full: three reads of four may take 15 % longer than their part. It is one capacity all the same if the
    /// others are earlier than where the one that is left out has nothing to do with them, by a third of the way to their part; and if they
    /// are late whichever is left out, those that are left are capacities too.
    pub fn explain_as_one(&mut self, hops: &[usize]) -> Result<(), R::Error> {
        if hops.len() < 3 || !self.may_measure() {
            return Ok(());
        }
        let sample = self.seen_twice(hops)?;
        if self.excess(&sample) <= self.options.tolerance {
            return Ok(());
        }
        let resource = self.shared_by(hops, &sample);
        let slowdown = sample.seconds / self.sharing.alone(&sample.copies);
        let mut softer = Vec::new();
        for without in 0..hops.len() {
            if !self.may_measure() {
                return Ok(());
            }
            let rest: Vec<usize> = hops.iter().enumerate().filter(|(at, _)| *at != without).map(|(_, &hop)| hop).collect();
            let sample = self.seen_twice(&rest)?;
            let part = self.sharing.seconds(&sample.copies).max(resource.load(&sample.copies) / resource.capacity);
            let unrelated = slowdown * self.sharing.alone(&sample.copies);
            let noise = 1.0 + 2.0 * self.options.tolerance;
            if sample.seconds < part / noise || sample.seconds > (part * noise).max((part + 2.0 * unrelated) / 3.0) {
                return Ok(());
            }
            if sample.seconds > part * (1.0 + self.options.tolerance) {
                softer.push(self.shared_by(&rest, &sample));
            }
        }
        self.sharing.resources.push(resource);
        // Not where some alone are late: that is noise, or something else that those share.
        if softer.len() == hops.len() {
            self.families.extend(softer.iter().map(|resource| resource.hops().collect()));
            self.sharing.resources.append(&mut softer);
        }
        Ok(())
    }

    /// A resource that only these hops draw on, as fast as they were.
    fn shared_by(&self, hops: &[usize], sample: &Sample) -> Resource {
        let mut resource = Resource { members: vec![false; self.hops.len()], capacity: 0.0, staged: None };
        hops.iter().for_each(|&hop| resource.members[hop] = true);
        resource.capacity = resource.load(&sample.copies) / sample.seconds;
        resource
    }

    /// Measures these hops together, twice where they are late: whatever disturbs a measurement makes it longer.
    pub fn seen_twice(&mut self, hops: &[usize]) -> Result<Sample, R::Error> {
        let sample = self.equal(hops)?;
        if self.excess(&sample) > self.options.tolerance { self.faster(sample, hops) } else { Ok(sample) }
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
                    let mut tried = self.equal(&rest)?;
                    if self.excess(&tried) > late {
                        tried = self.faster(tried, &rest)?;
                    }
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
        if self.excess(&sample) <= 0.8 * late {
            return Ok(None);
        }
        if self.is_a_tail(&core)? {
            return Ok(None);
        }
        let bytes: f64 = sample.copies.iter().map(|copy| copy.1).sum();
        let unit = sample.copies.iter().map(|&(hop, bytes)| bytes / self.sharing.rates[hop]).fold(0.0, f64::max);
        Ok(Some(Core { hops: core, capacity: bytes / sample.seconds, slowdown: sample.seconds / unit }))
    }

    /// Whether these hops are late for no other reason than that some end before others. The last ones then leave a capacity idle that they
    /// shared with the others, so the set takes longer than its busiest resource. With as many bytes of each as it gets of what is known
    /// to be shared, all end together, and in time.
    fn is_a_tail(&mut self, hops: &[usize]) -> Result<bool, R::Error> {
        let shares = self.sharing.fair(hops);
        let parts: Vec<(usize, f64)> = hops.iter().zip(shares).map(|(&hop, share)| (hop, share / self.sharing.rates[hop])).collect();
        if parts.iter().all(|part| part.1 == 1.0) {
            return Ok(false);
        }
        let (sample, _) = self.together(&parts)?;
        Ok(self.excess(&sample) <= self.options.tolerance)
    }

    /// Every hop that draws on the core's resource.
    fn extend(&mut self, core: &Core) -> Result<Resource, R::Error> {
        let mut resource = Resource { members: vec![false; self.hops.len()], capacity: core.capacity, staged: None };
        core.hops.iter().for_each(|&hop| resource.members[hop] = true);
        let touches = |hop: &usize| {
            let (from, to) = self.hops[*hop];
            core.hops.iter().any(|&other| self.hops[other].0 == from || self.hops[other].1 == to)
        };
        let others = (0..self.hops.len()).filter(|hop| !resource.members[*hop]);
        // Those that leave or enter the same devices are likelier members; the rest is mostly ruled out in a few steps.
        let (near, far): (Vec<usize>, Vec<usize>) = others.partition(touches);
        let mut suspects = Vec::new();
        for group in [near, far] {
            let beside = group.into_iter().map(|hop| (hop, self.units_beside(core, hop)));
            let is_visible = |(hop, units): &(usize, f64)| units * self.sharing.rates[*hop] / core.capacity > VISIBLE * core.slowdown;
            let (visible, hidden): (Vec<Part>, Vec<Part>) = beside.partition(is_visible);
            // Side by side only as many as leave the set free of order; who never can be beside the core must stand in.
            let mut waiting = visible;
            while !waiting.is_empty() {
                let mut set = core.hops.clone();
                let mut beside = Vec::new();
                let mut later = Vec::new();
                for part in waiting {
                    set.push(part.0);
                    if order::is_free(&self.hops, &set) {
                        beside.push(part);
                    } else {
                        set.pop();
                        later.push(part);
                    }
                }
                if beside.is_empty() {
                    suspects.extend(later.into_iter().map(|(hop, _)| hop));
                    break;
                }
                self.rule_out(core, &beside, &mut suspects)?;
                waiting = later;
            }
            suspects.extend(hidden.into_iter().map(|(hop, _)| hop));
        }
        for hop in suspects {
            resource.members[hop] = self.stands_in(core, hop)?;
        }
        Ok(resource)
    }

    /// How long a copy of `hop` beside the core may take alone, so that no capacity that is known makes it later than the core.
    fn units_beside(&self, core: &Core, hop: usize) -> f64 {
        let copies: Vec<(usize, f64)> = core.hops.iter().map(|&hop| (hop, self.sharing.rates[hop])).collect();
        let left = self.sharing.resources.iter().filter(|resource| resource.members[hop]).map(|resource| {
            // As near to the core's end as noise allows.
            (0.97 * core.slowdown * resource.capacity - resource.load(&copies)) / self.sharing.rates[hop]
        });
        left.fold(BESIDE * core.slowdown, f64::min)
    }

    /// Puts those of `candidates` among the suspects that make the core later beside it, as every member does: all at once first, halves
    /// where all are late.
    fn rule_out(&mut self, core: &Core, candidates: &[(usize, f64)], suspects: &mut Vec<usize>) -> Result<(), R::Error> {
        let Some(least) = candidates.iter().map(|&(hop, units)| units * self.sharing.rates[hop] / core.capacity).reduce(f64::min) else {
            return Ok(());
        };
        if !self.may_measure() {
            return Ok(());
        }
        let parts: Vec<(usize, f64)> = core.hops.iter().map(|&hop| (hop, 1.0)).chain(candidates.iter().copied()).collect();
        let copies: Vec<(usize, f64)> = parts.iter().map(|&(hop, units)| (hop, units * self.sharing.rates[hop])).collect();
        // Several candidates may be late for a reason of their own that is known: then only fewer can tell.
        if candidates.len() == 1 || self.sharing.seconds(&copies) <= core.slowdown {
            let (sample, scale) = self.together(&parts)?;
            if sample.seconds / scale - core.slowdown < least / 2.0 {
                return Ok(());
            }
        }
        if let [(hop, _)] = candidates {
            suspects.push(*hop);
            return Ok(());
        }
        let (first, second) = candidates.split_at(candidates.len() / 2);
        self.rule_out(core, first, suspects)?;
        self.rule_out(core, second, suspects)
    }

    /// Whether the core stays late with `hop` in the place of one of its copies, and of another one too: a hop that shares something
    /// else with one of them does not keep the rest late once it has taken its place.
    fn stands_in(&mut self, core: &Core, hop: usize) -> Result<bool, R::Error> {
        const PLACES: u32 = 2;
        let shares = |other: usize| self.sharing.resources.iter().any(|resource| resource.members[hop] && resource.members[other]);
        let mut places: Vec<usize> = (0..core.hops.len()).collect();
        places.sort_by_key(|place| !shares(core.hops[*place]));
        let mut told = 0;
        for place in places {
            if !self.may_measure() {
                return Ok(false);
            }
            let mut hops = core.hops.clone();
            hops[place] = hop;
            if !order::is_free(&self.hops, &hops) {
                continue;
            }
            let copies: Vec<(usize, f64)> = hops.iter().map(|&hop| (hop, self.sharing.rates[hop])).collect();
            let bytes = |skip: Option<usize>| copies.iter().filter(|copy| Some(copy.0) != skip).map(|copy| copy.1).sum::<f64>();
            let (with, without) = (bytes(None) / core.capacity, (bytes(Some(hop)) / core.capacity).max(self.sharing.seconds(&copies)));
            if with < (1.0 + VISIBLE) * without {
                // As late for a reason that is known: this place tells nothing.
                continue;
            }
            let parts: Vec<(usize, f64)> = hops.iter().map(|&hop| (hop, 1.0)).collect();
            // Where it is close, seen twice before it is believed.
            let mut latest = f64::INFINITY;
            for _ in 0..2 {
                let (sample, scale) = self.together(&parts)?;
                let seconds = sample.seconds / scale;
                if seconds < (with + without) / 2.0 {
                    return Ok(false);
                }
                latest = latest.min(seconds);
                if seconds > 0.2 * without + 0.8 * with && with > 1.2 * without {
                    break;
                }
            }
            // Later than a member would make it: there is another reason, and this place tells nothing either.
            if latest > (1.0 + TOO_LATE) * with {
                continue;
            }
            told += 1;
            if told == PLACES {
                break;
            }
        }
        // Who could not be beside the core has not been ruled out there: that takes two places.
        let mut beside = core.hops.clone();
        beside.push(hop);
        Ok(told >= if order::is_free(&self.hops, &beside) { 1 } else { PLACES })
    }
}
