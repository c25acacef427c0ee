//! Encodes the packets that importer and exporter exchange over a socket. All packets have the same size. A packet is a request, an answer
//! or a notification, and carries at most one file descriptor.

use super::AllocationKey;
use super::fork::Socket;
use super::handle::Secret;
use crate::backend::{Cause, Leave, Shared};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::time::Instant;

/// Type of a packet that importer and exporter of shared memory exchange.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Request of the importer to map an allocation of the exporter.
    Import,
    /// Answer of the exporter that grants a request, with the information needed to map the allocation.
    Granted,
    /// Answer of the exporter that the requested allocation was freed or was never exported, or that the secret is wrong.
    Gone,
    /// Answer of the exporter that the allocation cannot be mapped. The text gives the reason.
    Refused,
    /// Notification by the importer that it stops using the allocation. The exporter does not answer this packet.
    Leave,
}

const SUBJECTS: [Subject; 5] = [Subject::Import, Subject::Granted, Subject::Gone, Subject::Refused, Subject::Leave];

/// Packet that importer and exporter exchange over a socket.
#[derive(Debug)]
pub(super) struct Packet {
    pub subject: Subject,
    /// Number that identifies the importer's request. The request and the exporter's answer contain it. 0 in other packets.
    pub number: u32,
    pub key: AllocationKey,
    /// Slot of the allocation on the importer's board (shared table of freed and unmapped allocations). Used in [`Subject::Import`]
    /// packets.
    pub slot: u32,
    /// Secret of the handle in [`Subject::Import`] and [`Subject::Leave`] packets. In [`Subject::Granted`] packets, the proof of the
    /// exporter's identity instead.
    pub secret: Secret,
    /// Memory file of the importer's board (shared table of freed and unmapped allocations). Used in [`Subject::Import`] packets.
    pub board: Option<OwnedFd>,
    /// Information needed to map the allocation. Used in [`Subject::Granted`] packets.
    pub shared: Option<Shared>,
    /// Reason why the exporter refuses a request. Used in [`Subject::Refused`] packets.
    pub text: String,
    /// State of the importer when it stops using the allocation. Used in [`Subject::Leave`] packets.
    pub departure: Departure,
}

/// State of an importer at the time when it stops executing a node plan (a plan that several ranks of a node execute together).
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    /// Number of steps (executions) of the node plan (plan that several ranks execute together) in which the importer has participated.
    pub steps: u64,
    /// True if the importer stops executing the node plan (plan that several ranks execute together) because of a failure.
    pub has_failed: bool,
    /// Number that identifies another node plan (plan that several ranks execute together) whose executions the importer has enqueued in a
    /// different order than this process. 0 if there is none.
    pub order: u64,
    /// True if the importer's process or context has ended without a notification.
    pub has_ended: bool,
    /// First failure of a rank, if the importer stops because another rank has failed. Otherwise `None`.
    pub cause: Option<Cause>,
    /// True if only kernels of the importer have stopped, while its streams still execute all enqueued steps.
    pub streams_go_on: bool,
}

impl Departure {
    /// State of an importer whose process or context has ended without a notification.
    pub const ENDED: Departure = Departure { steps: 0, has_failed: true, order: 0, has_ended: true, cause: None, streams_go_on: false };
}

/// Magic number at the start of each packet. Its last character is the version of the protocol.
const MAGIC: [u8; 8] = *b"mpgpu-s3";
const TEXT: usize = 320;
const BYTES: usize = 128 + TEXT;

impl Packet {
    pub fn new(subject: Subject, number: u32, key: AllocationKey) -> Packet {
        Packet {
            subject,
            number,
            key,
            slot: 0,
            secret: Secret([0; 16]),
            board: None,
            shared: None,
            text: String::new(),
            departure: Departure::default(),
        }
    }

    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &[self.subject as u8, self.key.backend]);
        put(12, &self.number.to_le_bytes());
        put(16, &self.key.allocation.to_le_bytes());
        if let Some(shared) = &self.shared {
            put(24, &shared.form.to_le_bytes());
            put(32, &shared.offset.to_le_bytes());
            put(40, &shared.payload);
        } else if self.subject == Subject::Leave {
            put(24, &[self.departure.has_failed, self.departure.streams_go_on].map(u8::from));
            put(32, &self.departure.steps.to_le_bytes());
            put(40, &self.departure.order.to_le_bytes());
            if let Some(Cause { rank, process, why }) = self.departure.cause {
                let (code, number) = match why {
                    Leave::Ended => (1_u32, 0),
                    Leave::Destroyed(steps) => (2, steps),
                    Leave::Failed(steps) => (3, steps),
                    Leave::Order(plan) => (4, plan),
                };
                put(48, &code.to_le_bytes());
                put(52, &rank.to_le_bytes());
                put(56, &process.to_le_bytes());
                put(64, &number.to_le_bytes());
            }
        }
        put(28, &self.slot.to_le_bytes());
        put(104, &self.secret.0);
        let mut end = self.text.len().min(TEXT);
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &self.text.as_bytes()[..end];
        put(126, &(text.len() as u16).to_le_bytes());
        put(128, text);
        bytes
    }

    fn decode(bytes: &[u8; BYTES], descriptor: Option<OwnedFd>) -> Option<Packet> {
        fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
            let mut field = [0; N];
            field.copy_from_slice(&bytes[at..at + N]);
            field
        }
        let subject = *SUBJECTS.get(usize::from(bytes[8]))?;
        let text = bytes[128..].get(..usize::from(u16::from_le_bytes(array(bytes, 126))))?;
        let (board, descriptor) = if subject == Subject::Import { (descriptor, None) } else { (None, descriptor) };
        let shared = (subject == Subject::Granted).then(|| Shared {
            form: u32::from_le_bytes(array(bytes, 24)),
            descriptor,
            offset: u64::from_le_bytes(array(bytes, 32)),
            payload: array(bytes, 40),
        });
        let departure = match subject {
            Subject::Leave => Departure {
                steps: u64::from_le_bytes(array(bytes, 32)),
                has_failed: bytes[24] != 0,
                streams_go_on: bytes[25] != 0,
                order: u64::from_le_bytes(array(bytes, 40)),
                has_ended: false,
                cause: cause(u32::from_le_bytes(array(bytes, 48)), u64::from_le_bytes(array(bytes, 64))).map(|why| Cause {
                    rank: u32::from_le_bytes(array(bytes, 52)),
                    process: i32::from_le_bytes(array(bytes, 56)),
                    why,
                }),
            },
            _ => Departure::default(),
        };
        let is_local = shared.as_ref().is_some_and(Shared::is_local);
        (bytes[..8] == MAGIC && !is_local).then(|| Packet {
            subject,
            number: u32::from_le_bytes(array(bytes, 12)),
            key: AllocationKey { backend: bytes[9], allocation: u64::from_le_bytes(array(bytes, 16)) },
            slot: u32::from_le_bytes(array(bytes, 28)),
            secret: Secret(array(bytes, 104)),
            board,
            shared,
            text: String::from_utf8_lossy(text).into_owned(),
            departure,
        })
    }

    /// Sends the packet. If the socket is full, waits until the time `until`, or does not wait if `until` is `None`. Returns
    /// [`Errno::AGAIN`] if the packet could not be sent.
    pub fn send(&self, socket: &Socket, until: Option<Instant>) -> Result<()> {
        let passed = self.board.as_ref().or(self.shared.as_ref().and_then(|shared| shared.descriptor.as_ref()));
        let descriptors: Vec<BorrowedFd<'_>> = passed.iter().map(|descriptor| descriptor.as_fd()).collect();
        let bytes = self.encode();
        patiently(socket, PollFlags::OUT, until, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
                return Err(Errno::NOBUFS);
            }
            sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
        })
    }

    /// Receives the next packet. Waits for it until the time `until`, or does not wait if `until` is `None`. Returns `None` at the end of
    /// the connection.
    ///
    /// Errors: [`Errno::AGAIN`] if no packet arrived, [`Errno::PROTO`] for data that is not a packet of this version, [`Errno::MFILE`] if
    /// this process cannot open another descriptor, and [`Errno::ACCESS`] if the system withholds the descriptor.
    pub fn receive(socket: &Socket, until: Option<Instant>) -> Result<Option<Packet>> {
        let mut bytes = [0; BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            patiently(socket, PollFlags::IN, until, || recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags))?;
        let mut descriptor = None;
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut descriptors) = part {
                descriptor = descriptors.next().or(descriptor);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.bytes != BYTES || received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Errno::PROTO);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(if descriptor.is_some() { Errno::PROTO } else { withheld(socket) });
        }
        Packet::decode(&bytes, descriptor).map(Some).ok_or(Errno::PROTO)
    }
}

/// Returns the error for a packet whose file descriptor the operating system has withheld from this process.
fn withheld(socket: &Socket) -> Errno {
    rustix::io::fcntl_dupfd_cloexec(socket, 0).err().unwrap_or(Errno::ACCESS)
}

/// Decodes the reason why the first rank in a chain of failures has stopped. `code` is the kind of reason, and `number` is a number of
/// steps or of a plan. Returns `None` for an unknown code.
fn cause(code: u32, number: u64) -> Option<Leave> {
    match code {
        1 => Some(Leave::Ended),
        2 => Some(Leave::Destroyed(number)),
        3 => Some(Leave::Failed(number)),
        4 => Some(Leave::Order(number)),
        _ => None,
    }
}

/// Repeats `attempt`, which must not block, each time the socket becomes ready. Stops when `attempt` succeeds or the time `until` has
/// passed. Signals that interrupt the wait do not extend the time.
pub fn patiently<T>(socket: &Socket, ready: PollFlags, until: Option<Instant>, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match (attempt(), until) {
            (Err(Errno::INTR), _) => {}
            (Err(Errno::AGAIN), Some(until)) => {
                let left = until.saturating_duration_since(Instant::now());
                let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
                match poll(&mut [PollFd::new(socket, ready)], Some(&timeout)) {
                    Ok(0) => return Err(Errno::AGAIN),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error),
                }
            }
            (done, _) => return done,
        }
    }
}
