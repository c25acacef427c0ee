//! The rule that chooses among the variants of a plan.

use super::times::{News, Times};

/// The most variants of a plan.
pub const MAX_VARIANTS: usize = 4;

/// The part of the time spent that tries of variants not in force may cost. Less than 1 %, the rest is for what a try turns out to cost more.
const TRIES: f64 = 1.0 / 128.0;

/// Executions of the variant in force whose time may be saved up for tries.
const SAVED: f64 = 8.0;

/// Executions of the variant in force whose time may be spent in advance: where a change was noticed, and else, because tries are at random times.
const ADVANCE: f64 = 6.0;
const LITTLE: f64 = 2.0;

/// To come into force a variant has to be faster by so many standard errors, and one that takes more of what others use by this part at least:
/// what it gains, others may lose.
const SIGNIFICANT: f64 = 2.0;
const LEAST_GAIN: f64 = 0.02;

/// Executions between tries of a variant that seems to be the faster one.
const PROMISING: u64 = 12;

/// Tries of other variants are as many times as seldom as measuring the one in force, or more seldom.
const SELDOM: u64 = 4;

/// Executions after which the time of a try is no longer waited for, and up to which tries are not saved up for: what the first ones lose
/// while nothing is known is lost once.
const OVERDUE: u64 = 32;

/// A time of the variant in force that is so many times what was expected is acted on before another one confirms it.
const ALARM: f64 = 1.25;

/// Times of the variant in force that are as expected before it is measured half as often.
const QUIET: u32 = 8;

/// Switches that are not delayed; each further one doubles the mean delay, from this many executions on.
const FREE_SWITCHES: u32 = 3;
const DELAY: u64 = 16;
const MOST_SWITCHES: u32 = 9;

/// Executions after which one switch is forgotten.
const FORGOTTEN: u64 = 1024;

/// What to execute.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index of the variant.
    pub variant: usize,
    /// Whether to measure this execution, and to report its time with [`Chooser::measured`].
    pub measure: bool,
}

/// Chooses among the variants of one plan: see [the module](super).
#[derive(Clone, Debug)]
pub struct Chooser {
    /// Executions so far, and the one at which something is to be thought about: in between nothing is.
    tick: u64,
    event: u64,
    in_force: usize,
    variants: usize,
    times: [Times; MAX_VARIANTS],
    /// When each is tried next.
    due: [u64; MAX_VARIANTS],
    /// For each a try whose time is not known yet: since when, and what was set aside for it.
    pending: [Option<(u64, f64)>; MAX_VARIANTS],
    /// Executions whose tries cost nothing.
    free: u64,
    /// Nanoseconds that tries may cost, and up to which execution that is counted.
    budget: f64,
    counted: u64,
    /// When the variant in force is measured next, after how many executions again, at most, and how many times were as expected.
    measure_at: u64,
    period: u64,
    steady: u64,
    quiet: u32,
    /// The last time of the variant in force was much longer than expected: until that is settled, the one that seems fastest is executed.
    alarm: bool,
    /// Switches that are not forgotten, and since when.
    recent: u32,
    recent_since: u64,
    /// The variant that is to come into force if it is still faster at this execution.
    intent: Option<(usize, u64)>,
    switches: u64,
    tries: u64,
    random: u64,
}

impl Chooser {
    /// For as many variants as `known` has entries, 1 to [`MAX_VARIANTS`]; further ones are never chosen. An entry is the median time of the
    /// variant in an earlier run, in nanoseconds, where there is one. The fastest of those is in force at first, else variant 0.
    ///
    /// `steady` is the number of executions from one measured one to the next while nothing changes. Choosers that share a machine and
    /// choose alone need different seeds; those that are told the same and have the same seed choose the same.
    pub fn new(known: &[Option<u64>], steady: u32, seed: u64) -> Chooser {
        let variants = known.len().clamp(1, MAX_VARIANTS);
        let mut times = [Times::new(); MAX_VARIANTS];
        for (times, median) in times.iter_mut().zip(known) {
            *times = median.filter(|median| *median > 0).map_or(*times, Times::known);
        }
        let fastest = (0..variants).filter(|v| times[*v].count() > 0).min_by_key(|v| times[*v].median());
        Chooser {
            tick: 0,
            event: if variants > 1 { 0 } else { u64::MAX },
            in_force: fastest.unwrap_or(0),
            variants,
            times,
            // The plain copies first: they are what the caller would have done.
            due: std::array::from_fn(|v| variants.saturating_sub(v) as u64),
            pending: [None; MAX_VARIANTS],
            free: OVERDUE,
            budget: 0.0,
            counted: 0,
            measure_at: 0,
            period: 4,
            steady: u64::from(steady.max(1)),
            quiet: 0,
            alarm: variants > 1,
            recent: 0,
            recent_since: 0,
            intent: None,
            switches: 0,
            tries: 0,
            random: seed,
        }
    }

    /// The same where plain copies are what others expect, who copy at the same time and begin with them as well: they are in force at first,
    /// and every try is paid for. Not all try at the same moment.
    pub fn among_others(variants: usize, steady: u32, seed: u64) -> Chooser {
        let mut chooser = Chooser::new(&vec![None; variants], steady, seed);
        (chooser.in_force, chooser.alarm, chooser.free) = (chooser.variants - 1, false, 0);
        // One after the other, so that what the first try costs is known before the next.
        let mut at = 0;
        for variant in (0..chooser.in_force).rev() {
            at += chooser.around(OVERDUE);
            chooser.due[variant] = at;
        }
        chooser
    }

    /// What the next execution is to be. Mostly a count and a comparison.
    #[inline]
    pub fn next_execution(&mut self) -> Choice {
        self.tick += 1;
        if self.tick < self.event {
            return Choice { variant: self.in_force, measure: false };
        }
        self.think()
    }

    /// A measured execution of `variant` took `ns`. Executions may be reported late, in any order, or never.
    pub fn measured(&mut self, variant: usize, ns: u64) {
        if variant >= self.variants || self.variants == 1 || ns == 0 {
            return;
        }
        self.count();
        let before = self.times[variant].median();
        let news = self.times[variant].add(ns);
        self.budget += self.pending[variant].take().map_or(0.0, |pending| pending.1);
        if variant == self.in_force {
            self.in_force_measured(news, ns, before);
        } else {
            if self.tick > self.free {
                self.budget -= self.cost_of(ns);
            }
            let is_faster = ns < before;
            match news {
                // Slower than it was is no news: it is not in force.
                News::Changed if is_faster => self.noticed(),
                News::Outlier if is_faster => self.due[variant] = self.tick,
                _ => self.due[variant] = self.tick + self.interval(variant),
            }
        }
        self.decide();
        // The next execution finds out when there is something to do.
        self.event = 0;
    }

    /// How many there are.
    pub fn variants(&self) -> usize {
        self.variants
    }

    /// The variant that is executed but for tries.
    pub fn in_force(&self) -> usize {
        self.in_force
    }

    /// What an execution takes that nobody measures although it is to be: the plain copies while nothing is known, which many executions may
    /// be asked for before the first time is.
    pub fn unmeasured(&self) -> usize {
        if self.alarm { self.seems_fastest() } else { self.in_force }
    }

    /// Median of the last measured times of a variant, nanoseconds: what a later run may start from.
    pub fn median(&self, variant: usize) -> Option<u64> {
        self.times.get(variant).filter(|times| times.count() > 0).map(Times::median)
    }

    /// How often another variant came into force.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Executions of variants that were not in force.
    pub fn tries(&self) -> u64 {
        self.tries
    }

    #[cold]
    fn think(&mut self) -> Choice {
        self.count();
        for variant in 0..self.variants {
            if self.pending[variant].take_if(|pending| self.tick > pending.0 + OVERDUE).is_some() {
                self.due[variant] = self.tick + self.interval(variant);
            }
        }
        let is_measured = self.tick >= self.measure_at;
        let choice = if self.alarm && is_measured {
            Choice { variant: self.in_force, measure: true }
        } else if let Some(variant) = self.try_now() {
            Choice { variant, measure: true }
        } else if self.alarm {
            Choice { variant: self.seems_fastest(), measure: true }
        } else {
            Choice { variant: self.in_force, measure: is_measured }
        };
        if choice.variant == self.in_force {
            if choice.measure {
                self.measure_at = self.tick + self.period;
            }
        } else {
            self.tries += 1;
        }
        let others = (0..self.variants).filter(|v| *v != self.in_force);
        let next = others.map(|v| self.pending[v].map_or(self.due[v], |pending| pending.0 + OVERDUE + 1)).min();
        let next = if self.alarm { 0 } else { next.unwrap_or(u64::MAX).min(self.measure_at) };
        self.event = next.max(self.tick + 1);
        choice
    }

    /// The variant that this execution tries, if one is due and can be afforded.
    fn try_now(&mut self) -> Option<usize> {
        let due = (0..self.variants).filter(|&v| v != self.in_force && self.pending[v].is_none() && self.due[v] <= self.tick);
        let variant = due.min_by_key(|&v| self.due[v])?;
        let times = &self.times[variant];
        let unit = self.unit();
        let cost = match times.count() {
            0 if self.tick <= self.free => 0.0,
            // What it costs is to be known before another one is tried.
            0 if self.pending.iter().any(Option::is_some) => return None,
            0 => unit,
            _ => self.cost_of(times.expected()),
        };
        // Little is known of it, or something has changed.
        let advance = if times.count() < 3 || !times.fresh { ADVANCE * unit } else { LITTLE * unit };
        if cost > 0.0 && cost > self.budget + advance {
            let wait = ((cost - self.budget - advance) / (TRIES * unit)).min(1e6) as u64;
            self.due[variant] = self.tick + 1 + wait;
            return None;
        }
        self.budget -= cost;
        self.pending[variant] = Some((self.tick, cost));
        Some(variant)
    }

    /// The variant with the least time, by what was seen last; the plain copies while nothing is known of them.
    fn seems_fastest(&self) -> usize {
        let is_open = |&v: &usize| self.times[v].count() > 0 || v == self.variants - 1;
        (0..self.variants).filter(is_open).min_by_key(|&v| self.times[v].expected()).unwrap_or(self.in_force)
    }

    /// What an execution of the variant in force takes.
    fn unit(&self) -> f64 {
        self.times[self.in_force].median() as f64
    }

    /// What an execution of `ns` loses to one of the variant in force.
    fn cost_of(&self, ns: u64) -> f64 {
        ns.saturating_sub(self.times[self.in_force].expected()) as f64
    }

    /// Executions until a variant is tried again: its tries cost their part of the budget.
    fn interval(&mut self, variant: usize) -> u64 {
        let (times, force) = (self.times[variant], self.times[self.in_force]);
        let mean = if times.count() < 3 {
            1
        } else if times.median() <= force.median() {
            PROMISING
        } else {
            let others = (self.variants - 1) as f64;
            let each = others * self.cost_of(times.median()) / (TRIES * force.median() as f64);
            (SELDOM * self.steady).max(each.min(1e6) as u64)
        };
        self.around(mean)
    }

    /// Time that passed pays for tries.
    fn count(&mut self) {
        let unit = self.unit();
        let passed = (self.tick - self.counted) as f64;
        self.counted = self.tick;
        self.budget = (self.budget + TRIES * passed * unit).min(SAVED * unit);
        let forgotten = (self.tick - self.recent_since) / FORGOTTEN;
        self.recent = self.recent.saturating_sub(forgotten.min(u64::from(u32::MAX)) as u32);
        self.recent_since += forgotten * FORGOTTEN;
    }

    fn in_force_measured(&mut self, news: News, ns: u64, before: u64) {
        let is_alarming = ns as f64 > ALARM * before as f64;
        match news {
            News::Changed => {
                self.alarm = is_alarming && self.budget > -SAVED * self.unit();
                self.noticed();
            }
            // Not where many alarms were false: the budget is in debt by what they cost.
            News::Outlier if is_alarming && !self.alarm && self.budget > -SAVED * self.unit() => {
                self.alarm = true;
                self.noticed();
            }
            News::Outlier => self.dense(),
            News::Expected => {
                if self.times[self.in_force].count() < 3 {
                    return self.dense();
                }
                self.alarm = false;
                self.quiet += 1;
                if self.quiet >= QUIET {
                    self.quiet = 0;
                    self.period = (2 * self.period).min(self.steady);
                }
            }
        }
    }

    /// Times have changed: what is known of all variants is old. They are tried as soon as can be afforded, after the one in force and in an
    /// order of this chooser's own.
    fn noticed(&mut self) {
        for variant in 0..self.variants {
            self.times[variant].fresh = false;
            self.due[variant] = self.tick + 2 + split_mix(&mut self.random) % self.variants as u64;
        }
        self.measure_at = self.tick;
        self.dense();
    }

    /// Measures the variant in force as often as makes sense: while another one seems to be faster, now and then.
    fn dense(&mut self) {
        (self.period, self.quiet) = (if self.alarm { 4 } else { 1 }, 0);
        self.measure_at = self.measure_at.min(self.tick + self.period - 1);
    }

    /// Whether `variant` is faster than the one in force by more than noise, as far as times since the last change tell.
    fn is_faster(&self, variant: usize) -> bool {
        let (times, force) = (&self.times[variant], &self.times[self.in_force]);
        let error = (times.error().powi(2) + force.error().powi(2)).sqrt();
        let is_known = |times: &Times| times.fresh && times.count() >= 2;
        let least: f64 = if variant < self.in_force { LEAST_GAIN } else { 0.0 };
        is_known(times) && is_known(force) && (times.median() as f64) < self.unit() * (1.0 - least.max(SIGNIFICANT * error))
    }

    /// Lets the fastest variant come into force. After several switches in a short time it has to be faster still after a random delay: others
    /// who share the machine may have switched meanwhile, and made it slow.
    fn decide(&mut self) {
        let faster = (0..self.variants).filter(|&v| v != self.in_force && self.is_faster(v));
        let Some(variant) = faster.min_by_key(|&v| self.times[v].median()) else {
            let is_open = |v: usize| !self.times[v].fresh || !self.times[self.in_force].fresh;
            self.intent = self.intent.filter(|&(v, at)| self.tick < at || is_open(v));
            return;
        };
        match self.intent {
            Some((_, at)) if self.tick < at => return,
            None if self.recent >= FREE_SWITCHES => {
                let at = self.tick + 1 + self.around(DELAY << (self.recent - FREE_SWITCHES));
                self.times.iter_mut().for_each(|times| times.fresh = false);
                (self.due[variant], self.measure_at) = (at, self.measure_at.min(at - 1));
                self.intent = Some((variant, at));
                return;
            }
            _ => {}
        }
        (self.intent, self.alarm) = (None, false);
        self.in_force = variant;
        self.switches += 1;
        self.recent = (self.recent + 1).min(MOST_SWITCHES);
        self.budget = self.budget.clamp(-SAVED * self.unit(), SAVED * self.unit());
        self.dense();
        for other in 0..self.variants {
            if self.times[other].fresh {
                self.due[other] = self.tick + self.interval(other);
            }
        }
    }

    /// A number of executions with this mean, from half to one and a half of it: choosers that choose alone must not do so in step.
    fn around(&mut self, mean: u64) -> u64 {
        mean / 2 + split_mix(&mut self.random) % (mean + 1)
    }
}

/// The next random number: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub(super) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
