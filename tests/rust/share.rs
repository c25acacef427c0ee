//! Tests memory that processes share. Copies are correct, and the loss of a peer, a handle or memory is always returned as an error status.

use crate::addresses::Addresses;
use crate::node::*;
use crate::peer::*;
use crate::skip::skip;
use mpgpu::abi::*;
use mpgpu_backend::Backend;
use mpgpu_core::topology::DeviceId;
use mpgpu_ipc::{AllocationKey, Export, Handle, PATIENCE, Service};
use std::io::Write;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn a_peer_puts_bytes_into_exported_memory_and_nowhere_else() {
    let node = Node::new(c"beluga");
    const BYTES: usize = (1 << 20) + 77;
    const AROUND: usize = 4096 + 5;
    let memory = node.alloc(1, BYTES + 2 * AROUND);
    fill(memory, BYTES + 2 * AROUND, 1);
    let handle = export(&node, memory.wrapping_add(AROUND), BYTES);
    let mut peer = Peer::start();
    assert_eq!(peer.tell(&format!("import {}", hex(&handle))), "0");
    assert_eq!(peer.tell(&format!("look 0 {BYTES} 1 {AROUND}")), "true");
    peer.tell(&format!("alloc 0 {BYTES} 2"));
    peer.tell(&format!("put 0 1 0 0 {BYTES}"));
    assert!(holds(memory.wrapping_add(AROUND), BYTES, 2, 0), "bytes arrived wrong");
    assert!(holds(memory, AROUND, 1, 0) && holds(memory.wrapping_add(AROUND + BYTES), AROUND, 1, AROUND + BYTES), "bytes around");
    peer.tell("close 0");
    node.still_works();
}

#[test]
fn host_memory_is_shared_where_it_was_allocated_for_that_whatever_its_size() {
    let node = Node::new(c"summit");
    for bytes in [8, (4 << 20) - 1, 4 << 20, (4 << 20) + 1] {
        for device in [MP_DEVICE_HOST, MP_DEVICE_HOST - 1] {
            let (own, mut handle) = (node.alloc(device, bytes), mp_memory_handle_t { bytes: [0; 128] });
            // SAFETY: memory of this size, and an output.
            let status = unsafe { mp_memory_export(node.context, own.cast(), bytes as u64, &mut handle) };
            let why = refused(status, MP_ERROR_NOT_SUPPORTED);
            assert!(why.contains("shared between processes"), "{bytes}: {why}");
            export(&node, node.alloc_shared(device, bytes), bytes);
        }
        export(&node, node.alloc(0, bytes), bytes);
        export(&node, node.alloc_shared(0, bytes), bytes);
    }
}

#[test]
fn a_plan_moves_imported_memory_of_every_device_in_both_directions() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    // The size is large enough for several paths.
    const BYTES: usize = 8 << 20;
    for (i, device) in [0, 3, MP_DEVICE_HOST].into_iter().enumerate() {
        peer.tell(&format!("alloc {device} {BYTES} {}", 10 + i));
        let theirs = import(&node, &from_hex(&peer.tell(&format!("export {i} 0 {BYTES}"))));
        let ours = node.alloc(1, BYTES);
        let (get, put) = (node.plan(&[transfer(ours, 1, theirs, device, BYTES)]), node.plan(&[transfer(theirs, device, ours, 1, BYTES)]));
        node.run(get);
        assert!(holds(ours, BYTES, 10 + i, 0));
        fill(ours, BYTES, 20 + i);
        node.run(put);
        assert_eq!(peer.tell(&format!("check {i} {}", 20 + i)), "true");
        ok(mp_plan_destroy(get));
        // Transfers with another device, or beyond the end of the memory, are refused.
        let (status, _) = node.try_plan(&[transfer(theirs, 2, ours, 1, 8)], null_mut());
        refused(status, MP_ERROR_INVALID_POINTER);
        let (status, _) = node.try_plan(&[transfer(theirs, device, ours, 1, BYTES + 1)], null_mut());
        refused(status, MP_ERROR_INVALID_POINTER);
        close(&node, theirs);
        // SAFETY: the memory was freed, and the test expects a refusal.
        refused(unsafe { mp_execute(put, null_mut(), null_mut()) }, MP_ERROR_INVALID_POINTER);
        ok(mp_plan_destroy(put));
    }
    node.still_works();
}

#[test]
fn a_plan_with_an_end_in_another_process_takes_host_memory_as_any_other_does_and_may_be_kept_off_it() {
    const BYTES: usize = 16 << 20;
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell(&format!("alloc 0 {BYTES} 1"));
    let theirs = import(&node, &from_hex(&peer.tell(&format!("export 0 0 {BYTES}"))));
    let (here, ours) = (node.alloc(0, BYTES), node.alloc(1, BYTES));
    let described = |dst, dst_device, src, src_device, host_path| {
        let mut plan = null_mut();
        let batch = [transfer(dst, dst_device, src, src_device, BYTES)];
        let options = mp_plan_options_t { host_path, ..plan_options() };
        // SAFETY: all pointers are valid for the call.
        ok(unsafe { mp_plan(node.context, batch.as_ptr(), batch.len(), &options, &mut plan) });
        // SAFETY: as above.
        let text = describe(|text, capacity, length| unsafe { mp_plan_describe(plan, 0, text, capacity, length) });
        ok(mp_plan_destroy(plan));
        text
    };
    let default = 0;
    let within = described(here, 0, ours, 1, default);
    assert!(within.contains("via host0") && within.contains("via gpu2") && within.contains("plain copies: modelled"), "{within}");
    assert_eq!(described(theirs, 0, ours, 1, default), within);
    let off = mp_switch_t::MP_OFF as i32;
    assert!(described(theirs, 0, ours, 1, off).contains("not via host0: host_path is off"));
    close(&node, theirs);
    node.still_works();
}

#[test]
fn ranges_of_one_allocation_are_mapped_once_and_until_the_last_is_closed() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 0 100000 1");
    let handles = [0, 5, 50000].map(|offset| from_hex(&peer.tell(&format!("export 0 {offset} 100"))));
    let pointers = handles.each_ref().map(|handle| import(&node, handle));
    let file = file_at(pointers[0]);
    assert_eq!(mapped(&file), 1);
    assert_eq!(pointers.map(|pointer| pointer.addr() - pointers[0].addr()), [0, 5, 50000]);
    let again = import(&node, &handles[1]);
    assert_eq!(again, pointers[1]);
    for pointer in [pointers[0], pointers[2], again] {
        close(&node, pointer);
        assert!(holds(pointers[1], 100, 1, 5), "unmapped too early");
    }
    // SAFETY: it was closed, and the test expects a refusal.
    let message = refused(unsafe { mp_memory_close(node.context, pointers[0].cast()) }, MP_ERROR_INVALID_POINTER);
    assert!(message.contains("was not imported by this context, or was closed already"), "{message}");
    close(&node, pointers[1]);
    assert_eq!(mapped(&file), 0);
    // SAFETY: as above.
    refused(unsafe { mp_memory_close(node.context, pointers[1].cast()) }, MP_ERROR_INVALID_POINTER);
    node.still_works();
}

#[test]
fn threads_that_import_the_same_memory_at_once_map_it_once() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 0 4096 1");
    let handle = from_hex(&peer.tell("export 0 0 4096"));
    let pointers: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| import(&node, &handle).addr())).collect();
        threads.into_iter().map(|thread| thread.join().expect("no assertion failed")).collect()
    });
    assert!(pointers.iter().all(|pointer| *pointer == pointers[0]), "{pointers:?}");
    pointers.iter().for_each(|pointer| close(&node, std::ptr::with_exposed_provenance_mut(*pointer)));
    // SAFETY: closed as often as imported.
    refused(unsafe { mp_memory_close(node.context, std::ptr::with_exposed_provenance_mut(pointers[0])) }, MP_ERROR_INVALID_POINTER);
}

#[test]
fn a_handle_of_this_process_gives_the_plain_address() {
    let (node, other) = (Node::new(c"beluga"), Node::new(c"beluga"));
    let memory = node.alloc(2, 10000);
    fill(memory, 10000, 1);
    let handle = export(&node, memory.wrapping_add(3), 5000);
    assert_eq!(import(&node, &handle), memory.wrapping_add(3));
    // Another context of this process may use the memory only after it has imported the handle.
    let ours = other.alloc(0, 5000);
    let (status, _) = other.try_plan(&[transfer(ours, 0, memory.wrapping_add(3), 2, 5000)], null_mut());
    refused(status, MP_ERROR_INVALID_POINTER);
    assert_eq!(import(&other, &handle), memory.wrapping_add(3));
    let plan = other.plan(&[transfer(ours, 0, memory.wrapping_add(3), 2, 5000)]);
    other.run(plan);
    assert!(holds(ours, 5000, 1, 3));
    // The memory can be used until its owner frees it.
    node.free(memory);
    // SAFETY: the memory was freed, and the test expects a refusal.
    let message = refused(unsafe { mp_execute(plan, null_mut(), null_mut()) }, MP_ERROR_PEER_GONE);
    assert!(message.contains("was freed"), "{message}");
    close(&other, memory.wrapping_add(3));
    import_refused(&other, &handle, MP_ERROR_PEER_GONE);
    import_refused(&node, &handle, MP_ERROR_PEER_GONE);
    node.still_works();
    other.still_works();
}

#[test]
fn memory_that_lies_where_freed_memory_is_still_imported_is_imported_too() {
    let (node, other) = (Node::new(c"beluga"), Node::new(c"beluga"));
    let (mut imported, mut again) = (Vec::new(), 0);
    for round in 0..64 {
        // Allocations have several sizes, so that new allocations overlap freed ones.
        let bytes = (1 + round % 3) << 20;
        let memory = node.alloc(0, bytes);
        fill(memory, bytes, round);
        let place = memory.addr()..memory.addr() + bytes;
        again += imported.iter().any(|(old, size): &(*mut u8, usize)| old.addr() < place.end && old.addr() + size > place.start) as usize;
        let theirs = import(&other, &export(&node, memory, bytes));
        imported.push((theirs, bytes));
        let ours = other.alloc(1, bytes);
        let plan = other.plan(&[transfer(ours, 1, theirs, 0, bytes)]);
        other.run(plan);
        assert!(holds(ours, bytes, round, 0), "round {round}");
        node.free(memory);
        // SAFETY: the memory was freed, and the test expects a refusal.
        refused(unsafe { mp_execute(plan, null_mut(), null_mut()) }, MP_ERROR_PEER_GONE);
        ok(mp_plan_destroy(plan));
        other.free(ours);
    }
    assert!(again > 0, "no address was given out again");
    // Each import was made once and is closed once.
    imported.iter().for_each(|(theirs, _)| close(&other, *theirs));
    for (theirs, _) in imported {
        // SAFETY: refused.
        refused(unsafe { mp_memory_close(other.context, theirs.cast()) }, MP_ERROR_INVALID_POINTER);
    }
    node.still_works();
    other.still_works();
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 1000);
    let own = [0_u8; 64];
    let mut handle = mp_memory_handle_t { bytes: [7; 128] };
    let mut refuse = |pointer: *const u8, bytes: u64, status| {
        // SAFETY: the output is valid for the call. The library must check the range.
        let message = refused(unsafe { mp_memory_export(node.context, pointer.cast(), bytes, &mut handle) }, status);
        assert_eq!(handle.bytes, [7; 128], "an output was written");
        message
    };
    let message = refuse(memory.wrapping_add(1), 1000, MP_ERROR_INVALID_POINTER);
    assert!(message.contains("(1000 bytes) extends past the end of its allocation"), "{message}");
    refuse(memory, u64::MAX, MP_ERROR_INVALID_POINTER);
    let message = refuse(own.as_ptr(), 64, MP_ERROR_INVALID_POINTER);
    assert!(message.contains("allocate it in this context"), "{message}");

    let mut peer = Peer::start();
    peer.tell("alloc 0 4096 1");
    let theirs = import(&node, &from_hex(&peer.tell("export 0 0 4096")));
    let message = refuse(theirs, 4096, MP_ERROR_NOT_SUPPORTED);
    assert!(message.contains("memory of another process that was imported here; export it in that process"), "{message}");
    // This context cannot free it either.
    // SAFETY: refused.
    refused(unsafe { mp_free(node.context, theirs.cast()) }, MP_ERROR_INVALID_POINTER);
    close(&node, theirs);
    node.still_works();
}

#[test]
fn freed_memory_is_gone_also_when_its_address_is_in_use_again() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 0 65536 1");
    let handle = from_hex(&peer.tell("export 0 0 65536"));
    let theirs = import(&node, &handle);
    let ours = node.alloc(1, 65536);
    let plan = node.plan(&[transfer(ours, 1, theirs, 0, 65536)]);
    node.run(plan);
    peer.tell("free 0");
    // SAFETY: the mapping exists.
    let message = refused(unsafe { mp_execute(plan, null_mut(), null_mut()) }, MP_ERROR_PEER_GONE);
    assert!(message.contains("has freed the memory") && message.contains("export again"), "{message}");
    // The new memory has the same size, and probably the same address.
    peer.tell("alloc 0 65536 2");
    import_refused(&node, &handle, MP_ERROR_PEER_GONE);
    // The mapping that this process still has does not show the new contents.
    assert!(!holds(theirs, 65536, 2, 0));
    close(&node, theirs);
    import_refused(&node, &handle, MP_ERROR_PEER_GONE);
    let newer = import(&node, &from_hex(&peer.tell("export 1 0 65536")));
    assert!(holds(newer, 65536, 2, 0));
    // If a peer destroys its context, all of its memory is freed.
    let again = node.plan(&[transfer(ours, 1, newer, 0, 65536)]);
    peer.tell("destroy");
    // SAFETY: as above.
    refused(unsafe { mp_execute(again, null_mut(), null_mut()) }, MP_ERROR_PEER_GONE);
    close(&node, newer);
    ok(mp_plan_destroy(plan));
    ok(mp_plan_destroy(again));
    node.still_works();
}

#[test]
fn a_peer_that_was_killed_is_gone() {
    let node = Node::new(c"beluga");
    for order in ["", "exit"] {
        let mut peer = Peer::start();
        peer.tell("alloc 0 65536 1");
        peer.tell("alloc 0 65536 2");
        let handles = [0, 1].map(|i| from_hex(&peer.tell(&format!("export {i} 0 65536"))));
        let theirs = import(&node, &handles[0]);
        let file = file_at(theirs);
        let ours = node.alloc(1, 65536);
        let plan = node.plan(&[transfer(ours, 1, theirs, 0, 65536)]);
        if order.is_empty() {
            peer.kill();
        } else {
            writeln!(peer.orders, "{order}").expect("the peer reads");
            peer.process.wait().expect("the peer was ours");
        }
        // SAFETY: the mapping still exists.
        let message = refused(unsafe { mp_execute(plan, null_mut(), null_mut()) }, MP_ERROR_PEER_GONE);
        assert!(message.contains(&format!("process {}", peer.process.id())) && message.contains("has ended"), "{message}");
        // Neither memory that was mapped before nor other memory can be imported.
        for handle in &handles {
            import_refused(&node, handle, MP_ERROR_PEER_GONE);
        }
        close(&node, theirs);
        import_refused(&node, &handles[0], MP_ERROR_PEER_GONE);
        assert_eq!((mapped(&file), names()), (0, 0), "a mapping or a name is left");
        node.free(ours);
        ok(mp_plan_destroy(plan));
    }
    node.still_works();
}

#[test]
fn an_importer_that_was_killed_leaves_nothing_behind() {
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 65536);
    let handle = export(&node, memory, 65536);
    // The exporter is otherwise idle, so that its file descriptors can be counted.
    let mut exporter = Peer::start();
    exporter.tell("alloc 0 65536 1");
    let theirs = exporter.tell("export 0 0 65536");
    let number = |answer: String| answer.split(' ').next().expect("two numbers").parse::<usize>().expect("a number");
    let alone = number(exporter.tell("holdings"));
    for _ in 0..4 {
        let mut peer = Peer::start();
        peer.tell(&format!("import {}", hex(&handle)));
        peer.tell(&format!("import {theirs}"));
        peer.kill();
    }
    // A thread of the exporter detects the exits of the importers, and closes the connections.
    let started = Instant::now();
    while number(exporter.tell("holdings")) > alone {
        assert!(started.elapsed() < 4 * PATIENCE, "descriptors are left: {} and {alone} before", exporter.tell("holdings"));
    }
    assert_eq!(names(), 0);
    node.free(memory);
    node.still_works();
}

#[test]
fn a_peer_that_does_not_answer_is_given_up_in_bounded_time() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 0 4096 1");
    let handle = from_hex(&peer.tell("export 0 0 4096"));
    peer.stop();
    let started = Instant::now();
    let message = import_refused(&node, &handle, MP_ERROR_TIMEOUT);
    assert!(message.contains("has not answered for 5 s") && message.contains("debugger"), "{message}");
    assert!(started.elapsed() >= PATIENCE / 2, "it was not waited for");
    peer.go_on();
    let theirs = import(&node, &handle);
    assert!(holds(theirs, 4096, 1, 0));
    close(&node, theirs);
    node.still_works();
}

#[test]
fn signals_do_not_prolong_the_wait_for_an_exporter() {
    let mut exporter = Peer::start();
    exporter.tell("alloc 0 4096 1");
    let handle = exporter.tell("export 0 0 4096");
    exporter.stop();
    let mut importer = Peer::start();
    importer.tell("interrupt 100");
    let process = rustix::process::Pid::from_child(&importer.process);
    let (answered, answer) = std::sync::mpsc::channel();
    let answer = std::thread::scope(|scope| {
        scope.spawn(|| answered.send(importer.ask(&format!("import {handle}"))));
        let answer = answer.recv_timeout(12 * PATIENCE);
        if answer.is_err() {
            // The test that runs in the peer ends with the peer.
            rustix::process::kill_process(process, rustix::process::Signal::KILL).expect("the peer exists");
        }
        answer
    });
    let answer = answer.expect("mp_memory_import does not return while signals come");
    assert!(answer.starts_with(&format!("{} ", MP_ERROR_TIMEOUT as i32)) && answer.contains("has not answered"), "{answer}");
    exporter.go_on();
    importer.tell(&format!("import {handle}"));
    assert_eq!(importer.tell("look 0 4096 1 0"), "true");
}

/// Number of messages that is far more than the buffer of a socket can hold.
const MANY: usize = 600;

#[test]
fn an_importer_that_reads_nothing_learns_of_all_that_was_freed() {
    let node = Node::new(c"beluga");
    let mut owner = Peer::start();
    let ours = node.alloc(1, 4096);
    let plans: Vec<_> = (0..MANY)
        .map(|memory| {
            owner.tell(&format!("alloc 0 4096 {memory}"));
            let theirs = import(&node, &from_hex(&owner.tell(&format!("export {memory} 0 4096"))));
            (theirs, node.plan(&[transfer(ours, 1, theirs, 0, 4096)]))
        })
        .collect();
    // The owner frees all memory but one allocation.
    (1..MANY).for_each(|memory| _ = owner.tell(&format!("free {memory}")));
    node.run(plans[0].1);
    assert!(holds(ours, 4096, 0, 0));
    // SAFETY: the mapping still exists.
    let accepted = plans[1..].iter().filter(|(_, plan)| unsafe { mp_execute(*plan, null_mut(), null_mut()) } != MP_ERROR_PEER_GONE).count();
    assert_eq!(accepted, 0, "executions of {MANY} imports whose owner has freed them");
    node.run(plans[0].1);
    plans.iter().for_each(|(theirs, _)| close(&node, *theirs));
    node.still_works();
}

#[test]
fn an_exporter_that_reads_nothing_learns_of_all_that_was_closed() {
    let (mut owner, mut importer) = (Peer::start(), Peer::start());
    for memory in 0..MANY {
        owner.tell("alloc -1 8 0");
        importer.tell(&format!("import {}", owner.tell(&format!("export {memory} 0 8"))));
    }
    owner.stop();
    (1..MANY).for_each(|memory| _ = importer.tell(&format!("close {memory}")));
    importer.kill();
    owner.go_on();
    let next = u64::from_le_bytes(std::array::from_fn(|i| pattern(0, i))) + 1;
    let waits = |owner: &mut Peer, memory: usize| {
        let answer = owner.ask(&format!("await {memory} {next}"));
        answer.split(' ').next().expect("a status").parse::<i32>().expect("a number")
    };
    // Wait until only memory 0 is left, which is the only one that the importer has not closed.
    let started = Instant::now();
    while waits(&mut owner, 0) != MP_ERROR_PEER_GONE as i32 {
        assert!(started.elapsed() < 12 * PATIENCE, "the importer's end goes unnoticed");
    }
    let lost = (1..MANY).filter(|memory| waits(&mut owner, *memory) != MP_ERROR_TIMEOUT as i32).count();
    assert_eq!(lost, 0, "counters count as mapped by a process that has closed them");
}

#[test]
fn handles_from_elsewhere_are_refused_with_the_reason() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 3 4096 1");
    let handle = from_hex(&peer.tell("export 0 0 4096"));
    let refuse = |change: &dyn Fn(&mut Handle), status, expected: &str| {
        let message = import_refused(&node, &forged(&handle, change), status);
        assert!(message.contains(expected), "{message}");
    };
    refuse(&|h| h.origin.boot[3] ^= 1, MP_ERROR_NOT_SUPPORTED, "from another node");
    refuse(&|h| h.origin.network += 1, MP_ERROR_NOT_SUPPORTED, "from another container");
    refuse(&|h| h.origin.user += 1, MP_ERROR_NOT_SUPPORTED, "of another user");
    refuse(&|h| h.key.backend = 2, MP_ERROR_NOT_SUPPORTED, "MPGPU_BACKEND");
    refuse(&|h| h.device[15] ^= 1, MP_ERROR_NOT_SUPPORTED, "which is not visible to this process");
    refuse(&|h| h.key.allocation += 1, MP_ERROR_PEER_GONE, "freed");
    refuse(&|h| h.origin.token[0] ^= 1, MP_ERROR_PEER_GONE, "no longer exports memory");
    refuse(&|h| h.offset = 1, MP_ERROR_INVALID_ARGUMENT, "4096 bytes from byte 1 of an allocation of 4096 bytes");
    refuse(&|h| h.bytes = 0, MP_ERROR_INVALID_ARGUMENT, "0 bytes");
    // The handle describes an allocation that is larger than its file.
    refuse(&|h| h.allocation_bytes = 1 << 40, MP_ERROR_DRIVER, "mapping memory of another process");

    let mut newer = handle;
    newer.bytes[8] = 3;
    mpgpu_ipc::handle::seal(&mut newer.bytes);
    let message = import_refused(&node, &newer, MP_ERROR_VERSION_MISMATCH);
    assert!(message.contains("version 3, but this library uses version 2"), "{message}");

    // A handle with a larger range is refused, even if this context or another context of this process has already mapped the memory.
    let theirs = import(&node, &handle);
    refuse(
        &|h| (h.allocation_bytes, h.offset) = (1 << 40, 1 << 30),
        MP_ERROR_INVALID_ARGUMENT,
        "1099511627776 bytes, but the allocation has 4096",
    );
    let other = Node::new(c"beluga");
    let near = forged(&export(&other, other.alloc(0, 4096), 4096), |h| h.allocation_bytes = 4097);
    let message = import_refused(&node, &near, MP_ERROR_INVALID_ARGUMENT);
    assert!(message.contains("4097 bytes, but the allocation has 4096"), "{message}");
    close(&node, theirs);
    node.still_works();
}

#[test]
fn kernels_get_memory_of_a_gpu_out_of_sight() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 3 4096 1");
    let in_sight = from_hex(&peer.tell("export 0 0 4096"));
    let out_of_sight = forged(&in_sight, |handle| handle.device[15] ^= 1);
    let import_for = |handle: &mp_memory_handle_t, device: i32| {
        let (mut pointer, mut address, mut bytes) = (poison::<std::ffi::c_void>(), poison::<std::ffi::c_void>(), 77);
        // SAFETY: handle and outputs are valid for the call.
        let status = unsafe { mp_memory_import(node.context, handle, device, &mut pointer, null_mut(), &mut address, &mut bytes) };
        (status, pointer, address.cast::<u8>(), bytes)
    };
    for handle in [in_sight, out_of_sight] {
        let (status, pointer, address, bytes) = import_for(&handle, 2);
        assert_eq!((status, bytes), (MP_SUCCESS, 4096));
        assert!(holds(address, 4096, 1, 0), "other bytes");
        fill(address, 4096, 2);
        close(&node, pointer.cast());
        let theirs = import(&node, &in_sight);
        assert!(holds(theirs, 4096, 2, 0), "they are not written there");
        fill(theirs, 4096, 1);
        close(&node, theirs);
    }
    for (device, expected) in [(4, MP_ERROR_INVALID_DEVICE), (-3, MP_ERROR_INVALID_DEVICE)] {
        let (status, pointer, ..) = import_for(&in_sight, device);
        assert_eq!((status, pointer), (expected, poison()));
        assert_eq!(last_argument().as_deref(), Some("kernels"), "the handle is right");
    }
    import_refused(&node, &out_of_sight, MP_ERROR_NOT_SUPPORTED); // memory for plans
    node.still_works();
}

#[test]
fn every_corrupted_byte_is_noticed() {
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 4096);
    let handle = export(&node, memory, 4096);
    let message = import_refused(&node, &mp_memory_handle_t { bytes: [0xa5; 128] }, MP_ERROR_INVALID_ARGUMENT);
    assert!(message.contains("starts with a5a5a5a5a5a5a5a5, so it is not a handle of exported memory"), "{message}");
    for at in 0..handle.bytes.len() {
        for bit in [1, 0x80] {
            let mut corrupt = handle;
            corrupt.bytes[at] ^= bit;
            import_refused(&node, &corrupt, MP_ERROR_INVALID_ARGUMENT);
            assert_eq!(last_argument().as_deref(), Some("handle"));
        }
    }
    assert_eq!(import(&node, &handle), memory);
    node.still_works();
}

#[test]
fn strangers_at_the_socket_do_no_harm() {
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 4096);
    fill(memory, 4096, 1);
    let handle = export(&node, memory, 4096);
    let name = socket_of(&handle);
    for packet in [&b"x"[..], &[0; 448], &[0xFF; 448], &[7; 4000], b""] {
        let stranger = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::connect(&stranger, &name).expect("the service listens");
        rustix::net::send(&stranger, packet, SendFlags::NOSIGNAL).expect("the service reads");
        // The service closes the connection without an answer.
        let mut heard = [0_u8; 8];
        assert!(!matches!(rustix::net::recv(&stranger, &mut heard, RecvFlags::empty()), Ok((1.., _))), "an answer to {packet:?}");
    }
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&handle)));
    assert_eq!(peer.tell("look 0 4096 1 0"), "true");
}

/// Tests that many rounds of allocating, exporting, importing, closing and freeing between two processes leave no resources behind.
#[test]
fn ten_thousand_rounds_of_export_and_import_leave_nothing_behind() {
    let rounds = 10_000;
    let mut exporter = Peer::start();
    let mut importer = Peer::start();
    importer.tell("alloc 1 19000 1");
    let mut first = None;
    for round in 0..rounds {
        exporter.tell(&format!("alloc {} 20000 {round}", round % 4));
        let handle = exporter.tell(&format!("export {round} 100 19000"));
        importer.tell(&format!("import {handle}"));
        assert_eq!(importer.tell(&format!("look {round} 19000 {round} 100")), "true");
        if round % 100 == 0 {
            // A plan in the importer's cache does not keep memory of the exporter.
            importer.tell(&format!("put {round} {} 0 1 19000", round % 4));
        }
        importer.tell(&format!("close {round}"));
        exporter.tell(&format!("free {round}"));
        if round == 9 || round == rounds - 1 {
            let state = (importer.tell("holdings"), resident(&importer), resident(&exporter));
            let (before, importers, exporters) = first.get_or_insert_with(|| state.clone());
            assert_eq!(&state.0, before, "descriptors and mappings of the importer");
            // Number of pages. The lists of the peers grow too. With AddressSanitizer, the allocator keeps freed memory.
            let most = if std::env::var_os("ASAN_OPTIONS").is_some() { 50_000 } else { 500 };
            assert!(state.1 < *importers + most && state.2 < *exporters + most, "{state:?} after {importers} and {exporters}");
        }
    }
    // The process keeps a listening socket, a shared segment, and the usual file descriptors, once the exporter's thread has detected the
    // end of all connections.
    let until = Instant::now() + Duration::from_secs(60);
    let left = || holdings(&exporter.process.id().to_string());
    let is_little = |(descriptors, mappings): (usize, usize)| descriptors < 16 && mappings == 0;
    while !is_little(left()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(is_little(left()), "{:?} descriptors and mappings", left());
    assert_eq!(names(), 0);
}

/// Returns the number of resident pages of a process.
fn resident(peer: &Peer) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/statm", peer.process.id())).expect("procfs");
    text.split_whitespace().nth(1).expect("two numbers").parse().expect("a number")
}

#[test]
fn devices_have_names_that_all_processes_know() {
    let node = Node::new(c"beluga");
    let mut seen = std::collections::BTreeSet::new();
    for device in [0, 1, 2, 3, MP_DEVICE_HOST] {
        let mut uuid = [0_u8; 16];
        // SAFETY: the output has 16 bytes.
        ok(unsafe { mp_device_uuid(node.context, device, uuid.as_mut_ptr()) });
        assert!(seen.insert(uuid), "two devices have one name");
    }
}

#[test]
fn a_process_of_another_user_is_refused() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return skip("only root can start a process of another user");
    }
    // Copy the program into a folder that another user can read, because the original may not be readable.
    let program = std::env::temp_dir().join(format!("mpgpu-share-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().expect("this program"), &program).expect("room for a copy");
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 4096);
    let handle = export(&node, memory, 4096);
    let mut command = Command::new(&program);
    command.uid(65534).gid(65534);
    let mut stranger = Peer::of(command);
    std::fs::remove_file(&program).expect("the copy was the test's own");
    let answer = stranger.ask(&format!("import {}", hex(&handle)));
    assert!(answer.starts_with("8 ") && answer.contains("of another user"), "{answer}");
    // The handle states a wrong user. The importer checks who answers, and the exporter checks who requests.
    let lie = hex(&forged(&handle, |handle| handle.origin.user = 65534));
    let answer = stranger.ask(&format!("import {lie}"));
    assert!(answer.starts_with("8 ") && answer.contains("not trusted"), "{answer}");
    let heard = stranger.tell(&format!("knock {lie}"));
    assert!(heard.contains("the exporting process runs as user 0 and this process as user 65534"), "{heard}");
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&handle)));
}

#[test]
fn memory_that_the_system_gives_no_file_for_serves_and_is_not_shared() {
    let mut peer = Peer::start();
    peer.tell("limit 100000");
    peer.tell("alloc 0 50000 1");
    peer.tell("export 0 0 50000");
    peer.tell("alloc 1 500000 2");
    assert_eq!(peer.tell("check 1 2"), "true");
    let answer = peer.ask("refuse 1");
    assert!(answer.starts_with("8 ") && answer.contains("provided no memory file") && answer.contains("ulimit -f"), "{answer}");
    peer.tell("free 1");
    peer.tell("free 0");
}

#[test]
fn an_export_costs_the_same_however_many_there_are() {
    const EXPORTS: usize = 20_000;
    let backend = Arc::new(Addresses::default());
    let service = Service::start().expect("a service");
    let key = |allocation: u64| AllocationKey { backend: 9, allocation };
    let mut freed = Vec::new();
    for round in 1..=EXPORTS {
        let base = backend.allocate(DeviceId::gpu(0), 4096).expect("addresses");
        let allocation = backend.locate(base).expect("no driver").expect("just made");
        let export = Export { backend: backend.clone(), allocation };
        let secret = service.export(key(allocation.id), export, None).expect("random numbers");
        if round % 3 == 0 {
            // The memory is freed as by `cudaFree`, without notice to the library.
            backend.free(base).expect("once");
            freed.push((key(allocation.id), secret));
        }
        // One look-up is made by the test itself.
        assert!(backend.located() <= round * 4, "{} looks for {round} exports", backend.located());
    }
    assert!(freed.iter().all(|(key, secret)| service.find(*key, *secret).is_none()));
    let backend: Arc<dyn Backend> = backend;
    service.withdraw_all(&backend);
}
