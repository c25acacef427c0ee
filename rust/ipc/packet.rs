//! What importer and exporter say to each other: packets of fixed size, one for a request, one for an answer, at most one descriptor.

use super::AllocationKey;
use super::fork::Socket;
use super::handle::Secret;
use crate::backend::Shared;
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

/// What a packet is about.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Importer: asks how to map an allocation.
    Import,
    /// Exporter: says how.
    Granted,
    /// Exporter: the allocation was freed, was never exported, or the secret is wrong.
    Gone,
    /// Exporter: it cannot be mapped; the text says why.
    Refused,
    /// Importer: it takes no further part in what the allocation is for. Nobody answers.
    Leave,
}

const SUBJECTS: [Subject; 5] = [Subject::Import, Subject::Granted, Subject::Gone, Subject::Refused, Subject::Leave];

/// One packet.
#[derive(Debug)]
pub(super) struct Packet {
    pub subject: Subject,
    /// The number of the request, or of the one that is answered; 0 where there was none.
    pub number: u32,
    pub key: AllocationKey,
    /// With [`Subject::Import`]: the allocation's slot on the importer's board.
    pub slot: u32,
    /// With [`Subject::Import`] and [`Subject::Leave`] the handle's secret; with [`Subject::Granted`] the proof of who answers.
    pub secret: Secret,
    /// With [`Subject::Import`].
    pub board: Option<OwnedFd>,
    /// With [`Subject::Granted`].
    pub shared: Option<Shared>,
    /// With [`Subject::Refused`].
    pub text: String,
    /// With [`Subject::Leave`].
    pub departure: Departure,
}

/// How far an importer has come that leaves.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    /// Steps that it has taken part in.
    pub steps: u64,
    /// It leaves because of a failure.
    pub has_failed: bool,
    /// The other node plan that it has enqueued in another order; 0 for none.
    pub order: u64,
    /// Its process has ended, or its context is gone: it has said nothing.
    pub has_ended: bool,
}

impl Departure {
    /// Of an importer that is gone.
    pub const ENDED: Departure = Departure { steps: 0, has_failed: true, order: 0, has_ended: true };
}

/// The last character is the version.
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
            put(24, &u32::from(self.departure.has_failed).to_le_bytes());
            put(32, &self.departure.steps.to_le_bytes());
            put(40, &self.departure.order.to_le_bytes());
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
                has_failed: array::<4>(bytes, 24) != [0; 4],
                order: u64::from_le_bytes(array(bytes, 40)),
                has_ended: false,
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

    /// Sends it; waits for room until then, or not at all. [`Errno::AGAIN`] where there was none.
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

    /// The next packet, waited for until then, or not at all; `None` at the end of the connection. [`Errno::AGAIN`] where none came,
    /// [`Errno::PROTO`] for what is none of ours.
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
        if received.bytes != BYTES || received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Errno::PROTO);
        }
        Packet::decode(&bytes, descriptor).map(Some).ok_or(Errno::PROTO)
    }
}

/// Makes `attempt`, which does not wait, and again whenever the socket is ready, until it succeeds or time is up. Interrupting signals do not
/// extend the time.
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
