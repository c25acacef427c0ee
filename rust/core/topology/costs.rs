//! Table of the fixed costs of copies, such as the time to issue a copy. Code that reads, writes, checks or prints costs uses this table,
//! so a new cost needs only a new entry.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::fmt;

/// Unit of a fixed cost.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CostUnit {
    /// Seconds, from 0 to [`MAX_TIME`](super::MAX_TIME).
    Seconds,
    /// Fraction of a rate, above 0 and at most 1.
    Part,
}

/// Description of one fixed cost, as an entry of [`Costs::TABLE`].
#[derive(Debug)]
pub struct Cost {
    /// Name of the cost in code, in files and in reports.
    pub name: &'static str,
    /// Description of the cost for users, in one line.
    pub meaning: &'static str,
    /// Unit of the cost.
    pub unit: CostUnit,
    /// Value that is used if neither a preset, a file nor a measurement of the machine (`mpgpu probe`) provides one.
    pub default: f64,
    /// Description of the measurement by which a probe (`mpgpu probe`) determines the cost. `None` if a probe does not measure the cost;
    /// the value is then that of the preset or file, or the default.
    pub probe: Option<&'static str>,
    /// Source of the default value, as text: a measurement or an assumption.
    pub source: &'static str,
    /// Function that reads this cost from a set of costs.
    pub of: fn(&Costs) -> f64,
    /// Function that returns a mutable reference to this cost in a set of costs.
    pub of_mut: fn(&mut Costs) -> &mut f64,
}

macro_rules! costs {
    ($($name:ident: $unit:ident = $default:literal, $meaning:literal, $probe:expr, $source:literal;)*) => {
        /// Fixed costs of a machine that are not properties of a link. [`Costs::TABLE`] has the unit, default and source of each.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Costs {
            $(#[doc = $meaning] pub $name: f64,)*
        }

        impl Costs {
            /// Descriptions of all costs, in the order in which they appear in a file.
            pub const TABLE: &[Cost] = &[$(Cost {
                name: stringify!($name),
                meaning: $meaning,
                unit: CostUnit::$unit,
                default: $default,
                probe: $probe,
                source: $source,
                of: |costs| costs.$name,
                of_mut: |costs| &mut costs.$name,
            },)*];

            const NAMES: &[&str] = &[$(stringify!($name),)*];
        }

        impl Default for Costs {
            /// Returns the costs of an HGX H200. [`Costs::TABLE`] states the measurements.
            fn default() -> Self {
                Costs { $($name: $default,)* }
            }
        }
    };
}

// Sources are measurements on H200, 2026-11-20, unless stated otherwise.
costs! {
    copy: Seconds = 6.7e-6,
        "One copy of a few bytes, from issue until the host sees it done.",
        Some("the least time of 4 KiB over all hops"),
        "one peer copy of 8 B to 4 KiB: 6.7 to 6.9 us";
    issue: Seconds = 2.2e-6,
        "Host time to issue each further copy.",
        Some("64 copies of 256 bytes against one; at least the median time per operation of pipelines through host memory"),
        "copies issued on streams: 2.2 us each";
    chunk_via_host: Seconds = 4.5e-6,
        "Idle time of a stream between two dependent chunks that are staged in host memory: an event recorded on one device and waited for on another.",
        Some("pipelines through host memory next to a direct copy, with n and with 2 n chunks; at least two graph_node"),
        "an event recorded on one device and waited for on another, round trip: 4.48 us";
    chunk_via_gpu: Seconds = 4.5e-6,
        "Idle time of a stream between two dependent chunks that are staged in a GPU.",
        Some("pipelines through a GPU next to a direct copy, with n and with 2 n chunks; at least two graph_node"),
        "pipelines through a third GPU in 1 to 32 chunks: 197 to 347 GB/s, with 4.5 us 195 to 342 (tests/rust/simulator/readings.rs)";
    fork_join_staged: Seconds = 4.5e-6,
        "Time that staged paths add once per plan: their streams are forked from the caller's stream and joined to it again.",
        Some("a direct copy next to a pipeline that ends earlier, against the copy alone"),
        "the round trip of an event, as for chunk_via_host";
    fork_join_gpus: Seconds = 4.5e-6,
        "Time added once if several GPUs issue the plain copies of a batch: their streams are forked and joined across GPUs.",
        Some("two copies of two GPUs that share nothing, against the longer of them; at least fork_join_staged"),
        "the round trip of an event, as for chunk_via_host";
    fork_join_issue: Seconds = 4.5e-6,
        "Host time to fork a stream from the caller's and to join it again, in addition to that of its copies.",
        None,
        "calls of 2 to 12 streams against as many plain copies: 4.4 to 4.8 us for each stream but the first";
    hand_over: Seconds = 5.8e-6,
        "Latency of a flag from a stream that sets it to a stream of another GPU that waits for it, as used between the ranks of a node.",
        Some("flags that two streams set and wait for in turn, 4 and 36 rounds: slope"),
        "stream write-value and wait-value: 5.8 us one way";
    pull: Seconds = 3e-6,
        "Additional time of a copy between two GPUs if the reading GPU issues it.",
        None,
        "64 MiB at 372.3 in place of 378.7 GB/s: 3.0 us; 1 GiB at 395.7 in place of 396.1 GB/s: 2.7 us";
    graph_launch: Seconds = 2e-6,
        "Host time to launch a graph of one node.",
        None,
        "explicit graphs of one copy: 1.9 to 2.7 us";
    graph_node: Seconds = 1.4e-6,
        "Host time for each further node of a graph.",
        None,
        "explicit graphs of 1 to 64 copies that alternate between two branches: 1.91 to 92 us, 1.43 us for each further one";
    graph_gap: Seconds = 12e-6,
        "Idle time between two plain copies that follow each other in a branch of a graph.",
        None,
        "all-to-all and two copies of 16 MiB: some 12 us, in a stream 4";
    graph_instantiate: Seconds = 1.5e-6,
        "Host time to build and instantiate a graph before its first launch, for each of its copies. The simulator uses it, plans do not.",
        None,
        "44 to 58 us for 34 copies, 69 to 207 us for 64";
    batch: Seconds = 6.7e-6,
        "One batched copy call without segments, until done.",
        Some("batched calls of 1 and 64 segments of 256 bytes: intercept"),
        "assumed equal to one copy; 26 halo messages of 1.47 MB in all are then modelled at 26.4 us (measured: 25.6)";
    batch_segment: Seconds = 0.62e-6,
        "Time for each segment of a batched copy call.",
        Some("batched calls of 1 and 64 segments of 256 bytes: slope"),
        "26 segments are issued in 16.0 us";
    kernel: Seconds = 9.4e-6,
        "One fused copy kernel without segments, until done.",
        Some("kernels of 1 and 64 segments of 256 bytes, launched as graphs: intercept"),
        "one kernel copy of 8 B to 4 KiB: 9.4 to 9.5 us";
    kernel_segment: Seconds = 0.01e-6,
        "Time for each segment of a fused copy kernel.",
        Some("kernels of 1 and 64 segments of 256 bytes, launched as graphs: slope"),
        "26 halo messages of 1.47 MB in one kernel: 13.7 us. 4.1 us move the bytes: 0.2 us over 26 segments";
    kernel_efficiency: Part = 0.9,
        "Fraction of a link's bandwidth that a copy kernel reaches.",
        Some("a copy of 0.25 ms by copy engine against the same copy by kernel, without their start-up times"),
        "kernel copies of 8 to 132 blocks: 350 to 366 of 396 GB/s";
    pageable_to_gpu: Part = 0.17,
        "Fraction of a PCIe link's bandwidth that the driver's own copy from pageable host memory reaches.",
        None,
        "two H100, 2026-11-24: 9.5 of 55 GB/s";
    pageable_from_gpu: Part = 0.34,
        "Fraction of a PCIe link's bandwidth that the driver's own copy to pageable host memory reaches.",
        None,
        "two H100, 2026-11-24: 18.7 of 55 GB/s";
    scattered: Part = 0.6,
        "Fraction of the simulated rate that copy engines behind a switch reach if GPUs exchange chunks with many other GPUs.",
        None,
        "one of four H200 to the others, 2026-11-28: 1 GiB 4.8 ms scattered and exchanged, 3.07 in a chain; 16 MiB 0.255 and 0.140";
    thread_copy: Part = 0.14,
        "Fraction of a PCIe link's bandwidth that one CPU thread reaches between pageable and pinned memory.",
        None,
        "two H100, 2026-11-24: 4, 8 and 12 threads fill a link with 37, 51.9 and 51.7 of 55 GB/s, two links with 8 and 12 threads 60 and 85";
}

/// Time in seconds from a kernel's last store to another GPU until a kernel on that GPU reads it. On two H200, sending 16 bytes in one
/// graph takes 3.2 us. The launch accounts for 1.2 us of this time.
const KERNEL_HAND_OVER: f64 = 2e-6;

impl Costs {
    /// Returns the costs for a node on which each GPU belongs to a different rank. The ranks wait for each other before and after a step.
    /// Flags order the chunks, and are assumed to be no faster than events. No stream on another GPU has to be forked from the caller's
    /// stream or joined to it.
    pub fn between_ranks(&self) -> Costs {
        let of_step = 2.0 * self.hand_over;
        Costs {
            copy: self.copy + of_step,
            batch: self.batch + of_step,
            kernel: self.kernel + of_step,
            chunk_via_host: self.chunk_via_host.max(self.hand_over),
            chunk_via_gpu: self.chunk_via_gpu.max(self.hand_over),
            fork_join_gpus: 0.0,
            ..self.clone()
        }
    }

    /// Returns the costs adapted to kernels that perform the copies and signal each chunk by a flag in the memory of the receiving GPU.
    /// Called on the result of [`between_ranks`](Costs::between_ranks).
    pub fn between_kernels(&self) -> Costs {
        Costs { chunk_via_gpu: KERNEL_HAND_OVER, ..self.clone() }
    }
}

impl<'de> Deserialize<'de> for Costs {
    /// Reads a table of costs. A missing cost gets its default; an unknown key is an error.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Costs, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Costs;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a table of costs")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Costs, A::Error> {
                let mut costs = Costs::default();
                while let Some(name) = map.next_key::<String>()? {
                    let cost = Costs::TABLE.iter().find(|cost| cost.name == name);
                    let cost = cost.ok_or_else(|| A::Error::unknown_field(&super::shorten(&name, 64), Costs::NAMES))?;
                    *(cost.of_mut)(&mut costs) = map.next_value()?;
                }
                Ok(costs)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
