//! Tests messages between the ranks of a node on the host backend. Messages must be matched by MPI's rules, all data must be correct, and
//! no message of other ranks may be lost when a rank is killed. Ranks are threads with separate contexts here, and processes in other
//! tests.

mod damaged;
mod full;
pub(crate) mod killed;
mod model;
mod play;
mod single;

use crate::common::{Random, is_long, setting};
use crate::node_plans::{as_ranks, context};
use crate::peer::Peer;
use model::{Program, Shape};
use mpgpu_ranks::NodeGroup;
use mpgpu_ranks::message::{Messenger, MessengerOptions};
use play::{Player, Turns};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const TOPOLOGY: &str = "hgx-h200";

/// Generates the random program of a round, which is the same on all ranks.
fn program(seed: u64, round: u64, ranks: u32) -> (Program, Shape) {
    let mut random = Random(seed.wrapping_mul(1_000_003).wrapping_add(round));
    let in_turns = random.chance(60);
    // Some rounds send large messages.
    let (steps, most_bytes) = match random.below(100) {
        0 => (12, 64 << 20),
        1..6 => (30, 4 << 20),
        _ => (120, 300_000),
    };
    let shape = Shape { ranks, steps, in_turns, most_bytes };
    (Program::random(&mut random, &shape), shape)
}

/// Runs rounds until `messages` messages have been sent. Returns the numbers of messages and of rounds.
fn play_rounds(player: &mut Player, turns: &Turns, seed: u64, messages: u64) -> (u64, u64) {
    let (mut moved, mut round) = (0, 0);
    while moved < messages {
        let (program, shape) = program(seed, round, player.ranks());
        player.play(&program, &shape, turns, round);
        moved += program.messages() as u64;
        round += 1;
    }
    (moved, round)
}

fn options() -> MessengerOptions {
    MessengerOptions { operations: 256, messages: 512 }
}

#[test]
fn threads_meet_as_mpi_says() {
    play_in_threads(if is_long() { 100_000 } else { 1_500 }, |_, _| ());
}

#[test]
#[cfg(feature = "fault-injection")]
fn messages_pass_through_host_memory_where_memory_of_another_rank_cannot_be_mapped() {
    // Only the last rank can map memory of others, so each side of a match may be a rank that cannot.
    play_in_threads(if is_long() { 50_000 } else { 1_000 }, |rank, messenger| {
        if rank < 3 {
            messenger.refuse_mapping();
        }
    });
}

fn play_in_threads(messages: u64, prepare: impl Fn(u32, &Messenger) + Sync) {
    let (ranks, messages) = (4, setting("TEST_MESSAGES", messages));
    let seed = setting("TEST_SEED", 1);
    let turns = Turns::new(ranks);
    let counts = as_ranks(ranks, |rank, seat| {
        let context = context(TOPOLOGY, Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, ranks, seat, &[]).expect("a node"));
        let messenger = node.messenger(options()).expect("a messenger");
        prepare(rank, &messenger);
        let mut player = Player::new(context, messenger);
        let count = play_rounds(&mut player, &turns, seed, messages);
        player.end();
        count
    });
    println!("{} messages between {ranks} threads in {} rounds, seed {seed}", counts[0].0, counts[0].1);
}

/// Prevents this process from mapping GPU memory of other ranks, as if another library had opened that memory.
fn refuse_mapping_where_asked(_messenger: &Messenger) {
    #[cfg(feature = "fault-injection")]
    if std::env::var_os("MESSAGES_UNMAPPED").is_some() {
        _messenger.refuse_mapping();
    }
}

/// Runs one process of `processes_meet_as_mpi_says`. Its arguments are rank, number of ranks, seed, number of messages, socket, and the
/// file with the shared counters.
#[test]
#[ignore = "run by other tests"]
fn child_plays() {
    let Ok(text) = std::env::var("MESSAGES_CHILD") else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().expect("a number");
    let (rank, ranks) = (number(0) as u32, number(1) as u32);
    let context = context(TOPOLOGY, Some(vec![rank]));
    let node = NodeGroup::at_socket(&context, rank, ranks, words[4].as_ref(), &[]).expect("a node");
    let messenger = Arc::new(node).messenger(options()).expect("a messenger");
    refuse_mapping_where_asked(&messenger);
    let turns = Turns::in_file(words[5].as_ref(), ranks);
    let mut player = Player::new(context, messenger);
    let (moved, rounds) = play_rounds(&mut player, &turns, number(2), number(3));
    player.end();
    println!("\nANSWER {moved} {rounds}");
}

fn this_program() -> Command {
    Command::new(std::env::current_exe().expect("this program"))
}

#[test]
fn processes_meet_as_mpi_says() {
    play_in_processes(&this_program, &[2, 3, 8], if is_long() { 1_000_000 } else { 3_000 }, false);
}

#[test]
#[cfg(feature = "fault-injection")]
fn messages_between_processes_that_map_no_memory_of_each_other_pass_through_host_memory() {
    play_in_processes(&this_program, &[2, 4], if is_long() { 100_000 } else { 1_000 }, true);
}

/// Runs the test with each number of processes in `counts`. `program` returns the command that starts one process.
pub fn play_in_processes(program: &dyn Fn() -> Command, counts: &[u64], messages: u64, is_unmapped: bool) {
    let messages = setting("TEST_MESSAGES", messages);
    let seed = setting("TEST_SEED", 1);
    let started = Instant::now();
    for &ranks in counts {
        let folder = std::env::temp_dir().join(format!(
            "mpgpu-messages-{}-{ranks}-{is_unmapped}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&folder).expect("a folder");
        let (socket, turns) = (folder.join("socket"), folder.join("turns"));
        Turns::make(&turns);
        let mut peers: Vec<Peer> = (0..ranks)
            .map(|rank| {
                let mut command = program();
                let share = messages / counts.len() as u64;
                let orders = format!("{rank} {ranks} {seed} {share} {} {}", socket.display(), turns.display());
                command.env("MESSAGES_CHILD", orders);
                if is_unmapped {
                    command.env("MESSAGES_UNMAPPED", "1");
                }
                Peer::running(command, "messages::child_plays")
            })
            .collect();
        let answers: Vec<String> = peers.iter_mut().map(|peer| peer.hear().expect("a rank has failed: its text is above")).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        println!("{} messages and rounds of {ranks} processes, seed {seed}, after {:.1?}", answers[0], started.elapsed());
        std::fs::remove_dir_all(&folder).expect("nothing else uses it");
    }
}
