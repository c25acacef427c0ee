//! Generates random programs of several ranks and computes their results by MPI's rules.
//!
//! A program is a list of steps of all ranks. If it has receives from any rank, probes or cancellations, the ranks execute the list in
//! order, one step at a time, so that all matches are determined. Otherwise the order of each rank's own steps determines the matches, and
//! ranks need not wait for each other.

use crate::common::Random;
use std::ops::Range;

/// Kind of memory that holds a message.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// GPU memory.
    Device,
    /// Pinned host memory, which other processes can map.
    Pinned,
    /// Pageable host memory.
    Ordinary,
}

/// Messages that a receive accepts: their source, tag and tag mask.
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
    /// Cancels the operation of an earlier step of the same rank.
    Cancel(usize),
    /// Waits for the operation of an earlier step, which has matched or ended.
    Wait(usize),
}

#[derive(Copy, Clone, Debug)]
pub struct Step {
    pub rank: u32,
    pub action: Action,
}

/// Expected outcome of a send or a receive.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The operation matches that of this step.
    Meets(usize),
    /// The receive is too short for the message of this step.
    Truncated(usize),
    /// The operation is cancelled.
    Cancelled,
}

/// Random program with the expected outcome of each step.
#[derive(Debug)]
pub struct Program {
    pub steps: Vec<Step>,
    /// Expected outcome of each step that is a send or a receive; `None` for other steps.
    pub fates: Vec<Option<Fate>>,
    /// One value for each step: if the step is a probe, the step of the send that it must find, or `None` if it must find none.
    pub found: Vec<Option<usize>>,
    /// One value for each step: true if the step is a cancellation that must succeed.
    pub cancels: Vec<bool>,
}

/// Parameters with which programs are generated.
#[derive(Copy, Clone, Debug)]
pub struct Shape {
    pub ranks: u32,
    pub steps: usize,
    /// True if the ranks execute the steps one at a time, in the order of the list.
    pub in_turns: bool,
    /// Largest size of a message in bytes.
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

/// Operations of one rank that have not matched yet.
#[derive(Clone, Debug, Default)]
struct Box {
    /// Receives that have not matched, in posting order.
    posted: Vec<usize>,
    /// Sends to this rank that have not matched, in order.
    unexpected: Vec<usize>,
}

impl Program {
    pub fn random(random: &mut Random, shape: &Shape) -> Program {
        let mut program = Program { steps: Vec::new(), fates: Vec::new(), found: Vec::new(), cancels: Vec::new() };
        let mut boxes = vec![Box::default(); shape.ranks as usize];
        // Steps of sends and receives for which the program has not waited yet.
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
        // At the end, after all steps, the remaining operations are cancelled.
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

    /// Appends a step, and determines its outcome by MPI's rules.
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

    /// Returns the number of sends that match.
    pub fn messages(&self) -> usize {
        let is_met = |step: &usize| matches!((self.steps[*step].action, self.fates[*step]), (Action::Send { .. }, Some(Fate::Meets(_))));
        (0..self.steps.len()).filter(is_met).count()
    }

    /// Returns the range of final steps, before which all ranks must have posted their operations.
    pub fn ending(&self) -> Range<usize> {
        let is_post = |step: &Step| matches!(step.action, Action::Send { .. } | Action::Receive { .. });
        self.steps.iter().rposition(is_post).map_or(0, |last| last + 1)..self.steps.len()
    }
}
