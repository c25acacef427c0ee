//! Draws the speed-ups of tuning trials as a heat map. A column is a number of partitions, and a row is a method of copying with a number
//! of thread blocks.

use super::svg::{Anchor, Svg, text_width};

/// Contents of one heat map: headings, and one speed-up for each column in each row.
pub struct HeatMap {
    pub title: String,
    /// Headings of the columns, with two lines of text for each column.
    pub columns: Vec<[String; 2]>,
    /// Rows of the heat map. Each row has a name, and a speed-up for each column. `None` means that the combination was not tried.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
}

/// Fill colours of the cells, from no gain to the largest gain. Slowdowns are red instead. Successive colours differ in lightness, for grey
/// printers and colour-blind readers.
const COLOURS: [&str; 6] = ["#f7fbff", "#d0e1f2", "#94c4df", "#4a98c9", "#1764ab", "#08306b"];
const FIRST_DARK: usize = 3;
const LOSS: f64 = 0.98;

const STYLE: &str = "\
.t{font-size:15px;font-weight:bold}.n{font-size:12px}.a{font-size:11px;fill:#444;font-variant-numeric:tabular-nums}\
.b{font-size:11px;fill:#111}.w{font-size:11px;fill:#fff}rect{stroke:#fff;stroke-width:1}.l{fill:#f4b8ae}.e{fill:#f4f4f4}";

const MARGIN: f64 = 24.0;
const CELL: [f64; 2] = [62.0, 30.0];

/// Returns an SVG file with the heat maps one below the other.
pub fn heat(maps: &[HeatMap]) -> String {
    let names = maps.iter().flat_map(|map| &map.rows).map(|(name, _)| text_width(name, 12.0)).fold(0.0, f64::max);
    let left = MARGIN + names + 12.0;
    let mut svg = Svg::new();
    let (mut y, mut width): (f64, f64) = (MARGIN, 0.0);
    for HeatMap { title, columns, rows } in maps {
        let most = rows.iter().flat_map(|(_, cells)| cells.iter().flatten()).copied().fold(1.0, f64::max);
        svg.text("t", (MARGIN, y + 14.0), Anchor::Start, title);
        let top = y + 58.0;
        for (at, lines) in columns.iter().enumerate() {
            let middle = left + (at as f64 + 0.5) * CELL[0];
            lines.iter().zip([22.0, 8.0]).for_each(|(line, up)| svg.text("a", (middle, top - up), Anchor::Middle, line));
        }
        for (row, (name, cells)) in rows.iter().enumerate() {
            let y = top + row as f64 * CELL[1];
            svg.text("n", (MARGIN, y + 19.0), Anchor::Start, name);
            for (at, cell) in cells.iter().enumerate() {
                let x = left + at as f64 * CELL[0];
                let steps = (COLOURS.len() - 1) as f64;
                let colour = cell.map(|gain| ((gain - 1.0) / (most - 1.0).max(0.05) * steps).round().clamp(0.0, steps) as usize);
                let class = match (cell, colour) {
                    (Some(gain), _) if *gain < LOSS => "l".into(),
                    (_, Some(colour)) => format!("c{colour}"),
                    _ => "e".into(),
                };
                svg.rectangle(&class, [x, y, CELL[0], CELL[1]], "");
                if let Some(gain) = cell {
                    let text = if colour >= Some(FIRST_DARK) { "w" } else { "b" };
                    svg.text(text, (x + CELL[0] / 2.0, y + 19.0), Anchor::Middle, &format!("{gain:.2}"));
                }
            }
        }
        width = width.max(left + columns.len() as f64 * CELL[0]).max(MARGIN + text_width(title, 15.0));
        y = top + rows.len() as f64 * CELL[1] + MARGIN;
    }
    let classes: String = COLOURS.iter().enumerate().map(|(at, fill)| format!(".c{at}{{fill:{fill}}}")).collect();
    svg.finish(width + MARGIN, y, "Speed-up of transfers in partitions", &format!("{STYLE}{classes}"))
}
