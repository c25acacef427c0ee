//! Kills a rank at random moments. Operations with that rank must end with an error, and the other ranks must continue.

use super::{TOPOLOGY, options};
use crate::common::{Random, is_long, setting};
use crate::node_plans::{context, memory};
use crate::peer::Peer;
use mpgpu_backend::{BackendError, CompletionState, StreamHandle};
use mpgpu_contexts::Error;
use mpgpu_core::topology::DeviceId;
use mpgpu_ipc::IpcError;
use mpgpu_ranks::NodeGroup;
use mpgpu_ranks::message::{Operation, Outgoing, Pattern};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: u32 = 4;
/// Rank that is killed.
const VICTIM: u32 = 2;
const STEPS: u64 = 150;
const MOST_BYTES: u64 = 200_000;

/// Tag with which no rank sends a message.
const NOTHING: u64 = 1 << 40;

pub fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Share(IpcError::PeerGone(_)) | Error::Backend(BackendError::PeerGone(_)))
}

/// Returns the size in bytes of the message from one rank to another in a round.
fn bytes_of(seed: u64, step: u64, from: u32, to: u32) -> u64 {
    let mut random = Random(seed ^ step << 20 ^ u64::from(from) << 8 ^ u64::from(to));
    if random.chance(70) { random.below(2000) } else { random.below(MOST_BYTES) }
}

fn byte(step: u64, from: u32, at: u64) -> u8 {
    (at.wrapping_mul(37) ^ (at >> 10) ^ step.wrapping_mul(71) ^ u64::from(from).wrapping_mul(11)) as u8
}

/// Runs one rank in a child process: sends to all other ranks and receives from them, round after round. Its arguments are rank, seed,
/// socket, and the microseconds after which the victim kills itself.
#[test]
#[ignore = "run by other tests"]
fn child_goes_on() {
    let Ok(text) = std::env::var("MESSAGES_CHILD") else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().expect("a number");
    let (rank, seed) = (number(0) as u32, number(1));
    let context = context(TOPOLOGY, Some(vec![rank]));
    let node = NodeGroup::at_socket(&context, rank, RANKS, words[2].as_ref(), &[]).expect("a node");
    let messenger = Arc::new(node).messenger(options()).expect("a messenger");
    super::refuse_mapping_where_asked(&messenger);
    // Ranks with odd numbers use pageable memory.
    let mut pageable = [0; 2].map(|_| vec![0_u8; (MOST_BYTES * u64::from(RANKS)) as usize]).into_iter();
    let mut room = |device| match pageable.next().filter(|_| !rank.is_multiple_of(2)) {
        Some(memory) => memory.leak().as_mut_ptr().expose_provenance() as u64,
        None => context.allocate_shared(device, MOST_BYTES * u64::from(RANKS)).expect("memory"),
    };
    let (outgoing, incoming) = (room(DeviceId::gpu(0)), room(DeviceId::HOST));
    let at = |base: u64, rank: u32| base + u64::from(rank) * MOST_BYTES;
    let stream = StreamHandle(0);
    let any = Pattern { source: None, tag: NOTHING, mask: u64::MAX };
    let from_any = messenger.receive(incoming, 0, &any, stream).expect("posted");
    if rank == VICTIM {
        let until = Instant::now() + Duration::from_micros(number(3));
        std::thread::spawn(move || {
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            // SAFETY: no argument is a pointer.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        });
    }
    let mut is_lost = false;
    let check = |result: Result<(), BackendError>, other: u32| match result {
        Ok(()) => true,
        Err(BackendError::PeerGone(_)) if other == VICTIM => false,
        Err(error) => panic!("rank {rank}, with rank {other}: {error}"),
    };
    for step in 0.. {
        // The victim continues until it kills itself.
        if step == STEPS && rank != VICTIM {
            break;
        }
        let mut posted: Vec<(u32, Arc<Operation>)> = Vec::new();
        let mut others: Vec<u32> = (0..RANKS).filter(|other| *other != rank && !(is_lost && *other == VICTIM)).collect();
        others.retain(|other| step < STEPS || *other != VICTIM);
        for &other in &others {
            let bytes = bytes_of(seed, step, rank, other);
            memory(at(outgoing, other), bytes).iter_mut().zip(0..).for_each(|(place, at)| *place = byte(step, rank, at));
            let pattern = Pattern { source: Some(other), tag: step, mask: u64::MAX };
            let sent = Outgoing { address: at(outgoing, other), bytes, rank: other, tag: step, metadata: &step.to_le_bytes() };
            for made in [messenger.receive(at(incoming, other), MOST_BYTES, &pattern, stream), messenger.send(&sent, stream)] {
                match made {
                    Ok(operation) => posted.push((other, operation)),
                    Err(error) => assert!(other == VICTIM && is_gone(&error), "rank {rank}, with rank {other}: {error}"),
                }
            }
        }
        for (other, operation) in posted {
            if step % 4 == 1 {
                // The stream reports the loss of a rank, as the operation below does.
                let _ = operation.order_stream(stream);
                let _ = context.synchronize_stream(stream);
            }
            is_lost |= !check(operation.wait(), other);
            let met = operation.envelope().filter(|met| met.source == other && operation.is_done().is_ok());
            if let Some(met) = met {
                assert_eq!((met.tag, met.bytes), (step, bytes_of(seed, step, other, rank)));
                let wrong = memory(at(incoming, other), met.bytes).iter().zip(0..).position(|(found, at)| *found != byte(step, other, at));
                assert!(wrong.is_none(), "rank {rank}, step {step} of rank {other}: byte {wrong:?} is wrong");
            }
        }
    }
    // The receive ends, because the message could only come from a rank that may be the victim.
    assert!(matches!(from_any.wait(), Err(BackendError::PeerGone(_))), "rank {VICTIM} has died");
    messenger.destroy().expect("nothing is left");
    context.close().expect("nothing is left");
    println!("\nANSWER 0 {}", u8::from(is_lost));
}

#[test]
fn a_rank_killed_at_any_moment_ends_what_concerns_it_and_nothing_else() {
    let rounds = setting("TEST_KILLS", if is_long() { 1000 } else { 12 });
    let mut random = Random(setting("TEST_SEED", 1));
    for round in 0..rounds {
        let socket = std::env::temp_dir().join(format!("mpgpu-messages-killed-{}-{round}", std::process::id()));
        let (seed, after) = (random.next() >> 32, random.below(60_000));
        let mut peers: Vec<Peer> = (0..RANKS)
            .map(|rank| {
                let mut command = Command::new(std::env::current_exe().expect("this program"));
                command.env("MESSAGES_CHILD", format!("{rank} {seed} {} {after}", socket.display()));
                if round % 3 == 2 {
                    command.env("MESSAGES_UNMAPPED", "1");
                }
                Peer::running(command, "messages::killed::child_goes_on")
            })
            .collect();
        for (rank, peer) in (0..).zip(&mut peers).filter(|(rank, _)| *rank != VICTIM) {
            let answer = peer.hear();
            assert!(answer.is_some_and(|answer| answer.starts_with('0')), "round {round}, rank {rank}: its text is above");
        }
    }
    println!("{rounds} ranks killed");
}
