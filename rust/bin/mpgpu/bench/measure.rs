//! Measures executions of a plan against plain copies of the same bytes, and checks the bytes.

use super::Failure;
use super::buffers::{Buffers, Pattern};
use super::cases::{Case, WINDOWS};
use super::contest::{Contestant, Executions, PlainCopies, Times, contest, once};
use super::plain::{Manner, Plain};
use mpgpu::backend::StreamHandle;
use mpgpu::engine::{Context, Plan, PlanOptions, Transfer};
use std::cell::RefCell;
use std::sync::Arc;

/// One case at one size.
pub struct Measured {
    pub case: &'static Case,
    pub size: u64,
    /// Copies of one step: transfers, or puts of a window.
    pub transfers: usize,
    /// Of all of them.
    pub bytes: u64,
    pub rounds: usize,
    pub plan: Arc<Plan>,
    pub mpgpu: Times,
    /// What it is held against, by name.
    pub plain: Vec<(String, Times)>,
}

/// Executions before the memory is freed.
const EARLIER: usize = 3;

/// Rounds, and what mpgpu and each manner of plain copies took.
type Compared = (usize, Times, Vec<(Manner, Times)>);

/// What does not change from case to case.
pub struct Bench<'a> {
    pub context: &'a Context,
    pub plain: RefCell<Box<dyn Plain>>,
    pub pattern: Pattern<'a>,
    pub options: PlanOptions,
    /// A preset or file, where one was named.
    pub topology: Option<String>,
    pub repeat: Option<usize>,
    /// Thread blocks of a copy between GPUs in `d2d_narrow`.
    pub narrow_blocks: u32,
}

impl Bench<'_> {
    /// Executions of one plan, one at a time.
    pub fn step(&self, case: &'static Case, size: u64, against: &[Manner]) -> Result<Measured, Failure> {
        let legs = case.legs(self.context.machine().gpu_count(), size);
        let buffers = self.buffers(self.context, &legs)?;
        let plan = self.context.plan(&buffers.transfers, &self.options)?;
        // The stream that the caller would use: one of the GPU that the first transfer starts from.
        let first = legs[0];
        let stream = self.context.create_stream(if first.src.is_host() { first.dst } else { first.src })?;
        let (rounds, mpgpu, plain) = self.against_plain(&buffers, &plan, vec![stream], &buffers.transfers, against)?;
        self.context.destroy_stream(stream)?;
        let plain = plain.into_iter().map(|(manner, times)| (manner.name().to_owned(), times)).collect();
        Ok(Measured { case, size, transfers: legs.len(), bytes: plan.bytes(), rounds, plan, mpgpu, plain })
    }

    /// The same of memory that has the addresses of other memory, in which the plan was executed before.
    pub fn anew(&self, case: &'static Case, size: u64) -> Result<Measured, Failure> {
        let buffers = self.buffers(self.context, &case.legs(self.context.machine().gpu_count(), size))?;
        let plan = self.context.plan(&buffers.transfers, &self.options)?;
        let stream = self.context.create_stream(buffers.transfers[0].src_device)?;
        for _ in 0..EARLIER {
            plan.execute(stream)?.wait()?;
        }
        self.context.destroy_stream(stream)?;
        drop(buffers);
        self.step(case, size, &[Manner::OneStream])
    }

    /// Several executions of one plan under way, for each window in one stream and in a stream each. All puts of a window have the
    /// same source and destination, as in osu_bw.
    pub fn windows(&self, case: &'static Case, size: u64) -> Result<Vec<Measured>, Failure> {
        let legs = case.legs(self.context.machine().gpu_count(), size);
        let buffers = self.buffers(self.context, &legs)?;
        let plan = self.context.plan(&buffers.transfers, &self.options)?;
        let mut results = Vec::new();
        for window in WINDOWS {
            let puts = vec![buffers.transfers[0]; window];
            for manner in [Manner::OneStream, Manner::Streams] {
                if window == 1 && manner == Manner::Streams {
                    continue;
                }
                let own = if manner == Manner::Streams { window } else { 1 };
                let streams: Vec<StreamHandle> = (0..own).map(|_| self.context.create_stream(legs[0].src)).collect::<Result<_, _>>()?;
                let each = (0..window).map(|put| streams[put % own]).collect();
                let (rounds, mpgpu, plain) = self.against_plain(&buffers, &plan, each, &puts, &[manner])?;
                streams.into_iter().try_for_each(|stream| self.context.destroy_stream(stream))?;
                let name = |of: Manner| format!("window {window}, {}", if of == Manner::Memcpy { of } else { manner }.name());
                let plain = plain.into_iter().map(|(manner, times)| (name(manner), times)).collect();
                let bytes = plan.bytes() * window as u64;
                results.push(Measured { case, size, transfers: window, bytes, rounds, plan: plan.clone(), mpgpu, plain });
            }
        }
        Ok(results)
    }

    pub fn buffers<'b>(&self, context: &'b Context, legs: &[super::cases::Leg]) -> Result<Buffers<'b>, Failure> {
        Buffers::new(context, &mut **self.plain.borrow_mut(), &self.pattern, legs)
    }

    /// One execution in each of `streams` against `copies`, which move the same bytes.
    fn against_plain(
        &self,
        buffers: &Buffers<'_>,
        plan: &Plan,
        streams: Vec<StreamHandle>,
        copies: &[Transfer],
        against: &[Manner],
    ) -> Result<Compared, Failure> {
        self.plain.borrow_mut().prepare(copies)?;
        let manners = self.plain.borrow().manners(against);
        let mut mpgpu = Executions::new(plan, streams);
        let mut plain: Vec<PlainCopies<'_>> = manners.iter().map(|&manner| PlainCopies { plain: &self.plain, manner }).collect();
        self.verify("mpgpu", &mut mpgpu, &[buffers])?;
        for copies in &mut plain {
            self.verify(copies.manner.name(), copies, &[buffers])?;
        }
        // The checks have left other contexts current than a program that only copies would have.
        self.plain.borrow_mut().prepare(copies)?;
        let mut contestants: Vec<&mut dyn Contestant> = vec![&mut mpgpu];
        contestants.extend(plain.iter_mut().map(|copies| copies as &mut dyn Contestant));
        let (rounds, times) = contest(&mut contestants, self.repeat)?;
        self.verify("mpgpu", &mut mpgpu, &[buffers])?;
        let mut times = times.into_iter();
        let mpgpu = times.next().ok_or("nothing was timed")?;
        Ok((rounds, mpgpu, manners.into_iter().zip(times).collect()))
    }

    /// Poison, synchronise, copy, synchronise, look. `name` is who copies.
    pub fn verify(&self, name: &str, contestant: &mut dyn Contestant, buffers: &[&Buffers<'_>]) -> Result<(), Failure> {
        for buffers in buffers {
            buffers.poison(&mut **self.plain.borrow_mut())?;
        }
        once(contestant)?;
        for buffers in buffers {
            let checked = buffers.check(&mut **self.plain.borrow_mut(), &self.pattern);
            checked.map_err(|error| format!("copied by {name}: {error}"))?;
        }
        Ok(())
    }
}
