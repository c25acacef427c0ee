//! Defines the cases of the benchmark: the copies of each case, the sizes, and the methods with which mpgpu is compared.

use super::compare::Comparison;
use super::plain::Manner;
use super::{Bench, Failure};
use mpgpu_core::topology::DeviceId;

/// One copy of a case, between two devices.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    pub src: DeviceId,
    pub dst: DeviceId,
    pub bytes: u64,
    /// True if the host memory of the copy is pageable, false if it is pinned.
    pub pageable: bool,
}

/// Case of the benchmark: a communication step with its name and the function that measures it.
pub struct Case {
    pub name: &'static str,
    /// Description of the communication step, of the methods that are compared, and of the meaning of the figures.
    pub description: &'static str,
    /// Minimum number of GPUs that the case needs.
    pub gpus: u32,
    /// True if the case measures calls of the CUDA driver and therefore cannot run on the host backend.
    pub needs_driver: bool,
    /// Default sizes in bytes of one transfer of the case. In `halo26` and `halo26_bidir` they are the sizes of one face.
    pub sizes: &'static [u64],
    /// Function that returns the copies of one communication step. Its arguments are the number of GPUs and the size in bytes.
    pub legs: fn(u32, u64) -> Vec<Leg>,
    /// Function that measures the case at one size, in bytes.
    pub run: fn(&Bench<'_>, &'static Case, u64) -> Result<Vec<Comparison>, Failure>,
}

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
/// Default sizes in bytes of one transfer, in cases that copy many small transfers.
const PIECES: &[u64] = &[4 * K, 16 * K, 64 * K];
const LARGE: &[u64] = &[M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M];

/// Largest default size of one transfer in bytes on the host backend, where CPU threads copy every byte.
pub const HOST_BACKEND_LARGEST: u64 = 16 * M;

/// All cases of the benchmark, in the order in which they are measured.
pub const CASES: &[Case] = &[
    Case {
        name: "d2d",
        description: "One copy, GPU 0 to GPU 1. Shows the gain of several paths for a large copy, and that a small copy is not slower \
                      than the plain call. Ratio 1 means that one path was planned.",
        sizes: &[8, 4 * K, 64 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "d2d_anew",
        description: "Like d2d, in memory that was freed and allocated again after the plan was first executed, as in a program that \
                      allocates its buffers in every step. The driver returns the same addresses again. Compare with d2d.",
        sizes: &[16 * M, 64 * M, 256 * M, 1024 * M],
        run: |bench, case, size| bench.anew(case, size),
        ..PAIR
    },
    Case {
        name: "d2d_bidir",
        description: "GPU 0 to GPU 1 and GPU 1 to GPU 0 concurrently. Both directions share PCIe links and host memory, so the host path \
                      gains less. Compared with plain copies in unordered streams, and in streams forked from one caller's stream and \
                      joined to it, which is the order that an executed plan keeps.",
        sizes: &[4 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 512 * M, 1024 * M],
        legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes), copy(gpu(1), gpu(0), bytes)],
        run: |bench, case, size| bench.step(case, size, &[Manner::Streams, Manner::Joined]),
        ..PAIR
    },
    Case {
        name: "h2d",
        description: "One copy, pinned host memory to GPU 0. Shows what the PCIe links of idle GPUs add to GPU 0's own link. Depends on \
                      which GPUs share the connection to host memory, and on the location of the pages.",
        gpus: 1,
        sizes: LARGE,
        legs: |_, bytes| vec![copy(DeviceId::HOST, gpu(0), bytes)],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "d2h",
        description: "One copy, GPU 0 to pinned host memory: like h2d in the other direction. Writing host memory is often slower than \
                      reading it.",
        gpus: 1,
        sizes: LARGE,
        legs: |_, bytes| vec![copy(gpu(0), DeviceId::HOST, bytes)],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "h2d_pageable",
        description: "Like h2d, from pageable host memory: CPU threads copy it to pinned chunks, which are sent over several links.",
        gpus: 1,
        sizes: LARGE,
        legs: |_, bytes| vec![Leg { pageable: true, ..copy(DeviceId::HOST, gpu(0), bytes) }],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "d2h_pageable",
        description: "Like h2d_pageable, GPU 0 to pageable host memory.",
        gpus: 1,
        sizes: LARGE,
        legs: |_, bytes| vec![Leg { pageable: true, ..copy(gpu(0), DeviceId::HOST, bytes) }],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "ring",
        description: "Every GPU to the next, the last to the first, as in pipelines and ring collectives. All links are busy, so \
                      additional paths for one transfer slow down another. Compared with both kinds of streams, like d2d_bidir.",
        gpus: 3,
        sizes: &[4 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M, 256 * M],
        legs: |gpus, bytes| (0..gpus).map(|i| copy(gpu(i), gpu((i + 1) % gpus), bytes)).collect(),
        run: |bench, case, size| bench.step(case, size, &[Manner::Streams, Manner::Joined]),
        ..PAIR
    },
    Case {
        name: "all_to_all",
        description: "Every GPU to every other, a transpose. Ports are saturated, so only issue time and order can gain. Compared with \
                      both kinds of streams, like d2d_bidir.",
        gpus: 3,
        sizes: &[4 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M],
        legs: |gpus, bytes| {
            let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
            pairs.filter(|(from, to)| from != to).map(|(from, to)| copy(gpu(from), gpu(to), bytes)).collect()
        },
        run: |bench, case, size| bench.step(case, size, &[Manner::Streams, Manner::Joined]),
        ..PAIR
    },
    Case {
        name: "halo26",
        description: "The 26 halo messages of a box, GPU 0 to GPU 1: 6 faces, 12 edges of a hundredth of a face, 8 corners of 24 B. Most \
                      are tiny, so calls cost more than bytes. Compared with one call per message in one stream, with a stream per \
                      message, and with the driver's batched copy.",
        sizes: &[240_000, 4 * M],
        legs: |_, face| halo(gpu(0), gpu(1), face).collect(),
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream, Manner::Streams, Manner::Batched]),
        ..PAIR
    },
    Case {
        name: "halo26_bidir",
        description: "Like halo26, in both directions concurrently: the exchange of two neighbours in one process. Compared with one call \
                      per message in one stream, with streams forked from one and joined to it, and with one batched copy, which makes \
                      one direction after the other.",
        sizes: &[24_000, 240_000, 4 * M],
        legs: |_, face| halo(gpu(0), gpu(1), face).chain(halo(gpu(1), gpu(0), face)).collect(),
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream, Manner::Joined, Manner::Batched]),
        ..PAIR
    },
    Case {
        name: "pieces_in",
        description: "Thousands of small pieces, pinned host memory to GPU 0, as in a paged cache or an irregular halo. One call per \
                      piece costs far more than its bytes. A kernel reads the pieces over the GPU's link. Compared with one call per \
                      piece in one stream, and with the driver's batched copy.",
        gpus: 1,
        sizes: PIECES,
        legs: |_, bytes| vec![copy(DeviceId::HOST, gpu(0), bytes); pieces(bytes)],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream, Manner::Batched]),
        ..PAIR
    },
    Case {
        name: "pieces_out",
        description: "Like pieces_in, GPU 0 to pinned host memory.",
        gpus: 1,
        sizes: PIECES,
        legs: |_, bytes| vec![copy(gpu(0), DeviceId::HOST, bytes); pieces(bytes)],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream, Manner::Batched]),
        ..PAIR
    },
    Case {
        name: "latency",
        description: "One small copy, GPU 0 to GPU 1: the fixed cost of a call. mpgpu adds a look-up, an event, and waiting for the \
                      event.",
        sizes: &[8, 64, 512, 4 * K, 16 * K, 64 * K, 256 * K],
        run: |bench, case, size| bench.step(case, size, &[Manner::OneStream]),
        ..PAIR
    },
    Case {
        name: "put_window",
        description: "1, 4 and 16 puts of the same buffer in flight, GPU 0 to GPU 1, with one wait for all, as osu_bw measures bandwidth: \
                      in one stream, where the puts are serialized, and in a stream per put, where they overlap.",
        sizes: &[M, 4 * M, 16 * M, 64 * M, 256 * M, 512 * M],
        run: |bench, case, size| bench.windows(case, size),
        ..PAIR
    },
    Case {
        name: "put_signal",
        description: "A put with signal, GPU 0 to memory of another process on GPU 1, until the signal is seen there. Compared with the \
                      same plan into memory of this process until the host sees its end, so ratio 1 means that the other process costs \
                      nothing. One isolated put, and four back to back. The receiver verifies the bytes as soon as it has the signal.",
        sizes: &[64 * M, 256 * M, 1024 * M],
        run: |bench, case, size| bench.put_signal(case, size),
        ..PAIR
    },
    Case {
        name: "put_paths",
        description: "One isolated put with signal, like put_signal, compared with the same put over one path.",
        sizes: &[64 * M, 256 * M, 1024 * M],
        run: |bench, case, size| bench.put_paths(case, size),
        ..PAIR
    },
    Case {
        name: "put_latency",
        description: "A small put with signal, GPU 0 to another process on GPU 1, stream to stream: half of a round trip, over many trips \
                      that both processes have enqueued beforehand, so that no host is involved. Compared with the signal without a put, \
                      and with a node plan of the same transfer in each direction, which is one call. `issue` covers a put, setting a \
                      signal, and a wait.",
        sizes: &[8],
        run: |bench, case, size| bench.put_latency(case, size),
        ..PAIR
    },
    Case {
        name: "d2d_narrow",
        description: "One copy, GPU 0 to GPU 1, with every GPU-to-GPU hop limited to the rate of a narrow link. Shows on any four GPUs \
                      what a mesh of few NVLinks (4 x V100) gains. Copies between GPUs are kernels of few threads, and the topology has \
                      direct links of the rate that was just measured for one of them. One narrow path is compared with two, with three, \
                      and with three and host memory.",
        gpus: 4,
        sizes: &[64 * M, 256 * M, 512 * M],
        run: |bench, case, size| bench.narrow(case, size),
        ..PAIR
    },
    Case {
        name: "graph_phases",
        description: "One-time and repeated costs of a CUDA graph, by the number of copy nodes: created and launched, launched again, and \
                      launched at new addresses, where nodes are re-pointed and nothing is instantiated. mpgpu's graph engine is compared \
                      with the driver's calls.",
        needs_driver: true,
        sizes: &[64 * M],
        run: |bench, case, size| bench.graph_phases(case, size),
        ..PAIR
    },
    Case {
        name: "execute_overhead",
        description: "The calling thread's time in mp_execute beyond the driver's own launch: one small copy, and one large copy over \
                      several paths as one graph. With a request, compared with the launch and the event record that a request needs.",
        needs_driver: true,
        sizes: &[8, 256 * M],
        run: |bench, case, size| bench.execute_overhead(case, size),
        ..PAIR
    },
];

/// Properties that a case has by default. The default case copies from GPU 0 to GPU 1.
const PAIR: Case = Case {
    name: "",
    description: "",
    gpus: 2,
    needs_driver: false,
    sizes: &[],
    legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes)],
    run: |_, _, _| Ok(Vec::new()),
};

const fn gpu(index: u32) -> DeviceId {
    DeviceId::gpu(index)
}

const fn copy(src: DeviceId, dst: DeviceId, bytes: u64) -> Leg {
    Leg { src, dst, bytes, pageable: false }
}

/// Returns the number of transfers of `bytes` bytes in a case with many small transfers. Their total size is at most 128 MiB.
fn pieces(bytes: u64) -> usize {
    (128 * M / bytes.max(1)).clamp(1, 4096) as usize
}

/// Returns the copies that one rank of a halo exchange sends to one neighbour GPU: faces, edges and corners. `face` is the size of a face
/// in bytes.
fn halo(src: DeviceId, dst: DeviceId, face: u64) -> impl Iterator<Item = Leg> {
    // An edge consists of whole double-precision numbers, so its size is a multiple of 8 bytes.
    let edge = (face / 100).next_multiple_of(8).max(8);
    [(6, face), (12, edge), (8, 24)].into_iter().flat_map(move |(count, bytes)| (0..count).map(move |_| copy(src, dst, bytes)))
}

impl Case {
    /// Returns the reason why the case cannot be measured here, or `None` if it can.
    pub fn missing(&self, gpus: u32, on_gpus: bool) -> Option<String> {
        if self.needs_driver && !on_gpus {
            return Some("measures calls of the CUDA driver, but this is the host backend".into());
        }
        (self.gpus > gpus).then(|| format!("needs {} GPUs, but the machine has {gpus}", self.gpus))
    }
}

/// Returns the case with this name, or an error that lists the names.
pub fn find(name: &str) -> Result<&'static Case, String> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        format!("unknown case; the cases are {}", names.join(", "))
    })
}

/// Returns the case with this name, or every case for `all`.
pub fn named(name: &str) -> Result<&'static [Case], String> {
    if name == "all" { Ok(CASES) } else { find(name).map(std::slice::from_ref) }
}

/// Returns the names and descriptions of all cases as text, for `--list`.
pub fn list() -> String {
    const WIDTH: usize = 100;
    let mut text = String::new();
    for case in CASES {
        text += &format!("{}{}\n", case.name, if case.gpus > 2 { format!(" (needs {} GPUs or more)", case.gpus) } else { String::new() });
        let mut line = String::from("   ");
        for word in case.description.split(' ') {
            if line.len() + 1 + word.len() > WIDTH {
                text += &format!("{line}\n");
                line = String::from("   ");
            }
            line += &format!(" {word}");
        }
        text += &format!("{line}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own_and_copies_what_it_says() {
        for (index, case) in CASES.iter().enumerate() {
            assert!(CASES[..index].iter().all(|other| other.name != case.name), "{}", case.name);
            assert!(!case.sizes.is_empty() && !case.description.is_empty(), "{}", case.name);
            for leg in (case.legs)(case.gpus.max(4), 1 << 20) {
                assert!(leg.src != leg.dst && leg.bytes > 0, "{}: {leg:?}", case.name);
            }
        }
        let legs = |name, gpus, bytes| (find(name).expect("a case").legs)(gpus, bytes);
        assert_eq!(legs("ring", 8, 5).last(), Some(&copy(gpu(7), gpu(0), 5)));
        assert_eq!(legs("all_to_all", 8, 5).len(), 56);
        // These are the message sizes of the measurements in the results: 6 x 240 000 B, 12 x 2 400 B, 8 x 24 B.
        let halo = legs("halo26", 2, 240_000);
        assert_eq!((halo.len(), halo.iter().map(|leg| leg.bytes).sum::<u64>()), (26, 6 * 240_000 + 12 * 2_400 + 8 * 24));
        let both = legs("halo26_bidir", 2, 240_000);
        assert_eq!((&both[..26], both[26..].iter().filter(|leg| (leg.src, leg.dst) == (gpu(1), gpu(0))).count()), (&halo[..], 26));
    }

    #[test]
    fn the_list_names_every_case_in_short_lines() {
        let list = list();
        let plain = list.split_whitespace().collect::<Vec<_>>().join(" ");
        for case in CASES {
            assert!(list.lines().any(|line| line.split(' ').next() == Some(case.name)) && plain.contains(case.description), "{list}");
        }
        assert!(list.lines().all(|line| line.len() <= 100) && list.contains("ring (needs 3 GPUs or more)"), "{list}");
    }

    #[test]
    fn a_case_that_cannot_run_says_why() {
        let missing = |name, gpus, on_gpus| find(name).expect("a case").missing(gpus, on_gpus);
        assert_eq!(missing("ring", 2, true), Some("needs 3 GPUs, but the machine has 2".into()));
        assert!(missing("graph_phases", 8, false).is_some_and(|why| why.contains("host backend")));
        assert_eq!(missing("graph_phases", 2, true), None);
        assert_eq!(missing("d2d_narrow", 4, false), None);
    }
}
