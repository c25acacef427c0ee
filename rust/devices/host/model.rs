//! Tests the dependency graph, the queues and the chains of the host backend with the model checker `shuttle`. The production code runs on
//! the checker's primitives. The checker tries thousands of random schedules, and schedules with few, well-placed preemptions.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle shuttle_
//! ```
//!
//! A lost wake-up appears as a deadlock, which `shuttle` reports. All other properties are checked on a trace of the steps (units of work
//! of a graph node) that began and ended.

use super::chain::Chain;
use super::node::{Node, Work};
use super::queue::Queue;
use super::schedule::Schedule;
use super::streams::{Stream, StreamTable};
use crate::backend::{BackendError, CompletionState};
use crate::plan::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program};
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::topology::DeviceId;
use shuttle::thread;
use smallvec::smallvec;
use std::sync::Arc;

const SCHEDULES: usize = 2000;

/// Runs `test` under random schedules, then under schedules of the PCT algorithm with up to three preemptions.
fn check(test: fn()) {
    shuttle::check_random(test, SCHEDULES);
    shuttle::check_pct(test, SCHEDULES, 3);
}

/// Record of the order in which the steps of graph nodes began and ended. The lock comes from the standard library, because it is not part
/// of the tested model and no thread switch happens while it is held.
#[derive(Clone, Debug, Default)]
struct Trace(Arc<std::sync::Mutex<Vec<Moment>>>);

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Moment {
    Begin(u32, u32),
    End(u32, u32),
    Conclude(u32),
}

impl Trace {
    fn note(&self, moment: Moment) {
        self.0.lock().unwrap().push(moment);
    }

    /// Returns the index of `moment` in the trace. Asserts that `moment` occurs exactly once.
    fn at(&self, moment: Moment) -> usize {
        let trace = self.0.lock().unwrap();
        let times: Vec<_> = (0..trace.len()).filter(|&i| trace[i] == moment).collect();
        assert_eq!(times.len(), 1, "{moment:?} in {trace:?}");
        times[0]
    }

    /// Asserts that the step `later` began after the step `earlier` had ended, and that both ran exactly once. A step is given as the
    /// numbers of its node and of the step in the node.
    fn assert_order(&self, earlier: (u32, u32), later: (u32, u32)) {
        self.at(Moment::Begin(earlier.0, earlier.1));
        self.at(Moment::End(later.0, later.1));
        let (end, begin) = (self.at(Moment::End(earlier.0, earlier.1)), self.at(Moment::Begin(later.0, later.1)));
        assert!(end < begin, "{later:?} began before {earlier:?} ended: {:?}", self.0.lock().unwrap());
    }

    /// Returns the numbers of the nodes in the trace, in the order in which they ran. Asserts that no two nodes overlapped. Every node must
    /// have exactly one step.
    fn sequence(&self) -> Vec<u32> {
        let trace: Vec<_> = self.0.lock().unwrap().iter().copied().filter(|moment| !matches!(moment, Moment::Conclude(_))).collect();
        let pair = |pair: &[Moment]| match *pair {
            [Moment::Begin(node, _), Moment::End(same, _)] if node == same => node,
            _ => panic!("overlap in {trace:?}"),
        };
        trace.chunks(2).map(pair).collect()
    }
}

/// Work of a test node, which records in a trace when its steps begin and end.
#[derive(Debug)]
struct Probe {
    node: u32,
    schedule: Schedule,
    trace: Trace,
    /// Number of the step that returns an error, or `None` if no step does.
    fails: Option<u32>,
}

impl Work for Probe {
    fn roots(&self) -> impl Iterator<Item = u32> {
        self.schedule.roots()
    }

    fn run(&self, step: u32) -> Result<(), BackendError> {
        self.trace.note(Moment::Begin(self.node, step));
        thread::yield_now();
        self.trace.note(Moment::End(self.node, step));
        if self.fails == Some(step) { Err(BackendError::DataCorruption { transfer: step, offset: 0 }) } else { Ok(()) }
    }

    fn finished(&self, step: u32) -> impl Iterator<Item = u32> {
        self.schedule.finished(step)
    }

    fn was_last(&self) -> bool {
        self.schedule.was_last()
    }

    fn conclude(&self) -> Result<(), BackendError> {
        self.trace.note(Moment::Conclude(self.node));
        Ok(())
    }

    fn describe(&self, step: u32) -> String {
        format!("operation {step} of graph node {}", self.node)
    }
}

/// Creates a test program. For each operation, `ops` contains the lane (sequence of operations) and the indices of the operations that it
/// must follow. Only this order matters for the tests.
fn program(ops: &[(u32, &[u32])]) -> Program {
    let place = Place::Source { transfer: 0, offset: 0 };
    let ops = ops.iter().map(|(lane, after)| Op {
        lane: LaneId(*lane),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from: place, to: place, bytes: 1 }],
        after: after.iter().map(|&op| OpId(op)).collect(),
    });
    Program { lanes: vec![Lane::new(DeviceId::gpu(0)); 4], ops: ops.collect(), ..Program::default() }
}

/// Test fixture: a queue, and the trace of the nodes that run on it.
struct Fixture {
    queue: Arc<Queue<Probe>>,
    trace: Trace,
}

impl Fixture {
    fn new(threads: usize) -> Self {
        Self::beside(&Trace::default(), threads)
    }

    /// Creates a fixture with a new queue and an existing trace.
    fn beside(trace: &Trace, threads: usize) -> Self {
        let queue = Queue::new("modelled", threads);
        queue.start().unwrap();
        Fixture { queue, trace: trace.clone() }
    }

    fn node(&self, node: u32, program: &Program, fails: Option<u32>) -> Arc<Node<Probe>> {
        Node::new(Probe { node, schedule: Schedule::new(program), trace: self.trace.clone(), fails }, &self.queue)
    }

    /// Creates a graph node with one step.
    fn step(&self, node: u32) -> Arc<Node<Probe>> {
        self.node(node, &program(&[(0, &[])]), None)
    }

    /// Creates a graph node without steps, which only orders other nodes.
    fn join(&self, node: u32) -> Arc<Node<Probe>> {
        self.node(node, &program(&[]), None)
    }

    fn end(&self) {
        self.queue.join();
    }
}

#[test]
fn shuttle_every_step_of_a_program_runs_once_after_its_predecessors() {
    check(|| {
        let fixture = Fixture::new(2);
        // The program moves two chunks through one staging slot, and makes a direct copy at the same time.
        let program = program(&[(0, &[]), (1, &[0]), (2, &[]), (0, &[1]), (1, &[3])]);
        let node = fixture.node(0, &program, None);
        node.release();
        node.wait().unwrap();
        for (earlier, later) in [(0, 1), (1, 3), (3, 4)] {
            fixture.trace.assert_order((0, earlier), (0, later));
        }
        let conclude = fixture.trace.at(Moment::Conclude(0));
        assert!((0..5).all(|step| fixture.trace.at(Moment::End(0, step)) < conclude));
        fixture.end();
    });
}

#[test]
fn shuttle_a_successor_may_be_added_while_its_predecessor_finishes() {
    check(|| {
        let fixture = Fixture::new(2);
        let (a, b) = (fixture.step(0), fixture.step(1));
        a.release();
        a.precede(&b);
        b.release();
        b.wait().unwrap();
        fixture.trace.assert_order((0, 0), (1, 0));
        fixture.end();
    });
}

#[test]
fn shuttle_a_node_may_be_awaited_while_it_finishes() {
    check(|| {
        let fixture = Fixture::new(1);
        let node = fixture.step(0);
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let (node, trace) = (Arc::clone(&node), fixture.trace.clone());
                thread::spawn(move || {
                    node.wait().unwrap();
                    assert!(node.is_done().unwrap());
                    trace.at(Moment::Conclude(0));
                })
            })
            .collect();
        node.release();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        fixture.end();
    });
}

#[test]
fn shuttle_two_threads_append_to_one_chain() {
    check(|| {
        let fixture = Arc::new(Fixture::new(2));
        let chain = Arc::new(Chain::new());
        let appenders: Vec<_> = [0, 10]
            .map(|first| {
                let (fixture, chain) = (Arc::clone(&fixture), Arc::clone(&chain));
                thread::spawn(move || {
                    for node in first..first + 3 {
                        // Nodes with an odd number have no steps and only order other nodes.
                        chain.append(&if node % 2 == 0 { fixture.step(node) } else { fixture.join(node) });
                    }
                })
            })
            .into_iter()
            .collect();
        appenders.into_iter().for_each(|appender| appender.join().unwrap());
        if let Some(tail) = chain.tail() {
            tail.wait().unwrap();
        }
        let sequence = fixture.trace.sequence();
        let of = |first| sequence.iter().copied().filter(|node| (first..first + 3).contains(node)).collect::<Vec<u32>>();
        assert_eq!((of(0), of(10), sequence.len()), (vec![0, 2], vec![10, 12], 4));
        [0, 1, 2, 10, 11, 12].iter().for_each(|&node| _ = fixture.trace.at(Moment::Conclude(node)));
        fixture.end();
    });
}

#[test]
fn shuttle_chains_of_different_queues_join() {
    check(|| {
        let copies = Fixture::new(2);
        let functions = Fixture::beside(&copies.trace, 1);
        let (a, b) = (Chain::new(), Chain::new());
        a.append(&functions.step(0));
        b.append(&copies.step(1));
        // Models an event recorded on one chain and waited for on the other.
        if let Some(recorded) = a.tail() {
            let join = copies.join(2);
            recorded.precede(&join);
            b.append(&join);
        }
        b.append(&copies.step(3));
        let last = functions.step(4);
        if let Some(recorded) = b.tail() {
            recorded.precede(&last);
        }
        a.append(&last);
        last.wait().unwrap();
        for (earlier, later) in [(0, 3), (1, 3), (3, 4)] {
            copies.trace.assert_order((earlier, 0), (later, 0));
        }
        copies.end();
        functions.end();
    });
}

#[test]
fn shuttle_executions_on_two_chains_come_after_each_other() {
    check(|| {
        let fixture = Arc::new(Fixture::new(2));
        // The engine orders executions that share staging memory in this way: each execution follows the previous one, on whatever thread
        // and stream it was submitted.
        let last = Arc::new(shuttle::sync::Mutex::new(None::<Arc<Node<Probe>>>));
        let threads: Vec<_> = [0, 1]
            .map(|thread| {
                let (fixture, last) = (Arc::clone(&fixture), Arc::clone(&last));
                thread::spawn(move || {
                    let chain = Chain::new();
                    let node = fixture.step(thread);
                    {
                        let mut last = last.lock().unwrap();
                        if let Some(last) = &*last {
                            last.precede(&node);
                        }
                        chain.append(&node);
                        *last = Some(Arc::clone(&node));
                    }
                    node.wait().unwrap();
                })
            })
            .into_iter()
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(fixture.trace.sequence().len(), 2);
        fixture.end();
    });
}

#[test]
fn shuttle_a_failure_reaches_the_waiter_and_stops_nobody_else() {
    check(|| {
        let fixture = Fixture::new(2);
        let chain = Chain::new();
        let failing = fixture.node(0, &program(&[(0, &[]), (0, &[]), (1, &[])]), Some(0));
        let next = fixture.step(1);
        chain.append(&failing);
        chain.append(&next);
        assert!(matches!(failing.wait(), Err(BackendError::DataCorruption { transfer: 0, .. })));
        next.wait().unwrap();
        let trace = fixture.trace.0.lock().unwrap().clone();
        assert!(!trace.contains(&Moment::Begin(0, 1)) && !trace.contains(&Moment::Conclude(0)), "{trace:?}");
        fixture.end();
    });
}

#[test]
fn shuttle_a_closed_queue_runs_what_it_holds() {
    check(|| {
        let fixture = Fixture::new(2);
        let nodes: Vec<_> = (0..3).map(|node| fixture.step(node)).collect();
        nodes.iter().for_each(Node::release);
        // The queue's threads may not have started yet when the queue is closed.
        fixture.end();
        assert!(nodes.iter().all(|node| node.is_done().unwrap()));
        (0..3).for_each(|node| _ = fixture.trace.at(Moment::End(node, 0)));
    });
}

#[test]
fn shuttle_whoever_waits_for_all_streams_waits_for_one_that_is_being_destroyed() {
    check(|| {
        let fixture = Fixture::new(1);
        let streams = Arc::new(StreamTable::new());
        let nodes: Vec<_> = (0..2).map(|node| fixture.step(node)).collect();
        let handles: Vec<_> = nodes
            .iter()
            .map(|node| {
                let handle = streams.create(DeviceId::gpu(0));
                let append = |stream: &Stream<Probe>| {
                    stream.chain.append(node);
                    Ok(())
                };
                streams.with(handle, append).unwrap();
                handle
            })
            .collect();
        let destroyer = {
            let streams = Arc::clone(&streams);
            thread::spawn(move || {
                for handle in handles {
                    streams.destroy(handle).unwrap();
                    streams.destroy(streams.create(DeviceId::gpu(0))).unwrap();
                }
            })
        };
        streams.wait_finished();
        assert!(nodes.iter().all(|node| node.is_finished()), "work runs after the wait for all of it");
        destroyer.join().unwrap();
        fixture.end();
    });
}

/// Work that waits for a counter, like a stream that waits for a signal.
#[derive(Debug)]
struct Awaiting {
    counter: Arc<AtomicU32>,
    reached: u32,
    began_at: Arc<AtomicU32>,
    given_up: Arc<AtomicBool>,
}

impl Work for Awaiting {
    fn roots(&self) -> impl Iterator<Item = u32> {
        std::iter::once(0)
    }

    fn may_run(&self, _: u32) -> bool {
        self.counter.load(Ordering::Acquire) >= self.reached || self.given_up.load(Ordering::Acquire)
    }

    fn run(&self, _: u32) -> Result<(), BackendError> {
        self.began_at.store(self.counter.load(Ordering::Acquire) + 1, Ordering::Release);
        if self.counter.load(Ordering::Acquire) < self.reached { Err(BackendError::PeerGone("it has ended".into())) } else { Ok(()) }
    }

    fn finished(&self, _: u32) -> impl Iterator<Item = u32> {
        std::iter::empty()
    }

    fn was_last(&self) -> bool {
        true
    }

    fn conclude(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn describe(&self, _: u32) -> String {
        "a wait".into()
    }
}

/// Uses only random schedules, because schedules of the PCT algorithm let a polling thread starve the others.
#[test]
fn shuttle_waits_run_in_any_order_once_their_counters_are_raised_or_given_up() {
    shuttle::check_random(
        || {
            let queue: Arc<Queue<Awaiting>> = Queue::watching("modelled");
            queue.start().unwrap();
            let counter = Arc::new(AtomicU32::new(0));
            let given_up = Arc::new(AtomicBool::new(false));
            let wait = |reached| {
                let began_at = Arc::new(AtomicU32::new(0));
                let awaiting =
                    Awaiting { counter: Arc::clone(&counter), reached, began_at: Arc::clone(&began_at), given_up: Arc::clone(&given_up) };
                (Node::new(awaiting, &queue), began_at)
            };
            // One stream waits for 2. Another waits for 1, and then for a value that is never reached.
            let (late, late_at) = wait(2);
            let (early, early_at) = wait(1);
            let (never, _) = wait(9);
            let chain = Chain::new();
            late.release();
            chain.append(&early);
            chain.append(&never);
            let raiser = {
                let (counter, given_up) = (Arc::clone(&counter), Arc::clone(&given_up));
                thread::spawn(move || {
                    counter.store(1, Ordering::Release);
                    thread::yield_now();
                    counter.store(2, Ordering::Release);
                    given_up.store(true, Ordering::Release);
                })
            };
            late.wait().unwrap();
            assert!(late_at.load(Ordering::Acquire) > 2, "it did not wait");
            early.wait().unwrap();
            assert!(early_at.load(Ordering::Acquire) > 1, "it did not wait");
            assert!(matches!(never.wait(), Err(BackendError::PeerGone(_))));
            raiser.join().unwrap();
            queue.join();
        },
        SCHEDULES,
    );
}
