//! Compares executions of one plan with plain copies of the same data, one execution at a time or several in flight.

use super::compare::{Comparison, Contestant, Executions, Named, Samples};
use super::memory::Buffers;
use super::plain::{Manner, Plain};
use super::{Bench, Case, Failure};
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{Plan, Transfer};
use std::cell::RefCell;

/// Number of executions of the plan before its memory is freed and allocated again, in the case `d2d_anew`.
const EARLIER: usize = 3;
/// Numbers of puts in flight (window sizes) in the case `put_window`, as in the bandwidth figures of the papers (OSU micro-benchmarks).
const WINDOWS: [usize; 3] = [1, 4, 16];

/// Method that makes the plain copies that were prepared last.
struct PlainCopies<'a> {
    plain: &'a RefCell<Box<dyn Plain>>,
    manner: Manner,
}

impl Contestant for PlainCopies<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        self.plain.borrow_mut().issue(self.manner)
    }

    fn wait(&mut self) -> Result<(), Failure> {
        self.plain.borrow_mut().wait(self.manner)
    }
}

impl Bench<'_> {
    /// Compares isolated executions of one plan with plain copies by each method in `against`.
    pub fn step(&self, case: &'static Case, size: u64, against: &[Manner]) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(self.context.machine().gpu_count(), size))?;
        let plan = self.context.plan(&buffers.transfers, &Default::default())?;
        // A caller would use a stream of the GPU that holds the source of the first transfer, so the benchmark does too.
        let first = buffers.transfers[0];
        let stream = self.context.create_stream(if first.src_device.is_host() { first.dst_device } else { first.src_device })?;
        let samples = self.against_plain(&buffers, &plan, vec![stream], &buffers.transfers, against)?;
        self.context.destroy_stream(stream)?;
        Ok(vec![Comparison::of(case, size, buffers.transfers.len(), &plan, samples)])
    }

    /// Measures a plan after its memory was freed and allocated again at the same addresses.
    pub fn anew(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(self.context.machine().gpu_count(), size))?;
        let plan = self.context.plan(&buffers.transfers, &Default::default())?;
        let stream = self.context.create_stream(buffers.transfers[0].src_device)?;
        for _ in 0..EARLIER {
            plan.execute(stream)?.wait()?;
        }
        self.context.destroy_stream(stream)?;
        drop(buffers);
        self.step(case, size, &[Manner::OneStream])
    }

    /// Measures several puts in flight, for each number of puts in [`WINDOWS`]. The puts are first enqueued in one stream, then each in its
    /// own stream. As in osu_bw, all of them have the same source and destination.
    pub fn windows(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(self.context.machine().gpu_count(), size))?;
        let plan = self.context.plan(&buffers.transfers, &Default::default())?;
        let mut results = Vec::new();
        for window in WINDOWS {
            let puts = vec![buffers.transfers[0]; window];
            let manners = if window == 1 { &[Manner::OneStream][..] } else { &[Manner::OneStream, Manner::Streams] };
            for &manner in manners {
                let own = if manner == Manner::Streams { window } else { 1 };
                let device = buffers.transfers[0].src_device;
                let streams = (0..own).map(|_| self.context.create_stream(device)).collect::<Result<Vec<_>, _>>()?;
                let each = (0..window).map(|put| streams[put % own]).collect();
                let mut samples = self.against_plain(&buffers, &plan, each, &puts, &[manner])?;
                streams.into_iter().try_for_each(|stream| self.context.destroy_stream(stream))?;
                samples.iter_mut().skip(1).for_each(|of| of.name = format!("window {window}, {}", of.name));
                let bytes = plan.bytes() * window as u64;
                results.push(Comparison { bytes, ..Comparison::of(case, size, window, &plan, samples) });
            }
        }
        Ok(results)
    }

    /// Compares one execution of `plan` in each stream of `streams` with the plain copies `copies`, which copy the same data.
    fn against_plain(
        &self,
        buffers: &Buffers<'_>,
        plan: &Plan,
        streams: Vec<StreamHandle>,
        copies: &[Transfer],
        against: &[Manner],
    ) -> Result<Vec<Samples>, Failure> {
        self.plain.borrow_mut().prepare(copies)?;
        let manners = self.plain.borrow().manners(against);
        let mut mpgpu = Executions::new(plan, streams);
        let mut plain: Vec<PlainCopies<'_>> = manners.into_iter().map(|manner| PlainCopies { plain: &self.plain, manner }).collect();
        let mut contestants: Vec<Named<'_>> = vec![("mpgpu", &mut mpgpu)];
        contestants.extend(plain.iter_mut().map(|copies| (copies.manner.name(), copies as &mut dyn Contestant)));
        self.compare(&[buffers], &mut contestants)
    }
}
