//! Messages between the ranks of a node.

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

/// Makes every messenger of a closed context an invalid handle.
pub(super) fn forget_all(context: &Arc<Context>) {
    MESSENGERS.purge(|messenger| Arc::ptr_eq(messenger.node().context(), context));
}

fn find(messenger: mp_messenger_t) -> Result<Arc<Messenger>, Failure> {
    MESSENGERS.with(messenger.addr(), c"messenger", Arc::clone)
}

/// Where an operation's request goes, if anywhere.
fn request_out(request: *mut mp_request_t) -> Result<Option<Out<mp_request_t>>, Failure> {
    if request.is_null() { Ok(None) } else { Out::new(request, c"request").map(Some) }
}

/// A request for an operation that was posted. Without one the operation goes on by itself; so that the call tells the truth when there is no
/// handle for one, the operation is taken back where it has not matched.
fn hand_out(out: Option<Out<mp_request_t>>, messenger: &Messenger, operation: Arc<Operation>) -> Result<(), Failure> {
    if let Some(out) = out {
        let created = request::create(messenger.node().context().clone(), Arc::clone(&operation) as _);
        out.write(created.inspect_err(|_| drop(operation.cancel()))?);
    }
    Ok(())
}

/// The messages that a receive or a probe takes.
fn pattern(rank: i32, tag: u64, mask: u64) -> Pattern {
    // The messenger refuses what is no rank.
    let source = (rank != MP_ANY_RANK).then(|| rank.cast_unsigned());
    Pattern { source, tag, mask }
}

/// Where a call tells of a message.
pub(super) struct EnvelopeOut {
    out: VersionedOut<mp_message_info_t>,
    given: mp_message_info_t,
}

impl EnvelopeOut {
    /// `None` for NULL: the caller does not ask.
    pub fn new(info: *mut mp_message_info_t) -> Result<Option<EnvelopeOut>, Failure> {
        if info.is_null() {
            return Ok(None);
        }
        let given = versioned(info, c"info")?;
        if given.metadata.is_null() && given.metadata_capacity > 0 {
            let capacity = given.metadata_capacity;
            return Err(Failure::invalid(c"metadata", format!("metadata is NULL, and metadata_capacity is {capacity}: must be 0 then")));
        }
        Ok(Some(EnvelopeOut { out: VersionedOut::new(info, c"info")?, given }))
    }

    /// Nothing where there is no message.
    pub fn write(self, envelope: Option<&Envelope>) {
        let Some(envelope) = envelope else { return };
        let bytes = envelope.metadata.len().min(self.given.metadata_capacity);
        if bytes > 0 {
            // SAFETY: not null where the capacity is not 0, and the header demands so many writable bytes.
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

/// Makes a messenger: by it the ranks of a node send each other messages, which are matched by MPI's rules. All ranks
/// call it together, with the same options; NULL means all defaults. `*messenger` belongs to the caller, who destroys it with
/// `mp_messenger_destroy`. It keeps the node. Messages of different messengers do not meet.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT`; `MP_ERROR_RANK_FAILED`; `MP_ERROR_ALLGATHER`;
/// `MP_ERROR_NOT_SUPPORTED` where ranks cannot share memory.
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

/// Destroys a messenger. Not collective: other ranks go on, and what they ask of this one from then on ends with
/// `MP_ERROR_PEER_GONE`. Receives and sends of this rank that have not matched end with `MP_ERROR_CANCELLED`. Blocks until
/// movements under way have ended, and until messages that the library keeps (`mp_send`) were received, or their receivers have
/// left; at most 10 seconds for all. Then streams of this rank that wait for a movement go on without it, its request ends with
/// an error, and 2 seconds later the call returns. Destroying the context does the same first, of all messengers at once. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_TIMEOUT` where kept messages were not received, or movements have not ended because
/// a stream has not come to them: their memory must stay until their requests have ended. The messenger is destroyed all the same.
#[unsafe(no_mangle)]
pub extern "C" fn mp_messenger_destroy(messenger: mp_messenger_t) -> mp_status_t {
    guard(|| {
        if MESSENGERS.is_inherited(messenger.addr()) {
            return Ok(());
        }
        Ok(MESSENGERS.remove(messenger.addr(), c"messenger")?.destroy()?)
    })
}

/// Sends `bytes` bytes at `data`, as earlier work in `stream` has written them, to `rank`, which may be this one. Does not
/// wait. `metadata` is read during the call and arrives with the match; at most `MP_MESSAGE_METADATA_BYTES`. The memory must
/// stay as it is until the request has ended; the request belongs to the caller, and may be NULL.
///
/// Messages from one rank to another do not overtake each other: a receive takes the first that it matches. Memory of a
/// GPU and host memory of `mp_alloc_shared` is read by whoever moves the bytes; such a send ends when the bytes were
/// received. Other host memory, and host messages of up to 1 KiB, are copied to memory of the library in stream order, and
/// the send ends then.
///
/// Errors: `MP_ERROR_QUEUE_FULL` where this rank has too many operations, or 512 MiB in messages of ordinary memory, or the other too
/// many messages that wait, and nothing was sent; `MP_ERROR_PEER_GONE`; `MP_ERROR_TIMEOUT` where a rank that was stopped within a call has kept the other's
/// mailbox locked for 30 seconds, and nothing was sent; `MP_ERROR_NOT_SUPPORTED` for memory of a GPU that cannot be shared, and in a stream
/// that is being captured; `MP_ERROR_INVALID_POINTER`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_INVALID_HANDLE`. The request
/// ends with `MP_ERROR_PEER_GONE` where the receiver ends before the bytes have moved. With `MP_ERROR_OUT_OF_MEMORY`, no handle is
/// left for the request: the message was sent if it has met its receive at once, and else not.
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

/// Receives a message of `rank`, or of any with `MP_ANY_RANK`, whose tag equals `tag` in the bits of `mask` (all bits set for
/// exactly this tag, 0 for any), into `bytes` bytes at `data`. They are written after earlier work in `stream`; later work in
/// the stream does not wait for them (`mp_stream_wait_request`). Does not wait. The memory must stay allocated until the
/// request has ended; the request belongs to the caller. A shorter message leaves the rest as it is. Ordinary host memory
/// gets its bytes from memory of the library, by whoever waits for the request or by the thread `mpgpu-callback`.
///
/// The request ends with `MP_ERROR_MESSAGE_TRUNCATED` where the message is longer than the buffer; it stays the first that a
/// receive of this kind takes. It ends with `MP_ERROR_PEER_GONE` where the sender has ended, and with `MP_ANY_RANK` where any
/// rank has died while it waited: the message may have been that rank's. Later receives from any rank are served by the
/// others.
///
/// Errors: as `mp_send`, and nothing is received.
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

/// Looks for the message that a receive of this kind would take now, and leaves it where it is: `*found` becomes 1 or 0. Where
/// there is one, fills `*info`, which may be NULL. Does not wait. Any thread.
///
/// Errors: `MP_ERROR_PEER_GONE` where there is none and `rank` has ended; `MP_ERROR_INVALID_HANDLE`;
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

/// Tells which message a request is about: `*matched` becomes 1 where a receive or fetch has met its message, and for sends;
/// else 0. Then fills `*info`, which may be NULL. After a truncation the message is the one that
/// was too long. Does not wait, and leaves the request as it is. Any thread.
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

/// Describes `bytes` bytes at `data`, as earlier work in `stream` has written them, for one rank of the node that is given the
/// descriptor by any means: `mp_message_fetch` there copies them into its own memory, whenever it likes, once. The memory must
/// stay as it is until the request has ended. Does not wait. A descriptor whose fetching rank has ended is to be cancelled.
///
/// Errors: as `mp_send`.
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

/// Fetches what a descriptor describes into `bytes` bytes at `data`, after earlier work in `stream`; otherwise as
/// `mp_receive`. `messenger` is that which was made together with the describing rank's.
///
/// Errors: as `mp_receive`; `MP_ERROR_MESSAGE_TRUNCATED` where the buffer is too small, and it can be fetched into a larger
/// one; `MP_ERROR_INVALID_ARGUMENT` for a descriptor of another messenger, or that was fetched or cancelled.
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
