//! Derives the topology of a process to which only some of the node's GPUs are visible, or all of them in another order.

use super::{Link, LinkId, Node, NodeId, NodeKind, SharedResource, Topology};
use std::collections::BTreeSet;

impl Topology {
    /// Returns this topology with only the given GPUs, in the given order: GPU `n` of the result is GPU `gpus[n]` of this topology. Links
    /// of other GPUs are removed, also from shared resources. Returns `None` if a GPU does not exist or is listed twice.
    ///
    /// Nodes named `gpu` and a number are renamed to the new numbers. Shared resources whose names contain such names are renamed too.
    pub fn with_gpus(&self, gpus: &[u32]) -> Option<Topology> {
        let all: Vec<NodeId> = self.nodes_of(NodeKind::Gpu).collect();
        let chosen: Vec<NodeId> = gpus.iter().map(|gpu| all.get(*gpu as usize).copied()).collect::<Option<_>>()?;
        if chosen.iter().collect::<BTreeSet<_>>().len() != chosen.len() {
            return None;
        }
        let numbered = all.iter().enumerate().all(|(number, node)| self.node_name(*node) == format!("gpu{number}"));
        let rename = |name: &str| if numbered { renumbered(name, gpus) } else { name.to_owned() };

        // The selected GPUs replace the GPU nodes in order, so that devices and switches keep their order.
        let mut turn = chosen.iter();
        let kept: Vec<NodeId> = (0..self.nodes.len() as u32)
            .map(NodeId)
            .filter_map(|node| if self.nodes[node.0 as usize].kind == NodeKind::Gpu { turn.next().copied() } else { Some(node) })
            .collect();
        let place = |node: NodeId| kept.iter().position(|other| *other == node).map(|index| NodeId(index as u32));
        let mut links = Vec::new();
        let mut link_place = vec![None; self.links.len()];
        for (link, place_of) in self.links.iter().zip(&mut link_place) {
            if let Some((from, to)) = place(link.from).zip(place(link.to)) {
                *place_of = Some(LinkId(links.len() as u32));
                links.push(Link { from, to, ..link.clone() });
            }
        }
        let mut names = BTreeSet::new();
        let mut shared = Vec::new();
        for resource in &self.shared {
            let links: Vec<LinkId> = resource.links.iter().filter_map(|link| link_place.get(link.0 as usize).copied().flatten()).collect();
            if links.is_empty() {
                continue;
            }
            let name = rename(&resource.name);
            let numbers = (2..).map(|number| format!("{name}.{number}"));
            let Some(name) = std::iter::once(name.clone()).chain(numbers).find(|name| names.insert(name.clone())) else { continue };
            shared.push(SharedResource { name, links, ..resource.clone() });
        }
        let node = |id: &NodeId| {
            let Node { name, kind } = &self.nodes[id.0 as usize];
            Node { name: if *kind == NodeKind::Gpu { rename(name) } else { name.clone() }, kind: *kind }
        };
        let nodes = kept.iter().map(node).collect();
        Some(Topology { nodes, links, shared, ..self.clone() })
    }
}

/// Returns `name` after replacing the number that follows each `gpu` by the GPU's new number. If the GPU is not selected, the number is
/// replaced by `-other`.
fn renumbered(name: &str, gpus: &[u32]) -> String {
    let mut pieces = name.split("gpu");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let end = piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len());
        let (digits, rest) = piece.split_at(end);
        let number = digits.parse::<u32>().ok();
        text += "gpu";
        match number.map(|old| gpus.iter().position(|gpu| *gpu == old)) {
            Some(Some(new)) => text += &new.to_string(),
            Some(None) => text += "-other",
            None => text += digits,
        }
        text += rest;
    }
    // Names are ASCII text of at most 64 bytes.
    text.truncate(60);
    text
}
