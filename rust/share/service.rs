//! The exporter's side: what is exported, and the thread that answers for it.

use super::Key;
use super::error::Error;
use super::message::{Message, Subject};
use super::origin::Origin;
use crate::backend::{Allocation, Backend, Departed};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// More connections than this are not accepted: far more than a node has ranks, and a bound on what strangers can make us hold.
const MOST_CONNECTIONS: usize = 1024;

/// How often backends look after waits that have ended in vain.
const TEND_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// With this many exports, those whose memory was freed without a word (by `cudaFree`) are looked for and dropped.
const MOST_UNSEEN: usize = 4096;

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
    listener: OwnedFd,
    /// Wakes the thread to end.
    wake: OwnedFd,
    closing: AtomicBool,
    exports: Mutex<HashMap<Key, Export>>,
    /// Only the thread takes one away.
    connections: Mutex<Vec<Arc<Connection>>>,
}

/// An importer.
struct Connection {
    socket: OwnedFd,
    peer: Departed,
    imported: Mutex<HashSet<Key>>,
}

/// Nothing in here panics with a lock held and what it guards half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static CURRENT: Mutex<Weak<Service>> = Mutex::new(Weak::new());

impl Service {
    /// The service of this process, started if there is none.
    pub fn start() -> Result<Arc<Service>, Error> {
        let mut current = lock(&CURRENT);
        // A child of `fork` has the memory of a service, but not its thread.
        if let Some(service) = current.upgrade().filter(|service| service.state.origin.process == std::process::id()) {
            return Ok(service);
        }
        let service = Arc::new(Service::new()?);
        *current = Arc::downgrade(&service);
        Ok(service)
    }

    /// The service of this process, if it has one.
    pub fn current() -> Option<Arc<Service>> {
        lock(&CURRENT).upgrade().filter(|service| service.state.origin.process == std::process::id())
    }

    fn new() -> Result<Service, Error> {
        let mut token = [0; 16];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty()).map_err(Error::system("getrandom"))?;
        let origin = Origin::here(token);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(Error::system("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes()).map_err(Error::system("an abstract socket's name"))?;
        rustix::net::bind(&listener, &name).map_err(Error::system("bind"))?;
        rustix::net::listen(&listener, 128).map_err(Error::system("listen"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("eventfd"))?;
        let state = Arc::new(State {
            origin,
            listener,
            wake,
            closing: AtomicBool::new(false),
            exports: Mutex::default(),
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

    /// From now on others may map it. Exporting it again changes nothing.
    pub fn export(&self, key: Key, export: Export) {
        let mut exports = lock(&self.state.exports);
        if exports.len() >= MOST_UNSEEN {
            let keys: Vec<Key> = exports.keys().copied().collect();
            keys.into_iter().for_each(|key| _ = find(&mut exports, key));
        }
        exports.entry(key).or_insert(export);
    }

    /// What is exported under this key, if it still lives.
    pub fn find(&self, key: Key) -> Option<Export> {
        find(&mut lock(&self.state.exports), key)
    }

    /// Nobody maps it from now on, and those who have are told.
    pub fn withdraw(&self, key: Key) {
        if lock(&self.state.exports).remove(&key).is_some() {
            self.state.tell(key);
        }
    }

    /// [`Service::withdraw`] for everything of a backend.
    pub fn withdraw_all(&self, backend: &Arc<dyn Backend>) {
        let ours = |export: &Export| std::ptr::addr_eq(Arc::as_ptr(&export.backend), Arc::as_ptr(backend));
        let withdrawn: Vec<(Key, Export)> = lock(&self.state.exports).extract_if(|_, export| ours(export)).collect();
        for (key, _) in withdrawn {
            self.state.tell(key);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
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

/// What is exported under a key, unless its memory was freed: memory that is not of `mp_alloc` goes without a word to this library.
fn find(exports: &mut HashMap<Key, Export>, key: Key) -> Option<Export> {
    let export = exports.get(&key)?.clone();
    let found = export.backend.locate(export.allocation.base).ok().flatten();
    if found.is_some_and(|found| found.id == export.allocation.id) {
        return Some(export);
    }
    exports.remove(&key);
    None
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
        let socket = match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
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
        let connection = Connection { socket, peer, imported: Mutex::default() };
        if user != self.origin.user {
            let mut refusal = Message::new(Subject::Refused, 0, Key { backend: 0, allocation: 0 });
            refusal.text = format!("the exporter is of user {}, this process of user {user}: run both as one user", self.origin.user);
            let _ = refusal.send(&connection.socket, SendFlags::DONTWAIT);
            return;
        }
        let mut connections = lock(&self.connections);
        if connections.len() < MOST_CONNECTIONS {
            connections.push(Arc::new(connection));
        }
    }

    /// Answers what an importer asks; false when it has gone, or does not keep to the protocol.
    fn listen_to(&self, connection: &Connection) -> bool {
        loop {
            let answer = match Message::receive(&connection.socket, RecvFlags::DONTWAIT) {
                Ok(Some(Message { subject: Subject::Import, number, key, .. })) => self.answer(connection, number, key),
                Ok(Some(Message { subject: Subject::Close, key, .. })) => {
                    lock(&connection.imported).remove(&key);
                    continue;
                }
                Err(Errno::AGAIN) => return true,
                Ok(Some(_)) | Ok(None) | Err(_) => return false,
            };
            // An importer asks once and waits, so there is room for the answer.
            if answer.send(&connection.socket, SendFlags::DONTWAIT).is_err() {
                return false;
            }
        }
    }

    fn answer(&self, connection: &Connection, number: u32, key: Key) -> Message {
        // Held until the importer is known to have it, so that a withdrawal comes either before or reaches it.
        let mut exports = lock(&self.exports);
        let Some(export) = find(&mut exports, key) else {
            return Message::new(Subject::Gone, number, key);
        };
        match export.backend.share(&export.allocation) {
            Ok(shared) => {
                lock(&connection.imported).insert(key);
                Message { shared: Some(shared), ..Message::new(Subject::Granted, number, key) }
            }
            Err(error) => Message { text: error.to_string(), ..Message::new(Subject::Refused, number, key) },
        }
    }

    /// Tells every importer of a key that it has gone.
    fn tell(&self, key: Key) {
        for connection in lock(&self.connections).iter() {
            if lock(&connection.imported).remove(&key) {
                // An importer that does not read its packets learns it when it asks.
                let _ = Message::new(Subject::Gone, 0, key).send(&connection.socket, SendFlags::DONTWAIT);
            }
        }
    }

    /// Takes an importer away that has gone. Backends whose memory it had mapped are to be tended from now on.
    fn lose(&self, connection: &Arc<Connection>, tended: &mut Vec<Weak<dyn Backend>>) {
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
        let left = std::mem::take(&mut *lock(&connection.imported));
        for export in left.iter().filter_map(|key| lock(&self.exports).get(key).cloned()) {
            log::debug!("{:#x}: {}", export.allocation.base, connection.peer);
            export.backend.abandon(&export.allocation, connection.peer);
            let backend = Arc::downgrade(&export.backend);
            if !tended.iter().any(|other| other.ptr_eq(&backend)) {
                tended.push(backend);
            }
        }
    }
}
