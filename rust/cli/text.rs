//! Formats paragraphs and tables for a terminal, and prints JSON for programs.

use crate::arguments::Failure;
use serde::Serialize;
use std::io::{BufWriter, ErrorKind, Write};

/// Prints a value as JSON without building the whole text in memory. A closed standard output is not an error.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let mut out = BufWriter::with_capacity(1 << 16, std::io::stdout().lock());
    let written = serde_json::to_writer_pretty(&mut out, value).map_err(std::io::Error::from);
    match written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("standard output: {error}").into()),
        _ => Ok(()),
    }
}

/// Breaks a text into lines of at most `letters` characters, after `; ` if possible, and between words if not. A word that is longer than
/// `letters` is not broken and has its own line.
pub fn wrap(text: &str, letters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for clause in text.split_inclusive("; ") {
        match lines.last_mut() {
            Some(line) if line.chars().count() + clause.trim_end().chars().count() <= letters => line.push_str(clause),
            _ => {
                for word in clause.split_inclusive(' ') {
                    match lines.last_mut() {
                        Some(line)
                            if !line.is_empty()
                                && !line.ends_with("; ")
                                && line.chars().count() + word.trim_end().chars().count() <= letters =>
                        {
                            line.push_str(word)
                        }
                        _ => lines.push(word.to_owned()),
                    }
                }
            }
        }
    }
    lines.iter_mut().for_each(|line| line.truncate(line.trim_end().len()));
    lines
}

/// Returns an indented table as text. The first column is aligned to the left, the other columns to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    columns(rows, 1).map(|line| format!("  {line}").trim_end().to_owned() + "\n").collect()
}

/// Returns the rows of a table as lines with aligned columns. The first `left` columns are aligned to the left, the others to the right.
/// Rows may have different numbers of cells.
pub fn columns(rows: &[Vec<String>], left: usize) -> impl Iterator<Item = String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    rows.iter().map(move |row| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(at, (cell, &width))| if at < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clauses_stay_whole_where_they_can() {
        assert_eq!(wrap("4 x H200; seen: NVLinks; assumed: much", 24), ["4 x H200; seen: NVLinks;", "assumed: much"]);
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("unbreakable a", 3), ["unbreakable", "a"]);
        assert!(wrap("", 10).is_empty());
    }
}
