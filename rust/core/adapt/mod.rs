//! Selects among the variants of a plan by the measured times of executions.
//!
//! A performance model describes a machine only approximately, and the load of the machine changes. [`variants`] therefore derives a few
//! variants from a plan, and the caller prepares all of them for execution. The last variant is the *plain copies*: one direct copy for
//! each transfer. Before each execution, a [`Chooser`] returns the variant to execute and whether to measure it. The caller reports
//! measured times later. A chooser reads no clock and has no state outside itself, so equal inputs give equal choices. [`World`] simulates
//! choosers in virtual time on a machine that differs from the modelled one.
//!
//! # The rule
//!
//! *Follow the leader with a budget for tries*:
//!
//! - **The active variant** has the smallest median of its last 15 measured times. Another variant replaces it if it is faster by two
//!   standard errors, and also by 2 % if it uses more of the links that others may use. The active variant is measured often at first and
//!   after a change, then less and less often.
//! - **The first executions** use the variant that the model predicts to be fastest if the predicted gain over the plain copies exceeds 20 %,
//!   and otherwise the plain copies. The executions that follow before the first measured time is known use the same variant (up to 16
//!   executions; see the next item). A variant that is predicted to be slower than the active one by more than 20 % is not tried until the
//!   budget allows it or the active variant turns out to be slower. If the predicted gain is smaller than 20 %, the variant with half the
//!   staged bytes is tried first.
//! - **Executions enqueued ahead.** If 16 executions are enqueued before any time is known, the next executions try each of the other
//!   variants once. The executions that are enqueued after these tries have completed use the variant with the shortest time. At most eight
//!   measured executions are in progress at once. Half of this number is reserved for tries.
//! - **Tries.** A try is an execution of an inactive variant. Each execution adds 1/128 of its time to a budget. A try takes from the
//!   budget the time that it loses compared with the active variant. After the first executions, tries cost less than 1 % of the time. If
//!   tries cost more because of a change, later tries are made less often until their mean cost is below 1 % again. The slower a variant
//!   was when last measured, the less often it is tried.
//! - **Changes.** A change is detected by two successive times outside of the noise, on the same side, of the active variant or of another
//!   variant that has become faster. All earlier times are then obsolete. Every variant is tried soon, and these tries may exceed the
//!   budget by the time of six executions. A single new time confirms the old times of a variant or replaces them. If a single time of the
//!   active variant is 25 % longer than expected, the variant that seems fastest is executed until the change is confirmed or rejected.
//! - **Other choosers.** Tries are made at random moments, determined by the chooser's own seed. The fourth change of the active variant in
//!   a short time and each further change are delayed at random. Each delay is twice as long on average as the previous one, as in the
//!   back-off of senders on a shared medium. After the delay, the new variant must still be faster. After every 1,024 executions, one
//!   earlier change is forgotten. This bounds the rate of oscillations.
//! - **Known other choosers.** If other streams of the same process choose too, a chooser starts with the plain copies, which use no links
//!   of other GPUs. It then tries one variant after the other, and every try counts against the budget from the beginning.
//!
//! # Related work
//!
//! The problem is a bandit with switching costs and restless arms: their times change while they are not played (Whittle 1988). The Whittle
//! index and discounted or sliding-window UCB (Garivier and Moulines 2011) need a law of the changes, or explore at a rate that does not
//! depend on the cost of exploring. The rule here is follow-the-leader with forced exploration under a budget, as in budgeted and
//! "conservative" bandits (Wu et al. 2016: never below a fraction of a baseline). It restarts when a change is detected (Liu, Lee and
//! Shroff 2018 use CUSUM; here two outliers). Several choosers each play a best response, with inertia. In congestion games (Rosenthal
//! 1973) this ends in an equilibrium if players do not switch at the same moment. The random delays make sure that they do not. No theorem
//! about this combination is claimed. `tests/rust/adapt.rs` simulates it in virtual time.
//!
//! # Limits of any such rule
//!
//! - A change that does not affect the active variant is detected at the next try of an affected variant. Let `r` be the relative slowdown
//!   of this variant when last measured (0.5 means that it took 1.5 times as long), and `g` its relative gain now. With three variants it
//!   is tried every `256 · r` executions. The loss until then is the time of `256 · r · g` executions, which is 5 % of 500 executions if
//!   `r · g` is 0.1. Tries would have to cost more to make this loss smaller.
//! - A slowdown of the active variant is detected when the time of the next measured execution is reported. This execution is at most
//!   `steady` executions later. With `steady` 16 and reports two executions late, 500 executions lose 5 % if the variant takes twice as
//!   long, and more if it is slower than that.
//! - A chooser knows only its own times. It cannot distinguish a gain at the expense of other choosers from another gain, so the
//!   equilibrium may be slower than a joint optimum.

mod chooser;
mod expected;
mod times;
mod variants;
mod world;

pub use chooser::{Choice, Chooser, MAX_VARIANTS, MOST_UNDER_WAY};
pub use variants::{variant_name, variants};
pub use world::{Conditions, Game, Moment, Player, Tenant, Trail, World};
