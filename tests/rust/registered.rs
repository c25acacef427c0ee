//! Tests registered host memory of the program. Plans can use it like pinned memory, even if it consists of several pinned pieces. Memory
//! that cannot be registered is refused with a reason.

use crate::node::*;
use mpgpu::abi::*;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Barrier;

/// Size in bytes to which the ends of pinned pieces are aligned.
const PIECE: usize = 1 << 30;
const PAGE: usize = 4096;

/// Pageable memory in reserved address space: `bytes` bytes before and after the boundary between two pinned pieces.
struct Mapped {
    space: usize,
    base: usize,
    bytes: usize,
}

impl Mapped {
    fn around_a_boundary(each: usize) -> Mapped {
        let (none, kind) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new mapping.
        let space = unsafe { libc::mmap(null_mut(), 2 * PIECE, none, kind, -1, 0) };
        assert_ne!(space, libc::MAP_FAILED);
        let space = space.expose_provenance();
        let base = (space + each).next_multiple_of(PIECE) - each;
        let mapped = Mapped { space, base, bytes: 2 * each };
        mapped.protect(0, mapped.bytes, libc::PROT_READ | libc::PROT_WRITE);
        mapped
    }

    fn protect(&self, offset: usize, bytes: usize, access: libc::c_int) {
        // SAFETY: whole pages of the mapping, which belongs to the test.
        assert_eq!(unsafe { libc::mprotect(with_exposed_provenance_mut(self.base + offset), bytes, access) }, 0);
    }

    fn at(&self, offset: usize) -> *mut u8 {
        with_exposed_provenance_mut(self.base + offset)
    }

    fn fill(&self, seed: u8) {
        // SAFETY: readable and writable, and used only by the test.
        unsafe { std::slice::from_raw_parts_mut(self.at(0), self.bytes) }.iter_mut().zip(pattern(seed)).for_each(|(byte, new)| *byte = new);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the whole mapping.
        unsafe { libc::munmap(with_exposed_provenance_mut(self.space), 2 * PIECE) };
    }
}

fn pattern(seed: u8) -> impl Iterator<Item = u8> {
    (0_u32..).map(move |at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed)
}

fn register(node: &Node, memory: *mut u8, bytes: usize) -> mp_status_t {
    // SAFETY: the library must check whether this is memory.
    unsafe { mp_memory_register(node.context, memory.cast(), bytes as u64, 0) }
}

fn unregister(node: &Node, memory: *mut u8) -> mp_status_t {
    // SAFETY: as above.
    unsafe { mp_memory_unregister(node.context, memory.cast()) }
}

fn shown(plan: mp_plan_t) -> String {
    // SAFETY: the library writes into the given buffer.
    describe(|text, capacity, length| unsafe { mp_plan_describe(plan, mp_format_t::MP_FORMAT_TEXT as i32, text, capacity, length) })
}

#[test]
fn copies_pass_from_piece_to_piece_and_every_byte_arrives_there_and_back() {
    const EACH: usize = 3 << 20;
    let node = Node::new(c"beluga");
    let (from, to) = (Mapped::around_a_boundary(EACH), Mapped::around_a_boundary(EACH));
    let on_gpu = node.alloc(0, 2 * EACH);
    from.fill(3);
    ok(register(&node, from.at(0), 2 * EACH));
    ok(register(&node, to.at(PAGE), 2 * EACH - PAGE));
    // Ranges: the whole memory, up to a boundary, from a boundary, and across a boundary with one byte on each side.
    for (first, bytes, cut) in [(PAGE, 2 * EACH - PAGE, 2), (PAGE, EACH - PAGE, 1), (EACH, EACH, 1), (EACH - 1, 2, 2), (EACH + 5, 77, 1)] {
        to.fill(0);
        let there = node.plan(&[transfer(on_gpu, 0, from.at(first), -1, bytes)]);
        let back = node.plan(&[transfer(to.at(first), -1, on_gpu, 0, bytes)]);
        for plan in [there, back] {
            let text = shown(plan);
            assert!(text.starts_with(&format!("plan for beluga: {cut} transfer")), "{text}");
            assert!(!text.contains("pageable"), "{text}");
            node.run(plan);
        }
        // SAFETY: memory of the test that no copy uses any more.
        let arrived = unsafe { std::slice::from_raw_parts(to.at(0), 2 * EACH) };
        let expected = pattern(3).zip(pattern(0)).enumerate().take(2 * EACH);
        for (at, (new, old)) in expected {
            let expected = if (first..first + bytes).contains(&at) { new } else { old };
            assert_eq!(arrived[at], expected, "byte {at}, of {bytes} from {first} on");
        }
    }
    ok(unregister(&node, from.at(0)));
    ok(unregister(&node, to.at(PAGE)));
    node.still_works();
}

#[test]
fn what_cannot_be_registered_is_refused_by_name_and_nothing_is_left() {
    let node = Node::new(c"beluga");
    let memory = Mapped::around_a_boundary(1 << 20);
    let bytes = memory.bytes;
    let message = refused(register(&node, null_mut(), 8), mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("0x0 (8 bytes)"), "{message}");
    refused(register(&node, memory.at(0), 0), mp_status_t::MP_ERROR_INVALID_ARGUMENT);
    assert_eq!(last_argument().as_deref(), Some("bytes"));
    // SAFETY: refused before the memory is accessed.
    let status = unsafe { mp_memory_register(node.context, memory.at(0).cast(), 8, 2) };
    assert!(refused(status, mp_status_t::MP_ERROR_INVALID_ARGUMENT).contains("huge_pages=2"));
    let message = refused(register(&node, with_exposed_provenance_mut(usize::MAX - 99), 100), mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("is not mapped or not readable"), "{message}");
    let message = refused(register(&node, memory.at(0), usize::MAX), mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("past the end"), "{message}");
    // The address range continues, but a part is not readable. That part stays mapped, because another thread could map memory into a gap.
    memory.protect(2 * PAGE, PAGE, libc::PROT_NONE);
    let message = refused(register(&node, memory.at(0), 8 * PAGE), mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains(&format!("the memory at {:#x} is not mapped", memory.base + 2 * PAGE)), "{message}");
    // Memory is registered twice, or in part, or as a part of a larger range, or belongs to the context.
    let (own, half) = (node.alloc(-1, 4 * PAGE), bytes / 2);
    ok(register(&node, memory.at(half), 4 * PAGE));
    for (at, size) in [(half, 4 * PAGE), (half + PAGE, 8), (half - PAGE, 2 * PAGE), (half - PAGE, 8 * PAGE)] {
        let message = refused(register(&node, memory.at(at), size), mp_status_t::MP_ERROR_INVALID_POINTER);
        assert!(message.contains("pinned already"), "{message}");
    }
    refused(register(&node, own, PAGE), mp_status_t::MP_ERROR_INVALID_POINTER);
    // The memory is passed to a function that frees other memory. SAFETY: the call is refused.
    refused(unsafe { mp_free(node.context, memory.at(half).cast()) }, mp_status_t::MP_ERROR_INVALID_POINTER);
    refused(unregister(&node, own), mp_status_t::MP_ERROR_INVALID_POINTER);
    refused(unregister(&node, memory.at(half + PAGE)), mp_status_t::MP_ERROR_INVALID_POINTER);
    ok(unregister(&node, memory.at(half)));
    let message = refused(unregister(&node, memory.at(half)), mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("was not registered"), "{message}");
    ok(unregister(&node, null_mut()));
    ok(register(&node, memory.at(half), 4 * PAGE));
    let mut held = device_statistics();
    // SAFETY: a whole struct of the right size.
    ok(unsafe { mp_context_device_statistics(node.context, -1, &mut held) });
    assert_eq!(held.allocated_bytes, 4 * PAGE as u64, "registered memory is the program's");
    // Closing the context unregisters the remaining memory.
}

#[test]
fn sizes_beyond_all_memory_are_refused_before_any_page_is_looked_at() {
    let node = Node::new(c"beluga");
    let memory = Mapped::around_a_boundary(2 * PAGE);
    for size in (40..=60).map(|bits| 1_usize << bits) {
        let message = refused(register(&node, memory.at(0), size), mp_status_t::MP_ERROR_INVALID_POINTER);
        assert!(message.contains("is not mapped or not readable"), "{message}");
    }
    // Reserved address space of the program to which no memory is mapped.
    let (none, kind) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let space = unsafe { libc::mmap(null_mut(), 1 << 45, none, kind, -1, 0) };
    if space != libc::MAP_FAILED {
        let message = refused(register(&node, space.cast(), 1 << 45), mp_status_t::MP_ERROR_OUT_OF_MEMORY);
        assert!(message.contains(&(1_u64 << 45).to_string()), "{message}");
        // SAFETY: the whole mapping.
        unsafe { libc::munmap(space, 1 << 45) };
    }
    assert_eq!(register(&node, memory.at(0), 4 * PAGE), mp_status_t::MP_SUCCESS);
    assert_eq!(unregister(&node, memory.at(0)), mp_status_t::MP_SUCCESS);
}

#[test]
fn plans_of_memory_that_is_registered_no_more_are_refused_and_new_ones_take_it_as_it_is() {
    const BYTES: usize = 1 << 20;
    let node = Node::new(c"beluga");
    let memory = Mapped::around_a_boundary(BYTES);
    memory.fill(9);
    let on_gpu = node.alloc(1, BYTES);
    let copy = transfer(on_gpu, 1, memory.at(0), -1, BYTES);
    let before = node.plan(&[copy]);
    ok(register(&node, memory.at(0), 2 * BYTES));
    let pinned = node.plan(&[copy]);
    node.run(pinned);
    // The plan was made when this memory was pageable, and is still valid.
    node.run(before);
    ok(unregister(&node, memory.at(0)));
    let stream = node.stream(0);
    // SAFETY: the plan's memory exists, and the call is refused nevertheless.
    let message = refused(unsafe { mp_execute(pinned, stream, null_mut()) }, mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("unregistered after the plan was made"), "{message}");
    // SAFETY: no copy uses it.
    unsafe { std::slice::from_raw_parts_mut(on_gpu, BYTES) }.fill(0);
    node.run(node.plan(&[copy]));
    // SAFETY: as above.
    let arrived = unsafe { std::slice::from_raw_parts(on_gpu, BYTES) };
    assert!(arrived.iter().zip(pattern(9)).all(|(byte, expected)| *byte == expected));
}

#[test]
fn memory_that_may_not_be_written_is_a_source_and_never_a_destination() {
    const BYTES: usize = 64 << 10;
    let node = Node::new(c"beluga");
    let memory = Mapped::around_a_boundary(BYTES);
    memory.fill(5);
    memory.protect(0, 2 * BYTES, libc::PROT_READ);
    ok(register(&node, memory.at(0), 2 * BYTES));
    let on_gpu = node.alloc(0, 2 * BYTES);
    node.run(node.plan(&[transfer(on_gpu, 0, memory.at(0), -1, 2 * BYTES)]));
    // SAFETY: no copy uses it.
    let arrived = unsafe { std::slice::from_raw_parts(on_gpu, 2 * BYTES) };
    assert!(arrived.iter().zip(pattern(5)).all(|(byte, expected)| *byte == expected));
    let (status, _) = node.try_plan(&[transfer(memory.at(8), -1, on_gpu, 0, 8)], null_mut());
    let message = refused(status, mp_status_t::MP_ERROR_INVALID_POINTER);
    assert!(message.contains("transfer 0: destination") && message.contains("may not be written"), "{message}");
    ok(unregister(&node, memory.at(0)));
}

#[test]
fn threads_register_copy_and_unregister_side_by_side() {
    const EACH: usize = 256 << 10;
    let node = Node::new(c"beluga");
    let begin = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let (node, begin) = (&node, &begin);
            scope.spawn(move || {
                let memory = Mapped::around_a_boundary(EACH);
                let on_gpu = node.alloc(i32::from(thread), 2 * EACH);
                begin.wait();
                for round in 0..20_u8 {
                    memory.fill(round ^ (thread << 6));
                    ok(register(node, memory.at(0), 2 * EACH));
                    node.run(node.plan(&[transfer(on_gpu, i32::from(thread), memory.at(0), -1, 2 * EACH)]));
                    ok(unregister(node, memory.at(0)));
                    // SAFETY: this thread's, and no copy uses it.
                    let arrived = unsafe { std::slice::from_raw_parts(on_gpu, 2 * EACH) };
                    assert!(arrived.iter().zip(pattern(round ^ (thread << 6))).all(|(byte, expected)| *byte == expected));
                }
            });
        }
    });
}
