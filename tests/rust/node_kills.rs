//! Runs random node plans on several ranks, of which one (the victim) is killed or leaves early. No rank may write into a window (memory
//! range that other ranks may access) before the owner of the window has begun the communication step. No step may succeed with wrong data,
//! and no rank may wait for ever.
//!
//! A window is checked twice: after its step has succeeded, and, filled with another value, just before its owner begins the next step.

use crate::common::{Random, is_long, setting};
use crate::killed::hear;
use crate::messages::killed::is_gone;
use crate::node_plans::{context, end, memory};
use crate::peer::Peer;
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{Context, Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{NodeGroup, NodePlan, NodeTransfer, Window};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TOPOLOGY: &str = "dgx1-v100";
const STEPS: u64 = 120;
/// Value of all bytes of a window between two communication steps.
const IDLE: u8 = 0xA5;

/// Random program of all ranks. The same seed gives the same program on each rank.
struct Program {
    ranks: u32,
    victim: u32,
    /// True if the victim leaves by destroying its plans, false if it is killed.
    leaves: bool,
    /// Time in microseconds from the first communication step until the victim leaves or is killed.
    after: u64,
    plans: Vec<PlanOfRanks>,
}

struct PlanOfRanks {
    transfers: Vec<NodeTransfer>,
    /// Sizes in bytes of the two windows of each rank: the window that it sends from, and the window that it receives into.
    bytes: Vec<[u64; 2]>,
    options: PlanOptions,
}

impl Program {
    fn new(seed: u64) -> Program {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
        let ranks = 2 + random.below(5) as u32;
        let (victim, leaves, after) = (random.below(u64::from(ranks)) as u32, random.chance(30), random.below(40_000));
        let plans = (0..1 + random.below(2)).map(|_| PlanOfRanks::new(&mut random, ranks)).collect();
        Program { ranks, victim, leaves, after, plans }
    }
}

impl PlanOfRanks {
    fn new(random: &mut Random, ranks: u32) -> PlanOfRanks {
        let mut bytes = vec![[1_u64, 1]; ranks as usize];
        let most = if random.chance(50) { 3_000 } else { 300_000 };
        let mut transfers = Vec::new();
        for _ in 0..1 + random.below(2 * u64::from(ranks)) {
            let [src, dst] = [0; 2].map(|_| random.below(u64::from(ranks)) as u32);
            let (bytes_of, again) = (1 + random.below(most), random.chance(30));
            // Transfers with the same source use trees, in which ranks forward data.
            let from = transfers.last().filter(|_| again).map(|last: &NodeTransfer| (last.src, last.bytes));
            let (from, bytes_of) = from.unwrap_or_else(|| {
                let from = end(src, 0, bytes[src as usize][0]);
                bytes[src as usize][0] += bytes_of;
                (from, bytes_of)
            });
            transfers.push(NodeTransfer { dst: end(dst, 1, bytes[dst as usize][1]), src: from, bytes: bytes_of });
            bytes[dst as usize][1] += bytes_of;
        }
        let options = PlanOptions { min_bytes: Some(1), chunk_bytes: Some(16 << 10), ..PlanOptions::default() };
        PlanOfRanks { transfers, bytes, options }
    }

    /// Returns the value of the byte at offset `at` in the send window of rank `src` in a communication step.
    fn byte(src: u32, at: u64, step: u64) -> u8 {
        (at.wrapping_mul(31) ^ (at >> 9) ^ step.wrapping_mul(71) ^ u64::from(src).wrapping_mul(11)) as u8
    }

    /// Returns the index of the first transfer to a rank that has delivered wrong data, or `None`.
    fn wrong(&self, rank: u32, received: &[u8], step: u64) -> Option<usize> {
        self.transfers.iter().position(|transfer| {
            let NodeTransfer { dst, src, bytes } = *transfer;
            let is_right = |at: u64| received[(dst.offset + at) as usize] == PlanOfRanks::byte(src.rank, src.offset + at, step);
            dst.rank == rank && !(0..bytes).all(is_right)
        })
    }
}

/// Plan of all ranks, as one rank sees it, with the windows of that rank.
struct Own<'a> {
    of: &'a PlanOfRanks,
    plan: NodePlan,
    windows: [Window; 2],
}

impl<'a> Own<'a> {
    fn new(node: &Arc<NodeGroup>, context: &Context, device: DeviceId, of: &'a PlanOfRanks) -> Own<'a> {
        let rank = node.rank();
        let window = |bytes: u64| Window { address: context.allocate_shared(device, bytes).expect("memory"), bytes };
        let windows = of.bytes[rank as usize].map(window);
        let mine: Vec<NodeTransfer> = of.transfers.iter().filter(|transfer| transfer.src.rank == rank).copied().collect();
        Own { of, plan: node.plan(&windows, &mine, &of.options).expect("a plan"), windows }
    }

    fn window(&self, which: usize) -> &'static mut [u8] {
        memory(self.windows[which].address, self.windows[which].bytes)
    }

    fn is_idle(&self) -> bool {
        self.window(1).iter().all(|byte| *byte == IDLE)
    }

    fn fill(&self, rank: u32, step: u64) {
        self.window(0).iter_mut().zip(0..).for_each(|(place, at)| *place = PlanOfRanks::byte(rank, at, step));
    }
}

fn is_lost(result: Result<(), Error>, what: &str) -> bool {
    match result {
        Ok(()) => false,
        Err(error) if is_gone(&error) => {
            let text = error.to_string();
            assert!(text.contains("rank ") || text.contains("another rank"), "{what}: it names no rank: {text}");
            true
        }
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Executes communication steps on one rank until it gets the error that a rank was lost, until all steps are done, or until it leaves.
/// Returns the number of completed steps.
fn steps(program: &Program, rank: u32, own: &[Own<'_>], context: &Context, stream: StreamHandle, until: Option<Instant>) -> u64 {
    let mut random = Random(u64::from(rank) + program.after);
    for step in 1.. {
        let is_victim = rank == program.victim;
        if until.is_some_and(|until| Instant::now() >= until) || (step > STEPS && !is_victim) {
            return step - 1;
        }
        for one in own {
            assert!(one.is_idle(), "rank {rank}: a window was written to before its step {step}");
            one.fill(rank, step);
        }
        let lost = own.iter().any(|one| is_lost(one.plan.enqueue(stream), "enqueue"));
        let lost = is_lost(context.synchronize_stream(stream), "synchronize") || lost;
        if lost {
            return step - 1;
        }
        for one in own {
            let wrong = one.of.wrong(rank, one.window(1), step);
            assert!(wrong.is_none(), "rank {rank}: step {step} has ended well, and transfer {wrong:?} is wrong");
            one.window(1).fill(IDLE);
        }
        if random.chance(20) {
            std::thread::sleep(Duration::from_micros(random.below(500)));
        }
    }
    0
}

/// Runs one rank in a child process. Its arguments are rank, seed and socket.
#[test]
#[ignore = "run by other tests"]
fn child_takes_part() {
    let Ok(text) = std::env::var("NODE_KILLS_CHILD") else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().expect("a number");
    let (rank, program) = (number(0) as u32, Program::new(number(1)));
    let context = context(TOPOLOGY, Some(vec![rank]));
    let node = Arc::new(NodeGroup::at_socket(&context, rank, program.ranks, words[2].as_ref(), &[]).expect("a node"));
    let device = DeviceId::gpu(0);
    let own: Vec<Own<'_>> = program.plans.iter().map(|of| Own::new(&node, &context, device, of)).collect();
    own.iter().for_each(|one| one.window(1).fill(IDLE));
    let stream = context.create_stream(device).expect("a stream");
    let end = (rank == program.victim).then(|| Instant::now() + Duration::from_micros(program.after));
    if let Some(until) = end.filter(|_| !program.leaves) {
        std::thread::spawn(move || {
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            // SAFETY: no argument is a pointer.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
    }
    let done = steps(&program, rank, &own, &context, stream, end.filter(|_| program.leaves));
    // A rank that has left before its last step reuses its windows. They must be unchanged when the other ranks have ended.
    let has_left = program.leaves && rank == program.victim && own.iter().all(Own::is_idle);
    for one in &own {
        is_lost(one.plan.destroy(), "destroy");
    }
    println!("\nANSWER 0 {done}");
    let mut order = String::new();
    std::io::stdin().read_line(&mut order).expect("an order");
    assert!(!has_left || own.iter().all(Own::is_idle), "rank {rank} has left after {done} steps, and its window was written to");
    context.close().expect("nothing is left");
    println!("\nANSWER 0");
}

/// Runs one random program. Returns the number of communication steps that each rank has completed; `None` for the victim if it was killed.
fn play(seed: u64) -> Vec<Option<u64>> {
    let program = Program::new(seed);
    let socket = std::env::temp_dir().join(format!("mpgpu-node-kills-{}-{seed}", std::process::id()));
    let mut peers: Vec<Peer> = (0..program.ranks)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.env("NODE_KILLS_CHILD", format!("{rank} {seed} {}", socket.display()));
            Peer::running(command, "node_kills::child_takes_part")
        })
        .collect();
    let may_end = |rank: u32| rank == program.victim && !program.leaves;
    let mut said = Vec::new();
    for (rank, peer) in (0..).zip(&mut peers) {
        let answer = hear(peer, &format!("seed {seed}, rank {rank}"));
        assert!(answer.is_some() || may_end(rank), "seed {seed}, rank {rank} of {}: its text is above", program.ranks);
        said.push(answer.map(|answer| answer.trim_start_matches("0 ").parse().expect("a number")));
    }
    for (rank, peer) in (0..).zip(&mut peers).filter(|(rank, _)| !may_end(*rank)) {
        assert_eq!(peer.ask("end"), "0", "seed {seed}, rank {rank} of {}", program.ranks);
    }
    said
}

#[test]
fn no_rank_writes_where_it_was_not_let_and_no_step_ends_well_with_wrong_bytes_when_one_is_lost() {
    let first = setting("TEST_SEED", 1);
    let seeds = setting("TEST_NODE_KILLS", if is_long() { 256 } else { 8 });
    for seed in first..first + seeds {
        println!("seed {seed}: steps {:?}", play(seed));
    }
}
