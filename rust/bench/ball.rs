//! Measures a put with signal that is made by one call (case `put_latency`): both processes execute a node plan (plan of several ranks) of
//! one transfer.

use super::Failure;
use mpgpu::{Buffer, Context, ContextOptions, Device, Half, Node, Plan, PlanOptions, Stream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Ping-pong test: node plans (plans of both ranks) that send data from rank 0 to rank 1 and back, with the buffers and the stream of this
/// rank.
pub struct Ball {
    /// The plan of the transfer to rank 1, and the plan of the transfer back to rank 0.
    plans: Vec<Plan>,
    stream: Stream,
    /// Buffer from which rank 0 sends the data.
    thrown: Buffer<u8>,
    /// Buffer that receives the data. Rank 1 sends the data back from here.
    caught: Buffer<u8>,
    gate: Arc<AtomicBool>,
}

impl Ball {
    /// Connects the two processes and makes the plans. Both processes call this function with the same socket path. The socket must not
    /// exist yet.
    pub fn new(context: &mpgpu_contexts::Context, rank: u32, socket: &Path, bytes: u64) -> Result<Ball, Failure> {
        let config = context.config();
        let options = ContextOptions { backend: Some(config.backend), topology: config.topology.clone(), ..ContextOptions::default() };
        let context = Context::with_options(&options)?;
        let device = Device::gpu(rank);
        let node = Node::at_socket(&context, rank, 2, socket, &[device])?;
        let memory = || Buffer::zeroed(&context, device, usize::try_from(bytes)?).map_err(Failure::from);
        let (thrown, caught) = (memory()?, memory()?);
        let pass = |from: u32, source: &Buffer<u8>, destination: &Buffer<u8>| {
            let half = if from == rank { Half::send(1 - rank, 0, source) } else { Half::receive(from, 0, destination) };
            node.exchange([half], &PlanOptions::default())
        };
        let there = pass(0, &thrown, &caught)?;
        let back = pass(1, &caught, &caught)?;
        Ok(Ball { plans: vec![there, back], stream: Stream::new(&context, device)?, thrown, caught, gate: Arc::default() })
    }

    /// Enqueues `trips` round trips in the stream of this rank.
    pub fn enqueue(&self, trips: u64) -> Result<(), Failure> {
        (0..trips).try_for_each(|_| self.plans.iter().try_for_each(|plan| plan.enqueue(&self.stream)))?;
        Ok(())
    }

    /// Blocks the stream of this rank: later work in the stream waits until [`open`](Ball::open) is called.
    pub fn close(&self) -> Result<(), Failure> {
        self.gate.store(false, Ordering::Relaxed);
        let gate = Arc::clone(&self.gate);
        Ok(self.stream.launch_host(move || {
            while !gate.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        })?)
    }

    pub fn open(&self) {
        self.gate.store(true, Ordering::Release);
    }

    /// Destroys the plans. Memory that the other rank has mapped is released once both ranks have called this function.
    pub fn end(&mut self) {
        self.plans.clear();
    }

    pub fn synchronize(&self) -> Result<(), Failure> {
        Ok(self.stream.synchronize()?)
    }

    /// Changes the data that rank 0 sends from now on to a pattern for this round, and returns it.
    pub fn change(&self, round: u64) -> Result<Vec<u8>, Failure> {
        let bytes: Vec<u8> = (0..self.thrown.len() as u64).map(|at| (at * 7 + round * 31 + 1) as u8).collect();
        self.thrown.write(&self.stream, &bytes)?;
        Ok(bytes)
    }

    /// Returns an error if the data that rank 0 received last differs from `bytes`.
    pub fn has_come(&self, bytes: &[u8]) -> Result<(), Failure> {
        if self.caught.to_vec(&self.stream)? == bytes {
            Ok(())
        } else {
            Err("an execution of a node plan (shared by both ranks) has delivered wrong bytes".into())
        }
    }
}

impl Drop for Ball {
    /// Unblocks the stream, because destroying it waits for the enqueued work. That work may still be blocked after an error.
    fn drop(&mut self) {
        self.open();
    }
}
