//! A plan for people, and as JSON.

use super::candidates::Reason;
use super::program::Mechanism;
use super::{Engine, PathPlan, Plan};
use crate::topology::Machine;
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
            self.options.engine.name(),
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
        for (index, transfer) in self.transfers.iter().enumerate() {
            let shape = &transfer.shape;
            write!(text, "\ntransfer {index}: {} to {}, {}", shape.src_device, shape.dst_device, size(shape.bytes))?;
            if shape.bytes == 0 {
                writeln!(text, ": nothing to do")?;
                continue;
            }
            writeln!(text)?;
            for path in &transfer.paths {
                writeln!(text, "  {}", path.sentence(shape.bytes))?;
            }
            // Many paths are left out for the same reason: one line for all of them.
            let mut lines: Vec<(String, Vec<String>)> = Vec::new();
            for rejection in &transfer.rejected {
                let via = rejection.via.map_or("direct".into(), |via| via.to_string());
                let why = rejection.reason.sentence(machine);
                match lines.iter_mut().find(|line| line.0 == why) {
                    Some(line) => line.1.push(via),
                    None => lines.push((why, vec![via])),
                }
            }
            for (why, paths) in lines {
                writeln!(text, "  not via {}: {why}", paths.join(", "))?;
            }
        }
        Ok(())
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
        let way = match self.via {
            None => "direct".into(),
            Some(via) => format!("via {via}"),
        };
        let how = match (self.mechanism, self.slots) {
            (Mechanism::Batch, _) => "part of a batched call".into(),
            (Mechanism::Kernel, _) => "part of a fused kernel".into(),
            (Mechanism::Copy, 0) => "one copy".into(),
            (Mechanism::Copy, slots) => format!("{} chunks of {}, {slots} slots", self.chunks, size(self.chunk_bytes)),
        };
        format!("{share:5.1} %  {:>10}  {way:<10}  {how}; modelled alone {}", size(self.bytes), time(self.seconds))
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
            Reason::NoShare => "its links are worth more to other paths of the batch".into(),
            Reason::NotFaster { seconds, one_path } => {
                format!("several paths would take {}, one path {}: too little gain to risk it", time(*seconds), time(*one_path))
            }
            Reason::Staging { ring_bytes } => format!("the staging bound leaves its ring {ring_bytes} bytes"),
        }
    }
}

fn rate(bytes: u64, seconds: f64) -> String {
    if bytes == 0 || seconds <= 0.0 { String::new() } else { format!(" ({:.1} GB/s)", bytes as f64 / seconds / 1e9) }
}
