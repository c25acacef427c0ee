//! Tests single message calls through the C ABI and the Rust interface.

use super::{TOPOLOGY, options};
use crate::node::*;
use crate::node_plans::{as_ranks, context, memory};
use mpgpu::abi::*;
use mpgpu_backend::{BackendError, CompletionState, StreamHandle};
use mpgpu_contexts::{Context, Error};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::NodeGroup;
use mpgpu_ranks::message::{Messenger, MessengerOptions, Operation, Outgoing, Pattern};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};

pub(super) const DEFAULT: StreamHandle = StreamHandle(0);

/// Rank of a node, with a context and a messenger.
pub(super) struct Rank {
    pub rank: u32,
    pub context: Arc<Context>,
    pub messenger: Arc<Messenger>,
}

impl Rank {
    pub fn memory(&self, bytes: u64, fill: u8) -> u64 {
        let address = self.context.allocate(DeviceId::gpu(0), bytes).expect("memory");
        memory(address, bytes).fill(fill);
        address
    }

    pub fn send(&self, address: u64, bytes: u64, rank: u32, tag: u64) -> Result<Arc<Operation>, Error> {
        self.messenger.send(&Outgoing { address, bytes, rank, tag, metadata: &[] }, DEFAULT)
    }

    pub fn receive(&self, address: u64, bytes: u64, source: u32, tag: u64) -> Arc<Operation> {
        let pattern = Pattern { source: Some(source), tag, mask: u64::MAX };
        self.messenger.receive(address, bytes, &pattern, DEFAULT).expect("posted")
    }
}

pub(super) fn ranks<T: Send>(count: u32, options: MessengerOptions, work: impl Fn(&Rank, &Barrier) -> T + Sync) -> Vec<T> {
    let barrier = Barrier::new(count as usize);
    as_ranks(count, |rank, seat| {
        let context = context(TOPOLOGY, Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, count, seat, &[]).expect("a node"));
        let messenger = node.messenger(options).expect("a messenger");
        work(&Rank { rank, context, messenger }, &barrier)
    })
}

#[test]
fn a_full_mailbox_refuses_and_loses_nothing() {
    ranks(2, MessengerOptions { operations: 64, messages: 3 }, |rank, barrier| {
        if rank.rank == 0 {
            let address = rank.memory(16, 0);
            let sent: Vec<_> = (0..3)
                .map(|tag| {
                    memory(address + tag, 1)[0] = tag as u8 + 1;
                    rank.send(address + tag, 1, 1, tag).expect("there is room")
                })
                .collect();
            let full = rank.send(address, 1, 1, 9).expect_err("there is none");
            assert!(
                matches!(&full, Error::QueueFull(text) if text.contains("3 messages of this rank wait for receives of rank 1")),
                "{full}"
            );
            barrier.wait();
            sent.iter().for_each(|sent| sent.wait().expect("received"));
            barrier.wait();
            rank.send(address, 1, 1, 9).expect("there is room again").wait().expect("received");
        } else {
            barrier.wait();
            let address = rank.memory(16, 0);
            for tag in (0..3).rev() {
                rank.receive(address, 16, 0, tag).wait().expect("it was sent");
                assert_eq!(memory(address, 1)[0], tag as u8 + 1);
            }
            barrier.wait();
            rank.receive(address, 16, 0, 9).wait().expect("it was sent");
        }
    });
}

#[test]
fn a_rank_with_too_many_operations_is_refused_and_goes_on() {
    ranks(1, MessengerOptions { operations: 4, messages: 8 }, |rank, _| {
        let address = rank.memory(64, 7);
        let waiting: Vec<_> = (0..4).map(|at| rank.receive(address + 8 * at, 8, 0, at)).collect();
        let full = rank.messenger.receive(address, 8, &Pattern { source: None, tag: 0, mask: 0 }, DEFAULT).expect_err("no slot");
        assert!(
            matches!(&full, Error::QueueFull(text) if text.contains("4 receives of this rank have not completed: wait for some of them, \
                                                                     or cancel")),
            "{full}"
        );
        assert!(waiting[3].cancel().expect("it lives"));
        assert!(matches!(waiting[3].wait(), Err(BackendError::Cancelled(_))));
        // The slot of the cancelled receive is free once the receive's stream has reached it.
        rank.context.synchronize_stream(DEFAULT).expect("nothing waits");
        rank.send(address + 40, 8, 0, 2).expect("a slot is free").wait().expect("received");
        waiting[2].wait().expect("received");
        assert!(!waiting[2].cancel().expect("it lives"), "it has ended");
    });
}

#[test]
fn a_free_piece_of_library_memory_of_up_to_twice_the_size_is_used_again() {
    ranks(1, options(), |rank, _| {
        let to = rank.memory(1 << 20, 0);
        let mut ordinary = vec![0_u8; 1 << 20];
        let from = ordinary.as_mut_ptr().expose_provenance() as u64;
        let held = || rank.context.device_statistics(DeviceId::HOST).expect("a device").allocated_bytes;
        let mut seed = 0;
        let mut pass = |bytes: u64| {
            let before = held();
            seed += 1;
            memory(from, bytes).iter_mut().zip(0..).for_each(|(place, at)| *place = (at % 251) as u8 ^ seed);
            let sent = rank.send(from, bytes, 0, 0).expect("sent");
            rank.receive(to, bytes, 0, 0).wait().expect("it was sent");
            sent.wait().expect("received");
            assert!(memory(from, bytes) == memory(to, bytes), "{bytes} bytes");
            let grown = held() - before;
            drop(sent);
            // Resources of a slot are released when the slot is reused.
            for _ in 0..4 {
                rank.send(to, 0, 0, 1).expect("sent");
                rank.receive(to, 0, 0, 1).wait().expect("it was sent");
            }
            grown
        };
        let grown = [8000, 8000, 4097, 3000, 1025, 1 << 20, 1 << 19, 16000, 8000].map(&mut pass);
        assert_eq!(grown, [8192, 0, 0, 0, 0, 1 << 20, 0, 1 << 14, 0], "what is much larger is left to larger messages");
    });
}

#[test]
fn messages_of_ordinary_memory_are_bounded_in_bytes_and_their_memory_goes_back() {
    ranks(1, MessengerOptions { operations: 512, messages: 512 }, |rank, _| {
        const BYTES: u64 = 4 << 20;
        let held = || rank.context.device_statistics(DeviceId::HOST).expect("a device").allocated_bytes;
        let before = held();
        let mut ordinary = vec![7_u8; BYTES as usize];
        let address = ordinary.as_mut_ptr().expose_provenance() as u64;
        let mut sent = Vec::new();
        let refused = loop {
            match rank.send(address, BYTES, 0, 0) {
                Ok(operation) => sent.push(operation),
                Err(error) => break error,
            }
        };
        assert!(matches!(&refused, Error::QueueFull(text) if text.contains("use memory shared between processes")), "{refused}");
        assert_eq!((sent.len(), held() - before), (128, 512 << 20));
        // Each receive has separate memory.
        let mut ordinary = vec![0_u8; BYTES as usize];
        rank.receive(ordinary.as_mut_ptr().expose_provenance() as u64, BYTES, 0, 0).wait().expect("it was sent");
        assert!(ordinary.iter().all(|byte| *byte == 7));
        let to = rank.memory(BYTES, 0);
        for operation in sent.into_iter().skip(1) {
            rank.receive(to, BYTES, 0, 0).wait().expect("it was sent");
            operation.wait().expect("received");
        }
        let after = |bytes: u64| {
            let sent = rank.send(address, bytes, 0, 0).expect("there is room again");
            rank.receive(to, bytes, 0, 0).wait().expect("it was sent");
            sent.wait().expect("received");
            drop(sent);
            held() - before
        };
        let small = (0..200).fold(0, |_, _| after(5000));
        assert!(small <= (64 << 20) + BYTES, "{small} bytes are kept");
    });
}

#[test]
fn a_described_buffer_is_fetched_once_and_whenever_the_receiver_likes() {
    let (sender, receiver) = channel();
    let (sender, receiver) = (std::sync::Mutex::new(sender), std::sync::Mutex::new(receiver));
    ranks(2, options(), |rank, barrier| {
        const BYTES: u64 = 300_001;
        if rank.rank == 0 {
            let address = rank.memory(BYTES, 1);
            // Earlier work in the stream writes the data of the message.
            let write = move || memory(address, BYTES).fill(42);
            rank.context.launch_host(DEFAULT, Box::new(write)).expect("enqueued");
            let (descriptor, released) = rank.messenger.describe(address, BYTES, DEFAULT).expect("described");
            sender.lock().expect("no panic").send(descriptor).expect("a receiver");
            released.wait().expect("fetched");
            let (dropped, released) = rank.messenger.describe(address, BYTES, DEFAULT).expect("described");
            assert!(released.cancel().expect("it lives"));
            assert!(matches!(released.wait(), Err(BackendError::Cancelled(_))));
            sender.lock().expect("no panic").send(dropped).expect("a receiver");
            barrier.wait();
        } else {
            let descriptor = receiver.lock().expect("no panic").recv().expect("a sender");
            let address = rank.memory(BYTES + 1, 9);
            let small = rank.messenger.fetch(&descriptor, address, BYTES - 1, DEFAULT).expect_err("too small");
            assert!(matches!(small, Error::Backend(BackendError::Truncated(_))), "{small}");
            let mut bytes = descriptor.encode();
            bytes[20] ^= 1;
            mpgpu_ranks::message::Descriptor::decode(&bytes).expect_err("it was changed");
            rank.messenger.fetch(&descriptor, address, BYTES + 1, DEFAULT).expect("posted").wait().expect("fetched");
            let here = memory(address, BYTES + 1);
            assert!(here[..BYTES as usize].iter().all(|byte| *byte == 42) && here[BYTES as usize] == 9);
            let again = rank.messenger.fetch(&descriptor, address, BYTES, DEFAULT).expect_err("it was fetched").to_string();
            assert!(again.contains("was already fetched"), "{again}");
            let dropped = receiver.lock().expect("no panic").recv().expect("a sender");
            rank.messenger.fetch(&dropped, address, BYTES, DEFAULT).expect_err("it was cancelled");
            barrier.wait();
        }
    });
}

#[test]
fn a_stream_may_wait_for_a_message_before_anybody_has_sent_it() {
    ranks(2, options(), |rank, barrier| {
        const BYTES: u64 = 70_000;
        let stream = rank.context.create_stream(DeviceId::gpu(0)).expect("a stream");
        let (address, copy) = (rank.memory(BYTES, 1), rank.memory(BYTES, 2));
        if rank.rank == 0 {
            let pattern = Pattern { source: None, tag: 0, mask: 0 };
            let got = rank.messenger.receive(address, BYTES, &pattern, stream).expect("posted");
            got.order_stream(stream).expect("enqueued");
            let take = move || memory(copy, BYTES).copy_from_slice(memory(address, BYTES));
            rank.context.launch_host(stream, Box::new(take)).expect("enqueued");
            // The request is dropped before the message arrives.
            drop(got);
            barrier.wait();
            rank.context.synchronize_stream(stream).expect("it ends");
            assert!(memory(copy, BYTES).iter().all(|byte| *byte == 77));
        } else {
            barrier.wait();
            memory(address, BYTES).fill(77);
            let sent = rank.messenger.send(&Outgoing { address, bytes: BYTES, rank: 0, tag: 5, metadata: &[] }, stream).expect("sent");
            sent.order_stream(stream).expect("enqueued");
            let overwrite = move || memory(address, BYTES).fill(0);
            rank.context.launch_host(stream, Box::new(overwrite)).expect("enqueued");
            rank.context.synchronize_stream(stream).expect("it ends");
        }
        barrier.wait();
        rank.messenger.destroy().expect("nothing is left");
    });
}

#[test]
fn memory_is_freed_while_a_receive_into_ordinary_memory_waits_and_it_gets_its_bytes_later() {
    ranks(1, options(), |rank, _| {
        let mut ordinary = vec![0_u8; 9000];
        let at = ordinary.as_mut_ptr().expose_provenance() as u64;
        let stream = rank.context.create_stream(DeviceId::gpu(0)).expect("a stream");
        let waiting = rank.receive(at, 9000, 0, 1);
        // A free waits for all streams, so no stream may wait for the message at this time.
        rank.context.free(rank.memory(64, 0)).expect("it exists");
        rank.send(rank.memory(8000, 6), 8000, 0, 1).expect("sent");
        // The message is waited for in stream order, without a wait on a CPU.
        waiting.order_stream(stream).expect("enqueued");
        rank.context.synchronize_stream(stream).expect("it ends");
        let got = memory(at, 9000);
        assert!(got[..8000].iter().all(|byte| *byte == 6) && got[8000..].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_messenger_that_is_destroyed_ends_what_concerns_it_and_keeps_what_was_sent() {
    ranks(3, options(), |rank, barrier| {
        let address = rank.memory(4096, 3);
        let mut ordinary = vec![8_u8; 3000];
        let at = ordinary.as_mut_ptr().expose_provenance() as u64;
        match rank.rank {
            0 => {
                let waiting = rank.receive(address, 4096, 1, 1);
                // The data of the message is buffered until rank 1 has received it.
                rank.send(at, 3000, 1, 2).expect("sent").wait().expect("kept");
                barrier.wait();
                rank.messenger.destroy().expect("rank 1 receives");
                assert!(matches!(waiting.wait(), Err(BackendError::Cancelled(_))));
                barrier.wait();
            }
            1 => {
                let lost = rank.receive(address, 4096, 0, 77);
                barrier.wait();
                std::thread::sleep(std::time::Duration::from_millis(20));
                rank.receive(at, 3000, 0, 2).wait().expect("it was kept");
                assert!(matches!(lost.wait(), Err(BackendError::PeerGone(_))), "rank 0 has left");
                barrier.wait();
                let gone = rank.send(address, 1, 0, 0).expect_err("rank 0 has left").to_string();
                assert!(gone.contains("rank 0"), "{gone}");
                rank.send(address, 100, 2, 5).expect("rank 2 is there").wait().expect("received");
            }
            _ => {
                let any = rank.messenger.receive(address, 4096, &Pattern { source: None, tag: 5, mask: 7 }, DEFAULT).expect("posted");
                barrier.wait();
                barrier.wait();
                any.wait().expect("a rank that leaves in order ends no receive from any rank");
                assert_eq!(any.envelope().map(|met| (met.source, met.bytes)), Some((1, 100)));
            }
        }
        rank.messenger.destroy().expect("nothing is left");
        assert!(rank.send(address, 1, 1, 1).is_err(), "it was destroyed");
        rank.context.close().expect("nothing is left");
    });
}

/// Messenger of the C ABI in a node of one rank, which sends messages to itself.
struct Own {
    node: Node,
    ranks: mp_node_t,
    messenger: mp_messenger_t,
}

impl Own {
    fn new() -> Own {
        let node = Node::new(c"hgx-h200");
        let (mut ranks, mut messenger) = (null_mut(), null_mut());
        // SAFETY: all pointers are valid for the calls in this function.
        ok(unsafe { mp_node_create(node.context, 0, 1, None, null_mut(), null(), &mut ranks) });
        let options = mp_messenger_options_t { size: size_of::<mp_messenger_options_t>(), operations: 8, messages: 0 };
        // SAFETY: as above.
        ok(unsafe { mp_messenger_create(ranks, &options, &mut messenger) });
        Own { node, ranks, messenger }
    }

    fn send(&self, data: *const u8, bytes: usize, tag: u64, metadata: &[u8]) -> mp_request_t {
        let mut request = null_mut();
        // SAFETY: as above.
        ok(unsafe {
            mp_send(self.messenger, data.cast(), bytes as u64, 0, tag, metadata.as_ptr().cast(), metadata.len(), null_mut(), &mut request)
        });
        request
    }

    fn receive(&self, data: *mut u8, bytes: usize, tag: u64) -> mp_request_t {
        let mut request = null_mut();
        // SAFETY: as above.
        ok(unsafe { mp_receive(self.messenger, data.cast(), bytes as u64, MP_ANY_RANK, tag, u64::MAX, null_mut(), &mut request) });
        request
    }
}

/// Returns the `user` argument for a callback `note`, which sends its result to this channel.
fn box_of(sender: &Sender<(i32, String)>) -> *mut c_void {
    Box::into_raw(Box::new(sender.clone())).cast()
}

unsafe extern "C" fn note(user: *mut c_void, status: i32) {
    // SAFETY: created by `box_of`, and each is used once.
    let sender = unsafe { Box::from_raw(user.cast::<Sender<(i32, String)>>()) };
    sender.send((status, if status == 0 { String::new() } else { last_error() })).expect("the test listens");
}

#[test]
fn the_c_abi_sends_probes_truncates_cancels_and_calls_back() {
    let own = Own::new();
    let (from, to) = (own.node.alloc(0, 5000), own.node.alloc(1, 5000));
    let sent = own.send(from, 5000, 3, b"header");
    let (mut found, mut metadata) = (0, [0_u8; 4]);
    let mut told = mp_message_info_t { metadata: metadata.as_mut_ptr().cast(), metadata_capacity: 4, ..message_info() };
    // SAFETY: all pointers are valid for the calls in this function.
    ok(unsafe { mp_message_probe(own.messenger, 0, 3, u64::MAX, &mut found, &mut told) });
    assert_eq!((found, told.tag, told.bytes, told.rank, told.metadata_bytes, &metadata), (1, 3, 5000, 0, 6, b"head"));

    let mut short = own.receive(to, 4999, 3);
    let mut told = message_info();
    // SAFETY: as above.
    let text = refused(unsafe { mp_wait(&mut short, &mut told) }, MP_ERROR_MESSAGE_TRUNCATED);
    assert!(short.is_null() && told.bytes == 5000 && text.contains("5000") && text.contains("4999"), "{text}");

    let (sender, heard) = channel::<(i32, String)>();
    let user = || box_of(&sender);
    // SAFETY: as above.
    ok(unsafe { mp_request_set_callback(sent, Some(note), user()) });
    let got = own.receive(to, 5000, 3);
    // SAFETY: as above.
    ok(unsafe { mp_request_set_callback(got, Some(note), user()) });
    assert_eq!((heard.recv().expect("called").0, heard.recv().expect("called").0), (0, 0));
    ok(mp_stream_wait_request(null_mut(), got));
    let (mut matched, mut told) = (0, message_info());
    // SAFETY: as above.
    ok(unsafe { mp_message_get_info(got, &mut matched, &mut told) });
    assert_eq!((matched, told.bytes, told.metadata_bytes), (1, 5000, 6));

    let (mut cancelled, mut never) = (0, own.receive(to, 5000, 9));
    // SAFETY: as above.
    ok(unsafe { mp_request_set_callback(never, Some(note), user()) });
    // SAFETY: as above.
    ok(unsafe { mp_message_get_info(never, &mut matched, &mut told) });
    assert_eq!(matched, 0);
    // SAFETY: as above.
    ok(unsafe { mp_request_cancel(never, &mut cancelled) });
    let (status, text) = heard.recv().expect("called");
    assert!(cancelled == 1 && status == MP_ERROR_CANCELLED as i32 && text.contains("cancelled"), "{text}");
    // SAFETY: as above.
    refused(unsafe { mp_wait(&mut never, null_mut()) }, MP_ERROR_CANCELLED);
    assert!(never.is_null());
    for mut request in [sent, got] {
        // SAFETY: as above.
        ok(unsafe { mp_wait(&mut request, null_mut()) });
    }

    // Requests of executions support the same calls.
    let plan = own.node.plan(&[transfer(to, 1, from, 0, 5000)]);
    let (stream, mut request) = (own.node.stream(1), null_mut());
    // SAFETY: as above.
    ok(unsafe { mp_execute(plan, null_mut(), &mut request) });
    // SAFETY: as above.
    ok(unsafe { mp_request_set_callback(request, Some(note), user()) });
    ok(mp_stream_wait_request(stream, request));
    assert_eq!(heard.recv().expect("called").0, 0);
    // SAFETY: as above.
    refused(unsafe { mp_request_cancel(request, &mut cancelled) }, MP_ERROR_INVALID_ARGUMENT);
    // SAFETY: as above.
    ok(unsafe { mp_wait(&mut request, null_mut()) });

    // Errors name the wrong value.
    // SAFETY: as above.
    let mut send = |bytes: u64, rank: u32, metadata: usize| unsafe {
        mp_send(own.messenger, from.cast(), bytes, rank, 0, to.cast(), metadata, null_mut(), &mut request)
    };
    refused(send(5000, 1, 0), MP_ERROR_INVALID_ARGUMENT);
    refused(send(5001, 0, 0), MP_ERROR_INVALID_POINTER);
    refused(send(5000, 0, 257), MP_ERROR_INVALID_ARGUMENT);
    assert_eq!(last_argument().as_deref(), Some("metadata_bytes"));

    // The following tests use a descriptor.
    let mut descriptor = mp_message_descriptor_t { bytes: [0; 64] };
    let mut released = null_mut();
    // SAFETY: as above.
    ok(unsafe { mp_message_describe(own.messenger, from.cast(), 100, null_mut(), &mut descriptor, &mut released) });
    // SAFETY: as above.
    ok(unsafe { mp_message_fetch(own.messenger, &descriptor, to.cast(), 100, null_mut(), &mut request) });
    // SAFETY: as above.
    ok(unsafe { mp_wait(&mut request, null_mut()) });
    // SAFETY: as above.
    ok(unsafe { mp_wait(&mut released, null_mut()) });

    // A receive that has no message is cancelled when the messenger is destroyed.
    let mut left = own.receive(to, 8, 1);
    ok(mp_messenger_destroy(own.messenger));
    // SAFETY: as above.
    refused(unsafe { mp_wait(&mut left, null_mut()) }, MP_ERROR_CANCELLED);
    refused(mp_messenger_destroy(own.messenger), MP_ERROR_INVALID_HANDLE);
    ok(mp_node_destroy(own.ranks));
}

#[test]
fn asking_the_c_abi_tells_of_the_message_with_every_end() {
    let own = Own::new();
    let (from, to) = (own.node.alloc(0, 5000), own.node.alloc(1, 5000));
    let mut metadata = [0_u8; 4];
    let place = metadata.as_mut_ptr();
    let nothing = mp_message_info_t { metadata: place.cast(), metadata_capacity: 4, ..message_info() };
    let mut told = nothing;
    let ask = |request: &mut mp_request_t, told: &mut mp_message_info_t| {
        let mut done = 77;
        // SAFETY: all pointers are valid for the call, and the metadata are this test's.
        unsafe { (mp_test(request, &mut done, told), done, place.cast::<[u8; 4]>().read()) }
    };
    let same = |a: &mp_message_info_t, b: &mp_message_info_t| {
        (a.tag, a.bytes, a.rank, a.metadata_bytes) == (b.tag, b.bytes, b.rank, b.metadata_bytes)
    };
    // If a request is not finished, neither the request nor the output for the message changes.
    let mut got = own.receive(to, 5000, 3);
    assert_eq!(ask(&mut got, &mut told), (MP_SUCCESS, 0, [0; 4]));
    assert!(!got.is_null() && same(&told, &nothing));
    // SAFETY: the memory belongs to the test.
    unsafe { from.write_bytes(7, 5000) };
    let mut sent = own.send(from, 5000, 3, b"header");
    let until_it_ends = |request: &mut mp_request_t, told: &mut mp_message_info_t| loop {
        let (status, done, metadata) = ask(request, told);
        assert_eq!(done == 1, request.is_null(), "it is destroyed when it has ended, and not before");
        if done == 1 {
            return (status, metadata);
        }
        assert_eq!((status, done), (MP_SUCCESS, 0));
    };
    assert_eq!(until_it_ends(&mut got, &mut told), (MP_SUCCESS, *b"head"));
    assert_eq!((told.tag, told.bytes, told.rank, told.metadata_bytes), (3, 5000, 0, 6));
    // SAFETY: as above, and the message is there.
    assert!(unsafe { std::slice::from_raw_parts(to, 5000) }.iter().all(|byte| *byte == 7));
    told = nothing;
    assert_eq!(until_it_ends(&mut sent, &mut told).0, MP_SUCCESS);
    assert_eq!((told.tag, told.bytes, told.metadata_bytes), (3, 5000, 6), "of a send too");

    // The message is too long for the receive. The receive fails, and the message stays until a larger receive matches it.
    let mut sent = own.send(from, 5000, 4, b"");
    let mut short = own.receive(to, 4999, 4);
    assert_eq!(until_it_ends(&mut short, &mut told).0, MP_ERROR_MESSAGE_TRUNCATED);
    let text = last_error();
    assert!(told.bytes == 5000 && text.contains("5000") && text.contains("4999"), "{text}");
    let mut done = 77;
    for request in [own.receive(to, 5000, 4), sent] {
        let mut request = request;
        while !request.is_null() {
            // SAFETY: the request is valid, and no report is requested.
            ok(unsafe { mp_test(&mut request, &mut done, null_mut()) });
        }
        sent = request;
    }
    assert_eq!((done, sent), (1, null_mut()));

    // After a cancellation there is no message.
    let (mut never, mut cancelled) = (own.receive(to, 5000, 9), 0);
    // SAFETY: as above.
    ok(unsafe { mp_request_cancel(never, &mut cancelled) });
    told = nothing;
    assert_eq!((cancelled, until_it_ends(&mut never, &mut told).0), (1, MP_ERROR_CANCELLED));
    assert!(same(&told, &nothing));

    // Wrong arguments leave the request unchanged.
    let (plan, mut request) = (own.node.plan(&[transfer(to, 1, from, 0, 5000)]), null_mut());
    // SAFETY: as above.
    ok(unsafe { mp_execute(plan, null_mut(), &mut request) });
    done = 77;
    // SAFETY: as above.
    let wrong = |request: *mut mp_request_t, done: *mut i32| unsafe { mp_test(request, done, &mut message_info()) };
    let text = refused(wrong(&mut request, &mut done), MP_ERROR_INVALID_ARGUMENT);
    assert_eq!((last_argument().as_deref(), text.contains("pass NULL as info")), (Some("info"), true), "{text}");
    refused(wrong(null_mut(), &mut done), MP_ERROR_INVALID_ARGUMENT);
    refused(wrong(&mut null_mut(), &mut done), MP_ERROR_INVALID_HANDLE);
    let mut got = own.receive(to, 8, 1);
    refused(wrong(&mut got, null_mut()), MP_ERROR_INVALID_ARGUMENT);
    assert_eq!(last_argument().as_deref(), Some("done"));
    assert!(done == 77 && !request.is_null() && !got.is_null());
    // SAFETY: as above.
    ok(unsafe { mp_wait(&mut request, null_mut()) });
    ok(mp_messenger_destroy(own.messenger));
    assert_eq!(until_it_ends(&mut got, &mut told).0, MP_ERROR_CANCELLED);
    ok(mp_node_destroy(own.ranks));
}

#[test]
fn a_context_that_is_destroyed_ends_its_messengers_first() {
    let own = Own::new();
    let to = own.node.alloc(1, 64);
    let (sender, heard) = channel::<(i32, String)>();
    let request = own.receive(to, 64, 1);
    // SAFETY: all pointers are valid for the call.
    ok(unsafe { mp_request_set_callback(request, Some(note), box_of(&sender)) });
    ok(mp_stream_wait_request(null_mut(), request));
    ok(mp_context_destroy(own.node.context));
    assert_eq!(heard.recv().expect("called").0, MP_ERROR_CANCELLED as i32);
    refused(mp_messenger_destroy(own.messenger), MP_ERROR_INVALID_HANDLE);
}

/// Makes a call in a thread, and fails if it does not return within a minute.
fn ends<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("destruction ends")
}

#[test]
fn a_context_ends_though_a_movement_of_one_messenger_stands_behind_an_unmatched_receive_of_another() {
    let own = Own::new();
    let mut other = null_mut();
    // SAFETY: all pointers are valid for the calls in this function.
    ok(unsafe { mp_messenger_create(own.ranks, null(), &mut other) });
    let [from, to, never] = [0, 1, 1].map(|gpu| own.node.alloc(gpu, 5000));
    let (mut unmatched, elsewhere) = (null_mut(), own.node.stream(1));
    // SAFETY: as above.
    ok(unsafe { mp_receive(other, never.cast(), 5000, MP_ANY_RANK, 9, u64::MAX, elsewhere, &mut unmatched) });
    ok(mp_stream_wait_request(null_mut(), unmatched));
    let (sent, received) = (own.send(from, 5000, 1, b""), own.receive(to, 5000, 1));
    let begun = std::time::Instant::now();
    let context = own.node.context.addr();
    ok(ends(move || mp_context_destroy(std::ptr::without_provenance_mut(context))));
    assert!(begun.elapsed() < std::time::Duration::from_secs(8), "what is withdrawn first keeps nobody waiting");
    let _ = (sent, received);
}

#[test]
fn a_stream_that_waits_for_a_message_which_comes_after_it_goes_on_when_the_messenger_ends() {
    let own = Own::new();
    let [from, to] = [0, 1].map(|gpu| own.node.alloc(gpu, 5000));
    let mut received = own.receive(to, 5000, 1);
    ok(mp_stream_wait_request(null_mut(), received));
    // The default stream waits for a message that the same stream must send.
    let mut sent = own.send(from, 5000, 1, b"");
    let messenger = own.messenger.addr();
    ok(ends(move || mp_messenger_destroy(std::ptr::without_provenance_mut(messenger))));
    // SAFETY: the requests belong to the test.
    let [received, _] = unsafe { [mp_wait(&mut received, null_mut()), mp_wait(&mut sent, null_mut())] };
    let said = refused(received, received);
    assert!(received != MP_SUCCESS && said.contains("messenger was destroyed"), "{said}");
    let (context, memory) = (own.node.context.addr(), to.addr());
    // SAFETY: memory that is no longer used.
    ok(ends(move || unsafe { mp_free(std::ptr::without_provenance_mut(context), std::ptr::without_provenance_mut(memory)) }));
    own.node.still_works();
}

#[test]
fn a_messenger_does_not_wait_for_ever_for_a_stream_that_is_held_up() {
    let own = Own::new();
    let [from, to] = [0, 1].map(|gpu| own.node.alloc(gpu, 5000));
    let counter = own.node.alloc_shared(MP_DEVICE_HOST, 8);
    let signal = mp_signal_t { counter: counter.cast(), value: 1 };
    // SAFETY: the array and its memory are valid for the call and the wait.
    ok(unsafe { mp_stream_wait_signals(own.node.context, null_mut(), &signal, 1) });
    let (mut received, mut sent) = (own.receive(to, 5000, 1), own.send(from, 5000, 1, b""));
    let messenger = own.messenger.addr();
    let (status, said) = ends(move || (mp_messenger_destroy(std::ptr::without_provenance_mut(messenger)), last_error()));
    // The signal lets the stream go on before the test can fail, because the context's destructor waits for the stream.
    // SAFETY: an existing counter.
    ok(unsafe { mp_signal_raise(own.node.context, signal.counter, 1) });
    assert!(status == MP_ERROR_TIMEOUT && said.contains("the bytes of 2 matched sends and receives"), "{status:?}, {said}");
    // SAFETY: the requests belong to the test. They report the outcome.
    [&mut received, &mut sent].into_iter().for_each(|request| ok(unsafe { mp_wait(request, null_mut()) }));
    ok(mp_context_destroy(own.node.context));
}

#[test]
fn a_messenger_ends_while_other_streams_of_its_context_wait() {
    ranks(2, options(), |rank, barrier| {
        let address = rank.memory(4096, 1);
        // This message makes the ranks map each other's memory.
        if rank.rank == 0 {
            rank.send(address, 4096, 1, 0).expect("posted").wait().expect("received");
        } else {
            rank.receive(address, 4096, 0, 0).wait().expect("it was sent");
        }
        barrier.wait();
        let (sender, receiver) = channel::<()>();
        let receiver = std::sync::Mutex::new(receiver);
        let (told, answer) = channel();
        let stream = rank.context.create_stream(DeviceId::gpu(0)).expect("a stream");
        let wait = move || {
            let is_told = receiver.lock().expect("no panic").recv_timeout(std::time::Duration::from_secs(20)).is_ok();
            told.send(is_told).expect("it is asked");
        };
        rank.context.launch_host(stream, Box::new(wait)).expect("enqueued");
        rank.messenger.destroy().expect("nothing is left");
        sender.send(()).expect("the stream waits");
        assert!(answer.recv().expect("the stream goes on"), "the messenger has waited for a stream that is none of its");
        barrier.wait();
    });
}

#[test]
fn what_has_matched_arrives_although_its_messenger_ends() {
    const BYTES: usize = 16 << 20;
    for _ in 0..4 {
        ranks(2, options(), |rank, barrier| {
            let mut bytes = vec![if rank.rank == 0 { 7u8 } else { 0 }; BYTES];
            let address = bytes.as_mut_ptr().expose_provenance() as u64;
            if rank.rank == 0 {
                barrier.wait();
                rank.send(address, BYTES as u64, 1, 0).expect("posted").wait().expect("copied");
                barrier.wait();
            } else {
                let got = rank.receive(address, BYTES as u64, 0, 0);
                barrier.wait();
                while got.envelope().is_none() {
                    std::hint::spin_loop();
                }
                rank.messenger.destroy().expect("nothing is left");
                let result = got.wait();
                barrier.wait();
                result.expect("it has matched");
                assert!(bytes.iter().all(|byte| *byte == 7), "all of it is here");
            }
        });
    }
}
