//! Variants of a plan: the plan that the model prefers, a cautious one, and the plain copies.

use crate::plan::{Options, Plan, Tuned, WEIGHTS};
use std::borrow::Borrow;

/// Returns the variants of a batch. The first is `all`, the plan that the model prefers for `options`. The second stages half as many
/// bytes: in host memory, or in other GPUs if none are staged in host memory. The last is the plain copies. Returns `all` alone if the
/// model expects no gain from several paths. `plan` plans the same batch with other options.
pub fn variants<P: Borrow<Plan>, E>(all: P, options: &Options, mut plan: impl FnMut(&Options) -> Result<P, E>) -> Result<Vec<P>, E> {
    let staged = || all.borrow().transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter_map(|path| path.via);
    // Only in staged paths does one operation wait for another. The check is cheap because a plan of many transfers has few operations.
    let waits = all.borrow().program.ops.iter().any(|op| !op.after.is_empty());
    let (is_staged, has_threads) = (waits && staged().next().is_some(), all.borrow().threads.is_some());
    if !is_staged && !has_threads {
        return Ok(vec![all]);
    }
    let mut tuned = Tuned { several: true, ..options.tuned.unwrap_or_default() };
    let share = if staged().any(|via| via.is_host()) { &mut tuned.host_share } else { &mut tuned.relay_share };
    *share = (*share / 2).max(*WEIGHTS.start());
    let half = is_staged.then_some(Options { tuned: Some(tuned), ..*options });
    let mut variants = vec![all];
    for options in half.into_iter().chain([Options { max_paths: 1, threads: 0, tuned: None, ..*options }]) {
        let next = plan(&options)?;
        if variants.iter().all(|known| known.borrow().program != next.borrow().program) {
            variants.push(next);
        }
    }
    Ok(variants)
}

/// Returns the name of variant number `variant` of a plan with `count` variants.
pub fn variant_name(variant: usize, count: usize) -> &'static str {
    match variant {
        _ if variant + 1 == count => "plain copies",
        0 => "all paths",
        _ => "half of what is staged",
    }
}
