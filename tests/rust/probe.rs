//! The probe against hidden machines: what it fits from their times must predict times that it has not seen.

use crate::common::{Random, topology as random_topology};
use mpgpu::backend::MemoryKind;
use mpgpu::model::PathModel;
use mpgpu::plan::{self, Mechanism, Options, Shape};
use mpgpu::topology::probe::{Hop, ProbeOptions, Probed, Rig, Timing, Verdict, Work, probe};
use mpgpu::topology::{self, DeviceId, Link, LinkId, LinkKind, Machine, Node, NodeId, NodeKind, SharedResource, Topology};
use std::collections::HashSet;
use std::convert::Infallible;

/// A machine that tells nothing but times. Copies start one by one as they are issued and share resources max-min fairly, from moment to
/// moment; each time comes with noise.
struct Hidden {
    machine: Machine,
    random: Random,
    /// Standard deviation, as a part of the time.
    noise: f64,
    dropping: HashSet<(DeviceId, DeviceId)>,
    measured: f64,
    runs: u32,
}

impl Hidden {
    fn new(topology: Topology, noise: f64, seed: u64) -> Hidden {
        let machine = Machine::new(topology).expect("well formed");
        Hidden { machine, random: Random(seed), noise, dropping: HashSet::new(), measured: 0.0, runs: 0 }
    }

    fn noisy(&mut self, seconds: f64) -> f64 {
        // Irwin-Hall: the sum of twelve uniform numbers is near enough to a normal one of variance 1.
        let sum: f64 = (0..12).map(|_| self.random.below(1 << 20) as f64 / f64::from(1 << 20)).sum();
        seconds * (1.0 + self.noise * (sum - 6.0)).max(0.5)
    }

    /// The median of so many noisy readings.
    fn read(&mut self, seconds: f64, repetitions: u32) -> f64 {
        self.measured += seconds * f64::from(repetitions + 1);
        self.runs += 1;
        let mut readings: Vec<f64> = (0..repetitions).map(|_| self.noisy(seconds)).collect();
        readings.sort_by(f64::total_cmp);
        readings[readings.len() / 2]
    }

    /// Seconds until the last of these copies, issued one after another, has arrived.
    fn together(&self, hops: &[Hop]) -> f64 {
        let costs = self.machine.costs();
        let mut flows: Vec<(f64, f64, &[topology::ResourceId])> = hops
            .iter()
            .enumerate()
            .map(|(index, hop)| {
                let route = self.machine.route(hop.from, hop.to).expect("only hops with a route are tried");
                (costs.copy + route.latency + costs.issue * index as f64, hop.bytes as f64, &route.resources[..])
            })
            .collect();
        let mut now = 0.0;
        while !flows.is_empty() {
            let rates = self.fair(&flows, now);
            let next_start = flows.iter().map(|flow| flow.0).filter(|start| *start > now).fold(f64::INFINITY, f64::min);
            let next_end = flows.iter().zip(&rates).filter(|(_, rate)| **rate > 0.0).map(|(flow, rate)| now + flow.1 / rate);
            let next = next_end.fold(next_start, f64::min);
            for (flow, rate) in flows.iter_mut().zip(&rates) {
                flow.1 -= rate * (next - now);
            }
            now = next;
            flows.retain(|flow| flow.0 > now || flow.1 > 1.0);
        }
        now
    }

    /// Max-min fair rates of those that have started (progressive filling: Bertsekas and Gallager 1992).
    fn fair(&self, flows: &[(f64, f64, &[topology::ResourceId])], now: f64) -> Vec<f64> {
        let resources = self.machine.resources();
        let mut left: Vec<f64> = resources.iter().map(|resource| resource.capacity).collect();
        let mut users = vec![0_u32; resources.len()];
        let mut rates = vec![0.0; flows.len()];
        let mut open: Vec<usize> = (0..flows.len()).filter(|flow| flows[*flow].0 <= now).collect();
        open.iter().flat_map(|flow| flows[*flow].2).for_each(|resource| users[resource.0 as usize] += 1);
        while !open.is_empty() {
            let share = |index: usize| left[index] / f64::from(users[index]);
            let tightest = (0..left.len()).filter(|index| users[*index] > 0).min_by(|a, b| share(*a).total_cmp(&share(*b)));
            let tightest = tightest.expect("every copy draws on its link");
            let rate = share(tightest);
            let (done, rest): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|flow| flows[**flow].2.iter().any(|resource| resource.0 as usize == tightest));
            for flow in done {
                rates[flow] = rate;
                for resource in flows[flow].2 {
                    left[resource.0 as usize] -= rate;
                    users[resource.0 as usize] -= 1;
                }
            }
            open = rest;
        }
        rates
    }

    fn seconds(&self, work: &Work<'_>) -> f64 {
        let costs = self.machine.costs();
        match *work {
            Work::Together(hops) => self.together(hops),
            Work::Many { hop, count, mechanism } => {
                let rate = self.machine.route(hop.from, hop.to).expect("a hop").bandwidth;
                let moved = (u64::from(count) * hop.bytes) as f64 / rate;
                match mechanism {
                    Mechanism::Copy => (costs.copy + costs.issue * f64::from(count - 1)).max(costs.copy + moved),
                    Mechanism::Batch => costs.batch + costs.batch_segment * f64::from(count) + moved,
                    Mechanism::Kernel => costs.kernel + costs.kernel_segment * f64::from(count) + moved / costs.kernel_efficiency,
                }
            }
            Work::Staged { hop, via, chunks } => {
                let route = |from, to| self.machine.route(from, to).expect("a hop");
                let path = PathModel::new(&self.machine, &[route(hop.from, via), route(via, hop.to)]);
                path.seconds(costs, hop.bytes, chunks) + costs.join
            }
        }
    }
}

impl Rig for Hidden {
    type Error = Infallible;

    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Timing, Infallible> {
        let total = self.read(self.seconds(work), repetitions);
        let operations = match work {
            Work::Together(hops) => hops.len() as u32,
            Work::Many { count, .. } => *count,
            Work::Staged { chunks, .. } => 2 * chunks,
        };
        Ok(Timing { issue: self.machine.costs().issue * f64::from(operations), total })
    }

    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Verdict, Infallible> {
        let drops = self.dropping.contains(&(from, to));
        Ok(if drops { Verdict::Lost { wrong: 4096, of: 65536 } } else { Verdict::Intact })
    }

    fn room(&self) -> u64 {
        1 << 30
    }
}

/// What is known of a machine beforehand: who can be copied between, and nothing true about how fast.
fn blank(machine: &Machine) -> Machine {
    let mut topology = machine.topology().clone();
    topology.links.iter_mut().for_each(|link| (link.bandwidth, link.latency) = (1e9, 0.0));
    topology.shared.clear();
    topology.costs = topology::Costs::default();
    Machine::new(topology).expect("well formed")
}

fn probed(hidden: &mut Hidden) -> Probed {
    let base = blank(&hidden.machine);
    let Ok(found) = probe(&base, hidden, &ProbeOptions::default(), &mut |_| {});
    found
}

/// |predicted / true - 1| for random sets of concurrent copies of random sizes, sorted.
fn errors(hidden: &Hidden, found: &Topology, seed: u64) -> Vec<f64> {
    let machine = Machine::new(found.clone()).expect("a probed topology is well formed");
    let mut random = Random(seed);
    let devices: Vec<DeviceId> = hidden.machine.devices().collect();
    let hops: Vec<_> = devices.iter().flat_map(|&from| devices.iter().map(move |&to| (from, to))).collect();
    let hops: Vec<_> = hops.into_iter().filter(|(from, to)| from != to && hidden.machine.route(*from, *to).is_some()).collect();
    let mut errors = Vec::new();
    for _ in 0..200 {
        let count = 1 + random.below(10);
        let set: Vec<Hop> = (0..count)
            .map(|_| {
                let (from, to) = hops[random.below(hops.len() as u64) as usize];
                Hop { from, to, bytes: (8 << 20) + random.below(120 << 20) }
            })
            .collect();
        let mut loads = vec![0.0; machine.resources().len()];
        for hop in &set {
            let route = machine.route(hop.from, hop.to).expect("what can be copied has a route");
            route.resources.iter().for_each(|resource| loads[resource.0 as usize] += hop.bytes as f64);
        }
        let busiest = loads.iter().zip(machine.resources()).map(|(load, resource)| load / resource.capacity).fold(0.0, f64::max);
        let predicted = machine.costs().copy + busiest;
        errors.push((predicted / hidden.together(&set) - 1.0).abs());
    }
    errors.sort_by(f64::total_cmp);
    errors
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

#[test]
fn presets_are_found_again() {
    for (seed, name) in (1..).zip(topology::preset_names()) {
        let mut hidden = Hidden::new(topology::preset(name).expect("listed"), 0.02, seed);
        let found = probed(&mut hidden);
        let errors = errors(&hidden, &found.topology, 100 + seed);
        println!(
            "{name}: {} measurements, {:.1} s of copies, {} links, {} shared; residuals {:?}; held out: median {:.3}, 90 % {:.3}, worst {:.3}",
            found.measurements,
            hidden.measured,
            found.topology.links.len(),
            found.topology.shared.len(),
            found.residuals,
            quantile(&errors, 0.5),
            quantile(&errors, 0.9),
            quantile(&errors, 1.0)
        );
        if std::env::var("SHOW").is_ok() {
            for g in &found.groups {
                println!("   {} {:.1} {:?}", g.name, g.capacity / 1e9, g.hops.len());
            }
            println!("{}", found.topology.to_toml());
        }
    }
}

#[test]
fn random_machines_are_predicted() {
    let mut all = Vec::new();
    for seed in 0..30 {
        let mut random = Random(seed);
        let topology = random_topology(&mut random, 8);
        let mut hidden = Hidden::new(topology, 0.02, seed);
        let found = probed(&mut hidden);
        let hops = found.hops.len();
        if hops == 0 {
            continue;
        }
        let errors = errors(&hidden, &found.topology, 100 + seed);
        println!(
            "{seed}: {hops} hops, {} measurements, {:.1} s, {} of {} shared; {:?}; median {:.3}, 90 % {:.3}, worst {:.3}; {:?}",
            found.measurements,
            hidden.measured,
            found.groups.len(),
            hidden.machine.topology().shared.len(),
            found.residuals,
            quantile(&errors, 0.5),
            quantile(&errors, 0.9),
            quantile(&errors, 1.0),
            found.notes
        );
        all.extend(errors);
    }
    all.sort_by(f64::total_cmp);
    println!("all: {} {} {}", quantile(&all, 0.5), quantile(&all, 0.9), quantile(&all, 0.97));
}
