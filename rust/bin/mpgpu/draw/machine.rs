//! A machine as a drawing.

use super::cables::{Cable, Together, cables};
use super::layout::{LABEL_SIZE, LINE, Layout, Line, MARK, Way, label_box, layout};
use super::svg::{Anchor, Svg, text_width};
use crate::text::wrap;
use mpgpu::topology::{LinkKind, NodeKind, Topology};
use mpgpu::units::time;

/// Technologies differ by colour, by dash and, as drawn, by what they join, so that they can be told apart in grey as well.
const STYLE: &str = "\
.t{font-size:17px;font-weight:bold}.d{font-size:12px;fill:#444}.n{font-size:13px;font-weight:bold}.s{font-size:10px;fill:#444}\
.l{font-size:11px;fill:#111}.m{fill:#b3261e}.mt{font-size:9px;font-weight:bold;fill:#fff}.p{fill:#fff;fill-opacity:.88}\
.gpu{fill:#e3f1e3;stroke:#22691f;stroke-width:1.5}.switch{fill:#eee;stroke:#555;stroke-width:1.5}\
.host{fill:#fdefdc;stroke:#8a4b08;stroke-width:1.5}\
path{fill:none}.nvlink{stroke:#22691f}.pcie{stroke:#1565c0;stroke-dasharray:8 3}.hostlink{stroke:#8a4b08;stroke-dasharray:2 2}\
.halo{stroke:#fff}";

const MARGIN: f64 = 24.0;

/// The drawing of a topology, as an SVG file.
pub fn machine(topology: &Topology) -> String {
    let (cables, shared) = cables(topology);
    let layout = layout(topology, &cables, label);
    let width = (layout.width + 2.0 * MARGIN).max(600.0);
    let left = (width - layout.width) / 2.0;

    let mut svg = Svg::new();
    let mut y = MARGIN + 14.0;
    svg.text("t", (MARGIN, y), Anchor::Start, &topology.name);
    let letters = ((width - 2.0 * MARGIN) / (12.0 * 0.56)) as usize;
    let units = "Numbers: GB/s (10\u{2079} bytes per second) in each direction; \u{2193}\u{2191}\u{2192}\u{2190} where directions differ; \u{3a3} both directions together. Wider lines are faster.";
    for line in wrap(&topology.description, letters).into_iter().chain(wrap(units, letters)) {
        y += 17.0;
        svg.text("d", (MARGIN, y), Anchor::Start, &line);
    }
    y += 26.0;
    draw(&mut svg, topology, &cables, &layout, (left, y));
    y += layout.height + 30.0;

    let mut x = MARGIN;
    for (kind, name) in [(LinkKind::Nvlink, "NVLink"), (LinkKind::Pcie, "PCIe"), (LinkKind::Host, "in or between processors")] {
        if cables.iter().any(|cable| cable.kind == kind) {
            svg.line(class(kind), 3.0, &[(x, y - 4.0), (x + 34.0, y - 4.0)], "");
            svg.text("d", (x + 42.0, y), Anchor::Start, name);
            x += 42.0 + text_width(name, 12.0) + 16.0;
        }
    }
    if !shared.is_empty() {
        y += 24.0;
        svg.text("d", (MARGIN, y), Anchor::Start, "Shared by all links with the number:");
        for (index, resource) in shared.iter().enumerate() {
            y += 18.0;
            mark(&mut svg, (MARGIN + 7.0, y - 4.0), index);
            let text = format!("{}: {} together", resource.name, Together::of(resource).text(|rate| format!("{} GB/s", gigabytes(rate))));
            svg.text("d", (MARGIN + 20.0, y), Anchor::Start, &text);
        }
    }
    svg.finish(width, y + MARGIN, &format!("Machine {}", topology.name), STYLE)
}

fn draw(svg: &mut Svg, topology: &Topology, cables: &[Cable], layout: &Layout, (left, top): (f64, f64)) {
    let fastest = cables.iter().map(Cable::capacity).fold(0.0, f64::max);
    // Long ways first, so that short ones, which are drawn over them, stay whole; each on a white border that shows which is above.
    let mut order: Vec<usize> = (0..cables.len()).collect();
    let length =
        |index: usize| layout.wires[index].points.windows(2).map(|p| (p[0].0 - p[1].0).abs() + (p[0].1 - p[1].1).abs()).sum::<f64>();
    order.sort_by(|&a, &b| length(b).total_cmp(&length(a)).then(a.cmp(&b)));
    for index in order {
        let cable = &cables[index];
        let points: Vec<(f64, f64)> = layout.wires[index].points.iter().map(|&(x, y)| (x + left, y + top)).collect();
        let stroke = 1.5 + 3.5 * (cable.capacity() / fastest).sqrt();
        svg.line("halo", stroke + 4.0, &points, "");
        svg.line(class(cable.kind), stroke, &points, &tip(topology, cable));
    }
    for (node, place) in topology.nodes.iter().zip(&layout.places) {
        let (class, note) = match node.kind {
            NodeKind::Gpu => ("gpu", ""),
            NodeKind::Host => ("host", "host memory"),
            NodeKind::Switch { peer: true } => ("switch", "switch"),
            NodeKind::Switch { peer: false } => ("switch", "switch, no GPU-to-GPU copies"),
        };
        let (x, y) = (place.x + left, place.y + top);
        svg.rectangle(class, [x, y, place.width, place.height], 5.0, "");
        let center = x + place.width / 2.0;
        let note = if text_width(note, 10.0) > place.width { note.split_once(", ").map_or(note, |(_, rest)| rest) } else { note };
        let note = if text_width(note, 10.0) > place.width { note.strip_suffix(" copies").unwrap_or(note) } else { note };
        let name = if note.is_empty() { y + 24.0 } else { y + 17.0 };
        svg.text("n", (center, name), Anchor::Middle, &node.name);
        if !note.is_empty() {
            svg.text("s", (center, y + 31.0), Anchor::Middle, note);
        }
    }
    for wire in &layout.wires {
        let [x, y, width, height] = label_box(wire);
        svg.rectangle("p", [x + left - 2.0, y + top, width + 4.0, height], 0.0, "");
        for (number, line) in wire.lines.iter().enumerate() {
            let base = wire.label.1 + top + LINE * number as f64;
            // Of a centred line, text and marks are centred together.
            let begin = if wire.anchor == Some(Anchor::Middle) { x + left + (width - line.width()) / 2.0 } else { wire.label.0 + left };
            if line.marks.is_empty() {
                svg.text("l", (wire.label.0 + left, base), wire.anchor.unwrap_or(Anchor::Start), &line.text);
            } else {
                svg.text("l", (begin, base), Anchor::Start, &line.text);
            }
            for (place, &index) in line.marks.iter().enumerate() {
                let x = begin + line.text_width() + 3.0 + MARK * (place as f64 + 0.5);
                mark(svg, (x, base - LABEL_SIZE / 2.0 + 1.5), index);
            }
        }
    }
}

fn mark(svg: &mut Svg, (x, y): (f64, f64), index: usize) {
    svg.circle("m", (x, y), 6.5);
    svg.text("mt", (x, y + 3.2), Anchor::Middle, &(index + 1).to_string());
}

fn class(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::Nvlink => "nvlink",
        LinkKind::Pcie => "pcie",
        LinkKind::Host => "hostlink",
    }
}

/// Lines of a cable's label. `first` is whether its first node stands above the second, or left of it.
fn label(cable: &Cable, first: bool, way: Way) -> Vec<Line> {
    let (there, back) = ((cable.there, &cable.marks_there), (cable.back, &cable.marks_back));
    let (there, back) = if first { (there, back) } else { (back, there) };
    let arrows = if way == Way::Down { ["\u{2193}", "\u{2191}"] } else { ["\u{2192}", "\u{2190}"] };
    let line = |(rate, marks): (Option<f64>, &Vec<usize>), arrow: &str| {
        rate.map(|rate| Line { text: format!("{arrow}{}", gigabytes(rate)), marks: marks.clone() })
    };
    let mut lines: Vec<Line> = if cable.is_even() {
        line(there, "").into_iter().collect()
    } else {
        line(there, arrows[0]).into_iter().chain(line(back, arrows[1])).collect()
    };
    lines.extend(cable.both.map(|both| Line { text: format!("\u{3a3} {}", gigabytes(both.capacity)), marks: Vec::new() }));
    lines
}

fn tip(topology: &Topology, cable: &Cable) -> String {
    let name = |node: usize| &topology.nodes[node].name;
    let way = |rate: Option<f64>| rate.map_or("no way".into(), |rate| format!("{} GB/s", gigabytes(rate)));
    let mut text =
        format!("{} to {}, {}: {} there, {} back", name(cable.a), name(cable.b), cable.kind.name(), way(cable.there), way(cable.back));
    if let Some(both) = cable.both {
        text += &format!(", {} both together", both.text(|rate| format!("{} GB/s", gigabytes(rate))));
    }
    if cable.latency > 0.0 {
        text += &format!(", latency {}", time(cable.latency));
    }
    text
}

/// GB/s with four digits, and none behind the point where they are zero.
fn gigabytes(rate: f64) -> String {
    let rate = rate / 1e9;
    let decimals = if rate >= 1000.0 {
        0
    } else if rate >= 100.0 {
        1
    } else {
        2
    };
    let text = format!("{rate:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}
