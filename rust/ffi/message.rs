//! Functions of the C ABI for messages between the ranks of a node.

use super::argument::{Out, VersionedOut, array, versioned};
use super::guard::{Failure, guard};
use super::node::{handed, node_of};
use super::plan::closed;
use super::request;
use super::stream::stream_of;
use super::table::Table;
use super::types::*;
use mpgpu_contexts::Context;
use mpgpu_ranks::Collective;
use mpgpu_ranks::message::{Descriptor, Envelope, Messenger, MessengerOptions, Operation, Outgoing, Pattern};
use std::ffi::c_void;
use std::sync::Arc;

static MESSENGERS: Table<Arc<Messenger>> = Table::new(5);

/// Makes the handles of all messengers of a closed context invalid.
pub(super) fn forget_all(context: &Arc<Context>) {
    MESSENGERS.purge(|messenger| Arc::ptr_eq(messenger.node().context(), context));
}

fn find(messenger: mp_messenger_t) -> Result<Arc<Messenger>, Failure> {
    MESSENGERS.with(messenger.addr(), c"messenger", Arc::clone)
}

/// Returns the output parameter for a request. Returns `None` if the pointer is NULL, because the caller wants no request.
fn request_out(request: *mut mp_request_t) -> Result<Option<Out<mp_request_t>>, Failure> {
    if request.is_null() { Ok(None) } else { Out::new(request, c"request").map(Some) }
}

/// Writes a request for an operation that was posted. If the caller wants no request, the operation simply continues.
/// If no handle can be created, the call reports an error, and the operation is cancelled unless it has already
/// matched.
fn hand_out(out: Option<Out<mp_request_t>>, messenger: &Messenger, operation: Arc<Operation>) -> Result<(), Failure> {
    if let Some(out) = out {
        let created = request::create(messenger.node().context().clone(), Arc::clone(&operation) as _);
        out.write(created.inspect_err(|_| drop(operation.cancel()))?);
    }
    Ok(())
}

/// Returns the pattern of messages that a receive or a probe accepts.
fn pattern(rank: i32, tag: u64, mask: u64) -> Pattern {
    // The messenger rejects a number that is not a rank.
    let source = (rank != MP_ANY_RANK).then(|| rank.cast_unsigned());
    Pattern { source, tag, mask }
}

/// Output for the properties of a message, in a struct of the caller.
pub(super) struct EnvelopeOut {
    out: VersionedOut<mp_message_info_t>,
    given: mp_message_info_t,
}

impl EnvelopeOut {
    /// Returns the output for this struct, or `None` if the pointer is NULL because the caller does not want the
    /// properties.
    pub fn new(info: *mut mp_message_info_t) -> Result<Option<EnvelopeOut>, Failure> {
        if info.is_null() {
            return Ok(None);
        }
        let given = versioned(info, c"info")?;
        if given.metadata.is_null() && given.metadata_capacity > 0 {
            let capacity = given.metadata_capacity;
            return Err(Failure::invalid(
                c"metadata",
                format!("metadata is NULL, but metadata_capacity is {capacity}: must be 0 if metadata is NULL"),
            ));
        }
        Ok(Some(EnvelopeOut { out: VersionedOut::new(info, c"info")?, given }))
    }

    /// Writes the properties of a message. Does nothing if `envelope` is `None`.
    pub fn write(self, envelope: Option<&Envelope>) {
        let Some(envelope) = envelope else { return };
        let bytes = envelope.metadata.len().min(self.given.metadata_capacity);
        if bytes > 0 {
            // SAFETY: not null if the capacity is not 0, and the header requires that many writable bytes.
            unsafe { std::ptr::copy_nonoverlapping(envelope.metadata.as_ptr(), self.given.metadata.cast(), bytes) };
        }
        self.out.write(mp_message_info_t {
            tag: envelope.tag,
            bytes: envelope.bytes,
            rank: envelope.source,
            metadata_bytes: envelope.metadata.len() as u32,
            ..self.given
        });
    }
}

/// Creates a messenger, through which the ranks of a node exchange messages. Messages match as in MPI. Messages of
/// different messengers never match.
///
/// All ranks call it together with equal options. Blocks until all ranks have called it. NULL `options` selects all
/// defaults. The caller owns `*messenger` and destroys it with `mp_messenger_destroy`. The messenger keeps its node
/// alive.
///
/// Errors: `MP_ERROR_NOT_SUPPORTED` if the ranks cannot share memory; `MP_ERROR_INVALID_HANDLE`,
/// `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_RANK_FAILED`, `MP_ERROR_ALLGATHER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_messenger_create(
    node: mp_node_t,
    options: *const mp_messenger_options_t,
    messenger: *mut mp_messenger_t,
) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let (out, chosen) = handed(&node, Collective::MESSENGER, || {
            let out = Out::new(messenger, c"messenger")?;
            let mut chosen = MessengerOptions::default();
            if !options.is_null() {
                let options = versioned(options, c"options")?;
                let or_default = |value: u32, default: u32| if value == 0 { default } else { value };
                chosen.operations = or_default(options.operations, chosen.operations);
                chosen.messages = or_default(options.messages, chosen.messages);
            }
            Ok((out, chosen))
        })?;
        let made = node.messenger(chosen)?;
        let handle = MESSENGERS.insert_unless(made, |made| closed(made.node().context()))?;
        out.write(std::ptr::without_provenance_mut(handle));
        Ok(())
    })
}

/// Destroys a messenger. Other ranks need not call this function at the same time. Later operations of other ranks with
/// this rank end with `MP_ERROR_PEER_GONE`. Sends and receives of this rank that have not matched end with
/// `MP_ERROR_CANCELLED`. May be called from any thread.
///
/// Blocks, for at most 10 seconds, until data transfers in progress have ended, and until messages that the library has
/// buffered (see `mp_send`) are received or their receivers have exited. If a data transfer is still in progress after
/// this time, its request ends with an error, and streams of this rank that wait for the transfer continue without the
/// data. The call then returns 2 seconds later.
///
/// Destroying the context destroys all of its messengers in this way, all at the same time.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_TIMEOUT` if buffered messages were not received, or if data transfers
/// have not ended because a stream has not reached them. The memory of these transfers must stay allocated until their
/// requests have ended. The messenger is destroyed even then.
#[unsafe(no_mangle)]
pub extern "C" fn mp_messenger_destroy(messenger: mp_messenger_t) -> mp_status_t {
    guard(|| {
        if MESSENGERS.is_inherited(messenger.addr()) {
            return Ok(());
        }
        Ok(MESSENGERS.remove(messenger.addr(), c"messenger")?.destroy()?)
    })
}

/// Sends `bytes` bytes at `data` to rank `rank`, after earlier work in `stream` has written them. `rank` may be the
/// calling rank. Does not block.
///
/// The caller owns `*request`. `request` may be NULL. The memory at `data` must stay allocated and unchanged until the
/// request has ended. `metadata` has `metadata_bytes` bytes, at most `MP_MESSAGE_METADATA_BYTES`. The metadata are read
/// during the call, and arrive when the message matches a receive.
///
/// Messages from one rank to another do not overtake each other: a receive gets the first message that it matches.
///
/// GPU memory and host memory from `mp_alloc_shared` are read directly, and the send ends when the receiver has the
/// data. Other host memory, and messages of up to 1 KiB in host memory, are first copied to a buffer of the library in
/// stream order. Such a send ends when this copy has finished.
///
/// Errors:
/// - `MP_ERROR_QUEUE_FULL` if too many sends of this rank are not yet received, if those from pageable memory total
///   more than 512 MiB, or if too many messages wait at `rank`. Nothing was sent. Receive the messages that were sent
///   to this rank, and call again.
/// - `MP_ERROR_TIMEOUT` if the message queue of `rank` was locked for 30 seconds by a process that was stopped inside a
///   call. Nothing was sent.
/// - `MP_ERROR_NOT_SUPPORTED` for GPU memory that cannot be shared, and if `stream` is being captured.
/// - `MP_ERROR_OUT_OF_MEMORY` if no request could be created. The message was sent if it matched a receive immediately;
///   otherwise it was not sent.
/// - `MP_ERROR_PEER_GONE`, `MP_ERROR_INVALID_POINTER`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_INVALID_HANDLE`.
///
/// The request ends with `MP_ERROR_PEER_GONE` if the receiver exits before it has the data.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_send(
    messenger: mp_messenger_t,
    data: *const c_void,
    bytes: u64,
    rank: u32,
    tag: u64,
    metadata: *const c_void,
    metadata_bytes: usize,
    stream: mp_stream_t,
    request: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let out = request_out(request)?;
        let messenger = find(messenger)?;
        let metadata = array(metadata.cast::<u8>(), metadata_bytes, c"metadata", c"metadata_bytes")?;
        let message = Outgoing { address: data.addr() as u64, bytes, rank, tag, metadata };
        hand_out(out, &messenger, messenger.send(&message, stream_of(stream))?)
    })
}

/// Receives a message into the buffer of `bytes` bytes at `data`. Does not block.
///
/// The receive accepts a message from rank `rank`, or from any rank with `MP_ANY_RANK`. Only the tag bits that are set
/// in `mask` must equal those of `tag`: with all bits set only this tag is accepted, and with 0 any tag.
///
/// The data are written after earlier work in `stream`. Later work in the stream does not wait for the data; use
/// `mp_stream_wait_request` for that. The buffer must stay allocated until the request has ended. The caller owns
/// `*request`. If the message is shorter than the buffer, the rest of the buffer is unchanged. If the buffer is
/// pageable host memory, the thread that waits for the request or the thread `mpgpu-callback` copies the data from a
/// buffer of the library.
///
/// The request ends with an error in these cases:
/// - `MP_ERROR_MESSAGE_TRUNCATED` if the message is longer than the buffer. The message is not lost: the next matching
///   receive gets it.
/// - `MP_ERROR_PEER_GONE` if the sender has exited. With `MP_ANY_RANK` also if any rank exited during the wait, because
///   the message might have been from that rank. Later receives with `MP_ANY_RANK` match messages of the remaining
///   ranks.
///
/// Errors: the errors of `mp_send`. Nothing is received.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_receive(
    messenger: mp_messenger_t,
    data: *mut c_void,
    bytes: u64,
    rank: i32,
    tag: u64,
    mask: u64,
    stream: mp_stream_t,
    request: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let out = request_out(request)?;
        let messenger = find(messenger)?;
        let pattern = pattern(rank, tag, mask);
        hand_out(out, &messenger, messenger.receive(data.addr() as u64, bytes, &pattern, stream_of(stream))?)
    })
}

/// Checks whether a message has arrived that a receive with the same `rank`, `tag` and `mask` would get. Does not
/// receive the message. Does not block. May be called from any thread.
///
/// `*found` receives 1 if there is such a message, otherwise 0. If `*found` is 1 and `info` is not NULL, `*info`
/// receives the properties of the message.
///
/// Errors: `MP_ERROR_PEER_GONE` if there is no message and `rank` has exited; `MP_ERROR_INVALID_HANDLE`,
/// `MP_ERROR_INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_message_probe(
    messenger: mp_messenger_t,
    rank: i32,
    tag: u64,
    mask: u64,
    found: *mut i32,
    info: *mut mp_message_info_t,
) -> mp_status_t {
    guard(|| {
        let (found, told) = (Out::new(found, c"found")?, EnvelopeOut::new(info)?);
        let envelope = find(messenger)?.probe(&pattern(rank, tag, mask))?;
        found.write(i32::from(envelope.is_some()));
        told.into_iter().for_each(|told| told.write(envelope.as_ref()));
        Ok(())
    })
}

/// Returns the properties of the message that belongs to a request. Does not block. The request stays valid. May be
/// called from any thread.
///
/// `*matched` receives 1 for a send, and for a receive or fetch that has matched. Otherwise it receives 0. If
/// `*matched` is 1 and `info` is not NULL, `*info` receives the properties. If the receive ended with
/// `MP_ERROR_MESSAGE_TRUNCATED`, these are the properties of the message that was too long.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_message_get_info(request: mp_request_t, matched: *mut i32, info: *mut mp_message_info_t) -> mp_status_t {
    guard(|| {
        let (matched, told) = (Out::new(matched, c"matched")?, EnvelopeOut::new(info)?);
        let envelope = request::with_operation(request, Operation::envelope)?;
        matched.write(i32::from(envelope.is_some()));
        told.into_iter().for_each(|told| told.write(envelope.as_ref()));
        Ok(())
    })
}

/// Creates a descriptor of the buffer of `bytes` bytes at `data`, with which one other rank of the node can copy
/// (fetch) the buffer to its own memory. The data are read after earlier work in `stream` has finished. Does not block.
///
/// The program sends the descriptor to the other rank in any way. The other rank calls `mp_message_fetch` once, at any
/// time. The memory must stay allocated and unchanged until the request `*released` has ended. The caller owns
/// `*released`. If the other rank has exited without fetching, cancel the request.
///
/// Errors: the errors of `mp_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_message_describe(
    messenger: mp_messenger_t,
    data: *const c_void,
    bytes: u64,
    stream: mp_stream_t,
    descriptor: *mut mp_message_descriptor_t,
    released: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let (out, described) = (request_out(released)?, Out::new(descriptor, c"descriptor")?);
        let messenger = find(messenger)?;
        let (descriptor, operation) = messenger.describe(data.addr() as u64, bytes, stream_of(stream))?;
        hand_out(out, &messenger, operation)?;
        described.write(mp_message_descriptor_t { bytes: descriptor.encode() });
        Ok(())
    })
}

/// Copies the data that a descriptor from `mp_message_describe` describes into the buffer of `bytes` bytes at `data`,
/// after earlier work in `stream`. Does not block. Buffer, stream and request behave as in `mp_receive`.
///
/// `messenger` must come from the same collective call of `mp_messenger_create` as the messenger that created the
/// descriptor.
///
/// Errors:
/// - The errors of `mp_receive`.
/// - `MP_ERROR_MESSAGE_TRUNCATED` if the buffer is too small. A fetch with a larger buffer can still get the data.
/// - `MP_ERROR_INVALID_ARGUMENT` for a descriptor of another messenger, and for one that was already fetched or
///   cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_message_fetch(
    messenger: mp_messenger_t,
    descriptor: *const mp_message_descriptor_t,
    data: *mut c_void,
    bytes: u64,
    stream: mp_stream_t,
    request: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let out = request_out(request)?;
        let messenger = find(messenger)?;
        let [encoded] = array(descriptor, 1, c"descriptor", c"descriptor")? else { return Ok(()) };
        let descriptor = Descriptor::decode(&encoded.bytes)?;
        hand_out(out, &messenger, messenger.fetch(&descriptor, data.addr() as u64, bytes, stream_of(stream))?)
    })
}
