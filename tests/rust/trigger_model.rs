//! Models the memory order in `mpgpu/trigger.cuh` with the model checker loom, in which each load returns every value that the memory model
//! permits. The models use the memory orders of the source code. If any one of these orders is weakened, a model fails.
//!
//! Data is modelled by relaxed atomics, because its order is under test. No thread waits in a loop, because loom cannot end such a loop: a
//! thread that reads a flag that is not set ends, and loom tries every moment of this read.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

/// Memory orders of the operations of a trigger.
#[derive(Copy, Clone)]
struct Orders {
    /// Order with which a block adds the number of bytes that it has written.
    count: Ordering,
    /// Order of the fence in the block that adds the last bytes; `Relaxed` for no fence.
    see: Ordering,
    /// Order with which a block sets the flag of a partition.
    raise: Ordering,
    /// Order with which the flag of a partition is read.
    look: Ordering,
}

/// Memory orders in the source code.
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
    /// Runs one block in a communication step: the block writes its data and reports it.
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

    /// Copies the partition if its flag is set. Returns true if it was.
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

/// Runs two communication steps of a partition that two blocks write. The thread that copies the partition arms the next step, whose blocks
/// run afterwards.
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
