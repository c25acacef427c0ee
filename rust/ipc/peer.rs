//! Implements the importer: a connection to one exporter, through which this process maps memory of that process.

use super::AllocationKey;
use super::board::{Board, SLOTS};
use super::credentials::Credentials;
use super::error::IpcError;
use super::fork::Socket;
use super::handle::Secret;
use super::packet::{Departure, Packet, Subject};
use super::process::ProcessIdentity;
use crate::backend::Shared;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Maximum time for which an importer waits for an answer of the exporter. A running exporter answers in microseconds, or in milliseconds
/// if many processes share each core. An exporter that is stopped, for example in a debugger, does not answer in time.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Minimum time between two polls of the socket. A poll takes half a microsecond or more, and steps that use imported memory follow each
/// other every few microseconds. With this interval, this process notices the exit of an exporter up to 100 us late.
const LOOKS_APART: Duration = Duration::from_micros(100);

/// Connection to an exporter, which is a process whose memory this process maps.
#[derive(Debug)]
pub struct Peer {
    socket: Socket,
    origin: ProcessIdentity,
    board: Board,
    /// Memory file of the board (shared table of freed and unmapped allocations). It is sent with each request.
    board_file: OwnedFd,
    slots: Mutex<Slots>,
    /// Number of the last request. A thread holds this lock while it reads from the socket.
    reading: Mutex<u32>,
    ended: AtomicBool,
    /// Time of the last poll of the socket, in nanoseconds as returned by [`nanoseconds`]. 0 if the socket was never polled.
    looked: AtomicU64,
}

/// Slot for one imported allocation on the board (shared table of freed and unmapped allocations).
#[derive(Copy, Clone, Debug)]
pub struct BoardSlot {
    slot: u32,
    request: u32,
}

/// Unused slots of the board (shared table of freed and unmapped allocations). These are the slots that were returned, and all slots from
/// number `next` on.
#[derive(Debug, Default)]
struct Slots {
    given_back: Vec<u32>,
    next: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    /// Connects to the process with identity `origin`, as found in a handle. Returns an error if this has not succeeded at the time
    /// `until`.
    pub fn connect(origin: &ProcessIdentity, until: Instant) -> Result<Peer, IpcError> {
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes())
            .map_err(IpcError::system("creating the name of an abstract socket"))?;
        let (board, board_file) = Board::new().map_err(IpcError::system("creating a shared-memory file (memfd)"))?;
        let socket = Socket::make(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None))
            .map_err(IpcError::system("socket"))?;
        loop {
            // The remaining time is computed again, because an interrupted call does not report how long it has waited.
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            set_socket_timeout(&socket, Timeout::Send, Some(left)).map_err(IpcError::system("setting the time-out of a socket"))?;
            match rustix::net::connect(&socket, &name) {
                Ok(()) => break,
                Err(Errno::INTR) if Instant::now() < until => {}
                Err(Errno::CONNREFUSED) => {
                    let why = "the process has exited, or has destroyed the context that exported the memory; export again and send the \
                               new handle";
                    return Err(IpcError::PeerGone(format!("{origin} no longer exports memory: {why}")));
                }
                Err(Errno::AGAIN | Errno::INTR) => return Err(silent(origin)),
                Err(error) => return Err(IpcError::system("connect")(error)),
            }
        }
        // Any process can read the socket's name, and can use the name once it is free. Such a process must not be able to provide memory
        // to this process.
        let peer = Credentials::of_peer(&socket).map_err(IpcError::system("SO_PEERCRED"))?;
        if peer.user != origin.user {
            return Err(IpcError::NotSupported(format!(
                "a process of user {} answers in place of {origin}, and is not trusted",
                peer.user
            )));
        }
        Ok(Peer {
            socket,
            origin: *origin,
            board,
            board_file,
            slots: Mutex::default(),
            reading: Mutex::new(0),
            ended: AtomicBool::new(false),
            looked: AtomicU64::new(0),
        })
    }

    /// Returns the identity of the process that owns the memory.
    pub fn origin(&self) -> &ProcessIdentity {
        &self.origin
    }

    /// Requests permission from the exporter to map an allocation. Returns the information needed to map it, and the allocation's slot on
    /// the board (shared table of freed and unmapped allocations).
    pub fn import(&self, key: AllocationKey, secret: Secret, until: Instant) -> Result<(Shared, BoardSlot), IpcError> {
        let mut last = lock(&self.reading);
        *last = last.wrapping_add(1).max(1);
        let slot = BoardSlot { slot: self.take_slot()?, request: *last };
        // If the exporter grants the request later, it sees on the board that the memory is not mapped.
        self.ask(key, secret, slot, until).map(|shared| (shared, slot)).inspect_err(|_| self.close(slot))
    }

    fn ask(&self, key: AllocationKey, secret: Secret, slot: BoardSlot, until: Instant) -> Result<Shared, IpcError> {
        Board::reserve(&self.board_file, slot.slot).map_err(IpcError::system("allocating a page of a shared-memory file (memfd)"))?;
        let board = rustix::io::fcntl_dupfd_cloexec(&self.board_file, 0).map_err(IpcError::system("duplicating a descriptor"))?;
        let request = Packet { slot: slot.slot, secret, board: Some(board), ..Packet::new(Subject::Import, slot.request, key) };
        match request.send(&self.socket, Some(until)) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Err(silent(&self.origin)),
            // The exporter may have sent a reason before it closed the connection, so this thread still reads the answer.
            Err(_) => self.ended.store(true, Ordering::Release),
        }
        loop {
            match Packet::receive(&self.socket, Some(until)) {
                Ok(Some(Packet { subject: Subject::Granted, number: n, shared: Some(shared), secret: proof, .. })) if n == slot.request => {
                    if proof != self.origin.proof() {
                        return Err(IpcError::PeerGone(format!(
                            "{} has ended, and another process answers in its place, which is not trusted",
                            self.origin
                        )));
                    }
                    return Ok(shared);
                }
                Ok(Some(Packet { subject: Subject::Gone, number: n, .. })) if n == slot.request => return Err(self.freed()),
                // The number 0 means that the exporter refuses every request of this process.
                Ok(Some(Packet { subject: Subject::Refused, number: n, text, .. })) if n == slot.request || n == 0 => {
                    return Err(IpcError::NotSupported(text));
                }
                // This is a late answer to an earlier request. It is dropped together with its descriptor.
                Ok(Some(_)) => {}
                Ok(None) | Err(Errno::CONNRESET | Errno::PIPE) => {
                    self.ended.store(true, Ordering::Release);
                    return Err(self.exited());
                }
                Err(Errno::AGAIN) => return Err(silent(&self.origin)),
                Err(Errno::PROTO) => {
                    return Err(IpcError::Version(format!(
                        "{} uses another version of mpgpu: link both programs with the same one",
                        self.origin
                    )));
                }
                Err(error) => return Err(IpcError::system("receiving a descriptor")(error)),
            }
        }
    }

    fn take_slot(&self) -> Result<u32, IpcError> {
        let mut slots = lock(&self.slots);
        if let Some(slot) = slots.given_back.pop() {
            return Ok(slot);
        }
        if slots.next == SLOTS {
            let why = "close some imports, or import fewer and larger allocations";
            return Err(IpcError::NotSupported(format!("{SLOTS} allocations of {} are mapped, which is the maximum: {why}", self.origin)));
        }
        slots.next += 1;
        Ok(slots.next - 1)
    }

    /// Records on the board (shared table) that this process no longer maps the memory. The exporter reads the board when it needs this
    /// information.
    pub fn close(&self, slot: BoardSlot) {
        self.board.close(slot.slot, slot.request);
        lock(&self.slots).given_back.push(slot.slot);
    }

    /// Notifies the exporter that this process stops using the allocation. Gives up if the socket stays full for [`PATIENCE`].
    pub fn leave(&self, key: AllocationKey, secret: Secret, departure: Departure) {
        let packet = Packet { secret, departure, ..Packet::new(Subject::Leave, 0, key) };
        if let Err(error) = packet.send(&self.socket, Some(Instant::now() + PATIENCE)) {
            log::debug!("could not notify {} that a plan has ended here: {error}", self.origin);
        }
    }

    /// Returns an error if the exporter has freed the imported allocation with this slot, or has exited. Does not block. The check may miss
    /// an exit that occurred within the last 100 us.
    pub fn check(&self, slot: BoardSlot) -> Result<(), IpcError> {
        if self.board.is_withdrawn(slot.slot, slot.request) {
            return Err(self.freed());
        }
        let (now, looked) = (nanoseconds(), self.looked.load(Ordering::Relaxed));
        if looked == 0 || now.saturating_sub(looked) >= LOOKS_APART.as_nanos() as u64 {
            self.looked.store(now, Ordering::Relaxed);
            // If another thread is reading from the socket, that thread records what arrives.
            match self.reading.try_lock() {
                Ok(_reading) => self.read_what_came(),
                Err(TryLockError::Poisoned(_reading)) => self.read_what_came(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        if self.ended.load(Ordering::Acquire) {
            return Err(self.exited());
        }
        Ok(())
    }

    /// Reads pending packets while this process expects no answer. Only late answers and the end of the connection can arrive then.
    fn read_what_came(&self) {
        while !self.ended.load(Ordering::Acquire) {
            match Packet::receive(&self.socket, None) {
                // A late answer is ignored, with or without its descriptor.
                Ok(Some(_)) | Err(Errno::MFILE | Errno::ACCESS) => {}
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => self.ended.store(true, Ordering::Release),
            }
        }
    }

    fn freed(&self) -> IpcError {
        IpcError::PeerGone(format!("{} has freed the memory, or destroyed its context; export again and send the new handle", self.origin))
    }

    fn exited(&self) -> IpcError {
        IpcError::PeerGone(format!("{}, which owns the memory, has ended or no longer exports memory", self.origin))
    }
}

/// Returns the time in nanoseconds since the first call in this process, plus 1.
fn nanoseconds() -> u64 {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGIN.elapsed().as_nanos() as u64 + 1
}

fn silent(origin: &ProcessIdentity) -> IpcError {
    IpcError::Timeout(format!(
        "{origin} has not answered for {} s: it may be stopped, in a debugger, or out of file descriptors (`ulimit -n`)",
        PATIENCE.as_secs()
    ))
}
