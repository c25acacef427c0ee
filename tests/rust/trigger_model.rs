//! Models of the memory order of `mpgpu/trigger.cuh` and of `cpp/polled_copy.hpp`, under loom, which gives every load all values that the memory
//! model allows. Each names the orders that the sources have; with any one of them weakened a model fails.
//!
//! Bytes are relaxed atomics here: what orders them is what is modelled. Nobody waits, because loom ends no loop: who looks and finds nothing is done,
//! and loom tries every moment at which it may look.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

/// The orders of a trigger.
#[derive(Copy, Clone)]
struct Orders {
    /// Of a block that counts what it has written.
    count: Ordering,
    /// Of the fence of the block that has counted the last; `Relaxed` for none.
    see: Ordering,
    /// Of a block of the polling kernel that counts what it has copied.
    tiles: Ordering,
    /// Of a block of the polling kernel that counts its end.
    end: Ordering,
    /// Of the block that raises the flag.
    raise: Ordering,
    /// Of whoever looks at a flag.
    look: Ordering,
}

/// Those of the sources.
const SOURCES: Orders = Orders { count: Release, see: Acquire, tiles: AcqRel, end: AcqRel, raise: Release, look: Acquire };

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[derive(Default)]
struct Words {
    bytes: [AtomicU64; 2],
    counter: AtomicU64,
    ready: AtomicU64,
}

impl Words {
    /// What a block does in a step.
    fn produce(&self, block: usize, step: u64, orders: Orders) {
        self.bytes[block].store(step, Relaxed);
        if self.counter.fetch_add(1, orders.count) + 1 == 2 {
            if orders.see != Relaxed {
                fence(orders.see);
            }
            self.counter.store(0, Relaxed);
            self.ready.store(1, orders.raise);
        }
    }

    /// What moves the partition. Whether it was ready.
    fn move_if_ready(&self, step: u64, orders: Orders) -> bool {
        let is_ready = self.ready.load(orders.look) != 0;
        if is_ready {
            for bytes in &self.bytes {
                assert_eq!(bytes.load(Relaxed), step, "out of order: a byte is not that of the step");
            }
            assert_eq!(self.counter.load(Relaxed), 0, "out of order: the counter is not set back");
        }
        is_ready
    }
}

/// Two steps of a partition that two blocks write. Who moves it arms the next step, whose blocks come after that.
fn two_steps(orders: Orders) {
    check(move || {
        let words = Arc::new(Words::default());
        let launch = |block: usize| {
            let words = words.clone();
            thread::spawn(move || words.produce(block, 1, orders))
        };
        let blocks = [0, 1].map(launch);
        if words.move_if_ready(1, orders) {
            words.ready.store(0, Relaxed);
            let next = words.clone();
            let both = thread::spawn(move || [0, 1].into_iter().for_each(|block| next.produce(block, 2, orders)));
            words.move_if_ready(2, orders);
            both.join().expect("no panic");
            assert!(words.move_if_ready(2, orders), "the second step was never ready");
        }
        blocks.into_iter().for_each(|block| block.join().expect("no panic"));
        assert_eq!(words.ready.load(Relaxed), 1, "nobody has raised the flag");
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

impl Polled {
    /// What a block does that finds the partition ready. Whether it did.
    fn block(&self, orders: Orders) -> bool {
        if self.ready.load(orders.look) == 0 {
            return false;
        }
        let mut copied = 0;
        loop {
            let tile = self.taken.fetch_add(1, Relaxed) as usize;
            if tile >= self.src.len() {
                break;
            }
            let bytes = self.src[tile].load(Relaxed);
            assert_eq!(bytes, 7, "out of order: a byte is moved before it is there");
            self.dst[tile].store(bytes, Relaxed);
            copied += 1;
        }
        if copied > 0 && self.copied.fetch_add(copied, orders.tiles) + copied == 2 {
            self.arrived.store(1, orders.raise);
        }
        if self.ended.fetch_add(1, orders.end) + 1 == 2 {
            self.words().into_iter().for_each(|word| word.store(0, Relaxed));
        }
        true
    }

    /// What is set back at the end.
    fn words(&self) -> [&AtomicU64; 4] {
        [&self.ready, &self.taken, &self.copied, &self.ended]
    }
}

/// A partition of two tiles that two blocks of the polling kernel move, and a receiver that looks whether it has arrived.
fn polled(orders: Orders) {
    check(move || {
        let words = Arc::new(Polled::default());
        let launch = |_| {
            let words = words.clone();
            thread::spawn(move || words.block(orders))
        };
        let blocks = [0, 1].map(launch);
        words.src.iter().for_each(|bytes| bytes.store(7, Relaxed));
        words.ready.store(1, orders.raise);
        if words.arrived.load(orders.look) != 0 {
            for bytes in &words.dst {
                assert_eq!(bytes.load(Relaxed), 7, "out of order: a byte has not arrived with its partition");
            }
        }
        let found = blocks.map(|block| block.join().expect("no panic"));
        if found == [true; 2] {
            assert_eq!(words.words().map(|word| word.load(Relaxed)), [0; 4], "out of order: the last block sets everything back");
            assert_eq!(words.arrived.load(Relaxed), 1, "nobody has told of the arrival");
        }
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
        "atom.add.release.gpu.global.u64",
        "fence.acq_rel.gpu",
        "st.release.sys.global.u64",
        "ld.acquire.sys.u64",
        "amount, __ATOMIC_RELEASE",
        "fence(__ATOMIC_ACQUIRE)",
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
        #[should_panic = "out of order"]
        fn $name() {
            $model(Orders { $field: $order, ..SOURCES });
        }
    )*};
}

weakened! {
    loom_finds_a_count_that_does_not_release: two_steps, count = Relaxed;
    loom_finds_a_last_block_that_does_not_acquire: two_steps, see = Relaxed;
    loom_finds_a_flag_that_does_not_release: two_steps, raise = Relaxed;
    loom_finds_a_look_that_does_not_acquire: two_steps, look = Relaxed;
    loom_finds_tiles_whose_count_does_not_release: polled, tiles = Acquire;
    loom_finds_tiles_whose_count_does_not_acquire: polled, tiles = Release;
    loom_finds_an_end_that_does_not_release: polled, end = Acquire;
    loom_finds_an_end_that_does_not_acquire: polled, end = Release;
    loom_finds_an_arrival_that_does_not_release: polled, raise = Relaxed;
    loom_finds_an_arrival_that_is_not_acquired: polled, look = Relaxed;
}
