//! Transfers that move in partitions.

use super::argument::{VersionedOut, bad_value, switch, text, versioned};
use super::guard::{Failure, guard};
use super::node::{handed, node_of, windows_and_transfers};
use super::plan::{node_plan, plan_options};
use super::types::*;
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{NO_TUNING, PlanOptions};
use mpgpu_ranks::{Agent, Collective, PartitionTrials, Partitioning, Trigger};
use std::ffi::c_void;
use std::path::Path;
use std::time::Duration;

/// How the caller wants transfers divided.
pub(super) fn partitioning_of(options: &mp_partition_options_t) -> Result<Partitioning, Failure> {
    let tells = switch(c"arrivals", options.arrivals)?.unwrap_or(true);
    let count = (options.count > 0).then_some(options.count);
    let stores = switch(c"stores", options.stores)?.unwrap_or(false);
    let agent = match options.agent {
        0 => Agent::Auto { tells, stores },
        1 => Agent::CopyEngine { tells },
        2 => Agent::Producer,
        other => return Err(bad_value(c"agent", other, "from 0 (MP_AGENT_AUTO) to 2 (MP_AGENT_PRODUCER)")),
    };
    Ok(Partitioning { count, agent })
}

/// Finds the best partitioning of these transfers for the kernels that produce them, by trying: plans candidates as
/// `mp_node_plan` does (agents, numbers of partitions, some ten of each), executes each
/// some times with `produce` launching the producers, and takes the one whose median step is shortest on the slowest rank.
/// What is refused is left out. `*best`, the same on all ranks, is for `mp_node_plan`. The tuning file keeps all trials,
/// of which `mpgpu tune partitions` makes a table and a picture, and `MP_AGENT_AUTO` finds there what is best without
/// `MP_AGENT_PRODUCER` (docs/reference/tuning.md).
///
/// All ranks call it together, with the same `tuning` and options, each on a stream of its own that the call makes. Each
/// hands in the transfers that it sends. Destinations are overwritten. Blocks; any thread, host functions excepted.
///
/// Errors: those of `mp_node_plan`, where no candidate can be planned; `MP_ERROR_INVALID_ARGUMENT` for agents
/// or rounds out of range, for a transfer that another rank sends, and where `produce` has failed;
/// `MP_ERROR_NOT_SUPPORTED` where the file cannot be written; `MP_ERROR_ENVIRONMENT` where it is of another machine.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn mp_node_tune_partitions(
    node: mp_node_t,
    windows: *const mp_window_t,
    window_count: usize,
    transfers: *const mp_node_transfer_t,
    count: usize,
    produce: mp_produce_t,
    user: *mut c_void,
    tuning: *const mp_partition_tuning_t,
    options: *const mp_plan_options_t,
    best: *mut mp_partition_options_t,
) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let zeros = mp_partition_tuning_t { size: 0, agents: 0, rounds: 0, arrivals: 0, blocks: 0, file: std::ptr::null() };
        let (out, (windows, transfers), produce, options, tuning, agents) = handed(&node, Collective::TUNE_PARTITIONS, || {
            let out = VersionedOut::new(best, c"best")?;
            let moved = windows_and_transfers(windows, window_count, transfers, count)?;
            let Some(produce) = produce else { return Err(Failure::invalid(c"produce", "produce is NULL")) };
            let tuning = if tuning.is_null() { zeros } else { versioned(tuning, c"tuning")? };
            let options = if options.is_null() { PlanOptions::default() } else { plan_options(&versioned(options, c"options")?)? };
            let agents = agents_of(tuning.agents, switch(c"arrivals", tuning.arrivals)?.unwrap_or(true))?;
            if tuning.rounds > 1000 {
                return Err(Failure::invalid(c"rounds", format!("rounds={}: must be at most 1000, or 0 for 7", tuning.rounds)));
            }
            text(tuning.file, c"file")?;
            Ok((out, moved, produce, options, tuning, agents))
        })?;
        let named = text(tuning.file, c"file")?.map(Path::new);
        let file = named.or(node.context().config().tuning_file.as_deref().filter(|path| *path != NO_TUNING).map(Path::new));
        let rounds = if tuning.rounds > 0 { tuning.rounds } else { 7 };
        let trials = PartitionTrials { agents: &agents, rounds, blocks: tuning.blocks, file };
        let mut launch = |triggers: &[Trigger], stream: StreamHandle| {
            let triggers: Vec<mp_trigger_t> = triggers.iter().map(trigger_of).collect();
            let stream = std::ptr::with_exposed_provenance_mut(stream.0);
            // SAFETY: the caller's function, which the header demands to take these and to return.
            match unsafe { produce(user, triggers.as_ptr(), triggers.len(), stream) } {
                0 => Ok(()),
                code => Err(format!("has returned {code}")),
            }
        };
        let found = node.tune_partitions(&windows, &transfers, &options, &trials, &mut launch)?;
        let agent = match found.agent {
            Agent::Auto { .. } => mp_agent_t::MP_AGENT_AUTO,
            Agent::CopyEngine { .. } => mp_agent_t::MP_AGENT_COPY_ENGINE,
            Agent::Producer => mp_agent_t::MP_AGENT_PRODUCER,
        };
        out.write(mp_partition_options_t {
            size: size_of::<mp_partition_options_t>(),
            count: found.count.unwrap_or(0),
            agent: agent as mp_agent_value,
            arrivals: tuning.arrivals,
            stores: if matches!(found.agent, Agent::Auto { stores: true, .. }) { mp_switch_t::MP_ON as mp_switch_value } else { 0 },
        });
        Ok(())
    })
}

/// The agents that these bits name.
fn agents_of(bits: u32, tells: bool) -> Result<Vec<Agent>, Failure> {
    if bits & !0b111 != 0 {
        let reason = "bits 0 (MP_AGENT_AUTO) to 2 (MP_AGENT_PRODUCER), or 0 for MP_AGENT_COPY_ENGINE";
        return Err(Failure::invalid(c"agents", format!("agents={bits:#x}: must be {reason}")));
    }
    if bits & 1 != 0 && tells {
        let reason = "MP_AGENT_AUTO chooses among ways only where arrivals are off";
        return Err(Failure::invalid(c"agents", format!("agents={bits:#x}: {reason}")));
    }
    let bits = if bits == 0 { 0b10 } else { bits };
    let stores = bits & 0b100 != 0;
    let all = [(0, Agent::Auto { tells, stores }), (1, Agent::CopyEngine { tells }), (2, Agent::Producer)];
    Ok(all.into_iter().filter(|(bit, _)| bits >> bit & 1 != 0).map(|(_, agent)| agent).collect())
}

fn trigger_of(of: &Trigger) -> mp_trigger_t {
    let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<c_void>(address as usize);
    mp_trigger_t {
        size: size_of::<mp_trigger_t>(),
        step: pointer(of.step).cast(),
        ready: pointer(of.ready).cast(),
        arrived: pointer(of.arrived).cast(),
        counters: pointer(of.counters).cast(),
        bytes: of.partitions.total,
        partition_bytes: of.partitions.bytes,
        partitions: of.partitions.count,
        arrived_flags: of.arrived_flags,
    }
}

/// Begins a step of a plan with partitions, in stream order, and returns. It starts after all earlier work in `stream` and after
/// the last step; consumers of the last step's arrivals come before it.
///
/// Then the caller enqueues what produces the partitions, in `stream` or in one that has waited for it: kernels that mark them
/// ready by the trigger that `mp_plan_get_trigger` gives (mpgpu/trigger.cuh). Last `mp_execute`
/// enqueues what moves them, and its end: later work in that stream sees all bytes that this rank receives in the step,
/// and may overwrite what it sent. Whoever receives may ask for the arrival of each partition before, by the trigger,
/// after `mp_plan_arm`. All three may be captured, in one capture. A partition is marked ready once in a step, also where
/// it is empty of news.
///
/// Every producer must be enqueued before `mp_execute` of the same step: on CUDA what waits for a producer may stand
/// before it in a hardware queue otherwise, and neither ends. With `MP_AGENT_PRODUCER`, and with `MP_AGENT_AUTO` where
/// `arrivals` are off, the stream of `mp_execute` must come after the producers: they may store the bytes, or all may be moved
/// then.
///
/// Each call is followed by one `mp_execute`. A plan that is destroyed
/// between the two leaves the other ranks `MP_ERROR_PEER_GONE`, and what they write in the step must stay allocated until
/// they have destroyed theirs. Any thread, host functions excepted.
///
/// Errors: those of `mp_execute`; `MP_ERROR_INVALID_ARGUMENT` where it is armed already, or has no partitions.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_arm(plan: mp_plan_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(node_plan(plan)?.arm(StreamHandle(stream.addr()))?))
}

/// Fills `*trigger` with what kernels of this rank need of a transfer: of number `transfer` among those that `rank`
/// handed in, from 0. It is the same for all steps. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` where the plan has no partitions, and for a transfer
/// that does not exist or of which this rank has no end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_plan_get_trigger(plan: mp_plan_t, rank: u32, transfer: usize, trigger: *mut mp_trigger_t) -> mp_status_t {
    guard(|| {
        let out = VersionedOut::new(trigger, c"trigger")?;
        out.write(trigger_of(&node_plan(plan)?.trigger(rank, transfer)?));
        Ok(())
    })
}

/// Blocks the calling thread until the last step that was executed has finished on this rank, at most `seconds`. For
/// finding a producer that never comes: the error names the partitions that are missing. The step goes on; where it does
/// not end within 10 seconds of `mp_plan_destroy`, that ends it without the rank's own missing partitions and fails with
/// `MP_ERROR_TIMEOUT`; for those of another rank it waits until that one has made them ready, or has destroyed its plan.
/// Steps that were captured are not waited for. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_TIMEOUT`; `MP_ERROR_PEER_GONE`; `MP_ERROR_INVALID_ARGUMENT` when `seconds` is negative or not a
/// number, or the plan has no partitions; `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_synchronize(plan: mp_plan_t, seconds: f64) -> mp_status_t {
    guard(|| {
        if seconds.is_nan() || seconds < 0.0 {
            return Err(Failure::invalid(c"seconds", format!("seconds={seconds}: must be 0 or more")));
        }
        let patience = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        Ok(node_plan(plan)?.wait(patience)?)
    })
}
