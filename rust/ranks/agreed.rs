//! Makes all ranks agree on the plan variant that each step uses. A step is one execution of a node plan (plan that several ranks execute
//! together). Ranks reach a step at different times and enqueue steps long before they run, but all must execute a step in the same
//! variant.
//!
//! Steps are grouped into *spans*; all steps of a span use one variant. For each span there is a word in memory that all ranks share. The
//! word holds the length of the span and the variant of the next span. The first rank that reaches the end of a span either extends the
//! span or closes it, as the rank's own selection rule ([`adapt`](crate::adapt)) requires. The rank writes this decision to the word by a
//! compare-exchange. The other ranks follow the decision when they reach that step. All ranks use the same measured time for a step, that
//! of the slowest rank. The rules of all ranks therefore agree, unless some ranks have not read the latest times yet. Such a difference is
//! harmless, because the word decides.
//!
//! The words form a ring buffer. Each new span reuses the word of an old span. The current span is therefore closed only after all ranks
//! have left that old span. Until then the current span is extended, so that no rank ever waits for another.
//!
//! During stream capture the number of later launches is unknown. The variant of a captured step is therefore *fixed*: its span has no end.

use super::lateness::{BY_KERNEL, BY_STREAMS, Lateness};
use crate::adapt::{Choice, Chooser};
use crate::backend::BackendError;
use crate::contexts::Measured;
use crate::contexts::choosing::{Choosing, Known, Measurement, Moments, Reading, STEADY};
use crate::sync::{AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;

/// Number of spans (groups of successive steps with one plan variant) that have a shared word at the same time. Tests use fewer, so that
/// they reach the end of the ring buffer sooner.
const SPANS: u64 = if cfg!(test) { 4 } else { 64 };

/// Distance, in 8-byte words, between data written by different ranks, so that they do not share a cache line.
const LINE: u64 = 8;

/// Value of [`Word::next`] for a span (group of successive steps) that never ends, because the plan variant is fixed.
const FIXED: u64 = 0xff;
/// Value of [`Word::next`] for a span (group of successive steps) that is still open, so that a rank may extend or close it.
const OPEN: u64 = 0;

/// Bit of [`Word::next`] that is set if the ranks measure the first step of the next span (group of successive steps).
const MEASURED: u64 = 0x40;

const NS_BITS: u32 = 48;

/// Maximum number of steps by which one call extends a span (group of successive steps). See [`Spans::ahead`].
const AHEAD: u64 = 32;

/// Record, on this rank, of the spans of a plan. A span is a group of successive steps for which all ranks use one plan variant.
#[derive(Debug)]
pub(super) struct Spans {
    words: SharedWords,
    /// Number of the span (group of successive steps) that contains the last step that this rank has reached.
    span: u64,
    /// Number of the first step of the current span (group of successive steps). The current span contains the last step that this rank has
    /// reached.
    begin: u64,
    /// Number of the last step that is known to belong to the current span (group of successive steps), plus 1.
    end: u64,
    choice: Choice,
    /// Plan variant whose spans (groups of successive steps) are extended by a growing number of steps at a time, up to [`AHEAD`]. `None`
    /// if spans are extended by one step at a time. Reading a word that another rank has written costs about 1 us per step. For comparison,
    /// a step that a kernel executes takes 7.8 us in total (two H200).
    ahead: Option<usize>,
}

/// Memory that all ranks share and that contains the words of the spans (groups of successive steps), as mapped in this process.
#[derive(Copy, Clone, Debug)]
struct SharedWords {
    base: u64,
    rank: u32,
    ranks: u32,
}

/// Decoded content of the shared word of a span (group of successive steps).
#[derive(Copy, Clone, Debug, Default)]
struct Word {
    next: u64,
    /// Number of steps that a span (group of successive steps) contains in addition to its first step.
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

/// Returns the tag that identifies a span (group of successive steps) in its shared word. Spans reuse words, so a word with another tag
/// belongs to an earlier span.
fn tag(span: u64) -> u64 {
    span / SPANS % 0xffff + 1
}

impl SharedWords {
    fn word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: the address is aligned and in the memory passed to `Spans::at`, which every process accesses only through atomics.
        unsafe { &*with_exposed_provenance(self.base as usize + index as usize * size_of::<AtomicU64>()) }
    }

    fn of_span(&self, span: u64) -> &AtomicU64 {
        self.word(span % SPANS)
    }

    /// Returns the shared word in which `rank` records the number of the span (group of successive steps) that it has reached.
    fn reached(&self, rank: u32) -> &AtomicU64 {
        self.word(SPANS + u64::from(rank) * (LINE + SPANS))
    }

    /// Returns the shared word in which `rank` records the time that it took for the measured step of a span (group of successive steps).
    fn time(&self, rank: u32, span: u64) -> &AtomicU64 {
        self.word(SPANS + u64::from(rank) * (LINE + SPANS) + LINE + span % SPANS)
    }

    fn tell_time(&self, span: u64, ns: u64) {
        self.time(self.rank, span).store(tag(span) << NS_BITS | ns.clamp(1, (1 << NS_BITS) - 1), Ordering::Release);
    }

    /// Returns the time of the slowest rank for the measured step of a span (group of successive steps). Returns [`Reading::Later`] until
    /// all ranks have reported their times, and [`Reading::Never`] if a later span has reused the words that contained the times.
    fn slowest(&self, span: u64) -> Reading {
        let times = (0..self.ranks).map(|rank| self.time(rank, span).load(Ordering::Acquire));
        let told = times.map(|time| (time >> NS_BITS == tag(span)).then_some(time & ((1 << NS_BITS) - 1)));
        match told.reduce(|most, time| Some(most?.max(time?))).flatten() {
            Some(ns) => Reading::Known(ns),
            // The words were already reused for a later span.
            None if self.reached(self.rank).load(Ordering::Relaxed) >= span + SPANS => Reading::Never,
            None => Reading::Later,
        }
    }
}

impl Spans {
    /// Returns the size in bytes of the memory that `ranks` ranks share.
    pub fn bytes(ranks: u32) -> u64 {
        (SPANS + u64::from(ranks) * (LINE + SPANS)) * 8
    }

    /// Creates the record for rank `rank` before the first step. The memory at address `base` must be zero when it is allocated, and must
    /// stay mapped while the record is used.
    pub fn at(base: u64, rank: u32, ranks: u32) -> Spans {
        // Span 0 contains no steps, because steps are numbered from 1.
        let choice = Choice { variant: 0, measure: false };
        Spans { words: SharedWords { base, rank, ranks }, span: 0, begin: 1, end: 1, choice, ahead: None }
    }

    /// Returns the plan variant on which the ranks agree for step number `step`. If this rank is the first to reach the step, the result is
    /// `wanted`. Steps must be passed in order, starting with 1.
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

    /// Fixes the plan variant of step number `step` and of all later steps, and returns it. The result is `wanted` if no rank has decided
    /// yet. Returns `None` if other ranks have already continued with another variant.
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

    /// Reads the shared word of the current span (group of successive steps). Returns the raw value and the decoded content.
    fn look(&mut self) -> (u64, Word) {
        let raw = self.words.of_span(self.span).load(Ordering::Acquire);
        let now = if raw >> 48 == tag(self.span) { Word::decode(raw) } else { Word::default() };
        self.end = self.begin + u64::from(self.span > 0) + now.more;
        (raw, now)
    }

    /// Writes `to` to the shared word of the current span (group of successive steps). Does nothing if another rank has changed the word
    /// since its value `from` was read.
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

    /// True if a shared word is available for the next span (group of successive steps), because all ranks have left the span that used the
    /// word before.
    fn has_room(&self) -> bool {
        (0..self.words.ranks).all(|rank| self.words.reached(rank).load(Ordering::Acquire) + SPANS >= self.span + 2)
    }
}

/// Time that the slowest rank has taken for a measured communication step. It is known once every rank has reported its own time.
#[derive(Debug)]
struct StepTime {
    words: SharedWords,
    span: u64,
    variant: usize,
    /// Start and end of the measured communication step on this rank. `None` after this rank has reported its time.
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

/// Rule that selects the plan variant of each communication step, in agreement with all ranks.
#[derive(Debug)]
pub(super) struct StepVariants {
    spans: Spans,
    rule: Rule,
}

/// Rule by which this rank proposes the plan variant of the next communication step.
#[derive(Debug)]
enum Rule {
    /// Proposes the plan variant with the shortest measured time.
    Measured(Box<Choosing<StepTime>>),
    /// Proposes that either a kernel or streams execute the next step. Used if one kernel can execute all operations of the rank in a step.
    /// The array contains the number of steps that kernels have executed, and the number that streams have executed.
    Lateness(Lateness, [u64; 2]),
}

impl StepVariants {
    /// Creates a rule that selects among plan variants by measured time. `predicted` contains the time in seconds that the model predicts
    /// for each variant. It and `seed` must be equal on all ranks.
    pub fn measured(spans: Spans, predicted: &[f64], seed: u64) -> StepVariants {
        let chooser = Chooser::new(&vec![None; predicted.len()], STEADY, seed).expecting(predicted.iter().copied());
        StepVariants { spans, rule: Rule::Measured(Box::new(Choosing::new(chooser))) }
    }

    /// Creates a rule that selects for each step whether a kernel or streams execute it. Used if one kernel can execute all operations of
    /// the rank in a step.
    pub fn by_lateness(spans: Spans, lateness: Lateness) -> StepVariants {
        StepVariants { spans: Spans { ahead: Some(BY_KERNEL), ..spans }, rule: Rule::Lateness(lateness, [0; 2]) }
    }

    /// Returns the plan variant for step number `step`, and a boolean that is true if the step is measured. Steps are numbered from 1.
    pub fn next(&mut self, step: u64) -> Choice {
        let wanted = match &mut self.rule {
            Rule::Measured(choosing) => choosing.choose(),
            Rule::Lateness(lateness, _) => Choice { variant: lateness.next(), measure: false },
        };
        let choice = self.spans.agree(step, wanted);
        self.taken(choice)
    }

    /// Fixes the plan variant of a step that is being captured, and of all later steps, and returns it. Returns `None` if other ranks have
    /// already continued with another variant.
    pub fn fix(&mut self, step: u64) -> Option<Choice> {
        let wanted = match &self.rule {
            Rule::Measured(choosing) => choosing.captured(),
            Rule::Lateness(..) => BY_KERNEL,
        };
        let variant = self.spans.fix(step, wanted)?;
        Some(self.taken(Choice { variant, measure: false }))
    }

    fn taken(&mut self, choice: Choice) -> Choice {
        // Every rank can write the shared words, so the values read from them are bounded.
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

    /// Records the start and end of the last step, or the reason why they could not be measured.
    pub fn measure(&mut self, moments: Result<Moments, BackendError>) {
        let Spans { words, span, .. } = self.spans;
        if let Rule::Measured(choosing) = &mut self.rule {
            choosing.measure(moments.map(|moments| StepTime { words, span, variant: moments.variant(), moments: Some(moments) }));
        }
    }

    /// Returns the measured times of the plan variants ([`Choosing::known`]). The list is empty if the rule does not depend on times.
    pub fn known(&mut self, named: impl Iterator<Item = (&'static str, f64)>) -> Vec<Known> {
        if let Rule::Measured(choosing) = &mut self.rule { choosing.known(named) } else { Vec::new() }
    }

    /// Returns the median time of each plan variant, as last computed.
    pub fn medians(&self) -> Measured {
        if let Rule::Measured(choosing) = &self.rule { choosing.medians() } else { Measured::default() }
    }

    /// Returns the number of steps that streams have executed although a kernel could have executed them. `None` if no kernel can execute a
    /// step.
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
