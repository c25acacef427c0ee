//! Max-min fair rates: every flow as fast as it can be without slowing one that is no faster.
//!
//! Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): the rates of all flows rise together until a resource is
//! full; the flows on it keep their rate, the others rise on.

use crate::topology::{Resource, ResourceId};
use std::borrow::BorrowMut;

/// What a flow draws on, and what it gets.
#[derive(Copy, Clone, Debug)]
pub struct FlowRate<'a> {
    /// Everything that the flow draws on, as often as a byte of it passes. Not empty.
    pub resources: &'a [ResourceId],
    /// Capacity that a byte/s takes: 1, or more for a mechanism that does not use all that it occupies.
    pub draw: f64,
    /// The part of its bytes that is staged in host memory and stays in the cache there, which may draw more or less on a resource than others do.
    pub staged: f64,
    /// Bytes/s.
    pub rate: f64,
}

impl<'a> FlowRate<'a> {
    /// A flow that uses all that it occupies.
    pub fn new(resources: &'a [ResourceId]) -> Self {
        FlowRate { resources, draw: 1.0, staged: 0.0, rate: 0.0 }
    }
}

/// The resources of a machine, and the memory in which rates are found.
#[derive(Debug)]
pub struct MaxMin<'m> {
    resources: &'m [Resource],
    /// Resources that flows draw on at present, in the order in which flows name them.
    pub touched: Vec<u32>,
    uses: Vec<Load>,
    fixed: Vec<bool>,
    /// Resources that may still bind.
    limits: Vec<u32>,
}

/// What flows make of one resource.
#[derive(Clone, Debug, Default)]
struct Load {
    /// Capacity drawn by the flows at their rates.
    load: f64,
    /// The draw of flows whose rates still rise, and their number.
    rising: f64,
    open: u32,
    flows: Vec<u32>,
}

impl<'m> MaxMin<'m> {
    /// No flows yet.
    pub fn new(resources: &'m [Resource]) -> Self {
        let uses = vec![Load::default(); resources.len()];
        MaxMin { resources, touched: Vec::new(), uses, fixed: Vec::new(), limits: Vec::new() }
    }

    /// Capacity of resource `r` that flows draw on at their rates.
    pub fn load(&self, r: u32) -> f64 {
        self.uses[r as usize].load
    }

    /// Sets the rates of all flows.
    pub fn share<'a>(&mut self, flows: &mut [impl BorrowMut<FlowRate<'a>>]) {
        for r in self.touched.drain(..) {
            let of = &mut self.uses[r as usize];
            of.flows.clear();
            (of.load, of.rising, of.open) = (0.0, 0.0, 0);
        }
        for (index, flow) in flows.iter().enumerate() {
            let flow = flow.borrow();
            for &ResourceId(r) in flow.resources {
                let of = &mut self.uses[r as usize];
                if of.flows.is_empty() {
                    self.touched.push(r);
                }
                of.flows.push(index as u32);
                of.rising += flow.draw * self.resources[r as usize].draw(flow.staged);
                of.open += 1;
            }
        }
        self.fixed.clear();
        self.fixed.resize(flows.len(), false);
        self.limits.clone_from(&self.touched);
        loop {
            // By count: draws are subtracted in another order than added, so that what is left of them need not be exactly zero.
            let uses = &self.uses;
            self.limits.retain(|r| uses[*r as usize].open > 0);
            let level = |r: u32| (self.resources[r as usize].capacity - uses[r as usize].load) / uses[r as usize].rising;
            let levels = self.limits.iter().map(|&r| (level(r), r));
            let Some((rate, tightest)) = levels.reduce(|least, next| if next.0 < least.0 { next } else { least }) else { break };
            let rate = rate.max(0.0);
            for position in 0..self.uses[tightest as usize].flows.len() {
                let index = self.uses[tightest as usize].flows[position] as usize;
                if !std::mem::replace(&mut self.fixed[index], true) {
                    let flow = flows[index].borrow_mut();
                    flow.rate = rate;
                    for &ResourceId(r) in flow.resources {
                        let of = &mut self.uses[r as usize];
                        let draw = flow.draw * self.resources[r as usize].draw(flow.staged);
                        of.load += rate * draw;
                        of.rising -= draw;
                        of.open -= 1;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(capacity: f64, staged: f64) -> Resource {
        Resource { name: String::new(), capacity, staged }
    }

    fn rates(capacity: &[f64], flows: &[(&[u32], f64)]) -> Vec<f64> {
        let resources: Vec<Vec<ResourceId>> = flows.iter().map(|f| f.0.iter().map(|&r| ResourceId(r)).collect()).collect();
        let mut active: Vec<FlowRate<'_>> =
            flows.iter().zip(&resources).map(|(f, resources)| FlowRate { draw: f.1, ..FlowRate::new(resources) }).collect();
        let machine: Vec<Resource> = capacity.iter().map(|&capacity| resource(capacity, 1.0)).collect();
        let mut fair = MaxMin::new(&machine);
        fair.share(&mut active);
        // Twice, so that what the first time left behind would show.
        fair.share(&mut active);
        active.iter().map(|flow| flow.rate).collect()
    }

    #[test]
    fn flows_on_one_link_share_it_evenly() {
        assert_eq!(rates(&[12.0], &[(&[0], 1.0), (&[0], 1.0), (&[0], 1.0)]), [4.0, 4.0, 4.0]);
    }

    #[test]
    fn what_a_slow_flow_cannot_use_goes_to_the_others() {
        // The second flow's own link carries 2, so the first gets 10 of 12.
        assert_eq!(rates(&[12.0, 2.0], &[(&[0], 1.0), (&[0, 1], 1.0)]), [10.0, 2.0]);
    }

    #[test]
    fn three_flows_that_meet_leave_the_rest_of_the_next_link_to_the_fourth() {
        let flows: [(&[u32], f64); 4] = [(&[0, 1], 1.0), (&[1], 1.0), (&[1, 2], 1.0), (&[2], 1.0)];
        assert_eq!(rates(&[3.0, 3.0, 3.0], &flows), [1.0, 1.0, 1.0, 2.0]);
    }

    #[test]
    fn a_flow_that_passes_a_link_twice_gets_half_of_it() {
        assert_eq!(rates(&[12.0, 9.0], &[(&[0, 0], 1.0), (&[1], 1.0)]), [6.0, 9.0]);
        assert_eq!(rates(&[12.0], &[(&[0, 0], 1.0), (&[0], 1.0)]), [4.0, 4.0]);
    }

    #[test]
    fn staged_bytes_draw_their_own_part_of_a_capacity() {
        let [both, own] = [[ResourceId(0)], [ResourceId(0)]];
        let mut flows = [FlowRate { staged: 1.0, ..FlowRate::new(&both) }, FlowRate::new(&own)];
        // 12 for plain bytes, 24 for staged ones: 8 each are 4 and 8 of it.
        let machine = [resource(12.0, 0.5)];
        let mut fair = MaxMin::new(&machine);
        fair.share(&mut flows);
        assert_eq!((flows.map(|flow| flow.rate), fair.load(0)), ([8.0, 8.0], 12.0));
        fair.share(&mut flows[..1]);
        assert_eq!((flows[0].rate, fair.load(0)), (24.0, 12.0));
    }

    #[test]
    fn a_mechanism_that_wastes_capacity_draws_more_than_it_moves() {
        assert_eq!(rates(&[9.0], &[(&[0], 1.0 / 0.9)]), [9.0 / (1.0 / 0.9)]);
    }
}
