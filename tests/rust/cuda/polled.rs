//! Partitions that a kernel moves, on the double of the driver, which runs the kernel's CPU build on the list that the library has made for it.

use super::double::{self, GREATEST_PRIORITY, node};
use super::driver::Driver;
use super::prepared::context;
use super::refusals::{assert_arrived, write};
use crate::context::node::{Agent, Alone, NodeEnd, NodeGroup, NodePlan, NodeTransfer, Partitioning, Window};
use crate::context::{Context, Error, PlanOptions};
use crate::topology::DeviceId;
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BYTES: u64 = 1_000_003;

const POLLING: Agent = Agent::PollingKernel { blocks: Some(3) };

/// One transfer from GPU 0 to GPU 1 in five partitions.
fn plan(context: &Arc<Context>, agent: Agent) -> Result<(NodePlan, [u64; 2]), Error> {
    let node = Arc::new(NodeGroup::new(context, 0, 1, Box::new(Alone), &[])?);
    let memory = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory"));
    let end = |window| NodeEnd { rank: 0, window, offset: 0 };
    let transfer = NodeTransfer { dst: end(1), src: end(0), bytes: BYTES };
    let partitioning = Partitioning { count: Some(5), agent };
    let windows = memory.map(|address| Window { address, bytes: BYTES });
    Ok((node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default())?, memory))
}

#[test]
fn a_kernel_of_highest_priority_moves_what_is_ready_and_sets_its_words_back() {
    double::start(2, true);
    let context = Arc::new(context(double::whole()));
    let (plan, [src, dst]) = plan(&context, POLLING).expect("a plan");
    assert_eq!(node(|node| node.priorities.clone()), [GREATEST_PRIORITY], "one stream, for the kernel");
    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
    let trigger = plan.trigger(0, 0).expect("a trigger");
    for step in 0..3 {
        let launched = double::calls("cuLaunchKernel");
        plan.arm(stream).expect("armed");
        write(src, BYTES as usize, step);
        for partition in 0..5 {
            // SAFETY: flags of a plan that lives, in memory of the double.
            let flag = unsafe { &*with_exposed_provenance::<AtomicU64>((trigger.ready + partition * 8) as usize) };
            assert_eq!(flag.swap(1, Ordering::Relaxed), 0, "step {step}, partition {partition}");
        }
        plan.execute(stream).expect("executed").wait().expect("it ends");
        assert_eq!(double::calls("cuLaunchKernel") - launched, 1);
        assert_arrived(dst, BYTES as usize, step);
    }
    plan.destroy().expect("given back");
    // Its stream is for other plans, and not for the caller.
    let streams = [0, 1].map(|_| context.create_stream(DeviceId::gpu(0)).expect("a stream"));
    assert_eq!(node(|node| node.priorities.len()), 1);
    let made = double::calls("cuStreamCreateWithPriority");
    let (again, _) = self::plan(&context, POLLING).expect("a plan");
    assert_eq!(double::calls("cuStreamCreateWithPriority"), made, "the stream of the first plan");
    again.destroy().expect("given back");
    streams.into_iter().for_each(|stream| context.destroy_stream(stream).expect("destroyed"));
}

#[test]
fn a_gpu_that_does_not_reach_the_destination_is_told_of_copy_engines() {
    double::start(2, false);
    let context = Arc::new(context(double::whole()));
    let error = plan(&context, POLLING).map(drop).expect_err("GPU 0 cannot store there");
    assert!(error.to_string().contains("there is no direct path between its GPUs; let copy engines"), "{error}");
    // Nor do the caller's kernels store there.
    let error = plan(&context, Agent::Producer).map(drop).expect_err("GPU 0 cannot store there");
    assert!(error.to_string().contains("does not reach all destinations by its own stores; let copy engines"), "{error}");
}

#[test]
fn where_the_kernel_does_not_load_the_library_chooses_copy_engines() {
    let chosen = |driver: &'static Driver, agent| {
        double::start(2, true);
        let context = Arc::new(context(driver));
        let (plan, _) = plan(&context, agent)?;
        let text = plan.describe();
        plan.destroy().expect("given back");
        Ok::<String, Error>(text)
    };
    let automatic = Agent::Auto { tells: true };
    let text = chosen(double::whole(), automatic).expect("a plan");
    assert!(text.contains("moved by polling kernels"), "the model's choice: {text}");
    let text = chosen(double::driver(), automatic).expect("a plan");
    assert!(text.contains("moved by copy engines"), "{text}");
    let error = chosen(double::driver(), POLLING).expect_err("it cannot be").to_string();
    assert!(error.contains("its driver does not load the library's kernels; let copy engines move them"), "{error}");
}
