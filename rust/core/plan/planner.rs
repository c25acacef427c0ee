//! Plans a batch: one path for each transfer, or several where the model finds that faster.

use super::alternative::Alternative;
use super::candidates::Reason;
use super::mechanism;
use super::options::{Options, PlanError, check};
use super::planned::Plan;
use super::selection::Selection;
use super::staging::NoRoom;
use crate::program::Shape;
use crate::topology::Machine;

/// The least gain for which several paths are taken. Figures differ by a few per cent between hosts of the same kind, so a smaller
/// modelled gain is as likely a loss.
const LEAST_GAIN: f64 = 0.02;

/// Plans a batch of transfers together.
///
/// Never slower than one path for each transfer, as far as the model knows: several paths are used only where they are expected
/// to gain 2 % or more over it, or where [`Tuned::several`](super::Tuned::several) says that they were measured to.
pub fn plan(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    check(machine, batch, options)?;
    let mut selection = Selection::new(machine, batch, options)?;
    let no_room = |NoRoom { transfer, ring_bytes, .. }| {
        let staging_bytes = options.staging_bytes;
        PlanError::Staging { transfer: transfer as usize, staging_bytes, ring_bytes }
    };
    let one_path = Alternative::new(&selection, selection.one_path().map_err(no_room)?);
    let seconds = one_path.seconds;
    let measured = options.tuned.is_some_and(|tuned| tuned.several);
    let chosen = if !measured && mechanism::are_turns(machine, batch, &one_path.launches) {
        for (candidate, closed) in selection.candidates.iter().zip(&mut selection.closed) {
            *closed = candidate.via.map(|_| Reason::Turns);
        }
        one_path
    } else {
        match selection.several_paths(seconds).map(|several| Alternative::new(&selection, several)) {
            None => one_path,
            Some(several) if measured || several.seconds <= seconds * (1.0 - LEAST_GAIN) => several,
            Some(several) => {
                for share in &several.assignment.shares {
                    let reason = Reason::NotFaster { seconds: several.seconds, one_path: seconds };
                    selection.closed[share.candidate].get_or_insert(reason);
                }
                one_path
            }
        }
    };
    chosen.into_plan(selection, seconds)
}
