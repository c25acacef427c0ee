//! The list of cases: what is copied, in which sizes, and against which ways of making plain copies.

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
    pub description: &'static str,
    /// GPUs that it needs.
    pub gpus: u32,
    /// What is measured where nobody names sizes. A size is that of one transfer, and of one face in `halo26`.
    pub sizes: &'static [u64],
    /// The plain copies that it is held against.
    pub against: &'static [Manner],
    /// The copies, on so many GPUs and for this size.
    pub legs: fn(u32, u64) -> Vec<Leg>,
}

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
const LARGE: &[u64] = &[M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M];

/// Every case, in the order in which they run.
pub const CASES: &[Case] = &[
    Case {
        name: "d2d",
        description: "one copy, GPU 0 to GPU 1",
        gpus: 2,
        sizes: &[8, 4 * K, 64 * K, M, 4 * M, 16 * M, 64 * M, 256 * M, 1024 * M],
        against: &[Manner::OneStream],
        legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes)],
    },
    Case {
        name: "d2d_bidir",
        description: "GPU 0 to GPU 1 and GPU 1 to GPU 0 at once",
        gpus: 2,
        sizes: &[M, 16 * M, 64 * M, 256 * M, 512 * M, 1024 * M],
        against: &[Manner::Streams],
        legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes), copy(gpu(1), gpu(0), bytes)],
    },
    Case {
        name: "h2d",
        description: "one copy, pinned host memory to GPU 0",
        gpus: 1,
        sizes: LARGE,
        against: &[Manner::OneStream],
        legs: |_, bytes| vec![copy(DeviceId::HOST, gpu(0), bytes)],
    },
    Case {
        name: "d2h",
        description: "one copy, GPU 0 to pinned host memory",
        gpus: 1,
        sizes: LARGE,
        against: &[Manner::OneStream],
        legs: |_, bytes| vec![copy(gpu(0), DeviceId::HOST, bytes)],
    },
    Case {
        name: "ring",
        description: "every GPU to the next, the last to the first",
        gpus: 3,
        sizes: &[M, 16 * M, 64 * M, 256 * M],
        against: &[Manner::Streams],
        legs: |gpus, bytes| (0..gpus).map(|i| copy(gpu(i), gpu((i + 1) % gpus), bytes)).collect(),
    },
    Case {
        name: "all_to_all",
        description: "every GPU to every other",
        gpus: 3,
        sizes: &[M, 16 * M, 64 * M],
        against: &[Manner::Streams],
        legs: |gpus, bytes| {
            let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (from, to)));
            pairs.filter(|(from, to)| from != to).map(|(from, to)| copy(gpu(from), gpu(to), bytes)).collect()
        },
    },
    Case {
        name: "halo26",
        description: "the 26 halo messages of a box, GPU 0 to GPU 1: 6 faces, 12 edges of a hundredth of a face, 8 corners of 24 B",
        gpus: 2,
        sizes: &[240_000, 4 * M],
        against: &[Manner::OneStream, Manner::Streams, Manner::Batched],
        legs: |_, face| {
            // Whole doubles.
            let edge = (face / 100).next_multiple_of(8).max(8);
            [(6, face), (12, edge), (8, 24)]
                .into_iter()
                .flat_map(|(count, bytes)| (0..count).map(move |_| copy(gpu(0), gpu(1), bytes)))
                .collect()
        },
    },
    Case {
        name: "latency",
        description: "one small copy, GPU 0 to GPU 1, from issue until the host sees it done",
        gpus: 2,
        sizes: &[8, 64, 512, 4 * K, 16 * K, 64 * K, 256 * K],
        against: &[Manner::OneStream],
        legs: |_, bytes| vec![copy(gpu(0), gpu(1), bytes)],
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

/// The case of this name.
pub fn find(name: &str) -> Result<&'static Case, String> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        format!("{name}: no such case; there are {}", names.join(", "))
    })
}

/// Names and descriptions, for `--list`.
pub fn list() -> String {
    CASES.iter().map(|case| format!("{:<11} {}{}\n", case.name, case.description, needs(case.gpus))).collect()
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
            assert!(!case.sizes.is_empty() && !case.against.is_empty(), "{}", case.name);
            for leg in (case.legs)(case.gpus.max(4), 1 << 20) {
                assert!(leg.src != leg.dst && leg.bytes > 0, "{}: {leg:?}", case.name);
            }
        }
        let legs = |name, gpus, bytes| (find(name).expect("a case").legs)(gpus, bytes);
        assert_eq!(legs("ring", 8, 5).last(), Some(&copy(gpu(7), gpu(0), 5)));
        assert_eq!(legs("all_to_all", 8, 5).len(), 56);
        // The messages of the readings: 6 x 240 000 B, 12 x 2 400 B, 8 x 24 B.
        let halo = legs("halo26", 2, 240_000);
        assert_eq!((halo.len(), halo.iter().map(|leg| leg.bytes).sum::<u64>()), (26, 6 * 240_000 + 12 * 2_400 + 8 * 24));
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_that_exist() {
        let error = find("d2dd").err().expect("no such case");
        assert!(error.contains("d2dd") && CASES.iter().all(|case| error.contains(case.name)), "{error}");
    }
}
