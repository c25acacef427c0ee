//! Tests `mpgpu doctor` on real GPUs. Its test of copies between peers must not report data loss that has not happened.

use super::{backend, gpus};
use mpgpu_backend::Backend;
use mpgpu_contexts::doctor::{Facts, Level, findings};
use mpgpu_core::topology::DeviceId;
use mpgpu_devices::cuda::{Tried, doctor};
use std::io::Write;

#[test]
fn the_doctor_tries_every_pair_and_finds_that_all_bytes_arrive() {
    let Some(turn) = gpus(1) else { return };
    let facts = Facts::gather(true);
    let cuda = facts.cuda.as_ref().expect("GPUs are there");
    let count = turn.count as usize;
    assert_eq!((cuda.gpus.len(), cuda.pairs.len()), (count, count * (count - 1) / 2));
    for pair in cuda.pairs.iter().filter(|pair| pair.claims.0 || pair.claims.1) {
        assert_eq!(pair.tried, Some(Ok(Tried::Intact)), "{pair:?}");
    }
    assert!(cuda.pinning.as_ref().is_some_and(|pinning| pinning.whole.is_ok()), "{:?}", cuda.pinning);
    let found = findings(&facts);
    // Prints the findings on this machine, for information.
    for finding in &found {
        drop(writeln!(std::io::stderr(), "  {:<7}  {:<8}  {}", finding.level.name(), finding.topic, finding.line));
    }
    let refused: Vec<_> = found.iter().filter(|finding| finding.level == Level::Refused && finding.topic == "peers").collect();
    assert!(refused.is_empty(), "{refused:?}");
}

#[test]
fn asking_without_trials_takes_no_context() {
    let Some(_turn) = gpus(1) else { return };
    let facts = doctor::facts(false).expect("GPUs are there");
    assert!(facts.pairs.iter().all(|pair| pair.tried.is_none()) && facts.pinning.is_none(), "{facts:?}");
}

#[test]
fn no_pair_of_sound_gpus_is_said_to_lose_bytes() {
    let Some(turn) = gpus(2) else { return };
    let backend = backend();
    let devices = (0..turn.count).map(DeviceId::gpu);
    let pairs: Vec<_> = devices.clone().flat_map(|a| devices.clone().filter(move |b| a != *b).map(move |b| (a, b))).collect();
    assert_eq!(backend.losing_pairs(&pairs), []);
}
