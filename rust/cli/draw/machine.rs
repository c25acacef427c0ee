//! Draws a machine as SVG. Each kind of node has a row, and each link shows its capacity. A link between two nodes of one row is an arc
//! above the row.

use super::cables::{Cable, Together, cables};
use super::svg::{Anchor, Svg, text_width};
use crate::text::wrap;
use mpgpu_core::topology::{LinkKind, NodeKind, Topology};

const STYLE: &str = "\
.t{font-size:15px;font-weight:bold}.d{font-size:12px;fill:#333}.v{font-size:12px;font-weight:bold}.s{font-size:9px;fill:#333}\
.k{font-size:10px}.g{fill:#fff}\
path{fill:none}path.n{stroke:#22691f}path.p{stroke:#1565c0;stroke-dasharray:7 4}path.h{stroke:#8a4b08;stroke-dasharray:2 4}\
.gpu{fill:#e3f1e3;stroke:#22691f}.host{fill:#fdefdc;stroke:#8a4b08}.switch{fill:#eee;stroke:#555}";

const MARGIN: f64 = 24.0;
/// Width of a node in the longest row, including the space around it.
const COLUMN: f64 = 110.0;
const LEAST_WIDTH: f64 = 660.0;
const BOX: f64 = 34.0;
/// Vertical space between two rows.
const GAP: f64 = 74.0;
/// Height that is added to an arc for each node that it passes over.
const RISE: f64 = 24.0;
const LINE: f64 = 12.0;
/// Font size of the label of a link.
const LABEL: f64 = 10.0;
/// Horizontal space between two nodes of a row. The label of a link between adjacent nodes fits into it.
const SPACE: f64 = 34.0;
/// Maximum number of characters in a line of text below the drawing.
const LETTERS: usize = 90;

/// Position of a node in the drawing: the centre, half of the width, and the upper edge.
#[derive(Copy, Clone, Default)]
struct Place {
    x: f64,
    half: f64,
    y: f64,
}

/// Returns a drawing of the machine as an SVG file.
pub fn machine(topology: &Topology) -> String {
    let (cables, shared) = cables(topology);
    let rows = rows(topology);
    let at = |node: usize| {
        let row = rows.iter().position(|row| row.contains(&node)).unwrap_or(0);
        (row, rows.get(row).and_then(|row| row.iter().position(|other| *other == node)).unwrap_or(0))
    };
    let longest = rows.iter().map(Vec::len).max().unwrap_or(1);
    let width = (longest as f64 * COLUMN).max(LEAST_WIDTH);
    let mut places = vec![Place::default(); topology.nodes.len()];
    let mut y = MARGIN + 24.0;
    for (index, row) in rows.iter().enumerate() {
        let spans = cables.iter().map(|cable| (at(cable.a), at(cable.b))).filter(|(a, b)| (a.0, b.0) == (index, index));
        let arcs = spans.map(|(a, b)| a.1.abs_diff(b.1)).filter(|span| *span > 1).max().unwrap_or(0);
        y += arcs as f64 * RISE + if index > 0 { GAP } else { 0.0 };
        let column = width / row.len() as f64;
        for (place, &node) in row.iter().enumerate() {
            places[node] = Place { x: MARGIN + (place as f64 + 0.5) * column, half: (column - SPACE) / 2.0, y };
        }
        y += BOX;
    }

    let mut svg = Svg::new();
    svg.text("t", (MARGIN, MARGIN), Anchor::Start, &topology.name);
    let fastest = cables.iter().map(Cable::capacity).fold(0.0, f64::max);
    let mut labels: Vec<((f64, f64), Vec<String>)> = Vec::new();
    for (index, cable) in cables.iter().enumerate() {
        let thick = 1.0 + 3.5 * (cable.capacity() / fastest).sqrt();
        let class = class(cable.kind);
        let ((row, a), (other_row, b)) = (at(cable.a), at(cable.b));
        let (left, right) = if (row, a) < (other_row, b) { (cable.a, cable.b) } else { (cable.b, cable.a) };
        let (from, to) = (places[left], places[right]);
        let text = label(cable, left == cable.a);
        if row != other_row {
            // The link is drawn vertically below the narrower of the two nodes, next to other links between the same nodes.
            let same = |other: &&Cable| [(other.a, other.b), (other.b, other.a)].contains(&(cable.a, cable.b));
            let aside = 40.0 * cables[..index].iter().filter(same).count() as f64;
            let x = aside + if from.half < to.half { from.x } else { to.x };
            let within = |place: Place| x.clamp(place.x - place.half + 4.0, place.x + place.half - 4.0);
            let (upper, lower) = ((within(from), from.y + BOX), (within(to), to.y));
            svg.line(class, thick, upper, lower);
            // The label is near the upper end of the link, because the arcs above the lower row need the space at the lower end.
            labels.push((((upper.0 + lower.0) / 2.0, upper.1 + 28.0), text));
        } else if a.abs_diff(b) == 1 {
            let y = from.y + BOX / 2.0;
            svg.line(class, thick, (from.x + from.half, y), (to.x - to.half, y));
            let text = text.concat();
            // A label that is wider than the space between the two nodes is placed above them.
            let base = if text_width(text.trim(), LABEL) > SPACE { from.y } else { y };
            labels.push((((from.x + to.x) / 2.0, base - 5.0), vec![text]));
        } else {
            let rise = a.abs_diff(b) as f64 * RISE;
            svg.arc(class, thick, (from.x, from.y), (to.x, to.y), rise);
            labels.push((((from.x + to.x) / 2.0, from.y - rise + 4.0), vec![text.concat()]));
        }
    }
    let lines =
        || labels.iter().flat_map(|((x, y), lines)| (0..).zip(lines).map(move |(at, line)| ((*x, y + LINE * f64::from(at)), line.trim())));
    lines().for_each(|(point, line)| svg.ground(point, Anchor::Middle, line, LABEL));
    lines().for_each(|(point, line)| svg.text("k", point, Anchor::Middle, line));
    for (node, place) in topology.nodes.iter().zip(&places) {
        let (class, note) = match node.kind {
            NodeKind::Gpu => ("gpu", ""),
            NodeKind::Host => ("host", "host memory"),
            NodeKind::Switch { peer: true } => ("switch", "switch"),
            NodeKind::Switch { peer: false } => ("switch", "no GPU-to-GPU copies"),
        };
        let note = if text_width(note, 9.0) > 2.0 * place.half { "switch" } else { note };
        svg.rectangle(class, [place.x - place.half, place.y, 2.0 * place.half, BOX], &node.name);
        svg.text("v", (place.x, place.y + if note.is_empty() { 21.0 } else { 15.0 }), Anchor::Middle, &node.name);
        if !note.is_empty() {
            svg.text("s", (place.x, place.y + 27.0), Anchor::Middle, note);
        }
    }

    let units = "Numbers: GB/s (10\u{2079} bytes per second) in each direction; \u{2193}\u{2191} where directions differ; \u{3a3} both directions together. \
                 Wider lines are faster.";
    let mut lines = [wrap(&topology.description, LETTERS), wrap(units, LETTERS)].concat();
    lines.push("Solid green: NVLink. Dashed blue: PCIe. Dotted brown: within or between CPUs.".into());
    if !shared.is_empty() {
        lines.push("Capacity that all links with this number share:".into());
    }
    for (index, resource) in shared.iter().enumerate() {
        let rate = Together::of(resource).text(|rate| format!("{} GB/s", gigabytes(rate)));
        lines.push(format!("{} {}: {rate} together", mark(index), resource.name));
    }
    y += 12.0;
    for line in &lines {
        y += 16.0;
        svg.text("d", (MARGIN, y), Anchor::Start, line);
    }
    svg.finish(width + 2.0 * MARGIN, y + MARGIN, &topology.name, STYLE)
}

/// Returns the CSS class of a kind of link. The kinds differ by colour and by dash, so that they can also be distinguished in grey.
fn class(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::Nvlink => "n",
        LinkKind::Pcie => "p",
        LinkKind::Host => "h",
    }
}

/// Returns the rows of nodes from top to bottom: switches between GPUs, GPUs, other switches by their distance from GPUs, and host memory.
fn rows(topology: &Topology) -> Vec<Vec<usize>> {
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
        // Nodes that are not connected to any GPU are in the last row.
        (left, rows) = if next.is_empty() { (Vec::new(), [rows, vec![rest]].concat()) } else { (rest, [rows, vec![next]].concat()) };
    }
    rows.push(of(|kind| kind == NodeKind::Host));
    rows.retain(|row| !row.is_empty());
    rows
}

/// Returns the lines of the label of a link. `from_a` is true if node `a` is drawn above node `b`.
fn label(cable: &Cable, from_a: bool) -> Vec<String> {
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

/// Returns the mark of a shared resource: a number in a circle, or in brackets if it is above 20.
fn mark(index: usize) -> String {
    let number = index as u32 + 1;
    if number <= 20 { char::from_u32(0x2460 + index as u32).unwrap_or('?').to_string() } else { format!("[{number}]") }
}

/// Formats a rate in GB/s with at most four significant digits, without trailing zeros.
fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    let decimals = match rate {
        1000.0.. => 0,
        100.0.. => 1,
        _ => 2,
    };
    let text = format!("{rate:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
