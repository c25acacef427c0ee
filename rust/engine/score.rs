//! The score by execution: medians, and duels in turns.

use super::batch::Transfer;
use super::context::Context;
use super::error::Error;
use super::execute;
use crate::backend::StreamHandle;
use crate::plan::{Plan, Shape};
use crate::topology::DeviceId;
use crate::tune::{Score, Verdict};
use std::sync::Arc;
use std::time::Instant;

/// Executions before any is timed: the first launch of a graph and the first use of a peer link are slow.
const WARM_UP: usize = 3;
/// Executions of one score: as many as fit into this time, and within these bounds.
const SCORE_SECONDS: f64 = 0.02;
const SCORE_ROUNDS: std::ops::RangeInclusive<usize> = 7..=51;
/// Rounds of a duel, in each of which both are executed. Odd, so that the median is one of them. Copies of host memory take some per cent more or
/// less from one round to the next.
const DUEL_ROUNDS: usize = 101;
/// Rounds differ by a few tenths of a per cent, hosts of one kind by a few per cent: less than this is nobody's gain.
const LEAST_GAIN: f64 = 0.01;

/// Scores plans by executing them on a context whose machine they were made for, in memory and streams of its own, which it gives back
/// when dropped. Nothing else should run on the machine meanwhile.
pub struct Executed<'a> {
    context: &'a Context,
    /// In the order of devices; where the first transfer starts, or ends if it starts in host memory.
    streams: Vec<(DeviceId, StreamHandle)>,
    /// Buffers for the batch that was scored last.
    transfers: Vec<Transfer>,
}

impl<'a> Executed<'a> {
    /// Takes nothing yet.
    pub fn new(context: &'a Context) -> Executed<'a> {
        Executed { context, streams: Vec::new(), transfers: Vec::new() }
    }

    /// The plan at addresses of its own, warm.
    fn bind(&mut self, plan: &Plan) -> Result<(Arc<execute::Plan>, StreamHandle), Error> {
        let shapes = || plan.transfers.iter().map(|transfer| &transfer.shape);
        let fit = |t: &Transfer, s: &Shape| (t.src_device, t.dst_device) == (s.src_device, s.dst_device) && t.bytes >= s.bytes;
        if self.transfers.len() != plan.transfers.len() || !self.transfers.iter().zip(shapes()).all(|(t, s)| fit(t, s)) {
            self.free();
            for shape in shapes() {
                let (src_device, dst_device, bytes) = (shape.src_device, shape.dst_device, shape.bytes);
                let src = self.context.allocate(src_device, bytes)?;
                // Known from here on, so that an error below frees it.
                self.transfers.push(Transfer { dst: 0, dst_device, src, src_device, bytes });
                let last = self.transfers.len() - 1;
                self.transfers[last].dst = self.context.allocate(dst_device, bytes)?;
            }
        }
        let transfers: Vec<Transfer> = self.transfers.iter().zip(shapes()).map(|(t, s)| Transfer { bytes: s.bytes, ..*t }).collect();
        let bound = self.context.plan_with(&transfers, &plan.options)?;
        let first =
            transfers.first().ok_or_else(|| Error::NotSupported("an empty batch takes no time: score plans of some transfer".into()))?;
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
            timed(&bound, stream)?;
        }
        Ok((bound, stream))
    }

    fn free(&mut self) {
        for address in self.transfers.drain(..).flat_map(|t| [t.src, t.dst]).filter(|address| *address != 0) {
            if let Err(error) = self.context.free(address) {
                log::warn!("freeing a buffer of the tuner: {error}");
            }
        }
    }
}

impl Drop for Executed<'_> {
    fn drop(&mut self) {
        self.free();
        for (_, stream) in self.streams.drain(..) {
            if let Err(error) = self.context.destroy_stream(stream) {
                log::warn!("destroying a stream of the tuner: {error}");
            }
        }
    }
}

impl Score for Executed<'_> {
    type Error = Error;

    fn seconds(&mut self, plan: &Plan) -> Result<f64, Error> {
        let (bound, stream) = self.bind(plan)?;
        let first = timed(&bound, stream)?;
        let rounds = ((SCORE_SECONDS / first.max(1e-9)) as usize).clamp(*SCORE_ROUNDS.start(), *SCORE_ROUNDS.end());
        let mut seconds = (0..rounds).map(|_| timed(&bound, stream)).collect::<Result<Vec<f64>, _>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[rounds / 2])
    }

    fn least_gain(&self) -> f64 {
        LEAST_GAIN
    }

    fn duel(&mut self, incumbent: &Plan, challenger: &Plan) -> Result<Verdict, Error> {
        let (incumbent, stream) = self.bind(incumbent)?;
        let (challenger, _) = self.bind(challenger)?;
        let mut rounds = Vec::with_capacity(DUEL_ROUNDS);
        for round in 0..DUEL_ROUNDS {
            // Each goes first equally often.
            rounds.push(if round % 2 == 0 {
                let first = timed(&incumbent, stream)?;
                (first, timed(&challenger, stream)?)
            } else {
                let first = timed(&challenger, stream)?;
                (timed(&incumbent, stream)?, first)
            });
        }
        Ok(Verdict::of(&rounds, LEAST_GAIN))
    }
}

/// Seconds from issue until the host sees it done.
fn timed(plan: &execute::Plan, stream: StreamHandle) -> Result<f64, Error> {
    let start = Instant::now();
    plan.execute(stream)?.wait()?;
    Ok(start.elapsed().as_secs_f64())
}
