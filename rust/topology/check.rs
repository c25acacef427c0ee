//! The rules that a topology must keep before it is compiled, and the names by which errors speak of its parts.

use super::file::shorten;
use super::{Costs, Link, LinkId, NodeId, NodeKind, Topology, TopologyError};
use ahash::AHashMap;
use std::ops::RangeInclusive;

/// The most GPUs and host NUMA domains together. The largest NVLink domains have 72 GPUs and 36 hosts.
pub const MAX_DEVICES: usize = 128;
/// The most switches.
pub const MAX_SWITCHES: usize = 256;
/// The most directed links.
pub const MAX_LINKS: usize = 8_192;
/// The most shared resources.
pub const MAX_SHARED: usize = 1_024;
/// Bandwidths and capacities that are taken, in bytes/s: a value outside is a wrong unit, and would ruin the planner's arithmetic.
pub const CAPACITY_RANGE: RangeInclusive<f64> = 1e3..=1e15;
/// The largest latency or fixed cost that is taken, in seconds.
pub const MAX_TIME: f64 = 1.0;

const MAX_NAME: usize = 64;

impl Topology {
    /// Whether this topology keeps the rules of `docs/topology.md`. [`super::parse`] and [`super::Machine::new`] check by themselves.
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
                return Err(TopologyError::TooMany { what, count });
            }
        }
        if devices == 0 { Err(TopologyError::NoDevice) } else { Ok(()) }
    }

    fn check_nodes(&self) -> Result<(), TopologyError> {
        let mut seen = AHashMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let entry = || format!("node {}", index + 1);
            check_name(&node.name, entry)?;
            if let Some(first) = seen.insert(node.name.as_str(), index) {
                return Err(TopologyError::NameTaken { entry: entry(), name: node.name.clone(), taken_by: format!("node {}", first + 1) });
            }
        }
        Ok(())
    }

    fn check_links(&self) -> Result<(), TopologyError> {
        let mut seen = AHashMap::new();
        for (index, link) in self.links.iter().enumerate() {
            let entry = || format!("link {}", self.full_link_name(link));
            for end in [link.from, link.to] {
                if end.0 as usize >= self.nodes.len() {
                    return Err(TopologyError::UnknownNode {
                        entry: format!("link {}", index + 1),
                        node: format!("number {} of {}", end.0, self.nodes.len()),
                    });
                }
            }
            if link.from == link.to {
                return Err(TopologyError::SelfLink { entry: entry() });
            }
            if seen.insert((link.from, link.to, link.kind.name()), index).is_some() {
                return Err(TopologyError::DuplicateLink { entry: entry() });
            }
            check_capacity("bandwidth", link.bandwidth, entry)?;
            check_time("latency", link.latency, entry)?;
        }
        Ok(())
    }

    fn check_shared(&self) -> Result<(), TopologyError> {
        let mut names = AHashMap::new();
        // The last shared resource that listed each link: one pass finds what is listed twice.
        let mut listed = vec![usize::MAX; self.links.len()];
        for (index, shared) in self.shared.iter().enumerate() {
            check_name(&shared.name, || format!("shared resource {}", index + 1))?;
            let entry = || format!("shared resource {:?}", shared.name);
            if let Some(first) = names.insert(shared.name.as_str(), index) {
                return Err(TopologyError::NameTaken {
                    entry: format!("shared resource {}", index + 1),
                    name: shared.name.clone(),
                    taken_by: format!("shared resource {}", first + 1),
                });
            }
            check_capacity("capacity", shared.capacity, entry)?;
            shared.staged.map_or(Ok(()), |staged| check_capacity("staged", staged, entry))?;
            if shared.links.is_empty() {
                return Err(TopologyError::EmptyShared { entry: entry() });
            }
            for &id in &shared.links {
                let Some(last) = listed.get_mut(id.0 as usize) else {
                    return Err(TopologyError::UnknownLink { entry: entry(), link: format!("number {} of {}", id.0, self.links.len()) });
                };
                if *last == index {
                    return Err(TopologyError::RepeatedLink { entry: entry(), link: self.full_link_name(&self.links[id.0 as usize]) });
                }
                *last = index;
            }
        }
        Ok(())
    }

    /// The nodes that are devices of this kind, in the order in which they are numbered.
    pub(super) fn nodes_of(&self, kind: NodeKind) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.iter().enumerate().filter(move |(_, node)| node.kind == kind).map(|(index, _)| NodeId(index as u32))
    }

    pub(super) fn node_name(&self, id: NodeId) -> &str {
        self.nodes.get(id.0 as usize).map_or("?", |node| &node.name)
    }

    fn full_link_name(&self, link: &Link) -> String {
        format!("{}>{}:{}", self.node_name(link.from), self.node_name(link.to), link.kind.name())
    }

    /// `from>to` for each link, with `:kind` added where links of several kinds join the same two nodes in the same direction.
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

    /// The link that `reference` names: `from>to` or `from>to:kind`.
    pub(super) fn find_link(
        &self,
        nodes: &AHashMap<&str, NodeId>,
        links: &AHashMap<(NodeId, NodeId), Vec<LinkId>>,
        reference: &str,
        entry: impl Fn() -> String,
    ) -> Result<LinkId, TopologyError> {
        let quoted = || format!("{:?}", shorten(reference, 150));
        let unknown = || TopologyError::UnknownLink { entry: entry(), link: quoted() };
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
            Some(second) => Err(TopologyError::AmbiguousLink {
                entry: entry(),
                link: quoted(),
                first: self.full_link_name(&self.links[first.0 as usize]),
                second: self.full_link_name(&self.links[second.0 as usize]),
            }),
        }
    }
}

fn check_name(name: &str, entry: impl Fn() -> String) -> Result<(), TopologyError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) {
        Ok(())
    } else {
        Err(TopologyError::BadName { entry: entry(), name: shorten(name, MAX_NAME) })
    }
}

fn check_capacity(quantity: &'static str, value: f64, entry: impl Fn() -> String) -> Result<(), TopologyError> {
    if CAPACITY_RANGE.contains(&value) { Ok(()) } else { Err(TopologyError::Capacity { entry: entry(), quantity, value }) }
}

fn check_time(quantity: &'static str, value: f64, entry: impl Fn() -> String) -> Result<(), TopologyError> {
    if (0.0..=MAX_TIME).contains(&value) { Ok(()) } else { Err(TopologyError::Time { entry: entry(), quantity, value }) }
}

fn check_costs(costs: &Costs) -> Result<(), TopologyError> {
    // Taken apart so that a new cost cannot be forgotten here.
    let Costs {
        copy,
        issue,
        chunk,
        relay_chunk,
        join,
        gpu_join,
        lane,
        pull,
        graph,
        graph_node,
        graph_first_node,
        batch,
        batch_segment,
        kernel,
        kernel_segment,
        kernel_efficiency,
    } = *costs;
    for (quantity, value) in [
        ("copy", copy),
        ("issue", issue),
        ("chunk", chunk),
        ("relay_chunk", relay_chunk),
        ("join", join),
        ("gpu_join", gpu_join),
        ("lane", lane),
        ("pull", pull),
        ("graph", graph),
        ("graph_node", graph_node),
        ("batch", batch),
        ("batch_segment", batch_segment),
        ("kernel", kernel),
        ("kernel_segment", kernel_segment),
        ("graph_node", graph_node),
        ("graph_first_node", graph_first_node),
    ] {
        check_time(quantity, value, || "costs".into())?;
    }
    if kernel_efficiency > 0.0 && kernel_efficiency <= 1.0 { Ok(()) } else { Err(TopologyError::Efficiency { value: kernel_efficiency }) }
}
