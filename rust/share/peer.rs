//! The importer's side: a connection to one exporter.

use super::Key;
use super::error::Error;
use super::message::{Message, Shared, Subject};
use super::origin::Origin;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// How long an exporter may take to answer. One that is stopped, or in a debugger, takes longer; one at work answers in microseconds,
/// on a machine with many processes to each core in milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A process whose memory this one maps.
#[derive(Debug)]
pub struct Peer {
    socket: OwnedFd,
    origin: Origin,
    /// Held by whoever reads from the socket; the number of the last request.
    reading: Mutex<u32>,
    /// What the exporter has withdrawn.
    withdrawn: Mutex<HashSet<Key>>,
    ended: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    /// Connects to the process that a handle names. Takes [`PATIENCE`] at most.
    pub fn connect(origin: &Origin) -> Result<Peer, Error> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(Error::system("socket"))?;
        for timeout in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&socket, timeout, Some(PATIENCE)).map_err(Error::system("a socket's time-out"))?;
        }
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes()).map_err(Error::system("an abstract socket's name"))?;
        loop {
            match rustix::net::connect(&socket, &name) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                Err(Errno::CONNREFUSED) => {
                    let why = "it has exited, or has destroyed the context that exported; export again and send the new handle";
                    return Err(Error::PeerGone(format!("{origin} exports nothing any more: {why}")));
                }
                Err(Errno::AGAIN) => return Err(silent(origin)),
                Err(error) => return Err(Error::system("connect")(error)),
            }
        }
        // The name is a secret that travelled: whoever took it over must not feed us memory.
        let peer = socket_peercred(&socket).map_err(Error::system("SO_PEERCRED"))?;
        if peer.uid.as_raw() != origin.user {
            return Err(Error::NotSupported(format!("{origin} is answered for by a process of user {}: not trusted", peer.uid.as_raw())));
        }
        Ok(Peer { socket, origin: *origin, reading: Mutex::new(0), withdrawn: Mutex::default(), ended: AtomicBool::new(false) })
    }

    /// Whose memory it is.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Asks how to map an allocation. Takes [`PATIENCE`] at most.
    pub fn import(&self, key: Key) -> Result<Shared, Error> {
        let mut last = lock(&self.reading);
        *last = last.wrapping_add(1).max(1);
        let number = *last;
        match Message::new(Subject::Import, number, key).send(&self.socket, SendFlags::empty()) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Err(silent(&self.origin)),
            // It may have said why before it closed.
            Err(_) => self.ended.store(true, Ordering::Release),
        }
        loop {
            match Message::receive(&self.socket, RecvFlags::empty()) {
                Ok(Some(Message { subject: Subject::Granted, number: n, shared: Some(shared), .. })) if n == number => {
                    lock(&self.withdrawn).remove(&key);
                    return Ok(shared);
                }
                Ok(Some(Message { subject: Subject::Gone, number: n, .. })) if n == number => {
                    return Err(self.freed());
                }
                // A refusal of number 0 is one of this process as a whole.
                Ok(Some(Message { subject: Subject::Refused, number: n, text, .. })) if n == number || n == 0 => {
                    return Err(Error::NotSupported(text));
                }
                Ok(Some(message)) => self.note(&message),
                Ok(None) | Err(Errno::CONNRESET | Errno::PIPE) => {
                    self.ended.store(true, Ordering::Release);
                    return Err(self.exited());
                }
                Err(Errno::AGAIN) => {
                    // Should it still answer, nobody is there who has it.
                    let _ = Message::new(Subject::Close, 0, key).send(&self.socket, SendFlags::DONTWAIT);
                    return Err(silent(&self.origin));
                }
                Err(Errno::PROTO) => {
                    return Err(Error::Version(format!(
                        "{} speaks another version of mpgpu: link both programs with the same one",
                        self.origin
                    )));
                }
                Err(error) => return Err(Error::system("recvmsg")(error)),
            }
        }
    }

    /// The memory is no longer mapped here.
    pub fn close(&self, key: Key) {
        // Where the exporter does not read, it is about to end.
        let _ = Message::new(Subject::Close, 0, key).send(&self.socket, SendFlags::DONTWAIT);
    }

    /// Refuses memory that was freed, or whose process has ended. Does not wait.
    pub fn check(&self, key: Key) -> Result<(), Error> {
        // Whoever reads at the moment notes what comes.
        match self.reading.try_lock() {
            Ok(_reading) => self.read_what_came(),
            Err(TryLockError::Poisoned(_reading)) => self.read_what_came(),
            Err(TryLockError::WouldBlock) => {}
        }
        if lock(&self.withdrawn).contains(&key) {
            return Err(self.freed());
        }
        if self.ended.load(Ordering::Acquire) {
            return Err(self.exited());
        }
        Ok(())
    }

    fn read_what_came(&self) {
        while !self.ended.load(Ordering::Acquire) {
            match Message::receive(&self.socket, RecvFlags::DONTWAIT) {
                Ok(Some(message)) => self.note(&message),
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => self.ended.store(true, Ordering::Release),
            }
        }
    }

    /// Takes note of what nobody asked for. An answer that came too late is dropped, with its descriptor.
    fn note(&self, message: &Message) {
        if message.subject == Subject::Gone && message.number == 0 {
            lock(&self.withdrawn).insert(message.key);
        }
    }

    fn freed(&self) -> Error {
        Error::PeerGone(format!("{} has freed the memory, or destroyed its context; export again and send the new handle", self.origin))
    }

    fn exited(&self) -> Error {
        Error::PeerGone(format!("{}, whose memory this is, has ended or no longer exports anything", self.origin))
    }
}

fn silent(origin: &Origin) -> Error {
    Error::Timeout(format!("{origin} has not answered for {} s: it may be stopped, or in a debugger", PATIENCE.as_secs()))
}
