//! Implements `mpgpu sim`, which simulates plans on a modelled machine in virtual time.

mod adapt;
mod arguments;

pub use arguments::SimArguments;

use crate::arguments::shape;
use crate::machine;
use crate::text::columns as aligned;
use mpgpu_core::model::simulate::{Rank, Steady, steady};
use mpgpu_core::plan::{Engine, Options, Shape, plan};
use mpgpu_core::topology::Machine;
use mpgpu_core::units::{size, time};
use serde_json::{Value, json};
use std::error::Error;

pub fn run(arguments: &SimArguments) -> Result<String, Box<dyn Error>> {
    let machine = machine::in_force(arguments.topology.as_deref())?.machine;
    let rows = rows(arguments)?;
    if arguments.kernel.is_some() && arguments.window != [1] {
        return Err(
            "--window and --kernel cannot be combined, because executions with a kernel run one after the other; omit --window".into()
        );
    }
    if arguments.adapt.adapt {
        return adapt::run(arguments, &machine, &rows[0]);
    }
    let columns = columns(arguments);
    let mut table = Vec::with_capacity(rows.len());
    for row in &rows {
        let cells = columns.iter().map(|column| cell(&machine, arguments, row, column));
        table.push(cells.collect::<Result<Vec<Steady>, _>>()?);
    }
    let sweep = Sweep { machine: &machine, arguments, rows, columns, table };
    Ok(if arguments.json { format!("{:#}\n", sweep.to_json()) } else { sweep.to_text() })
}

/// Returns the transfers to simulate for each row of the result table.
fn rows(arguments: &SimArguments) -> Result<Vec<Vec<Shape>>, String> {
    let of = |bytes: Option<u64>| -> Result<Vec<Shape>, String> {
        let shapes = arguments.transfers.iter().map(|pair| {
            let bytes = bytes.or(pair.bytes).ok_or_else(|| {
                format!("{}:{}: the number of bytes is missing; write gpu0:gpu1:64M, or pass --sizes", pair.src, pair.dst)
            })?;
            Ok(shape(pair.src, pair.dst, bytes, arguments.pageable))
        });
        shapes.collect()
    };
    if arguments.sizes.is_empty() {
        return Ok(vec![of(None)?]);
    }
    if let Some(pair) = arguments.transfers.iter().find(|pair| pair.bytes.is_some()) {
        return Err(format!("{}:{}: --sizes gives the bytes of every transfer; omit them here", pair.src, pair.dst));
    }
    arguments.sizes.iter().flat_map(|sizes| &sizes.0).map(|&bytes| of(Some(bytes))).collect()
}

/// Settings with which the plans in one column of the result table are made and simulated.
struct Column {
    engine: Engine,
    /// Maximum number of paths of one transfer. If it is `None`, the model chooses the number.
    max_paths: Option<u32>,
    host_path: bool,
    window: u32,
}

/// Returns the columns of the result table. A speed-up compares a column with the first column that has the same window (number of
/// executions in flight).
fn columns(arguments: &SimArguments) -> Vec<Column> {
    let paths: Vec<Option<u32>> =
        if arguments.max_paths.is_empty() { vec![Some(1), None] } else { arguments.max_paths.iter().copied().map(Some).collect() };
    let mut columns: Vec<Column> = Vec::new();
    for &window in &arguments.window {
        for &engine in &arguments.engine {
            for &max_paths in &paths {
                for &host_path in &arguments.host {
                    // With one path, copies between GPUs always use the direct path. Two columns that differ only in the setting of the
                    // host path would be equal.
                    if max_paths == Some(1) && host_path != arguments.host[0] {
                        continue;
                    }
                    columns.push(Column { engine, max_paths, host_path, window });
                }
            }
        }
    }
    columns
}

fn cell(machine: &Machine, arguments: &SimArguments, shapes: &[Shape], column: &Column) -> Result<Steady, Box<dyn Error>> {
    let default = arguments.staged.options();
    let options =
        Options { engine: column.engine, max_paths: column.max_paths.unwrap_or(default.max_paths), host_path: column.host_path, ..default };
    let ranks = shapes.chunks(if arguments.apart { 1 } else { shapes.len() });
    let kernel = |of: &[Shape]| arguments.kernel.map_or(0.0, |kernel| kernel.times * most_sent(shapes, of) / kernel.rate);
    let ranks = ranks.map(|of| Ok(Rank { kernel: kernel(of), ..plan(machine, of, &options)?.as_rank() }));
    let ranks = ranks.collect::<Result<Vec<Rank>, mpgpu_core::plan::PlanError>>()?;
    Ok(steady(machine, &ranks, column.window)?)
}

/// Returns the largest number of bytes that any source device of `of` sends in one execution of all transfers (`all`). The maximum is used
/// because the kernels of all GPUs must end before the copies start.
fn most_sent(all: &[Shape], of: &[Shape]) -> f64 {
    let sent = |gpu| all.iter().filter(|shape| shape.src_device == gpu).map(|shape| shape.bytes as f64).sum::<f64>();
    of.iter().map(|shape| sent(shape.src_device)).fold(0.0, f64::max)
}

struct Sweep<'a> {
    machine: &'a Machine,
    arguments: &'a SimArguments,
    rows: Vec<Vec<Shape>>,
    columns: Vec<Column>,
    table: Vec<Vec<Steady>>,
}

impl Column {
    fn name(&self) -> String {
        let paths = match self.max_paths {
            None => "planned".to_owned(),
            Some(1) => "1 path".to_owned(),
            Some(n) => format!("{n} paths"),
        };
        if self.max_paths != Some(1) && !self.host_path { paths + ", no host" } else { paths }
    }
}

impl Sweep<'_> {
    /// Returns the index of the column with which column `column` is compared: the first column that has the same window (number of
    /// executions in flight).
    fn base(&self, column: usize) -> usize {
        self.columns.iter().position(|other| other.window == self.columns[column].window).unwrap_or(column)
    }

    fn to_text(&self) -> String {
        let ways: Vec<String> = self.arguments.transfers.iter().map(|pair| format!("{}>{}", pair.src, pair.dst)).collect();
        let apart = if self.arguments.apart { ", each planned separately and issued by its own process" } else { "" };
        let mut text = format!("sim for {}: {}{apart}\n", self.machine.topology().name, ways.join(" "));
        text += match self.arguments.kernel {
            None => {
                "modelled; GB/s of all transfers together in the steady state (in parentheses: ratio to the first column of the same \
                 window)\n\n"
            }
            Some(_) => {
                "modelled; time of one execution: the kernel and then the copies (in parentheses: speed-up over the first column)\n\n"
            }
        };
        let mut heads = vec![("".to_owned(), "size".to_owned())];
        for column in &self.columns {
            let window = if column.window == 1 { String::new() } else { format!(", window {}", column.window) };
            heads.push((format!("{}{window}", column.engine.name()), column.name()));
        }
        let body = self.rows.iter().zip(&self.table).map(|(shapes, cells)| {
            let mut line = vec![size(shapes.iter().map(|shape| shape.bytes).max().unwrap_or(0))];
            line.extend(cells.iter().enumerate().map(|(at, cell)| {
                let base = &cells[self.base(at)];
                let shown = if self.arguments.kernel.is_some() { time(cell.seconds) } else { format!("{:.1}", cell.rate()) };
                if self.base(at) == at { shown } else { format!("{shown} ({:.2})", base.seconds / cell.seconds) }
            }));
            line
        });
        let (engines, ways): (Vec<String>, Vec<String>) = heads.into_iter().unzip();
        let lines: Vec<Vec<String>> = [engines, ways].into_iter().chain(body).collect();
        text.extend(aligned(&lines, 0).map(|line| line + "\n"));
        if let (true, Some(last)) = (self.arguments.resources, self.table.last().and_then(|cells| cells.last())) {
            text += &self.resources(last);
        }
        text
    }

    fn resources(&self, cell: &Steady) -> String {
        let seconds = cell.run.seconds;
        let case = "the last case of the table (last row, last column)";
        let mut text = format!("\nuse of each link and shared resource in {case}, which was executed twice in {}\n", time(seconds));
        text += &format!("{:<28} {:>12} {:>7} {:>10} {:>10} {:>10}\n", "resource", "bytes", "busy", "mean GB/s", "peak GB/s", "capacity");
        for of in &cell.run.resources {
            let resource = &self.machine.resources()[of.resource.0 as usize];
            text += &format!(
                "{:<28} {:>12} {:>6.1}% {:>10.1} {:>10.1} {:>10.1}\n",
                resource.name,
                size(of.bytes),
                100.0 * of.busy / seconds,
                of.mean / 1e9,
                of.peak / 1e9,
                resource.capacity / 1e9
            );
        }
        text
    }

    fn to_json(&self) -> Value {
        let cells = self.rows.iter().zip(&self.table).flat_map(|(shapes, cells)| {
            self.columns.iter().zip(cells).enumerate().map(move |(at, (column, cell))| {
                let resources = cell.run.resources.iter().map(|of| {
                    json!({
                        "name": self.machine.resources()[of.resource.0 as usize].name,
                        "bytes": of.bytes, "busy_seconds": of.busy, "peak": of.peak, "mean": of.mean,
                    })
                });
                json!({
                    "bytes": shapes.iter().map(|shape| shape.bytes).collect::<Vec<_>>(),
                    "engine": column.engine.name(),
                    "max_paths": column.max_paths,
                    "host_path": column.host_path,
                    "window": column.window,
                    "seconds": cell.seconds,
                    "bytes_per_second": cell.rate() * 1e9,
                    "times_first_column": cells[self.base(at)].seconds / cell.seconds,
                    "resources": resources.collect::<Vec<_>>(),
                })
            })
        });
        let transfers: Vec<Value> =
            self.arguments.transfers.iter().map(|pair| json!({ "src": pair.src.to_string(), "dst": pair.dst.to_string() })).collect();
        json!({
            "topology": self.machine.topology().name,
            "modelled": true,
            "transfers": transfers,
            "planned_apart": self.arguments.apart,
            "cells": cells.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arguments, Command};
    use clap::Parser;

    fn sim(line: &str) -> Result<String, String> {
        let words = ["mpgpu", "sim"].into_iter().chain(line.split_whitespace());
        match Arguments::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Sim(arguments) => run(&arguments).map_err(|error| error.to_string()),
            _ => unreachable!("the line begins with sim"),
        }
    }

    fn cells(line: &str) -> Vec<Value> {
        let text = sim(&format!("{line} --json")).expect("it runs");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(value["modelled"], true);
        value["cells"].as_array().expect("cells").clone()
    }

    #[test]
    fn a_sweep_has_a_line_for_each_size_and_a_column_for_each_way() {
        let text = sim("--topology beluga gpu0:gpu1 --sizes 1M..8M --max-paths 1,2 --host off,on --window 1,4").expect("it runs");
        let lines: Vec<&str> = text.lines().skip(5).collect();
        assert_eq!(lines.len(), 4, "{text}");
        // With one path there is no second column for the host path, and the first column of each window (number of executions in flight)
        // has no speed-up.
        assert_eq!(lines[3].matches('(').count(), 4, "{text}");
        assert!(lines[0].trim_start().starts_with("1.0 MiB") && text.contains("2 paths, no host"), "{text}");
    }

    #[test]
    fn more_in_flight_is_faster_and_so_are_more_paths() {
        let cells = cells("--topology beluga gpu0:gpu1:16M --engine stream --max-paths 1,3 --window 1,16");
        let rates: Vec<f64> = cells.iter().map(|cell| cell["bytes_per_second"].as_f64().expect("a number")).collect();
        let [one, three, one_of_16, three_of_16] = rates[..] else { panic!("four cells: {rates:?}") };
        assert!(one < three && one < one_of_16 && three < three_of_16 && one_of_16 < three_of_16, "{rates:?}");
    }

    #[test]
    fn transfers_planned_apart_do_not_know_of_each_other() {
        let seconds = |apart: &str| {
            let ring = "gpu0:gpu1:64M gpu1:gpu2:64M gpu2:gpu3:64M gpu3:gpu0:64M";
            let cells = cells(&format!("--topology beluga {ring} --host off --max-paths 3 {apart}"));
            cells[0]["seconds"].as_f64().expect("a number")
        };
        assert!(seconds("--apart") > 1.05 * seconds(""), "three paths each meet on the links that the ring leaves idle");
    }

    #[test]
    fn a_kernel_comes_before_the_copies_of_its_gpu_and_hides_what_issuing_them_takes() {
        let seconds = |kernel: &str| {
            let line = format!("--topology beluga gpu0:gpu1:64M gpu0:gpu3:64M --max-paths 1 {kernel}");
            cells(&line)[0]["seconds"].as_f64().expect("a number")
        };
        let (copies, kernel) = (seconds(""), 4.0 * (128 << 20) as f64 / 800e9);
        let step = seconds("--kernel 4@800");
        assert!(step > kernel + 0.97 * copies && step < kernel + copies + 10e-6, "{step} of {kernel} and {copies}");
        let text = sim("--topology beluga gpu0:gpu1:64M --max-paths 1,3 --kernel 8@790").expect("it runs");
        assert!(text.contains("time of one execution: the kernel and then the copies") && text.contains("ms (1."), "{text}");
    }

    #[test]
    fn what_cannot_be_run_says_what_to_do() {
        for (line, says) in [
            ("gpu0:gpu1", "the number of bytes is missing; write gpu0:gpu1:64M, or pass --sizes"),
            ("gpu0:gpu1:1M --sizes 1M", "--sizes gives the bytes of every transfer; omit them here"),
            ("gpu0:gpu9:1M", "device 9 does not exist"),
            ("gpu0:gpu1 --sizes 8M..1M", "the first size must not exceed the second"),
            ("", "required"),
            ("gpu0:gpu1:1M --kernel 8", "must be TIMES@RATE, both more than 0, as in 8@790"),
            ("gpu0:gpu1:1M --kernel 8@790 --window 2", "--window and --kernel cannot be combined"),
            ("gpu0:gpu1:1M --window 0", "not in 1..=1024"),
            ("gpu0:gpu1:1M --adapt --max-paths 2", "cannot be used with"),
            ("gpu0:gpu1:1M --real host=0.5", "--adapt"),
            ("gpu0:gpu1:1M --adapt --real hast=0.5", "hast: no resource of hgx-h200 has this name; give nvlink, pcie, host"),
            ("gpu0:gpu1:1M --adapt --real host=0", "0: must be from 0.01 to 100 times the capacity"),
            ("gpu0:gpu1:1M --adapt --tenant host=0.5@9..5", "9..5: the first execution must be before the last one"),
            ("gpu0:gpu1:1M --adapt --noise 2", "must be from 0 to 0.5"),
            ("gpu0:gpu1:1M --adapt --window 1,4", "--window has 2 values, but --adapt accepts only one"),
            (
                "gpu0:gpu1:1M --adapt --window 17",
                "17 plans that choose variants, but at most 16 can be simulated; give fewer transfers or a smaller --window",
            ),
        ] {
            let error = sim(line).expect_err(line);
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn resources_are_listed_by_name() {
        let text = sim("--topology hgx-h200 gpu0:gpu1:1G --max-paths 1 --resources").expect("it runs");
        assert!(text.contains("gpu0>nvswitch") && text.contains("nvswitch>gpu1") && !text.contains("root0"), "{text}");
    }

    #[test]
    fn players_that_measure_find_out_that_the_model_is_wrong_and_the_same_seed_plays_the_same() {
        let line = "--adapt --apart gpu0:gpu1:64M gpu1:gpu0:64M --real host=0.3 --tenant pcie=0.5@500..900 --executions 2000 --json";
        let played = |seed: u32| sim(&format!("{line} --seed {seed}")).expect("it runs");
        assert!(played(3) == played(3) && played(3) != played(4));
        let value: Value = serde_json::from_str(&played(3)).expect("JSON");
        let times = |what: &str| value["times_plain"][what].as_f64().expect("a number");
        assert!(times("model") < 0.9 && times("chosen") > 0.97 && times("best") >= times("chosen"), "{value:#}");
        let players = value["players"].as_array().expect("players");
        let executions = players[0]["executions"].as_object().expect("by variant").values().map(|n| n.as_u64().expect("a number"));
        assert!(players.len() == 2 && executions.sum::<u64>() == 2001, "{value:#}");
        let text = sim(&line.replace("--json", "")).expect("it runs");
        assert!(text.contains("gpu1>gpu0") && text.contains("plain copies") && text.contains("over any 500 executions"), "{text}");
    }
}
