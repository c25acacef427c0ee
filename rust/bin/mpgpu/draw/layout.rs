//! Where the nodes and links of a machine stand, by its structure alone.
//!
//! GPUs stand in one row. Above it are the switches that lead to other GPUs only (NVSwitches), below it those on the way to host memory,
//! and host memory last; each as a bar over everything that it joins, so that links between rows run straight down. Links between two
//! nodes of one row run in tracks beside it, short ones inside long ones. GPUs are ordered by what is below them, so that bars of one
//! row need not overlap; where they must, they stand in rows of their own.

use super::cables::Cable;
use super::svg::{Anchor, text_width};
use mpgpu::topology::{NodeKind, Topology};

const BOX: (f64, f64) = (86.0, 38.0);
/// From one GPU to the next, where no label beside its links needs more.
const PITCH: f64 = 118.0;
/// More between GPUs that hang on different switches.
const GROUP_GAP: f64 = 26.0;
/// The same where the two switches are joined: room for that link and its label.
const JOINED_GAP: f64 = 84.0;
const TRACK: f64 = 20.0;
/// Between the ends of tracks, and of straight cables, at one node.
const TRACK_STEP: f64 = 14.0;
const STRAIGHT_STEP: f64 = 30.0;
/// Between two rows, where no track needs more.
const ROW_GAP: f64 = 30.0;
/// Lines of a label.
pub const LINE: f64 = 13.0;
pub const LABEL_SIZE: f64 = 11.0;
/// Width of the mark of a shared resource.
pub const MARK: f64 = 17.0;

/// A node in the picture.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Place {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Place {
    fn center(&self) -> f64 {
        self.x + self.width / 2.0
    }
    fn right(&self) -> f64 {
        self.x + self.width
    }
}

/// A line of a label, with the numbers of the shared resources that follow it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    pub text: String,
    pub marks: Vec<usize>,
}

impl Line {
    /// Width of the text alone.
    pub fn text_width(&self) -> f64 {
        text_width(&self.text, LABEL_SIZE)
    }
    pub fn width(&self) -> f64 {
        self.text_width() + MARK * self.marks.len() as f64 + if self.marks.is_empty() { 0.0 } else { 3.0 }
    }
}

/// A cable in the picture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wire {
    pub points: Vec<(f64, f64)>,
    /// The base line of the label's first line.
    pub label: (f64, f64),
    pub anchor: Option<Anchor>,
    pub lines: Vec<Line>,
}

/// How a cable runs in the picture.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Way {
    Down,
    Across,
}

/// A machine on a plane. The origin is the top left corner of what is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// One for each node.
    pub places: Vec<Place>,
    /// One for each cable.
    pub wires: Vec<Wire>,
    pub width: f64,
    pub height: f64,
}

/// Two nodes of one row and the cable between them.
struct Track {
    cable: usize,
    left: f64,
    right: f64,
    level: usize,
}

/// Places nodes and cables; `label` gives the lines of a cable's label, the first node above (or left) or not.
pub fn layout(topology: &Topology, cables: &[Cable], label: impl Fn(&Cable, bool, Way) -> Vec<Line>) -> Layout {
    let count = topology.nodes.len();
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); count];
    for cable in cables {
        next[cable.a].push(cable.b);
        next[cable.b].push(cable.a);
    }
    let rows = rows(topology, &next);
    let mut places = vec![Place { x: 0.0, y: 0.0, width: BOX.0, height: BOX.1 }; count];
    let pitch = pitch(cables, &rows, &label);
    let mut edge = place_gpus(topology, &next, &rows, pitch, &mut places);
    let (top, bottom) = (rows.iter().copied().min().unwrap_or(0).min(0), rows.iter().copied().max().unwrap_or(0).max(0));

    // From the GPUs outwards, because a bar spans what stands between it and them.
    let outwards = (1..=bottom).chain((top..0).rev());
    let mut stories = vec![0; count];
    for row in outwards.clone() {
        let nearer = |node: usize| if row > 0 { rows[node] < row && rows[node] >= 0 } else { rows[node] > row && rows[node] <= 0 };
        let mut members: Vec<usize> = (0..count).filter(|&node| rows[node] == row).collect();
        for &node in &members {
            let centers: Vec<f64> = next[node].iter().filter(|&&other| nearer(other)).map(|&other| places[other].center()).collect();
            let (first, last) = match centers.iter().copied().reduce(f64::min).zip(centers.iter().copied().reduce(f64::max)) {
                Some(ends) => ends,
                None => {
                    edge += pitch;
                    (edge, edge)
                }
            };
            let name = text_width(&topology.nodes[node].name, 13.0) + 16.0;
            // Room for a label beside the last of its links.
            let width = (last - first + BOX.0).max(name).max(if row == bottom { 132.0 } else { 0.0 });
            places[node] = Place { x: (first + last - width) / 2.0, y: 0.0, width, height: BOX.1 };
        }
        members.sort_by(|&a, &b| places[a].x.total_cmp(&places[b].x));
        let mut ends: Vec<f64> = Vec::new();
        for &node in &members {
            let story = ends.iter().position(|&end| end + 14.0 <= places[node].x).unwrap_or(ends.len());
            if story == ends.len() {
                ends.push(0.0);
            }
            ends[story] = places[node].right();
            stories[node] = story;
        }
    }

    let mut wires = vec![Wire::default(); cables.len()];
    let down = straight(cables, &rows, &stories, &places, &mut wires, &label);
    let mut tracks: Vec<(i32, Vec<Track>)> = (top..=bottom).map(|row| (row, Vec::new())).collect();
    for (index, cable) in cables.iter().enumerate() {
        if rows[cable.a] == rows[cable.b] && wires[index].points.is_empty() {
            tracks[(rows[cable.a] - top) as usize].1.push(Track { cable: index, left: 0.0, right: 0.0, level: 0 });
        }
    }
    for (row, tracks) in &mut tracks {
        attach(cables, &places, *row, &down, tracks);
        stack(tracks);
    }

    // Heights: every row, its tracks (above for GPUs and what is above them, below for the rest), and a gap for labels.
    let mut y = 0.0;
    for row in top..=bottom {
        let levels = tracks[(row - top) as usize].1.iter().map(|track| track.level + 1).max().unwrap_or(0) as f64;
        if row <= 0 && levels > 0.0 {
            y += levels * TRACK + 12.0;
        }
        let members = (0..count).filter(|&node| rows[node] == row);
        let last_story = members.clone().map(|node| stories[node]).max().unwrap_or(0);
        for node in members {
            // The first story is the nearest to the GPUs.
            let story = if row < 0 { last_story - stories[node] } else { stories[node] };
            places[node].y = y + story as f64 * (BOX.1 + 30.0);
        }
        y += last_story as f64 * (BOX.1 + 30.0) + BOX.1;
        if row > 0 && levels > 0.0 {
            y += levels * TRACK + 12.0;
        }
        if row < bottom {
            y += ROW_GAP + LINE * down.lines_below(&rows, row) as f64;
        }
    }
    finish(cables, &rows, &places, &down, &tracks, &mut wires, &label);

    // To the origin, with whatever labels stick out.
    let mut bounds = [f64::INFINITY, f64::INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY];
    let mut cover = |x: f64, y: f64, right: f64, below: f64| {
        bounds = [bounds[0].min(x), bounds[1].min(y), bounds[2].max(right), bounds[3].max(below)];
    };
    places.iter().for_each(|place| cover(place.x, place.y, place.right(), place.y + place.height));
    for wire in &wires {
        wire.points.iter().for_each(|&(x, y)| cover(x, y, x, y));
        let [x, y, width, height] = label_box(wire);
        cover(x, y, x + width, y + height);
    }
    let [left, above, right, below] = bounds;
    places.iter_mut().for_each(|place| (place.x, place.y) = (place.x - left, place.y - above));
    for wire in &mut wires {
        wire.points.iter_mut().chain([&mut wire.label]).for_each(|point| *point = (point.0 - left, point.1 - above));
    }
    Layout { places, wires, width: right - left, height: below - above }
}

/// Left, top, width and height of a wire's label, its marks included.
pub fn label_box(wire: &Wire) -> [f64; 4] {
    let width = wire.lines.iter().map(Line::width).fold(0.0, f64::max);
    let left = match wire.anchor {
        Some(Anchor::Middle) => wire.label.0 - width / 2.0,
        _ => wire.label.0,
    };
    [left, wire.label.1 - LABEL_SIZE, width, wire.lines.len() as f64 * LINE]
}

/// The row of each node: 0 for GPUs, below it what leads to host memory, above it what does not.
fn rows(topology: &Topology, next: &[Vec<usize>]) -> Vec<i32> {
    let kind = |node: usize| topology.nodes[node].kind;
    let nodes = 0..topology.nodes.len();
    // Steps from the nearest host, and from the nearest GPU, not passing GPUs.
    let steps = |from: NodeKind| {
        let mut steps: Vec<Option<i32>> = nodes.clone().map(|node| (kind(node) == from).then_some(0)).collect();
        let mut front: std::collections::VecDeque<usize> = nodes.clone().filter(|&node| kind(node) == from).collect();
        while let Some(node) = front.pop_front() {
            for &other in &next[node] {
                if steps[other].is_none() && kind(other) != NodeKind::Gpu {
                    steps[other] = steps[node].map(|far| far + 1);
                    front.push_back(other);
                }
            }
        }
        steps
    };
    let (from_host, from_gpu) = (steps(NodeKind::Host), steps(NodeKind::Gpu));
    let farthest = from_host.iter().flatten().copied().max().unwrap_or(0);
    nodes
        .map(|node| match (kind(node), from_host[node]) {
            (NodeKind::Gpu, _) => 0,
            (_, Some(far)) => farthest - far + 1,
            (_, None) => -from_gpu[node].unwrap_or(1),
        })
        .collect()
}

/// From one GPU to the next: no label beside the links of one, which may have the marks of many shared resources, reaches those of the other.
fn pitch(cables: &[Cable], rows: &[i32], label: &impl Fn(&Cable, bool, Way) -> Vec<Line>) -> f64 {
    let of_side = |gpu: usize, below: bool| {
        let beside = cables.iter().filter(move |cable| {
            let other = if cable.a == gpu { cable.b } else { cable.a };
            (cable.a == gpu || cable.b == gpu) && if below { rows[other] > 0 } else { rows[other] < 0 }
        });
        let upper = |cable: &Cable| (cable.a == gpu) == below;
        let widest = beside.clone().flat_map(|cable| label(cable, upper(cable), Way::Down)).map(|line| line.width()).fold(0.0, f64::max);
        beside.count().saturating_sub(1) as f64 * STRAIGHT_STEP + widest + 14.0
    };
    let gpus = (0..rows.len()).filter(|&node| rows[node] == 0);
    gpus.flat_map(|gpu| [of_side(gpu, true), of_side(gpu, false)]).fold(PITCH, f64::max)
}

/// Puts the GPUs into their row, ordered and spaced by what is below them. Returns the last one's centre.
fn place_gpus(topology: &Topology, next: &[Vec<usize>], rows: &[i32], pitch: f64, places: &mut [Place]) -> f64 {
    // The way down from a GPU to host memory, host memory first; the nearest host and the first switch of those as good.
    let way = |gpu: usize| {
        let mut way = Vec::new();
        let mut at = gpu;
        while let Some(&lower) = next[at].iter().filter(|&&other| rows[other] > rows[at]).min_by_key(|&&other| (-rows[other], other)) {
            way.push(lower);
            at = lower;
        }
        if way.is_empty() {
            way.extend(next[gpu].iter().copied().filter(|&other| rows[other] < 0).min());
        }
        way.reverse();
        way
    };
    let mut gpus: Vec<(Vec<usize>, usize)> =
        (0..topology.nodes.len()).filter(|&node| topology.nodes[node].kind == NodeKind::Gpu).map(|gpu| (way(gpu), gpu)).collect();
    gpus.sort();
    let mut x = 0.0;
    let mut before: Option<&Vec<usize>> = None;
    for (way, gpu) in &gpus {
        if let Some(before) = before {
            x += pitch;
            if before != way {
                let joined = before.iter().zip(way).any(|(a, b)| a != b && next[*a].contains(b));
                x += if joined { JOINED_GAP } else { GROUP_GAP };
            }
        }
        places[*gpu].x = x - BOX.0 / 2.0;
        before = Some(way);
    }
    x
}

/// Cables between rows.
struct Down {
    /// Cable, the node above, the one below, where it runs.
    cables: Vec<(usize, usize, usize, f64)>,
    /// Lines of the label of each of them, and how many lie before it at the same node.
    lines: Vec<(usize, usize)>,
}

impl Down {
    /// Lines that labels below `row` need.
    fn lines_below(&self, rows: &[i32], row: i32) -> usize {
        let here = self.cables.iter().zip(&self.lines).filter(|((_, upper, ..), _)| rows[*upper] == row);
        here.map(|(_, (lines, before))| lines + before).max().unwrap_or(0)
    }
}

/// Places of the cables that need no track: down from row to row, and across between neighbours of one row.
fn straight(
    cables: &[Cable],
    rows: &[i32],
    stories: &[usize],
    places: &[Place],
    wires: &mut [Wire],
    label: &impl Fn(&Cable, bool, Way) -> Vec<Line>,
) -> Down {
    let mut down = Down { cables: Vec::new(), lines: Vec::new() };
    for (index, cable) in cables.iter().enumerate() {
        let (a, b) = (cable.a, cable.b);
        if rows[a] != rows[b] {
            let (upper, lower) = if rows[a] < rows[b] { (a, b) } else { (b, a) };
            down.cables.push((index, upper, lower, 0.0));
            continue;
        }
        let (left, right) = if places[a].x < places[b].x { (a, b) } else { (b, a) };
        let gap = [places[left].right(), places[right].x];
        let lines = label(cable, left == a, Way::Across);
        let width = lines.iter().map(Line::width).fold(0.0, f64::max);
        let free = (0..places.len()).all(|node| {
            let inside = places[node].right() > gap[0] && places[node].x < gap[1];
            node == left || node == right || rows[node] != rows[a] || stories[node] != stories[a] || !inside
        });
        let taken = cables[..index].iter().any(|other| (other.a, other.b) == (a, b) || (other.a, other.b) == (b, a));
        if rows[a] != 0 && stories[a] == stories[b] && free && !taken && gap[1] - gap[0] >= width + 6.0 {
            let middle = (gap[0] + gap[1]) / 2.0;
            let points = vec![(gap[0], 0.0), (gap[1], 0.0)];
            wires[index] = Wire { points, label: (middle, 0.0), anchor: Some(Anchor::Middle), lines };
        }
    }
    // A node that is no wider than a GPU sets the place; several cables at one of its sides stand side by side.
    let slim = |node: usize| places[node].width <= BOX.0 + 1.0;
    for at in 0..down.cables.len() {
        let (index, upper, lower, _) = down.cables[at];
        let up = if rows[upper] < 0 { slim(lower) } else { !slim(upper) && slim(lower) };
        let (owner, other) = if up { (lower, upper) } else { (upper, lower) };
        let side = |entry: &&(usize, usize, usize, f64)| {
            if up { entry.2 == owner } else { entry.1 == owner }
        };
        let mut beside: Vec<(f64, usize)> = down
            .cables
            .iter()
            .filter(side)
            .map(|&(cable, upper, lower, _)| (places[if up { upper } else { lower }].center(), cable))
            .collect();
        beside.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let rank = beside.iter().position(|&(_, cable)| cable == index).unwrap_or(0);
        let step = STRAIGHT_STEP.min((places[owner].width - 20.0) / (beside.len().max(2) - 1) as f64);
        let x = places[owner].center() + (rank as f64 - (beside.len() - 1) as f64 / 2.0) * step;
        // Inside the other node too, which may be the narrower one.
        down.cables[at].3 = x.clamp(places[other].x + 8.0, places[other].right() - 8.0);
        let lines = label(&cables[index], cables[index].a == upper, Way::Down);
        // Side by side, labels stand below one another.
        let before = beside[rank + 1..].iter().map(|&(_, cable)| label(&cables[cable], true, Way::Down).len()).sum();
        down.lines.push((lines.len(), before));
        wires[index].lines = lines;
    }
    down
}

/// Gives tracks their ends. At a node shorter tracks start nearer to where they go, so that they lie inside longer ones.
fn attach(cables: &[Cable], places: &[Place], row: i32, down: &Down, tracks: &mut [Track]) {
    let mut nodes: Vec<usize> = tracks.iter().flat_map(|track| [cables[track.cable].a, cables[track.cable].b]).collect();
    nodes.sort_unstable();
    nodes.dedup();
    for node in nodes {
        let mut ends: Vec<(f64, usize)> = Vec::new();
        for (at, track) in tracks.iter().enumerate() {
            let (a, b) = (cables[track.cable].a, cables[track.cable].b);
            if node == a || node == b {
                let reach = places[if node == a { b } else { a }].center() - places[node].center();
                // Largest where the track is shortest to the right, smallest where it is shortest to the left.
                ends.push((1.0 / reach, at));
            }
        }
        ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let left = ends.iter().filter(|end| end.0 < 0.0).count();
        // Straight cables leave at the middle of the same side, and tracks leave room for them.
        let straight = down.cables.iter().filter(|cable| if row > 0 { cable.1 == node } else { row == 0 && cable.2 == node }).count();
        let most = left.max(ends.len() - left).max(1) as f64;
        let room = places[node].width / 2.0 - 6.0 - if straight > 0 { (straight - 1) as f64 * STRAIGHT_STEP / 2.0 } else { 0.0 };
        for (rank, &(reach, at)) in ends.iter().enumerate() {
            let offset = if straight > 0 {
                // The innermost of either side is one step away from the straight ones.
                let step = (room / most).clamp(1.0, TRACK_STEP);
                let ranks = if rank < left { rank as f64 - left as f64 } else { (rank - left) as f64 + 1.0 };
                ranks * step + ranks.signum() * (straight - 1) as f64 * STRAIGHT_STEP / 2.0
            } else {
                let step = TRACK_STEP.min(2.0 * room / (ends.len().max(2) - 1) as f64);
                (rank as f64 - (ends.len() - 1) as f64 / 2.0) * step
            };
            let x = places[node].center() + offset;
            if reach > 0.0 { tracks[at].left = x } else { tracks[at].right = x }
        }
    }
}

/// Gives tracks their levels: the lowest that is free over their whole length, short ones first.
fn stack(tracks: &mut [Track]) {
    let mut order: Vec<usize> = (0..tracks.len()).collect();
    order.sort_by(|&a, &b| {
        let length = |at: usize| tracks[at].right - tracks[at].left;
        length(a).round().total_cmp(&length(b).round()).then(tracks[a].left.total_cmp(&tracks[b].left))
    });
    let mut levels: Vec<Vec<(f64, f64)>> = Vec::new();
    for at in order {
        let (left, right) = (tracks[at].left, tracks[at].right);
        // Above everything that it spans, so that what it spans does not cross it.
        let spans = |taken: &[(f64, f64)]| taken.iter().any(|&(begin, end)| begin < right + 8.0 && end > left - 8.0);
        let level = levels.iter().rposition(|taken| spans(taken)).map_or(0, |level| level + 1);
        if level == levels.len() {
            levels.push(Vec::new());
        }
        levels[level].push((left, right));
        tracks[at].level = level;
    }
}

/// Points and labels, now that everything has its height.
fn finish(
    cables: &[Cable],
    rows: &[i32],
    places: &[Place],
    down: &Down,
    tracks: &[(i32, Vec<Track>)],
    wires: &mut [Wire],
    label: &impl Fn(&Cable, bool, Way) -> Vec<Line>,
) {
    for (wire, cable) in wires.iter_mut().zip(cables).filter(|(wire, _)| !wire.points.is_empty()) {
        let y = places[cable.a].y + BOX.1 / 2.0;
        wire.points.iter_mut().for_each(|point| point.1 = y);
        wire.label.1 = y - 6.0 - LINE * (wire.lines.len() - 1) as f64;
    }
    for (&(cable, upper, lower, x), &(_, before)) in down.cables.iter().zip(&down.lines) {
        let from = places[upper].y + places[upper].height;
        let wire = &mut wires[cable];
        wire.points = vec![(x, from), (x, places[lower].y)];
        // Below the tracks of the upper row, above those of the GPUs.
        let track_levels = |row: i32| {
            let of_row = tracks.iter().find(|entry| entry.0 == row);
            of_row.and_then(|entry| entry.1.iter().map(|track| track.level + 1).max()).unwrap_or(0) as f64
        };
        let levels = if rows[upper] > 0 { track_levels(rows[upper]) } else { 0.0 };
        let skipped = if levels > 0.0 { levels * TRACK + 12.0 } else { 0.0 };
        // A row of several stories is passed before the label.
        let row = (0..places.len()).filter(|&node| rows[node] == rows[upper]).map(|node| places[node].y + places[node].height);
        wire.label = (x + 6.0, row.fold(from, f64::max) + skipped + ROW_GAP / 2.0 + 8.0 + LINE * before as f64);
        wire.anchor = Some(Anchor::Start);
    }
    for (row, tracks) in tracks {
        for track in tracks {
            let cable = &cables[track.cable];
            let (first, last) = if places[cable.a].x < places[cable.b].x { (cable.a, cable.b) } else { (cable.b, cable.a) };
            let away = 14.0 + track.level as f64 * TRACK;
            let edge = |node: usize| if *row > 0 { places[node].y + places[node].height } else { places[node].y };
            let y = if *row > 0 { edge(first).max(edge(last)) + away } else { edge(first).min(edge(last)) - away };
            let lines = label(cable, first == cable.a, Way::Across);
            let text = lines.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join(" ");
            let line = Line { text, marks: lines.into_iter().flat_map(|line| line.marks).collect() };
            let half = line.width() / 2.0 + 3.0;
            let lines = vec![line];
            // The place nearest to the middle that fewest other cables cross.
            let upright = tracks.iter().filter(|other| other.level > track.level).flat_map(|other| [other.left, other.right]);
            let passing = down
                .cables
                .iter()
                .filter(|cable| if *row > 0 { rows[cable.1] <= *row && rows[cable.2] > *row } else { rows[cable.1] < *row });
            let upright: Vec<f64> = upright.chain(passing.map(|cable| cable.3)).collect();
            let middle = (track.left + track.right) / 2.0;
            let room = ((track.right - track.left) / 2.0 - half).max(0.0);
            let crossings = |x: f64| upright.iter().filter(|&&other| (other - x).abs() < half).count();
            let offsets = (0..=(room / 6.0) as i32).flat_map(|step| [f64::from(step) * 6.0, f64::from(-step) * 6.0]);
            let x = offsets.map(|offset| middle + offset).min_by_key(|&x| crossings(x)).unwrap_or(middle);
            wires[track.cable] = Wire {
                points: vec![(track.left, edge(first)), (track.left, y), (track.right, y), (track.right, edge(last))],
                label: (x, y + 4.0),
                anchor: Some(Anchor::Middle),
                lines,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cables::cables;
    use super::*;
    use mpgpu::topology::discover::{Nvlink, Pcie, Remote, Seen, SeenGpu};
    use mpgpu::topology::{LinkId, SharedResource, discover, parse, preset, preset_names};

    fn laid_out(topology: &Topology) -> Layout {
        let figures = |cable: &Cable, _, way| match way {
            Way::Down => {
                vec![Line { text: "123.4".into(), marks: cable.marks_there.clone() }, Line { text: "\u{3a3} 123.4".into(), marks: vec![] }]
            }
            Way::Across => vec![Line { text: "123.4".into(), marks: cable.marks_there.clone() }],
        };
        layout(topology, &cables(topology).0, figures)
    }

    fn overlap([ax, ay, aw, ah]: [f64; 4], [bx, by, bw, bh]: [f64; 4]) -> bool {
        ax + 0.5 < bx + bw && bx + 0.5 < ax + aw && ay + 0.5 < by + bh && by + 0.5 < ay + ah
    }

    /// Boxes and labels are apart, lines end at the boxes that they join, and nothing sticks out.
    #[track_caller]
    fn assert_readable(topology: &Topology) {
        let layout = laid_out(topology);
        let place = |place: &Place| [place.x, place.y, place.width, place.height];
        let mut solid: Vec<(String, [f64; 4])> =
            topology.nodes.iter().zip(&layout.places).map(|(node, at)| (node.name.clone(), place(at))).collect();
        let (cables, _) = cables(topology);
        for (cable, wire) in cables.iter().zip(&layout.wires) {
            let name = format!("{}-{}", topology.nodes[cable.a].name, topology.nodes[cable.b].name);
            solid.push((format!("label of {name}"), label_box(wire)));
            let ends = [wire.points[0], wire.points[wire.points.len() - 1]];
            let touches = |node: usize, (x, y): (f64, f64)| {
                let [left, top, width, height] = place(&layout.places[node]);
                (left..=left + width).contains(&x) && (top - 0.1..=top + height + 0.1).contains(&y)
            };
            let joined = |a, b| touches(a, ends[0]) && touches(b, ends[1]);
            assert!(joined(cable.a, cable.b) || joined(cable.b, cable.a), "{}: {name} ends at {ends:?}", topology.name);
        }
        // Labels of several links of one GPU stand below one another beside the last of them; the links of others they leave alone.
        let gpu_of = |cable: &Cable| [cable.a, cable.b].into_iter().find(|&node| topology.nodes[node].kind == NodeKind::Gpu);
        for (cable, wire) in cables.iter().zip(&layout.wires).filter(|(_, wire)| wire.points.len() == 2) {
            let [x, y, width, height] = label_box(wire);
            for (other, passing) in cables.iter().zip(&layout.wires).filter(|(_, wire)| wire.points.len() == 2) {
                let [(at, from), (_, to)] = passing.points[..] else { continue };
                let covers = (x..x + width).contains(&at) && from < y + height && to > y;
                let apart = gpu_of(cable).is_some() && gpu_of(other).is_some() && gpu_of(cable) != gpu_of(other);
                assert!(!(apart && covers), "{}: {:?} covers the link at {at}", topology.name, wire.lines);
            }
        }
        for (at, (name, area)) in solid.iter().enumerate() {
            for (other, elsewhere) in &solid[at + 1..] {
                assert!(!overlap(*area, *elsewhere), "{}: {name} {area:?} and {other} {elsewhere:?}", topology.name);
            }
            let [x, y, width, height] = *area;
            let inside = x > -0.1 && y > -0.1 && x + width < layout.width + 0.1 && y + height < layout.height + 0.1;
            assert!(inside, "{}: {name} {area:?} sticks out of {} x {}", topology.name, layout.width, layout.height);
        }
    }

    #[test]
    fn presets_are_drawn_without_overlaps() {
        for name in preset_names() {
            assert_readable(&preset(name).expect("a preset"));
        }
    }

    #[test]
    fn links_that_share_much_have_room_for_all_its_marks() {
        let mut topology = preset("pcie-4").expect("a preset");
        let links: Vec<_> = (0..topology.links.len() as u32).map(LinkId).collect();
        let shared = |i| SharedResource { name: format!("shared{i}"), capacity: 1e9, staged: None, links: links.clone() };
        topology.shared.extend((0..7).map(shared));
        assert_readable(&topology);
    }

    #[test]
    fn discovered_nodes_are_drawn_without_overlaps() {
        let seen = |count: u32, remote: &dyn Fn(u32) -> Vec<Remote>| {
            let gpu = |i| SeenGpu {
                name: "GPU".into(),
                capability: (9, 0),
                pcie: Some(Pcie { generation: 5, width: 16 }),
                nvlinks: Some(remote(i).into_iter().map(|remote| Nvlink { version: 4, remote }).collect()),
            };
            let peers = (0..count).flat_map(|a| (0..count).filter(move |b| *b != a).map(move |b| (a, b))).collect();
            discover::topology(&Seen { gpus: (0..count).map(gpu).collect(), peers })
        };
        for count in [1, 2, 3, 4, 8, 16] {
            assert_readable(&seen(count, &|_| vec![Remote::Other; 18]));
            assert_readable(&seen(count, &|_| Vec::new()));
        }
        for count in [2, 3, 4, 6] {
            assert_readable(&seen(count, &|i| (0..count).filter(|j| *j != i).map(Remote::Gpu).collect()));
        }
    }

    #[test]
    fn layout_follows_the_structure_and_not_the_order_of_names() {
        // Four planes of NVSwitches; GPUs alternate between sockets, one socket has no GPU, a switch joins nothing but another.
        let topology = parse(
            r#"
            name = "odd"
            node = [
                { name = "far", kind = "host" }, { name = "a", kind = "gpu" }, { name = "b", kind = "gpu" }, { name = "c", kind = "gpu" },
                { name = "d", kind = "gpu" }, { name = "near", kind = "host" }, { name = "idle", kind = "host" },
                { name = "n0", kind = "switch", peer = true }, { name = "n1", kind = "switch", peer = true },
                { name = "n2", kind = "switch", peer = true }, { name = "n3", kind = "switch", peer = true },
                { name = "r0", kind = "switch" }, { name = "r1", kind = "switch" }, { name = "r2", kind = "switch" },
            ]
            [[link]]
            between = [["a", "r0"], ["c", "r0"], ["b", "r1"], ["d", "r1"]]
            kind = "pcie"
            bandwidth = 10e9
            [[link]]
            between = [
                ["a", "n0"], ["b", "n0"], ["c", "n0"], ["d", "n0"], ["a", "n1"], ["b", "n1"], ["c", "n1"], ["d", "n1"],
                ["a", "n2"], ["b", "n2"], ["c", "n2"], ["d", "n2"], ["a", "n3"], ["b", "n3"], ["c", "n3"], ["d", "n3"],
            ]
            kind = "nvlink"
            bandwidth = 100e9
            [[link]]
            between = [["r0", "near"], ["r1", "far"], ["r0", "r1"], ["r1", "r2"], ["r0", "r2"], ["r2", "idle"]]
            kind = "host"
            bandwidth = 50e9
            "#,
        )
        .expect("well formed");
        assert_readable(&topology);
        let layout = laid_out(&topology);
        let at = |name: &str| layout.places[topology.nodes.iter().position(|node| node.name == name).expect("a node")];
        assert!(at("b").x < at("d").x && at("d").x < at("a").x && at("a").x < at("c").x, "GPUs of one switch stand together");
        assert!(at("a").y < at("r0").y && at("r0").y < at("near").y, "host memory is last");
    }
}
