//! Times several ways of doing the same by turns, so that whatever else the machine does strikes all of them alike.

use super::Failure;
use super::plain::{Manner, Plain};
use mpgpu::backend::{Completion, StreamHandle};
use mpgpu::engine::Plan;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Seconds.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of one value or more.
    pub fn of(mut seconds: Vec<f64>) -> Spread {
        seconds.sort_by(f64::total_cmp);
        let (lower, upper) = (seconds[(seconds.len() - 1) / 2], seconds[seconds.len() / 2]);
        Spread { median: (lower + upper) / 2.0, min: seconds[0], max: seconds[seconds.len() - 1] }
    }
}

/// What one contestant took.
#[derive(Copy, Clone, Debug)]
pub struct Times {
    /// From issue until the host sees the last byte arrived.
    pub total: Spread,
    /// The calling thread's time until everything is issued.
    pub issue: Spread,
}

/// One way of doing it.
pub trait Contestant {
    /// What is done before every start, and not timed.
    fn prepare(&mut self) -> Result<(), Failure> {
        Ok(())
    }
    /// Starts it.
    fn issue(&mut self) -> Result<(), Failure>;
    /// Blocks until it is done.
    fn wait(&mut self) -> Result<(), Failure>;
}

/// Seconds of issuing, and until done.
pub fn once(contestant: &mut dyn Contestant) -> Result<(f64, f64), Failure> {
    contestant.prepare()?;
    let start = Instant::now();
    contestant.issue()?;
    let issue = start.elapsed();
    contestant.wait()?;
    Ok((issue.as_secs_f64(), start.elapsed().as_secs_f64()))
}

/// Time that each contestant gets where nobody says how often to repeat.
const TARGET: Duration = Duration::from_millis(500);
const ROUNDS: std::ops::RangeInclusive<usize> = 11..=2001;

/// How many rounds there were, and what each contestant took.
pub fn contest(contestants: &mut [&mut dyn Contestant], repeat: Option<usize>) -> Result<(usize, Vec<Times>), Failure> {
    let samples = samples(contestants, repeat)?;
    let rounds = samples.first().map_or(0, |samples| samples.issue.len());
    Ok((rounds, samples.iter().map(Samples::times).collect()))
}

/// What one contestant took in each round, in seconds.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// From issue until the host sees the last byte arrived.
    pub total: Vec<f64>,
    /// The calling thread's time until everything is issued.
    pub issue: Vec<f64>,
}

impl Samples {
    pub fn times(&self) -> Times {
        Times { total: Spread::of(self.total.clone()), issue: Spread::of(self.issue.clone()) }
    }
}

/// In which order contestants take their turns in a round. Over `count` rounds, twice as many for an odd count, each is in each place and
/// comes directly behind each other one equally often (E. J. Williams, "Experimental designs balanced for the estimation of residual
/// effects of treatments", 1949): what one leaves behind in caches and in the driver strikes all others alike.
fn turns(round: usize, count: usize) -> Vec<usize> {
    // 0, 1, n - 1, 2, n - 2, ...: the steps from one to the next are all different, modulo n.
    let mut turns: Vec<usize> = (0..count).map(|turn| if turn % 2 == 1 { turn.div_ceil(2) } else { (count - turn / 2) % count }).collect();
    turns.iter_mut().for_each(|contestant| *contestant = (*contestant + round) % count);
    if count % 2 == 1 && (round / count) % 2 == 1 {
        turns.reverse();
    }
    turns
}

/// What each contestant took in each round.
pub fn samples(contestants: &mut [&mut dyn Contestant], repeat: Option<usize>) -> Result<Vec<Samples>, Failure> {
    let slowest = warm_up(contestants)?;
    let rounds = repeat.unwrap_or_else(|| ((TARGET.as_secs_f64() / slowest) as usize).clamp(*ROUNDS.start(), *ROUNDS.end()));
    let mut samples = vec![Samples { total: Vec::with_capacity(rounds), issue: Vec::with_capacity(rounds) }; contestants.len()];
    for round in 0..rounds {
        for index in turns(round, contestants.len()) {
            let (issue, total) = once(contestants[index])?;
            samples[index].issue.push(issue);
            samples[index].total.push(total);
        }
    }
    Ok(samples)
}

/// Seconds of the slowest contestant, once it is warm.
fn warm_up(contestants: &mut [&mut dyn Contestant]) -> Result<f64, Failure> {
    const ROUNDS: usize = 5;
    let mut slowest = 1e-6_f64;
    for round in 0..ROUNDS {
        for contestant in contestants.iter_mut() {
            let (_, total) = once(*contestant)?;
            if round + 1 == ROUNDS {
                slowest = slowest.max(total);
            }
        }
    }
    Ok(slowest)
}

/// Executions of one plan: one in each of the streams, all under way at once where the streams differ.
pub struct Executions<'a> {
    plan: &'a Plan,
    streams: Vec<StreamHandle>,
    under_way: Vec<Completion>,
}

impl<'a> Executions<'a> {
    /// A stream that stands in the list twice gets two executions.
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

/// The plain copies that were prepared last, in one manner.
pub struct PlainCopies<'a> {
    pub plain: &'a RefCell<Box<dyn Plain>>,
    pub manner: Manner,
}

impl Contestant for PlainCopies<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        self.plain.borrow_mut().issue(self.manner)
    }

    fn wait(&mut self) -> Result<(), Failure> {
        self.plain.borrow_mut().wait(self.manner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 10.0, 2.0]), Spread { median: 2.5, min: 1.0, max: 10.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }

    /// Writes down who was issued, and waited for, when.
    struct Noted<'a>(char, &'a RefCell<String>);

    impl Contestant for Noted<'_> {
        fn issue(&mut self) -> Result<(), Failure> {
            self.1.borrow_mut().push(self.0);
            Ok(())
        }

        fn wait(&mut self) -> Result<(), Failure> {
            self.1.borrow_mut().push('.');
            Ok(())
        }
    }

    #[test]
    fn contestants_take_turns_and_none_starts_before_the_one_before_is_done() {
        let order = RefCell::new(String::new());
        let [mut a, mut b, mut c] = ['a', 'b', 'c'].map(|name| Noted(name, &order));
        let (rounds, times) = contest(&mut [&mut a, &mut b, &mut c], Some(3)).expect("nothing can fail");
        assert_eq!((rounds, times.len()), (3, 3));
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
