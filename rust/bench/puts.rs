//! Measures puts with signal into memory of another process: `put_signal` and `put_latency`.
//!
//! A put with signal is a plan whose destination is imported memory, followed by setting a counter in the same stream. The put has arrived
//! when the counter, which both processes map, has the new value. It is compared with three other measurements. The first is the same plan
//! with a destination in this process. The second is the put without the signal. It shows how much of the additional cost is caused by the
//! signal, and how much by the memory of another process. The third is the same put, timed until its stream is idle, which is later than
//! its arrival. Before each measured put the same plan is executed once without timing, as in a loop over one buffer. In the rows `by
//! turns`, a copy into other memory is executed before each measured put instead.
//!
//! The latency is half the time of a round trip between streams of two processes, averaged over many round trips that both processes
//! enqueue beforehand. It is also measured for a node plan (plan of several ranks) of one transfer, which does put, signal and wait in one
//! call.

use super::ball::Ball;
use super::compare::{Comparison, Contestant, Samples, contest};
use super::peer::{HERE, Neighbour, Side};
use super::{Bench, Case, Failure};
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{Context, Plan, PlanOptions};
use std::cell::Cell;
use std::time::Instant;

/// Variations of the measurement of puts. Each entry holds three values: the number of puts that are enqueued before the host waits (four
/// in flight in UCX's benchmark in tests/gpu/ucx), true if as many untimed puts are executed before, and the name of the comparison within
/// one process.
const WAYS: [(usize, bool, &str); 3] =
    [(1, true, "in one process"), (4, true, "in one process, in a row"), (1, false, "in one process, by turns")];
/// Number of round trips that are enqueued together. Each round trip takes three operations, so the total is well below the thousand
/// operations that a CUDA stream can hold.
const TRIPS: u64 = 100;
const TURNS: u32 = 21;

/// Method that executes a plan several times in one stream. If there is a receiver (`to`), each execution is followed by a signal to it.
struct Puts<'a> {
    context: &'a Context,
    plan: &'a Plan,
    stream: StreamHandle,
    in_a_row: usize,
    /// True if the same executions are made once, untimed, before the timed ones.
    again: bool,
    to: Option<&'a Neighbour<'a>>,
    /// True if the method ends when the last signal has arrived, false if it ends when the stream is idle.
    until_seen: bool,
    /// Value that the last sent signal has set in the receiver's counter. All methods of one comparison share this variable.
    raised: &'a Cell<u64>,
}

impl Puts<'_> {
    /// Executes the puts once and makes the receiver compare every byte.
    fn arrive(&mut self, peer: &Neighbour<'_>) -> Result<(), Failure> {
        peer.tell("poison")?;
        self.issue()?;
        // The receiver checks the data as soon as it sees the last signal.
        peer.tell(&format!("await {}", self.raised.get()))?;
        peer.tell("check")?;
        Ok(self.context.synchronize_stream(self.stream)?)
    }
}

impl Contestant for Puts<'_> {
    fn prepare(&mut self) -> Result<(), Failure> {
        if self.again {
            self.issue()?;
        }
        // The stream may not be idle yet when the signal has arrived.
        Ok(self.context.synchronize_stream(self.stream)?)
    }

    fn issue(&mut self) -> Result<(), Failure> {
        for _ in 0..self.in_a_row {
            self.plan.enqueue(self.stream)?;
            if let Some(to) = self.to {
                self.raised.set(self.raised.get() + 1);
                to.memory.raise(self.stream, self.raised.get())?;
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Failure> {
        match self.to.filter(|_| self.until_seen) {
            Some(to) => to.memory.see(self.raised.get()),
            None => Ok(self.context.synchronize_stream(self.stream)?),
        }
    }
}

impl Bench<'_> {
    /// Compares puts with signal into memory of another process with executions of the same plan into memory of this process.
    pub fn put_signal(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(self.context.machine().gpu_count(), size))?;
        let peer = Neighbour::start(self, size)?;
        let stream = self.context.create_stream(HERE)?;
        let within = self.context.plan(&buffers.transfers, &Default::default())?;
        let put = peer.memory.put(&buffers.transfers[0], PlanOptions::default())?;
        let raised = Cell::new(0);
        let mut results = Vec::new();
        for (in_a_row, again, name) in WAYS {
            let mut with_signal =
                Puts { context: self.context, plan: &put, stream, in_a_row, again, to: Some(&peer), until_seen: true, raised: &raised };
            let mut in_process = Puts { plan: &within, to: None, ..with_signal };
            let mut unsignalled = Puts { to: None, ..with_signal };
            let mut to_the_end = Puts { until_seen: false, ..with_signal };
            with_signal.arrive(&peer)?;
            self.verify("mpgpu in one process", &mut in_process, &[&buffers])?;
            self.plain.borrow_mut().make_current(HERE)?;
            let samples = contest(
                &mut [
                    ("mpgpu", &mut with_signal),
                    (name, &mut in_process),
                    ("the put without signal", &mut unsignalled),
                    ("until its stream is done", &mut to_the_end),
                ],
                self.repeat,
            )?;
            with_signal.arrive(&peer)?;
            let bytes = size * in_a_row as u64;
            results.push(Comparison { bytes, ..Comparison::of(case, size, in_a_row, &put, samples) });
        }
        self.context.destroy_stream(stream)?;
        Ok(results)
    }

    /// Compares puts with signal over several paths with the same puts over one path.
    pub fn put_paths(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(self.context.machine().gpu_count(), size))?;
        let peer = Neighbour::start(self, size)?;
        let stream = self.context.create_stream(HERE)?;
        let put = peer.memory.put(&buffers.transfers[0], PlanOptions::default())?;
        let one_path = peer.memory.put(&buffers.transfers[0], PlanOptions { max_paths: Some(1), ..Default::default() })?;
        let raised = Cell::new(0);
        let mut paths = Puts {
            context: self.context,
            plan: &put,
            stream,
            in_a_row: 1,
            again: true,
            to: Some(&peer),
            until_seen: true,
            raised: &raised,
        };
        let mut plain = Puts { plan: &one_path, ..paths };
        plain.arrive(&peer)?;
        paths.arrive(&peer)?;
        self.plain.borrow_mut().make_current(HERE)?;
        let samples = contest(&mut [("mpgpu", &mut paths), ("the put over one path", &mut plain)], self.repeat)?;
        paths.arrive(&peer)?;
        self.context.destroy_stream(stream)?;
        Ok(vec![Comparison::of(case, size, 1, &put, samples)])
    }

    /// Measures half the time of a round trip: of a put with signal, of a signal alone, and of a node plan.
    pub fn put_latency(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let side = Side::new(self.context, &mut **self.plain.borrow_mut(), &self.pattern, HERE, size)?;
        let gate = Side::new(self.context, &mut **self.plain.borrow_mut(), &self.pattern, HERE, 1)?;
        let peer = Neighbour::start(self, size)?;
        peer.join(&side)?;
        let [stream, opener] = [self.context.create_stream(HERE)?, self.context.create_stream(HERE)?];
        let put = peer.memory.put(&side.buffers.transfers[0], PlanOptions::default())?;

        // The put is executed once before the gate is closed, because its first execution may wait for the device.
        put.enqueue(stream)?;
        self.context.synchronize_stream(stream)?;
        side.buffers.poison(&mut **self.plain.borrow_mut())?;
        peer.tell("poison")?;
        let socket = std::env::temp_dir().join(format!("mpgpu-bench-{}", std::process::id()));
        let order = format!("meet {}", socket.display());
        let mut ball = peer.tell_beside(&order, || Ball::new(self.context, 0, &socket, size))?;
        let rounds = self.repeat.unwrap_or(TURNS);
        let mut samples = ["mpgpu", "the signal alone", "a node plan"].map(Samples::new);
        let mut first = 1;
        for turn in 0..=rounds {
            for (what, samples) in ["put", "signal"].into_iter().zip(&mut samples) {
                peer.tell(&format!("echo {what} {first} {TRIPS}"))?;
                let open = gate.at(first);
                self.context.stream_wait_signals(stream, &[open])?;
                let start = Instant::now();
                for value in first..first + TRIPS {
                    if what == "put" {
                        put.enqueue(stream)?;
                    }
                    peer.memory.raise(stream, value)?;
                    self.context.stream_wait_signals(stream, &[side.at(value)])?;
                }
                let issue = start.elapsed();
                // Both processes have enqueued everything, so the measured time includes no work of a host thread.
                let start = Instant::now();
                self.context.stream_raise_signals(opener, &[open])?;
                self.context.synchronize_stream(stream)?;
                let total = start.elapsed();
                peer.tell("drain")?;
                first += TRIPS;
                if turn > 0 {
                    samples.add((issue.as_secs_f64() / TRIPS as f64, total.as_secs_f64() / (2 * TRIPS) as f64));
                }
            }
        }
        peer.tell("check")?;
        side.buffers.check(&mut **self.plain.borrow_mut(), &self.pattern)?;
        peer.tell_beside("pass 1", || ball.enqueue(1))?;
        ball.synchronize()?;
        for turn in 0..=rounds {
            let thrown = ball.change(u64::from(turn))?;
            ball.close()?;
            let issue = peer.tell_beside(&format!("pass {TRIPS}"), || {
                let start = Instant::now();
                ball.enqueue(TRIPS)?;
                Ok(start.elapsed())
            })?;
            let start = Instant::now();
            ball.open();
            ball.synchronize()?;
            let total = start.elapsed();
            peer.tell("rest")?;
            ball.has_come(&thrown)?;
            if turn > 0 {
                samples[2].add((issue.as_secs_f64() / TRIPS as f64, total.as_secs_f64() / (2 * TRIPS) as f64));
            }
        }
        ball.end();
        peer.tell("leave")?;
        self.context.synchronize_stream(opener)?;
        [stream, opener].into_iter().try_for_each(|stream| self.context.destroy_stream(stream))?;
        Ok(vec![Comparison::of(case, size, 1, &put, samples.into())])
    }
}
