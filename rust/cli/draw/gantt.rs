//! Draws a timeline as a Gantt chart in SVG. Each internal stream ("lane") has a row, the rows of one device are adjacent, and time
//! increases to the right.

use super::svg::{Anchor, Svg, text_width};
use mpgpu_core::model::timeline::{Span, Timeline};
use mpgpu_core::topology::DeviceId;
use mpgpu_core::units::{size, time};

/// Fill colours of paths. Adjacent entries, and the first four entries, differ in lightness as well as in hue, for grey printers and
/// colour-blind readers. A GPU in a node of eight has nine paths. If there are more than sixteen paths, the colours repeat, and the names
/// of the rows distinguish the paths.
const COLOURS: [&str; 16] = [
    "#08427a", "#f0a830", "#d1495b", "#bfe3f5", "#00785a", "#f0e442", "#5e3c86", "#cc79a7", "#6b4423", "#9be29b", "#1f1f1f", "#ffc9a8",
    "#8b1a1a", "#56b4e9", "#556b2f", "#d9d2e9",
];

/// True if white text is easier to read than black text on the colour with this index. Every second colour is dark.
fn is_dark(colour: usize) -> bool {
    colour.is_multiple_of(2)
}

const STYLE: &str = "\
.t{font-size:17px;font-weight:bold}.d{font-size:12px;fill:#444}.n{font-size:12px}.v{font-size:13px;font-weight:bold}\
.a{font-size:11px;fill:#444;font-variant-numeric:tabular-nums}.e{font-size:11px;font-weight:bold;fill:#111}.b{font-size:10px;fill:#111}.w{font-size:10px;fill:#fff}\
.r0{fill:#f4f4f4}.r1{fill:#fafafa}.o{fill:#bbb;stroke:#777;stroke-width:.5}.p{fill:#fff;stroke:#222;stroke-dasharray:4 3}.g{fill:#fff}\
path{fill:none;stroke:#ddd}path.x{stroke:#888}path.z{stroke:#111}path.y{stroke:#444;stroke-opacity:.45}";

const MARGIN: f64 = 24.0;
const ROW: f64 = 24.0;
const CHART: f64 = 760.0;
/// Label of the additional bar that shows the time of plain copies.
const PLAIN: &str = "plain copies";
/// Vertical space between the last row and the bar of plain copies.
const PLAIN_SPACE: f64 = 10.0;
/// Maximum number of dependency arrows in the drawing. With more arrows, the drawing would be unreadable. The JSON output has all of them.
const MOST_ARROWS: usize = 160;

/// Contents of a chart other than its timeline.
pub struct Chart<'a> {
    /// Lines of text below the title of the chart.
    pub notes: &'a [String],
    /// True if dependencies between operations are drawn as arrows.
    pub arrows: bool,
    /// Time in seconds that plain copies of the same transfers take, drawn as an additional bar. `None` if no such bar is drawn.
    pub plain: Option<f64>,
}

/// Position and scale of the time axis in the drawing.
struct Axis {
    left: f64,
    /// Time in seconds at the right edge of the drawing.
    end: f64,
    top: f64,
    /// Vertical coordinate of the lower edge of the last row.
    bottom: f64,
}

impl Axis {
    fn x(&self, seconds: f64) -> f64 {
        self.left + seconds / self.end * CHART
    }

    /// Draws the title of the axis, its ticks and the vertical lines at the ticks.
    fn draw(&self, svg: &mut Svg, (step, unit, scale): (f64, &str, f64), bottom: f64) {
        svg.text("d", (self.left + CHART / 2.0, self.top - 26.0), Anchor::Middle, &format!("time in {unit}"));
        for tick in 0..=(self.end / step * 1.000_001) as usize {
            let seconds = tick as f64 * step;
            svg.line("x", 0.5, (self.x(seconds), self.top - 4.0), (self.x(seconds), bottom));
            let mark = ((seconds * scale * 1000.0).round() / 1000.0).to_string();
            svg.text("a", (self.x(seconds), self.top - 9.0), Anchor::Middle, &mark);
        }
    }

    /// Draws a vertical line at the end of the last copy, with the time. The text is in the row of the first device's heading, because that
    /// row has no bars.
    fn mark_end(&self, svg: &mut Svg, seconds: f64) {
        let (x, text) = (self.x(seconds), format!("last copy ends at {}", time(seconds)));
        svg.line("z", 1.5, (x, self.top - 4.0), (x, self.bottom));
        let is_left = x + text_width(&text, 11.0) + 8.0 > self.left + CHART;
        let (point, anchor) = if is_left { (x - 5.0, Anchor::End) } else { (x + 5.0, Anchor::Start) };
        svg.ground((point, self.top + 13.0), anchor, &text, 11.0);
        svg.text("e", (point, self.top + 13.0), anchor, &text);
    }

    /// Draws the bar of plain copies below the rows. `plain` is the duration of the plain copies and `last` the time at which the last copy
    /// of the plan ends, in seconds.
    fn compare(&self, svg: &mut Svg, plain: f64, last: f64) {
        let (y, wide) = (self.bottom + PLAIN_SPACE, plain / self.end * CHART);
        svg.text("v", (MARGIN, y + 16.0), Anchor::Start, PLAIN);
        svg.rectangle("p", [self.left, y + 3.0, wide.max(0.6), ROW - 6.0], &format!("the same transfers by {PLAIN}: {}", time(plain)));
        let ratio = if last > 0.0 { format!("the same transfers, {:.2} times as long", plain / last) } else { String::new() };
        if text_width(&ratio, 10.0) <= wide - 6.0 {
            svg.text("b", (self.left + wide / 2.0, y + 15.5), Anchor::Middle, &ratio);
        }
        svg.text("a", (self.left + CHART + 8.0, y + 16.0), Anchor::Start, &time(plain));
    }
}

/// Returns the end time of the last operation in seconds.
pub fn last_copy(timeline: &Timeline) -> f64 {
    timeline.spans.iter().filter(|span| span.op.is_some()).map(|span| span.end).fold(0.0, f64::max)
}

/// Returns the chart of a timeline as an SVG file. `path` returns the name of the path to which a span (bar of one operation) belongs.
/// Spans of one path have the same colour; spans for which `path` returns `None` are grey.
pub fn gantt(timeline: &Timeline, path: impl Fn(&Span) -> Option<String>, chart: &Chart<'_>) -> String {
    let mut paths: Vec<String> = Vec::new();
    let mut colour = |span: &Span| {
        let name = path(span)?;
        Some(paths.iter().position(|known| *known == name).unwrap_or_else(|| {
            paths.push(name);
            paths.len() - 1
        }))
    };
    let colours: Vec<Option<usize>> = timeline.spans.iter().map(&mut colour).collect();
    let own = timeline.spans.iter().map(|span| span.end).fold(0.0, f64::max);
    let last = chart.plain.map_or(own, |plain| own.max(plain));
    let ticks = axis(last, own);
    let end = if last > 0.0 { last * 1.01 } else { ticks.0 };

    // The rows are a heading for each device, followed by its internal streams.
    let mut order: Vec<usize> = (0..timeline.lanes.len()).collect();
    // The host is first, because it submits the work of the other devices.
    order.sort_by_key(|&lane| (!timeline.lanes[lane].device.is_host(), timeline.lanes[lane].device.0.abs(), lane));
    let label = |lane: usize| {
        let lane = &timeline.lanes[lane];
        lane.name.strip_prefix(&format!("{} ", lane.device)).unwrap_or(&lane.name).to_owned()
    };
    let names = order.iter().map(|&lane| text_width(&label(lane), 12.0) + 20.0).fold(110.0, f64::max);
    let (left, mut y) = (MARGIN + names, MARGIN + 14.0);
    let totals: Vec<String> = (0..timeline.lanes.len()).map(|lane| total(timeline, lane)).collect();
    let width = left + CHART + totals.iter().map(|text| text_width(text, 11.0) + 8.0).fold(0.0, f64::max) + MARGIN;

    let mut svg = Svg::new();
    svg.text("t", (MARGIN, y), Anchor::Start, &timeline.name);
    let nature = if timeline.modelled { "Modelled by the simulator, not measured." } else { "Measured." };
    for line in std::iter::once(nature).chain(chart.notes.iter().map(String::as_str)) {
        y += 17.0;
        svg.text("d", (MARGIN, y), Anchor::Start, line);
    }
    y += 24.0;
    y = legend(&mut svg, &paths, colours.contains(&None), width, y);
    let top = y + 48.0;

    let mut at = top;
    let mut rows = vec![0.0; timeline.lanes.len()];
    let mut headings = Vec::new();
    let mut before: Option<DeviceId> = None;
    for &lane in &order {
        if before != Some(timeline.lanes[lane].device) {
            at += if before.is_some() { 8.0 } else { 0.0 };
            headings.push((timeline.lanes[lane].device, at));
            at += ROW - 4.0;
            before = Some(timeline.lanes[lane].device);
        }
        rows[lane] = at;
        at += ROW;
    }
    let lanes = Axis { left, end, top, bottom: at };
    let bottom = at + if chart.plain.is_some() { PLAIN_SPACE + ROW } else { 0.0 };
    let x = |seconds: f64| lanes.x(seconds);
    for (index, &lane) in order.iter().enumerate() {
        let class = if index % 2 == 0 { "r0" } else { "r1" };
        svg.rectangle(class, [left, rows[lane], CHART, ROW], "");
        svg.text("n", (MARGIN + 12.0, rows[lane] + 16.0), Anchor::Start, &label(lane));
        svg.text("a", (left + CHART + 8.0, rows[lane] + 16.0), Anchor::Start, &totals[lane]);
    }
    for (device, y) in headings {
        svg.text("v", (MARGIN, y + 15.0), Anchor::Start, &device.to_string());
    }
    lanes.draw(&mut svg, ticks, bottom);
    if chart.arrows && timeline.arrows.len() <= MOST_ARROWS {
        for arrow in &timeline.arrows {
            let (from, to) = (&timeline.spans[arrow.from], &timeline.spans[arrow.to]);
            let middle = |span: &Span| rows[span.lane] + ROW / 2.0;
            svg.line("y", 0.7, (x(from.end), middle(from)), (x(to.begin), middle(to)));
        }
    }

    let copied = last_copy(timeline);
    if copied > 0.0 {
        lanes.mark_end(&mut svg, copied);
    }
    if let Some(plain) = chart.plain {
        lanes.compare(&mut svg, plain, copied);
    }

    for (span, colour) in timeline.spans.iter().zip(&colours) {
        // Each bar has a minimum width, so that short operations stay visible.
        let (begin, wide) = (x(span.begin), (x(span.end) - x(span.begin)).max(0.6));
        let row = rows[span.lane];
        let class = colour.map_or("o".into(), |colour| format!("c{}", colour % COLOURS.len()));
        svg.rectangle(&class, [begin, row + 3.0, wide, ROW - 6.0], &tip(span));
        if let Some(text) = inside(span, wide - 6.0) {
            let dark = colour.is_some_and(is_dark);
            svg.text(if dark { "w" } else { "b" }, (begin + wide / 2.0, row + 15.5), Anchor::Middle, &text);
        }
    }
    let classes: String =
        COLOURS.iter().enumerate().map(|(at, fill)| format!(".c{at}{{fill:{fill};stroke:#222;stroke-width:.4}}")).collect();
    svg.finish(width, bottom + MARGIN, &timeline.name, &format!("{STYLE}{classes}"))
}

/// Draws the legend, in lines of at most `width`, and returns the vertical coordinate below it.
fn legend(svg: &mut Svg, paths: &[String], others: bool, width: f64, mut y: f64) -> f64 {
    // Maximum number of paths in the legend. A halo exchange has dozens of paths, but a legend of a few lines is enough to read the
    // drawing.
    const MOST: usize = 24;
    let mut x = MARGIN;
    let mut entries: Vec<(String, &str)> =
        paths.iter().take(MOST).enumerate().map(|(at, name)| (format!("c{}", at % COLOURS.len()), name.as_str())).collect();
    if others {
        entries.push(("o".into(), "issuing, and spans without a path"));
    }
    for (class, name) in entries {
        let wide = 18.0 + text_width(name, 12.0) + 14.0;
        if x + wide > width - MARGIN && x > MARGIN {
            x = MARGIN;
            y += 18.0;
        }
        svg.rectangle(&class, [x, y - 10.0, 13.0, 11.0], "");
        svg.text("d", (x + 18.0, y), Anchor::Start, name);
        x += wide;
    }
    if paths.len() > MOST {
        svg.text("d", (x, y), Anchor::Start, &format!("and {} more", paths.len() - MOST));
    }
    y
}

/// Returns the scale of a time axis that ends at `last` seconds: the time in seconds between two ticks, the name of the unit of the ticks,
/// and the factor from seconds to this unit. The unit is the one in which [`time`] formats `own` seconds.
fn axis(last: f64, own: f64) -> (f64, &'static str, f64) {
    let (unit, scale) = match own {
        ..1e-3 => ("us", 1e6),
        ..1.0 => ("ms", 1e3),
        _ => ("s", 1.0),
    };
    // There are about ten ticks, at multiples of 1, 2 or 5 times a power of ten.
    let rough = (last * scale / 10.0).max(1e-6);
    let power = 10.0_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough * 0.999).unwrap_or(10.0 * power);
    (step / scale, unit, scale)
}

/// Returns the rate of an operation in GB/s, or `None` if it copies no data.
fn rate(span: &Span) -> Option<f64> {
    let seconds = span.end - span.begin;
    (span.bytes > 0 && seconds > 0.0).then(|| span.bytes as f64 / seconds / 1e9)
}

/// Returns, as text, the number of bytes that an internal stream copies, and its rate while it copies.
fn total(timeline: &Timeline, lane: usize) -> String {
    let spans = || timeline.spans.iter().filter(|span| span.lane == lane && span.bytes > 0);
    let bytes: u64 = spans().map(|span| span.bytes).sum();
    let busy: f64 = spans().map(|span| span.end - span.begin).sum();
    if bytes == 0 || busy <= 0.0 { String::new() } else { format!("{}, {:.1} GB/s", size(bytes), bytes as f64 / busy / 1e9) }
}

/// Returns the tool tip of the bar of an operation.
fn tip(span: &Span) -> String {
    let rate = rate(span).map_or(String::new(), |rate| format!(", {rate:.1} GB/s"));
    let op = span.op.map_or(String::new(), |op| format!("operation {op}: "));
    format!("{op}{}: {} to {}, {}{rate}", span.name, time(span.begin), time(span.end), time(span.end - span.begin))
}

/// Returns the label of the bar of an operation: its number of bytes and its rate, or as much of this as fits into `width`. Returns `None`
/// if nothing fits.
fn inside(span: &Span, width: f64) -> Option<String> {
    let bytes = if span.bytes > 0 { size(span.bytes) } else { span.name.clone() };
    let long = rate(span).map(|rate| format!("{bytes}, {rate:.1} GB/s"));
    [long, Some(bytes)].into_iter().flatten().find(|text| text_width(text, 10.0) <= width)
}

#[cfg(test)]
mod tests {
    use super::{COLOURS, axis};

    #[test]
    fn nine_paths_of_eight_gpus_have_nine_colours() {
        assert!(COLOURS.iter().enumerate().all(|(at, fill)| !COLOURS[..at].contains(fill)) && COLOURS.len() >= 9);
    }

    #[test]
    fn the_axis_has_about_ten_round_ticks_in_a_fitting_unit() {
        for (last, step, unit) in [(87e-6, 10e-6, "us"), (3.64e-3, 0.5e-3, "ms"), (0.9999e-3, 0.1e-3, "us"), (12.0, 2.0, "s")] {
            let (found, name, _) = axis(last, last);
            assert!((found - step).abs() < step * 1e-9, "{last}: {found}");
            assert_eq!(name, unit);
            assert!((5.0..=11.0).contains(&(last / found).ceil()), "{last}");
        }
        assert!(axis(0.0, 0.0).0 > 0.0, "a timeline of nothing has an axis too");
    }
}
