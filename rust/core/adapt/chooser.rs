//! Chooses which variant of a plan each execution uses.

use super::times::{News, Times};

/// Maximum number of variants of a plan.
pub const MAX_VARIANTS: usize = 4;

/// Maximum number of measured executions whose times are not known yet. While this number is reached, no further execution is measured.
/// Half of this number is reserved for trial executions.
pub const MOST_UNDER_WAY: usize = 8;

/// Number of executions without any reported time after which the caller is assumed to enqueue far ahead of the device. Each inactive
/// variant then gets a trial execution immediately. These trial executions cost little compared with the time of all queued executions.
/// Without them, the chooser could decide about the variant again only after all queued executions have completed.
const AHEAD: u64 = 16;

/// Fraction of the elapsed time that trial executions of inactive variants may cost. The goal is 1 %. The value is lower, because some
/// trial executions cost more than expected.
const TRIES: f64 = 1.0 / 128.0;

/// Maximum time that the budget for trial executions can accumulate, as a multiple of the active variant's execution time.
const SAVED: f64 = 8.0;

/// Time by which trial executions may exceed their budget if a change of execution times was detected, or if the tried variant has fewer than
/// three measured times and seems hardly slower than the active one. A multiple of the active variant's execution time. It is above 0,
/// because trial executions are made at random moments.
const ADVANCE: f64 = 6.0;
/// Time by which trial executions may exceed their budget if the tried variant has fewer than three measured times and seems slower than the
/// active one by more than a fifth. A multiple of the active variant's execution time.
const DOUBTFUL: f64 = 1.25;
/// Time by which trial executions may exceed their budget in all other cases. A multiple of the active variant's execution time.
const LITTLE: f64 = 2.0;

/// Number of standard errors of the measured times by which another variant must be faster before it becomes the active one.
const SIGNIFICANT: f64 = 2.0;
/// Fraction of the execution time that another variant must save before it becomes the active one. Applies only to a variant that uses
/// links of other GPUs more heavily, because other users of these links may then lose what the variant gains.
const LEAST_GAIN: f64 = 0.02;

/// Minimum gain over the plain copies, as a fraction, that the model must predict for a variant that the first execution uses. Also the
/// maximum predicted loss, as a fraction of the active variant's time, at which the first trial execution of a variant does not count against
/// the budget.
pub(super) const EXPECTED_GAIN: f64 = 0.2;

/// Mean number of executions between two trial executions of a variant that seems faster than the active one.
const PROMISING: u64 = 12;

/// Minimum mean interval between two trial executions of a slower variant, as a multiple of the interval between two measurements of the
/// active variant.
const SELDOM: u64 = 4;

/// Number of executions after which the chooser no longer waits for the measured time of a trial execution. Also the number of executions
/// at the start of a plan in which trial executions of variants without a measured time do not count against the budget. The plan loses
/// this time only once.
const OVERDUE: u64 = 32;

/// Alarm threshold: ratio of measured to expected time of the active variant. If one measured time exceeds it, the chooser immediately
/// assumes that execution times have changed, before a second measured time confirms the change.
const ALARM: f64 = 1.25;

/// Number of successive measured times of the active variant that must be within the noise before the interval between its measurements is
/// doubled.
const QUIET: u32 = 8;

/// Number of changes of the active variant that are not delayed. After this many recent changes, every further change is delayed.
const FREE_SWITCHES: u32 = 3;
/// Mean delay, in executions, of the first change of the active variant that is delayed. The mean delay doubles with each further change.
const DELAY: u64 = 16;
/// Maximum number of recent changes of the active variant that are counted. At this number, the mean delay of the next change no longer
/// grows.
const MOST_SWITCHES: u32 = 9;

/// Number of executions after which the count of recent changes of the active variant decreases by one.
const FORGOTTEN: u64 = 1024;

/// Decision of a chooser for one execution.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index of the variant to execute.
    pub variant: usize,
    /// True if the caller should measure this execution and report its time with [`Chooser::measured`].
    pub measure: bool,
}

/// Chooser among the variants of one plan; [the module](super) describes the rule that it follows.
#[derive(Clone, Debug)]
pub struct Chooser {
    /// Number of executions so far.
    pub(super) tick: u64,
    /// Number of the execution at which the next decision is due. Earlier executions use the active variant.
    event: u64,
    pub(super) in_force: usize,
    pub(super) variants: usize,
    pub(super) times: [Times; MAX_VARIANTS],
    /// Time of each variant in nanoseconds as predicted by the model, or 0 if there is no prediction. Used until a time of the variant is
    /// measured.
    pub(super) predicted: [u64; MAX_VARIANTS],
    /// Number of the execution at which each inactive variant is next executed as a trial.
    due: [u64; MAX_VARIANTS],
    /// Latest trial execution of each variant: the number of the execution, and the cost in nanoseconds reserved in the budget. `None` if
    /// the chooser waits for no measured time of the variant.
    pending: [Option<(u64, f64)>; MAX_VARIANTS],
    /// Number of executions at the start of the plan in which trial executions do not count against the budget if their variant has no
    /// measured time and loses at most a fifth.
    pub(super) free: u64,
    /// Time that trial executions may cost, in nanoseconds. It is negative if they have cost more than allowed.
    budget: f64,
    /// Number of the execution up to which the budget has been updated.
    counted: u64,
    /// Number of the next execution in which the active variant is measured.
    measure_at: u64,
    /// Current interval between measurements of the active variant, in executions.
    period: u64,
    /// Maximum interval between measurements of the active variant, in executions.
    steady: u64,
    /// Number of successive measured times of the active variant that were within the noise.
    quiet: u32,
    /// True if the last measured time of the active variant was much longer than expected. Until the change is confirmed or rejected, the
    /// variant that seems fastest is executed.
    alarm: bool,
    /// Number of recent changes of the active variant. It decreases by one after every [`FORGOTTEN`] executions.
    recent: u32,
    /// Number of the execution at which `recent` was last due to decrease, or 0. It is due again [`FORGOTTEN`] executions later.
    recent_since: u64,
    /// Variant that becomes active if it is still faster at the execution with the given number. `None` if no change is delayed.
    intent: Option<(usize, u64)>,
    switches: u64,
    tries: u64,
    random: u64,
}

impl Chooser {
    /// Creates a chooser with one variant for each entry of `known`. There must be 1 to [`MAX_VARIANTS`] entries. Further entries are
    /// ignored. An entry is the variant's median time in an earlier run, in nanoseconds, or `None` if it is unknown. The variant with the
    /// shortest known time is active at first. If no time is known, variant 0 is active.
    ///
    /// `steady` is the number of executions from one measurement of the active variant to the next while nothing changes. Independent
    /// choosers on one machine need different values of `seed`. Choosers with equal seeds that receive equal reports make equal choices.
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
            predicted: [0; MAX_VARIANTS],
            // The variant of plain copies is tried first, because the caller would make these copies without the library.
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

    /// Sets the predicted time of each variant in seconds. If no time is measured yet, the variant with the shortest prediction becomes
    /// active if it is predicted to be faster than the plain copies by more than a fifth. Otherwise, the plain copies become active. A variant
    /// that is predicted to be slower than the active one by more than a fifth gets its first trial execution only when the budget allows it.
    #[must_use]
    pub fn expecting(mut self, seconds: impl IntoIterator<Item = f64>) -> Chooser {
        for (predicted, seconds) in self.predicted[..self.variants].iter_mut().zip(seconds) {
            *predicted = (seconds * 1e9) as u64;
        }
        if self.times.iter().all(|times| times.count() == 0) && self.predicted[..self.variants].iter().all(|predicted| *predicted > 0) {
            self.in_force = self.seems_fastest();
        }
        self
    }

    /// Creates a chooser for a process in which other streams copy at the same time and have their own choosers. The variant of plain
    /// copies (one direct copy for each transfer) is active at first, and every trial execution counts against the budget. The first trial
    /// executions of different choosers are made at different moments.
    pub fn among_others(variants: usize, steady: u32, seed: u64) -> Chooser {
        let mut chooser = Chooser::new(&vec![None; variants], steady, seed);
        (chooser.in_force, chooser.alarm, chooser.free) = (chooser.variants - 1, false, 0);
        // The trial executions of the variants are made one after the other, so that the cost of one is known before the next.
        let mut at = 0;
        for variant in (0..chooser.in_force).rev() {
            at += chooser.around(OVERDUE);
            chooser.due[variant] = at;
        }
        chooser
    }

    /// Returns the decision for the next execution. `under_way` is the number of measured executions whose times the caller has not
    /// reported yet. Most calls only increment and compare a counter.
    #[inline]
    pub fn next_execution(&mut self, under_way: usize) -> Choice {
        self.tick += 1;
        if self.tick < self.event {
            return Choice { variant: self.in_force, measure: false };
        }
        if under_way >= MOST_UNDER_WAY {
            return Choice { variant: self.unmeasured(), measure: false };
        }
        self.think(under_way < MOST_UNDER_WAY / 2)
    }

    /// Reports that a measured execution of `variant` took `ns` nanoseconds. Reports may arrive late, in any order, or never.
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
            let cost = self.cost_of(ns);
            if self.tick > self.free || cost > EXPECTED_GAIN * self.unit() {
                self.budget -= cost;
            }
            let is_faster = ns < before;
            match news {
                // A slower time of an inactive variant changes nothing.
                News::Changed if is_faster => self.noticed(),
                News::Outlier if is_faster => self.due[variant] = self.tick,
                _ => self.due[variant] = self.tick + self.interval(variant),
            }
        }
        self.decide();
        // The next execution checks whether a decision is due.
        self.event = 0;
    }

    /// Returns the variant for executions that are captured into a CUDA graph, and are therefore never measured. If there are predictions and
    /// no measured time, this is variant 0, which the model predicts to be fastest. Otherwise, it is the active variant.
    pub fn unmeasurable(&self) -> usize {
        let is_predicted = self.predicted[0] > 0 && self.times.iter().all(|times| times.count() == 0);
        if is_predicted { 0 } else { self.in_force }
    }

    /// Makes the variant that [`Chooser::unmeasurable`] returns the active one. Called when execution times cannot be measured.
    pub fn fix(&mut self) {
        (self.in_force, self.alarm) = (self.unmeasurable(), false);
    }

    /// Returns the number of variants from which this chooser chooses.
    pub fn variants(&self) -> usize {
        self.variants
    }

    /// Returns the index of the active variant, which all executions except trial executions use.
    pub fn in_force(&self) -> usize {
        self.in_force
    }

    /// Returns the index of the variant for an execution that should be measured but cannot be. Many executions may start before the first
    /// time is reported. Until then, it is the variant that is active at first. Without predictions, it is the variant of plain copies (one
    /// direct copy for each transfer).
    pub fn unmeasured(&self) -> usize {
        if self.alarm { self.seems_fastest() } else { self.in_force }
    }

    /// Returns the median of a variant's recent times in nanoseconds, or `None` if no time is known. A later run may pass it to
    /// [`Chooser::new`].
    pub fn median(&self, variant: usize) -> Option<u64> {
        self.times.get(variant).filter(|times| times.count() > 0).map(Times::median)
    }

    /// Returns the number of times that the active variant has changed.
    pub fn switches(&self) -> u64 {
        self.switches
    }

    /// Returns the number of trial executions of inactive variants so far.
    pub fn tries(&self) -> u64 {
        self.tries
    }

    /// Makes the decision for the next execution. If `has_room` is false, only trial executions are measured.
    #[cold]
    fn think(&mut self, has_room: bool) -> Choice {
        self.count();
        for variant in 0..self.variants {
            if self.pending[variant].take_if(|pending| self.tick > pending.0 + OVERDUE).is_some() {
                self.due[variant] = self.tick + self.interval(variant);
            }
        }
        let is_measured = has_room && self.tick >= self.measure_at;
        let choice = if self.alarm && is_measured {
            Choice { variant: self.in_force, measure: true }
        } else if let Some(variant) = self.try_now() {
            Choice { variant, measure: true }
        } else if self.alarm {
            Choice { variant: self.seems_fastest(), measure: has_room }
        } else {
            Choice { variant: self.in_force, measure: is_measured }
        };
        if choice.variant == self.in_force {
            if choice.measure {
                self.measure_at = self.tick + self.period;
            }
        } else if choice.measure {
            self.tries += 1;
        }
        let others = (0..self.variants).filter(|v| *v != self.in_force);
        let next = others.map(|v| self.pending[v].map_or(self.due[v], |pending| pending.0 + OVERDUE + 1)).min();
        let next = if self.alarm { 0 } else { next.unwrap_or(u64::MAX).min(self.measure_at) };
        self.event = next.max(self.tick + 1);
        choice
    }

    /// Returns the inactive variant that this execution uses as a trial, or `None` if no trial is due or the budget does not allow one.
    fn try_now(&mut self) -> Option<usize> {
        let due = (0..self.variants).filter(|&v| v != self.in_force && self.pending[v].is_none() && self.due[v] <= self.tick);
        let variant = due.min_by_key(|&v| self.due[v])?;
        let times = &self.times[variant];
        let unit = self.unit();
        let loss = self.cost_of(self.prediction(variant));
        let is_ahead = self.alarm && self.tick > AHEAD && self.times.iter().all(|times| times.count() == 0);
        let (cost, advance) = match times.count() {
            0 if is_ahead => (0.0, 0.0),
            0 if loss > EXPECTED_GAIN * unit => (loss, 0.0),
            0 if self.tick <= self.free => (0.0, 0.0),
            // While an unmeasured variant has a trial execution whose time is not known yet, no other unmeasured variant gets one.
            0 if self.pending.iter().any(Option::is_some) => return None,
            0 => (unit, ADVANCE * unit),
            // Trial executions may exceed the budget by more if few times are known or if a change was detected.
            count => {
                let cost = self.cost_of(times.expected());
                let advance = match count {
                    ..3 if cost > EXPECTED_GAIN * unit => DOUBTFUL,
                    ..3 => ADVANCE,
                    _ if times.fresh => LITTLE,
                    _ => ADVANCE,
                };
                (cost, advance * unit)
            }
        };
        if cost > 0.0 && cost > self.budget + advance {
            // While the active variant has few measured times, the comparison is repeated at the next execution, because the active variant
            // may turn out to be slower.
            let wait = if self.alarm { 0.0 } else { (cost - self.budget - advance) / (TRIES * unit) };
            self.due[variant] = self.tick + 1 + wait.min(1e6) as u64;
            return None;
        }
        self.budget -= cost;
        self.pending[variant] = Some((self.tick, cost));
        Some(variant)
    }

    /// Returns the number of executions until the next trial execution of a variant. It is chosen so that each inactive variant uses an
    /// equal part of the budget.
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

    /// Adds a fraction of the elapsed time to the budget, and decreases the count of recent changes of the active variant as time passes.
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
            // No alarm is raised if many earlier alarms were false, because their cost has then made the budget strongly negative.
            News::Outlier if is_alarming && !self.alarm && self.budget > -SAVED * self.unit() => {
                self.alarm = true;
                self.noticed();
            }
            News::Outlier => self.dense(),
            News::Expected => {
                // An alarm continues while an inactive variant with fewer than two measured times seems fastest. Executions then use and
                // measure this variant.
                let fastest = self.seems_fastest();
                let is_open = fastest != self.in_force && self.times[fastest].count() < 2;
                if self.times[self.in_force].count() < 3 || self.alarm && is_open {
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

    /// Handles a detected change of execution times: all known times are now obsolete. The active variant is measured first. The other
    /// variants then have trial executions in a random order, as soon as the budget allows.
    fn noticed(&mut self) {
        for variant in 0..self.variants {
            self.times[variant].fresh = false;
            self.due[variant] = self.tick + 2 + split_mix(&mut self.random) % self.variants as u64;
        }
        self.measure_at = self.tick;
        self.dense();
    }

    /// Makes every execution of the active variant a measurement, or only every fourth execution during an alarm (suspected change).
    fn dense(&mut self) {
        (self.period, self.quiet) = (if self.alarm { 4 } else { 1 }, 0);
        self.measure_at = self.measure_at.min(self.tick + self.period - 1);
    }

    /// True if `variant` is faster than the active one by more than noise, according to the times since the last change.
    fn is_faster(&self, variant: usize) -> bool {
        let (times, force) = (&self.times[variant], &self.times[self.in_force]);
        let error = (times.error().powi(2) + force.error().powi(2)).sqrt();
        let is_known = |times: &Times| times.fresh && times.count() >= 2;
        let least: f64 = if variant < self.in_force { LEAST_GAIN } else { 0.0 };
        is_known(times) && is_known(force) && (times.median() as f64) < self.unit() * (1.0 - least.max(SIGNIFICANT * error))
    }

    /// Makes the fastest variant the active one. After several changes in a short time, the change is delayed at random, and is made only
    /// if the variant is still faster after the delay. Other processes on the machine may have changed their variants meanwhile, which may
    /// have made this variant slower.
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

    /// Returns a random number between half and one and a half times `mean`. It makes independent choosers act at different moments.
    fn around(&mut self, mean: u64) -> u64 {
        mean / 2 + split_mix(&mut self.random) % (mean + 1)
    }
}

/// Returns the next random number: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub(super) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
