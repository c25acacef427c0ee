//! The exporter's side: what is exported, and the thread that answers for it.

use super::Key;
use super::board::Board;
use super::error::Error;
use super::fork::{self, OfProcess, Socket};
use super::handle::Secret;
use super::message::{Message, Subject};
use super::origin::Origin;
use crate::backend::{Allocation, Backend, Departed};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

/// More connections than this are not accepted: far more than a node has ranks, and a bound on what strangers can make us hold.
const MOST_CONNECTIONS: usize = 1024;

/// How often backends look after waits that have ended in vain.
const TEND_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// With this many exports, those whose memory was freed without a word (by `cudaFree`) are looked for and dropped; and again each time there
/// are twice as many as were left, so that each export costs two looks at most.
const FIRST_SWEEP: usize = 4096;

/// An allocation that others may map.
#[derive(Clone)]
pub struct Export {
    /// Who knows how.
    pub backend: Arc<dyn Backend>,
    /// What is exported. Its id is never another's, so memory that was freed is not mistaken for what has its address now.
    pub allocation: Allocation,
}

/// What this process exports. One for all contexts: it lives from the first export until the last context that exported is gone.
pub struct Service {
    state: Arc<State>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    origin: Origin,
    /// The process that it serves ([`fork::generation`]).
    generation: u32,
    listener: Socket,
    /// Wakes the thread to end.
    wake: Socket,
    closing: AtomicBool,
    exports: Mutex<Exports>,
    /// Only the thread takes one away.
    connections: Mutex<Vec<Arc<Connection>>>,
}

struct Exports {
    by_key: HashMap<Key, Exported>,
    /// With so many, dead ones are looked for.
    sweep_at: usize,
}

#[derive(Clone)]
struct Exported {
    export: Export,
    secret: Secret,
}

/// An importer.
struct Connection {
    socket: Socket,
    peer: Departed,
    /// From its first successful request on.
    board: OnceLock<Board>,
    imported: Mutex<Imported>,
}

/// What an importer was granted, and has not closed as far as we have looked.
#[derive(Default)]
struct Imported {
    /// Slot and request.
    by_key: HashMap<Key, (u32, u32)>,
    by_slot: HashMap<u32, Key>,
}

impl Imported {
    fn insert(&mut self, key: Key, slot: u32, request: u32) {
        // It was closed, and is imported anew.
        self.remove(key);
        // An importer uses a slot again when it has closed what was there.
        if let Some(closed) = self.by_slot.insert(slot, key) {
            self.by_key.remove(&closed);
        }
        self.by_key.insert(key, (slot, request));
    }

    fn remove(&mut self, key: Key) -> Option<(u32, u32)> {
        let (slot, request) = self.by_key.remove(&key)?;
        self.by_slot.remove(&slot);
        Some((slot, request))
    }
}

/// Nothing in here panics with a lock held and what it guards half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child of `fork` has the memory of its parent's service, but not its thread.
static CURRENT: OfProcess<Mutex<Weak<Service>>> = OfProcess::new(|| Mutex::new(Weak::new()));

impl Service {
    /// The service of this process, started if there is none.
    pub fn start() -> Result<Arc<Service>, Error> {
        let mut current = lock(CURRENT.get());
        if let Some(service) = current.upgrade().filter(|service| service.is_here()) {
            return Ok(service);
        }
        let service = Arc::new(Service::new()?);
        *current = Arc::downgrade(&service);
        Ok(service)
    }

    /// The service of this process, if it has one.
    pub fn current() -> Option<Arc<Service>> {
        lock(CURRENT.get()).upgrade().filter(|service| service.is_here())
    }

    fn is_here(&self) -> bool {
        self.state.generation == fork::generation()
    }

    fn new() -> Result<Service, Error> {
        let origin = Origin::here(Secret::draw()?.0);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = Socket::make(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
            .map_err(Error::system("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes()).map_err(Error::system("an abstract socket's name"))?;
        rustix::net::bind(&listener, &name).map_err(Error::system("bind"))?;
        rustix::net::listen(&listener, 128).map_err(Error::system("listen"))?;
        let wake = Socket::make(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(Error::system("eventfd"))?;
        let state = Arc::new(State {
            origin,
            generation: fork::generation(),
            listener,
            wake,
            closing: AtomicBool::new(false),
            exports: Mutex::new(Exports { by_key: HashMap::new(), sweep_at: FIRST_SWEEP }),
            connections: Mutex::default(),
        });
        let served = Arc::clone(&state);
        let thread = std::thread::Builder::new().name("mpgpu-share".into()).spawn(move || served.serve()).map_err(|error| {
            Error::System { what: "a thread that answers importers", reason: error.to_string(), code: error.raw_os_error().unwrap_or(0) }
        })?;
        Ok(Service { state, thread: Mutex::new(Some(thread)) })
    }

    /// This process, as handles name it.
    pub fn origin(&self) -> &Origin {
        &self.state.origin
    }

    /// From now on whoever knows the secret may map it. Exporting it again changes nothing.
    pub fn export(&self, key: Key, export: Export) -> Result<Secret, Error> {
        let drawn = Secret::draw()?;
        let mut exports = lock(&self.state.exports);
        let secret = exports.by_key.entry(key).or_insert(Exported { export, secret: drawn }).secret;
        if exports.by_key.len() >= exports.sweep_at {
            // Until this is done, nobody else begins.
            exports.sweep_at = usize::MAX;
            let all: Vec<(Key, Export)> = exports.by_key.iter().map(|(key, exported)| (*key, exported.export.clone())).collect();
            drop(exports);
            all.into_iter().filter(|(_, export)| !export.lives()).for_each(|(key, _)| self.withdraw(key));
            let mut exports = lock(&self.state.exports);
            exports.sweep_at = FIRST_SWEEP.max(2 * exports.by_key.len());
        }
        Ok(secret)
    }

    /// What is exported under this key with this secret, if it still lives.
    pub fn find(&self, key: Key, secret: Secret) -> Option<Export> {
        self.state.find(key, secret)
    }

    /// Whether what was exported under this key still lives.
    pub fn lives(&self, key: Key) -> bool {
        let secret = lock(&self.state.exports).by_key.get(&key).map(|exported| exported.secret);
        secret.is_some_and(|secret| self.find(key, secret).is_some())
    }

    /// Nobody maps it from now on, and those who have are told.
    pub fn withdraw(&self, key: Key) {
        self.state.withdraw(key);
    }

    /// [`Service::withdraw`] for everything of a backend.
    pub fn withdraw_all(&self, backend: &Arc<dyn Backend>) {
        let ours = |exported: &Exported| std::ptr::addr_eq(Arc::as_ptr(&exported.export.backend), Arc::as_ptr(backend));
        let withdrawn: Vec<(Key, Exported)> = lock(&self.state.exports).by_key.extract_if(|_, exported| ours(exported)).collect();
        for (key, _) in withdrawn {
            self.state.tell(key);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.is_here() {
            // There is no thread to end, and the parent's is none of ours.
            std::mem::forget((lock(&self.thread).take(), Arc::clone(&self.state)));
            return;
        }
        self.state.closing.store(true, Ordering::Release);
        let woken = rustix::io::write(&self.state.wake, &1_u64.to_ne_bytes());
        let thread = lock(&self.thread).take();
        if let (Ok(_), Some(thread)) = (woken, thread)
            && thread.join().is_err()
        {
            log::error!("the thread that answers importers panicked; please report this");
        }
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("origin", &self.state.origin).finish_non_exhaustive()
    }
}

impl Export {
    /// Whether the memory was not freed: what is not of `mp_alloc` goes without a word to this library. Asks the driver.
    fn lives(&self) -> bool {
        let found = self.backend.locate(self.allocation.base).ok().flatten();
        found.is_some_and(|found| found.id == self.allocation.id)
    }
}

impl State {
    /// What the thread does from start to end.
    fn serve(&self) {
        // Backends that have lost a peer and have something to look after. Not kept alive by that.
        let mut tended: Vec<Weak<dyn Backend>> = Vec::new();
        loop {
            let connections = lock(&self.connections).clone();
            let mut watched = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            watched.extend(connections.iter().map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
            let timeout = (!tended.is_empty()).then_some(&TEND_EVERY);
            if let Err(error) = poll(&mut watched, timeout)
                && error != Errno::INTR
            {
                log::error!("waiting for importers: {error}; nothing more is exported");
                return;
            }
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            if !watched[0].revents().is_empty() {
                // By whom ever: it is not to be woken by this for ever.
                let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
            }
            for (connection, polled) in connections.iter().zip(&watched[2..]) {
                if !polled.revents().is_empty() && !self.listen_to(connection) {
                    self.lose(connection, &mut tended);
                }
            }
            tended.retain(|backend| backend.upgrade().is_some_and(|backend| backend.tend()));
            if !watched[1].revents().is_empty() {
                self.accept();
            }
        }
    }

    /// Accepts an importer, if it is of our user.
    fn accept(&self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match Socket::make(|| rustix::net::accept_with(&self.listener, flags)) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return,
            Err(error) => {
                log::warn!("an importer could not be let in: {error}; trying again");
                // Out of descriptors, most likely: the listener stays readable until somebody closes one.
                std::thread::sleep(std::time::Duration::from_millis(50));
                return;
            }
        };
        let (process, user) = match rustix::net::sockopt::socket_peercred(&socket) {
            Ok(peer) => (peer.pid.as_raw_nonzero().get(), peer.uid.as_raw()),
            Err(_) => return,
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let peer = Departed { process, connection: NEXT.fetch_add(1, Ordering::Relaxed) };
        let connection = Connection { socket, peer, board: OnceLock::new(), imported: Mutex::default() };
        let refuse = |connection: &Connection, text: String| {
            // The first packet of a connection has room.
            let refusal = Message { text, ..Message::new(Subject::Refused, 0, Key { backend: 0, allocation: 0 }) };
            let _ = refusal.send(&connection.socket, None);
        };
        if user != self.origin.user {
            let text = format!("the exporter is of user {}, this process of user {user}: run both as one user", self.origin.user);
            return refuse(&connection, text);
        }
        let mut connections = lock(&self.connections);
        if connections.len() >= MOST_CONNECTIONS {
            return refuse(&connection, format!("the exporter has {MOST_CONNECTIONS} importers, and takes no more"));
        }
        connections.push(Arc::new(connection));
    }

    /// Answers what an importer asks; false when it has gone, or does not keep to the protocol.
    fn listen_to(&self, connection: &Connection) -> bool {
        loop {
            let answer = match Message::receive(&connection.socket, None) {
                Ok(Some(request)) if request.subject == Subject::Import => self.answer(connection, request),
                Err(Errno::AGAIN) => return true,
                Ok(Some(_)) | Ok(None) | Err(_) => return false,
            };
            // An importer asks once and waits, so there is room for the answer. One that does not is hung up on.
            if answer.is_none_or(|answer| answer.send(&connection.socket, None).is_err()) {
                return false;
            }
        }
    }

    /// `None` for an importer that does not keep to the protocol.
    fn answer(&self, connection: &Connection, request: Message) -> Option<Message> {
        let Message { number, key, slot, secret, .. } = request;
        let gone = || Some(Message::new(Subject::Gone, number, key));
        // The driver is asked without a lock.
        let Some(export) = self.find(key, secret) else { return gone() };
        if connection.board.get().is_none() {
            let board = Board::open(&request.board?).ok()?;
            let _ = connection.board.set(board);
        }
        match export.backend.share(&export.allocation) {
            Ok(shared) => {
                // A withdrawal comes either before, or finds it among what was imported.
                let exports = lock(&self.exports);
                if !exports.by_key.get(&key).is_some_and(|exported| exported.secret == secret) {
                    return gone();
                }
                lock(&connection.imported).insert(key, slot, number);
                Some(Message { shared: Some(shared), secret: self.origin.proof(), ..Message::new(Subject::Granted, number, key) })
            }
            Err(error) => Some(Message { text: error.to_string(), ..Message::new(Subject::Refused, number, key) }),
        }
    }

    /// See [`Service::find`].
    fn find(&self, key: Key, secret: Secret) -> Option<Export> {
        let exported = lock(&self.exports).by_key.get(&key).filter(|exported| exported.secret == secret).cloned()?;
        if !exported.export.lives() {
            self.withdraw(key);
            return None;
        }
        Some(exported.export)
    }

    /// See [`Service::withdraw`].
    fn withdraw(&self, key: Key) {
        let withdrawn = lock(&self.exports).by_key.remove(&key);
        if withdrawn.is_some() {
            self.tell(key);
        }
    }

    /// Tells every importer of a key that it has gone.
    fn tell(&self, key: Key) {
        for connection in lock(&self.connections).iter() {
            if let (Some((slot, request)), Some(board)) = (lock(&connection.imported).remove(key), connection.board.get()) {
                board.withdraw(slot, request);
            }
        }
    }

    /// Takes an importer away that has gone. Backends whose memory it had mapped are to be tended from now on.
    fn lose(&self, connection: &Arc<Connection>, tended: &mut Vec<Weak<dyn Backend>>) {
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
        let imported = std::mem::take(&mut lock(&connection.imported).by_key);
        let closed = |(slot, request): &(u32, u32)| connection.board.get().is_some_and(|board| board.is_closed(*slot, *request));
        let left = imported.into_iter().filter(|(_, place)| !closed(place));
        for export in left.filter_map(|(key, _)| lock(&self.exports).by_key.get(&key).map(|exported| exported.export.clone())) {
            log::debug!("{:#x}: {}", export.allocation.base, connection.peer);
            export.backend.abandon(&export.allocation, connection.peer);
            let backend = Arc::downgrade(&export.backend);
            if !tended.iter().any(|other| other.ptr_eq(&backend)) {
                tended.push(backend);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_used_again_forgets_what_was_there_and_nothing_else() {
        let key = |allocation| Key { backend: 1, allocation };
        let mut imported = Imported::default();
        imported.insert(key(1), 0, 1);
        imported.insert(key(2), 1, 2);
        // Both are closed; the first comes back in another slot, and its old one goes to a third.
        imported.insert(key(1), 1, 3);
        imported.insert(key(3), 0, 4);
        assert_eq!((imported.by_key.len(), imported.by_slot.len()), (2, 2));
        assert_eq!(imported.remove(key(2)), None);
        assert_eq!(imported.remove(key(1)), Some((1, 3)));
        assert_eq!(imported.remove(key(3)), Some((0, 4)));
        assert!(imported.by_slot.is_empty());
    }
}
