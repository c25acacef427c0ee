//! Runs the second process (peer) of the cases `put_signal` and `put_latency`. The peer is the same program, started again with `--peer`.
//! It has a buffer on GPU 1 (its inbox) and a counter, both of which the benchmark process maps. It executes each order from standard input
//! and then writes a line to standard output.
//!
//! | order | action |
//! | --- | --- |
//! | `join INBOX COUNTER` | maps the memory of the benchmark process to which `echo` answers, and executes one put |
//! | `poison`, `check` | fills its inbox with wrong bytes; checks every byte of its inbox |
//! | `await VALUE` | blocks until its counter has reached VALUE |
//! | `echo put\|signal FIRST TRIPS` | enqueues TRIPS times: a wait for its counter, then an answer (a put with signal, or a signal only) |
//! | `drain` | blocks until the enqueued work is done |
//! | `leave` | unmaps the memory of the benchmark process |
//! | `meet SOCKET` | creates a node as rank 1, to send data back; then `pass TRIPS` enqueues the transfers, and `rest` waits for them |

use super::ball::Ball;
use super::cases::Leg;
use super::memory::{Buffers, Pattern, free};
use super::plain::{self, Plain};
use super::{Bench, Failure, is_on_gpus};
use mpgpu_backend::{Signal, StreamHandle};
use mpgpu_contexts::{Context, Plan, PlanOptions, Transfer};
use mpgpu_core::topology::DeviceId;
use mpgpu_ipc::{Handle, signal};
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

/// Time limit in seconds of a wait for a signal. It is longer than any put takes. If a wait of the peer exceeds the limit, the peer reports
/// the failure.
const PATIENCE_SECONDS: f64 = 60.0;
/// Size of the memory that holds a counter, in bytes. It is one cache line.
const COUNTER_BYTES: u64 = 64;

/// Device on which the benchmark process allocates memory.
pub const HERE: DeviceId = DeviceId::gpu(0);
/// Device on which the peer process allocates memory.
const THERE: DeviceId = DeviceId::gpu(1);

/// Memory that one of the two processes shares with the other: an inbox, a source and a counter.
pub struct Side<'a> {
    context: &'a Context,
    /// Source and destination of one transfer. The source contains the pattern, and the destination is the inbox.
    pub buffers: Buffers<'a>,
    counter: u64,
}

impl<'a> Side<'a> {
    pub fn new(
        context: &'a Context,
        plain: &mut dyn Plain,
        pattern: &Pattern<'_>,
        device: DeviceId,
        bytes: u64,
    ) -> Result<Side<'a>, Failure> {
        let buffers = Buffers::new(context, plain, pattern, &[Leg { src: device, dst: device, bytes, pageable: false }])?;
        let counter = context.allocate_shared(DeviceId::HOST, COUNTER_BYTES)?;
        let side = Side { context, buffers, counter };
        plain.set_now(DeviceId::HOST, counter, 0, COUNTER_BYTES)?;
        Ok(side)
    }

    /// Returns the signal with which a stream waits until the counter has reached `value`.
    pub fn at(&self, value: u64) -> Signal {
        Signal { counter: self.counter, value }
    }

    /// Returns the handles of the inbox and of the counter as text, to send them to the other process.
    fn describe(&self) -> Result<String, Failure> {
        let inbox = self.buffers.transfers[0];
        let handles =
            [self.context.state().export_memory(inbox.dst, inbox.bytes)?, self.context.state().export_memory(self.counter, COUNTER_BYTES)?];
        Ok(handles.map(|handle| handle.encode().iter().map(|byte| format!("{byte:02x}")).collect::<String>()).join(" "))
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        free(self.context, [self.counter].into_iter());
    }
}

/// Inbox and counter of the other process, mapped in this process.
pub struct Mapped<'a> {
    context: &'a Context,
    inbox: (u64, DeviceId),
    counter: u64,
}

impl<'a> Mapped<'a> {
    fn new(context: &'a Context, described: &str) -> Result<Mapped<'a>, Failure> {
        let (inbox, counter) =
            described.split_once(' ').ok_or_else(|| format!("{described}: must be two handles, separated by a space"))?;
        let inbox = context.state().import_memory(&handle_of(inbox)?)?;
        let (counter, _) = context.state().import_memory(&handle_of(counter)?)?;
        Ok(Mapped { context, inbox, counter })
    }

    /// Returns a plan that copies the source of `from` into the inbox of the other process. No other rank copies at the same time, so the
    /// put may use the path through host memory.
    pub fn put(&self, from: &Transfer, options: PlanOptions) -> Result<Arc<Plan>, Failure> {
        let host_path = self.context.config().host_path.or(Some(true));
        let transfer = Transfer { dst: self.inbox.0, dst_device: self.inbox.1, ..*from };
        Ok(self.context.plan(&[transfer], &PlanOptions { host_path, ..options })?)
    }

    pub fn raise(&self, stream: StreamHandle, value: u64) -> Result<(), Failure> {
        Ok(self.context.stream_raise_signals(stream, &[Signal { counter: self.counter, value }])?)
    }

    /// Polls the counter until it has reached a value. Both processes map the counter, so a thread of either process sees the value at the
    /// same time.
    pub fn see(&self, value: u64) -> Result<(), Failure> {
        let start = Instant::now();
        // SAFETY: the counter is the first 8 bytes of memory that stays imported as long as `self` lives. Only the other process writes it.
        while !signal::reached(unsafe { signal::load(self.counter) }, value) {
            if start.elapsed().as_secs_f64() > PATIENCE_SECONDS {
                return Err(format!("the signal {value} did not arrive within {PATIENCE_SECONDS} s").into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        for address in [self.inbox.0, self.counter] {
            if let Err(error) = self.context.state().close_memory(address) {
                log::warn!("could not unmap memory of the other process of the benchmark: {error}");
            }
        }
    }
}

fn handle_of(text: &str) -> Result<Handle, Failure> {
    let bad = || format!("{text}: not the 128 bytes of a handle in hexadecimal digits");
    let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>().ok_or_else(bad)?;
    let bytes: Vec<u8> = digits.chunks(2).map(|two| two.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    Ok(Handle::decode(bytes.as_slice().try_into().map_err(|_| bad())?)?)
}

/// Executes orders until standard input ends. `seed` is the seed of the pattern in the memory, and `bytes` is the size of the inbox.
pub fn run(context: &Context, seed: u64, bytes: u64) -> Result<(), Failure> {
    let mut plain = plain::of(context);
    // The stream is created first, so that its GPU is known when host memory is pinned and the benchmark's memory is mapped.
    let stream = context.create_stream(THERE)?;
    let pattern = Pattern::of_seed(context, bytes, 1, seed)?;
    let side = Side::new(context, &mut *plain, &pattern, THERE, bytes)?;
    let (mut bench, mut ball): (Option<Mapped<'_>>, Option<Ball>) = Default::default();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", side.describe()?)?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let mut obey = || -> Result<(), Failure> {
            match words[..] {
                ["join", inbox, counter] => {
                    let mapped = Mapped::new(context, &format!("{inbox} {counter}"))?;
                    // The put is executed once now, because the first execution may wait until the device is idle. During `echo` the device
                    // waits for the benchmark process, so this would be a deadlock.
                    mapped.put(&side.buffers.transfers[0], PlanOptions::default())?.enqueue(stream)?;
                    context.synchronize_stream(stream)?;
                    bench = Some(mapped);
                }
                ["poison"] => side.buffers.poison(&mut *plain)?,
                ["check"] => side.buffers.check(&mut *plain, &pattern)?,
                ["await", value] => context.wait_signal(side.at(value.parse()?), PATIENCE_SECONDS)?,
                ["echo", what @ ("put" | "signal"), first, trips] => {
                    let bench = bench.as_ref().ok_or("echo before join")?;
                    let first: u64 = first.parse()?;
                    let put = (what == "put").then(|| bench.put(&side.buffers.transfers[0], PlanOptions::default())).transpose()?;
                    for value in first..first + trips.parse::<u64>()? {
                        context.stream_wait_signals(stream, &[side.at(value)])?;
                        put.iter().try_for_each(|put| put.enqueue(stream))?;
                        bench.raise(stream, value)?;
                    }
                }
                ["drain"] => context.synchronize_stream(stream)?,
                ["leave"] => (bench, ball) = (None, None),
                ["meet", socket] => ball = Some(Ball::new(context, 1, Path::new(socket), bytes)?),
                ["pass", trips] => ball.as_ref().ok_or("pass before meet")?.enqueue(trips.parse()?)?,
                ["rest"] => ball.as_ref().ok_or("rest before meet")?.synchronize()?,
                _ => return Err(format!("{line}: unknown command").into()),
            }
            Ok(())
        };
        match obey() {
            Ok(()) => writeln!(out, "done")?,
            Err(error) => writeln!(out, "{error}")?,
        }
    }
    Ok(())
}

/// Peer process, as seen by the benchmark process.
pub struct Neighbour<'a> {
    process: Peer,
    pub memory: Mapped<'a>,
}

/// Child process that is killed when this value is dropped.
struct Peer {
    process: Child,
    answers: RefCell<BufReader<std::process::ChildStdout>>,
}

impl<'a> Neighbour<'a> {
    /// Starts the peer process. Its inbox has `bytes` bytes, and it has the same pattern as the benchmark process.
    pub fn start(bench: &Bench<'a>, bytes: u64) -> Result<Neighbour<'a>, Failure> {
        let (context, pattern) = (bench.context, &bench.pattern);
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "--peer", &pattern.seed().to_string(), &bytes.to_string()]);
        command.args(["--backend", if is_on_gpus(context) { "cuda" } else { "host" }]);
        if let Some(topology) = &context.config().topology {
            command.args(["--topology", topology]);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers = BufReader::new(process.stdout.take().ok_or("the peer has no standard output")?);
        let process = Peer { process, answers: answers.into() };
        let memory = Mapped::new(context, &process.answer("its start")?)?;
        Ok(Neighbour { process, memory })
    }

    /// Sends an order to the peer and waits until the peer has completed it.
    pub fn tell(&self, order: &str) -> Result<(), Failure> {
        self.tell_beside(order, || Ok(()))
    }

    /// Sends an order to the peer, runs `part` in this process meanwhile, and waits until the peer has completed the order. Returns the
    /// result of `part`.
    pub fn tell_beside<T>(&self, order: &str, part: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        writeln!(self.process.process.stdin.as_ref().ok_or("the peer has no standard input")?, "{order}")?;
        let done = part();
        let answer = self.process.answer(order)?;
        if answer == "done" { done } else { Err(format!("the other process of the benchmark failed during {order:.20}: {answer}").into()) }
    }

    /// Makes the peer map the memory in `side`, to which its answers are sent.
    pub fn join(&self, side: &Side<'_>) -> Result<(), Failure> {
        self.tell(&format!("join {}", side.describe()?))
    }
}

impl Peer {
    fn answer(&self, order: &str) -> Result<String, Failure> {
        let mut line = String::new();
        if self.answers.borrow_mut().read_line(&mut line)? == 0 {
            return Err(format!("the other process of the benchmark ended during {order:.20}; see the error that it printed").into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
