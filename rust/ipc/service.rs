//! The exporter's side: what is exported, and the thread that answers for it.

use super::AllocationKey;
use super::board::Board;
use super::error::IpcError;
use super::fork::{self, OfProcess, Socket};
use super::handle::Secret;
use super::packet::{Departure, Packet, Subject};
use super::process::ProcessIdentity;
use crate::backend::{Allocation, Backend, LeftPlan, LostPeer};
use crate::threads::without_signals;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

/// The most connections: far more than a node has ranks, and a bound on what other programs can make us hold.
const MOST_CONNECTIONS: usize = 1024;

/// How often backends check failed waits again.
const TEND_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// From this many exports on, those whose memory was freed without our knowledge (by `cudaFree`) are searched for and dropped. The next
/// search is at twice the number that was left, so each export is checked about twice.
const FIRST_SWEEP: usize = 4096;

/// An allocation that others may map.
#[derive(Clone)]
pub struct Export {
    /// Knows how to map it.
    pub backend: Arc<dyn Backend>,
    /// What is exported. Its id is never another's, so memory that was freed is not mistaken for what has its address now.
    pub allocation: Allocation,
    /// Asked when an importer leaves or ends whether waits in this memory will then never end. Where nobody is to be asked they do not, of an importer
    /// that ends.
    pub on_leave: Option<OnLeave>,
}

/// See [`Export::on_leave`]. Runs on the thread that answers importers.
pub type OnLeave = Arc<dyn Fn(Departure) -> Option<LeftPlan> + Send + Sync>;

/// What this process exports. One for all contexts: it lives from the first export until the last context that exported is gone.
pub struct Service {
    state: Arc<ServiceState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct ServiceState {
    origin: ProcessIdentity,
    /// The process that it serves ([`fork::generation`]).
    generation: u32,
    listener: Socket,
    /// Wakes the thread to end.
    wake: Socket,
    closing: AtomicBool,
    exports: Mutex<Exports>,
    /// Only the thread takes one away.
    connections: Mutex<Vec<Arc<Connection>>>,
    /// Backends that have lost a peer and may have waits to fail. Weak: this does not keep them alive.
    tended: Mutex<Vec<Weak<dyn Backend>>>,
}

struct Exports {
    by_key: HashMap<AllocationKey, ExportRecord>,
    /// With so many exports, dead ones are searched for.
    sweep_at: usize,
}

#[derive(Clone)]
struct ExportRecord {
    export: Export,
    secret: Secret,
    /// Other contexts of this process that use it have a copy.
    held: Arc<()>,
}

/// An importer.
struct Connection {
    socket: Socket,
    process: i32,
    /// From its first successful request on.
    board: OnceLock<Board>,
    imported: Mutex<ImportTable>,
}

/// What an importer was granted and, as far as we have looked, has not closed.
#[derive(Default)]
struct ImportTable {
    /// BoardSlot and request.
    by_key: HashMap<AllocationKey, (u32, u32)>,
    by_slot: HashMap<u32, AllocationKey>,
}

impl Connection {
    /// Whether the importer has noted that it no longer maps what it was granted.
    fn has_closed(&self, (slot, request): (u32, u32)) -> bool {
        self.board.get().is_some_and(|board| board.is_closed(slot, request))
    }

    fn has_mapped(&self, key: AllocationKey) -> bool {
        let granted = lock(&self.imported).by_key.get(&key).copied();
        granted.is_some_and(|place| !self.has_closed(place))
    }
}

impl ImportTable {
    fn insert(&mut self, key: AllocationKey, slot: u32, request: u32) {
        // It was closed, and is imported anew.
        self.remove(key);
        // An importer uses a slot again when it has closed what was there.
        if let Some(closed) = self.by_slot.insert(slot, key) {
            self.by_key.remove(&closed);
        }
        self.by_key.insert(key, (slot, request));
    }

    fn remove(&mut self, key: AllocationKey) -> Option<(u32, u32)> {
        let (slot, request) = self.by_key.remove(&key)?;
        self.by_slot.remove(&slot);
        Some((slot, request))
    }
}

/// A poisoned lock is fine: no code here panics while the guarded value is half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child of `fork` has the memory of its parent's service, but not its thread.
static CURRENT: OfProcess<Mutex<Weak<Service>>> = OfProcess::new(|| Mutex::new(Weak::new()));

impl Service {
    /// The service of this process, started if there is none.
    pub fn start() -> Result<Arc<Service>, IpcError> {
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

    fn new() -> Result<Service, IpcError> {
        let origin = ProcessIdentity::here(Secret::draw()?.0);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = Socket::make(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
            .map_err(IpcError::system("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes()).map_err(IpcError::system("an abstract socket's name"))?;
        rustix::net::bind(&listener, &name).map_err(IpcError::system("bind"))?;
        rustix::net::listen(&listener, 128).map_err(IpcError::system("listen"))?;
        let wake = Socket::make(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)).map_err(IpcError::system("eventfd"))?;
        let state = Arc::new(ServiceState {
            origin,
            generation: fork::generation(),
            listener,
            wake,
            closing: AtomicBool::new(false),
            exports: Mutex::new(Exports { by_key: HashMap::new(), sweep_at: FIRST_SWEEP }),
            connections: Mutex::default(),
            tended: Mutex::default(),
        });
        let served = Arc::clone(&state);
        let named = std::thread::Builder::new().name("mpgpu-share".into());
        let thread = without_signals(|| named.spawn(move || served.serve())).map_err(|error| IpcError::System {
            what: "a thread that answers importers",
            reason: error.to_string(),
            code: error.raw_os_error().unwrap_or(0),
        })?;
        Ok(Service { state, thread: Mutex::new(Some(thread)) })
    }

    /// This process, as handles name it.
    pub fn origin(&self) -> &ProcessIdentity {
        &self.state.origin
    }

    /// From now on whoever knows the secret may map it. Exporting it again changes nothing.
    pub fn export(&self, key: AllocationKey, export: Export) -> Result<Secret, IpcError> {
        let drawn = Secret::draw()?;
        let mut exports = lock(&self.state.exports);
        let secret = exports.by_key.entry(key).or_insert_with(|| ExportRecord { export, secret: drawn, held: Arc::default() }).secret;
        if exports.by_key.len() >= exports.sweep_at {
            // No other thread starts a search until this one is done.
            exports.sweep_at = usize::MAX;
            let all: Vec<(AllocationKey, Export)> = exports.by_key.iter().map(|(key, exported)| (*key, exported.export.clone())).collect();
            drop(exports);
            all.into_iter().filter(|(_, export)| !export.lives()).for_each(|(key, _)| self.withdraw(key));
            let mut exports = lock(&self.state.exports);
            exports.sweep_at = FIRST_SWEEP.max(2 * exports.by_key.len());
        }
        Ok(secret)
    }

    /// What is exported under this key with this secret, if it still lives.
    pub fn find(&self, key: AllocationKey, secret: Secret) -> Option<Export> {
        self.state.find(key, secret)
    }

    /// For another context of this process, which has it in use for as long as it keeps what is returned.
    pub fn hold(&self, key: AllocationKey) -> Option<Arc<()>> {
        lock(&self.state.exports).by_key.get(&key).map(|exported| Arc::clone(&exported.held))
    }

    /// Whether another process or context has it mapped.
    pub fn is_mapped(&self, key: AllocationKey) -> bool {
        let is_held = lock(&self.state.exports).by_key.get(&key).is_some_and(|exported| Arc::strong_count(&exported.held) > 1);
        is_held || lock(&self.state.connections).iter().any(|connection| connection.has_mapped(key))
    }

    /// Another context of this process leaves, as [`Peer::leave`](super::Peer::leave) says it of another process.
    pub fn leave(&self, key: AllocationKey, secret: Secret, departure: Departure) {
        self.state.leave(key, secret, departure, self.state.origin.process as i32);
        // The thread goes on failing waits that it has begun to fail.
        let _ = rustix::io::write(&self.state.wake, &1_u64.to_ne_bytes());
    }

    /// Whether what was exported under this key still lives.
    pub fn lives(&self, key: AllocationKey) -> bool {
        let secret = lock(&self.state.exports).by_key.get(&key).map(|exported| exported.secret);
        secret.is_some_and(|secret| self.find(key, secret).is_some())
    }

    /// Nobody maps it from now on, and those who have are told.
    pub fn withdraw(&self, key: AllocationKey) {
        self.state.withdraw(key);
    }

    /// [`Service::withdraw`] for everything of a backend.
    pub fn withdraw_all(&self, backend: &Arc<dyn Backend>) {
        let ours = |exported: &ExportRecord| std::ptr::addr_eq(Arc::as_ptr(&exported.export.backend), Arc::as_ptr(backend));
        let withdrawn: Vec<(AllocationKey, ExportRecord)> =
            lock(&self.state.exports).by_key.extract_if(|_, exported| ours(exported)).collect();
        for (key, _) in withdrawn {
            self.state.tell(key);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.is_here() {
            // This process has no such thread; it is the parent's.
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
    /// Whether the memory still exists. Asks the driver, because only memory of `mp_alloc` is freed through this library.
    fn lives(&self) -> bool {
        let found = self.backend.locate(self.allocation.base).ok().flatten();
        found.is_some_and(|found| found.id == self.allocation.id)
    }
}

impl ServiceState {
    /// What the thread does from start to end.
    fn serve(&self) {
        loop {
            let connections = lock(&self.connections).clone();
            let mut watched = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            watched.extend(connections.iter().map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
            let timeout = (!lock(&self.tended).is_empty()).then_some(&TEND_EVERY);
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
                // Whoever wrote it: unread, it would wake the thread again and again.
                let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
            }
            for (connection, polled) in connections.iter().zip(&watched[2..]) {
                if !polled.revents().is_empty() && !self.listen_to(connection) {
                    self.lose(connection);
                }
            }
            lock(&self.tended).retain(|backend| backend.upgrade().is_some_and(|backend| backend.fail_waits_again()));
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
        let connection = Connection { socket, process, board: OnceLock::new(), imported: Mutex::default() };
        let refuse = |connection: &Connection, text: String| {
            // There is always room for the first packet of a connection.
            let refusal = Packet { text, ..Packet::new(Subject::Refused, 0, AllocationKey { backend: 0, allocation: 0 }) };
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
            let answer = match Packet::receive(&connection.socket, None) {
                Ok(Some(request)) if request.subject == Subject::Import => self.answer(connection, request),
                Ok(Some(packet)) if packet.subject == Subject::Leave => {
                    self.leave(packet.key, packet.secret, packet.departure, connection.process);
                    continue;
                }
                Err(Errno::AGAIN) => return true,
                Ok(Some(_)) | Ok(None) | Err(_) => return false,
            };
            // An importer asks once and then waits, so there is room for the answer. If not, we close the connection.
            if answer.is_none_or(|answer| answer.send(&connection.socket, None).is_err()) {
                return false;
            }
        }
    }

    /// `None` for an importer that does not keep to the protocol.
    fn answer(&self, connection: &Connection, request: Packet) -> Option<Packet> {
        let Packet { number, key, slot, secret, .. } = request;
        let gone = || Some(Packet::new(Subject::Gone, number, key));
        // The driver is asked without a lock.
        let Some(export) = self.find(key, secret) else { return gone() };
        if connection.board.get().is_none() {
            let board = Board::open(&request.board?).ok()?;
            let _ = connection.board.set(board);
        }
        match export.backend.export(&export.allocation) {
            Ok(shared) => {
                // A concurrent withdrawal either came before this lock, or will find the import in the table.
                let exports = lock(&self.exports);
                if !exports.by_key.get(&key).is_some_and(|exported| exported.secret == secret) {
                    return gone();
                }
                lock(&connection.imported).insert(key, slot, number);
                Some(Packet { shared: Some(shared), secret: self.origin.proof(), ..Packet::new(Subject::Granted, number, key) })
            }
            Err(error) => Some(Packet { text: error.to_string(), ..Packet::new(Subject::Refused, number, key) }),
        }
    }

    /// See [`Service::find`].
    fn find(&self, key: AllocationKey, secret: Secret) -> Option<Export> {
        let exported = lock(&self.exports).by_key.get(&key).filter(|exported| exported.secret == secret).cloned()?;
        if !exported.export.lives() {
            self.withdraw(key);
            return None;
        }
        Some(exported.export)
    }

    /// See [`Service::withdraw`].
    fn withdraw(&self, key: AllocationKey) {
        let withdrawn = lock(&self.exports).by_key.remove(&key);
        if withdrawn.is_some() {
            self.tell(key);
        }
    }

    /// Tells every importer that this allocation was freed.
    fn tell(&self, key: AllocationKey) {
        for connection in lock(&self.connections).iter() {
            if let (Some((slot, request)), Some(board)) = (lock(&connection.imported).remove(key), connection.board.get()) {
                board.withdraw(slot, request);
            }
        }
    }

    /// An importer takes no further part in what an allocation is for.
    fn leave(&self, key: AllocationKey, secret: Secret, departure: Departure, process: i32) {
        let exported = lock(&self.exports).by_key.get(&key).filter(|exported| exported.secret == secret).cloned();
        if let Some(ExportRecord { export, .. }) = exported
            && let Some(left) = export.on_leave.as_ref().and_then(|on_leave| on_leave(departure))
        {
            self.fail_waits(&export, LostPeer { process, left: Some(left) });
        }
    }

    /// Fails waits in an allocation, now and in later rounds.
    fn fail_waits(&self, export: &Export, peer: LostPeer) {
        log::debug!("{:#x}: {peer}", export.allocation.base);
        export.backend.fail_waits(&export.allocation, peer);
        let backend = Arc::downgrade(&export.backend);
        let mut tended = lock(&self.tended);
        if !tended.iter().any(|other| other.ptr_eq(&backend)) {
            tended.push(backend);
        }
    }

    /// Removes an importer that has ended. Backends whose memory it had mapped fail its waits.
    fn lose(&self, connection: &Arc<Connection>) {
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
        let imported = std::mem::take(&mut lock(&connection.imported).by_key);
        let left = imported.into_iter().filter(|(_, place)| !connection.has_closed(*place));
        for export in left.filter_map(|(key, _)| lock(&self.exports).by_key.get(&key).map(|exported| exported.export.clone())) {
            let left = export.on_leave.as_ref().map(|on_leave| on_leave(Departure::ENDED));
            if left != Some(None) {
                self.fail_waits(&export, LostPeer { process: connection.process, left: left.flatten() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_used_again_forgets_what_was_there_and_nothing_else() {
        let key = |allocation| AllocationKey { backend: 1, allocation };
        let mut imported = ImportTable::default();
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
