//! Fixed costs in one table, by which files are read, written and checked, and which the command prints. To add a cost is to add an entry here.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::fmt;

/// What a cost is counted in.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CostUnit {
    /// From 0 to [`MAX_TIME`](super::MAX_TIME).
    Seconds,
    /// A part of a rate, above 0 and at most 1.
    Part,
}

/// An entry of [`Costs::TABLE`].
#[derive(Debug)]
pub struct Cost {
    /// In code, in files and in reports.
    pub name: &'static str,
    /// One line for people.
    pub meaning: &'static str,
    /// See [`CostUnit`].
    pub unit: CostUnit,
    /// Where nothing else is known.
    pub default: f64,
    /// How a probe measures it. `None`: it does not, and the default, or what a preset or file says, is assumed.
    pub probe: Option<&'static str>,
    /// Where the default comes from.
    pub source: &'static str,
    /// Its value.
    pub of: fn(&Costs) -> f64,
    /// Its place.
    pub of_mut: fn(&mut Costs) -> &mut f64,
}

macro_rules! costs {
    ($($name:ident: $unit:ident = $default:literal, $meaning:literal, $probe:expr, $source:literal;)*) => {
        /// Fixed costs that no link explains. [`Costs::TABLE`] has the unit, default and source of each.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Costs {
            $(#[doc = $meaning] pub $name: f64,)*
        }

        impl Costs {
            /// Every cost, in the order of a file.
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
            /// What an HGX H200 gave: [`Costs::TABLE`] has the readings.
            fn default() -> Self {
                Costs { $($name: $default,)* }
            }
        }
    };
}

// Sources are hardware readings of H200, 2026-11-20, where nothing else is said.
costs! {
    copy: Seconds = 6.7e-6,
        "One copy of a few bytes, from issue until the host sees it done.",
        Some("the least time of 4 KiB over all hops"),
        "one peer copy of 8 B to 4 KiB: 6.7 to 6.9 us";
    issue: Seconds = 2.2e-6,
        "Host time to issue each further copy.",
        Some("64 copies of 256 bytes against one; not less than the median of an operation of pipelines through host memory"),
        "copies issued on streams: 2.2 us each";
    chunk_via_host: Seconds = 4.5e-6,
        "Idle time of a stream between two dependent chunks that are staged in host memory: an event recorded on one device and waited for on another.",
        Some("pipelines through host memory beside a direct copy, with n chunks and with 2 n; not less than two graph_node"),
        "an event recorded on one device and waited for on another, round trip: 4.48 us";
    chunk_via_gpu: Seconds = 4.5e-6,
        "The same where chunks are staged in a GPU.",
        Some("pipelines through a GPU beside a direct copy, with n chunks and with 2 n; not less than two graph_node"),
        "pipelines through a third GPU in 1 to 32 chunks: 197 to 347 GB/s, with 4.5 us 195 to 342 (tests/rust/simulator/readings.rs)";
    fork_join_staged: Seconds = 4.5e-6,
        "What staged paths add to a plan once: their streams are forked from the caller's stream and joined to it again.",
        Some("a direct copy beside a pipeline that ends earlier, against the copy alone"),
        "the round trip of an event, as for chunk_via_host";
    fork_join_gpus: Seconds = 4.5e-6,
        "What a batch adds once whose plain copies are issued by several GPUs: their streams are forked and joined across GPUs.",
        Some("two copies of two GPUs that share nothing, against the longer of them; not less than fork_join_staged"),
        "the round trip of an event, as for chunk_via_host";
    fork_join_issue: Seconds = 4.5e-6,
        "Host time to fork a stream from the caller's and to join it again, beside that of its copies.",
        None,
        "calls of 2 to 12 streams against as many plain copies: 4.4 to 4.8 us for each stream but the first";
    hand_over: Seconds = 5.8e-6,
        "A flag's way from a stream that raises it to a stream of another GPU that waits for it: how the ranks of a node hand over to each other.",
        Some("flags that two streams raise and take by turns, 4 rounds and 36: slope"),
        "stream write-value and wait-value: 5.8 us one way";
    pull: Seconds = 3e-6,
        "What a copy between two GPUs takes longer when the reading GPU issues it.",
        None,
        "64 MiB at 372.3 in place of 378.7 GB/s: 3.0 us; 1 GiB at 395.7 in place of 396.1 GB/s: 2.7 us";
    graph_launch: Seconds = 2e-6,
        "Host time to launch a graph of one node.",
        None,
        "explicit graphs of one copy: 1.9 to 2.7 us";
    graph_node: Seconds = 1.4e-6,
        "What each further node adds to that.",
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
        "One batched copy call of no segments, until done.",
        Some("batched calls of 1 and 64 segments of 256 bytes: intercept"),
        "taken as one copy; 26 halo messages of 1.47 MB in all then come out at 26.4 us (read: 25.6)";
    batch_segment: Seconds = 0.62e-6,
        "What each segment adds to that.",
        Some("batched calls of 1 and 64 segments of 256 bytes: slope"),
        "26 segments are issued in 16.0 us";
    kernel: Seconds = 9.4e-6,
        "One fused copy kernel of no segments, until done.",
        Some("kernels of 1 and 64 segments of 256 bytes, launched as graphs: intercept"),
        "one kernel copy of 8 B to 4 KiB: 9.4 to 9.5 us";
    kernel_segment: Seconds = 0.01e-6,
        "What each segment adds to that.",
        Some("kernels of 1 and 64 segments of 256 bytes, launched as graphs: slope"),
        "26 halo messages of 1.47 MB in one kernel: 13.7 us, of which 4.1 us move the bytes: 0.2 us over 26 segments";
    kernel_efficiency: Part = 0.9,
        "The part of a link's bandwidth that a copy kernel reaches.",
        Some("a copy of 0.25 ms by copy engine against the same by kernel, starts taken off"),
        "kernel copies of 8 to 132 blocks: 350 to 366 of 396 GB/s";
    pageable_to_gpu: Part = 0.17,
        "The part of a PCIe link's bandwidth that the driver's own copy from pageable host memory reaches.",
        None,
        "two H100, 2026-11-24: 9.5 of 55 GB/s";
    pageable_from_gpu: Part = 0.34,
        "The same to pageable host memory.",
        None,
        "two H100, 2026-11-24: 18.7 of 55 GB/s";
    scattered: Part = 0.6,
        "The part of what the simulator says that copy engines reach behind a switch where GPUs take chunks from many others and send to many.",
        None,
        "one of four H200 to the others, 2026-11-28: 1 GiB 4.8 ms scattered and exchanged, 3.07 in a chain; 16 MiB 0.255 and 0.140";
    thread_copy: Part = 0.14,
        "The part of a PCIe link's bandwidth that one CPU thread copies between pageable and pinned memory.",
        None,
        "two H100, 2026-11-24: 4, 8 and 12 threads fill a link with 37, 51.9 and 51.7 of 55 GB/s, two links with 8 and 12 threads 60 and 85";
}

/// From a kernel's last store to another GPU until a kernel there reads it: two H200, 16 B one way in one graph take 3.2 us, of which the launch is 1.2.
const KERNEL_HAND_OVER: f64 = 2e-6;

impl Costs {
    /// The same where each GPU works for a rank of its own: ranks wait for each other before and after a step, and chunks are handed over by
    /// flags, which is never taken to be faster than by events. No stream is forked to another GPU or joined to it.
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

    /// Those [between ranks](Costs::between_ranks) where kernels of the ranks copy, and hand chunks over by flags in each other's memory.
    pub fn between_kernels(&self) -> Costs {
        Costs { chunk_via_gpu: KERNEL_HAND_OVER, ..self.clone() }
    }
}

impl<'de> Deserialize<'de> for Costs {
    /// Of a table in which costs may be missing: then they are the defaults. Any other key is an error.
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
