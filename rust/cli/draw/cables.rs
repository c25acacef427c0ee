//! Groups the links of a topology into cables: the two directions between two nodes form one cable.

use mpgpu_core::topology::{LinkId, LinkKind, SharedResource, Topology};

/// Combined capacity of several links, in bytes/s.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Together {
    pub capacity: f64,
    /// Combined capacity in bytes/s for data that is staged in host memory. `None` if it is equal to `capacity`.
    pub staged: Option<f64>,
}

impl Together {
    pub fn of(shared: &SharedResource) -> Together {
        Together { capacity: shared.capacity, staged: shared.staged }
    }

    /// Formats `capacity` and `staged`, for example `101 GB/s, staged 92 GB/s` if `rate` returns `101 GB/s` for the capacity.
    pub fn text(self, rate: impl Fn(f64) -> String) -> String {
        rate(self.capacity) + &self.staged.map_or(String::new(), |staged| format!(", staged {}", rate(staged)))
    }
}

/// Connection between two nodes `a` and `b` of a topology, which consists of up to two links of one kind, one for each direction.
#[derive(Clone, Debug, PartialEq)]
pub struct Cable {
    /// Index of node `a` in the topology, where the cable's first link starts.
    pub a: usize,
    pub b: usize,
    pub kind: LinkKind,
    /// Capacity of the direction from `a` to `b` in bytes/s; `None` if there is no link in this direction.
    pub there: Option<f64>,
    /// Capacity of the direction from `b` to `a` in bytes/s; `None` if there is no link in this direction.
    pub back: Option<f64>,
    /// Latency of the cable in seconds: the larger of the latencies of its two directions.
    pub latency: f64,
    /// Combined capacity of both directions of the cable; `None` if the topology does not limit it.
    pub both: Option<Together>,
    /// Other shared resources that the direction from `a` to `b` uses, as indices into the list that [`cables`] returns.
    pub marks_there: Vec<usize>,
    /// Other shared resources that the direction from `b` to `a` uses, as indices into the list that [`cables`] returns.
    pub marks_back: Vec<usize>,
    links: [Option<LinkId>; 2],
}

impl Cable {
    /// True if both directions have the same capacity and use the same shared resources.
    pub fn is_even(&self) -> bool {
        self.there == self.back && self.marks_there == self.marks_back
    }

    /// Returns the capacity of the faster direction in bytes/s.
    pub fn capacity(&self) -> f64 {
        self.there.unwrap_or(0.0).max(self.back.unwrap_or(0.0))
    }
}

/// Returns the cables of a topology, in the order of their first links. Also returns the shared resources, except those that only combine
/// the two directions of one cable.
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
