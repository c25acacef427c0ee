//! Sorts the GPUs of a machine and the transfers of a batch by their properties. Batches are planned in this canonical order, so that
//! neither the numbers of the GPUs nor the order of the transfers changes a plan.
//!
//! Each device gets a colour, which is a hash of its properties. In the first round, a colour depends on the routes that begin and end at
//! the device, on the resources of these routes, and on the data that the batch moves along them. In each further round, it also depends on
//! the colours of the devices at the other ends of the routes (Weisfeiler and Leman 1968). GPUs are numbered in the order of their colours,
//! and transfers are sorted by the new numbers. GPUs of the same colour keep their order, because they are interchangeable.

use super::options::{Options, Relays};
use super::planned::Plan;
use crate::program::{Gpus, Lane, Place, Program, Shape};
use crate::topology::{DeviceId, Machine};
use std::sync::Arc;

/// Number of rounds in which colours are refined. Three rounds distinguish most GPUs that differ: at most two routes and the resources that
/// the routes share lie between a GPU and the difference.
const ROUNDS: usize = 3;

/// Batch in canonical order, with the renumbered machine and options that belong to it.
pub(super) struct Canonical {
    pub machine: Machine,
    pub batch: Vec<Shape>,
    pub options: Options,
    /// Number of each GPU in the caller's machine, by its canonical number.
    gpus: Vec<u32>,
    /// Index of each transfer in the caller's batch, by its index in the canonical batch.
    transfers: Vec<u32>,
}

/// Combines two values to a hash (Steele, Lea and Flood 2014).
fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the colour of each device, GPUs first. If `are_shared`, transfers whose source other transfers also read affect the colours
/// differently from other transfers.
fn colours(machine: &Machine, batch: &[Shape], are_shared: bool) -> Vec<u64> {
    let devices: Vec<DeviceId> = machine.devices().collect();
    let (count, gpus) = (devices.len(), machine.gpu_count() as usize);
    let number = |device: DeviceId| if device.is_host() { gpus + !device.0 as usize } else { device.0 as usize };
    // Capacities are divided by the largest one, so that a machine that is twice as fast has the same colours.
    let largest = machine.resources().iter().map(|resource| resource.capacity).fold(f64::MIN_POSITIVE, f64::max);
    let most = batch.iter().map(|shape| shape.bytes).max().unwrap_or(0).max(1) as f64;
    let mut moved = vec![0_u64; count * count];
    for shape in batch {
        let kinds = mix(shape.src_kind as u64, mix(shape.dst_kind as u64, u64::from(are_shared && shape.source != 0)));
        let at = &mut moved[number(shape.src_device) * count + number(shape.dst_device)];
        *at = at.wrapping_add(mix(kinds, (shape.bytes as f64 / most).to_bits()));
    }
    let mut resources: Vec<u64> =
        machine.resources().iter().map(|resource| mix((resource.capacity / largest).to_bits(), resource.staged.to_bits())).collect();
    let mut colours: Vec<u64> = devices.iter().map(|device| if device.is_host() { number(*device) as u64 } else { u64::MAX }).collect();
    for _ in 0..ROUNDS {
        let (mut next, mut shared) = (colours.clone(), vec![0_u64; resources.len()]);
        for (from, src) in devices.iter().enumerate() {
            for (to, dst) in devices.iter().enumerate() {
                let mut edge = moved[from * count + to];
                if let Some(route) = machine.route(*src, *dst).filter(|_| from != to) {
                    edge = mix(edge, mix(route.latency.to_bits(), route.links.len() as u64));
                    for resource in route.resources.iter().map(|resource| resource.0 as usize) {
                        edge = edge.wrapping_add(resources[resource]);
                        shared[resource] = shared[resource].wrapping_add(mix(colours[from], mix(colours[to], 1)));
                    }
                }
                next[from] = next[from].wrapping_add(mix(edge, mix(colours[to], 2)));
                next[to] = next[to].wrapping_add(mix(edge, mix(colours[from], 3)));
            }
        }
        resources.iter_mut().zip(shared).for_each(|(resource, shared)| *resource = mix(*resource, shared));
        colours = next;
    }
    colours
}

impl Canonical {
    pub fn new(machine: &Machine, batch: &[Shape], options: &Options) -> Canonical {
        // A source number that only one transfer has is replaced by 0, which means that the source is not shared.
        let mut takers: ahash::HashMap<u32, u32> = ahash::HashMap::default();
        batch.iter().for_each(|shape| *takers.entry(shape.source).or_default() += 1);
        let of = |shape: &Shape| Shape { source: if takers[&shape.source] > 1 { shape.source } else { 0 }, ..*shape };
        let batch = &batch.iter().map(of).collect::<Vec<Shape>>();
        // GPUs are sorted first by the colours that ignore shared sources. Shared sources decide only between GPUs that are equal
        // otherwise, so a batch with shared sources has the same order as the batch without them.
        let colours = [false, true].map(|are_shared| colours(machine, batch, are_shared));
        let mut gpus: Vec<u32> = (0..machine.gpu_count()).collect();
        gpus.sort_by_key(|gpu| colours.each_ref().map(|colours| colours[*gpu as usize]));
        let mut new = vec![0; gpus.len()];
        (0..).zip(&gpus).for_each(|(number, gpu)| new[*gpu as usize] = number);
        let named = |device: DeviceId| if device.is_host() { device } else { DeviceId::gpu(new[device.0 as usize]) };
        let named = |shape: &Shape| Shape { src_device: named(shape.src_device), dst_device: named(shape.dst_device), ..*shape };
        let shapes: Vec<Shape> = batch.iter().map(named).collect();
        let mut transfers: Vec<u32> = (0..batch.len() as u32).collect();
        transfers.sort_by_key(|transfer| {
            let Shape { src_device, dst_device, src_kind, dst_kind, bytes, source } = shapes[*transfer as usize];
            (src_device, dst_device, std::cmp::Reverse(bytes), src_kind as u8, dst_kind as u8, source)
        });
        let relays = match options.relays {
            Relays::ALL => Relays::ALL,
            some => (0..).zip(&gpus).filter(|(_, gpu)| some.has(DeviceId::gpu(**gpu))).map(|(number, _)| number).collect(),
        };
        Canonical {
            machine: machine.renumbered(&gpus),
            batch: transfers.iter().map(|transfer| shapes[*transfer as usize]).collect(),
            options: Options { relays, ..*options },
            gpus,
            transfers,
        }
    }

    /// Returns the device with its number in the caller's machine.
    fn outside(&self, device: DeviceId) -> DeviceId {
        if device.is_host() { device } else { DeviceId::gpu(self.gpus[device.0 as usize]) }
    }

    /// Returns the index in the caller's batch of a transfer of the canonical batch.
    pub fn transfer(&self, transfer: usize) -> usize {
        self.transfers.get(transfer).map_or(transfer, |transfer| *transfer as usize)
    }

    /// Converts a plan of the canonical batch to a plan of the caller's batch, with the caller's numbers of GPUs and transfers.
    pub fn restored(&self, plan: Plan, batch: &[Shape], options: &Options) -> Plan {
        let mut transfers = plan.transfers.clone();
        for (own, &transfer) in plan.transfers.into_iter().zip(&self.transfers) {
            let plan = &mut transfers[transfer as usize];
            *plan = own;
            plan.shape = batch[transfer as usize];
            for path in Arc::make_mut(&mut plan.paths) {
                path.via = path.via.map(|device| self.outside(device));
                path.earlier.iter_mut().for_each(|device| *device = self.outside(*device));
            }
            for rejection in Arc::make_mut(&mut plan.rejected) {
                rejection.via = rejection.via.map(|device| self.outside(device));
            }
        }
        let mut program = Arc::unwrap_or_clone(plan.program);
        for Lane { device, also } in &mut program.lanes {
            *device = self.outside(*device);
            *also = also.iter().map(|device| self.outside(device)).collect::<Gpus>();
        }
        program.rings.iter_mut().for_each(|ring| ring.device = self.outside(ring.device));
        let sources = if program.sources.is_empty() { Vec::new() } else { batch.iter().map(|shape| shape.source).collect() };
        let program = Program { transfers: batch.iter().map(|shape| shape.bytes).collect(), sources, ..renamed(program, &self.transfers) };
        Plan { transfers, program: Arc::new(program), options: *options, ..plan }
    }
}

/// Returns the program with new transfer indices: each index `i` becomes `transfers[i]`.
pub(super) fn renamed(mut program: Program, transfers: &[u32]) -> Program {
    for copy in program.ops.iter_mut().flat_map(|op| &mut op.copies) {
        for place in [&mut copy.from, &mut copy.to] {
            if let Place::Source { transfer, .. } | Place::Destination { transfer, .. } = place {
                *transfer = transfers[*transfer as usize];
            }
        }
    }
    program
}
