//! Times one case at one size: mpgpu and every manner of plain copies by turns, so that whatever else the machine does strikes all
//! of them alike.

use super::Failure;
use super::buffers::{Buffers, Pattern};
use super::cases::Case;
use super::plain::{Manner, Plain};
use mpgpu::backend::StreamHandle;
use mpgpu::engine::{Context, Plan, PlanOptions};
use std::sync::Arc;
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
    fn of(mut seconds: Vec<f64>) -> Spread {
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

/// One case at one size.
pub struct Measured {
    pub case: &'static Case,
    pub size: u64,
    pub transfers: usize,
    /// Of all transfers.
    pub bytes: u64,
    pub rounds: usize,
    pub plan: Arc<Plan>,
    pub mpgpu: Times,
    pub plain: Vec<(Manner, Times)>,
}

/// Who is timed.
#[derive(Copy, Clone)]
enum Contestant {
    Mpgpu,
    Plain(Manner),
}

impl Contestant {
    fn name(self) -> &'static str {
        match self {
            Contestant::Mpgpu => "mpgpu",
            Contestant::Plain(manner) => manner.name(),
        }
    }
}

/// Time that each contestant gets where nobody says how often to repeat.
const TARGET: Duration = Duration::from_millis(500);
const ROUNDS: std::ops::RangeInclusive<usize> = 11..=2001;

/// What does not change from case to case.
pub struct Bench<'a> {
    pub context: &'a Context,
    pub plain: Box<dyn Plain>,
    pub pattern: Pattern,
    pub options: PlanOptions,
    pub repeat: Option<usize>,
}

impl Bench<'_> {
    pub fn measure(&mut self, case: &'static Case, size: u64) -> Result<Measured, Failure> {
        let context = self.context;
        let legs = (case.legs)(context.machine().gpu_count(), size);
        let plain = &mut *self.plain;
        let buffers = Buffers::new(context, plain, &self.pattern, &legs)?;
        let plan = context.plan(&buffers.transfers, &self.options)?;
        // The stream that the caller would use: one of the GPU that the first transfer starts from.
        let first = legs[0];
        let stream = context.create_stream(if first.src.is_host() { first.dst } else { first.src })?;
        plain.prepare(&buffers.transfers)?;
        let contestants: Vec<Contestant> =
            std::iter::once(Contestant::Mpgpu).chain(plain.manners(case.against).into_iter().map(Contestant::Plain)).collect();

        for &contestant in &contestants {
            verify(contestant, plain, &plan, stream, &buffers, &self.pattern)?;
        }
        // The checks have left other contexts current than a program that only copies would have.
        plain.prepare(&buffers.transfers)?;
        let slowest = warm_up(&contestants, plain, &plan, stream)?;
        let rounds = self
            .repeat
            .unwrap_or_else(|| (TARGET.as_secs_f64() / slowest) as usize)
            .clamp(if self.repeat.is_some() { 1 } else { *ROUNDS.start() }, if self.repeat.is_some() { usize::MAX } else { *ROUNDS.end() });
        let mut samples = vec![(Vec::with_capacity(rounds), Vec::with_capacity(rounds)); contestants.len()];
        for round in 0..rounds {
            // Each comes after each other one equally often.
            for turn in 0..contestants.len() {
                let index = (round + turn) % contestants.len();
                let (issue, total) = once(contestants[index], plain, &plan, stream)?;
                samples[index].0.push(issue);
                samples[index].1.push(total);
            }
        }
        verify(Contestant::Mpgpu, plain, &plan, stream, &buffers, &self.pattern)?;
        context.destroy_stream(stream)?;

        let mut times = samples.into_iter().map(|(issue, total)| Times { total: Spread::of(total), issue: Spread::of(issue) });
        let mpgpu = times.next().ok_or("nothing was timed")?;
        let manners = contestants.iter().filter_map(|contestant| match contestant {
            Contestant::Plain(manner) => Some(*manner),
            Contestant::Mpgpu => None,
        });
        let plain = manners.zip(times).collect();
        Ok(Measured { case, size, transfers: legs.len(), bytes: plan.bytes(), rounds, plan, mpgpu, plain })
    }
}

/// Poison, synchronise, copy, synchronise, look.
fn verify(
    contestant: Contestant,
    plain: &mut dyn Plain,
    plan: &Plan,
    stream: StreamHandle,
    buffers: &Buffers<'_>,
    pattern: &Pattern,
) -> Result<(), Failure> {
    buffers.poison(plain)?;
    once(contestant, plain, plan, stream)?;
    buffers.check(plain, pattern).map_err(|error| format!("copied by {}: {error}", contestant.name()).into())
}

/// Seconds of the slowest contestant, once it is warm.
fn warm_up(contestants: &[Contestant], plain: &mut dyn Plain, plan: &Plan, stream: StreamHandle) -> Result<f64, Failure> {
    const ROUNDS: usize = 5;
    let mut slowest = 1e-6_f64;
    for round in 0..ROUNDS {
        for &contestant in contestants {
            let (_, total) = once(contestant, plain, plan, stream)?;
            if round + 1 == ROUNDS {
                slowest = slowest.max(total);
            }
        }
    }
    Ok(slowest)
}

/// Seconds of issuing, and until done.
fn once(contestant: Contestant, plain: &mut dyn Plain, plan: &Plan, stream: StreamHandle) -> Result<(f64, f64), Failure> {
    let start = Instant::now();
    match contestant {
        Contestant::Mpgpu => {
            let completion = plan.execute(stream)?;
            let issue = start.elapsed();
            completion.wait()?;
            Ok((issue.as_secs_f64(), start.elapsed().as_secs_f64()))
        }
        Contestant::Plain(manner) => {
            plain.issue(manner)?;
            let issue = start.elapsed();
            plain.wait(manner)?;
            Ok((issue.as_secs_f64(), start.elapsed().as_secs_f64()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 10.0, 2.0]), Spread { median: 2.5, min: 1.0, max: 10.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }
}
