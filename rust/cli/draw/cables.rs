//! The links of a topology as a person counts them: both directions of one kind between two nodes are one cable.

use mpgpu_core::topology::{LinkId, LinkKind, SharedResource, Topology};

/// What links carry together, bytes/s.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Together {
    pub capacity: f64,
    /// Of bytes that are staged in host memory, where that is another.
    pub staged: Option<f64>,
}

impl Together {
    pub fn of(shared: &SharedResource) -> Together {
        Together { capacity: shared.capacity, staged: shared.staged }
    }

    /// Both figures in words: `101 GB/s, staged 92 GB/s` for a `rate` that gives `101 GB/s`.
    pub fn text(self, rate: impl Fn(f64) -> String) -> String {
        rate(self.capacity) + &self.staged.map_or(String::new(), |staged| format!(", staged {}", rate(staged)))
    }
}

/// What joins two nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Cable {
    /// Index of the node that stands first in the topology's link.
    pub a: usize,
    pub b: usize,
    pub kind: LinkKind,
    /// Bytes/s from `a` to `b`; `None` where there is no way in that direction.
    pub there: Option<f64>,
    /// Bytes/s from `b` to `a`.
    pub back: Option<f64>,
    /// The larger of both directions, seconds.
    pub latency: f64,
    /// Both directions, where they are a resource of its own.
    pub both: Option<Together>,
    /// Numbers of the other shared resources that its way from `a` to `b` draws on: indices into the list that comes with the cables.
    pub marks_there: Vec<usize>,
    /// The same of its way back.
    pub marks_back: Vec<usize>,
    links: [Option<LinkId>; 2],
}

impl Cable {
    /// Whether nothing tells its directions apart.
    pub fn is_even(&self) -> bool {
        self.there == self.back && self.marks_there == self.marks_back
    }

    /// The larger of its directions, bytes/s.
    pub fn capacity(&self) -> f64 {
        self.there.unwrap_or(0.0).max(self.back.unwrap_or(0.0))
    }
}

/// The cables in the order of their first links, and the shared resources that are more than both directions of one cable.
pub fn cables(topology: &Topology) -> (Vec<Cable>, Vec<&SharedResource>) {
    let mut cables: Vec<Cable> = Vec::new();
    for (index, link) in (0..).zip(&topology.links) {
        let (from, to, id) = (link.from.0 as usize, link.to.0 as usize, LinkId(index));
        let way_back = |cable: &&mut Cable| (cable.a, cable.b, cable.kind) == (to, from, link.kind) && cable.back.is_none();
        match cables.iter_mut().find(way_back) {
            Some(cable) => {
                cable.back = Some(link.bandwidth);
                cable.latency = cable.latency.max(link.latency);
                cable.links[1] = Some(id);
            }
            None => cables.push(Cable {
                a: from,
                b: to,
                kind: link.kind,
                there: Some(link.bandwidth),
                back: None,
                latency: link.latency,
                both: None,
                marks_there: Vec::new(),
                marks_back: Vec::new(),
                links: [Some(id), None],
            }),
        }
    }
    let mut rest = Vec::new();
    for shared in &topology.shared {
        let draws = |link: Option<LinkId>| link.is_some_and(|link| shared.links.contains(&link));
        let both = |cable: &&mut Cable| shared.links.len() == 2 && cable.links.iter().all(|link| draws(*link));
        match cables.iter_mut().find(both) {
            Some(cable) if cable.both.is_some_and(|both| both.capacity <= shared.capacity) => {}
            Some(cable) => cable.both = Some(Together::of(shared)),
            None => {
                for cable in &mut cables {
                    let [there, back] = cable.links.map(draws);
                    cable.marks_there.extend(there.then_some(rest.len()));
                    cable.marks_back.extend(back.then_some(rest.len()));
                }
                rest.push(shared);
            }
        }
    }
    (cables, rest)
}
