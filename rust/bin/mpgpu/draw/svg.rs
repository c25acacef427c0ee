//! A small SVG writer: shapes with a class each, text that is escaped, coordinates without needless digits.
//!
//! Own code, because the drawings need six kinds of element; the `svg` crate would add a tree of them in between and nothing else.

use std::fmt::{Display, Write};

/// A picture in the making.
pub struct Svg {
    body: String,
}

/// Where a text stands relative to its point.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
}

/// Width of a text as drawn, at most: of the fonts named in [`Svg::finish`] the widest takes 0.62 of its size for a letter on average,
/// and 0.85 for an arrow.
pub fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(|c| if c.is_ascii() { 0.62 } else { 0.85 }).sum::<f64>() * size
}

/// A coordinate with one decimal, and none where it is zero.
fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    match text.strip_suffix(".0") {
        Some("-0") => "0".into(),
        Some(whole) => whole.into(),
        None => text,
    }
}

/// Text in which `<`, `>`, `&` and quotes stand for themselves. Control characters, which XML does not allow, become blanks.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}

impl Svg {
    pub fn new() -> Svg {
        Svg { body: String::new() }
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// A rectangle with this corner radius, and what a pointer that rests on it is told.
    pub fn rectangle(&mut self, class: &str, [x, y, width, height]: [f64; 4], radius: f64, tip: &str) {
        let [x, y, width, height, radius] = [x, y, width, height, radius].map(number);
        let radius = if radius == "0" { String::new() } else { format!(" rx=\"{radius}\"") };
        let class = escaped(class);
        if tip.is_empty() {
            self.push(format_args!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{radius}/>"));
        } else {
            let tip = escaped(tip);
            self.push(format_args!(
                "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{radius}><title>{tip}</title></rect>"
            ));
        }
    }

    /// A line through these points, its corners rounded.
    pub fn line(&mut self, class: &str, width: f64, points: &[(f64, f64)], tip: &str) {
        const RADIUS: f64 = 6.0;
        let mut path = String::new();
        for (at, &(x, y)) in points.iter().enumerate() {
            let put = |path: &mut String, command: &str, x: f64, y: f64| {
                let _ = write!(path, "{command}{} {}", number(x), number(y));
            };
            match (at.checked_sub(1).map(|before| points[before]), points.get(at + 1)) {
                (None, _) => put(&mut path, "M", x, y),
                (Some(_), None) => put(&mut path, "L", x, y),
                (Some(before), Some(&after)) => {
                    let towards = |(tx, ty): (f64, f64)| {
                        let length = (tx - x).hypot(ty - y).max(f64::MIN_POSITIVE);
                        let step = RADIUS.min(length / 2.0) / length;
                        (x + (tx - x) * step, y + (ty - y) * step)
                    };
                    let (from, to) = (towards(before), towards(after));
                    put(&mut path, "L", from.0, from.1);
                    put(&mut path, "Q", x, y);
                    put(&mut path, " ", to.0, to.1);
                }
            }
        }
        let (class, width, tip) = (escaped(class), number(width), escaped(tip));
        let tip = if tip.is_empty() { "/>".into() } else { format!("><title>{tip}</title></path>") };
        self.push(format_args!("<path class=\"{class}\" stroke-width=\"{width}\" d=\"{path}\"{tip}"));
    }

    /// A text whose base line passes the point.
    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
        };
        let (class, x, y, text) = (escaped(class), number(x), number(y), escaped(text));
        self.push(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{text}</text>"));
    }

    /// A filled circle.
    pub fn circle(&mut self, class: &str, (x, y): (f64, f64), radius: f64) {
        let (class, x, y, radius) = (escaped(class), number(x), number(y), number(radius));
        self.push(format_args!("<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"/>"));
    }

    /// The file: white, so that it reads on dark pages too, as wide as given and no wider than the page it stands in.
    pub fn finish(self, width: f64, height: f64, title: &str, style: &str) -> String {
        let (width, height): (&dyn Display, &dyn Display) = (&number(width.ceil()), &number(height.ceil()));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"Helvetica,Arial,'DejaVu Sans',sans-serif\">\n<title>{}</title>\n<style>{style}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            escaped(title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_file_cannot_break_the_picture() {
        let mut svg = Svg::new();
        svg.text("a", (1.0, 2.04), Anchor::Middle, "<b> & \"c\"\n");
        assert_eq!(svg.body, "<text class=\"a\" x=\"1\" y=\"2\" text-anchor=\"middle\">&lt;b&gt; &amp; &quot;c&quot; </text>\n");
    }

    #[test]
    fn coordinates_have_no_needless_digits() {
        assert_eq!([0.0, -0.04, 12.0, 12.25, 1e3].map(number), ["0", "0", "12", "12.2", "1000"]);
    }
}
