//! Models the memory order of `mpgpu/trigger.cuh` with loom, which gives every load all values that the memory model permits. Each model
//! uses the orders of the sources; with any one of them weakened, a model fails.
//!
//! Bytes are relaxed atomics here, because their order is under test. No thread waits, because loom ends no loop: a thread that reads an
//! unset flag is done, and loom tries every moment at which it may read it.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

/// Memory orders of a trigger.
#[derive(Copy, Clone)]
struct Orders {
    /// Order with which a block counts the bytes that it has written.
    count: Ordering,
    /// Order of the fence of the block that has counted the last bytes; `Relaxed` for no fence.
    see: Ordering,
    /// Order with which a block raises the flag.
    raise: Ordering,
    /// Order with which a flag is read.
    look: Ordering,
}

/// Orders in the sources.
const SOURCES: Orders = Orders { count: Release, see: Acquire, raise: Release, look: Acquire };

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
    /// Runs a block in a step.
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

    /// Moves the partition if it is ready. Returns true if it was.
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

/// Runs two steps of a partition that two blocks write. The thread that moves it arms the next step, whose blocks run afterwards.
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

#[test]
fn loom_a_trigger_shows_every_byte_of_its_step() {
    two_steps(SOURCES);
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
}

macro_rules! weakened {
    ($($name:ident: $field:ident = $order:ident;)*) => {$(
        #[test]
        #[should_panic = "out of order"]
        fn $name() {
            two_steps(Orders { $field: $order, ..SOURCES });
        }
    )*};
}

weakened! {
    loom_finds_a_count_that_does_not_release: count = Relaxed;
    loom_finds_a_last_block_that_does_not_acquire: see = Relaxed;
    loom_finds_a_flag_that_does_not_release: raise = Relaxed;
    loom_finds_a_look_that_does_not_acquire: look = Relaxed;
}
