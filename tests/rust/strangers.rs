//! Tests that only a process with a handle gets access to exported memory, and only to the allocation of the handle.

use crate::node::*;
use crate::peer::*;
use mpgpu_ipc::Handle;
use rustix::fd::AsFd;
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate};
use rustix::io::Errno;

#[test]
fn a_process_that_was_given_nothing_gets_nothing() {
    let mut exporter = Peer::start();
    let mut handle = None;
    for memory in 0..20 {
        exporter.tell(&format!("alloc 0 5000 {memory}"));
        if memory % 2 == 0 {
            handle = Some(from_hex(&exporter.tell(&format!("export {memory} 0 5000"))));
        }
    }
    let handle = handle.expect("ten were exported");
    // All processes can read the names of sockets, and allocation numbers are consecutive.
    let name = socket_of(&handle);
    let listed = std::fs::read_to_string("/proc/net/unix").expect("procfs");
    let abstract_name = String::from_utf8(name.abstract_name().expect("no file").to_vec()).expect("ASCII");
    assert!(listed.contains(&format!("@{abstract_name}")), "the kernel does not list {abstract_name}");
    let said = Handle::decode(&handle.bytes).expect("a handle");
    let never = ask_for(&name, said.key.backend, u64::MAX, [7; 16]).expect("an answer").0;
    for id in 0..200_u64 {
        for secret in [[0; 16], [0xFF; 16]] {
            let (mut answer, file) = ask_for(&name, said.key.backend, id, secret).expect("an answer");
            assert!(file.is_none(), "memory {id} was given to somebody who holds no handle");
            // The answer is the same as for memory that does not exist.
            answer[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
            assert_eq!(answer, never, "{id}");
        }
    }
    let node = Node::new(c"beluga");
    for bit in [0, 64, 127] {
        let guess = forged(&handle, |handle| handle.secret.0[bit / 8] ^= 1 << (bit % 8));
        let message = import_refused(&node, &guess, MP_ERROR_PEER_GONE);
        let never = import_refused(&node, &forged(&handle, |handle| handle.key.allocation = u64::MAX), MP_ERROR_PEER_GONE);
        assert_eq!(message, never);
    }
    let theirs = import(&node, &handle);
    // The wrong handle is refused even if the memory is already mapped.
    import_refused(&node, &forged(&handle, |handle| handle.secret.0[3] ^= 1), MP_ERROR_PEER_GONE);
    close(&node, theirs);
}

#[test]
fn an_importer_gets_the_allocation_and_nothing_beside_it() {
    const BYTES: usize = 5000;
    let mut exporter = Peer::start();
    for memory in 0..3 {
        exporter.tell(&format!("alloc 0 {BYTES} {memory}"));
    }
    let handle = from_hex(&exporter.tell(&format!("export 1 0 {BYTES}")));
    exporter.tell(&format!("export 2 0 {BYTES}"));
    let said = Handle::decode(&handle.bytes).expect("a handle");
    let (_, file) = ask_for(&socket_of(&handle), said.key.backend, said.key.allocation, said.secret.0).expect("an answer");
    let file = file.expect("a memory file");
    let size = rustix::fs::fstat(&file).expect("a file").st_size;
    assert_eq!(size, BYTES.next_multiple_of(4096) as i64, "the file holds more than the allocation");
    let mut content = vec![0; BYTES];
    assert_eq!(rustix::io::pread(&file, &mut content, 0), Ok(BYTES));
    assert!(content.iter().enumerate().all(|(i, byte)| *byte == pattern(1, i)));
    // While the memory is mapped, no process can shrink or extend its file, or prevent the owner from writing it.
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
    assert_eq!(ftruncate(&file, 1 << 20), Err(Errno::PERM));
    assert_eq!(fallocate(&file, FallocateFlags::empty(), size as u64, 4096), Err(Errno::PERM));
    let sealed = fcntl_get_seals(&file).expect("a memory file");
    for seal in [SealFlags::SEAL, SealFlags::SHRINK, SealFlags::GROW, SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        assert_eq!(fcntl_add_seals(&file, seal), Err(Errno::PERM), "{seal:?}");
    }
    assert_eq!(fcntl_get_seals(&file), Ok(sealed));
    assert_eq!(exporter.tell("check 1 1"), "true");
}

#[test]
fn descriptors_are_left_for_the_program() {
    let mut exporter = Peer::start();
    let number = |answer: String| answer.split(' ').next().expect("two numbers").parse::<usize>().expect("a number");
    exporter.tell("descriptors 128");
    for memory in 0..200 {
        exporter.tell(&format!("alloc 0 5000 {memory}"));
    }
    let held = number(exporter.tell("holdings"));
    assert!(held < 128 / 2 + 16, "{held} descriptors of 128");
    for memory in [0, 10, 63, 64, 199] {
        assert_eq!(exporter.tell(&format!("check {memory} {memory}")), "true");
    }
    exporter.tell("export 63 0 5000");
    let answer = exporter.ask("refuse 64");
    assert!(answer.starts_with("8 ") && answer.contains("ulimit -n") && answer.contains("fewer and larger"), "{answer}");
    // Freed memory makes room for another export.
    exporter.tell("free 0");
    exporter.tell("alloc 0 5000 7");
    exporter.tell("export 200 0 5000");
    assert_eq!(exporter.tell("check 200 7"), "true");
    let mut importer = Peer::start();
    importer.tell(&format!("import {}", exporter.tell("export 10 0 5000")));
    assert_eq!(importer.tell("look 0 5000 10 0"), "true");
}

#[test]
fn whoever_takes_over_the_name_of_an_exporter_that_has_ended_is_not_trusted() {
    use rustix::net::*;
    let mut exporter = Peer::start();
    exporter.tell("alloc 0 4096 1");
    let handle = from_hex(&exporter.tell("export 0 0 4096"));
    exporter.kill();
    let impostor = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&impostor, &socket_of(&handle)).expect("the name is free");
    listen(&impostor, 1).expect("a socket of our own");
    let answers = std::thread::spawn(move || {
        let importer = accept(&impostor).expect("an importer");
        let mut packet = [0; 448];
        recv(&importer, &mut packet[..], RecvFlags::empty()).expect("a request");
        // The packet grants permission, for memory of the right size.
        packet[8] = 1;
        packet[24] = 1;
        packet[104..120].fill(0);
        let memory = rustix::fs::memfd_create("trap", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memory file");
        ftruncate(&memory, 4096).expect("room");
        fcntl_add_seals(&memory, SealFlags::SHRINK).expect("a file of our own");
        let (files, mut space) = ([memory.as_fd()], [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&importer, &[std::io::IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL).expect("the importer reads");
    });
    let node = Node::new(c"beluga");
    let message = import_refused(&node, &handle, MP_ERROR_PEER_GONE);
    assert!(message.contains("another process answers in its place"), "{message}");
    answers.join().expect("no assertion failed");
    node.still_works();
}

#[test]
fn an_importer_that_is_out_of_descriptors_says_so_and_imports_when_there_are_some() {
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 65536);
    fill(memory, 65536, 3);
    let handle = hex(&export(&node, memory, 65536));
    for is_connected in [false, true] {
        let mut importer = Peer::start();
        if is_connected {
            let other = node.alloc(0, 65536);
            importer.tell(&format!("import {}", hex(&export(&node, other, 65536))));
        }
        let mut refusals = 0;
        for left in 0..10 {
            importer.tell(&format!("fill {left}"));
            let answer = importer.ask(&format!("import {handle}"));
            if answer.starts_with("0 ") {
                break;
            }
            assert!(answer.contains("out of file descriptors (EMFILE)") && answer.contains("ulimit -n"), "{left} left: {answer}");
            refusals += 1;
        }
        assert!((1..10).contains(&refusals), "{refusals} refusals");
        let import = usize::from(is_connected);
        assert_eq!(importer.tell(&format!("look {import} 65536 3 0")), "true");
    }
    node.still_works();
}

#[test]
fn an_exporter_that_is_out_of_descriptors_says_so_to_its_importers() {
    let node = Node::new(c"beluga");
    let mut exporter = Peer::start();
    exporter.tell("alloc 0 65536 5");
    let handle = from_hex(&exporter.tell("export 0 0 65536"));
    // One file descriptor is left for the connection, but none for the descriptor that the importer sends.
    exporter.tell("fill 1");
    let message = import_refused(&node, &handle, MP_ERROR_NOT_SUPPORTED);
    assert!(message.contains("the exporting process is out of file descriptors (EMFILE)") && message.contains("ulimit -n"), "{message}");
    exporter.tell("fill 40");
    let theirs = import(&node, &handle);
    assert!(holds(theirs, 65536, 5, 0));
    close(&node, theirs);
}
