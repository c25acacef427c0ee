//! Measures a put with signal that is one call: a node plan of one transfer, which both processes execute (`put_latency`).

use super::Failure;
use mpgpu::{Buffer, Context, ContextOptions, Device, Half, Node, Plan, PlanOptions, Stream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data that travels from rank 0 to rank 1 and back, each time by a node plan.
pub struct Ball {
    /// Plans of the transfer to rank 1 and of the transfer back.
    plans: Vec<Plan>,
    stream: Stream,
    /// Source of rank 0, from which the data is sent.
    thrown: Buffer<u8>,
    /// Destination of rank 0. Rank 1 sends back the data that it has received.
    caught: Buffer<u8>,
    gate: Arc<AtomicBool>,
}

impl Ball {
    /// Connects both processes. Each of them calls this function with the path of the same socket, which does not exist yet.
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

    /// Enqueues `trips` round trips in the stream.
    pub fn enqueue(&self, trips: u64) -> Result<(), Failure> {
        (0..trips).try_for_each(|_| self.plans.iter().try_for_each(|plan| plan.enqueue(&self.stream)))?;
        Ok(())
    }

    /// Makes later work of the stream wait until the gate is opened.
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

    /// Changes the data that rank 0 sends from now on, and returns the new data.
    pub fn change(&self, round: u64) -> Result<Vec<u8>, Failure> {
        let bytes: Vec<u8> = (0..self.thrown.len() as u64).map(|at| (at * 7 + round * 31 + 1) as u8).collect();
        self.thrown.write(&self.stream, &bytes)?;
        Ok(bytes)
    }

    /// Returns an error if the data that has come back differs from `bytes`.
    pub fn has_come(&self, bytes: &[u8]) -> Result<(), Failure> {
        if self.caught.to_vec(&self.stream)? == bytes { Ok(()) } else { Err("node plans returned wrong bytes".into()) }
    }
}

impl Drop for Ball {
    /// Opens the gate. This is needed even after an error, because destroying the stream waits for work that may be behind the closed gate.
    fn drop(&mut self) {
        self.open();
    }
}
