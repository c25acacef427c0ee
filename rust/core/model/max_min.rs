//! Computes max-min fair rates: the rate of a flow can increase only if the rate of another flow that is not faster decreases.
//!
//! The algorithm is progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2). The rates of all flows rise together until
//! a resource is full. The flows on that resource then keep their rates, and the rates of the others continue to rise.

use crate::topology::{Resource, ResourceId};
use std::borrow::BorrowMut;

/// Rate of one flow, with the resources that the flow uses.
#[derive(Copy, Clone, Debug)]
pub struct FlowRate<'a> {
    /// Resources that the flow uses. A resource that a byte passes twice is listed twice. Not empty.
    pub resources: &'a [ResourceId],
    /// Capacity that the flow uses for each byte/s of its rate. It is 1, or more for a copy mechanism that occupies more capacity than the
    /// data needs.
    pub draw: f64,
    /// Fraction of the flow's data that is staged in host memory and stays in the processor's cache. Cached data may use more or less
    /// capacity of a resource than other data does.
    pub staged: f64,
    /// Rate of the flow, bytes/s.
    pub rate: f64,
}

impl<'a> FlowRate<'a> {
    /// Returns a flow that uses exactly as much capacity as its data needs.
    pub fn new(resources: &'a [ResourceId]) -> Self {
        FlowRate { resources, draw: 1.0, staged: 0.0, rate: 0.0 }
    }
}

/// Computation of the max-min fair rates of flows on the resources of a machine. It keeps its working memory for later calls.
#[derive(Debug)]
pub struct MaxMin<'m> {
    resources: &'m [Resource],
    /// Indices of the resources that flows currently use, in the order in which the flows list them.
    pub touched: Vec<u32>,
    uses: Vec<Load>,
    fixed: Vec<bool>,
    /// Indices of the resources that may still limit a flow.
    limits: Vec<u32>,
}

/// Load that all flows cause on one resource.
#[derive(Clone, Debug, Default)]
struct Load {
    /// Capacity that flows with already fixed rates use, bytes/s.
    load: f64,
    /// Capacity that all flows with still rising rates use together for each byte/s of their common rate.
    rising: f64,
    /// Number of flows on the resource whose rates still rise.
    open: u32,
    flows: Vec<u32>,
}

impl<'m> MaxMin<'m> {
    /// Creates a computation on these resources, without flows.
    pub fn new(resources: &'m [Resource]) -> Self {
        let uses = vec![Load::default(); resources.len()];
        MaxMin { resources, touched: Vec::new(), uses, fixed: Vec::new(), limits: Vec::new() }
    }

    /// Returns the capacity of resource `r` that all flows together use at their current rates, in bytes/s.
    pub fn load(&self, r: u32) -> f64 {
        self.uses[r as usize].load
    }

    /// Computes the rates of all flows and stores them in the flows.
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
            // The number of flows with rising rates is counted, because rounding may leave `rising` different from 0 after the last of them
            // is subtracted.
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
        // If the first call leaves any state behind, the second call returns wrong rates.
        fair.share(&mut active);
        active.iter().map(|flow| flow.rate).collect()
    }

    #[test]
    fn flows_on_one_link_share_it_evenly() {
        assert_eq!(rates(&[12.0], &[(&[0], 1.0), (&[0], 1.0), (&[0], 1.0)]), [4.0, 4.0, 4.0]);
    }

    #[test]
    fn what_a_slow_flow_cannot_use_goes_to_the_others() {
        // The second flow's own link has a capacity of 2, so the first flow gets 10 of 12.
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
        // The capacity is 24 for staged data and 12 for other data. A flow with the rate 8 therefore uses a capacity of 4 if its data is
        // staged, and of 8 if it is not.
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
