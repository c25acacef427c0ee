//! Puts with signal into another process's memory: `put_signal` and `put_latency`.
//!
//! A put with signal is a plan whose destination is imported memory, and a counter raised after it in the same stream. It has arrived when the
//! counter, which lies in memory that both processes map, is seen to be raised. Bandwidth is held against the plan of the same size into memory
//! of this process, and against the put without the signal, which tells what the signal costs from what memory of another process does: both
//! until the host sees the stream done. A fourth time is that of the put with signal until its stream is done, which is later than its
//! arrival. Each follows an execution of the same plan that is not timed, as in a loop over one buffer; and once more `by turns`, where it
//! follows a copy into other memory. Latency is half of a round trip from stream to stream, of many that are enqueued beforehand by both
//! processes.

use super::Failure;
use super::cases::Case;
use super::contest::{Contestant, Spread, Times, contest};
use super::measure::{Bench, Measured};
use super::peer::{HERE, Neighbour, Side};
use mpgpu::backend::StreamHandle;
use mpgpu::engine::{Context, Plan};
use std::cell::Cell;
use std::time::Instant;

/// How puts are timed: how many in one stream before the host waits, four of which UCX's benchmark has under way in tests/gpu/ucx; whether right
/// after as many of the same; and what the same in one process is called.
const WAYS: [(usize, bool, &str); 3] =
    [(1, true, "in one process"), (4, true, "in one process, in a row"), (1, false, "in one process, by turns")];
/// Round trips that are enqueued at a time: with three operations each, well below the thousand that a stream of CUDA takes.
const TRIPS: u64 = 100;
const TURNS: usize = 21;

/// Executions of one plan in one stream, each followed by a signal if there is somebody to signal to.
struct Puts<'a> {
    context: &'a Context,
    plan: &'a Plan,
    stream: StreamHandle,
    in_a_row: usize,
    /// Whether an execution that is not timed comes before every one that is.
    again: bool,
    to: Option<&'a Neighbour<'a>>,
    /// Whether it is the last signal that is waited for, and not the stream.
    until_seen: bool,
    /// The value of the last signal.
    raised: &'a Cell<u64>,
}

impl Contestant for Puts<'_> {
    fn prepare(&mut self) -> Result<(), Failure> {
        if self.again {
            self.issue()?;
        }
        // A stream whose signal was seen may still be at its end.
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
    fn neighbour(&self, size: u64) -> Result<Neighbour<'_>, Failure> {
        Neighbour::start(self.context, self.context.backend().name(), self.topology.as_deref(), &self.pattern, size)
    }

    /// Puts with signal against the same plan in one process.
    pub fn put_signal(&self, case: &'static Case, size: u64) -> Result<Vec<Measured>, Failure> {
        let legs = case.legs(self.context.machine().gpu_count(), size);
        let buffers = self.buffers(self.context, &legs)?;
        let peer = self.neighbour(size)?;
        let stream = self.context.create_stream(HERE)?;
        let within = self.context.plan(&buffers.transfers, &self.options)?;
        let put = peer.memory.put(&buffers.transfers[0], &self.options)?;
        let raised = Cell::new(0);
        let mut results = Vec::new();
        for (in_a_row, again, name) in WAYS {
            let mut with_signal =
                Puts { context: self.context, plan: &put, stream, in_a_row, again, to: Some(&peer), until_seen: true, raised: &raised };
            let mut in_process = Puts { plan: &within, to: None, ..with_signal };
            let mut unsignalled = Puts { to: None, ..with_signal };
            let mut to_the_end = Puts { until_seen: false, ..with_signal };
            let arrives = |puts: &mut Puts<'_>| -> Result<(), Failure> {
                peer.tell("poison")?;
                puts.issue()?;
                // The receiver looks as soon as the signal is there, and waits for nothing else.
                peer.tell(&format!("await {}", raised.get()))?;
                peer.tell("check")?;
                Ok(self.context.synchronize_stream(stream)?)
            };
            arrives(&mut with_signal)?;
            self.verify("mpgpu in one process", &mut in_process, &[&buffers])?;
            self.plain.borrow_mut().prepare(&buffers.transfers)?;
            let (rounds, times) = contest(&mut [&mut with_signal, &mut in_process, &mut unsignalled, &mut to_the_end], self.repeat)?;
            arrives(&mut with_signal)?;
            let [mpgpu, others @ ..] = &times[..] else { return Err("nothing was timed".into()) };
            let mpgpu = *mpgpu;
            let bytes = size * in_a_row as u64;
            let names = [name, "the put without signal", "until its stream is done"];
            let plain = names.iter().zip(others).map(|(name, times)| ((*name).to_owned(), *times)).collect();
            results.push(Measured { case, size, transfers: in_a_row, bytes, rounds, plan: put.clone(), mpgpu, plain });
        }
        self.context.destroy_stream(stream)?;
        Ok(results)
    }

    /// Half a round trip of a put with signal, and of a signal alone.
    pub fn put_latency(&self, case: &'static Case, size: u64) -> Result<Measured, Failure> {
        let side = Side::new(self.context, &mut **self.plain.borrow_mut(), &self.pattern, HERE, size)?;
        let gate = Side::new(self.context, &mut **self.plain.borrow_mut(), &self.pattern, HERE, 1)?;
        let peer = self.neighbour(size)?;
        peer.join(&side)?;
        let [stream, opener] = [self.context.create_stream(HERE)?, self.context.create_stream(HERE)?];
        let put = peer.memory.put(&side.buffers.transfers[0], &self.options)?;

        // Once before the gate is closed: what a first execution sets up may wait for the device.
        put.enqueue(stream)?;
        self.context.synchronize_stream(stream)?;
        side.buffers.poison(&mut **self.plain.borrow_mut())?;
        peer.tell("poison")?;
        let rounds = self.repeat.unwrap_or(TURNS);
        let mut samples = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
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
                // Both processes have enqueued everything: from here on nothing waits for a host.
                let start = Instant::now();
                self.context.stream_raise_signals(opener, &[open])?;
                self.context.synchronize_stream(stream)?;
                let total = start.elapsed();
                peer.tell("drain")?;
                first += TRIPS;
                if turn > 0 {
                    samples.0.push(total.as_secs_f64() / (2 * TRIPS) as f64);
                    samples.1.push(issue.as_secs_f64() / TRIPS as f64);
                }
            }
        }
        peer.tell("check")?;
        side.buffers.check(&mut **self.plain.borrow_mut(), &self.pattern)?;
        peer.tell("leave")?;
        self.context.synchronize_stream(opener)?;
        [stream, opener].into_iter().try_for_each(|stream| self.context.destroy_stream(stream))?;
        let [mpgpu, alone] = samples.map(|(total, issue)| Times { total: Spread::of(total), issue: Spread::of(issue) });
        let plain = vec![("the signal alone".to_owned(), alone)];
        Ok(Measured { case, size, transfers: 1, bytes: size, rounds, plan: put, mpgpu, plain })
    }
}
