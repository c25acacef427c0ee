//! Writes SVG files. Each shape has one class, texts are escaped, and coordinates have no needless digits.
//!
//! The drawings need only three kinds of element. The crate `svg` would bring no advantage, and would first build a tree of elements in
//! memory.

use std::fmt::{Display, Write};

/// SVG picture to which shapes are added one by one.
pub struct Svg {
    body: String,
}

/// Horizontal position of a text relative to its point.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Returns an upper bound for the width of a text with font size `size`. In the widest of the fonts named in [`Svg::finish`], a character
/// takes on average 0.62 of the font size, and an arrow 0.85.
pub fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(|c| if c.is_ascii() { 0.62 } else { 0.85 }).sum::<f64>() * size
}

/// Formats a coordinate with one decimal place, or with none if the decimal is zero.
fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    match text.strip_suffix(".0") {
        Some("-0") => "0".into(),
        Some(whole) => whole.into(),
        None => text,
    }
}

/// Escapes `<`, `>`, `&` and quotes, and replaces control characters, which XML does not allow, by blanks.
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
        // Writing to a string cannot fail.
        let _ = self.body.write_fmt(element);
        self.body.push('\n');
    }

    /// Adds a rectangle. `tip` is its tool tip.
    pub fn rectangle(&mut self, class: &str, [x, y, width, height]: [f64; 4], tip: &str) {
        let [x, y, width, height] = [x, y, width, height].map(number);
        let end = if tip.is_empty() { "/>".into() } else { format!("><title>{}</title></rect>", escaped(tip)) };
        self.push(format_args!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{end}"));
    }

    /// Adds a line from the first point to the second.
    pub fn line(&mut self, class: &str, width: f64, from: (f64, f64), to: (f64, f64)) {
        let [x, y, to_x, to_y, width] = [from.0, from.1, to.0, to.1, width].map(number);
        self.push(format_args!("<path class=\"{class}\" stroke-width=\"{width}\" d=\"M{x} {y}L{to_x} {to_y}\"/>"));
    }

    /// Adds an arc between two points at equal height; `rise` is its height in the middle.
    pub fn arc(&mut self, class: &str, width: f64, from: (f64, f64), to: (f64, f64), rise: f64) {
        // A cubic curve rises to three quarters of the height of its control points.
        let [x, y, to_x, control, width] = [from.0, from.1, to.0, from.1 - rise / 0.75, width].map(number);
        self.push(format_args!(
            "<path class=\"{class}\" stroke-width=\"{width}\" d=\"M{x} {y}C{x} {control} {to_x} {control} {to_x} {y}\"/>"
        ));
    }

    /// Adds a text whose base line passes through the point (x, y).
    pub fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let (x, y, text) = (number(x), number(y), escaped(text));
        self.push(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\"{anchor}>{text}</text>"));
    }

    /// Adds an opaque rectangle of class `g` for a text that the caller adds later at the same point, so that no line crosses the text.
    pub fn ground(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str, size: f64) {
        let width = text_width(text, size) + 2.0;
        let left = match anchor {
            Anchor::Start => x - 1.0,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width + 1.0,
        };
        self.rectangle("g", [left, y - 0.9 * size, width, 1.2 * size], "");
    }

    /// Returns the complete SVG file. The background is white, so that the picture is readable on dark pages too.
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
