//! Checks that a topology satisfies all rules before it is compiled. The errors name the node, link or shared resource that violates a
//! rule.

use super::error::refuse;
use super::file::shorten;
use super::{CostUnit, Costs, Link, LinkId, NodeId, NodeKind, Topology, TopologyError};
use ahash::{AHashMap, AHashSet};
use std::ops::RangeInclusive;

/// Maximum number of GPUs and host NUMA domains together, a multiple of 64. An NVLink domain of 144 GPUs has up to 72 hosts.
pub const MAX_DEVICES: usize = 256;
/// Maximum number of switches in a topology.
pub const MAX_SWITCHES: usize = 256;
/// Maximum number of directed links in a topology.
pub const MAX_LINKS: usize = 8_192;
/// Maximum number of shared resources in a topology.
pub const MAX_SHARED: usize = 1_024;
/// Range of accepted bandwidths and capacities, in bytes/s. A value outside this range probably has a wrong unit, and would make the
/// planner's arithmetic inexact.
pub const CAPACITY_RANGE: RangeInclusive<f64> = 1e3..=1e15;
/// Maximum accepted latency or fixed cost, in seconds.
pub const MAX_TIME: f64 = 1.0;

const MAX_NAME: usize = 64;

impl Topology {
    /// Checks this topology against the rules of `docs/reference/topology.md`. [`super::parse`] and [`super::Machine::new`] call this
    /// function.
    pub fn check(&self) -> Result<(), TopologyError> {
        self.check_counts()?;
        self.check_nodes()?;
        self.check_links()?;
        self.check_shared()?;
        check_costs(&self.costs)
    }

    fn check_counts(&self) -> Result<(), TopologyError> {
        let devices = self.nodes.iter().filter(|node| node.kind.is_device()).count();
        for (what, count, most) in [
            ("devices", devices, MAX_DEVICES),
            ("switches", self.nodes.len() - devices, MAX_SWITCHES),
            ("directed links", self.links.len(), MAX_LINKS),
            ("shared resources", self.shared.len(), MAX_SHARED),
        ] {
            if count > most {
                return refuse(format!(
                    "the topology has {count} {what}; at most {MAX_DEVICES} devices, {MAX_SWITCHES} switches, {MAX_LINKS} directed links and \
                     {MAX_SHARED} shared resources are allowed: a topology describes one node"
                ));
            }
        }
        if devices == 0 {
            return refuse("the topology has no device; declare at least one node of kind \"gpu\" or \"host\"".into());
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), TopologyError> {
        let mut seen = AHashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            check_name("node", index, &node.name, &mut seen)?;
        }
        Ok(())
    }

    fn check_links(&self) -> Result<(), TopologyError> {
        let mut seen = AHashSet::new();
        for (index, link) in self.links.iter().enumerate() {
            let entry = || format!("link {}", self.full_link_name(link));
            for end in [link.from, link.to] {
                if end.0 as usize >= self.nodes.len() {
                    let node = format!("with index {} (the topology has {})", end.0, self.nodes.len());
                    return Err(unknown_node(format!("link {}", index + 1), node));
                }
            }
            if link.from == link.to {
                return refuse(format!(
                    "{} connects a node of the topology to itself; copies inside a device need no link, so remove it",
                    entry()
                ));
            }
            if !seen.insert((link.from, link.to, link.kind.name())) {
                let remedy = "add the bandwidths up into one link, or give the second another kind";
                return refuse(format!("{} is given twice; {remedy}", entry()));
            }
            check_capacity("bandwidth", link.bandwidth, entry)?;
            check_time("latency", link.latency, entry)?;
        }
        Ok(())
    }

    fn check_shared(&self) -> Result<(), TopologyError> {
        let mut names = AHashMap::new();
        // Index of the shared resource that listed each link most recently. It reveals in one pass that a resource lists a link twice.
        let mut listed = vec![usize::MAX; self.links.len()];
        for (index, shared) in self.shared.iter().enumerate() {
            check_name("shared resource", index, &shared.name, &mut names)?;
            let entry = || format!("shared resource {:?}", shared.name);
            check_capacity("capacity", shared.capacity, entry)?;
            shared.staged.map_or(Ok(()), |staged| check_capacity("staged", staged, entry))?;
            if shared.links.is_empty() {
                return refuse(format!("{}: no link uses it; list the links that share it, or remove it", entry()));
            }
            for &id in &shared.links {
                let Some(last) = listed.get_mut(id.0 as usize) else {
                    return Err(unknown_link(entry(), format!("with index {} (the topology has {})", id.0, self.links.len())));
                };
                if *last == index {
                    let link = self.full_link_name(&self.links[id.0 as usize]);
                    return refuse(format!("{}: the link {link} is listed twice; list it once", entry()));
                }
                *last = index;
            }
        }
        Ok(())
    }

    /// Returns the nodes of kind `kind`, in the order of their numbers.
    pub(super) fn nodes_of(&self, kind: NodeKind) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().enumerate().filter(move |(_, node)| node.kind == kind).map(|(index, _)| NodeId(index as u32))
    }

    pub(super) fn node_name(&self, id: NodeId) -> &str {
        self.nodes.get(id.0 as usize).map_or("?", |node| &node.name)
    }

    fn full_link_name(&self, link: &Link) -> String {
        format!("{}>{}:{}", self.node_name(link.from), self.node_name(link.to), link.kind.name())
    }

    /// Returns the name of each link: `from>to`, or `from>to:kind` if links of several kinds connect the same two nodes in the same
    /// direction.
    pub(super) fn link_names(&self) -> Vec<String> {
        let mut kinds: AHashMap<(NodeId, NodeId), usize> = AHashMap::new();
        for link in &self.links {
            *kinds.entry((link.from, link.to)).or_default() += 1;
        }
        let name = |link: &Link| match kinds[&(link.from, link.to)] {
            1 => format!("{}>{}", self.node_name(link.from), self.node_name(link.to)),
            _ => self.full_link_name(link),
        };
        self.links.iter().map(name).collect()
    }

    /// Returns the link with the name `reference`: `from>to` or `from>to:kind`.
    pub(super) fn find_link(
        &self,
        nodes: &AHashMap<&str, NodeId>,
        links: &AHashMap<(NodeId, NodeId), Vec<LinkId>>,
        reference: &str,
        entry: impl Fn() -> String,
    ) -> Result<LinkId, TopologyError> {
        let quoted = || format!("{:?}", shorten(reference, 150));
        let unknown = || unknown_link(entry(), quoted());
        let (ends, kind) = match reference.split_once(':') {
            Some((ends, kind)) => (ends, Some(kind)),
            None => (reference, None),
        };
        let (from, to) = ends.split_once('>').ok_or_else(unknown)?;
        let ends = (*nodes.get(from).ok_or_else(unknown)?, *nodes.get(to).ok_or_else(unknown)?);
        let mut found =
            links.get(&ends).into_iter().flatten().filter(|id| kind.is_none_or(|kind| self.links[id.0 as usize].kind.name() == kind));
        let &first = found.next().ok_or_else(unknown)?;
        match found.next() {
            None => Ok(first),
            Some(&second) => {
                let [first, second] = [first, second].map(|id| self.full_link_name(&self.links[id.0 as usize]));
                refuse(format!("{}: {} could be {first} or {second}; give a unique name", entry(), quoted()))
            }
        }
    }
}

/// Checks the name of a node or shared resource. `what` is its kind, and `index` is its index in the topology. The name must differ from
/// all names in `seen`.
fn check_name<'a>(what: &str, index: usize, name: &'a str, seen: &mut AHashMap<&'a str, usize>) -> Result<(), TopologyError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    let entry = index + 1;
    if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(allowed) {
        let name = shorten(name, MAX_NAME);
        return refuse(format!("{what} {entry}: the name {name:?} must have 1 to 64 letters, digits, '_', '-' or '.'"));
    }
    match seen.insert(name, entry) {
        Some(first) => refuse(format!("{what} {entry}: the name {name:?} is already taken by {what} {first}; give each its own")),
        None => Ok(()),
    }
}

pub(super) fn unknown_node(entry: String, node: String) -> TopologyError {
    TopologyError::Invalid(format!("{entry}: there is no node {node}; declare it, or correct the name"))
}

fn unknown_link(entry: String, link: String) -> TopologyError {
    let forms = "links are named \"from>to\", or \"from>to:kind\" where several kinds join the same nodes";
    TopologyError::Invalid(format!("{entry}: there is no link {link}; {forms}"))
}

fn check_capacity(quantity: &str, value: f64, entry: impl Fn() -> String) -> Result<(), TopologyError> {
    if CAPACITY_RANGE.contains(&value) {
        return Ok(());
    }
    let (least, most) = (CAPACITY_RANGE.start(), CAPACITY_RANGE.end());
    let range = format!("must be between {least:e} and {most:e}; it is in bytes per second, 45 GB/s is 45e9");
    refuse(format!("{}: {quantity} = {value:e} {range}", entry()))
}

fn check_time(quantity: &str, value: f64, entry: impl Fn() -> String) -> Result<(), TopologyError> {
    if (0.0..=MAX_TIME).contains(&value) {
        return Ok(());
    }
    refuse(format!("{}: {quantity} = {value:e} must be between 0 and {MAX_TIME}; it is in seconds, 2 us is 2e-6", entry()))
}

fn check_costs(costs: &Costs) -> Result<(), TopologyError> {
    Costs::TABLE.iter().try_for_each(|cost| match (cost.unit, (cost.of)(costs)) {
        (CostUnit::Seconds, value) => check_time(cost.name, value, || "costs".into()),
        (CostUnit::Part, value) if value > 0.0 && value <= 1.0 => Ok(()),
        (CostUnit::Part, value) => {
            let meaning = "it is the part of a link's bandwidth that is reached";
            refuse(format!("costs: {} = {value:e} must be above 0 and at most 1; {meaning}", cost.name))
        }
    })
}
