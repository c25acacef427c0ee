//! Simulates players (ranks or streams) that execute plans repeatedly and independently choose among the variants of their plans, on a
//! machine that differs from the modelled one.
//!
//! The duration of an execution depends on the joint choice, that is, on the variants that all players currently execute. For each joint
//! choice and each set of active external loads (tenants), the simulator runs all players at the same time. Each player executes its plan
//! repeatedly, and links are shared max-min fairly. The resulting rates are cached. If other players change their variants during an
//! execution, its rate changes accordingly. The cost of 10,000 executions is therefore 10,000 short steps rather than 10,000 simulations.

use super::chooser::{Chooser, split_mix};
use crate::model::simulate::{Executor, Scenario, SimulationError};
use crate::plan::Plan;
use crate::program::Shape;
use crate::topology::{Machine, ResourceId};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Number of executions of each player (rank or stream) that are simulated to determine the duration of one execution.
const RUNS: usize = 3;
/// Maximum number of executions that are simulated for a player (rank or stream) whose executions are shorter than those of other players.
const MOST_RUNS: usize = 12;
/// Maximum number of joint choices (a variant for each player) that are compared exhaustively. If there are more joint choices, the search
/// changes the choice of one player (rank or stream) at a time.
const ENUMERATED: usize = 81;

/// Rank, or stream of a rank, that executes a plan repeatedly in a simulation and chooses among the variants of the plan.
#[derive(Clone, Debug)]
pub struct Player {
    /// Identifier of the process to which the player (rank or stream) belongs. All players of a process use the same staging memory.
    pub process: usize,
    /// Transfers of the player's plan.
    pub shapes: Vec<Shape>,
    /// Variants of the player's plan. The last one consists of plain copies: one direct copy for each transfer.
    pub variants: Rc<[Plan]>,
}

/// Simulated external load that temporarily uses part of the capacity of some resources.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// Resources that the external load uses.
    pub resources: Vec<ResourceId>,
    /// Fraction of each resource's capacity, greater than 0, that the external load leaves to the simulated ranks and streams.
    pub leaves: f64,
    /// Range of executions of the first player (rank or stream) during which the external load is active.
    pub during: std::ops::Range<u64>,
}

/// Parameters of a simulation in which ranks or streams choose variants of their plans.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Conditions {
    /// Number of executions of the first player (rank or stream) after which the simulation ends.
    pub executions: u64,
    /// Standard deviation of an execution's time, relative to its mean. In addition, one execution in 200 takes twice as long.
    pub noise: f64,
    /// Delay between an execution and the report of its time to the chooser, in executions. One time in 100 is never reported.
    pub late: u64,
    /// Number of executions between two measurements of the active variant while nothing changes; see [`Chooser::new`].
    pub steady: u32,
    /// Seed of all random numbers of the simulation.
    pub seed: u64,
}

impl Default for Conditions {
    fn default() -> Self {
        Conditions { executions: 10_000, noise: 0.02, late: 2, steady: 16, seed: 1 }
    }
}

/// State of a simulation at the end of an execution of the first player (rank or stream): the time, and the amount of data moved so far by
/// all players, without noise.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Moment {
    /// Virtual time since the start of the simulation, seconds.
    pub time: f64,
    /// Number of bytes that all players (ranks or streams) have moved with the variants that their choosers selected.
    pub did: f64,
    /// Number of bytes that all players (ranks or streams) would have moved with the best combination of variants at every moment.
    pub best: f64,
    /// Number of bytes that all players (ranks or streams) would have moved by plain copies (one direct copy for each transfer).
    pub plain: f64,
    /// Number of bytes that all players (ranks or streams) would have moved with the variants that the performance model prefers.
    pub model: f64,
}

/// Result of a simulation in which ranks or streams choose variants of their plans.
#[derive(Clone, Debug)]
pub struct Game {
    /// History of each player (rank or stream).
    pub players: Vec<Trail>,
    /// State at the start of the simulation, and at the end of each execution of the first player (rank or stream).
    pub moments: Vec<Moment>,
    /// Best joint choice (a variant for each rank or stream) for each set of active external loads, in the order in which the sets
    /// occurred.
    pub best: Vec<Vec<u8>>,
}

/// History of one player (rank or stream) in a simulation.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    /// Number of times that the player (rank or stream) executed each variant.
    pub executed: Vec<u64>,
    /// Number of times that the player (rank or stream) executed an inactive variant.
    pub tries: u64,
    /// Changes of the active variant. Each entry holds the time in seconds, the number of the current execution of the first player (rank
    /// or stream), and the new variant.
    pub in_force: Vec<(f64, u64, usize)>,
    /// Executions of inactive variants. Each entry holds the start time in seconds and the variant.
    pub tried: Vec<(f64, usize)>,
}

impl Game {
    /// Returns the fraction of time that all players (ranks or streams) lose relative to the best combination of variants. Covers the
    /// executions `from` to `to` of the first player.
    pub fn lost(&self, from: u64, to: u64) -> f64 {
        let (begin, end) = (self.moments[from as usize], self.moments[to as usize]);
        (end.best - begin.best) / (end.did - begin.did) - 1.0
    }

    /// Returns the largest loss ([`Game::lost`]) over any `executions` successive executions of the first player (rank or stream), and the
    /// number of the first of these executions.
    pub fn worst(&self, executions: u64) -> (f64, u64) {
        let starts = (0..).take_while(|from| from + executions < self.moments.len() as u64);
        let lost = starts.map(|from| (self.lost(from, from + executions), from));
        lost.fold((0.0, 0), |worst, next| if next.0 > worst.0 { next } else { worst })
    }

    /// Returns the number of times that a player (rank or stream) changed its active variant during the executions `from` to `to` of the
    /// first player.
    pub fn switches(&self, player: usize, from: u64, to: u64) -> usize {
        self.players[player].in_force.iter().skip(1).filter(|(_, at, _)| (from..to).contains(at)).count()
    }

    /// Returns the state at the end of the simulation.
    pub fn end(&self) -> Moment {
        self.moments.last().copied().unwrap_or_default()
    }
}

/// Rates at which the players (ranks or streams) progress under one joint choice (a variant for each player).
#[derive(Clone, Debug)]
struct Rates {
    /// Executions per second of each player (rank or stream).
    each: Vec<f64>,
    /// Bytes per second that all players (ranks or streams) move together.
    all: f64,
}

/// Rates with which the simulated choices are compared: those of the best joint choice (a variant for each player), of plain copies (one
/// direct copy for each transfer), and of the variants that the performance model prefers.
struct Reference {
    best: (Vec<u8>, f64),
    plain: f64,
    model: f64,
}

/// Simulated machine with players (ranks or streams that execute plans) and external loads.
pub struct World {
    real: Machine,
    players: Vec<Player>,
    tenants: Vec<Tenant>,
    /// Rates that have already been simulated. The key is the set of active external loads, one bit each, and the joint choice (a variant
    /// for each player).
    known: BTreeMap<(u64, Vec<u8>), Rc<Rates>>,
}

impl World {
    /// Creates a simulation on the machine `real`. External loads beyond the 64th in `tenants` are ignored.
    pub fn new(real: Machine, players: Vec<Player>, mut tenants: Vec<Tenant>) -> World {
        tenants.truncate(64);
        World { real, players, tenants, known: BTreeMap::new() }
    }

    fn rates(&mut self, tenants: u64, joint: &[u8]) -> Result<Rc<Rates>, SimulationError> {
        if let Some(known) = self.known.get(&(tenants, joint.to_vec())) {
            return Ok(known.clone());
        }
        let present = || self.tenants.iter().enumerate().filter(|(at, _)| tenants >> at & 1 != 0).map(|(_, tenant)| tenant);
        let leaves = |resource| present().filter(|of| of.resources.contains(&resource)).map(|of| of.leaves).product();
        let machine = self.real.scaled(leaves);
        let mut seconds = self.seconds(&machine, joint, &vec![RUNS; joint.len()])?;
        let longest = seconds.iter().copied().fold(0.0, f64::max);
        let runs: Vec<usize> = seconds.iter().map(|each| ((RUNS as f64 * longest / each).ceil() as usize).min(MOST_RUNS)).collect();
        if runs.iter().any(|runs| *runs > RUNS + 1) {
            seconds = self.seconds(&machine, joint, &runs)?;
        }
        let each: Vec<f64> = seconds.iter().map(|seconds| seconds.recip()).collect();
        let bytes = self.players.iter().map(|player| player.shapes.iter().map(|shape| shape.bytes as f64).sum::<f64>());
        let all = bytes.zip(&each).map(|(bytes, each)| bytes * each).sum();
        let rates = Rc::new(Rates { each, all });
        self.known.insert((tenants, joint.to_vec()), rates.clone());
        Ok(rates)
    }

    /// Returns the mean time of an execution of each player (rank or stream) in seconds. It is computed from the interval between the end
    /// of the player's first execution and the moment at which one of the players has finished all its executions.
    fn seconds(&self, machine: &Machine, joint: &[u8], runs: &[usize]) -> Result<Vec<f64>, SimulationError> {
        let chosen = || self.players.iter().zip(joint).map(|(player, variant)| (player, &player.variants[usize::from(*variant)]));
        let mut scenario = Scenario::new(machine, chosen().map(|(_, plan)| plan.options.staging_bytes).max().unwrap_or(0));
        let mut executions = Vec::with_capacity(joint.len());
        for (number, (player, plan)) in chosen().enumerate() {
            let bound = scenario.bind_in(player.process, &plan.program, &player.shapes)?;
            let executor = Executor::of(plan.executor);
            executions.push((0..=runs[number]).map(|_| scenario.execute_on(number, bound, executor, number as u32)).collect::<Vec<_>>());
        }
        let run = scenario.run();
        let done = |of: &[crate::model::simulate::ExecutionId], at: usize| run.executions[of[at].0].done;
        let horizon = executions.iter().map(|of| done(of, of.len() - 1)).fold(f64::INFINITY, f64::min);
        let seconds = executions.iter().map(|of| {
            let last = (1..of.len()).rev().find(|at| done(of, *at) <= horizon).unwrap_or(1);
            ((done(of, last) - done(of, 0)) / last as f64).max(1e-9)
        });
        Ok(seconds.collect())
    }

    /// Returns the best joint choice (a variant for each player) and the rates with which the simulated choices are compared. If there are
    /// many joint choices, the search starts from those in which all players choose the same variant, and changes the choice of one player
    /// at a time.
    fn reference(&mut self, tenants: u64) -> Result<Reference, SimulationError> {
        let counts: Vec<u8> = self.players.iter().map(|player| player.variants.len() as u8).collect();
        let all: Option<usize> = counts.iter().try_fold(1_usize, |all, count| all.checked_mul(usize::from(*count)));
        let mut best: (Vec<u8>, f64) = (vec![0; counts.len()], 0.0);
        let better = |world: &mut World, joint: &[u8], than: &mut (Vec<u8>, f64)| -> Result<bool, SimulationError> {
            let rate = world.rates(tenants, joint)?.all;
            let is_better = rate > than.1 * (1.0 + 1e-9);
            if is_better {
                *than = (joint.to_vec(), rate);
            }
            Ok(is_better)
        };
        if all.is_some_and(|all| all <= ENUMERATED) {
            for mut number in 0..all.unwrap_or(0) {
                let digit = |count: &u8| {
                    let digit = number % usize::from(*count);
                    number /= usize::from(*count);
                    digit as u8
                };
                let joint: Vec<u8> = counts.iter().map(digit).collect();
                better(self, &joint, &mut best)?;
            }
        } else {
            for same in 0..counts.iter().copied().max().unwrap_or(1) {
                let mut from = (counts.iter().map(|count| same.min(count - 1)).collect::<Vec<u8>>(), 0.0);
                better(self, &from.0.clone(), &mut from)?;
                let mut improved = true;
                while std::mem::take(&mut improved) {
                    for player in 0..counts.len() {
                        for variant in 0..counts[player] {
                            let mut joint = from.0.clone();
                            joint[player] = variant;
                            improved |= better(self, &joint, &mut from)?;
                        }
                    }
                }
                if from.1 > best.1 {
                    best = from;
                }
            }
        }
        let plain: Vec<u8> = counts.iter().map(|count| count - 1).collect();
        Ok(Reference { plain: self.rates(tenants, &plain)?.all, model: self.rates(tenants, &vec![0; counts.len()])?.all, best })
    }

    /// Returns the largest relative gain that any player (rank or stream) could reach by changing only its own variant, at the given
    /// execution of the first player.
    pub fn gain_alone(&mut self, execution: u64, joint: &[u8]) -> Result<f64, SimulationError> {
        let tenants = self.present(execution);
        let now = self.rates(tenants, joint)?;
        let mut most = 0.0_f64;
        for player in 0..joint.len() {
            for variant in 0..self.players[player].variants.len() {
                let mut other = joint.to_vec();
                other[player] = variant as u8;
                most = most.max(self.rates(tenants, &other)?.each[player] / now.each[player] - 1.0);
            }
        }
        Ok(most)
    }

    /// Returns the set of external loads that are active at the given execution of the first player (rank or stream), one bit each.
    fn present(&self, execution: u64) -> u64 {
        let there = self.tenants.iter().enumerate().filter(|(_, tenant)| tenant.during.contains(&execution));
        there.fold(0, |set, (at, _)| set | 1 << at)
    }

    /// Runs the simulation: all players (ranks or streams) execute their plans and choose variants until the first player has done the
    /// requested number of executions.
    pub fn play(&mut self, conditions: &Conditions) -> Result<Game, SimulationError> {
        let mut random = conditions.seed;
        let mut seats: Vec<Seat> = Vec::with_capacity(self.players.len());
        for player in &self.players {
            let chooser = Chooser::new(&vec![None; player.variants.len()], conditions.steady, split_mix(&mut random))
                .expecting(player.variants.iter().map(|plan| plan.predicted));
            seats.push(Seat {
                played: Trail { executed: vec![0; player.variants.len()], ..Trail::default() },
                chooser,
                random: split_mix(&mut random),
                reports: VecDeque::new(),
                executions: 0,
                current: None,
                left: 0.0,
            });
        }
        let mut joint = vec![0; seats.len()];
        let mut now = Moment::default();
        let mut play = Game { players: Vec::new(), moments: vec![now], best: Vec::new() };
        let mut references: BTreeMap<u64, Reference> = BTreeMap::new();
        let mut tenants = None;
        let mut rates = Rc::new(Rates { each: Vec::new(), all: 0.0 });
        for (seat, joint) in seats.iter_mut().zip(&mut joint) {
            *joint = seat.begin(conditions, now.time, 0);
        }
        let mut changed = true;
        while play.moments.len() <= conditions.executions as usize {
            let there = self.present(play.moments.len() as u64 - 1);
            if tenants.replace(there) != Some(there) {
                changed = true;
                if let std::collections::btree_map::Entry::Vacant(entry) = references.entry(there) {
                    entry.insert(self.reference(there)?);
                }
                play.best.push(references[&there].best.0.clone());
            }
            let reference = &references[&there];
            if std::mem::take(&mut changed) {
                rates = self.rates(there, &joint)?;
            }
            let ends = seats.iter().zip(&rates.each).map(|(seat, rate)| seat.left / rate);
            let (next, seconds) = ends.enumerate().fold((0, f64::INFINITY), |least, next| if next.1 < least.1 { next } else { least });
            now.time += seconds;
            now.did += seconds * rates.all;
            now.best += seconds * reference.best.1;
            now.plain += seconds * reference.plain;
            now.model += seconds * reference.model;
            seats.iter_mut().zip(&rates.each).for_each(|(seat, rate)| seat.left -= seconds * rate);
            seats[next].end(conditions, now.time);
            if next == 0 {
                play.moments.push(now);
            }
            let variant = seats[next].begin(conditions, now.time, play.moments.len() as u64 - 1);
            changed |= std::mem::replace(&mut joint[next], variant) != variant;
        }
        play.players = seats.into_iter().map(|seat| Trail { tries: seat.chooser.tries(), ..seat.played }).collect();
        Ok(play)
    }
}

/// State of one player (rank or stream) during a simulation.
struct Seat {
    chooser: Chooser,
    played: Trail,
    random: u64,
    /// Reports of measured times that the chooser has not received yet. Each entry holds the number of the execution at which the chooser
    /// receives the report, the variant, and the measured time in nanoseconds.
    reports: VecDeque<(u64, usize, u64)>,
    executions: u64,
    /// Execution in progress: its variant, its start time in seconds, and true if the chooser measures it. `None` between two executions.
    current: Option<(usize, f64, bool)>,
    /// Remaining work of the current execution, as a multiple of an execution without noise.
    left: f64,
}

impl Seat {
    /// Starts an execution of this player (rank or stream) and returns the variant that is executed.
    fn begin(&mut self, conditions: &Conditions, now: f64, first_player: u64) -> u8 {
        while let Some(&(_, variant, ns)) = self.reports.front().filter(|report| report.0 <= self.executions) {
            self.reports.pop_front();
            self.chooser.measured(variant, ns);
        }
        let choice = self.chooser.next_execution(self.reports.len());
        let in_force = self.chooser.in_force();
        if self.played.in_force.last().is_none_or(|last| last.2 != in_force) {
            self.played.in_force.push((now, first_player, in_force));
        }
        if choice.variant != in_force {
            self.played.tried.push((now, choice.variant));
        }
        self.played.executed[choice.variant] += 1;
        self.current = Some((choice.variant, now, choice.measure));
        // The sum of four uniform numbers between -1 and 1 has the variance 4/3.
        let noise: f64 = (0..4).map(|_| 2.0 * unit(&mut self.random) - 1.0).sum::<f64>() * (0.75_f64).sqrt() * conditions.noise;
        let outlier = if conditions.noise > 0.0 && unit(&mut self.random) < 0.005 { 2.0 } else { 1.0 };
        self.left = (1.0 + noise).max(0.1) * outlier;
        choice.variant as u8
    }

    fn end(&mut self, conditions: &Conditions, now: f64) {
        self.executions += 1;
        if let Some((variant, began, true)) = self.current.take()
            && unit(&mut self.random) >= 0.01
        {
            self.reports.push_back((self.executions + conditions.late, variant, ((now - began) * 1e9) as u64));
        }
    }
}

/// Returns a uniform random number from 0 to 1.
fn unit(state: &mut u64) -> f64 {
    (split_mix(state) >> 11) as f64 / (1_u64 << 53) as f64
}
