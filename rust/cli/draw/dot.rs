//! A machine in Graphviz's language: a row for each kind of node, links with their capacities.
//!
//! Links between nodes of one row would cross each other and their labels, so they are drawn only between neighbours. Where every two nodes
//! are joined alike, one sign above them says so; other meshes are tables below the drawing.

use super::cables::{Cable, Together, cables};
use crate::text::wrap;
use mpgpu_core::topology::{LinkKind, NodeKind, Topology};
use std::collections::BTreeSet;

const HEAD: &str = "\
    graph [fontname=\"Helvetica\" fontsize=12 ranksep=0.6 nodesep=0.35 labelloc=b labeljust=l style=rounded]\n    \
    node [fontname=\"Helvetica\" fontsize=12 shape=box style=\"rounded,filled\" fillcolor=\"#eeeeee\" color=\"#555555\" width=1 height=0.45]\n    \
    edge [fontname=\"Helvetica\" fontsize=10]\n";
/// Letters in a line of text below the drawing.
pub const LETTERS: usize = 90;

/// The machine as a graph, for `dot -Tsvg`.
pub fn dot(topology: &Topology) -> String {
    let (cables, shared) = cables(topology);
    let name = |node: usize| format!("{:?}", topology.nodes[node].name);
    let rows = rows(topology);
    let row = |node: usize| rows.iter().position(|row| row.contains(&node)).unwrap_or(0);
    let (across, between): (Vec<&Cable>, Vec<&Cable>) = cables.iter().partition(|cable| row(cable.a) == row(cable.b));

    let mut text = format!("graph {:?} {{\n    {HEAD}", topology.name);
    for (node, of) in topology.nodes.iter().enumerate() {
        let (fill, border, note) = match of.kind {
            NodeKind::Gpu => ("#e3f1e3", "#22691f", ""),
            NodeKind::Host => ("#fdefdc", "#8a4b08", "host memory"),
            NodeKind::Switch { peer: true } => ("#eeeeee", "#555555", "switch"),
            NodeKind::Switch { peer: false } => ("#eeeeee", "#555555", "switch, no GPU-to-GPU copies"),
        };
        let note = if note.is_empty() { String::new() } else { format!("<br/><font point-size=\"9\">{note}</font>") };
        text += &format!("    {} [fillcolor=\"{fill}\" color=\"{border}\" label=<<b>{}</b>{note}>]\n", name(node), escaped(&of.name));
    }
    for row in &rows {
        let names: Vec<String> = row.iter().map(|&node| name(node)).collect();
        let order = if row.len() > 1 { " [style=invis]" } else { "" };
        text += &format!("    {{ rank=same; {}{order} }}\n", names.join(" -- "));
    }
    let fastest = cables.iter().map(Cable::capacity).fold(0.0, f64::max);
    let mut line = |a: usize, b: usize, cable: &Cable, more: &str| {
        let width = 1.0 + 3.5 * (cable.capacity() / fastest).sqrt();
        text += &format!(
            "    {} -- {} [label=\"{}\" {} penwidth={width:.1}{more}]\n",
            name(a),
            name(b),
            label(cable, a == cable.a).join("\\n"),
            style(cable.kind)
        );
    };
    for cable in between {
        let (upper, lower) = if row(cable.a) < row(cable.b) { (cable.a, cable.b) } else { (cable.b, cable.a) };
        line(upper, lower, cable, " weight=4");
    }
    let mut below = Vec::new();
    let mut buses = String::new();
    for (number, mesh) in meshes(&across).into_iter().enumerate() {
        let nodes: Vec<usize> = mesh.iter().flat_map(|cable| [cable.a, cable.b]).collect::<BTreeSet<_>>().into_iter().collect();
        let order = &rows[row(nodes[0])];
        let place = |node: usize| order.iter().position(|other| *other == node).unwrap_or(0);
        if mesh.iter().all(|cable| place(cable.a).abs_diff(place(cable.b)) == 1) {
            mesh.iter().for_each(|cable| line(cable.a.min(cable.b), cable.a.max(cable.b), cable, " constraint=false"));
        } else if mesh.len() == nodes.len() * (nodes.len() - 1) / 2
            && mesh.iter().all(|cable| cable.is_even() && label(cable, true) == label(mesh[0], true))
        {
            let (what, style) = (format!("a link of {}\\nbetween every two", label(mesh[0], true).join(",").trim()), style(mesh[0].kind));
            buses += &format!("    bus{number} [label=\"{what}\" shape=ellipse fontsize=10 fillcolor=white {style}]\n");
            nodes.iter().for_each(|&node| buses += &format!("    bus{number} -- {} [{style} penwidth=2]\n", name(node)));
        } else {
            below.push(table(topology, &mesh, &nodes));
        }
    }
    text += &buses;
    let mut lines = vec![format!("<b>{}</b>", escaped(&topology.name))];
    lines.extend(wrap(&topology.description, LETTERS).iter().map(|line| escaped(line)));
    let units = "Numbers: GB/s (10\u{2079} bytes per second) in each direction; \u{2193}\u{2191} where directions differ; \u{3a3} both directions together. Wider lines are faster.";
    lines.extend(wrap(units, LETTERS));
    lines.push("Solid green: NVLink. Dashed blue: PCIe. Dotted brown: in or between processors.".into());
    if !shared.is_empty() {
        lines.push("Shared by all links with the number:".into());
    }
    for (index, resource) in shared.iter().enumerate() {
        let rate = Together::of(resource).text(|rate| format!("{} GB/s", gigabytes(rate)));
        lines.push(format!("{} {}: {rate} together", mark(index), escaped(&resource.name)));
    }
    let cell = |content: String| format!("<tr><td align=\"left\" balign=\"left\">{content}</td></tr>");
    let cells: String = below.into_iter().chain([lines.join("<br/>")]).map(cell).collect();
    text + &format!("    label=<<table border=\"0\" cellspacing=\"8\">{cells}</table>>\n}}\n")
}

/// Nodes from top to bottom: switches between GPUs, GPUs, the other switches by their distance from GPUs, host memory.
pub fn rows(topology: &Topology) -> Vec<Vec<usize>> {
    let kind = |node: usize| topology.nodes[node].kind;
    let nodes = || 0..topology.nodes.len();
    let of = |wanted: fn(NodeKind) -> bool| nodes().filter(|&node| wanted(kind(node))).collect::<Vec<_>>();
    let mut rows = vec![of(|kind| kind == NodeKind::Switch { peer: true }), of(|kind| kind == NodeKind::Gpu)];
    let mut left = of(|kind| kind == NodeKind::Switch { peer: false });
    while !left.is_empty() {
        let above = &rows[rows.len() - 1];
        let joined =
            |a: usize, b: usize| topology.links.iter().any(|link| [(a, b), (b, a)].contains(&(link.from.0 as usize, link.to.0 as usize)));
        let (next, rest): (Vec<usize>, Vec<usize>) = left.iter().partition(|&&node| above.iter().any(|&upper| joined(upper, node)));
        // What no GPU reaches stands below all others.
        (left, rows) = if next.is_empty() { (Vec::new(), [rows, vec![rest]].concat()) } else { (rest, [rows, vec![next]].concat()) };
    }
    rows.push(of(|kind| kind == NodeKind::Host));
    rows.retain(|row| !row.is_empty());
    rows
}

/// Links of one kind that hang together.
fn meshes<'a>(cables: &[&'a Cable]) -> Vec<Vec<&'a Cable>> {
    let mut meshes: Vec<Vec<&Cable>> = Vec::new();
    for &cable in cables {
        let touches = |mesh: &Vec<&Cable>| {
            mesh.iter().any(|other| other.kind == cable.kind && [other.a, other.b].iter().any(|node| [cable.a, cable.b].contains(node)))
        };
        let (touching, mut rest): (Vec<_>, Vec<_>) = meshes.into_iter().partition(touches);
        rest.push(touching.into_iter().flatten().chain([cable]).collect());
        meshes = rest;
    }
    meshes
}

/// Capacities from row to column.
fn table(topology: &Topology, mesh: &[&Cable], nodes: &[usize]) -> String {
    let cell = |text: &str| format!("<td>{text}</td>");
    let name = |node: usize| format!("<td bgcolor=\"#eeeeee\">{}</td>", escaped(&topology.nodes[node].name));
    let head: String = nodes.iter().map(|&node| name(node)).collect();
    let mut rows = format!("<tr>{}{head}</tr>", cell(mesh[0].kind.name()));
    for &from in nodes {
        let rates = nodes.iter().map(|&to| {
            let cable = mesh.iter().find(|cable| [(cable.a, cable.b), (cable.b, cable.a)].contains(&(from, to)));
            let rate = cable.and_then(|cable| if cable.a == from { cable.there } else { cable.back });
            cell(&rate.map_or(String::new(), gigabytes))
        });
        rows += &format!("<tr>{}{}</tr>", name(from), rates.collect::<String>());
    }
    format!("<table border=\"0\" cellborder=\"1\" cellspacing=\"0\" cellpadding=\"5\" color=\"#999999\">{rows}</table>")
}

/// Technologies differ by colour and by dash, so that they can be told apart in grey as well.
fn style(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::Nvlink => "color=\"#22691f\"",
        LinkKind::Pcie => "color=\"#1565c0\" style=dashed",
        LinkKind::Host => "color=\"#8a4b08\" style=dotted",
    }
}

/// Lines of a link's label, drawn from its node `a` down, or from `b`.
pub fn label(cable: &Cable, from_a: bool) -> Vec<String> {
    let (there, back) = ((cable.there, &cable.marks_there), (cable.back, &cable.marks_back));
    let (down, up) = if from_a { (there, back) } else { (back, there) };
    let line = |(rate, marks): (Option<f64>, &Vec<usize>), arrow: &str| {
        let marks: String = marks.iter().map(|&index| format!(" {}", mark(index))).collect();
        rate.map(|rate| format!(" {arrow}{}{marks}", gigabytes(rate)))
    };
    let mut lines: Vec<String> = if cable.is_even() {
        line(down, "").into_iter().collect()
    } else {
        line(down, "\u{2193}").into_iter().chain(line(up, "\u{2191}")).collect()
    };
    lines.extend(cable.both.map(|both| format!(" \u{3a3} {}", gigabytes(both.capacity))));
    lines
}

/// A number in a circle, up to 20; then in brackets.
pub fn mark(index: usize) -> String {
    let number = index as u32 + 1;
    if number <= 20 { char::from_u32(0x2460 + index as u32).unwrap_or('?').to_string() } else { format!("[{number}]") }
}

/// Text inside of a label in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace(char::is_control, " ")
}

/// GB/s with four digits, and none behind the point where they are zero.
pub fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    let decimals = match rate {
        1000.0.. => 0,
        100.0.. => 1,
        _ => 2,
    };
    let text = format!("{rate:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
