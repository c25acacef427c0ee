//! The variants of a plan.

use crate::plan::{Options, Plan, Tuned, WEIGHTS};
use std::borrow::Borrow;

/// `all`, which is the plan of `options` that the model prefers; the same with half of the bytes that are staged in host memory, or where none are, in
/// other GPUs; and the plain copies. One plan alone where the model sees no gain in several paths. `plan` is to plan the same batch with other options.
pub fn variants<P: Borrow<Plan>, E>(all: P, options: &Options, mut plan: impl FnMut(&Options) -> Result<P, E>) -> Result<Vec<P>, E> {
    let staged = || all.borrow().transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter_map(|path| path.via);
    // Only of what is staged does one operation wait for another, and operations are few where transfers are many.
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

/// What a variant of a plan that has so many is called.
pub fn variant_name(variant: usize, count: usize) -> &'static str {
    match variant {
        _ if variant + 1 == count => "plain copies",
        0 => "all paths",
        _ => "half of what is staged",
    }
}
