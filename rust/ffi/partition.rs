//! Functions of the C ABI for transfers that are copied in partitions.

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

/// Converts the partition options that the caller passes.
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

/// Measures how best to divide transfers into partitions, and returns the fastest options in `*best`, which is equal on
/// all ranks. Pass `best` to `mp_node_plan`.
///
/// All ranks call it together, with equal `tuning` and `options`. Each rank passes the transfers that it sends. The
/// call creates a stream on each rank. The destinations are overwritten. Blocks until all measurements have finished.
/// May be called from any thread, but not from a host function.
///
/// For each agent (mechanism that moves the partitions) in `tuning->agents`, the function plans about ten candidates
/// with different numbers of partitions. The function executes each candidate several times, and calls `produce` to
/// enqueue the producing kernels. The best candidate has the shortest median time on the slowest rank. Candidates that
/// cannot be planned are skipped.
///
/// Rank 0 stores all measurements in the tuning file. `mpgpu tune partitions` prints and plots them. `MP_AGENT_AUTO`
/// uses the best of them, except those of `MP_AGENT_PRODUCER` (docs/reference/tuning.md).
///
/// Errors:
/// - The errors of `mp_node_plan`, if no candidate can be planned.
/// - `MP_ERROR_INVALID_ARGUMENT` if `agents` or `rounds` is out of range, if another rank sends one of the transfers,
///   or if `produce` failed.
/// - `MP_ERROR_NOT_SUPPORTED` if the tuning file cannot be written.
/// - `MP_ERROR_ENVIRONMENT` if the tuning file belongs to another machine.
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
            // SAFETY: the caller's function, which the header requires to accept these arguments and to return.
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

/// Returns the agents (mechanisms that move partitions, for example copy engines) that a bit mask selects.
fn agents_of(bits: u32, tells: bool) -> Result<Vec<Agent>, Failure> {
    if bits & !0b111 != 0 {
        let reason = "bits 0 (MP_AGENT_AUTO) to 2 (MP_AGENT_PRODUCER), or 0 for MP_AGENT_COPY_ENGINE";
        return Err(Failure::invalid(c"agents", format!("agents={bits:#x}: must be {reason}")));
    }
    if bits & 1 != 0 && tells {
        let reason = "MP_AGENT_AUTO chooses among several methods only if arrivals is off";
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

/// Begins a step (one execution) of a plan with partitions, in stream order. Does not block. The step starts after all
/// earlier work in `stream` and after the previous step. Kernels that read data of the previous step must be ordered
/// before this call. May be called from any thread, but not from a host function.
///
/// A step consists of three actions:
/// 1. `mp_plan_arm` begins the step.
/// 2. The caller enqueues the producers, in `stream` or in another stream that has waited for `stream`. Producers are
///    kernels that compute the data and mark each partition ready through its trigger (`mp_plan_get_trigger`,
///    mpgpu/trigger.cuh).
/// 3. `mp_execute` enqueues the copies of the partitions and the end of the step. Later work in the stream of
///    `mp_execute` sees all data that this rank receives in the step, and may overwrite the data that this rank sent.
///
/// After `mp_plan_arm`, receivers may check through the trigger whether a partition has arrived. All three actions may
/// be captured, in the same capture. Each partition must be marked ready once per step, even if its data have not
/// changed.
///
/// Order: enqueue every producer before `mp_execute` of the same step. Otherwise CUDA may place the operation that
/// waits for a producer before that producer in a hardware queue, and both deadlock. With `MP_AGENT_PRODUCER`, and with
/// `MP_AGENT_AUTO` if `mp_partition_options_t::arrivals` is off, the stream of `mp_execute` must also be ordered after
/// the producers. The reason is that the producers may store the data themselves, or that all data may be copied after
/// the producers.
///
/// Each call of `mp_plan_arm` must be followed by one `mp_execute`. If the plan is destroyed before that, the other
/// ranks get `MP_ERROR_PEER_GONE`. The memory to which they write in this step must then stay allocated until they have
/// destroyed their plans.
///
/// Errors: the errors of `mp_execute`; `MP_ERROR_INVALID_ARGUMENT` if a step has already begun or the plan has no
/// partitions.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_arm(plan: mp_plan_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(node_plan(plan)?.arm(StreamHandle(stream.addr()))?))
}

/// Fills `*trigger` with the addresses that kernels of this rank need to mark partitions of a transfer ready, or to
/// detect their arrival. The trigger is the same for all steps and is valid until the plan is destroyed. May be called
/// from any thread.
///
/// `transfer` is the index, from 0, in the list of transfers that rank `rank` passed to `mp_node_plan`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if the plan has no partitions, if the transfer does
/// not exist, or if this rank neither sends nor receives it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_plan_get_trigger(plan: mp_plan_t, rank: u32, transfer: usize, trigger: *mut mp_trigger_t) -> mp_status_t {
    guard(|| {
        let out = VersionedOut::new(trigger, c"trigger")?;
        out.write(trigger_of(&node_plan(plan)?.trigger(rank, transfer)?));
        Ok(())
    })
}

/// Blocks until the last enqueued step of a plan with partitions has finished on this rank, but at most `seconds`
/// seconds. Use this function to find a producer that never marks its partitions ready: the error text lists the
/// missing partitions. The function does not wait for captured steps. May be called from any thread, but not from a
/// host function.
///
/// After an error the step continues. If partitions of this rank are still missing 10 seconds after the start of
/// `mp_plan_destroy`, that call ends the step without them and returns `MP_ERROR_TIMEOUT`. For missing partitions of
/// another rank, `mp_plan_destroy` waits until that rank has marked them ready or has destroyed its plan.
///
/// Errors: `MP_ERROR_TIMEOUT`, `MP_ERROR_PEER_GONE`, `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if
/// `seconds` is negative or not a number, or if the plan has no partitions.
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
