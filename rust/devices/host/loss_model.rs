//! Tests under the model checker `shuttle` how the loss of a process ends the waits for its flags. A *party* is a process that sets flags.
//! The tests check three properties: the loss of a party ends the waits for its flags and no other waits, a flag that was set before the
//! loss stays set, and no wake-up is lost.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle shuttle_
//! ```

use super::chain::Chain;
use super::memory::HostMemory;
use super::node::Node;
use super::queue::Queue;
use super::run::{HostWork, Signals, Wait};
use crate::backend::failed_waits::FailedWaits;
use crate::backend::{Allocation, BackendError, LostPeer, Signal, StepFate};
use crate::sync::{AtomicBool, AtomicU32, Mutex, Ordering};
use crate::topology::DeviceId;
use shuttle::thread;
use std::sync::{Arc, OnceLock};

const SCHEDULES: usize = 2000;
const LOST: u32 = 1;
const LIVES: u32 = 2;

/// Three flags of two parties (processes that set flags). The lost party sets the first flag, and the live party sets the other two.
struct Flags {
    memory: Arc<HostMemory>,
    failed_waits: Arc<FailedWaits>,
    allocation: Allocation,
    /// True once the live party has granted access to the memory that its flags protect.
    is_granted: Arc<AtomicBool>,
    /// Number of communication steps that were not abandoned and therefore accessed the memory.
    passed: Arc<AtomicU32>,
}

impl Flags {
    fn new() -> Flags {
        let memory = Arc::new(HostMemory::default());
        let base = memory.allocate(DeviceId::HOST, 64, true).unwrap();
        let allocation = memory.locate(base).unwrap();
        memory.name_signallers(&allocation, [(base, LOST), (base + 8, LIVES), (base + 16, LIVES)].into());
        Flags { memory, failed_waits: Arc::default(), allocation, is_granted: Arc::default(), passed: Arc::default() }
    }

    fn flag(&self, index: u64, value: u64) -> Signal {
        Signal { counter: self.allocation.base + 8 * index, value }
    }

    fn raise(&self, index: u64) {
        self.memory.raise_signal(self.flag(index, 1)).unwrap();
    }

    fn lose(&self) {
        let note = |line, wait| self.failed_waits.note(line, wait);
        self.memory.fail_waits(&self.allocation, Some(LOST), LostPeer::of(41, None), note);
    }

    /// Appends the work of a communication step to a stream. The step waits for flags and then accesses the memory that the flags protect,
    /// unless the step was abandoned.
    fn step(&self, stream: u64, flags: &[u64], queues: &Queues) -> (Chain<HostWork>, StepFate) {
        let (chain, fate) = (Chain::new(), StepFate::default());
        let signals: Signals = flags.iter().map(|flag| self.flag(*flag, 1)).collect();
        self.failed_waits.wait(stream, signals.iter().filter_map(|flag| self.memory.line_of(flag.counter)));
        let (memory, failed_waits) = (Arc::clone(&self.memory), Arc::clone(&self.failed_waits));
        let wait = Wait { signals, takes: true, fate: Some(fate.clone()), lost: OnceLock::new(), memory, failed_waits };
        chain.append(&Node::new(HostWork::Wait(wait), &queues.waits));
        let (is_granted, passed, own) = (Arc::clone(&self.is_granted), Arc::clone(&self.passed), fate.clone());
        let touch = move || {
            if !own.is_abandoned() {
                assert!(is_granted.load(Ordering::SeqCst), "memory of a rank that lives is touched before it has granted that");
                passed.fetch_add(1, Ordering::SeqCst);
            }
        };
        chain.append(&Node::new(HostWork::Function(Mutex::new(Some(Box::new(touch)))), &queues.work));
        (chain, fate)
    }

    /// Waits for the communication step in `chain` and reports failed waits, like `mp_stream_synchronize`.
    fn end(&self, stream: u64, chain: &Chain<HostWork>) -> Result<(), BackendError> {
        let began = self.failed_waits.begin();
        if let Some(tail) = chain.tail() {
            tail.wait_finished();
        }
        self.failed_waits.report(|| stream, began)
    }
}

struct Queues {
    waits: Arc<Queue<HostWork>>,
    work: Arc<Queue<HostWork>>,
}

impl Queues {
    fn new() -> Queues {
        let queues = Queues { waits: Queue::watching("waits"), work: Queue::new("work", 1) };
        queues.waits.start().unwrap();
        queues.work.start().unwrap();
        queues
    }

    fn end(self) {
        self.waits.join();
        self.work.join();
    }
}

/// Time at which the lost party sets its flag, relative to its loss.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Raise {
    Before,
    After,
    Never,
}

fn lose_a_party(raise: Raise) {
    let (flags, queues) = (Arc::new(Flags::new()), Queues::new());
    let beside = |work: fn(&Flags, Raise)| {
        let flags = Arc::clone(&flags);
        thread::spawn(move || work(&flags, raise))
    };
    let party = beside(|flags, raise| {
        if raise == Raise::Before {
            flags.raise(0);
        }
        flags.lose();
        if raise == Raise::After {
            flags.raise(0);
        }
    });
    let (of_both, fate) = flags.step(1, &[0, 1], &queues);
    let (of_living, living) = flags.step(2, &[2], &queues);
    let lives = beside(|flags, _| {
        thread::yield_now();
        flags.is_granted.store(true, Ordering::SeqCst);
        [1, 2].into_iter().for_each(|flag| flags.raise(flag));
    });
    let told = flags.end(1, &of_both);
    flags.end(2, &of_living).expect("it waits for a party that lives");
    assert!(!living.is_abandoned());
    assert_eq!(told.is_err(), fate.is_abandoned(), "{told:?}");
    match raise {
        Raise::Before => told.expect("the flag was raised before the loss"),
        Raise::After => {}
        Raise::Never => assert!(matches!(told, Err(BackendError::PeerGone(_)))),
    }
    let passed = flags.passed.load(Ordering::SeqCst);
    assert_eq!(passed, if fate.is_abandoned() { 1 } else { 2 });
    [party, lives].into_iter().for_each(|thread| thread.join().unwrap());
    queues.end();
}

// The tests below use only random schedules, because schedules of the PCT algorithm let a polling thread starve the others.

#[test]
fn shuttle_a_flag_that_is_raised_before_its_party_is_lost_is_taken() {
    shuttle::check_random(|| lose_a_party(Raise::Before), SCHEDULES);
}

#[test]
fn shuttle_a_loss_ends_the_waits_for_the_lost_party_and_no_others() {
    shuttle::check_random(|| lose_a_party(Raise::Never), SCHEDULES);
}

#[test]
fn shuttle_a_flag_that_is_raised_after_the_loss_of_its_party_lets_no_step_go_on_without_the_others() {
    shuttle::check_random(|| lose_a_party(Raise::After), SCHEDULES);
}
