//! Stress test that executes random plans on many threads in one context with little staging memory. All data must be correct, no other
//! byte may change, and memory must not grow. The module `executions` contains the work of a thread.
//!
//! Staging memory is so small that the plans of different threads always share it. If one execution used the staging slots of another, data
//! would be wrong. `TEST_EXECUTIONS` sets the number of executions of all threads together, `TEST_SECONDS` their maximum time,
//! `TEST_THREADS` the number of threads, and `TEST_SEED` the seed of the plans. The test counts resources of the process, so it runs in a
//! separate process.

#[path = "executions.rs"]
mod executions;

use self::executions::{Access, Campaign, Machine};
use crate::bytes::Ordinary;
use crate::common::{self, is_long, setting};
use crate::node::{self, context_options};
use mpgpu::abi::*;
use mpgpu_core::topology;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

const GPUS: u32 = 4;

/// Topology of four GPUs with links between them and almost no fixed costs, so that even small transfers are split.
struct Wired(CString);

impl Wired {
    fn new() -> Wired {
        let mut node = topology::load("beluga").expect("a preset");
        node.costs.copy = 1e-9;
        node.costs.issue = 1e-10;
        (node.costs.chunk_via_host, node.costs.chunk_via_gpu) = (1e-9, 1e-9);
        node.links.iter_mut().for_each(|link| link.latency = 1e-9);
        let path = std::env::temp_dir().join(format!("mpgpu-threads-{}.toml", std::process::id()));
        std::fs::write(&path, node.to_toml()).expect("a file for the test");
        Wired(CString::new(path.to_str().expect("UTF-8")).expect("no NUL"))
    }
}

impl Drop for Wired {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0.to_str().expect("UTF-8"));
    }
}

impl Machine for Wired {
    fn options(&self) -> mp_context_options_t {
        mp_context_options_t { topology: self.0.as_ptr(), ..context_options() }
    }
    fn gpus(&self) -> u32 {
        GPUS
    }
    fn spans(&self) -> [u64; 2] {
        [160 << 10, 1 << 20]
    }
    fn staging(&self) -> [u64; 3] {
        [96 << 10, 96 << 10, 1 << 20]
    }
    fn stages(&self) -> bool {
        true
    }
    fn on_gpus(&self) -> u64 {
        0
    }
    fn enter(&self, _: u64) -> Box<dyn Access> {
        Box::new(HostMemory::default())
    }
}

/// Access to memory for the host backend, on which all memory belongs to the process. The map holds memory that the library has not
/// allocated: pageable memory, or mapped files.
#[derive(Default)]
struct HostMemory(BTreeMap<usize, Ordinary>);

impl Access for HostMemory {
    fn fill(&mut self, _: i32, address: usize, byte: u8, count: usize) {
        // SAFETY: a buffer of the thread with at least `count` bytes, which no execution uses meanwhile.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(byte, count) };
    }
    fn write(&mut self, _: i32, address: usize, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), std::ptr::with_exposed_provenance_mut(address), bytes.len()) };
    }
    fn read(&mut self, _: i32, address: usize, bytes: &mut [u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance(address), bytes.as_mut_ptr(), bytes.len()) };
    }
    fn wait(&mut self) {}
    fn allocate(&mut self, device: i32, bytes: usize, kind: u64) -> Option<usize> {
        if device >= 0 {
            return None;
        }
        let memory = if kind.is_multiple_of(2) { Ordinary::mapped(bytes) } else { Ordinary::Own(vec![0; bytes]) };
        let address = memory.address() as usize;
        self.0.insert(address, memory);
        Some(address)
    }
    fn free(&mut self, _: i32, address: usize) {
        self.0.remove(&address).expect("memory of this thread");
    }
    fn streams(&self) -> Vec<mp_stream_t> {
        vec![null_mut()]
    }
}

/// Executes random plans. Runs only in the child process of the test below.
#[test]
#[ignore = "a process that other tests start"]
fn child_executes_at_random() {
    if std::env::var_os("THREADS_TEST_CHILD").is_none() {
        return;
    }
    let usual = if is_long() { 1_000_000 } else { 16_000 };
    let campaign = Campaign {
        executions: setting("TEST_EXECUTIONS", usual),
        seconds: setting("TEST_SECONDS", u64::MAX),
        seed: setting("TEST_SEED", 1),
        threads: setting("TEST_THREADS", 16),
    };
    assert!(campaign.run(&Wired::new()) > 0);
}

#[test]
fn random_executions_of_many_threads_deliver_every_byte_and_leave_nothing_behind() {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program)
        .args(["threads::child_executes_at_random", "--ignored", "--exact", "--nocapture", "--test-threads", "1"])
        .env("THREADS_TEST_CHILD", "1")
        .env("MPGPU_LOG", "error")
        // AddressSanitizer would keep 256 MiB of freed memory, which would look like a leak.
        .env("ASAN_OPTIONS", std::env::var("ASAN_OPTIONS").unwrap_or_default() + ":quarantine_size_mb=8:thread_local_quarantine_size_kb=64")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this program runs");
    let mut right = false;
    for line in BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok) {
        right |= line.contains("campaign: ") && line.contains(": 0 wrong;");
        let _ = writeln!(std::io::stderr(), "{line}");
    }
    let status = child.wait().expect("a child");
    assert!(status.success() && right, "{status}; what it said is above");
}
