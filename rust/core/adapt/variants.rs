//! The variants of a plan.

use crate::plan::{Options, Plan, PlanError, Shape, Tuned, WEIGHTS, plan};
use crate::topology::Machine;

/// The plan that the model prefers; the same with half of the bytes that are staged in host memory, or where none are, in other GPUs; and the
/// plain copies. One plan alone where the model sees no gain in several paths.
pub fn variants(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Vec<Plan>, PlanError> {
    let all = plan(machine, batch, options)?;
    let staged = || all.transfers.iter().flat_map(|transfer| &transfer.paths).filter_map(|path| path.via);
    if staged().next().is_none() {
        return Ok(vec![all]);
    }
    let mut tuned = Tuned { several: true, ..options.tuned.unwrap_or_default() };
    let share = if staged().any(|via| via.is_host()) { &mut tuned.host_share } else { &mut tuned.relay_share };
    *share = (*share / 2).max(*WEIGHTS.start());
    let half = plan(machine, batch, &Options { tuned: Some(tuned), ..*options })?;
    let plain = plan(machine, batch, &Options { max_paths: 1, tuned: None, ..*options })?;
    let mut variants = vec![all];
    for next in [half, plain] {
        if variants.iter().all(|known| known.program != next.program) {
            variants.push(next);
        }
    }
    Ok(variants)
}
