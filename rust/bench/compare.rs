//! Implements the measuring loop. Several methods that do the same task are timed alternately, so that other load of the machine affects
//! all of them equally.

use super::memory::Buffers;
use super::{Bench, Case, Failure};
use mpgpu_backend::{Completion, StreamHandle};
use mpgpu_contexts::Plan;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Median, minimum and maximum of several measured times, in seconds.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Computes median, minimum and maximum of one or more times in seconds.
    pub fn of(seconds: &[f64]) -> Spread {
        let mut seconds = seconds.to_vec();
        seconds.sort_by(f64::total_cmp);
        let (lower, upper) = (seconds[(seconds.len() - 1) / 2], seconds[seconds.len() / 2]);
        Spread { median: (lower + upper) / 2.0, min: seconds[0], max: seconds[seconds.len() - 1] }
    }
}

/// Method of doing a task, such as a set of copies. It is timed and compared with other methods of doing the same task.
pub trait Contestant {
    /// Prepares the next run of the method. This is not timed.
    fn prepare(&mut self) -> Result<(), Failure> {
        Ok(())
    }
    /// Starts the task without waiting for its end. This is timed.
    fn issue(&mut self) -> Result<(), Failure>;
    /// Blocks until the task is done. This is timed.
    fn wait(&mut self) -> Result<(), Failure>;
}

/// Name of a method in the report, and the method.
pub type Named<'a> = (&'a str, &'a mut dyn Contestant);

/// Method that consists of two closures: the first closure starts the task, and the second closure waits for their end.
pub struct Calls<I, W>(pub I, pub W);

impl<I: FnMut() -> Result<(), Failure>, W: FnMut() -> Result<(), Failure>> Contestant for Calls<I, W> {
    fn issue(&mut self) -> Result<(), Failure> {
        (self.0)()
    }
    fn wait(&mut self) -> Result<(), Failure> {
        (self.1)()
    }
}

/// Method that executes one plan once in each of several streams. The executions may overlap if the streams differ.
pub struct Executions<'a> {
    plan: &'a Plan,
    /// Streams in which the plan is executed. It is executed twice in a stream that is listed twice.
    streams: Vec<StreamHandle>,
    under_way: Vec<Completion>,
}

impl<'a> Executions<'a> {
    pub fn new(plan: &'a Plan, streams: Vec<StreamHandle>) -> Executions<'a> {
        Executions { plan, under_way: Vec::with_capacity(streams.len()), streams }
    }
}

impl Contestant for Executions<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        for stream in &self.streams {
            self.under_way.push(self.plan.execute(*stream)?);
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Failure> {
        self.under_way.drain(..).try_for_each(|completion| Ok(completion.wait()?))
    }
}

/// Measured times of one method, one entry for each round.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub name: String,
    /// Time in seconds from the start of the submission until the host sees that all data has arrived.
    pub total: Vec<f64>,
    /// Time in seconds that the calling thread spends in submission.
    pub issue: Vec<f64>,
}

impl Samples {
    pub fn new(name: &str) -> Samples {
        Samples { name: name.to_owned(), ..Samples::default() }
    }

    pub fn add(&mut self, (issue, total): (f64, f64)) {
        self.issue.push(issue);
        self.total.push(total);
    }

    /// Returns the median over all rounds of the submission time of this method minus that of `other`, in seconds.
    pub fn issue_beyond(&self, other: &Samples) -> f64 {
        Spread::of(&self.issue.iter().zip(&other.issue).map(|(one, other)| one - other).collect::<Vec<_>>()).median
    }
}

/// Additional figure of a comparison that is shown in the report.
#[derive(Copy, Clone, Debug)]
pub enum Figure {
    Seconds(f64),
    Count(u64),
}

/// Result of comparing one method of mpgpu with other methods, for one case and size.
pub struct Comparison {
    pub case: &'static Case,
    pub size: u64,
    /// Number of copies in one communication step. Depending on the case, these are transfers, puts in flight, or nodes of a graph.
    pub copies: usize,
    /// Total size of all copies in bytes.
    pub bytes: u64,
    pub plan: Option<Arc<Plan>>,
    pub mpgpu: Samples,
    /// Measured times of each method with which mpgpu is compared, in the same rounds as mpgpu's.
    pub against: Vec<Samples>,
    pub figures: Vec<(&'static str, Figure)>,
}

impl Comparison {
    /// Creates the comparison of the first method in `samples`, which must be mpgpu's, with all others.
    pub fn of(case: &'static Case, size: u64, copies: usize, plan: &Arc<Plan>, mut samples: Vec<Samples>) -> Comparison {
        let mpgpu = samples.remove(0);
        let bytes = plan.bytes();
        Comparison { case, size, copies, bytes, plan: Some(plan.clone()), mpgpu, against: samples, figures: Vec::new() }
    }
}

impl Bench<'_> {
    /// Compares several methods of making the same copies. Verifies the data that each method copies, then times all methods alternately,
    /// then verifies the first method again.
    pub fn compare(&self, buffers: &[&Buffers<'_>], contestants: &mut [Named<'_>]) -> Result<Vec<Samples>, Failure> {
        for (name, contestant) in contestants.iter_mut() {
            self.verify(name, *contestant, buffers)?;
        }
        // The verification changes the current CUDA context. In a program that only copies, the context of the source GPU is current.
        self.plain.borrow_mut().make_current(buffers[0].transfers[0].src_device)?;
        let samples = contest(contestants, self.repeat)?;
        let (name, first) = &mut contestants[0];
        self.verify(name, *first, buffers)?;
        Ok(samples)
    }

    /// Verifies one method: fills the destinations with wrong bytes, synchronizes, makes the copies, synchronizes again, and compares all
    /// bytes. `name` is the method's name for the error.
    pub fn verify(&self, name: &str, contestant: &mut dyn Contestant, buffers: &[&Buffers<'_>]) -> Result<(), Failure> {
        for buffers in buffers {
            buffers.poison(&mut **self.plain.borrow_mut())?;
        }
        once(contestant)?;
        for buffers in buffers {
            let checked = buffers.check(&mut **self.plain.borrow_mut(), &self.pattern);
            checked.map_err(|error| format!("the copy by {name} is wrong: {error}"))?;
        }
        Ok(())
    }
}

/// Runs a method once. Returns two times in seconds from its start: until the submission returned, and until everything was complete.
pub fn once(contestant: &mut dyn Contestant) -> Result<(f64, f64), Failure> {
    contestant.prepare()?;
    let start = Instant::now();
    contestant.issue()?;
    let issue = start.elapsed();
    contestant.wait()?;
    Ok((issue.as_secs_f64(), start.elapsed().as_secs_f64()))
}

/// Total measuring time of each method, if the number of rounds is not specified.
const TARGET: Duration = Duration::from_millis(500);
const ROUNDS: std::ops::RangeInclusive<usize> = 11..=2001;
const WARM_UP_ROUNDS: usize = 5;

/// Times each method once in each of `repeat` rounds and returns the times of each method. If `repeat` is `None`, the number of rounds is
/// chosen so that each method takes about [`TARGET`] in total.
pub fn contest(contestants: &mut [Named<'_>], repeat: Option<u32>) -> Result<Vec<Samples>, Failure> {
    let mut slowest = 1e-6_f64;
    for round in 0..WARM_UP_ROUNDS {
        for (_, contestant) in contestants.iter_mut() {
            let (_, total) = once(*contestant)?;
            if round + 1 == WARM_UP_ROUNDS {
                slowest = slowest.max(total);
            }
        }
    }
    let by_time = ((TARGET.as_secs_f64() / slowest) as usize).clamp(*ROUNDS.start(), *ROUNDS.end());
    let mut samples: Vec<Samples> = contestants.iter().map(|(name, _)| Samples::new(name)).collect();
    for round in 0..repeat.map_or(by_time, |rounds| rounds as usize) {
        for index in turns(round, contestants.len()) {
            samples[index].add(once(contestants[index].1)?);
        }
    }
    Ok(samples)
}

/// Returns the order in which `count` methods are timed in a round. Over `count` rounds (twice as many if `count` is odd), each method is
/// equally often at each position, and equally often directly after each other method (E. J. Williams, "Experimental designs balanced for
/// the estimation of residual effects of treatments", 1949). So each method is affected equally by the state of caches and driver that the
/// other methods leave.
fn turns(round: usize, count: usize) -> Vec<usize> {
    // The sequence is 0, 1, n - 1, 2, n - 2, ...: the differences between neighbours are all distinct, modulo n.
    let mut turns: Vec<usize> = (0..count).map(|turn| if turn % 2 == 1 { turn.div_ceil(2) } else { (count - turn / 2) % count }).collect();
    turns.iter_mut().for_each(|contestant| *contestant = (*contestant + round) % count);
    if count % 2 == 1 && (round / count) % 2 == 1 {
        turns.reverse();
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(Spread::of(&[3.0, 1.0, 10.0, 2.0]), Spread { median: 2.5, min: 1.0, max: 10.0 });
        assert_eq!(Spread::of(&[7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }

    #[test]
    fn contestants_take_turns_and_none_starts_before_the_one_before_is_done() {
        let order = RefCell::new(String::new());
        let noted = |name| {
            let note = |what| {
                let order = &order;
                move || {
                    order.borrow_mut().push(what);
                    Ok(())
                }
            };
            Calls(note(name), note('.'))
        };
        let [mut a, mut b, mut c] = ['a', 'b', 'c'].map(noted);
        let samples = contest(&mut [("a", &mut a), ("b", &mut b), ("c", &mut c)], Some(3)).expect("nothing can fail");
        assert_eq!(samples.iter().map(|of| (&*of.name, of.issue.len())).collect::<Vec<_>>(), [("a", 3), ("b", 3), ("c", 3)]);
        let order = order.borrow();
        let (warm_up, timed) = order.split_at(5 * 6);
        assert_eq!((warm_up, timed), ("a.b.c.".repeat(5).as_str(), "a.b.c.b.c.a.c.a.b."));
    }

    #[test]
    fn each_contestant_has_each_place_and_follows_each_other_one_equally_often() {
        for count in 1..=7 {
            let rounds = if count % 2 == 0 { count } else { 2 * count };
            let (mut places, mut follows) = (vec![0; count * count], vec![0; count * count]);
            for order in (0..rounds).map(|round| turns(round, count)) {
                order.iter().enumerate().for_each(|(place, contestant)| places[place * count + contestant] += 1);
                order.windows(2).for_each(|pair| follows[pair[0] * count + pair[1]] += 1);
            }
            let each = rounds / count;
            assert!(places.iter().all(|times| *times == each), "{count}: {places:?}");
            let fair = |(index, times): (usize, &usize)| *times == if index / count == index % count { 0 } else { each };
            assert!(follows.iter().enumerate().all(fair), "{count}: {follows:?}");
        }
    }
}
