//! Tests memory of the program that is pinned in pieces. Uses a driver double (simulated CUDA driver) that refuses copies across the end of
//! a piece.

use super::double::{self, node};
use super::driver::code;
use super::prepared;
use super::refusals::{assert_arrived, write};
use crate::backend::host_memory::PageRange;
use crate::backend::{BackendError, REGISTERED_PIECE, StreamHandle};
use crate::topology::DeviceId;
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer};
use std::ptr::{null_mut, with_exposed_provenance_mut};

const GPU0: DeviceId = DeviceId::gpu(0);
const PIECE: usize = REGISTERED_PIECE as usize;
const EACH: usize = 2 << 20;

/// Pageable memory in reserved address space, before and after the end of a pinned piece.
struct Mapped {
    space: usize,
    base: u64,
}

impl Mapped {
    fn new(access: libc::c_int) -> Mapped {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let space = unsafe { libc::mmap(null_mut(), 2 * PIECE, libc::PROT_NONE, kind, -1, 0) };
        assert_ne!(space, libc::MAP_FAILED);
        let space = space.expose_provenance();
        let base = (space + EACH).next_multiple_of(PIECE) - EACH;
        // SAFETY: whole pages of the mapping.
        assert_eq!(unsafe { libc::mprotect(with_exposed_provenance_mut(base), 2 * EACH, access) }, 0);
        Mapped { space, base: base as u64 }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the whole mapping.
        unsafe { libc::munmap(with_exposed_provenance_mut(self.space), 2 * PIECE) };
    }
}

const WRITABLE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

fn context() -> Context {
    double::start(2, true);
    prepared::context_with(double::driver(), |config| Config { adapt: false, ..config })
}

/// Returns the number of pinned ranges, and the number of calls that pinned memory.
fn pinned() -> (usize, u32) {
    (node(|node| node.registered()), double::calls("cuMemHostRegister"))
}

fn copy(context: &Context, dst: u64, src: u64, bytes: usize) -> Result<(), Error> {
    let transfer = Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 };
    Ok(context.plan(&[transfer], &PlanOptions::default())?.execute(StreamHandle(0))?.wait()?)
}

#[test]
fn copies_end_where_pieces_do() {
    let context = context();
    let memory = Mapped::new(WRITABLE);
    let on_gpu = context.allocate(GPU0, 2 * EACH as u64).expect("memory");
    let before = pinned();
    // Neither the start nor the end is aligned to a page.
    let (first, bytes) = (memory.base + 12, 2 * EACH - 100);
    context.register_memory(first, bytes as u64, true).expect("registered");
    assert_eq!((pinned().0 - before.0, pinned().1 - before.1), (2, 2), "a piece each");
    assert_eq!(context.backend().allocated_bytes(DeviceId::HOST), 0);
    write(first, bytes, 4);
    copy(&context, on_gpu, first, bytes).expect("it arrives");
    assert_arrived(on_gpu, bytes, 4);
    write(first, bytes, 5);
    copy(&context, first, on_gpu, bytes).expect("it arrives");
    assert_arrived(first, bytes, 4);
    context.unregister_memory(first).expect("unregistered");
    assert_eq!(pinned().0, before.0);
    assert!(context.backend().locate(first).expect("an answer").is_none(), "ordinary memory again");
    // Closing the context unregisters the remaining memory.
    context.register_memory(first, bytes as u64, false).expect("registered");
    drop(context);
    assert_eq!(pinned().0, 0);
}

#[test]
fn a_piece_that_the_driver_refuses_takes_the_others_back() {
    let context = context();
    let memory = Mapped::new(WRITABLE);
    let before = pinned().0;
    let register = || context.register_memory(memory.base, 2 * EACH as u64, false).expect_err("refused").to_string();
    for (code, word) in [
        (code::OUT_OF_MEMORY, "out of memory"),
        (code::HOST_MEMORY_ALREADY_REGISTERED, "the program or another library has already pinned this memory"),
        (code::INVALID_CONTEXT, "cuMemHostRegister"),
    ] {
        node(|node| node.refusals.insert("cuMemHostRegister", code));
        let message = register();
        assert!(message.contains(word), "{message}");
        assert_eq!(pinned().0, before, "{message}");
    }
    context.register_memory(memory.base, 2 * EACH as u64, false).expect("nothing was left of them");
}

#[test]
fn memory_that_may_not_be_written_is_pinned_so_or_says_what_to_do() {
    let context = context();
    let memory = Mapped::new(libc::PROT_READ);
    let on_gpu = context.allocate(GPU0, 2 * EACH as u64).expect("memory");
    node(|node| node.refusals.insert("cuMemHostRegister", code::INVALID_CONTEXT));
    let refused = context.register_memory(memory.base, 2 * EACH as u64, false).expect_err("refused");
    assert!(matches!(&refused, Error::Backend(BackendError::NotSupported(why)) if why.contains("map it writable")), "{refused}");
    context.register_memory(memory.base, 2 * EACH as u64, false).expect("registered");
    copy(&context, on_gpu, memory.base, 2 * EACH).expect("it arrives");
    let refused = copy(&context, memory.base, on_gpu, 8).expect_err("it may not be written").to_string();
    assert!(refused.contains("may not be written"), "{refused}");
}

#[test]
fn pieces_are_those_of_the_addresses_and_cover_every_page_once() {
    for (base, bytes, piece) in [(0, 8, 8), (5, 1, 8), (5, 3, 8), (5, 4, 8), (8, 16, 8), (7, 18, 8)] {
        let whole = PageRange { base, bytes };
        let pieces: Vec<PageRange> = whole.pieces(piece).collect();
        assert_eq!(pieces.iter().map(|piece| piece.bytes).sum::<usize>(), bytes);
        assert!(pieces.windows(2).all(|two| two[0].base + two[0].bytes == two[1].base && two[1].base.is_multiple_of(piece)));
        assert!(pieces.iter().all(|one| one.bytes <= piece && one.base / piece == (one.base + one.bytes - 1) / piece));
    }
    assert_eq!(PageRange::around(4097, 4095).map(|pages| (pages.base, pages.bytes)), Some((4096, 4096)));
    assert_eq!(PageRange::around(usize::MAX - 5, 10), None);
}
