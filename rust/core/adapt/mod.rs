//! Which of the variants of a plan is executed, by how long measured executions took.
//!
//! A model knows one machine on one day. [`variants`] makes a plan into a few, all prepared by whoever executes them; a [`Chooser`] says before
//! each execution which of them it is to be and whether to measure it, and is told the times of those later. It is a value: no clock, no memory
//! beyond its own, and the same inputs give the same choices. [`World`] plays choosers in virtual time on a machine that is not the model's.
//!
//! # The rule
//!
//! *Follow the leader with a budget for tries*:
//!
//! - **In force** is the variant with the least median of its last 15 measured times. Another one takes over where it is faster by two standard
//!   errors, and by 2 % if it takes more of what others may use. The one in force is measured often at first and after a change, then ever more
//!   seldom.
//! - **Before the first time** is known, whatever is not measured takes the plain copies: a program that keeps a window of copies in flight asks for many.
//! - **Tries.** The others are tried, one execution at a time. Each execution pays 1/128 of its time into a budget, and a try takes out of it what
//!   it loses to the variant in force. After the first executions tries cost less than 1 % of the time, and what a change makes them cost beyond that is saved afterwards. A
//!   variant is tried the more seldom the slower it was when last measured.
//! - **Changes.** Two times in a row outside of the noise, on the same side, of the variant in force, or of another one that has become faster: then all
//!   that is known is old. Every variant is tried soon, out of an advance of six executions' time, and one time confirms its old times or replaces them.
//!   Where a single time of the one in force is longer by a quarter, the variant that seems fastest is executed until that is settled.
//! - **Others who choose.** When tries are made is random, from the chooser's own seed. The fourth switch in a short time and each further one is
//!   delayed at random, each time twice as long, as senders on one wire do after collisions; after the delay the variant has to be faster still.
//!   One switch is forgotten in 1,024 executions, which is the rate to which swings are held.
//! - **Beside others who are known**, streams of the same process, a chooser of its own begins with the plain copies, which keep off the links that
//!   are not theirs; one variant after the other is tried, and each try is paid for from the beginning.
//!
//! # What it is in the literature
//!
//! A bandit with switching costs whose arms are restless: their times change while they are not played (Whittle 1988). The Whittle index and
//! discounted or sliding-window UCB (Garivier and Moulines 2011) need a law of the changes, or explore at a rate that does not depend on what exploring
//! costs. This is follow-the-leader with forced exploration under a budget, as in budgeted and "conservative" bandits (Wu et al. 2016: never
//! below a part of a baseline), restarted when a change is detected (as Liu, Lee and Shroff 2018 do with CUSUM; here two outliers). Each of several
//! choosers plays a best response, with inertia; in congestion games (Rosenthal 1973) that ends in an equilibrium if they do not switch at the
//! same moment, which is what delays are for. No theorem about this combination is claimed: it is played in virtual time, in `tests/rust/adapt.rs`.
//!
//! # What no such rule can do
//!
//! - A change that does not show in the variant in force shows at the next try. Let a variant have taken `r` times longer when last measured
//!   (0.5: half as much again) and let it now gain `g`. With three variants it is tried every `256 · r` executions, so `256 · r · g` executions'
//!   time is lost: 5 % of 500 where `r · g` is 0.1. A bound on tries and a bound on this loss exclude each other beyond that.
//! - A slowdown of the variant in force is seen `steady` executions later at worst, when that one's time is reported. With 16 and reports two
//!   executions late, 500 executions lose 5 % where it takes twice as long, and more beyond that.
//! - Choosers look at their own times alone. What one gains by what others lose is a gain to it, and their equilibrium may be slower than
//!   what they would agree on.

mod chooser;
mod times;
mod variants;
mod world;

pub use chooser::{Choice, Chooser, MAX_VARIANTS};
pub use variants::{variant_name, variants};
pub use world::{Conditions, Game, Moment, Player, Tenant, Trail, World};
