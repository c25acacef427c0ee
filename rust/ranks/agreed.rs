//! Which variant of a node plan each step takes: the same on all ranks, though they ask for their steps at different times and far ahead of streams.
//!
//! Steps are cut into *spans*, each of one variant. A word of memory that all ranks share says how long a span is, and which variant comes after
//! it. The first rank that comes to the end of a span makes it longer or closes it, by a compare-exchange, as its own rule
//! ([`adapt`](crate::adapt)) would have it; the others follow when they come there. All ranks are told the same times, those of the slowest, so
//! their rules agree but for what was not known yet, and that does not matter.
//!
//! Words are used again by turns: a span is closed only where all ranks have come as far as the one whose word the next takes. Until then it is made
//! longer, and no rank ever waits for another.
//!
//! In a capture nobody knows how often the step will run, so the variant is *fixed* then: the span has no end.

use super::lateness::{BY_KERNEL, BY_STREAMS, Lateness};
use crate::adapt::{Choice, Chooser};
use crate::backend::BackendError;
use crate::contexts::Measured;
use crate::contexts::choosing::{Choosing, Known, Measurement, Moments, Reading, STEADY};
use crate::sync::{AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;

/// Spans that have words at a time. Tests come to the end of few ones sooner.
const SPANS: u64 = if cfg!(test) { 4 } else { 64 };

/// Words from what one rank writes to what another does.
const LINE: u64 = 8;

/// The next variant of a span that has no end, and of one that is open.
const FIXED: u64 = 0xff;
const OPEN: u64 = 0;

/// With a next variant: the first step of its span is measured.
const MEASURED: u64 = 0x40;

const NS_BITS: u32 = 48;

/// See [`Spans::ahead`].
const AHEAD: u64 = 32;

/// This rank's view of the spans of a plan.
#[derive(Debug)]
pub(super) struct Spans {
    words: SharedWords,
    /// The span that the last step was in.
    span: u64,
    /// Its first step, and the first that is not known to be in it.
    begin: u64,
    end: u64,
    choice: Choice,
    /// A variant whose spans are made longer by more and more steps at a time, up to [`AHEAD`]: a rank that looks at each step at what another has
    /// written loses about a microsecond, of 7.8 that a step by a kernel takes (two H200).
    ahead: Option<usize>,
}

/// The memory that all ranks share, as one of them has it.
#[derive(Copy, Clone, Debug)]
struct SharedWords {
    base: u64,
    rank: u32,
    ranks: u32,
}

/// What stands in the word of a span.
#[derive(Copy, Clone, Debug, Default)]
struct Word {
    next: u64,
    /// Steps beside the first one.
    more: u64,
}

impl Word {
    const MORE_BITS: u32 = 40;

    fn encode(self, tag: u64) -> u64 {
        tag << 48 | self.next << Word::MORE_BITS | self.more
    }

    fn decode(word: u64) -> Word {
        Word { next: word >> Word::MORE_BITS & 0xff, more: word & ((1 << Word::MORE_BITS) - 1) }
    }
}

/// What a word of a span says that is not about an earlier one.
fn tag(span: u64) -> u64 {
    span / SPANS % 0xffff + 1
}

impl SharedWords {
    fn word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: aligned and in the memory of `Spans::at`, all of which is looked at through atomics alone by every process.
        unsafe { &*with_exposed_provenance(self.base as usize + index as usize * size_of::<AtomicU64>()) }
    }

    fn of_span(&self, span: u64) -> &AtomicU64 {
        self.word(span % SPANS)
    }

    /// The span in which a rank is.
    fn reached(&self, rank: u32) -> &AtomicU64 {
        self.word(SPANS + u64::from(rank) * (LINE + SPANS))
    }

    /// How long a rank has taken for the measured step of a span.
    fn time(&self, rank: u32, span: u64) -> &AtomicU64 {
        self.word(SPANS + u64::from(rank) * (LINE + SPANS) + LINE + span % SPANS)
    }

    fn tell_time(&self, span: u64, ns: u64) {
        self.time(self.rank, span).store(tag(span) << NS_BITS | ns.clamp(1, (1 << NS_BITS) - 1), Ordering::Release);
    }

    /// How long the slowest has taken, once all have told.
    fn slowest(&self, span: u64) -> Reading {
        let times = (0..self.ranks).map(|rank| self.time(rank, span).load(Ordering::Acquire));
        let told = times.map(|time| (time >> NS_BITS == tag(span)).then_some(time & ((1 << NS_BITS) - 1)));
        match told.reduce(|most, time| Some(most?.max(time?))).flatten() {
            Some(ns) => Reading::Known(ns),
            // The words are another span's by now.
            None if self.reached(self.rank).load(Ordering::Relaxed) >= span + SPANS => Reading::Never,
            None => Reading::Later,
        }
    }
}

impl Spans {
    /// Bytes of memory for so many ranks.
    pub fn bytes(ranks: u32) -> u64 {
        (SPANS + u64::from(ranks) * (LINE + SPANS)) * 8
    }

    /// In memory at this address, which was zeros when it was allocated, and that stays mapped for as long as the result is used.
    pub fn at(base: u64, rank: u32, ranks: u32) -> Spans {
        // Span 0 has no steps, and they count from 1.
        let choice = Choice { variant: 0, measure: false };
        Spans { words: SharedWords { base, rank, ranks }, span: 0, begin: 1, end: 1, choice, ahead: None }
    }

    /// What this step takes, which is `wanted` where no rank has come to it before. Steps are asked for in order, from 1.
    pub fn agree(&mut self, step: u64, wanted: Choice) -> Choice {
        while step >= self.end {
            let (raw, now) = self.look();
            match now.next {
                _ if step < self.end => {}
                FIXED => self.end = u64::MAX,
                OPEN => {
                    let is_same = !wanted.measure && !self.choice.measure && wanted.variant == self.choice.variant && self.span > 0;
                    let longer = is_same || !self.has_room();
                    let by = if self.ahead == Some(self.choice.variant) { (now.more + 1).min(AHEAD) } else { 1 };
                    self.change(raw, if longer { Word { more: now.more + by, ..now } } else { Word { next: next_of(wanted), ..now } });
                }
                next => self.enter(next),
            }
        }
        Choice { measure: self.choice.measure && step == self.begin, ..self.choice }
    }

    /// The variant of this step and of all after it, which is `wanted` where that is open; `None` where others have gone on with another.
    pub fn fix(&mut self, step: u64, wanted: usize) -> Option<usize> {
        loop {
            let (raw, now) = self.look();
            match now.next {
                FIXED => {
                    self.end = u64::MAX;
                    return Some(self.choice.variant);
                }
                OPEN if step == self.end && wanted != self.choice.variant && self.has_room() => {
                    self.change(raw, Word { next: next_of(Choice { variant: wanted, measure: false }), ..now });
                }
                OPEN => self.change(raw, Word { next: FIXED, ..now }),
                next if step >= self.end => self.enter(next),
                _ => return None,
            }
        }
    }

    /// The word of the span that this rank is in.
    fn look(&mut self) -> (u64, Word) {
        let raw = self.words.of_span(self.span).load(Ordering::Acquire);
        let now = if raw >> 48 == tag(self.span) { Word::decode(raw) } else { Word::default() };
        self.end = self.begin + u64::from(self.span > 0) + now.more;
        (raw, now)
    }

    /// Unless another rank has been faster.
    fn change(&self, from: u64, to: Word) {
        let word = self.words.of_span(self.span);
        let _ = word.compare_exchange(from, to.encode(tag(self.span)), Ordering::AcqRel, Ordering::Relaxed);
    }

    fn enter(&mut self, next: u64) {
        self.span += 1;
        (self.begin, self.end) = (self.end, self.end + 1);
        self.choice = Choice { variant: ((next & !MEASURED) as usize).saturating_sub(1), measure: next & MEASURED != 0 };
        self.words.reached(self.words.rank).store(self.span, Ordering::Release);
    }

    /// Whether all ranks are beyond the span whose word the next one takes.
    fn has_room(&self) -> bool {
        (0..self.words.ranks).all(|rank| self.words.reached(rank).load(Ordering::Acquire) + SPANS >= self.span + 2)
    }
}

/// The time of a step, which is known when every rank has told its own.
#[derive(Debug)]
struct StepTime {
    words: SharedWords,
    span: u64,
    variant: usize,
    /// Of this rank, until it has told.
    moments: Option<Moments>,
}

impl Measurement for StepTime {
    fn variant(&self) -> usize {
        self.variant
    }

    fn read(&mut self) -> Result<Reading, BackendError> {
        if let Some(moments) = &mut self.moments {
            let Reading::Known(ns) = moments.read()? else { return Ok(Reading::Later) };
            self.words.tell_time(self.span, ns);
            self.moments = None;
        }
        Ok(self.words.slowest(self.span))
    }
}

/// Which variants the steps of a plan take.
#[derive(Debug)]
pub(super) struct StepVariants {
    spans: Spans,
    rule: Rule,
}

/// What this rank wants.
#[derive(Debug)]
enum Rule {
    /// What is fastest as measured.
    Measured(Box<Choosing<StepTime>>),
    /// Of a step that one kernel can do, that or streams, and how many steps each has done.
    Lateness(Lateness, [u64; 2]),
}

impl StepVariants {
    /// Among so many variants, by their times. `seed` is the same on all ranks.
    pub fn measured(spans: Spans, variants: usize, seed: u64) -> StepVariants {
        StepVariants { spans, rule: Rule::Measured(Box::new(Choosing::new(Chooser::new(&vec![None; variants], STEADY, seed)))) }
    }

    /// Of the two forms of a step that one kernel can do.
    pub fn by_lateness(spans: Spans, lateness: Lateness) -> StepVariants {
        StepVariants { spans: Spans { ahead: Some(BY_KERNEL), ..spans }, rule: Rule::Lateness(lateness, [0; 2]) }
    }

    /// What a step takes; steps count from 1.
    pub fn next(&mut self, step: u64) -> Choice {
        let wanted = match &mut self.rule {
            Rule::Measured(choosing) => choosing.choose(),
            Rule::Lateness(lateness, _) => Choice { variant: lateness.next(), measure: false },
        };
        let choice = self.spans.agree(step, wanted);
        self.taken(choice)
    }

    /// What a captured step takes that comes where this one would, and all steps from there on.
    pub fn fix(&mut self, step: u64) -> Option<Choice> {
        let wanted = match &self.rule {
            Rule::Measured(choosing) => choosing.in_force(),
            Rule::Lateness(..) => BY_KERNEL,
        };
        let variant = self.spans.fix(step, wanted)?;
        Some(self.taken(Choice { variant, measure: false }))
    }

    fn taken(&mut self, choice: Choice) -> Choice {
        // Every rank can write the words.
        let within = |variants: usize| Choice { variant: choice.variant.min(variants - 1), ..choice };
        match &mut self.rule {
            Rule::Measured(choosing) => {
                let choice = within(choosing.variants());
                choosing.takes(choice.variant);
                choice
            }
            Rule::Lateness(_, steps) => {
                let choice = within(steps.len());
                steps[choice.variant] += 1;
                choice
            }
        }
    }

    /// The last step is measured, or cannot be.
    pub fn measure(&mut self, moments: Result<Moments, BackendError>) {
        let Spans { words, span, .. } = self.spans;
        if let Rule::Measured(choosing) = &mut self.rule {
            choosing.measure(moments.map(|moments| StepTime { words, span, variant: moments.variant(), moments: Some(moments) }));
        }
    }

    /// As [`Choosing::known`]; nothing where times do not decide.
    pub fn known(&mut self, named: impl Iterator<Item = (&'static str, f64)>) -> Vec<Known> {
        if let Rule::Measured(choosing) = &mut self.rule { choosing.known(named) } else { Vec::new() }
    }

    /// The last medians that were read.
    pub fn medians(&self) -> Measured {
        if let Rule::Measured(choosing) = &self.rule { choosing.medians() } else { Measured::default() }
    }

    /// How many steps streams have done in place of a kernel, where it can do them.
    pub fn by_streams(&self) -> Option<u64> {
        if let Rule::Lateness(_, steps) = &self.rule { Some(steps[BY_STREAMS]) } else { None }
    }
}

fn next_of(choice: Choice) -> u64 {
    (choice.variant as u64 + 1) | if choice.measure { MEASURED } else { 0 }
}

#[cfg(test)]
#[path = "../../tests/rust/agreed.rs"]
mod tests;
