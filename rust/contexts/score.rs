//! Scores plans by measurement: takes the median time of several executions, or executes two plans alternately and compares the times.

use super::batch::Transfer;
use super::error::Error;
use super::execute;
use super::lifetime::Context;
use crate::backend::StreamHandle;
use crate::plan::{Plan, Shape};
use crate::topology::DeviceId;
use crate::tune::{Score, Verdict};
use std::sync::Arc;
use std::time::Instant;

/// Number of untimed executions before the first timed execution of a plan. They are needed because the first launch of a graph and the
/// first use of a link between GPUs are slow.
const WARM_UP: usize = 3;
/// Total time in seconds of all executions that are timed for one score.
const SCORE_SECONDS: f64 = 0.02;
/// Minimum and maximum number of executions that are timed for one score.
const SCORE_ROUNDS: std::ops::RangeInclusive<usize> = 7..=51;
/// Number of rounds of a direct comparison. Each round executes both plans once. The number is odd, so that the median is the value of one
/// of the rounds. It is large because the time of a host copy varies by some per cent from one round to the next.
const DUEL_ROUNDS: usize = 101;
/// Minimum gain, as a fraction of the time, at which a plan is replaced by a faster one. Times of rounds differ by a few tenths of a per
/// cent, and times of host copies differ by a few per cent between machines of one type.
const LEAST_GAIN: f64 = 0.01;
/// Number of sets of buffers that are used if a batch copies from or to host memory. The speed at which several GPUs access host memory
/// depends on where its pages lie: of three buffers of one process, one took 1.75 times as long as the others (64 MiB through four H200). A
/// score from one buffer would be valid only for that buffer.
const HOST_BUFFERS: usize = 3;

/// Scorer that measures the time of plans by executing them in a context. Plans must be made for the machine of that context. The scorer
/// allocates its own memory and streams, and releases them when it is dropped. Nothing else should run on the machine meanwhile.
pub struct Executed<'a> {
    context: &'a Context,
    /// Streams in which plans are executed, by device. A plan is executed in a stream of the device of its first transfer's source, or of
    /// the destination if that source is host memory.
    streams: Vec<(DeviceId, StreamHandle)>,
    /// Sets of buffers for the batch that was scored last. Each set has one entry for each transfer.
    sets: Vec<Vec<Transfer>>,
}

/// Plan that is bound to the addresses of each set of buffers, with the stream in which it is executed.
struct Bound {
    at: Vec<Arc<execute::Plan>>,
    stream: StreamHandle,
    /// Time in seconds of one execution with the first set of buffers, after the warm-up.
    first: f64,
}

impl<'a> Executed<'a> {
    /// Creates a scorer for plans on `context`. Allocates nothing yet.
    pub fn new(context: &'a Context) -> Executed<'a> {
        Executed { context, streams: Vec::new(), sets: Vec::new() }
    }

    /// Binds the plan to each set of buffers and warms it up with the first set.
    fn bind(&mut self, plan: &Plan) -> Result<Bound, Error> {
        let shapes = || plan.transfers.iter().map(|transfer| &transfer.shape);
        let first = shapes()
            .next()
            .ok_or_else(|| Error::NotSupported("an empty batch takes no time: score plans with at least one transfer".into()))?;
        let fit = |t: &Transfer, s: &Shape| (t.src_device, t.dst_device) == (s.src_device, s.dst_device) && t.bytes >= s.bytes;
        let fits = |set: &Vec<Transfer>| set.len() == plan.transfers.len() && set.iter().zip(shapes()).all(|(t, s)| fit(t, s));
        if !self.sets.first().is_some_and(fits) {
            self.free();
            let of_host = shapes().any(|shape| shape.src_device.is_host() || shape.dst_device.is_host());
            let sets = 0..if of_host { HOST_BUFFERS } else { 1 };
            // If an allocation fails half-way, all buffers are freed, so that the next plan does not use an incomplete set.
            sets.flat_map(|set| shapes().map(move |shape| (set, shape)))
                .try_for_each(|(set, shape)| self.allocate(set, shape))
                .inspect_err(|_| self.free())?;
        }
        let at = |set: &Vec<Transfer>| {
            let transfers: Vec<Transfer> = set.iter().zip(shapes()).map(|(t, s)| Transfer { bytes: s.bytes, ..*t }).collect();
            self.context.plan_with(&transfers, &plan.options)
        };
        let at = self.sets.iter().map(at).collect::<Result<Vec<_>, _>>()?;
        let device = if first.src_device.is_host() { first.dst_device } else { first.src_device };
        let stream = match self.streams.iter().find(|(of, _)| *of == device) {
            Some((_, stream)) => *stream,
            None => {
                let stream = self.context.create_stream(device)?;
                self.streams.push((device, stream));
                stream
            }
        };
        for _ in 0..WARM_UP {
            timed(&at[0], stream)?;
        }
        let first = timed(&at[0], stream)?;
        Ok(Bound { at, stream, first })
    }

    /// Allocates the source and the destination of one transfer for a set of buffers. Each address is recorded as soon as it is allocated,
    /// so that it is freed even if the next allocation fails.
    fn allocate(&mut self, set: usize, shape: &Shape) -> Result<(), Error> {
        let &Shape { src_device, dst_device, bytes, .. } = shape;
        self.sets.resize_with(self.sets.len().max(set + 1), Vec::new);
        let src = self.context.allocate(src_device, bytes)?;
        self.sets[set].push(Transfer { dst: 0, dst_device, src, src_device, bytes });
        let last = self.sets[set].len() - 1;
        self.sets[set][last].dst = self.context.allocate(dst_device, bytes)?;
        Ok(())
    }

    fn free(&mut self) {
        for address in self.sets.drain(..).flatten().flat_map(|t| [t.src, t.dst]).filter(|address| *address != 0) {
            if let Err(error) = self.context.free(address) {
                log::warn!("could not free a buffer of the tuner: {error}");
            }
        }
    }
}

impl Drop for Executed<'_> {
    fn drop(&mut self) {
        self.free();
        for (_, stream) in self.streams.drain(..) {
            if let Err(error) = self.context.destroy_stream(stream) {
                log::warn!("could not destroy a stream of the tuner: {error}");
            }
        }
    }
}

impl Score for Executed<'_> {
    type Error = Error;

    fn seconds(&mut self, plan: &Plan) -> Result<f64, Error> {
        let Bound { at, stream, first } = self.bind(plan)?;
        let rounds = ((SCORE_SECONDS / first.max(1e-9)) as usize).clamp(*SCORE_ROUNDS.start(), *SCORE_ROUNDS.end());
        let mut sum = 0.0;
        for plan in &at {
            // This execution is not timed, because it updates the graph to these addresses.
            timed(plan, stream)?;
            let rounds = rounds.div_ceil(at.len());
            let mut seconds = (0..rounds).map(|_| timed(plan, stream)).collect::<Result<Vec<f64>, _>>()?;
            seconds.sort_by(f64::total_cmp);
            sum += seconds[rounds / 2];
        }
        Ok(sum / at.len() as f64)
    }

    fn least_gain(&self) -> f64 {
        LEAST_GAIN
    }

    fn duel(&mut self, incumbent: &Plan, challenger: &Plan) -> Result<Verdict, Error> {
        let Bound { at, stream, .. } = self.bind(incumbent)?;
        let challengers = self.bind(challenger)?.at;
        let mut rounds = Vec::with_capacity(DUEL_ROUNDS);
        for (index, (incumbent, challenger)) in at.iter().zip(&challengers).enumerate() {
            // These executions are not timed, because they update the graphs to these addresses.
            timed(incumbent, stream)?;
            timed(challenger, stream)?;
            let until = DUEL_ROUNDS * (index + 1) / at.len();
            while rounds.len() < until {
                // The order of the two plans changes in each round, so that neither plan has an advantage.
                rounds.push(if rounds.len().is_multiple_of(2) {
                    let first = timed(incumbent, stream)?;
                    (first, timed(challenger, stream)?)
                } else {
                    let first = timed(challenger, stream)?;
                    (timed(incumbent, stream)?, first)
                });
            }
        }
        Ok(Verdict::of(&rounds, LEAST_GAIN))
    }
}

/// Executes a plan once. Returns the time in seconds from its submission until the host sees its completion.
fn timed(plan: &execute::Plan, stream: StreamHandle) -> Result<f64, Error> {
    let start = Instant::now();
    plan.execute(stream)?.wait()?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::host::HostBackend;
    use crate::plan::{Options, plan};
    use crate::topology::MemoryKind;
    use crate::topology::{self, Machine};

    #[test]
    fn a_batch_for_which_there_is_no_memory_leaves_none_behind_and_the_next_is_scored() {
        let machine = Arc::new(Machine::new(topology::load("pcie-4").expect("a preset")).expect("well formed"));
        let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
        let context = Context::with_backend(machine.clone(), backend, Config::default()).expect("a context");
        let mut executed = Executed::new(&context);
        let (host, gpu) = (DeviceId::HOST, DeviceId::gpu(0));
        let shape = |bytes| Shape {
            source: 0,
            dst_device: gpu,
            src_device: host,
            dst_kind: MemoryKind::Device,
            src_kind: MemoryKind::Pinned,
            bytes,
        };
        let of = |batch: &[Shape]| plan(&machine, batch, &Options::default()).expect("a plan");
        let allocated = || context.machine().devices().map(|device| context.backend().allocated_bytes(device)).sum::<u64>();
        // The first transfer fits into memory; the second does not.
        let error = executed.seconds(&of(&[shape(1 << 20), shape(1 << 60)])).expect_err("more than there is").to_string();
        assert!(error.contains(&(1_u64 << 60).to_string()), "{error}");
        assert_eq!(allocated(), 0);
        assert!(executed.seconds(&of(&[shape(1 << 20)])).expect("scored") > 0.0);
        assert_eq!(allocated(), 2 * HOST_BUFFERS as u64 * (1 << 20));
        drop(executed);
        assert_eq!(allocated(), 0);
    }
}
