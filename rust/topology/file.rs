//! The TOML form of a topology. `docs/topology.md` describes it.

use super::probe::{Entry, Record};
use super::{Costs, Link, LinkId, LinkKind, Node, NodeId, NodeKind, SharedResource, Topology, TopologyError, preset_names};
use ahash::AHashMap;
use serde::Deserialize;
use std::fmt::Write;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// The longest text that [`parse`] looks at.
pub const MAX_FILE_BYTES: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    name: String,
    #[serde(default)]
    description: String,
    node: Vec<NodeEntry>,
    #[serde(default)]
    link: Vec<LinkEntry>,
    #[serde(default)]
    shared: Vec<SharedEntry>,
    #[serde(default)]
    costs: CostsEntry,
    probe: Option<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    name: String,
    kind: NodeKindEntry,
    peer: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum NodeKindEntry {
    Gpu,
    Host,
    Switch,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    #[serde(default)]
    between: Vec<[String; 2]>,
    #[serde(default)]
    one_way: Vec<[String; 2]>,
    kind: LinkKindEntry,
    bandwidth: f64,
    bandwidth_back: Option<f64>,
    #[serde(default)]
    latency: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum LinkKindEntry {
    Nvlink,
    Pcie,
    Host,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SharedEntry {
    name: String,
    capacity: f64,
    staged: Option<f64>,
    links: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CostsEntry {
    copy: Option<f64>,
    issue: Option<f64>,
    chunk: Option<f64>,
    relay_chunk: Option<f64>,
    join: Option<f64>,
    gpu_join: Option<f64>,
    lane: Option<f64>,
    pull: Option<f64>,
    graph: Option<f64>,
    graph_node: Option<f64>,
    graph_first_node: Option<f64>,
    batch: Option<f64>,
    batch_segment: Option<f64>,
    kernel: Option<f64>,
    kernel_segment: Option<f64>,
    kernel_efficiency: Option<f64>,
}

/// The topology that a TOML text describes, checked.
///
/// Strict: an unknown key, a wrong type, a name that is not declared or a value out of range is an error that says where it is.
pub fn parse(text: &str) -> Result<Topology, TopologyError> {
    Ok(parse_probed(text)?.0)
}

/// As [`parse`], with what the text remembers of the probe that it comes from, if it comes from one.
pub fn parse_probed(text: &str) -> Result<(Topology, Option<Record>), TopologyError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(TopologyError::TooLong);
    }
    let file: FileEntry = toml::from_str(text).map_err(|error| TopologyError::Syntax(toml_place(text, &error)))?;
    let mut topology = Topology {
        name: file.name,
        description: file.description,
        nodes: file.node.into_iter().enumerate().map(node).collect::<Result<_, _>>()?,
        links: Vec::new(),
        shared: Vec::new(),
        costs: costs(&file.costs),
    };
    // Checked before names are looked up, so that none is there twice.
    topology.check()?;

    let nodes = topology.nodes.iter().enumerate().map(|(index, node)| (node.name.as_str(), NodeId(index as u32)));
    let nodes: AHashMap<&str, NodeId> = nodes.collect();
    for (index, entry) in file.link.iter().enumerate() {
        add_links(index, entry, &nodes, &mut topology.links)?;
    }

    let mut by_ends: AHashMap<(NodeId, NodeId), Vec<LinkId>> = AHashMap::new();
    for (index, link) in topology.links.iter().enumerate() {
        by_ends.entry((link.from, link.to)).or_default().push(LinkId(index as u32));
    }
    let mut shared = Vec::with_capacity(file.shared.len());
    for entry in file.shared {
        let place = || format!("shared resource {:?}", shorten(&entry.name, 64));
        let links = entry.links.iter().map(|link| topology.find_link(&nodes, &by_ends, link, place)).collect::<Result<_, _>>()?;
        shared.push(SharedResource { name: entry.name, capacity: entry.capacity, staged: entry.staged, links });
    }
    topology.shared = shared;
    topology.check()?;
    let gpus = topology.nodes_of(NodeKind::Gpu).count();
    let record = file.probe.map(|entry| entry.record(gpus)).transpose()?;
    Ok((topology, record))
}

/// Line, column and message in one line. The error's own form repeats the whole line of the text, a megabyte perhaps.
pub(crate) fn toml_place(text: &str, error: &toml::de::Error) -> String {
    let message = shorten(error.message(), 300).replace('\n', ", ");
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else {
        return message;
    };
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let column = before[start..].chars().count() + 1;
    let source = shorten(text[start..].lines().next().unwrap_or("").trim(), 60);
    format!("line {line}, column {column} (`{source}`): {message}")
}

/// At most `most` characters: what a hostile file can put into an error is bounded.
pub(crate) fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Reads and parses a file. Reads no further than [`MAX_FILE_BYTES`], so that a wrong path (`/dev/zero`) does no harm.
pub(super) fn read(path: &Path) -> Result<(Topology, Option<Record>), TopologyError> {
    let mut bytes = Vec::new();
    let result = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes));
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => {
            let presets = preset_names().collect::<Vec<_>>().join(", ");
            return Err(TopologyError::NotFound { name: path.to_string_lossy().into_owned(), presets });
        }
        Err(error) => return Err(TopologyError::Unreadable { path: path.into(), reason: error.to_string() }),
        Ok(_) => {}
    }
    let in_file = |source| TopologyError::InFile { path: path.into(), source: Box::new(source) };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(in_file(TopologyError::TooLong));
    }
    let text = String::from_utf8(bytes).map_err(|error| in_file(TopologyError::Syntax(format!("the file is not UTF-8 text: {error}"))))?;
    parse_probed(&text).map_err(in_file)
}

fn node((index, entry): (usize, NodeEntry)) -> Result<Node, TopologyError> {
    let kind = match (entry.kind, entry.peer) {
        (NodeKindEntry::Switch, peer) => NodeKind::Switch { peer: peer.unwrap_or(false) },
        (_, Some(_)) => return Err(TopologyError::PeerOnDevice { entry: format!("node {} ({:?})", index + 1, shorten(&entry.name, 64)) }),
        (NodeKindEntry::Gpu, None) => NodeKind::Gpu,
        (NodeKindEntry::Host, None) => NodeKind::Host,
    };
    Ok(Node { name: entry.name, kind })
}

fn add_links(index: usize, entry: &LinkEntry, nodes: &AHashMap<&str, NodeId>, links: &mut Vec<Link>) -> Result<(), TopologyError> {
    let place = || format!("[[link]] {}", index + 1);
    let pairs = match (entry.between.is_empty(), entry.one_way.is_empty()) {
        (false, true) => &entry.between,
        (true, false) => &entry.one_way,
        _ => return Err(TopologyError::LinkEnds { entry: place() }),
    };
    let both_ways = !entry.between.is_empty();
    if !both_ways && entry.bandwidth_back.is_some() {
        return Err(TopologyError::BandwidthBack { entry: place() });
    }
    let kind = match entry.kind {
        LinkKindEntry::Nvlink => LinkKind::Nvlink,
        LinkKindEntry::Pcie => LinkKind::Pcie,
        LinkKindEntry::Host => LinkKind::Host,
    };
    let find = |name: &String| {
        let unknown = || TopologyError::UnknownNode { entry: place(), node: format!("{:?}", shorten(name, 64)) };
        nodes.get(name.as_str()).copied().ok_or_else(unknown)
    };
    for [first, second] in pairs {
        let (from, to) = (find(first)?, find(second)?);
        links.push(Link { from, to, kind, bandwidth: entry.bandwidth, latency: entry.latency });
        if both_ways {
            let bandwidth = entry.bandwidth_back.unwrap_or(entry.bandwidth);
            links.push(Link { from: to, to: from, kind, bandwidth, latency: entry.latency });
        }
    }
    Ok(())
}

fn costs(entry: &CostsEntry) -> Costs {
    let default = Costs::default();
    Costs {
        copy: entry.copy.unwrap_or(default.copy),
        issue: entry.issue.unwrap_or(default.issue),
        chunk: entry.chunk.unwrap_or(default.chunk),
        // Files that tell the two not apart mean both.
        relay_chunk: entry.relay_chunk.or(entry.chunk).unwrap_or(default.relay_chunk),
        join: entry.join.unwrap_or(default.join),
        gpu_join: entry.gpu_join.or(entry.join).unwrap_or(default.gpu_join),
        lane: entry.lane.unwrap_or(default.lane),
        pull: entry.pull.unwrap_or(default.pull),
        graph: entry.graph.unwrap_or(default.graph),
        graph_node: entry.graph_node.unwrap_or(default.graph_node),
        graph_first_node: entry.graph_first_node.unwrap_or(default.graph_first_node),
        batch: entry.batch.unwrap_or(default.batch),
        batch_segment: entry.batch_segment.unwrap_or(default.batch_segment),
        kernel: entry.kernel.unwrap_or(default.kernel),
        kernel_segment: entry.kernel_segment.unwrap_or(default.kernel_segment),
        kernel_efficiency: entry.kernel_efficiency.unwrap_or(default.kernel_efficiency),
    }
}

impl Topology {
    /// The text of a file from which [`parse`] gives this topology back, equal in every value, if [`Topology::check`] accepts it
    /// and the text keeps [`MAX_FILE_BYTES`].
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    fn write_toml(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "name = {}", quoted(&self.name))?;
        writeln!(out, "description = {}", quoted(&self.description))?;
        writeln!(out, "\nnode = [")?;
        for Node { name, kind } in &self.nodes {
            let kind = match kind {
                NodeKind::Gpu => "kind = \"gpu\"",
                NodeKind::Host => "kind = \"host\"",
                NodeKind::Switch { peer: true } => "kind = \"switch\", peer = true",
                NodeKind::Switch { peer: false } => "kind = \"switch\", peer = false",
            };
            writeln!(out, "    {{ name = {}, {kind} }},", quoted(name))?;
        }
        writeln!(out, "]")?;

        let mut links = self.links.as_slice();
        while let Some((first, _)) = links.split_first() {
            // An entry covers the longest run of links that it can: pairs of opposite links, or links of one direction.
            let back = links.get(1).filter(|back| is_opposite(first, back));
            let step = if back.is_some() { 2 } else { 1 };
            let count = links
                .chunks_exact(step)
                .take_while(|chunk| {
                    let same = is_like(first, &chunk[0]);
                    match (back, chunk) {
                        (Some(back), [forth, other]) => same && is_opposite(forth, other) && is_like(back, other),
                        _ => same,
                    }
                })
                .count();
            let (run, rest) = links.split_at(count * step);
            links = rest;

            writeln!(out, "\n[[link]]\n{} = [", if back.is_some() { "between" } else { "one_way" })?;
            for link in run.iter().step_by(step) {
                writeln!(out, "    [{}, {}],", quoted(self.node_name(link.from)), quoted(self.node_name(link.to)))?;
            }
            writeln!(out, "]\nkind = \"{}\"\nbandwidth = {:e}", first.kind.name(), first.bandwidth)?;
            if let Some(back) = back.filter(|back| back.bandwidth != first.bandwidth) {
                writeln!(out, "bandwidth_back = {:e}", back.bandwidth)?;
            }
            writeln!(out, "latency = {:e}", first.latency)?;
        }

        let names = self.link_names();
        for SharedResource { name, capacity, staged, links } in &self.shared {
            writeln!(out, "\n[[shared]]\nname = {}\ncapacity = {capacity:e}", quoted(name))?;
            if let Some(staged) = staged {
                writeln!(out, "staged = {staged:e}")?;
            }
            writeln!(out, "links = [")?;
            for link in links {
                writeln!(out, "    {},", quoted(names.get(link.0 as usize).map_or("?", String::as_str)))?;
            }
            writeln!(out, "]")?;
        }

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
        } = self.costs;
        writeln!(
            out,
            "\n[costs]\ncopy = {copy:e}\nissue = {issue:e}\nchunk = {chunk:e}\nrelay_chunk = {relay_chunk:e}\njoin = {join:e}\ngpu_join = {gpu_join:e}\nlane = {lane:e}"
        )?;
        writeln!(
            out,
            "pull = {pull:e}\ngraph = {graph:e}\ngraph_node = {graph_node:e}\ngraph_first_node = {graph_first_node:e}\nbatch = {batch:e}"
        )?;
        writeln!(out, "batch_segment = {batch_segment:e}\nkernel = {kernel:e}\nkernel_segment = {kernel_segment:e}")?;
        writeln!(out, "kernel_efficiency = {kernel_efficiency:e}")
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// Whether one `between` entry can give both.
fn is_opposite(link: &Link, back: &Link) -> bool {
    (link.from, link.to, link.kind) == (back.to, back.from, back.kind) && link.latency == back.latency
}

/// Whether one entry can give both, ends apart.
fn is_like(link: &Link, other: &Link) -> bool {
    (link.kind, link.bandwidth, link.latency) == (other.kind, other.bandwidth, other.latency)
}
