//! Generates random programs of several ranks and computes their results by MPI's rules.
//!
//! The steps of a program have a total order in which ranks take turns, so that the match of a receive from any rank is determined. Without
//! receives from any rank, probes and cancellations, the order of each rank's own steps is sufficient, and ranks need not wait for each
//! other.

use crate::common::Random;
use std::ops::Range;

/// Kind of memory that a step uses.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// GPU memory.
    Device,
    /// Host memory that other processes can map.
    Pinned,
    /// Other host memory.
    Ordinary,
}

/// Messages that a receive accepts.
#[derive(Copy, Clone, Debug)]
pub struct Wanted {
    pub source: Option<u32>,
    pub tag: u64,
    pub mask: u64,
}

#[derive(Copy, Clone, Debug)]
pub enum Action {
    Send {
        to: u32,
        tag: u64,
        bytes: u64,
        metadata: usize,
        memory: Memory,
    },
    Receive {
        wanted: Wanted,
        capacity: u64,
        memory: Memory,
    },
    Probe(Wanted),
    /// Cancels an earlier step of the same rank.
    Cancel(usize),
    /// Waits for a step that has matched or ended.
    Wait(usize),
}

#[derive(Copy, Clone, Debug)]
pub struct Step {
    pub rank: u32,
    pub action: Action,
}

/// Outcome of a send or a receive.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Matches this step.
    Meets(usize),
    /// Receive that is too short for the message of this step.
    Truncated(usize),
    /// Cancelled.
    Cancelled,
}

/// Program with its expected results.
#[derive(Debug)]
pub struct Program {
    pub steps: Vec<Step>,
    /// Outcomes of sends and receives.
    pub fates: Vec<Option<Fate>>,
    /// For probes, the send that they find.
    pub found: Vec<Option<usize>>,
    /// For cancellations, true if they succeed.
    pub cancels: Vec<bool>,
}

/// Parameters for generating programs.
#[derive(Copy, Clone, Debug)]
pub struct Shape {
    pub ranks: u32,
    pub steps: usize,
    /// True if ranks take turns.
    pub in_turns: bool,
    /// Size of the largest message.
    pub most_bytes: u64,
}

impl Wanted {
    fn accepts(&self, source: u32, tag: u64) -> bool {
        self.source.is_none_or(|wanted| wanted == source) && tag & self.mask == self.tag & self.mask
    }
}

fn size(random: &mut Random, most: u64) -> u64 {
    let bytes = match random.below(20) {
        0..3 => 0,
        3..10 => random.below(64),
        10..15 => random.below(3000),
        15..18 => random.below(70_000),
        18 => random.below(300_000),
        _ => random.below(most),
    };
    bytes.min(most)
}

fn memory(random: &mut Random) -> Memory {
    [Memory::Device, Memory::Device, Memory::Pinned, Memory::Ordinary][random.below(4) as usize]
}

fn wanted(random: &mut Random, shape: &Shape) -> Wanted {
    let any = shape.in_turns && random.chance(40);
    let source = (!any).then(|| random.below(shape.ranks.into()) as u32);
    let mask = [u64::MAX, u64::MAX, 0, 1, 6][random.below(5) as usize];
    Wanted { source, tag: random.below(4), mask }
}

/// Operations that wait at a rank.
#[derive(Clone, Debug, Default)]
struct Box {
    /// Posted receives, in order.
    posted: Vec<usize>,
    /// Unmatched sends, in order.
    unexpected: Vec<usize>,
}

impl Program {
    pub fn random(random: &mut Random, shape: &Shape) -> Program {
        let mut program = Program { steps: Vec::new(), fates: Vec::new(), found: Vec::new(), cancels: Vec::new() };
        let mut boxes = vec![Box::default(); shape.ranks as usize];
        // Sends and receives that have not been waited for.
        let mut open: Vec<usize> = Vec::new();
        for _ in 0..shape.steps {
            let rank = random.below(shape.ranks.into()) as u32;
            let action = match random.below(20) {
                0..8 => Action::Send {
                    to: random.below(shape.ranks.into()) as u32,
                    tag: random.below(4),
                    bytes: size(random, shape.most_bytes),
                    metadata: random.below(257) as usize * usize::from(random.chance(50)),
                    memory: memory(random),
                },
                8..16 => {
                    let capacity = if random.chance(20) { size(random, shape.most_bytes) } else { shape.most_bytes.min(400_000) };
                    Action::Receive { wanted: wanted(random, shape), capacity, memory: memory(random) }
                }
                16 | 17 if shape.in_turns => Action::Probe(wanted(random, shape)),
                18 if shape.in_turns && !open.is_empty() => Action::Cancel(open[random.below(open.len() as u64) as usize]),
                _ => {
                    let ended: Vec<usize> = open.iter().copied().filter(|step| program.fates[*step].is_some()).collect();
                    if ended.is_empty() || !shape.in_turns {
                        continue;
                    }
                    Action::Wait(ended[random.below(ended.len() as u64) as usize])
                }
            };
            let rank = match action {
                Action::Cancel(step) | Action::Wait(step) => program.steps[step].rank,
                _ => rank,
            };
            program.push(Step { rank, action }, &mut boxes, &mut open);
        }
        // The remaining operations are cancelled at the end, after all are posted.
        for of in boxes.clone().into_iter().flat_map(|left| left.posted.into_iter().chain(left.unexpected)) {
            let rank = program.steps[of].rank;
            program.push(Step { rank, action: Action::Cancel(of) }, &mut boxes, &mut open);
        }
        for of in open.clone() {
            let rank = program.steps[of].rank;
            program.push(Step { rank, action: Action::Wait(of) }, &mut boxes, &mut open);
        }
        program
    }

    /// Adds a step and applies MPI's rules.
    fn push(&mut self, step: Step, boxes: &mut [Box], open: &mut Vec<usize>) {
        let here = self.steps.len();
        self.steps.push(step);
        self.fates.push(None);
        self.found.push(None);
        self.cancels.push(false);
        let bytes_of = |steps: &[Step], send: usize| match steps[send].action {
            Action::Send { bytes, .. } => bytes,
            _ => unreachable!("a send"),
        };
        let takes = |steps: &[Step], wanted: &Wanted, send: usize| match steps[send].action {
            Action::Send { tag, .. } => wanted.accepts(steps[send].rank, tag),
            _ => unreachable!("a send"),
        };
        match step.action {
            Action::Send { to, bytes, .. } => {
                open.push(here);
                let posted = &mut boxes[to as usize].posted;
                let mut at = 0;
                while at < posted.len() {
                    let receive = posted[at];
                    let Action::Receive { wanted, capacity, .. } = self.steps[receive].action else { unreachable!("a receive") };
                    if !takes(&self.steps, &wanted, here) {
                        at += 1;
                        continue;
                    }
                    posted.remove(at);
                    if bytes <= capacity {
                        self.fates[receive] = Some(Fate::Meets(here));
                        self.fates[here] = Some(Fate::Meets(receive));
                        return;
                    }
                    self.fates[receive] = Some(Fate::Truncated(here));
                }
                boxes[to as usize].unexpected.push(here);
            }
            Action::Receive { wanted, capacity, .. } => {
                open.push(here);
                let unexpected = &mut boxes[step.rank as usize].unexpected;
                match unexpected.iter().position(|send| takes(&self.steps, &wanted, *send)) {
                    Some(at) if bytes_of(&self.steps, unexpected[at]) <= capacity => {
                        let send = unexpected.remove(at);
                        self.fates[here] = Some(Fate::Meets(send));
                        self.fates[send] = Some(Fate::Meets(here));
                    }
                    Some(at) => self.fates[here] = Some(Fate::Truncated(unexpected[at])),
                    None => boxes[step.rank as usize].posted.push(here),
                }
            }
            Action::Probe(wanted) => {
                let unexpected = &boxes[step.rank as usize].unexpected;
                self.found[here] = unexpected.iter().copied().find(|send| takes(&self.steps, &wanted, *send));
            }
            Action::Cancel(of) => {
                self.cancels[here] = self.fates[of].is_none();
                if self.fates[of].is_none() {
                    self.fates[of] = Some(Fate::Cancelled);
                    boxes.iter_mut().for_each(|one| {
                        one.posted.retain(|step| *step != of);
                        one.unexpected.retain(|step| *step != of);
                    });
                }
            }
            Action::Wait(of) => open.retain(|step| *step != of),
        }
    }

    /// Returns the number of matched sends.
    pub fn messages(&self) -> usize {
        let is_met = |step: &usize| matches!((self.steps[*step].action, self.fates[*step]), (Action::Send { .. }, Some(Fate::Meets(_))));
        (0..self.steps.len()).filter(is_met).count()
    }

    /// Returns the steps at the end, before which all operations are posted.
    pub fn ending(&self) -> Range<usize> {
        let is_post = |step: &Step| matches!(step.action, Action::Send { .. } | Action::Receive { .. });
        self.steps.iter().rposition(is_post).map_or(0, |last| last + 1)..self.steps.len()
    }
}
