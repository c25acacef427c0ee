//! Simulates a machine of which a probe can observe only the times of copies, to test the probe.
#![allow(dead_code)]

use crate::common::Random;
use mpgpu_core::model::SLOTS;
use mpgpu_core::model::simulate::{Executor, Scenario};
use mpgpu_core::plan::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{self, DeviceId, Machine, Topology};
use mpgpu_measure::probe::{Harness, Hop, Integrity, Pipeline, ProbeOptions, Probed, Timing, Work, probe};
use std::collections::HashSet;
use std::convert::Infallible;

/// Copy in progress: its earliest start in seconds, the bytes that remain, its resources, and the GPU whose earlier copies it must follow.
type Copying<'a> = (f64, f64, &'a [topology::ResourceId], Option<DeviceId>);

/// Simulated machine of which only the times of copies can be observed. Copies start one after the other as they are issued, and share
/// resources max-min fairly at every moment. Each time includes noise.
pub struct Hidden {
    pub machine: Machine,
    pub random: Random,
    /// Standard deviation of the noise, as a fraction of the time.
    pub noise: f64,
    pub dropping: HashSet<(DeviceId, DeviceId)>,
    /// Percentage of measurements that take up to 1.5 times as long, because something else uses the machine.
    pub spikes: u64,
    /// Percentage of measurements in which the calling thread is delayed and takes ten times as long to issue.
    pub held_up: u64,
    pub measured: f64,
    /// Additional time in seconds of a measurement in which several GPUs copy.
    pub gpu_join: f64,
    /// True if copies from one GPU to other GPUs run one after the other, in the order in which they are issued.
    pub in_order: bool,
    /// Machine with the rates that pipelines have, if they differ from the rates of plain copies.
    pub in_plans: Option<Machine>,
}

impl Hidden {
    pub fn new(topology: Topology, noise: f64, seed: u64) -> Hidden {
        let machine = Machine::new(topology).expect("well formed");
        Hidden {
            machine,
            random: Random(seed),
            noise,
            dropping: HashSet::new(),
            spikes: 0,
            held_up: 0,
            measured: 0.0,
            gpu_join: 0.0,
            in_order: false,
            in_plans: None,
        }
    }

    fn noisy(&mut self, seconds: f64) -> f64 {
        // Irwin-Hall: the sum of twelve uniform numbers is approximately normal with variance 1.
        let sum: f64 = (0..12).map(|_| self.random.below(1 << 20) as f64 / f64::from(1 << 20)).sum();
        let spike = if self.random.chance(self.spikes) { 1.0 + self.random.below(50) as f64 / 100.0 } else { 1.0 };
        seconds * spike * (1.0 + self.noise * (sum - 6.0)).max(0.5)
    }

    /// Returns `repetitions` measurements of this time, with noise.
    fn read(&mut self, seconds: f64, repetitions: u32) -> Vec<f64> {
        self.measured += seconds * f64::from(repetitions + 1);
        (0..repetitions).map(|_| self.noisy(seconds)).collect()
    }

    /// Returns the time in seconds until the last of these copies, which are issued one after the other, has finished.
    pub fn together(&self, hops: &[Hop]) -> f64 {
        let costs = self.machine.costs();
        let issuer = |hop: &Hop| if hop.from.is_host() { hop.to } else { hop.from };
        let joined = hops.iter().any(|hop| issuer(hop) != issuer(&hops[0]));
        let mut flows: Vec<Copying> = hops
            .iter()
            .enumerate()
            .map(|(index, hop)| {
                let route = self.machine.route(hop.from, hop.to).expect("only hops with a route are tried");
                let queue = (self.in_order && !hop.from.is_host() && !hop.to.is_host()).then_some(hop.from);
                (costs.copy + route.latency + costs.issue * index as f64, hop.bytes as f64, &route.resources[..], queue)
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
        now + if joined { self.gpu_join } else { 0.0 }
    }

    /// Returns the max-min fair rate of each copy that has started (progressive filling: Bertsekas and Gallager 1992).
    fn fair(&self, flows: &[Copying], now: f64) -> Vec<f64> {
        let resources = self.machine.resources();
        let mut left: Vec<f64> = resources.iter().map(|resource| resource.capacity).collect();
        let mut users = vec![0_u32; resources.len()];
        let mut rates = vec![0.0; flows.len()];
        let waits = |flow: usize| flows[flow].3.is_some() && flows[..flow].iter().any(|earlier| earlier.3 == flows[flow].3);
        let mut open: Vec<usize> = (0..flows.len()).filter(|flow| flows[*flow].0 <= now && !waits(*flow)).collect();
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

    /// Returns the simulated time in seconds of direct copies and pipelines on the machine.
    pub fn paths(&self, direct: &[Hop], staged: &[Pipeline]) -> f64 {
        let machine = self.in_plans.as_ref().unwrap_or(&self.machine);
        let (program, shapes) = program(direct, staged);
        let mut scenario = Scenario::new(machine, 1 << 40);
        let bound = scenario.bind(&program, &shapes).expect("only hops with a route are tried");
        scenario.execute(bound, Executor::Graph, 0);
        scenario.run().seconds
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
                    Mechanism::Thread => unreachable!("no probe asks for it"),
                }
            }
            Work::Paths { direct, staged } => self.paths(direct, staged),
        }
    }
}

/// Returns a program like those of plans: one internal stream for each copy, and two internal streams with alternating chunks for each
/// pipeline.
fn program(direct: &[Hop], staged: &[Pipeline]) -> (Program, Vec<Shape>) {
    let hops: Vec<Hop> = direct.iter().copied().chain(staged.iter().map(|pipeline| pipeline.hop)).collect();
    let kind = |device: DeviceId| if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
    let shape = |hop: &Hop| Shape {
        source: 0,
        src_device: hop.from,
        dst_device: hop.to,
        src_kind: kind(hop.from),
        dst_kind: kind(hop.to),
        bytes: hop.bytes,
    };
    let mut program = Program { transfers: hops.iter().map(|hop| hop.bytes).collect(), ..Program::default() };
    let lane = |program: &mut Program, from: DeviceId, to: DeviceId| {
        program.lanes.push(Lane::new(if from.is_host() { to } else { from }));
        LaneId(program.lanes.len() as u32 - 1)
    };
    let push = |program: &mut Program, lane, from, to, bytes, after: Option<OpId>| {
        let copies = [Copy { from, to, bytes }].into();
        program.ops.push(Op { lane, mechanism: Mechanism::Copy, copies, after: after.into_iter().collect() });
        OpId(program.ops.len() as u32 - 1)
    };
    for (transfer, hop) in (0..).zip(direct) {
        let lane = lane(&mut program, hop.from, hop.to);
        push(&mut program, lane, Place::Source { transfer, offset: 0 }, Place::Destination { transfer, offset: 0 }, hop.bytes, None);
    }
    let lanes: Vec<[LaneId; 2]> = staged
        .iter()
        .map(|&Pipeline { hop, via, chunks }| {
            let slot_bytes = hop.bytes.div_ceil(u64::from(chunks));
            program.rings.push(Ring { device: via, slot_bytes, slots: SLOTS.min(chunks) });
            [lane(&mut program, hop.from, via), lane(&mut program, via, hop.to)]
        })
        .collect();
    let mut freed: Vec<Vec<OpId>> = vec![Vec::new(); staged.len()];
    for chunk in 0..staged.iter().map(|pipeline| pipeline.chunks).max().unwrap_or(0) {
        for (index, hop) in staged.iter().enumerate().filter(|(_, of)| chunk < of.chunks).map(|(index, of)| (index, of.hop)) {
            let (Ring { slot_bytes, slots, .. }, transfer) = (program.rings[index], (direct.len() + index) as u32);
            let offset = u64::from(chunk) * slot_bytes;
            let bytes = slot_bytes.min(hop.bytes.saturating_sub(offset));
            if bytes == 0 {
                continue;
            }
            let slot = Place::Slot { ring: RingId(index as u32), slot: chunk % slots };
            let reused = chunk.checked_sub(slots).map(|earlier| freed[index][earlier as usize]);
            let arrived = push(&mut program, lanes[index][0], Place::Source { transfer, offset }, slot, bytes, reused);
            freed[index].push(push(&mut program, lanes[index][1], slot, Place::Destination { transfer, offset }, bytes, Some(arrived)));
        }
    }
    (program, hops.iter().map(shape).collect())
}

impl Harness for Hidden {
    type Error = Infallible;

    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Infallible> {
        let totals = self.read(self.seconds(work), repetitions);
        let operations = match work {
            Work::Together(hops) => hops.len() as u32,
            Work::Many { count, .. } => *count,
            Work::Paths { direct, staged } => direct.len() as u32 + staged.iter().map(|pipeline| 2 * pipeline.chunks).sum::<u32>(),
        };
        let held_up = self.held_up > 0 && self.random.chance(self.held_up);
        let issue = self.machine.costs().issue * f64::from(operations) * if held_up { 10.0 } else { 1.0 };
        Ok(totals.into_iter().map(|total| Timing { issue, total }).collect())
    }

    fn pass_flags(&mut self, _: [DeviceId; 2], rounds: u32, repetitions: u32) -> Result<Vec<f64>, Infallible> {
        // The time consists of the round trips, and of the time in which the host starts the work and detects its end.
        Ok(self.read(2.0 * f64::from(rounds) * self.machine.costs().hand_over + 10e-6, repetitions).into_iter().collect())
    }

    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Integrity, Infallible> {
        let drops = self.dropping.contains(&(from, to));
        Ok(if drops { Integrity::Lost { wrong: 4096, of: 65536 } } else { Integrity::Intact })
    }

    fn room(&self) -> u64 {
        1 << 30
    }
}

/// Returns what a probe knows before it measures: the pairs of devices with a path, and arbitrary rates.
pub fn blank(machine: &Machine) -> Machine {
    let mut topology = machine.topology().clone();
    topology.links.iter_mut().for_each(|link| (link.bandwidth, link.latency) = (1e9, 0.0));
    topology.shared.clear();
    topology.costs = topology::Costs::default();
    Machine::new(topology).expect("well formed")
}

pub fn probed(hidden: &mut Hidden) -> Probed {
    let base = blank(&hidden.machine);
    let Ok(found) = probe(&base, hidden, &ProbeOptions::default(), &mut |_| {});
    found
}
