//! Converts a plan to JSON. The plan is serialised item by item, so that plans of many transfers need no additional memory.

use super::bound::TimeBound;
use super::options::Tuned;
use super::planned::{PathPlan, Plan, TransferPlan};
use super::reasons::{Loads, sentence, tightest};
use crate::program::{Mechanism, Ring, Shape};
use crate::topology::{DeviceId, Machine};
use ahash::HashMap;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};
use std::sync::Arc;

/// Serialisable form of a plan: sizes in bytes, times in seconds, and device numbers as in the C ABI.
pub struct PlanJson<'a> {
    plan: &'a Plan,
    machine: &'a Machine,
    bound: TimeBound,
    loads: Loads,
    /// Index of the first transfer with the same devices and the same rejected paths, for each transfer.
    alike: Vec<usize>,
}

struct TransferJson<'a>(&'a PlanJson<'a>, usize);

struct PathJson<'a>(&'a PlanJson<'a>, &'a Shape, &'a PathPlan);

/// Sequence whose items are created and serialised one by one.
struct Items<F>(F);

impl<I: IntoIterator<Item: Serialize>, F: Fn() -> I> Serialize for Items<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

impl Plan {
    /// Returns the plan in a form that any serialiser can write. If an earlier transfer has the same devices and the same rejected paths,
    /// `rejected_as` contains that transfer's index, and the field `rejected` is omitted.
    pub fn json<'a>(&'a self, machine: &'a Machine) -> PlanJson<'a> {
        let mut first: HashMap<(DeviceId, DeviceId), Vec<usize>> = HashMap::default();
        let of = |(at, TransferPlan { shape, rejected, .. }): (usize, &TransferPlan)| {
            let known = first.entry((shape.src_device, shape.dst_device)).or_default();
            let is_same = |other: &&usize| {
                let other = &self.transfers[**other].rejected;
                Arc::ptr_eq(other, rejected) || other == rejected
            };
            known.iter().find(is_same).copied().unwrap_or_else(|| {
                known.push(at);
                at
            })
        };
        let alike = self.transfers.iter().enumerate().map(of).collect();
        PlanJson { plan: self, machine, bound: self.bound(machine), loads: Loads::new(machine, self), alike }
    }

    /// Returns the result of [`Plan::json`] as a JSON value.
    pub fn to_json(&self, machine: &Machine) -> Value {
        // Serialising maps with string keys cannot fail.
        serde_json::to_value(self.json(machine)).unwrap_or_default()
    }
}

impl Serialize for PlanJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let PlanJson { plan, machine, bound, .. } = self;
        let options = &plan.options;
        let limit = |(resource, part): &(crate::topology::ResourceId, f64)| json!({"resource": machine.resources()[resource.0 as usize].name, "part": part});
        let staging = machine.devices().map(|device| (device, plan.program.staging_bytes(device))).filter(|(_, bytes)| *bytes > 0);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("topology", &machine.topology().name)?;
        map.serialize_entry("engine", options.engine.name())?;
        map.serialize_entry("executor", plan.executor.name())?;
        map.serialize_entry("modelled_seconds", &plan.predicted)?;
        map.serialize_entry("modelled_seconds_one_path", &plan.one_path)?;
        map.serialize_entry("modelled_speedup", &plan.speedup())?;
        map.serialize_entry(
            "bound",
            &json!({
                "seconds": bound.seconds,
                "limits": bound.limits.iter().map(limit).collect::<Vec<_>>(),
                "reason": plan.why_not_the_bound(machine, bound),
            }),
        )?;
        map.serialize_entry("bytes", &plan.transfers.iter().map(|transfer| transfer.shape.bytes).fold(0, u64::saturating_add))?;
        map.serialize_entry(
            "options",
            &json!({
                "max_paths": if options.max_paths == u32::MAX { Value::Null } else { options.max_paths.into() },
                "host_path": options.host_path,
                "relay_gpus": options.relays.to_json(machine.gpu_count()),
                "chunk_bytes": options.chunk_bytes,
                "relay_chunks": options.relay_chunks,
                "host_chunks": options.host_chunks,
                "min_bytes": options.min_bytes,
                "staging_bytes": options.staging_bytes,
            }),
        )?;
        map.serialize_entry("operations", &plan.program.ops.len())?;
        map.serialize_entry("lanes", &plan.program.lanes.len())?;
        let threads = plan.threads.map(|of| json!({"count": of.threads, "chunk_bytes": of.chunk_bytes, "ring_bytes": of.ring_bytes}));
        map.serialize_entry("threads", &threads)?;
        map.serialize_entry("tuned", &options.tuned.map(Tuned::to_json))?;
        map.serialize_entry("staging_bytes", &plan.program.rings.iter().map(Ring::bytes).sum::<u64>())?;
        map.serialize_entry("staging", &staging.map(|(device, bytes)| json!({"device": device.0, "bytes": bytes})).collect::<Vec<_>>())?;
        map.serialize_entry("transfers", &Items(|| (0..plan.transfers.len()).map(|at| TransferJson(self, at))))?;
        map.end()
    }
}

impl Serialize for TransferJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TransferJson(all @ PlanJson { plan, machine, loads, alike, .. }, at) = self;
        let TransferPlan { shape, paths, rejected } = &plan.transfers[*at];
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("src_device", &shape.src_device.0)?;
        map.serialize_entry("dst_device", &shape.dst_device.0)?;
        map.serialize_entry("bytes", &shape.bytes)?;
        map.serialize_entry("paths", &Items(|| paths.iter().map(|path| PathJson(all, shape, path))))?;
        if alike[*at] < *at && !rejected.is_empty() {
            map.serialize_entry("rejected_as", &alike[*at])?;
        } else {
            let reason = |r: &super::Rejection| {
                let reason = sentence(machine, shape, r, loads, false);
                json!({"via": r.via.map(|device| device.0), "code": r.reason.code(), "reason": reason})
            };
            map.serialize_entry("rejected", &Items(|| rejected.iter().map(reason)))?;
        }
        map.end()
    }
}

impl Serialize for PathJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let PathJson(PlanJson { machine, .. }, shape, path) = self;
        let model = path.model(machine, shape);
        let mechanism = match path.mechanism {
            Mechanism::Copy => "copy",
            Mechanism::Batch => "batch",
            Mechanism::Kernel => "kernel",
            Mechanism::Thread => "thread",
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("via", &path.via.map(|device| device.0))?;
        map.serialize_entry("earlier", &Items(|| path.earlier.iter().map(|device| device.0)))?;
        map.serialize_entry("offset", &path.offset)?;
        map.serialize_entry("bytes", &path.bytes)?;
        map.serialize_entry("chunks", &path.chunks)?;
        map.serialize_entry("chunk_bytes", &path.chunk_bytes)?;
        map.serialize_entry("slots", &path.slots)?;
        map.serialize_entry("mechanism", mechanism)?;
        map.serialize_entry("modelled_seconds_alone", &path.seconds)?;
        map.serialize_entry("bytes_per_second_alone", &model.as_ref().map(|model| model.rate).filter(|rate| rate.is_finite()))?;
        map.serialize_entry("limited_by", &model.as_ref().and_then(|model| tightest(machine, model)))?;
        map.end()
    }
}
