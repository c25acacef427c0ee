//! Tests failures of driver calls. The test repeats a run that plans, executes, captures, shares memory, waits for signals and frees; in
//! the n-th repetition the n-th driver call fails. Each failure must be returned as an error, without a crash or a leak, and the context
//! must work afterwards.

use super::double::{self, Held, held, node};
use super::driver::{Code, Driver, code};
use super::refusals::{assert_arrived, cross, no_nvml, write};
use super::{Backend, CudaBackend, discover};
use crate::backend::{Signal, SignalWait, StreamHandle};
use crate::plan::Engine;
use crate::topology::discover::topology;
use crate::topology::{DeviceId, Machine};
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer, Verify};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const ENGINES: [Engine; 4] = [Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];

/// Executes a plan of three transfers, two in one direction and one back, twice with one engine, the second time with other addresses.
/// Checks every byte.
fn copies(context: &Context, stream: StreamHandle, engine: Engine, bytes: u64) -> Result<(), Error> {
    let mut ends = Vec::new();
    let mut copied = || {
        for device in [GPU0, GPU1, DeviceId::HOST, GPU1, GPU0, GPU0] {
            ends.push(context.allocate(device, bytes)?);
        }
        let transfer = |dst: usize, src: usize| Transfer {
            dst: ends[dst],
            dst_device: Transfer::AUTO,
            src: ends[src],
            src_device: Transfer::AUTO,
            bytes,
        };
        let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
        for (seed, last) in [(3, 4), (5, 5)] {
            [0, 2].into_iter().for_each(|end| write(ends[end], bytes as usize, seed));
            let plan = context.plan(&[transfer(1, 0), transfer(3, 2)], &options)?;
            plan.prepare(stream)?;
            plan.execute(stream)?.wait()?;
            plan.enqueue(stream)?;
            context.plan(&[transfer(last, 3), transfer(2, 1)], &options)?.execute(StreamHandle(0))?.wait()?;
            [1, 3, last, 2].into_iter().for_each(|end| assert_arrived(ends[end], bytes as usize, seed));
            plan.trace(stream)?;
        }
        Ok(())
    };
    let copied = copied();
    let freed = ends.into_iter().try_for_each(|end| context.free(end));
    copied.and(freed)
}

/// Uses streams, events, signals and host functions, also in captured streams.
fn order(context: &Context) -> Result<(), Error> {
    let (mut streams, mut events, mut counters) = (Vec::new(), Vec::new(), Vec::new());
    let mut enqueued = || {
        for gpu in [GPU0, GPU1] {
            streams.push(context.create_stream(gpu)?);
        }
        events.push(context.create_event()?);
        counters.push(context.allocate_shared(DeviceId::HOST, 64)?);
        let ran = Arc::new(());
        let function = || {
            let ran = ran.clone();
            Box::new(move || _ = Arc::strong_count(&ran))
        };
        context.launch_host(streams[0], function())?;
        context.record_event(events[0], streams[0])?;
        context.stream_wait_event(streams[1], events[0])?;
        context.synchronize_event(events[0])?;
        node(|node| node.capturing = true);
        let captured = context.launch_host(streams[0], function());
        let graph = double::captured();
        if !graph.is_null() {
            // SAFETY: a graph of the double.
            assert_eq!(unsafe { (double::whole().cuGraphDestroy)(graph) }, 0);
        }
        assert_eq!(Arc::strong_count(&ran), 1, "a host function is left behind");
        captured?;
        let signal = Signal { counter: counters[0], value: 1 };
        for by in [SignalWait::Operation, SignalWait::Kernel] {
            context.backend().stream_wait_signals(streams[0], &[signal], by)?;
        }
        context.backend().stream_raise_signals(streams[1], &[signal])?;
        context.synchronize_stream(streams[0])
    };
    let enqueued = enqueued();
    let streams = streams.into_iter().try_for_each(|stream| context.destroy_stream(stream));
    let events = events.into_iter().try_for_each(|event| context.destroy_event(event));
    let counters = counters.into_iter().try_for_each(|counter| context.free(counter));
    enqueued.and(streams).and(events).and(counters)
}

/// Maps memory of a pool, and memory of this backend, in a second backend.
fn share(driver: &'static Driver) -> Result<(), Error> {
    let [exporter, importer] = [CudaBackend::on(driver, 1)?, CudaBackend::on(driver, 1)?];
    let pool = node(|node| node.new_pool(1, true));
    let of_pool = node(|node| node.give_from(pool, 5000)).expect("memory");
    let plain = node(|node| node.give_shareable(5000, 0)).expect("memory");
    let shared = [of_pool, plain].into_iter().try_for_each(|address| {
        write(address, 5000, 1);
        let mapped = cross(&exporter, &importer, address)?;
        assert_arrived(mapped, 5000, 1);
        importer.unmap(mapped)
    });
    let own = exporter.allocate_shared(DeviceId::HOST, 5000).and_then(|address| {
        let shared = cross(&exporter, &importer, address).and_then(|mapped| importer.unmap(mapped));
        shared.and(exporter.free(address))
    });
    drop((exporter, importer));
    node(|node| {
        assert!(node.take(of_pool, true) == 0 && node.take(plain, true) == 0);
        node.pools.remove(&pool);
    });
    Ok(shared.and(own)?)
}

/// Makes the whole run. Continues with the next part after an error of one part. Returns all errors.
fn run(context: &Context, driver: &'static Driver, stream: StreamHandle) -> Vec<Error> {
    let copied = ENGINES.map(|engine| copies(context, stream, engine, 257)).into_iter();
    copied.chain([order(context), share(driver)]).filter_map(Result::err).collect()
}

/// Makes a run in which driver call number `n` fails. Returns the name of its function and the errors of the run, or `None` if the run has
/// fewer calls.
fn run_with_failure(n: u32, code: Code, verify: Verify) -> Option<(&'static str, Vec<Error>)> {
    let driver = double::failing();
    double::start(2, true);
    node(|node| node.failure = Some((n, code)));
    let made = open(driver, verify).and_then(|context| Ok((context.create_stream(GPU0)?, context)));
    let said = match &made {
        Ok((stream, context)) => run(context, driver, *stream),
        Err(_) => vec![],
    };
    let failed = node(|node| node.failed);
    if let (Some(failed), Ok((stream, context))) = (failed, &made) {
        let again: Vec<_> = ENGINES.iter().filter_map(|engine| copies(context, *stream, *engine, 257).err()).collect();
        assert!(again.is_empty(), "after {failed} has failed, once: {again:?}");
    }
    drop(made);
    let failed = node(|node| node.failed);
    assert_eq!(held(), Held::default(), "left behind after {failed:?} has failed, which was said so: {said:?}");
    assert_eq!(node(|node| node.depth()), 0, "contexts that are left current after {failed:?}");
    failed.map(|failed| (failed, said))
}

fn open(driver: &'static Driver, verify: Verify) -> Result<Context, Error> {
    let seen = discover::look_at(driver, no_nvml)?;
    let machine = Machine::new(topology(&seen)).expect("well formed");
    let backend = CudaBackend::on(driver, 1)?;
    Context::with_backend(Arc::new(machine), Arc::new(backend), Config { staging_bytes: 16 << 20, verify, ..Config::default() })
}

#[test]
fn whichever_call_of_the_driver_fails_nothing_is_left_behind_and_the_context_works_afterwards() {
    let mut wrong = 0;
    for (verify, code) in [(Verify::Off, 999), (Verify::Bytes, code::OUT_OF_MEMORY)] {
        let mut seen = BTreeMap::<&str, [u32; 2]>::new();
        for n in 0.. {
            let outcome = catch_unwind(AssertUnwindSafe(|| run_with_failure(n, code, verify)));
            let Ok(outcome) = outcome else {
                eprintln!("the above: call {n}, {:?}, failed with code {code}, {verify:?}", node(|node| node.failed));
                wrong += 1;
                continue;
            };
            let Some((function, said)) = outcome else { break };
            seen.entry(function).or_default()[usize::from(!said.is_empty())] += 1;
        }
        eprintln!("{verify:?}, code {code}: calls that failed unnoticed and with an error: {seen:?}");
        for function in ["cuMemAlloc", "cuGraphLaunch", "cuLaunchKernel", "cuMemcpyBatchAsync", "cuEventRecord"] {
            assert!(seen.contains_key(function), "{function} was never called");
        }
        // Small batches are kernels, so the planner determines which of these functions is called.
        let repoints = ["cuGraphExecMemcpyNodeSetParams", "cuGraphExecKernelNodeSetParams"];
        assert!(repoints.iter().any(|function| seen.contains_key(function)), "no graph was re-pointed");
    }
    assert_eq!(wrong, 0, "calls after which something was left or did not work");
}
