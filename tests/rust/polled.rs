//! The protocol of the kernel that moves partitions as they become ready, by its CPU build: threads are its blocks, and other threads produce in any
//! order. Nothing but the kernel sets back what a step has raised and counted.

use crate::backend::{POLLED_WORDS, PolledList};
use crate::bridge::copy_polled_on_cpu;
use proptest::prelude::*;
use proptest::test_runner::Config;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Words of one launch, by their addresses alone, as the kernel takes them.
struct Launch {
    src: Vec<u8>,
    dst: Vec<u8>,
    ready: Vec<AtomicU64>,
    arrived: Vec<AtomicU64>,
    /// Those of all partitions, and the count of blocks that have ended.
    words: Vec<AtomicU64>,
    stop: AtomicU64,
    /// Where partitions begin, and where the last one ends.
    begins: Vec<usize>,
}

/// `kPolledWindow` of `cpp/polled_copy.hpp`.
const MOST_IN_WINDOW: usize = 32;

fn address<T>(of: &T) -> u64 {
    std::ptr::from_ref(of).expose_provenance() as u64
}

impl Launch {
    fn new(sizes: &[usize], tile: u64) -> Launch {
        let begins: Vec<usize> = std::iter::once(0)
            .chain(sizes.iter().scan(0, |end, size| {
                *end += size;
                Some(*end)
            }))
            .collect();
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let bytes = begins[sizes.len()];
        let mut launch = Launch {
            src: vec![0; bytes],
            dst: vec![0xEE; bytes],
            ready: zeros(sizes.len()),
            arrived: zeros(sizes.len()),
            words: Vec::new(),
            stop: AtomicU64::new(0),
            begins,
        };
        let (dst, src) = (launch.dst.as_mut_ptr().expose_provenance(), launch.src.as_mut_ptr().expose_provenance());
        for (partition, size) in sizes.iter().enumerate() {
            let begin = launch.begins[partition];
            let flags = [address(&launch.ready[partition]), address(&launch.arrived[partition])];
            let ends = [(dst + begin) as u64, (src + begin) as u64, *size as u64, tile];
            launch.words.extend(ends.into_iter().chain(flags).chain([0, 0]).map(AtomicU64::new));
        }
        launch.words.push(AtomicU64::new(0));
        launch
    }

    fn list(&self) -> PolledList {
        let count = self.ready.len() as u64;
        PolledList {
            partitions: address(&self.words[0]),
            count,
            ended: address(&self.words[(count * POLLED_WORDS) as usize]),
            stop: address(&self.stop),
        }
    }

    /// Runs the kernel's blocks on `threads` threads, one after the other on each.
    fn run<'scope>(&'scope self, scope: &'scope std::thread::Scope<'scope, '_>, blocks: u64, threads: u64) {
        let list = self.list();
        for thread in 0..threads {
            scope.spawn(move || {
                for block in (thread..blocks).step_by(threads as usize) {
                    // SAFETY: all words live until the scope ends; each block runs once.
                    unsafe { copy_polled_on_cpu(&list, block, blocks) }
                }
            });
        }
    }

    /// The bytes of a partition. What orders the threads is what the test is about.
    #[allow(clippy::mut_from_ref)]
    fn bytes(&self, base: &[u8], partition: usize) -> &mut [u8] {
        let (begin, end) = (self.begins[partition], self.begins[partition + 1]);
        let first = base.as_ptr().expose_provenance() + begin;
        // SAFETY: inside of a vector that lives as long as this, and whose bytes nobody else touches until flags say so.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(first), end - begin) }
    }

    fn is_set_back(&self) -> bool {
        let per_partition = |partition: &[AtomicU64]| partition[6..].iter().all(|word| word.load(Ordering::Relaxed) == 0);
        self.ready.iter().chain(self.words.last()).all(|word| word.load(Ordering::Relaxed) == 0)
            && self.words[..self.ready.len() * POLLED_WORDS as usize].chunks(POLLED_WORDS as usize).all(per_partition)
    }
}

fn byte(at: usize, step: usize) -> u8 {
    (at.wrapping_mul(41) ^ (at >> 8) ^ step.wrapping_mul(97)) as u8
}

proptest! {
    #![proptest_config(Config { cases: 60, failure_persistence: None, ..Config::default() })]

    #[test]
    fn blocks_move_each_partition_once_in_any_order_and_set_everything_back(
        sizes in prop::collection::vec(1_usize..5000, 1..80),
        tile in (0_u32..8).prop_map(|shift| 16_u64 << shift),
        blocks in 1_u64..7,
        threads in 1_u64..5,
        producers in 1_usize..4,
        seeds in prop::collection::vec(any::<u64>(), 3),
    ) {
        let launch = Launch::new(&sizes, tile);
        for (step, seed) in seeds.iter().enumerate() {
            // Within a window any order; further apart in the order in which they are expected, as far as one waits for the other.
            let mut order: Vec<usize> = (0..sizes.len()).collect();
            order.sort_by_key(|at| (at.wrapping_add(1) as u64).wrapping_mul(seed | 1));
            std::thread::scope(|scope| {
                launch.run(scope, blocks, threads.min(blocks));
                for producer in 0..producers {
                    let (launch, order) = (&launch, &order);
                    scope.spawn(move || {
                        for &partition in order.iter().skip(producer).step_by(producers) {
                            let begin = launch.begins[partition];
                            for (at, target) in launch.bytes(&launch.src, partition).iter_mut().enumerate() {
                                *target = byte(begin + at, step);
                            }
                            launch.ready[partition].store(1, Ordering::Release);
                        }
                    });
                }
                for partition in 0..sizes.len() {
                    while launch.arrived[partition].load(Ordering::Acquire) == 0 {
                        std::thread::yield_now();
                    }
                    let begin = launch.begins[partition];
                    let moved = launch.bytes(&launch.dst, partition);
                    let wrong = moved.iter().enumerate().find(|(at, found)| **found != byte(begin + at, step));
                    assert_eq!(wrong, None, "step {step}, partition {partition}");
                    moved.fill(0xEE);
                    launch.arrived[partition].store(0, Ordering::Relaxed);
                }
            });
            prop_assert!(launch.is_set_back(), "step {step}");
            prop_assert!(launch.dst.iter().all(|byte| *byte == 0xEE), "nothing is written after a partition has arrived");
        }
    }
}

#[test]
fn what_is_ready_early_is_moved_before_what_is_expected_first() {
    let sizes = [100; MOST_IN_WINDOW];
    let launch = Launch::new(&sizes, 16);
    std::thread::scope(|scope| {
        launch.run(scope, 2, 2);
        let take = |partition: usize| {
            launch.ready[partition].store(1, Ordering::Release);
            while launch.arrived[partition].load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
        };
        (0..MOST_IN_WINDOW).rev().for_each(take);
    });
    assert!(launch.is_set_back());
}

#[test]
fn a_block_leaves_its_core_to_others_while_it_waits_for_a_producer() {
    let launch = Launch::new(&[100], 16);
    let cpu_time = || {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the output is valid for the call.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    std::thread::scope(|scope| {
        let (list, begun) = (launch.list(), Instant::now());
        let block = scope.spawn(move || {
            // SAFETY: all words live until the scope ends; the block runs once.
            unsafe { copy_polled_on_cpu(&list, 0, 1) }
            (cpu_time(), begun.elapsed())
        });
        std::thread::sleep(Duration::from_secs(1));
        launch.ready[0].store(1, Ordering::Release);
        let (used, waited) = block.join().expect("it ends");
        assert!(used < waited / 4, "{used:?} of {waited:?}");
    });
}

#[test]
fn a_word_in_host_memory_ends_the_wait_for_producers() {
    let launch = Launch::new(&[300; 40], 64);
    std::thread::scope(|scope| {
        launch.run(scope, 3, 3);
        launch.ready[5].store(1, Ordering::Release);
        launch.stop.store(1, Ordering::Release);
    });
    assert!(launch.arrived.iter().all(|flag| flag.load(Ordering::Acquire) == 1), "as if all had been ready");
    assert!(launch.is_set_back());
}
