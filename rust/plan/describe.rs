//! A plan for people, and as JSON.

use super::candidates::Reason;
use super::program::Mechanism;
use super::{Engine, PathPlan, Plan, TransferPlan};
use crate::topology::{DeviceId, Machine};
use crate::units::{size, time};
use serde_json::{Value, json};
use std::fmt::Write;

impl Plan {
    /// Text: what each transfer does and why other paths are left out. Times are modelled, and say so.
    pub fn describe(&self, machine: &Machine) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(machine, &mut text);
        text
    }

    fn write(&self, machine: &Machine, text: &mut String) -> std::fmt::Result {
        let bytes: u64 = self.transfers.iter().map(|t| t.shape.bytes).sum();
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        writeln!(
            text,
            "plan for {}: {}, {} in all; engine {}, {} on {}, {} of staging",
            machine.topology().name,
            count(self.transfers.len(), "transfer"),
            size(bytes),
            self.engine(),
            count(self.program.ops.len(), "operation"),
            count(self.program.lanes.len(), "lane"),
            size(self.program.rings.iter().map(super::Ring::bytes).sum()),
        )?;
        writeln!(
            text,
            "modelled: {}{}; one path for each transfer: {}; {:.2} times",
            time(self.predicted),
            rate(bytes, self.predicted),
            time(self.one_path),
            self.speedup()
        )?;
        for alike in self.alike() {
            match alike.as_slice() {
                &[one] => self.write_one(machine, one, text)?,
                many => self.write_alike(machine, many, text)?,
            }
        }
        Ok(())
    }

    /// Indices of transfers, those of equal size that go directly and by the same mechanism together: a halo exchange has dozens.
    fn alike(&self) -> Vec<Vec<usize>> {
        let mut keys: Vec<Option<(u64, Mechanism)>> = Vec::new();
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (index, transfer) in self.transfers.iter().enumerate() {
            let key = match transfer.paths.as_slice() {
                [path] if path.via.is_none() => Some((path.bytes, path.mechanism)),
                _ => None,
            };
            match keys.iter().position(|other| key.is_some() && *other == key) {
                Some(group) => groups[group].push(index),
                None => {
                    keys.push(key);
                    groups.push(vec![index]);
                }
            }
        }
        groups
    }

    fn write_one(&self, machine: &Machine, index: usize, text: &mut String) -> std::fmt::Result {
        let TransferPlan { shape, paths, rejected } = &self.transfers[index];
        write!(text, "\ntransfer {index}: {} to {}, {}", shape.src_device, shape.dst_device, size(shape.bytes))?;
        if shape.bytes == 0 {
            return writeln!(text, ": nothing to do");
        }
        writeln!(text)?;
        for path in paths {
            writeln!(text, "  {}", path.sentence(shape.bytes))?;
        }
        write_reasons(rejected.iter().map(|r| (r.via, r.reason.sentence(machine))), text)
    }

    fn write_alike(&self, machine: &Machine, members: &[usize], text: &mut String) -> std::fmt::Result {
        let transfers = || members.iter().map(|&index| &self.transfers[index]);
        let paths = || transfers().flat_map(|transfer| &transfer.paths);
        let ends = paths().map(|path| path.seconds);
        writeln!(
            text,
            "\n{} transfers of {}, each direct, {}; modelled alone {} to {}",
            members.len(),
            size(self.transfers[members[0]].shape.bytes),
            paths().next().map(PathPlan::manner).unwrap_or_default(),
            time(ends.clone().fold(f64::INFINITY, f64::min)),
            time(ends.fold(0.0, f64::max)),
        )?;
        for row in members.chunks(6) {
            let ways = row.iter().map(|&index| {
                let shape = &self.transfers[index].shape;
                format!("{index}: {}>{}", shape.src_device, shape.dst_device)
            });
            writeln!(text, "  {}", ways.collect::<Vec<_>>().join("  "))?;
        }
        // Which link it is differs from transfer to transfer.
        let reasons = transfers().flat_map(|transfer| &transfer.rejected).map(|r| {
            let why = match &r.reason {
                Reason::SharesDirect { .. } => "passes a link of the direct path, and adds no capacity".into(),
                reason => reason.sentence(machine),
            };
            (r.via, why)
        });
        write_reasons(reasons, text)
    }

    /// `auto` with what it came to where that is no matter of course.
    fn engine(&self) -> String {
        let asked = self.options.engine.name();
        if (self.options.engine, self.executor) == (Engine::Auto, Engine::Graph) { format!("{asked} (graph)") } else { asked.into() }
    }

    /// How many times faster than one path for each transfer, as modelled.
    pub fn speedup(&self) -> f64 {
        if self.predicted > 0.0 { self.one_path / self.predicted } else { 1.0 }
    }

    /// The same as JSON: sizes in bytes, times in seconds, devices as in the C ABI.
    pub fn to_json(&self, machine: &Machine) -> Value {
        let transfers: Vec<Value> = self
            .transfers
            .iter()
            .map(|transfer| {
                let paths: Vec<Value> = transfer.paths.iter().map(PathPlan::to_json).collect();
                let rejected: Vec<Value> =
                    transfer.rejected.iter().map(|r| json!({"via": r.via.map(|d| d.0), "reason": r.reason.sentence(machine)})).collect();
                json!({
                    "src_device": transfer.shape.src_device.0,
                    "dst_device": transfer.shape.dst_device.0,
                    "bytes": transfer.shape.bytes,
                    "paths": paths,
                    "rejected": rejected,
                })
            })
            .collect();
        json!({
            "topology": machine.topology().name,
            "engine": self.options.engine.name(),
            "executor": self.executor.name(),
            "modelled_seconds": self.predicted,
            "modelled_seconds_one_path": self.one_path,
            "operations": self.program.ops.len(),
            "lanes": self.program.lanes.len(),
            "staging_bytes": self.program.rings.iter().map(super::Ring::bytes).sum::<u64>(),
            "transfers": transfers,
        })
    }
}

impl PathPlan {
    fn sentence(&self, whole: u64) -> String {
        let share = 100.0 * self.bytes as f64 / whole as f64;
        let way = self.via.map_or("direct".into(), |via| format!("via {via}"));
        format!("{share:5.1} %  {:>10}  {way:<10}  {}; modelled alone {}", size(self.bytes), self.manner(), time(self.seconds))
    }

    /// How its bytes are moved.
    fn manner(&self) -> String {
        match (self.mechanism, self.slots, self.chunks) {
            (Mechanism::Batch, ..) => "part of a batched call".into(),
            (Mechanism::Kernel, ..) => "part of a fused kernel".into(),
            (Mechanism::Copy, 0, _) => "one copy".into(),
            (Mechanism::Copy, _, 1) => "one chunk".into(),
            (Mechanism::Copy, slots, chunks) => format!("{chunks} chunks of {}, {slots} slots", size(self.chunk_bytes)),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "via": self.via.map(|device| device.0),
            "offset": self.offset,
            "bytes": self.bytes,
            "chunks": self.chunks,
            "chunk_bytes": self.chunk_bytes,
            "slots": self.slots,
            "mechanism": match self.mechanism { Mechanism::Copy => "copy", Mechanism::Batch => "batch", Mechanism::Kernel => "kernel" },
            "modelled_seconds_alone": self.seconds,
        })
    }
}

impl Engine {
    /// As `MPGPU_ENGINE` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Auto => "auto",
            Engine::Stream => "stream",
            Engine::Graph => "graph",
            Engine::Batch => "batch",
            Engine::Kernel => "kernel",
        }
    }
}

impl Reason {
    fn sentence(&self, machine: &Machine) -> String {
        match self {
            Reason::NoRoute => "no route".into(),
            Reason::SharesDirect { resource } => {
                let resource = &machine.resources()[resource.0 as usize].name;
                format!("passes {resource} like the direct path, and adds no capacity")
            }
            Reason::Option(why) => (*why).into(),
            Reason::Pageable => "pageable host memory is staged by the driver, in one piece".into(),
            Reason::FixedCost { seconds, without } => {
                format!("its first byte would arrive after {}, the batch is done in {} without it", time(*seconds), time(*without))
            }
            Reason::NoShare => "other paths of the batch make better use of its links".into(),
            Reason::NotFaster { seconds, one_path } => {
                format!("several paths would take {}, one path {}: too little gain to risk it", time(*seconds), time(*one_path))
            }
            Reason::Staging { ring_bytes } => format!("the staging bound leaves its ring {ring_bytes} bytes"),
        }
    }
}

/// One line for each reason, with all paths that are left out for it.
fn write_reasons(reasons: impl Iterator<Item = (Option<DeviceId>, String)>, text: &mut String) -> std::fmt::Result {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for (via, why) in reasons {
        let via = via.map_or("direct".into(), |via| format!("via {via}"));
        match lines.iter_mut().find(|line| line.0 == why) {
            Some(line) if line.1.contains(&via) => {}
            Some(line) => line.1.push(via),
            None => lines.push((why, vec![via])),
        }
    }
    lines.into_iter().try_for_each(|(why, paths)| writeln!(text, "  not {}: {why}", paths.join(", ").replace(", via", ",")))
}

fn rate(bytes: u64, seconds: f64) -> String {
    if bytes == 0 || seconds <= 0.0 { String::new() } else { format!(" ({:.1} GB/s)", bytes as f64 / seconds / 1e9) }
}
