//! Tests the creation of node plans, in which rank 0 plans the transfers of all ranks and sends the plan to the other ranks.

use crate::node_plans::{as_ranks, context, end};
use mpgpu_contexts::{Context, Error, PlanOptions};
use mpgpu_core::plan;
use mpgpu_core::plan::{Options, Shape, TransferPlan};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{Allgather, NodeGroup, NodePlan, NodeTransfer, Window, meet_at};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Creates a plan in which each rank sends `bytes` bytes to every other rank.
fn all_to_all(node: &Arc<NodeGroup>, context: &Context, bytes: u64, options: &PlanOptions) -> Result<NodePlan, Error> {
    let (rank, ranks) = (node.rank(), node.ranks());
    let window = || {
        let all = bytes * u64::from(ranks);
        Window { address: context.allocate_shared(DeviceId::gpu(0), all).expect("memory"), bytes: all }
    };
    let to = |other: u32| NodeTransfer { dst: end(other, 1, bytes * u64::from(rank)), src: end(rank, 0, bytes * u64::from(other)), bytes };
    let transfers: Vec<NodeTransfer> = (0..ranks).filter(|other| *other != rank).map(to).collect();
    node.plan(&[window(), window()], &transfers, options)
}

#[test]
fn every_rank_describes_the_same_plan_with_the_rejected_paths() {
    for (topology, ranks, bytes) in
        [("beluga", 4, 16 << 20), ("dgx1-v100", 8, 4 << 20), ("hgx-h200", 8, 1 << 20), ("gb200-nvl72", 12, 65536)]
    {
        let described = as_ranks(ranks, |rank, seat| {
            let context = context(topology, Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, ranks, seat, &[]).expect("a node"));
            let made = all_to_all(&node, &context, bytes, &PlanOptions::default()).expect("a plan");
            let shapes: Vec<Shape> = made.planned().transfers.iter().map(|transfer| transfer.shape).collect();
            // The same batch is planned on this rank for comparison.
            let own = plan::plan(node.machine(), &shapes, &Options { rejected: true, ..made.planned().options }).expect("a plan");
            assert_eq!(own.program, made.planned().program, "{topology}, rank {rank}");
            let paths = |of: &[TransferPlan]| of.iter().map(|transfer| Arc::clone(&transfer.paths)).collect::<Vec<_>>();
            assert_eq!(paths(&own.transfers), paths(&made.planned().transfers), "{topology}, rank {rank}");
            assert_eq!((own.predicted, own.one_path), (made.planned().predicted, made.planned().one_path), "{topology}, rank {rank}");
            let rejected: usize = own.transfers.iter().map(|transfer| transfer.rejected.len()).sum();
            assert!(rejected > 0 && rejected <= made.most_rejected(), "{rejected} of at most {}", made.most_rejected());
            let (text, json) = (made.describe(), made.to_json());
            assert!(text.starts_with(&own.describe(node.machine())) && text.contains("not via"), "{topology}, rank {rank}: {text}");
            let expected = own.to_json(node.machine());
            for (key, value) in expected.as_object().expect("an object") {
                assert_eq!(&json[key], value, "{topology}, rank {rank}: {key}");
            }
            made.destroy().expect("given back");
            // The description lists the transfers, then the work of each rank. Only the number of this rank and its own memory differ.
            let work: Vec<&str> = text.lines().filter(|line| line.starts_with("  rank ")).collect();
            assert!(work.len() == ranks as usize && work.iter().all(|line| !line.contains(" 0 operations")), "{text}");
            (work.join("\n"), json["ranks"].to_string(), json["transfers"].to_string())
        });
        assert!(described.iter().all(|of_rank| *of_rank == described[0]), "{topology}: {described:?}");
    }
}

#[test]
fn a_batch_that_cannot_be_planned_is_refused_with_the_same_error_on_all_ranks() {
    // Without peer access, every copy between GPUs is staged in host memory.
    let impossible = [
        (PlanOptions { staging_bytes: Some(4096), ..PlanOptions::default() }, "staging_bytes=4096"),
        (PlanOptions { host_path: Some(false), ..PlanOptions::default() }, "no copy engine can move bytes from"),
    ];
    for (options, reason) in impossible {
        let errors = as_ranks(3, |rank, seat| {
            let context = context("pcie-4-nopeer", Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, 3, seat, &[]).expect("a node"));
            let error = all_to_all(&node, &context, 1 << 20, &options).expect_err("it cannot be planned");
            // The next collective call of all ranks succeeds.
            all_to_all(&node, &context, 4096, &PlanOptions::default()).expect("a plan").destroy().expect("given back");
            error
        });
        for error in &errors {
            assert!(matches!(error, Error::Plan(_)) && error.to_string().contains(reason), "{error:?}");
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
}

/// Allgather function that fails after a number of calls, and then closes the connection to the other ranks. `left` is the number of calls
/// until then, and `calls` counts the calls.
struct Ends {
    gather: Option<Box<dyn Allgather>>,
    left: Arc<AtomicUsize>,
    calls: Arc<AtomicUsize>,
}

impl Allgather for Ends {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let is_last = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1))) == Ok(1);
        if is_last {
            self.gather = None;
        }
        self.gather.as_mut().ok_or("this rank has ended")?.allgather(send, receive)
    }
}

/// Creates a plan on three ranks. Rank `lost` ends at its call number `at` of the allgather function during the creation of the plan; if `at`
/// is 0, no rank ends. Returns the number of these calls, and the errors of the other ranks.
fn plan_while_one_ends(lost: u32, at: usize) -> (usize, Vec<Option<String>>) {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    let path = std::env::temp_dir().join(format!("mpgpu-planning-{}-{number}", std::process::id()));
    let path = &path;
    let results: Vec<(usize, Option<String>)> = std::thread::scope(|scope| {
        let rank_of = |rank: u32| {
            scope.spawn(move || {
                let context = context("beluga", Some(vec![rank]));
                let (left, calls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
                let gather = Some(meet_at(path, rank, 3).expect("ranks meet"));
                let seat = Ends { gather, left: left.clone(), calls: calls.clone() };
                let node = Arc::new(NodeGroup::new(&context, rank, 3, Box::new(seat), &[]).expect("a node"));
                let before = calls.load(Ordering::SeqCst);
                left.store(if rank == lost { at } else { 0 }, Ordering::SeqCst);
                let made = all_to_all(&node, &context, 1 << 20, &PlanOptions { adapt: Some(false), ..PlanOptions::default() });
                let calls = calls.load(Ordering::SeqCst) - before;
                // The socket closes when the node is dropped. A plan refers to its node.
                (calls, made.map(|plan| plan.destroy()).err().map(|error| error.to_string()))
            })
        };
        let ranks: Vec<_> = (0..3).map(rank_of).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    let others = results.iter().enumerate().filter(|(rank, _)| *rank != lost as usize).map(|(_, (_, error))| error.clone()).collect();
    (results[lost as usize].0, others)
}

#[test]
fn a_rank_that_ends_in_any_exchange_of_planning_fails_the_plan_on_the_others() {
    for lost in 0..3 {
        let (calls, errors) = plan_while_one_ends(lost, 0);
        assert!(errors.iter().all(Option::is_none), "{errors:?}");
        // The creation has five exchanges: requests, plan, memory, kernels and result. Each has a call for headers and a call for data.
        assert!(calls >= 10, "{calls} calls");
        for at in 1..=calls {
            let (made, errors) = plan_while_one_ends(lost, at);
            assert_eq!(made, at, "rank {lost} ends");
            for error in errors {
                let error = error.unwrap_or_else(|| panic!("rank {lost} has ended in call {at} of {calls}, and another rank has a plan"));
                assert!(error.contains(&format!("rank {lost} has exited")) || error.contains("rank 0 has exited"), "{lost}, {at}: {error}");
            }
        }
    }
}
