//! Models of the memory order of `mpgpu/trigger.cuh` and of `cpp/polled_copy.hpp`, under loom, which gives every load all values that the memory
//! model allows. Each names the orders that the sources have; with any one of them weakened a model fails.
//!
//! Bytes are relaxed atomics here: what orders them is what is modelled. Stream order between steps is that of the thread that arms them.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// The orders of a trigger.
#[derive(Copy, Clone)]
struct Orders {
    /// Of a block that counts what it has written.
    count: Ordering,
    /// Of the block that raises the flag.
    raise: Ordering,
    /// Of whoever looks at a flag.
    look: Ordering,
}

/// Those of the sources.
const SOURCES: Orders = Orders { count: AcqRel, raise: Release, look: Acquire };

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn wait(flag: &AtomicU64, order: Ordering) {
    while flag.load(order) == 0 {
        thread::yield_now();
    }
}

#[derive(Default)]
struct Words {
    bytes: [AtomicU64; 2],
    counter: AtomicU64,
    ready: AtomicU64,
    /// The step that is armed.
    armed: AtomicU64,
}

/// Two steps of a partition that two blocks write. One who sees its flag reads the bytes, and arms the next step.
fn two_steps(orders: Orders) {
    check(move || {
        let words = Arc::new(Words::default());
        words.armed.store(1, Relaxed);
        let blocks: Vec<_> = (0..2)
            .map(|block| {
                let words = words.clone();
                thread::spawn(move || {
                    for step in 1..=2 {
                        // A kernel that is launched after the step was armed.
                        while words.armed.load(Acquire) < step {
                            thread::yield_now();
                        }
                        words.bytes[block].store(step, Relaxed);
                        if words.counter.fetch_add(1, orders.count) + 1 == 2 {
                            words.counter.store(0, Relaxed);
                            words.ready.store(1, orders.raise);
                        }
                    }
                })
            })
            .collect();
        for step in 1..=2 {
            wait(&words.ready, orders.look);
            for bytes in &words.bytes {
                assert_eq!(bytes.load(Relaxed), step, "a byte of the partition is not that of the step");
            }
            assert_eq!(words.counter.load(Relaxed), 0, "the counter was not set back");
            // What moves the partition is done with it, and `arm` sets its flag back.
            words.ready.store(0, Relaxed);
            words.armed.store(step + 1, Release);
        }
        blocks.into_iter().for_each(|block| block.join().expect("no panic"));
    });
}

#[derive(Default)]
struct Polled {
    src: [AtomicU64; 2],
    dst: [AtomicU64; 2],
    ready: AtomicU64,
    taken: AtomicU64,
    copied: AtomicU64,
    ended: AtomicU64,
    arrived: AtomicU64,
}

/// A partition of two tiles that two blocks of the polling kernel move, and a receiver that looks at it when it has arrived.
fn polled(orders: Orders) {
    check(move || {
        let words = Arc::new(Polled::default());
        let blocks: Vec<_> = (0..2)
            .map(|_| {
                let words = words.clone();
                thread::spawn(move || {
                    wait(&words.ready, orders.look);
                    let mut copied = 0;
                    loop {
                        let tile = words.taken.fetch_add(1, Relaxed) as usize;
                        if tile >= 2 {
                            break;
                        }
                        words.dst[tile].store(words.src[tile].load(Relaxed), Relaxed);
                        copied += 1;
                    }
                    if copied > 0 && words.copied.fetch_add(copied, orders.count) + copied == 2 {
                        words.arrived.store(1, orders.raise);
                    }
                    if words.ended.fetch_add(1, orders.count) + 1 == 2 {
                        [&words.ready, &words.taken, &words.copied, &words.ended].into_iter().for_each(|word| word.store(0, Relaxed));
                    }
                })
            })
            .collect();
        words.src.iter().for_each(|bytes| bytes.store(7, Relaxed));
        words.ready.store(1, orders.raise);
        wait(&words.arrived, orders.look);
        for bytes in &words.dst {
            assert_eq!(bytes.load(Relaxed), 7, "a byte has not arrived with its partition");
        }
        blocks.into_iter().for_each(|block| block.join().expect("no panic"));
        let left = [&words.ready, &words.taken, &words.copied, &words.ended].map(|word| word.load(Relaxed));
        assert_eq!(left, [0; 4], "the last block sets everything back");
    });
}

#[test]
fn loom_a_trigger_shows_every_byte_of_its_step() {
    two_steps(SOURCES);
}

#[test]
fn loom_a_partition_that_a_kernel_moves_arrives_whole() {
    polled(SOURCES);
}

#[test]
fn the_models_have_the_orders_of_the_sources() {
    let trigger = include_str!("../../include/mpgpu/trigger.cuh");
    for order in [
        "atom.add.acq_rel.gpu.u64",
        "st.release.sys.u64",
        "ld.acquire.sys.u64",
        "amount, __ATOMIC_ACQ_REL",
        "1, __ATOMIC_RELEASE",
        "(flag, __ATOMIC_ACQUIRE)",
    ] {
        assert!(trigger.contains(order), "{order}");
    }
    let kernel = include_str!("../../cpp/segment_copy_kernel.cu");
    for order in ["atom.add.relaxed.gpu.u64", "ld.acquire.gpu.u64", "atom.add.acq_rel.gpu.u64", "st.release.sys.u64"] {
        assert!(kernel.contains(order), "{order}");
    }
}

macro_rules! weakened {
    ($($name:ident: $model:ident, $field:ident = $order:ident;)*) => {$(
        #[test]
        #[should_panic]
        fn $name() {
            $model(Orders { $field: $order, ..SOURCES });
        }
    )*};
}

weakened! {
    loom_finds_a_count_that_does_not_release: two_steps, count = Acquire;
    loom_finds_a_count_that_does_not_acquire: two_steps, count = Release;
    loom_finds_a_flag_that_does_not_release: two_steps, raise = Relaxed;
    loom_finds_a_look_that_does_not_acquire: two_steps, look = Relaxed;
    loom_finds_tiles_whose_count_does_not_release: polled, count = Acquire;
    loom_finds_tiles_whose_count_does_not_acquire: polled, count = Release;
    loom_finds_an_arrival_that_does_not_release: polled, raise = Relaxed;
    loom_finds_an_arrival_that_is_not_acquired: polled, look = Relaxed;
}
