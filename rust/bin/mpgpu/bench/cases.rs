//! The list of cases: what is copied, in which sizes, and against what.

use super::plain::Manner;
use mpgpu::topology::DeviceId;

/// One copy of a case.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    pub src: DeviceId,
    pub dst: DeviceId,
    pub bytes: u64,
}

/// A named communication step.
pub struct Case {
    pub name: &'static str,
    /// What is done, in one line.
    pub description: &'static str,
    /// What its figures mean and what to look at, a few lines.
    pub teaches: &'static str,
    /// GPUs that it needs.
    pub gpus: u32,
    /// What is measured where nobody names sizes. A size is that of one transfer, and of one face in `halo26` and `halo26_bidir`.
    pub sizes: &'static [u64],
    pub kind: Kind,
}

/// How a case is measured.
pub enum Kind {
    /// Executions of one plan, one at a time, against plain copies of the same bytes.
    Step {
        /// The plain copies that it is held against.
        against: &'static [Manner],
        /// The copies, on so many GPUs and for this size.
        legs: fn(u32, u64) -> Vec<Leg>,
    },
    /// One plan, in memory that was freed and allocated anew since it was first executed.
    Anew,
    /// Several executions of one plan under way at once.
    Window,
    /// Puts with signal into another process's memory.
    PutSignal,
    /// Round trips of them.
    PutLatency,
    /// GPU-to-GPU copies held to the rate of a narrow link.
    Narrow,
    /// The driver's graph calls one by one, and the library's.
    GraphPhases,
    /// What the calling thread spends in `mp_execute`.
    ExecuteOverhead,
}

impl Kind {
    /// Whether it measures calls of the CUDA driver, so that there is nothing to measure on the host backend.
    pub fn needs_driver(&self) -> bool {
        matches!(self, Kind::GraphPhases | Kind::ExecuteOverhead)
    }
}

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
const LARGE: &[u64] = &[M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M];

/// Puts under way at once in `put_window`, as in the papers' bandwidth figures (OSU micro-benchmarks).
pub const WINDOWS: [usize; 3] = [1, 4, 16];

/// Every case, in the order in which they run.
pub const CASES: &[Case] = &[
    Case {
        name: "d2d",
        description: "one copy, GPU 0 to GPU 1",
        teaches: "What several paths give one large copy, and that a small one is never slower than the plain call. Ratio 1 means that one \
                  path was planned.",
        gpus: 2,
        sizes: &[8, 4 * K, 64 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M],
        kind: Kind::Step { against: &[Manner::OneStream], legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes)] },
    },
    Case {
        name: "d2d_anew",
        description: "one copy, GPU 0 to GPU 1, in memory that was freed and allocated anew since the plan was first executed",
        teaches: "A program that allocates its buffers in every step: the driver gives the same addresses again, and what a graph knows of the \
                  memory that was there is of no use. To be held against d2d.",
        gpus: 2,
        sizes: &[16 * M, 64 * M, 256 * M, 1024 * M],
        kind: Kind::Anew,
    },
    Case {
        name: "d2d_bidir",
        description: "GPU 0 to GPU 1 and GPU 1 to GPU 0 at once",
        teaches: "Both directions share PCIe links and host memory, so the host path gains less. Against plain copies in streams that nothing \
                  orders, and against streams forked from one caller's stream and joined to it, which is the order that mp_execute keeps.",
        gpus: 2,
        sizes: &[64 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 512 * M, 1024 * M],
        kind: Kind::Step {
            against: &[Manner::Streams, Manner::Joined],
            legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes), copy(gpu(1), gpu(0), bytes)],
        },
    },
    Case {
        name: "h2d",
        description: "one copy, pinned host memory to GPU 0",
        teaches: "What the PCIe links of idle GPUs add to GPU 0's own. Depends on which GPUs share their way to host memory, and on where the \
                  pages lie.",
        gpus: 1,
        sizes: LARGE,
        kind: Kind::Step { against: &[Manner::OneStream], legs: |_, bytes| vec![copy(DeviceId::HOST, gpu(0), bytes)] },
    },
    Case {
        name: "d2h",
        description: "one copy, GPU 0 to pinned host memory",
        teaches: "As h2d, the other way; host memory often takes less than it gives.",
        gpus: 1,
        sizes: LARGE,
        kind: Kind::Step { against: &[Manner::OneStream], legs: |_, bytes| vec![copy(gpu(0), DeviceId::HOST, bytes)] },
    },
    Case {
        name: "ring",
        description: "every GPU to the next, the last to the first",
        teaches: "A shift, as in pipelines and ring collectives: all links are busy, so more paths for one transfer take from another. The two \
                  plain comparisons as in d2d_bidir.",
        gpus: 3,
        sizes: &[M, 16 * M, 64 * M, 256 * M],
        kind: Kind::Step {
            against: &[Manner::Streams, Manner::Joined],
            legs: |gpus, bytes| (0..gpus).map(|i| copy(gpu(i), gpu((i + 1) % gpus), bytes)).collect(),
        },
    },
    Case {
        name: "all_to_all",
        description: "every GPU to every other",
        teaches: "A transpose: ports are full, and what can be gained is issue time and order. The two plain comparisons as in d2d_bidir.",
        gpus: 3,
        sizes: &[M, 16 * M, 64 * M],
        kind: Kind::Step {
            against: &[Manner::Streams, Manner::Joined],
            legs: |gpus, bytes| {
                let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
                pairs.filter(|(from, to)| from != to).map(|(from, to)| copy(gpu(from), gpu(to), bytes)).collect()
            },
        },
    },
    Case {
        name: "halo26",
        description: "the 26 halo messages of a box, GPU 0 to GPU 1: 6 faces, 12 edges of a hundredth of a face, 8 corners of 24 B",
        teaches: "Many messages of which most are tiny: calls cost more than bytes. Against one call each in one stream, a stream each, and \
                  the driver's batched copy.",
        gpus: 2,
        sizes: &[240_000, 4 * M],
        kind: Kind::Step {
            against: &[Manner::OneStream, Manner::Streams, Manner::Batched],
            legs: |_, face| halo(gpu(0), gpu(1), face).collect(),
        },
    },
    Case {
        name: "halo26_bidir",
        description: "the same from GPU 0 to GPU 1 and from GPU 1 to GPU 0 at once",
        teaches: "The exchange of two neighbours in one process. Against one call each in one stream, streams that are forked from one and \
                  joined to it, and one batched copy, which makes one direction after the other.",
        gpus: 2,
        sizes: &[24_000, 240_000, 4 * M],
        kind: Kind::Step {
            against: &[Manner::OneStream, Manner::Joined, Manner::Batched],
            legs: |_, face| halo(gpu(0), gpu(1), face).chain(halo(gpu(1), gpu(0), face)).collect(),
        },
    },
    Case {
        name: "latency",
        description: "one small copy, GPU 0 to GPU 1, from issue until the host sees it done",
        teaches: "The fixed cost of a call. The difference between the two columns is what mpgpu adds: a look-up, an event, and waiting for it.",
        gpus: 2,
        sizes: &[8, 64, 512, 4 * K, 16 * K, 64 * K, 256 * K],
        kind: Kind::Step { against: &[Manner::OneStream], legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes)] },
    },
    Case {
        name: "put_window",
        description: "1, 4 and 16 puts of the same buffer under way, GPU 0 to GPU 1, as osu_bw counts bandwidth",
        teaches: "A window of puts is issued, then all are waited for; the rate is that of the whole window. All in one stream, where one \
                  follows another, and in a stream each, where the end of one overlaps with the begin of the next.",
        gpus: 2,
        sizes: &[M, 4 * M, 16 * M, 64 * M, 256 * M, 512 * M],
        kind: Kind::Window,
    },
    Case {
        name: "put_signal",
        description: "a put with signal, GPU 0 to memory of another process on GPU 1",
        teaches: "What it costs that the destination is another process's: until the signal is seen there, against the same plan into memory of \
                  this process until the host sees it done, so ratio 1 means that it costs nothing. One put at a time, and four in a row. The \
                  receiver checks the bytes as soon as it has the signal.",
        gpus: 2,
        sizes: &[64 * M, 256 * M, 1024 * M],
        kind: Kind::PutSignal,
    },
    Case {
        name: "put_latency",
        description: "a small put with signal, GPU 0 to another process on GPU 1, stream to stream, one way",
        teaches: "Half of a round trip, of many that both processes have enqueued beforehand: no host takes part. Against the signal without \
                  a put. `issue` is of a put, a raise and a wait.",
        gpus: 2,
        sizes: &[8],
        kind: Kind::PutLatency,
    },
    Case {
        name: "d2d_narrow",
        description: "one copy, GPU 0 to GPU 1, every GPU-to-GPU hop held to the rate of a narrow link",
        teaches: "What a mesh of few NVLinks (4 x V100) gains, on any four GPUs: copies between GPUs are kernels of as many threads as reach \
                  about 45 GB/s, and the topology has direct links of the rate that one of them was just measured to have. Host memory \
                  counts for a quarter of a link, as on the papers' machine. One narrow path against two, three, and three with host memory.",
        gpus: 4,
        sizes: &[64 * M, 256 * M, 512 * M],
        kind: Kind::Narrow,
    },
    Case {
        name: "graph_phases",
        description: "creation, construction, instantiation and launch of CUDA graphs by the number of copy nodes",
        teaches: "What a graph costs once and what it costs every time, by the driver's calls and by mpgpu's graph engine, for the first graph \
                  and for later ones. Then the same graph at new addresses: nodes are re-pointed, and nothing is instantiated.",
        gpus: 2,
        sizes: &[64 * M],
        kind: Kind::GraphPhases,
    },
    Case {
        name: "execute_overhead",
        description: "the calling thread's time in mp_execute, beyond the driver's own launch",
        teaches: "One small copy, and one large copy over several paths as one graph, each against the bare call of the driver; \
                  and with a request, against that call with the event record that a request needs.",
        gpus: 2,
        sizes: &[8, 256 * M],
        kind: Kind::ExecuteOverhead,
    },
];

/// Largest size that is measured by default on the host backend, where a CPU moves every byte.
pub const HOST_BACKEND_LARGEST: u64 = 16 * M;

const fn gpu(index: u32) -> DeviceId {
    DeviceId::gpu(index)
}

const fn copy(src: DeviceId, dst: DeviceId, bytes: u64) -> Leg {
    Leg { src, dst, bytes }
}

/// The messages of a box to a neighbour: faces, edges, corners.
fn halo(src: DeviceId, dst: DeviceId, face: u64) -> impl Iterator<Item = Leg> {
    // Whole doubles.
    let edge = (face / 100).next_multiple_of(8).max(8);
    [(6, face), (12, edge), (8, 24)].into_iter().flat_map(move |(count, bytes)| (0..count).map(move |_| copy(src, dst, bytes)))
}

impl Case {
    /// The copies of one step on so many GPUs.
    pub fn legs(&self, gpus: u32, size: u64) -> Vec<Leg> {
        match self.kind {
            Kind::Step { legs, .. } => legs(gpus, size),
            _ => vec![copy(gpu(0), gpu(1), size)],
        }
    }

    /// Why it cannot run here.
    pub fn missing(&self, gpus: u32, on_gpus: bool) -> Option<String> {
        if self.kind.needs_driver() && !on_gpus {
            return Some("measures calls of the CUDA driver, and this is the host backend".into());
        }
        (self.gpus > gpus).then(|| format!("needs {} GPUs and there are {gpus}", self.gpus))
    }
}

/// The case of this name.
pub fn find(name: &str) -> Result<&'static Case, String> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        format!("{name}: no such case; there are {}", names.join(", "))
    })
}

/// Names, descriptions and what they teach, for `--list`.
pub fn list() -> String {
    const WIDTH: usize = 100;
    let mut text = String::new();
    for case in CASES {
        text += &format!("{:<17}{}{}\n", case.name, case.description, needs(case.gpus));
        let mut line = String::from("   ");
        for word in case.teaches.split_whitespace() {
            if line.len() + 1 + word.len() > WIDTH {
                text += &line;
                text += "\n";
                line = String::from("   ");
            }
            line += " ";
            line += word;
        }
        text += &line;
        text += "\n";
    }
    text
}

fn needs(gpus: u32) -> String {
    if gpus > 2 { format!(" ({gpus} GPUs or more)") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own_and_copies_what_it_says() {
        for (index, case) in CASES.iter().enumerate() {
            assert!(CASES[..index].iter().all(|other| other.name != case.name), "{}", case.name);
            assert!(!case.sizes.is_empty(), "{}", case.name);
            assert!(!matches!(case.kind, Kind::Step { against: [], .. }), "{}", case.name);
            for leg in case.legs(case.gpus.max(4), 1 << 20) {
                assert!(leg.src != leg.dst && leg.bytes > 0, "{}: {leg:?}", case.name);
            }
        }
        let legs = |name, gpus, bytes| find(name).expect("a case").legs(gpus, bytes);
        assert_eq!(legs("ring", 8, 5).last(), Some(&copy(gpu(7), gpu(0), 5)));
        assert_eq!(legs("all_to_all", 8, 5).len(), 56);
        // The messages of the readings: 6 x 240 000 B, 12 x 2 400 B, 8 x 24 B.
        let halo = legs("halo26", 2, 240_000);
        assert_eq!((halo.len(), halo.iter().map(|leg| leg.bytes).sum::<u64>()), (26, 6 * 240_000 + 12 * 2_400 + 8 * 24));
        let both = legs("halo26_bidir", 2, 240_000);
        assert_eq!((&both[..26], both[26..].iter().filter(|leg| (leg.src, leg.dst) == (gpu(1), gpu(0))).count()), (&halo[..], 26));
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_that_exist() {
        let error = find("d2dd").err().expect("no such case");
        assert!(error.contains("d2dd") && CASES.iter().all(|case| error.contains(case.name)), "{error}");
    }

    #[test]
    fn the_list_names_every_case_and_says_in_short_lines_what_it_teaches() {
        let list = list();
        let plain = list.split_whitespace().collect::<Vec<_>>().join(" ");
        for case in CASES {
            assert!(list.lines().any(|line| line.starts_with(&format!("{} ", case.name)) && line.contains(case.description)), "{list}");
            assert!(plain.contains(case.teaches), "{}", case.teaches);
        }
        assert!(list.lines().filter(|line| line.starts_with(' ')).all(|line| line.len() <= 100), "{list}");
    }

    #[test]
    fn what_a_case_lacks_is_said() {
        let missing = |name, gpus, on_gpus| find(name).expect("a case").missing(gpus, on_gpus);
        assert_eq!(missing("ring", 3, true), None);
        assert_eq!(missing("ring", 2, true).as_deref(), Some("needs 3 GPUs and there are 2"));
        assert!(missing("graph_phases", 8, false).is_some_and(|why| why.contains("host backend")));
        assert_eq!(missing("graph_phases", 2, true), None);
        assert_eq!(missing("d2d_narrow", 4, false), None);
    }
}
