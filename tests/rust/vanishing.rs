//! Tests pageable memory that is unmapped before an execution uses it, on the host backend. The execution must fail, and the process must
//! continue.

use crate::node::*;
use mpgpu::abi::*;
use std::ffi::c_void;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BYTES: usize = 6 << 20;

/// Pageable memory that the test unmaps: a mapped file, or private memory.
enum Memory {
    File { base: usize, file: libc::c_int },
    Private(usize),
}

impl Memory {
    fn file() -> Memory {
        // SAFETY: a new file, and a new mapping of it.
        let (base, file) = unsafe {
            let file = libc::memfd_create(c"mpgpu-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(file >= 0 && libc::ftruncate(file, BYTES as libc::off_t) == 0);
            (libc::mmap(null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file, 0), file)
        };
        assert_ne!(base, libc::MAP_FAILED);
        Memory::File { base: base.expose_provenance(), file }
    }

    /// Maps private memory at an address that the system would not choose, so that after `vanish` no other mapping takes its place.
    fn private(number: usize) -> Memory {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
        let wanted = 0x1234_0000_0000 + number * (1 << 30);
        // SAFETY: a new mapping of unused addresses.
        let base = unsafe { libc::mmap(with_exposed_provenance_mut(wanted), BYTES, access, kind, -1, 0) };
        assert_eq!(base.expose_provenance(), wanted);
        Memory::Private(wanted)
    }

    fn base(&self) -> *mut u8 {
        let (Memory::File { base, .. } | Memory::Private(base)) = *self;
        with_exposed_provenance_mut(base)
    }

    /// Unmaps all pages but the first.
    fn vanish(&self) {
        // SAFETY: the test's file or memory. Only executions use it, and they handle its loss.
        let code = unsafe {
            match *self {
                Memory::File { file, .. } => libc::ftruncate(file, 4096),
                Memory::Private(base) => libc::munmap(with_exposed_provenance_mut(base + 4096), BYTES - 4096),
            }
        };
        assert_eq!(code, 0);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the remaining mapping.
        unsafe {
            match *self {
                Memory::File { base, file } => (libc::munmap(with_exposed_provenance_mut(base), BYTES), libc::close(file)),
                Memory::Private(base) => (libc::munmap(with_exposed_provenance_mut(base), 4096), 0),
            };
        }
    }
}

unsafe extern "C" fn until_set(flag: *mut c_void) {
    // SAFETY: a flag of the test, which waits for the stream.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    while !flag.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Executes a plan of one transfer, and unmaps its memory after the execution has been enqueued. Returns the error.
fn error_of(node: &Node, plan: mp_plan_t, stream: mp_stream_t, memory: &Memory) -> String {
    let (is_gone, mut request) = (AtomicBool::new(false), null_mut());
    let flag = (&raw const is_gone).cast_mut().cast();
    // SAFETY: the flag outlives the stream's work, because the test waits for it. The output is valid for the call.
    unsafe {
        ok(mp_stream_launch_host(node.context, stream, Some(until_set), flag, None));
        ok(mp_execute(plan, stream, &mut request));
        memory.vanish();
        is_gone.store(true, Ordering::Release);
        assert_ne!(mp_wait(&mut request, null_mut()), mp_status_t::MP_SUCCESS);
    }
    last_error()
}

#[test]
fn memory_that_is_unmapped_and_a_file_that_becomes_shorter_are_errors_of_the_execution() {
    let node = Node::new(c"beluga");
    let (on_gpu, stream) = (node.alloc(0, BYTES), node.stream(0));
    let mut other = vec![7_u8; BYTES];
    for number in 0..6 {
        for memory in [Memory::file(), Memory::private(number)] {
            let (own, there) = (memory.base(), other.as_mut_ptr());
            let (transfer, what) = match number {
                0 | 3 => (transfer(on_gpu, 0, own, -1, BYTES), "reading"),
                1 | 4 => (transfer(own, -1, on_gpu, 0, BYTES), "writing"),
                2 => (transfer(there, -1, own, -1, BYTES), "reading"),
                _ => (transfer(own, -1, there, -1, BYTES), "writing"),
            };
            let plan = node.plan(&[transfer]);
            // The first execution still has all of the memory.
            node.run(plan);
            let error = error_of(&node, plan, stream, &memory);
            // A chunk on another path may fail before the chunk of the first page that is gone.
            let start = format!("transfer 0: {what} host memory at 0x");
            let address = error.split_once(&start).and_then(|(_, rest)| usize::from_str_radix(rest.split(':').next()?, 16).ok());
            let gone = own.addr() + 4096..own.addr() + BYTES;
            assert!(address.is_some_and(|address| gone.contains(&address)), "{number}: {error}");
            assert!(error.contains("unmapped, or its file became shorter"), "{error}");
            ok(mp_plan_destroy(plan));
        }
    }
    node.still_works();
}

#[test]
fn a_registered_file_that_becomes_shorter_is_an_error_of_the_execution() {
    let node = Node::new(c"beluga");
    let (on_gpu, stream, memory) = (node.alloc(0, BYTES), node.stream(0), Memory::file());
    // SAFETY: memory of the test.
    ok(unsafe { mp_memory_register(node.context, memory.base().cast(), BYTES as u64, 0) });
    let plan = node.plan(&[transfer(on_gpu, 0, memory.base(), -1, BYTES)]);
    node.run(plan);
    assert!(error_of(&node, plan, stream, &memory).contains("its file became shorter"));
    ok(mp_plan_destroy(plan));
    // SAFETY: registered above.
    ok(unsafe { mp_memory_unregister(node.context, memory.base().cast()) });
}
