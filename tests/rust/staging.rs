//! Tests staging memory: where rings are placed, and which executions must run one after the other. The test backend ends executions on
//! command.

use crate::addresses::Addresses;
use crate::common::Random;
use mpgpu_backend::*;
use mpgpu_contexts::staging::{Region, Regions, RingUse, Staging};
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer};
use mpgpu_core::plan::Ring;
use mpgpu_core::topology::{DeviceId, Machine, preset};
use std::any::Any;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Execution with a number, which ends when the test requests it.
#[derive(Debug)]
struct End {
    number: usize,
    done: AtomicBool,
    fails: bool,
}

impl End {
    fn of(number: usize) -> Arc<End> {
        Arc::new(End { number, done: AtomicBool::new(false), fails: false })
    }
    fn finish(&self) {
        self.done.store(true, Ordering::SeqCst);
    }
}

impl CompletionState for End {
    fn is_done(&self) -> Result<bool, BackendError> {
        if self.done.load(Ordering::SeqCst) && self.fails {
            return Err(BackendError::DataCorruption { transfer: 0, offset: 0 });
        }
        Ok(self.done.load(Ordering::SeqCst))
    }
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Result for an execution that need not follow any other.
const NONE: [usize; 0] = [];

fn number(completion: &Completion) -> usize {
    completion.as_any().downcast_ref::<End>().expect("this test's own").number
}

/// Enqueues the execution `end` with these regions, as the first execution of a plan. Returns the numbers of the executions that it must
/// follow.
fn enqueue(staging: &Staging, regions: &[Region], end: &Arc<End>) -> Vec<usize> {
    enqueue_of(staging, &Regions::new(regions), end)
}

/// Enqueues the execution `end` as a further execution of the plan with these regions. Returns the numbers of the executions that it must
/// follow.
fn enqueue_of(staging: &Staging, regions: &Regions, end: &Arc<End>) -> Vec<usize> {
    let mut numbers = Vec::new();
    staging
        .in_turn(regions, |after| {
            numbers = after.iter().map(number).collect();
            Ok::<Completion, ()>(end.clone())
        })
        .expect("never fails");
    numbers.sort_unstable();
    numbers
}

fn region(start: u64, end: u64) -> Region {
    Region { start, end }
}

fn ring(gpu: u32, slot_bytes: u64, slots: u32) -> Ring {
    Ring { device: DeviceId::gpu(gpu), slot_bytes, slots }
}

#[test]
fn a_device_gets_its_arena_with_the_first_ring_on_it_and_no_second_one() {
    let (staging, backend) = (Staging::new(1 << 16), Addresses::default());
    staging.place(&[], RingUse::Ordered, None, &backend).expect("nothing to place");
    assert_eq!(backend.live(), []);
    staging.place(&[ring(2, 1024, 4)], RingUse::Ordered, None, &backend).expect("room");
    staging.place(&[ring(2, 1024, 4), ring(0, 256, 1)], RingUse::Ordered, None, &backend).expect("room");
    let arenas: Vec<_> = backend.live().iter().map(|a| (a.device, a.bytes)).collect();
    assert_eq!(arenas, [(DeviceId::gpu(2), 1 << 16), (DeviceId::gpu(0), 1 << 16)]);
    assert_eq!([0, 1, 2].map(|gpu| staging.bytes(DeviceId::gpu(gpu))), [1 << 16, 0, 1 << 16]);
    staging.release(&backend).expect("freed");
    assert_eq!(backend.live(), []);
    assert_eq!(staging.bytes(DeviceId::gpu(2)), 0);
}

#[test]
fn rings_of_a_plan_are_apart_inside_their_arena_and_aligned_while_they_fit() {
    for seed in 0..u64::from(crate::common::config(300).cases) {
        let mut random = Random(seed);
        let bound = 4096 + random.below(1 << 16);
        let (staging, backend) = (Staging::new(bound), Addresses::default());
        for _ in 0..20 {
            let rings: Vec<Ring> = (0..random.below(6))
                .map(|_| ring(random.below(3) as u32, 1 + random.below(bound / 4), 1 + random.below(2) as u32))
                .collect();
            let used = |gpu: u32, align: u64| -> u64 {
                rings.iter().filter(|r| r.device == DeviceId::gpu(gpu)).map(|r| r.bytes().next_multiple_of(align)).sum()
            };
            let placed = staging.place(&rings, RingUse::Ordered, None, &backend);
            if (0..3).any(|gpu| used(gpu, 1) > bound) {
                assert!(matches!(placed, Err(Error::StagingBound { .. })), "seed {seed}");
                continue;
            }
            let (bases, regions) = placed.expect("the rings fit");
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for (ring, &base) in rings.iter().zip(bases.iter()) {
                let arena = backend.locate(base).expect("no error").expect("an arena");
                assert_eq!((arena.device, arena.bytes), (ring.device, bound));
                assert!(base + ring.bytes() <= arena.base + arena.bytes, "seed {seed}: a ring leaves its arena");
                assert!(regions.iter().any(|r| r.start <= base && base + ring.bytes() <= r.end), "seed {seed}: a ring outside its regions");
                if used(ring.device.0 as u32, 256) <= bound {
                    assert_eq!(base % 256, 0, "seed {seed}");
                }
                ranges.push((base, base + ring.bytes()));
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "seed {seed}: two rings overlap");
        }
    }
}

#[test]
fn a_variant_stages_in_the_regions_of_its_plan_where_it_fits_and_elsewhere_in_its_own() {
    let (staging, backend) = (Staging::new(1 << 16), Addresses::default());
    let plan = [ring(2, 4096, 2), ring(0, 1024, 4), ring(2, 1024, 1)];
    let (_, regions) = staging.place(&plan, RingUse::Ordered, None, &backend).expect("room");
    let variant = [ring(0, 512, 4), ring(1, 256, 1), ring(2, 8192, 2), ring(0, 256, 3)];
    let (bases, own) = staging.place(&variant, RingUse::Ordered, Some((&plan, &regions)), &backend).expect("room");
    let [of_0, of_2] = [regions[0], regions[1]];
    assert!(
        own[0].start == of_0.start && own[0].end <= of_0.end && bases[3] == bases[0] + 2048,
        "two rings beside each other in that of GPU 0"
    );
    assert_eq!(backend.locate(own[1].start).expect("no error").expect("an arena").device, DeviceId::gpu(1));
    assert!(own[2].start >= of_2.end, "larger than the plan's");
}

#[test]
fn a_plan_may_fill_its_bound_to_the_last_byte_but_not_beyond() {
    let (staging, backend) = (Staging::new(1000), Addresses::default());
    let (bases, regions) = staging.place(&[ring(0, 333, 1), ring(0, 667, 1)], RingUse::Ordered, None, &backend).expect("exactly the bound");
    assert_eq!((bases[1] - bases[0], regions[0].end - regions[0].start), (333, 1000));
    let error = staging.place(&[ring(0, 1001, 1)], RingUse::Ordered, None, &backend).expect_err("one byte too many");
    assert_eq!(error.to_string(), "internal error: a plan needs more than 1000 bytes of staging memory on device 0");
    assert!(staging.place(&[ring(0, u64::MAX / 2, 1), ring(0, u64::MAX / 2, 1), ring(0, 2, 1)], RingUse::Ordered, None, &backend).is_err());
}

#[test]
fn plans_follow_each_other_through_the_arena_and_wrap() {
    let (staging, backend) = (Staging::new(1024), Addresses::default());
    let starts: Vec<u64> =
        (0..5).map(|_| staging.place(&[ring(0, 400, 1)], RingUse::Ordered, None, &backend).expect("room").1[0].start).collect();
    let base = starts[0];
    assert_eq!(starts.iter().map(|start| start - base).collect::<Vec<_>>(), [0, 512, 0, 512, 0]);
}

#[test]
fn a_device_without_memory_is_an_error_and_can_be_tried_again() {
    let (staging, backend) = (Staging::new(1024), Addresses::default());
    for _ in 0..2 {
        assert!(matches!(
            staging.place(&[ring(9, 1, 1)], RingUse::Ordered, None, &backend),
            Err(Error::Backend(BackendError::OutOfMemory { .. }))
        ));
    }
    staging.place(&[ring(1, 1, 1)], RingUse::Ordered, None, &backend).expect("other devices have some");
}

#[test]
fn executions_that_share_a_byte_are_ordered_and_others_are_not() {
    let staging = Staging::new(0);
    let ends: Vec<Arc<End>> = (0..8).map(End::of).collect();
    assert_eq!(enqueue(&staging, &[region(0, 100)], &ends[0]), NONE);
    assert_eq!(enqueue(&staging, &[region(100, 200), region(500, 600)], &ends[1]), NONE);
    assert_eq!(enqueue(&staging, &[], &ends[2]), NONE);
    // The regions are the same as before, as for the same plan in another stream.
    assert_eq!(enqueue(&staging, &[region(0, 100)], &ends[3]), [0]);
    // Execution 0 now precedes execution 3, so it is not listed.
    assert_eq!(enqueue(&staging, &[region(99, 101)], &ends[4]), [1, 3]);
    // An execution that overlaps another one in two places waits for it only once.
    assert_eq!(enqueue(&staging, &[region(150, 160), region(550, 560)], &ends[5]), [1]);
    // Bytes that no later execution has used still belong to the earlier execution.
    assert_eq!(enqueue(&staging, &[region(0, 99), region(590, 600)], &ends[6]), [1, 3]);
    assert_eq!(enqueue(&staging, &[region(0, 1000)], &ends[7]), [1, 4, 5, 6]);
}

#[test]
fn nobody_waits_for_what_has_finished_well_or_badly() {
    let staging = Staging::new(0);
    let (fine, failed, last) = (End::of(0), Arc::new(End { number: 1, done: AtomicBool::new(false), fails: true }), End::of(2));
    enqueue(&staging, &[region(0, 10)], &fine);
    enqueue(&staging, &[region(10, 20)], &failed);
    fine.finish();
    failed.finish();
    assert_eq!(enqueue(&staging, &[region(0, 20)], &last), NONE);
}

#[test]
fn an_execution_that_could_not_be_enqueued_is_not_waited_for() {
    let staging = Staging::new(0);
    enqueue(&staging, &[region(0, 10)], &End::of(0));
    assert_eq!(staging.in_turn(&Regions::new([region(0, 10)]), |_| Err("refused")).expect_err("passed on"), "refused");
    let plan = Regions::new([region(0, 10)]);
    assert_eq!(enqueue_of(&staging, &plan, &End::of(1)), [0]);
    assert_eq!(staging.in_turn(&plan, |_| Err("refused")).expect_err("passed on"), "refused");
    assert_eq!(enqueue_of(&staging, &plan, &End::of(2)), [1]);
}

#[test]
fn a_plan_that_had_its_bytes_to_itself_comes_after_its_last_run_and_otherwise_after_all_that_shared_one() {
    let staging = Staging::new(0);
    let both = || Regions::new([region(0, 100), region(200, 300)]);
    let (mine, same, across) = (both(), both(), Regions::new([region(90, 210)]));
    let ends: Vec<Arc<End>> = (0..10).map(End::of).collect();
    assert_eq!(enqueue_of(&staging, &mine, &ends[0]), NONE);
    assert_eq!(enqueue_of(&staging, &mine, &ends[1]), [0]);
    // The regions overlap the end of each region of the first plan. The remaining bytes still belong to the first plan.
    assert_eq!(enqueue_of(&staging, &across, &ends[2]), [1]);
    assert_eq!(enqueue_of(&staging, &mine, &ends[3]), [1, 2]);
    assert_eq!(enqueue_of(&staging, &mine, &ends[4]), [3]);
    // Another plan uses the same bytes, and then the first plan again.
    assert_eq!(enqueue_of(&staging, &same, &ends[5]), [4]);
    assert_eq!(enqueue_of(&staging, &across, &ends[6]), [2, 5]);
    assert_eq!(enqueue_of(&staging, &mine, &ends[7]), [5, 6]);
    ends[7].finish();
    assert_eq!(enqueue_of(&staging, &mine, &ends[8]), NONE);
    assert_eq!(enqueue_of(&staging, &mine, &ends[9]), [8]);
}

/// Tests a submission that blocks because the queue of its stream is full. It may block until another thread has submitted work.
#[test]
fn an_execution_that_is_long_in_being_enqueued_holds_up_those_alone_that_share_a_byte_with_it() {
    let (staging, ends) = (Staging::new(0), [0, 1, 2].map(End::of));
    let (other_was_enqueued, first_goes_on) = mpsc::channel();
    let (first_began, began) = mpsc::channel();
    std::thread::scope(|scope| {
        let (staging, ends) = (&staging, &ends);
        scope.spawn(move || {
            let enqueue = |_: &[Completion]| {
                first_began.send(()).expect("the test waits");
                // This simulates a full queue. It blocks until work is submitted to another stream.
                first_goes_on.recv_timeout(Duration::from_secs(20)).map(|()| ends[0].clone() as Completion)
            };
            staging.in_turn(&Regions::new([region(0, 10), region(40, 50)]), enqueue).expect("others enqueue meanwhile");
        });
        began.recv().expect("it begins");
        let sharing = scope.spawn(|| enqueue(staging, &[region(30, 41)], &ends[2]));
        assert_eq!(enqueue(staging, &[region(10, 30), region(50, 60)], &ends[1]), NONE);
        assert!(!sharing.is_finished(), "its bytes are another's to enqueue in");
        other_was_enqueued.send(()).expect("the first waits");
        assert_eq!(sharing.join().expect("no panic"), [0]);
    });
}

#[test]
fn every_earlier_execution_that_shares_a_byte_has_finished_or_is_waited_for() {
    for seed in 0..u64::from(crate::common::config(100).cases) {
        let mut random = Random(seed);
        let staging = Staging::new(0);
        let mut plans: Vec<Arc<Regions>> = Vec::new();
        let mut runs: Vec<(Arc<Regions>, Arc<End>, HashSet<usize>)> = Vec::new();
        for number in 0..150 {
            // The execution is of a new plan, or the next one of an earlier plan, often of the last plan.
            let last = plans.len().saturating_sub(1) as u64;
            let regions = match random.below(4) {
                1 if number > 0 => plans[random.below(last + 1) as usize].clone(),
                2 | 3 if number > 0 => plans[last as usize].clone(),
                _ => {
                    let mut regions: Vec<Region> = Vec::new();
                    for device in 0..1 + random.below(3) {
                        let start = device * 1000 + random.below(60);
                        regions.push(region(start, start + 1 + random.below(40)));
                    }
                    plans.push(Arc::new(Regions::new(regions)));
                    plans[plans.len() - 1].clone()
                }
            };
            let end = End::of(number);
            let after = enqueue_of(&staging, &regions, &end);
            // A wait for an execution includes waits for all executions that it follows.
            let mut waits: HashSet<usize> = after.iter().copied().collect();
            waits.extend(after.iter().flat_map(|&n| runs[n].2.iter().copied()));
            for (earlier, (used, other, _)) in runs.iter().enumerate() {
                let shares = used.iter().any(|a| regions.iter().any(|b| a.start < b.end && b.start < a.end));
                let done = other.done.load(Ordering::SeqCst);
                assert!(!shares || done || waits.contains(&earlier), "seed {seed}: {number} does not wait for {earlier}");
                assert!(!after.contains(&earlier) || !done, "seed {seed}: {number} waits for {earlier}, which has finished");
            }
            runs.push((regions, end, waits));
            for _ in 0..random.below(3) {
                // An execution ends only after all executions that it follows.
                let candidate = random.below(runs.len() as u64) as usize;
                if runs[candidate].2.iter().all(|&n| runs[n].1.done.load(Ordering::SeqCst)) {
                    runs[candidate].1.finish();
                }
            }
        }
    }
}

#[test]
fn only_executions_without_staging_go_without_a_mark_of_their_end_and_only_where_nobody_asks_for_it() {
    let machine = Machine::new(preset("beluga").expect("a preset")).expect("a valid one");
    let context = Context::with_backend(Arc::new(machine), Arc::new(Addresses::default()), Config::default()).expect("a context");
    let bytes = 64 << 20;
    let [dst, src] = [1, 0].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
    let plan =
        |max_paths| context.plan(&[transfer], &PlanOptions { max_paths: Some(max_paths), ..PlanOptions::default() }).expect("a plan");
    let (direct, staged) = (plan(1), plan(4));
    assert_eq!((direct.staging_bytes() > 0, staged.staging_bytes() > 0), (false, true), "{}", staged.describe());
    // This backend refuses executions for which a completion is requested.
    direct.enqueue(StreamHandle(0)).expect("unmarked");
    assert!(direct.execute(StreamHandle(0)).is_err());
    assert!(staged.enqueue(StreamHandle(0)).is_err(), "later users of the same staging have to wait for it");
    assert_eq!((context.statistics().executions, context.statistics().bytes), (1, bytes));
}
