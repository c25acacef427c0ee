//! Reads and writes topologies in TOML. `docs/reference/topology.md` describes the format.

use super::check::unknown_node;
use super::error::refuse;
use super::record::{Entry, Record, Version};
use super::{Costs, Link, LinkId, LinkKind, Node, NodeId, NodeKind, SharedResource, Topology, TopologyError, preset_names};
use ahash::AHashMap;
use serde::Deserialize;
use std::fmt::Write;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Maximum size of a text that [`parse`] accepts, bytes.
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
    costs: Costs,
    probe: Option<Entry>,
}

/// Part of a measured topology file (`mpgpu probe`) that has the same format in all versions of the file.
#[derive(Deserialize)]
struct OfAnyVersion {
    probe: Version,
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
    kind: LinkKind,
    bandwidth: f64,
    bandwidth_back: Option<f64>,
    #[serde(default)]
    latency: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SharedEntry {
    name: String,
    capacity: f64,
    staged: Option<f64>,
    links: Vec<String>,
}

/// Parses and checks a topology in TOML.
///
/// Parsing is strict: an unknown key, a wrong type, an undeclared name or a value out of range is an error. The error names the position in
/// the text.
pub fn parse(text: &str) -> Result<Topology, TopologyError> {
    Ok(parse_probed(text)?.0)
}

/// Parses and checks a topology in TOML like [`parse`], and also returns the record of the measurement (`mpgpu probe`) that produced it, if
/// there is one.
pub fn parse_probed(text: &str) -> Result<(Topology, Option<Record>), TopologyError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(too_long());
    }
    let file: FileEntry = toml::from_str(text).map_err(|error| {
        // A topology file of another version may have other keys. The error then states the version.
        let outdated = toml::from_str::<OfAnyVersion>(text).ok().and_then(|file| file.probe.check().err());
        outdated.unwrap_or_else(|| not_valid(&toml_place(text, &error)))
    })?;
    let mut topology = Topology {
        name: file.name,
        description: file.description,
        nodes: file.node.into_iter().enumerate().map(node).collect::<Result<_, _>>()?,
        links: Vec::new(),
        shared: Vec::new(),
        costs: file.costs,
    };
    // The topology is checked before names are looked up, so that no name exists twice.
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

fn too_long() -> TopologyError {
    let usual = "a node's description has a few kilobytes, check that this is one";
    TopologyError::Invalid(format!("the topology has more than {MAX_FILE_BYTES} bytes of text; {usual}"))
}

fn not_valid(why: &str) -> TopologyError {
    TopologyError::Invalid(format!("the topology is not valid: {why}"))
}

/// Formats line, column and message of a TOML error in one line. The error's own text repeats the whole line of the file, which may be a
/// megabyte long.
pub fn toml_place(text: &str, error: &toml::de::Error) -> String {
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

/// Shortens a text to `most` characters, so that a malicious file cannot fill an error message.
pub fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Opens a regular file for reading. Any other file is refused without blocking: opening a FIFO would block until another process writes to
/// it.
pub fn open_regular(path: &Path) -> std::io::Result<File> {
    /// Value of `O_NONBLOCK` on Linux. It is the same on all architectures that have a GPU driver.
    const NONBLOCK: i32 = 0o4000;
    let file = File::options().read(true).custom_flags(NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(std::io::Error::other("the path is not a regular file; name a regular file")) }
}

/// Reads a topology file and parses it, with the record of the measurement (`mpgpu probe`) that produced it, if there is one. Reads at most
/// [`MAX_FILE_BYTES`] bytes, so that a wrong path cannot exhaust the memory.
pub(super) fn read(path: &Path) -> Result<(Topology, Option<Record>), TopologyError> {
    let mut bytes = Vec::new();
    let result = open_regular(path).and_then(|file| file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes));
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
        return Err(in_file(too_long()));
    }
    let text = String::from_utf8(bytes).map_err(|error| in_file(not_valid(&format!("the file is not UTF-8 text: {error}"))))?;
    parse_probed(&text).map_err(in_file)
}

fn node((index, entry): (usize, NodeEntry)) -> Result<Node, TopologyError> {
    let kind = match (entry.kind, entry.peer) {
        (NodeKindEntry::Switch, peer) => NodeKind::Switch { peer: peer.unwrap_or(false) },
        (_, Some(_)) => {
            let name = shorten(&entry.name, 64);
            let meaning = "`peer` is for switches only, and states whether GPU-to-GPU copies pass one; remove it, or set kind = \"switch\"";
            return refuse(format!("node {} ({name:?}): {meaning}", index + 1));
        }
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
        _ => {
            let forms = "give either `between` (both directions) or `one_way` (first to second node)";
            return refuse(format!("{}: {forms}, a list of [\"from\", \"to\"] pairs with at least one", place()));
        }
    };
    let both_ways = !entry.between.is_empty();
    if !both_ways && entry.bandwidth_back.is_some() {
        return refuse(format!("{}: `bandwidth_back` belongs to `between`; a `one_way` link has no way back", place()));
    }
    let kind = entry.kind;
    let find = |name: &String| nodes.get(name.as_str()).copied().ok_or_else(|| unknown_node(place(), format!("{:?}", shorten(name, 64))));
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

impl Topology {
    /// Returns this topology in TOML. [`parse`] turns the text into an equal topology, if [`Topology::check`] accepts this topology and the
    /// text is not longer than [`MAX_FILE_BYTES`].
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
            // Each entry covers the longest possible sequence of links: pairs of opposite links, or links of one direction.
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

        writeln!(out, "\n[costs]")?;
        Costs::TABLE.iter().try_for_each(|cost| writeln!(out, "{} = {:e}", cost.name, (cost.of)(&self.costs)))
    }
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// True if `link` and `back` have opposite directions and one `between` entry of a topology file can describe both.
fn is_opposite(link: &Link, back: &Link) -> bool {
    (link.from, link.to, link.kind) == (back.to, back.from, back.kind) && link.latency == back.latency
}

/// True if one entry of a topology file can describe both `link` and `other`. The nodes that they connect may differ.
fn is_like(link: &Link, other: &Link) -> bool {
    (link.kind, link.bandwidth, link.latency) == (other.kind, other.bandwidth, other.latency)
}
