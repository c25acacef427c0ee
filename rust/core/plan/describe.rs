//! Describes a plan in human-readable text.

use super::options::Tuned;
use super::planned::{PathPlan, Plan, ThreadUse, TransferPlan};
use super::reasons::{Loads, lines, reasons_among_many, sentence, tightest};
use crate::program::{Engine, Mechanism, Ring};
use crate::topology::{DeviceId, Machine};
use crate::units::{size, time};
use ahash::HashMap;
use serde_json::{Value, json};
use std::fmt::Write;

impl Plan {
    /// Returns a text with the paths of each transfer and the reasons why other paths were rejected. Times are marked as modelled.
    pub fn describe(&self, machine: &Machine) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
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
            size(self.program.rings.iter().map(Ring::bytes).sum()),
        )?;
        let compared = match self.speedup() {
            gain if gain > 1.005 => format!("{gain:.2} times as fast as one path for each transfer, {}", time(self.one_path)),
            _ => "one path for each transfer".into(),
        };
        writeln!(text, "modelled: {}{}; {compared}", time(self.predicted), rate(bytes, self.predicted))?;
        if let Some(bound) = self.bound_in_words(machine) {
            writeln!(text, "{bound}")?;
        }
        if let Some(ThreadUse { threads, chunk_bytes, ring_bytes }) = self.threads {
            let (chunk, rings) = (size(chunk_bytes), size(ring_bytes));
            writeln!(
                text,
                "pageable memory: {} copy chunks of {chunk} through {rings} of pinned memory",
                count(threads as usize, "thread")
            )?;
        }
        if let Some(tuned) = self.options.tuned {
            writeln!(text, "{}", tuned.sentence())?;
        }
        let loads = Loads::new(machine, self);
        for alike in self.alike() {
            match alike.as_slice() {
                &[one] => self.write_one(machine, &loads, one, text)?,
                many => self.write_alike(machine, &loads, many, text)?,
            }
        }
        Ok(())
    }

    /// Returns groups of transfers, as lists of indices. The transfers of a group have equal sizes and equal paths except for the devices.
    /// A halo exchange has dozens of such transfers.
    fn alike(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut numbers: HashMap<(u64, Vec<_>), usize> = HashMap::default();
        for (index, TransferPlan { shape, paths, .. }) in self.transfers.iter().enumerate() {
            let figures = |path: &PathPlan| {
                (path.bytes, path.chunks, path.chunk_bytes, path.slots, path.mechanism as u8, path.via.map(DeviceId::is_host))
            };
            let number = *numbers.entry((shape.bytes, paths.iter().map(figures).collect())).or_insert(groups.len());
            if number == groups.len() {
                groups.push(Vec::new());
            }
            groups[number].push(index);
        }
        groups
    }

    fn write_one(&self, machine: &Machine, loads: &Loads, index: usize, text: &mut String) -> std::fmt::Result {
        let TransferPlan { shape, paths, rejected } = &self.transfers[index];
        write!(text, "\ntransfer {index}: {} to {}, {}", shape.src_device, shape.dst_device, size(shape.bytes))?;
        if shape.bytes == 0 {
            return writeln!(text, ": nothing to do");
        }
        writeln!(text)?;
        for path in paths.iter() {
            let vias: Vec<String> = path.vias().map(|via| via.to_string()).collect();
            let way = if vias.is_empty() { "direct".into() } else { format!("via {}", vias.join(", ")) };
            let limit = path
                .model(machine, shape)
                .and_then(|model| tightest(machine, &model).map(|resource| format!(", at most {:.1} GB/s ({resource})", model.rate / 1e9)));
            let alone = format!("; modelled alone {}{}", time(path.seconds), limit.unwrap_or_default());
            writeln!(text, "  {}{alone}", path.sentence(&way, shape.bytes))?;
        }
        let reasons = rejected.iter().map(|r| (r.via, sentence(machine, shape, r, loads, false)));
        lines(reasons).iter().try_for_each(|line| writeln!(text, "  {line}"))
    }

    fn write_alike(&self, machine: &Machine, loads: &Loads, members: &[usize], text: &mut String) -> std::fmt::Result {
        let transfers = || members.iter().map(|&index| &self.transfers[index]);
        let TransferPlan { shape, paths, .. } = &self.transfers[members[0]];
        write!(text, "\n{} transfers of {}", members.len(), size(shape.bytes))?;
        writeln!(text, "{}", if shape.bytes == 0 { ": nothing to do" } else { ", each:" })?;
        for (at, path) in paths.iter().enumerate() {
            let way = match path.via {
                None => "direct",
                Some(via) if via.is_host() => "via a host",
                Some(_) => "via a GPU",
            };
            let alone = transfers().map(|transfer| transfer.paths[at].seconds);
            let (least, most) = (time(alone.clone().fold(f64::INFINITY, f64::min)), time(alone.fold(0.0, f64::max)));
            let alone = if least == most { least } else { format!("{least} to {most}") };
            writeln!(text, "  {}; modelled alone {alone}", path.sentence(way, shape.bytes))?;
        }
        for row in members.chunks(if paths.iter().any(|path| path.via.is_some()) { 4 } else { 6 }) {
            let ways = row.iter().map(|&index| {
                let TransferPlan { shape, paths, .. } = &self.transfers[index];
                let vias: Vec<String> = paths.iter().flat_map(PathPlan::vias).map(|via| via.to_string()).collect();
                let vias = if vias.is_empty() { String::new() } else { format!(" ({})", vias.join(", ")) };
                format!("{index}: {}>{}{vias}", shape.src_device, shape.dst_device)
            });
            writeln!(text, "  {}", ways.collect::<Vec<_>>().join("  "))?;
        }
        // The header describes the group's paths by kind, but reasons refer to single devices. One transfer may reject a relay that another
        // transfer uses.
        let relayed = paths.iter().any(|path| path.via.is_some());
        lines(reasons_among_many(machine, transfers(), loads).into_iter())
            .iter()
            .try_for_each(|line| writeln!(text, "  {}{line}", if relayed { "otherwise " } else { "" }))
    }

    /// Returns the name of the engine (execution method). If `auto` has chosen a graph, the name says so.
    fn engine(&self) -> String {
        let asked = self.options.engine.name();
        if (self.options.engine, self.executor) == (Engine::Auto, Engine::Graph) { format!("{asked} (graph)") } else { asked.into() }
    }

    /// Returns the modelled speedup of the plan over one path for each transfer; 1 if both take the same time.
    pub fn speedup(&self) -> f64 {
        if self.predicted > 0.0 { self.one_path / self.predicted } else { 1.0 }
    }
}

impl PathPlan {
    fn sentence(&self, way: &str, whole: u64) -> String {
        let share = 100.0 * self.bytes as f64 / whole as f64;
        format!("{share:5.1} %  {:>10}  {way:<10}  {}", size(self.bytes), self.manner())
    }

    /// Returns the relay devices that the path's data passes through, in order from the source.
    pub fn vias(&self) -> impl Iterator<Item = DeviceId> {
        self.earlier.iter().copied().chain(self.via)
    }

    /// Returns a description of how the path's data is moved.
    fn manner(&self) -> String {
        match (self.mechanism, self.slots, self.chunks) {
            (Mechanism::Batch, ..) => "part of a batched call".into(),
            (Mechanism::Kernel, ..) => "part of a fused kernel".into(),
            // No path has this mechanism, because threads copy only at the ends of paths.
            (Mechanism::Thread, ..) => "by threads".into(),
            (Mechanism::Copy, 0, 1) if self.is_passed_on() => format!("forwarded in one block of {}", size(self.bytes)),
            (Mechanism::Copy, 0, 1) => "one copy".into(),
            (Mechanism::Copy, 0, chunks) if self.is_passed_on() => {
                format!("forwarded in {chunks} chunks of {}", size(self.chunk_bytes))
            }
            (Mechanism::Copy, 0, chunks) => format!("{chunks} chunks of {}", size(self.chunk_bytes)),
            (Mechanism::Copy, _, 1) => "one chunk".into(),
            (Mechanism::Copy, slots, chunks) => format!("{chunks} chunks of {}, {slots} staging slots", size(self.chunk_bytes)),
        }
    }
}

impl Tuned {
    fn sentence(self) -> String {
        let Tuned { host_share, relay_share, several } = self;
        let mut text = String::from("tuned: options come from a tuning file");
        for (what, share) in [("through the host", host_share), ("through other GPUs", relay_share)] {
            if share != 1000 {
                text += &format!("; bytes {what} x {:.3}", f64::from(share) / 1000.0);
            }
        }
        if several {
            text += "; several paths were measured to be faster than one";
        }
        text
    }

    pub(super) fn to_json(self) -> Value {
        let factor = |share: u16| f64::from(share) / 1000.0;
        json!({ "host_share": factor(self.host_share), "relay_share": factor(self.relay_share), "several_paths": self.several })
    }
}

impl Engine {
    /// Returns the name of the engine (execution method) in `MPGPU_ENGINE` and in messages.
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

fn rate(bytes: u64, seconds: f64) -> String {
    if bytes == 0 || seconds <= 0.0 { String::new() } else { format!(" ({:.1} GB/s)", bytes as f64 / seconds / 1e9) }
}
