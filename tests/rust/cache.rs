//! Tests the plan cache: equal requests return the same plan, different requests do not, and the size is limited.

use crate::addresses::Addresses;
use crate::common::Random;
use mpgpu_backend::Backend;
use mpgpu_contexts::{CacheStatistics, Config, Context, Plan, PlanOptions, Transfer};
use mpgpu_core::plan::Engine;
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_devices::host::HostBackend;
use std::collections::VecDeque;
use std::sync::Arc;

fn context(cache_plans: usize) -> Context {
    context_on(HostBackend::new(4, 1), cache_plans)
}

fn context_on(backend: impl Backend + 'static, cache_plans: usize) -> Context {
    let machine = Machine::new(load("beluga").expect("a preset")).expect("a valid one");
    let config = Config { cache_plans, ..Config::default() };
    Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context")
}

fn alloc(context: &Context, gpu: u32, bytes: u64) -> u64 {
    context.allocate(DeviceId::gpu(gpu), bytes).expect("memory")
}

fn transfer(dst: u64, src: u64, bytes: u64) -> Transfer {
    Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes }
}

fn plan(context: &Context, transfers: &[Transfer]) -> Arc<Plan> {
    context.plan(transfers, &PlanOptions::default()).expect("a plan")
}

fn counts(context: &Context) -> (u64, u64, u64, u64, u64) {
    let CacheStatistics { hits, misses, shape_hits, evictions, entries } = context.statistics().cache;
    (hits, misses, shape_hits, evictions, entries)
}

#[test]
fn the_same_request_is_the_same_plan() {
    let context = context(8);
    let (a, b) = (alloc(&context, 0, 1 << 20), alloc(&context, 1, 1 << 20));
    let batch = [transfer(b, a, 4096), transfer(b + 8192, a + 8192, 100)];
    let first = plan(&context, &batch);
    assert!(Arc::ptr_eq(&first, &plan(&context, &batch)));
    assert_eq!(counts(&context), (1, 1, 0, 0, 1));
}

#[test]
fn any_difference_is_another_request() {
    let context = context(64);
    let (a, b) = (alloc(&context, 0, 1 << 20), alloc(&context, 1, 1 << 20));
    let base = transfer(b, a, 4096);
    let first = plan(&context, &[base]);
    let swapped = Transfer { dst: a, dst_device: DeviceId::gpu(0), src: b, src_device: DeviceId::gpu(1), bytes: 4096 };
    let batches: [&[Transfer]; 7] = [
        &[transfer(b + 1, a, 4096)],
        &[transfer(b, a + 1, 4096)],
        &[transfer(b, a, 4095)],
        &[swapped],
        &[],
        &[base, transfer(b + 4096, a, 1)],
        &[base, transfer(b + 4096, a, 0)],
    ];
    for batch in batches {
        assert!(!Arc::ptr_eq(&first, &plan(&context, batch)), "{batch:?}");
    }
    let options = [
        PlanOptions { engine: Some(Engine::Stream), ..PlanOptions::default() },
        PlanOptions { max_paths: Some(1), ..PlanOptions::default() },
        PlanOptions { host_path: Some(false), ..PlanOptions::default() },
        PlanOptions { chunk_bytes: Some(4096), ..PlanOptions::default() },
        PlanOptions { min_bytes: Some(1), ..PlanOptions::default() },
        PlanOptions { staging_bytes: Some(1 << 20), ..PlanOptions::default() },
    ];
    for options in options {
        assert!(!Arc::ptr_eq(&first, &context.plan(&[base], &options).expect("a plan")), "{options:?}");
    }
    let (hits, misses, ..) = counts(&context);
    assert_eq!((hits, misses), (0, 1 + 7 + 6));
    // A request with explicit default values is equal to a request without values.
    let explicit = PlanOptions { host_path: Some(true), staging_bytes: Some(64 << 20), ..PlanOptions::default() };
    assert!(Arc::ptr_eq(&first, &context.plan(&[base], &explicit).expect("a plan")));
}

#[test]
fn the_same_shape_at_other_addresses_is_not_planned_again() {
    let context = context(8);
    let (a, b) = (alloc(&context, 0, 1 << 20), alloc(&context, 1, 1 << 20));
    let first = plan(&context, &[transfer(b, a, 4096)]);
    let second = plan(&context, &[transfer(b + 4096, a, 4096)]);
    assert!(!Arc::ptr_eq(&first, &second));
    assert!(Arc::ptr_eq(&first.planned().program, &second.planned().program));
    assert_eq!(counts(&context), (0, 2, 1, 0, 2));
}

#[test]
fn an_address_that_was_freed_and_given_out_again_is_a_miss() {
    // An allocator may return freed memory late. The backend of this test returns it immediately.
    let context = context_on(Addresses::default(), 8);
    let a = alloc(&context, 0, 1 << 16);
    let b = alloc(&context, 1, 1 << 16);
    let before = plan(&context, &[transfer(b, a, 1 << 16)]);
    context.free(b).expect("freed");
    assert_eq!(alloc(&context, 1, 1 << 16), b, "the address is given out again");
    let after = plan(&context, &[transfer(b, a, 1 << 16)]);
    assert!(!Arc::ptr_eq(&before, &after));
    assert_eq!(counts(&context), (0, 2, 1, 0, 2));
    assert!(Arc::ptr_eq(&after, &plan(&context, &[transfer(b, a, 1 << 16)])));
}

#[test]
fn the_least_recently_used_plan_goes_first() {
    let context = context(3);
    let (a, b) = (alloc(&context, 0, 1 << 20), alloc(&context, 1, 1 << 20));
    let batch = |i: u64| [transfer(b + i * 64, a, 64)];
    let plans: Vec<_> = (0..3).map(|i| plan(&context, &batch(i))).collect();
    assert!(Arc::ptr_eq(&plans[0], &plan(&context, &batch(0))));
    plan(&context, &batch(3));
    assert_eq!(counts(&context), (1, 4, 3, 1, 3));
    // Entry 1 is the least recently used, because entry 0 has been used since.
    assert!(Arc::ptr_eq(&plans[0], &plan(&context, &batch(0))));
    assert!(Arc::ptr_eq(&plans[2], &plan(&context, &batch(2))));
    assert!(!Arc::ptr_eq(&plans[1], &plan(&context, &batch(1))));
}

#[test]
fn of_long_lists_few_are_kept() {
    let context = context(256);
    let many = 1 << 18;
    let (a, b) = (alloc(&context, 0, 16 * many), alloc(&context, 1, 16 * many));
    // One transfer of each batch is shorter.
    let list =
        |number: u64| -> Vec<Transfer> { (0..many).map(|i| transfer(b + i * 16, a + i * 16, if i == number { 4 } else { 8 })).collect() };
    for number in 0..5 {
        plan(&context, &list(number));
    }
    // The batches have 2^20 transfers in total.
    assert_eq!(counts(&context), (0, 5, 0, 1, 4));
    plan(&context, &list(1));
    assert_eq!(counts(&context), (1, 5, 0, 1, 4));
}

#[test]
fn a_cache_of_no_plans_keeps_none_and_plans_all_the_same() {
    let context = context(0);
    let (a, b) = (alloc(&context, 0, 64), alloc(&context, 1, 64));
    let first = plan(&context, &[transfer(b, a, 64)]);
    assert!(!Arc::ptr_eq(&first, &plan(&context, &[transfer(b, a, 64)])));
    assert_eq!(counts(&context), (0, 2, 0, 0, 0));
}

#[test]
fn statistics_and_order_are_those_of_a_plain_list() {
    for seed in 0..u64::from(crate::common::config(20).cases) {
        let mut random = Random(seed);
        let bound = 1 + random.below(6) as usize;
        let context = context(bound);
        let (a, b) = (alloc(&context, 0, 1 << 16), alloc(&context, 1, 1 << 16));
        let mut list: VecDeque<u64> = VecDeque::new();
        let (mut hits, mut misses, mut evictions) = (0, 0, 0);
        for _ in 0..200 {
            let key = random.below(10);
            plan(&context, &[transfer(b + key * 64, a, 64)]);
            if let Some(at) = list.iter().position(|k| *k == key) {
                list.remove(at);
                hits += 1;
            } else {
                misses += 1;
                if list.len() == bound {
                    list.pop_front();
                    evictions += 1;
                }
            }
            list.push_back(key);
            let (h, m, _, e, n) = counts(&context);
            assert_eq!((h, m, e, n), (hits, misses, evictions, list.len() as u64), "seed {seed}");
        }
    }
}

#[test]
fn threads_that_plan_the_same_request_at_once_get_the_same_plan() {
    for _ in 0..crate::common::config(20).cases {
        let context = context(8);
        let (a, b) = (alloc(&context, 0, 1 << 20), alloc(&context, 1, 1 << 20));
        let start = std::sync::Barrier::new(8);
        let plans: Vec<Arc<Plan>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        plan(&context, &[transfer(b, a, 1 << 20)])
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(plans.iter().all(|p| Arc::ptr_eq(p, &plans[0])));
        let (hits, misses, _, evictions, entries) = counts(&context);
        assert_eq!((hits + misses, evictions, entries), (8, 0, 1));
    }
}

#[test]
fn plans_of_a_closed_context_do_not_run_and_do_not_keep_its_memory() {
    let context = context(8);
    let (a, b) = (alloc(&context, 0, 64), alloc(&context, 1, 64));
    let kept = plan(&context, &[transfer(b, a, 64)]);
    context.close().expect("closed");
    let error = kept.execute(mpgpu_backend::StreamHandle(0)).expect_err("refused");
    assert_eq!(error.to_string(), "the context was destroyed");
    assert!(context.backend().locate(a).expect("an answer").is_none());
    context.close().expect("closing twice does nothing");
    assert_eq!(counts(&context).4, 0);
}
