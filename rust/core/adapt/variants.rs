//! Derives the variants of a plan: the plan that the model predicts to be fastest, a cautious plan, and plain copies (one direct copy for
//! each transfer).

use crate::plan::{Options, Plan, Tuned, WEIGHTS};
use std::borrow::Borrow;

/// Returns the variants of a plan, at most three. The first is `all`, the plan that the model predicts to be fastest for `options`. The
/// second moves half as much data through staging memory on the host, or through staging memory of other GPUs if none is staged on the
/// host. The last one consists of plain copies: one direct copy for each transfer. If the model predicts no gain from several paths, `all`
/// is the only variant. The function `plan` plans the same batch with other options.
pub fn variants<P: Borrow<Plan>, E>(all: P, options: &Options, mut plan: impl FnMut(&Options) -> Result<P, E>) -> Result<Vec<P>, E> {
    let staged = || all.borrow().transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter_map(|path| path.via);
    // Only operations of staged paths wait for other operations. The check is cheap because a plan of many transfers has few operations.
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

/// Returns the name of the variant with index `variant` in a plan with `count` variants.
pub fn variant_name(variant: usize, count: usize) -> &'static str {
    match variant {
        _ if variant + 1 == count => "plain copies",
        0 => "all paths",
        _ => "half the staged bytes",
    }
}
