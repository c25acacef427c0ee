//! Tests copies of pageable memory by threads, which wait for streams and for which streams wait. Uses a driver double (simulated CUDA
//! driver) whose streams execute their work in order.

use super::double::{self, node};
use super::driver::{Code, Driver};
use super::prepared;
use super::refusals::{assert_arrived, write};
use crate::backend::{BackendError, StreamHandle};
use crate::topology::DeviceId;
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer};
use std::ptr::null_mut;

const GPU0: DeviceId = DeviceId::gpu(0);
const BYTES: usize = (9 << 20) + 4099;

fn context(threads: u32) -> Context {
    context_on(double::driver(), threads)
}

fn context_on(driver: &'static Driver, threads: u32) -> Context {
    double::start(2, true);
    node(|node| node.room = Some(100_000));
    prepared::context_with(driver, |config| Config { host_threads: threads, staging_bytes: 8 << 20, adapt: false, ..config })
}

fn transfer(dst: u64, src: u64, bytes: usize) -> Transfer {
    Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 }
}

/// Returns the number of copy threads that this process has now.
fn copying() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux").filter_map(Result::ok);
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("mpgpu-copy")).count()
}

/// Pageable memory with pages of its own: address and size in bytes.
struct Mapped(u64, usize);

impl Mapped {
    fn new(bytes: usize) -> Mapped {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(null_mut(), bytes, access, kind, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Mapped(base.expose_provenance() as u64, bytes)
    }

    /// Makes the memory from this offset on inaccessible. The pages stay mapped, because another thread could map memory into a gap.
    fn end_at(&self, offset: usize) {
        // SAFETY: whole pages of the mapping, which only the system reads.
        let code =
            unsafe { libc::mprotect(std::ptr::with_exposed_provenance_mut(self.0 as usize + offset), self.1 - offset, libc::PROT_NONE) };
        assert_eq!(code, 0);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which belongs to this object.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.0 as usize), self.1) };
    }
}

#[test]
fn pageable_memory_arrives_there_and_back_step_after_step_whatever_streams_it_takes() {
    for threads in [1, 6] {
        let context = context(threads);
        let memory = context.allocate(GPU0, BYTES as u64).expect("memory");
        let (there, back) = (vec![0_u8; BYTES], vec![0_u8; BYTES]);
        let [from, to] = [&there, &back].map(|bytes| bytes.as_ptr().expose_provenance() as u64);
        let plans = [transfer(memory, from, BYTES), transfer(to, memory, BYTES)];
        let plans = plans.map(|transfer| context.plan(&[transfer], &PlanOptions::default()).expect("a plan"));
        let used = plans.each_ref().map(|plan| plan.planned().threads.map(|used| used.threads));
        // In the model, one thread is no faster than the driver.
        let expected = if threads == 1 { None } else { Some(threads) };
        assert_eq!(used, [expected; 2]);
        let streams = [StreamHandle(0), context.create_stream(GPU0).expect("a stream")];
        for step in 0..12 {
            write(from, BYTES, step);
            let stream = streams[step % 2];
            plans[0].execute(stream).expect("enqueued").wait().expect("it arrives");
            assert_arrived(memory, BYTES, step);
            plans[0].enqueue(stream).expect("enqueued");
            plans[1].execute(stream).expect("enqueued").wait().expect("it arrives");
            assert_arrived(to, BYTES, step);
        }
    }
}

#[test]
fn many_small_pieces_share_slots_and_calls() {
    let context = context(4);
    let (count, bytes) = (300, 40_000);
    let memory = context.allocate(GPU0, (count * bytes) as u64).expect("memory");
    let ordinary: Vec<Vec<u8>> = (0..count).map(|piece| (0..bytes).map(|at| (at * 31 + piece) as u8).collect()).collect();
    let pieces: Vec<Transfer> = ordinary
        .iter()
        .enumerate()
        .map(|(piece, from)| transfer(memory + (piece * bytes) as u64, from.as_ptr().expose_provenance() as u64, bytes))
        .collect();
    let plan = context.plan(&pieces, &PlanOptions::default()).expect("a plan");
    assert!(plan.planned().threads.is_some(), "{}", plan.describe());
    // The driver does not support batches in a default stream.
    let stream = context.create_stream(GPU0).expect("a stream");
    plan.execute(stream).expect("enqueued").wait().expect("it arrives");
    (0..count).for_each(|piece| assert_arrived(memory + (piece * bytes) as u64, bytes, piece));
    assert!(double::calls("cuMemcpyBatchAsync") > 0 && double::calls("cuMemcpyDtoDAsync") < 50);
}

#[test]
fn memory_that_vanishes_is_an_error_of_that_execution_alone() {
    let context = context(6);
    let memory = context.allocate(GPU0, BYTES as u64).expect("memory");
    let whole = BYTES.next_multiple_of(4096);
    let gone = Mapped::new(whole);
    write(gone.0, BYTES, 1);
    let there = context.plan(&[transfer(memory, gone.0, BYTES)], &PlanOptions::default()).expect("a plan");
    let back = context.plan(&[transfer(gone.0, memory, BYTES)], &PlanOptions::default()).expect("a plan");
    there.execute(StreamHandle(0)).expect("enqueued").wait().expect("it is there");
    gone.end_at(5 << 20);
    for plan in [&there, &back] {
        let failed = plan.execute(StreamHandle(0)).expect("enqueued").wait().expect_err("half of it is gone");
        let BackendError::Driver { what, reason, code } = &failed else { panic!("{failed}") };
        assert!(what.contains("transfer 0") && reason.contains("unmapped") && *code == i64::from(libc::EFAULT), "{failed}");
    }
    let other = vec![0_u8; BYTES];
    let from = other.as_ptr().expose_provenance() as u64;
    write(from, BYTES, 3);
    let plan = context.plan(&[transfer(memory, from, BYTES)], &PlanOptions::default()).expect("a plan");
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("the next one is right");
    assert_arrived(memory, BYTES, 3);
}

#[test]
fn a_call_that_the_driver_refuses_leaves_nobody_waiting() {
    let context = context_on(double::failing(), 2);
    let memory = context.allocate(GPU0, BYTES as u64).expect("memory");
    let ordinary = vec![7_u8; BYTES];
    let plan =
        context.plan(&[transfer(memory, ordinary.as_ptr().expose_provenance() as u64, BYTES)], &PlanOptions::default()).expect("a plan");
    let mut failed = 0;
    for calls in 0..60 {
        const REFUSED: Code = 2;
        node(|node| node.failure = Some((calls, REFUSED)));
        let executed = plan.execute(StreamHandle(0));
        node(|node| node.failure = None);
        failed += u32::from(executed.is_err());
        executed.into_iter().for_each(|end| end.wait().expect("it arrives"));
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it arrives");
    }
    assert!(failed > 10, "{failed}");
}

#[test]
fn threads_begin_with_the_first_use_and_end_with_the_context_and_graphs_are_refused() {
    let context = context(3);
    let before = copying();
    let memory = context.allocate(GPU0, BYTES as u64).expect("memory");
    let ordinary = vec![7_u8; BYTES];
    let plan =
        context.plan(&[transfer(memory, ordinary.as_ptr().expose_provenance() as u64, BYTES)], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    node(|node| node.captured = Some(stream.0));
    let refused = plan.execute(stream).expect_err("captured");
    assert!(
        matches!(&refused, Error::Backend(BackendError::NotSupported(why)) if why.contains("use host memory that mpgpu has allocated")),
        "{refused}"
    );
    node(|node| node.captured = None);
    plan.execute(stream).expect("enqueued").wait().expect("it arrives");
    assert!(copying() >= before.min(1), "others may have ended theirs");
    drop(plan);
    drop(context);
}
