//! Implements the exporter: the table of exported allocations, and the thread that answers processes that import them.

use super::AllocationKey;
use super::board::Board;
use super::credentials::Credentials;
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

/// Maximum number of connections to importers. It is far above the number of ranks of a node. It limits the resources that unrelated
/// programs can consume.
const MOST_CONNECTIONS: usize = 1024;

/// Interval at which backends look for further waits that can no longer complete because a peer is lost.
const TEND_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Number of exports at which the service first searches for exported memory that was freed. `cudaFree` frees memory without notifying the
/// library, so exports of such memory must be found and dropped. The next search starts at twice the number of remaining exports, so each
/// export is checked about twice.
const FIRST_SWEEP: usize = 4096;

/// Exported allocation, which other processes may map.
#[derive(Clone)]
pub struct Export {
    /// Backend that owns the exported allocation, and by which other contexts map it.
    pub backend: Arc<dyn Backend>,
    /// Allocation that is exported. Its id is unique, so freed memory is not mistaken for a later allocation at the same address.
    pub allocation: Allocation,
}

/// Importer of an allocation that has its own secret, by which the exporter identifies it. The importer is another process or another
/// context.
#[derive(Clone)]
pub struct Party {
    /// Number that identifies this importer among those that set counters of the allocation ([`Backend::name_signallers`]).
    pub number: u32,
    /// Function that is called when the importer exits or stops using the allocation. It decides whether waits for counters that this
    /// importer sets can no longer complete.
    pub on_leave: OnLeave,
}

/// Function that is called when an importer exits or stops using an allocation ([`Party::on_leave`]). The arguments are the importer's
/// state and its process id. It runs on the thread that answers importers. Returns a description of the loss if waits for the importer can
/// no longer complete.
pub type OnLeave = Arc<dyn Fn(Departure, i32) -> Option<LeftPlan> + Send + Sync>;

/// Service that exports memory of this process. All contexts share one service. It exists from the first export until the last exporting
/// context is destroyed.
pub struct Service {
    state: Arc<ServiceState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct ServiceState {
    origin: ProcessIdentity,
    /// Generation of the process that created the service ([`fork::generation`]).
    generation: u32,
    listener: Socket,
    /// Event descriptor that other threads use to wake the thread that answers importers.
    wake: Socket,
    closing: AtomicBool,
    exports: Mutex<Exports>,
    /// Connections to importers. Only the thread that answers importers removes them.
    connections: Mutex<Vec<Arc<Connection>>>,
    /// Backends that have lost a peer and may still have to end waits for this peer. The references are weak and do not keep the backends
    /// alive.
    tended: Mutex<Vec<Weak<dyn Backend>>>,
}

struct Exports {
    by_key: HashMap<AllocationKey, ExportRecord>,
    /// Number of exports at which the service next searches for exported memory that was freed.
    sweep_at: usize,
}

#[derive(Clone)]
struct ExportRecord {
    export: Export,
    /// Secrets that permit a process to map the allocation. Each secret belongs to one importer, or (`None`) to all processes that hold the
    /// handle.
    granted: Vec<(Secret, Option<Party>)>,
    /// Reference count of the other contexts of this process that use the allocation. Each of them holds a clone.
    held: Arc<()>,
}

impl ExportRecord {
    /// Returns the importer to which the secret belongs. Returns `None` if the secret is unknown, and `Some(None)` if it belongs to all
    /// processes that hold the handle.
    fn holder(&self, secret: Secret) -> Option<&Option<Party>> {
        self.granted.iter().find(|(known, _)| *known == secret).map(|(_, party)| party)
    }
}

/// Connection of the exporter to one process that imports memory.
struct Connection {
    socket: Socket,
    /// Process id of the importer, used in messages. 0 if the process is in a PID namespace that is not visible here.
    process: i32,
    /// Board of the importer (shared table of freed and unmapped allocations). The importer's first successful request sets it.
    board: OnceLock<Board>,
    imported: Mutex<ImportTable>,
}

/// Identification of an import: the key of the allocation, and the number of the importer if it has its own secret, or otherwise `None`.
type Granted = (AllocationKey, Option<u32>);

/// Table of the allocations that one importer may map and has not been seen to unmap.
#[derive(Default)]
struct ImportTable {
    /// Position of each import: its slot on the importer's board (shared table), and the number of the request.
    by_key: HashMap<Granted, (u32, u32)>,
    by_slot: HashMap<u32, Granted>,
}

impl Connection {
    /// True if the importer has recorded on its board (shared table) that it no longer maps the memory of this slot and request.
    fn has_closed(&self, (slot, request): (u32, u32)) -> bool {
        self.board.get().is_some_and(|board| board.is_closed(slot, request))
    }

    fn has_mapped(&self, key: AllocationKey) -> bool {
        let imported = lock(&self.imported);
        imported.of(key).any(|(_, place)| !self.has_closed(place))
    }
}

impl ImportTable {
    /// Returns the imports of an allocation, each with its slot on the importer's board (shared table) and the number of the request.
    fn of(&self, key: AllocationKey) -> impl Iterator<Item = (Granted, (u32, u32))> {
        self.by_key.iter().filter(move |((granted, _), _)| *granted == key).map(|(granted, place)| (*granted, *place))
    }

    fn insert(&mut self, key: Granted, slot: u32, request: u32) {
        // The importer has unmapped the allocation and now imports it again.
        self.remove(key);
        // An importer reuses a slot only after unmapping the allocation that occupied it.
        if let Some(closed) = self.by_slot.insert(slot, key) {
            self.by_key.remove(&closed);
        }
        self.by_key.insert(key, (slot, request));
    }

    fn remove(&mut self, key: Granted) -> Option<(u32, u32)> {
        let (slot, request) = self.by_key.remove(&key)?;
        self.by_slot.remove(&slot);
        Some((slot, request))
    }
}

/// Locks `mutex`. Poisoning is ignored, because no code here panics while the guarded value is partly changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Service of each process. A child of `fork` inherits a copy of its parent's service, but not the thread of the service.
static CURRENT: OfProcess<Mutex<Weak<Service>>> = OfProcess::new(|| Mutex::new(Weak::new()));

impl Service {
    /// Returns the service of this process. Starts it if it does not run.
    pub fn start() -> Result<Arc<Service>, IpcError> {
        let mut current = lock(CURRENT.get());
        if let Some(service) = current.upgrade().filter(|service| service.is_here()) {
            return Ok(service);
        }
        let service = Arc::new(Service::new()?);
        *current = Arc::downgrade(&service);
        Ok(service)
    }

    /// Returns the service of this process, or `None` if it is not running.
    pub fn current() -> Option<Arc<Service>> {
        lock(CURRENT.get()).upgrade().filter(|service| service.is_here())
    }

    fn is_here(&self) -> bool {
        self.state.generation == fork::generation()
    }

    fn new() -> Result<Service, IpcError> {
        let origin = ProcessIdentity::here(Secret::draw()?.0)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = Socket::make(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
            .map_err(IpcError::system("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(origin.socket().as_bytes())
            .map_err(IpcError::system("creating the name of an abstract socket"))?;
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
            what: "starting the thread that answers importing processes",
            reason: error.to_string(),
            code: error.raw_os_error().unwrap_or(0),
        })?;
        Ok(Service { state, thread: Mutex::new(Some(thread)) })
    }

    /// Returns the identity of this process, as stored in handles.
    pub fn origin(&self) -> &ProcessIdentity {
        &self.state.origin
    }

    /// Exports an allocation and returns a secret. Any process that knows the secret may map the allocation, and is then identified as
    /// `party`. A repeated export for the same party returns the same secret.
    pub fn export(&self, key: AllocationKey, export: Export, party: Option<Party>) -> Result<Secret, IpcError> {
        let drawn = Secret::draw()?;
        let mut exports = lock(&self.state.exports);
        let record = exports.by_key.entry(key).or_insert_with(|| ExportRecord { export, granted: Vec::new(), held: Arc::default() });
        let number = |party: &Option<Party>| party.as_ref().map(|party| party.number);
        let known = record.granted.iter().find(|(_, known)| number(known) == number(&party)).map(|(secret, _)| *secret);
        let secret = known.unwrap_or_else(|| {
            record.granted.push((drawn, party));
            drawn
        });
        if exports.by_key.len() >= exports.sweep_at {
            // While this search is in progress, no other thread may start another search.
            exports.sweep_at = usize::MAX;
            let all: Vec<(AllocationKey, Export)> = exports.by_key.iter().map(|(key, exported)| (*key, exported.export.clone())).collect();
            drop(exports);
            all.into_iter().filter(|(_, export)| !export.lives()).for_each(|(key, _)| self.withdraw(key));
            let mut exports = lock(&self.state.exports);
            exports.sweep_at = FIRST_SWEEP.max(2 * exports.by_key.len());
        }
        Ok(secret)
    }

    /// Returns the export with this key and secret. Returns `None` if there is no such export, or if its memory no longer exists.
    pub fn find(&self, key: AllocationKey, secret: Secret) -> Option<Export> {
        self.state.find(key, secret)
    }

    /// Marks the allocation as used by another context of this process, for as long as the returned value exists. Returns `None` if the
    /// allocation is not exported.
    pub fn hold(&self, key: AllocationKey) -> Option<Arc<()>> {
        lock(&self.state.exports).by_key.get(&key).map(|exported| Arc::clone(&exported.held))
    }

    /// True if another process or context has the allocation mapped.
    pub fn is_mapped(&self, key: AllocationKey) -> bool {
        let is_held = lock(&self.state.exports).by_key.get(&key).is_some_and(|exported| Arc::strong_count(&exported.held) > 1);
        is_held || lock(&self.state.connections).iter().any(|connection| connection.has_mapped(key))
    }

    /// Records that another context of this process stops using the allocation. For another process, [`Peer::leave`](super::Peer::leave)
    /// does this.
    pub fn leave(&self, key: AllocationKey, secret: Secret, departure: Departure) {
        self.state.leave(key, secret, departure, self.state.origin.process as i32);
        // Wakes the thread that answers importers, so that it ends the waits for this importer.
        let _ = rustix::io::write(&self.state.wake, &1_u64.to_ne_bytes());
    }

    /// True if the memory that was exported with this key still exists.
    pub fn lives(&self, key: AllocationKey) -> bool {
        let exported = lock(&self.state.exports).by_key.get(&key).cloned();
        exported.is_some_and(|exported| self.state.check(key, exported).is_some())
    }

    /// Ends the export of an allocation. Importers that have mapped the allocation are notified through their boards (shared tables). No
    /// further process can map it.
    pub fn withdraw(&self, key: AllocationKey) {
        self.state.withdraw(key);
    }

    /// Ends all exports of memory that `backend` owns, as [`Service::withdraw`] does for one.
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
            // The thread belongs to the parent process.
            std::mem::forget((lock(&self.thread).take(), Arc::clone(&self.state)));
            return;
        }
        self.state.closing.store(true, Ordering::Release);
        let woken = rustix::io::write(&self.state.wake, &1_u64.to_ne_bytes());
        let thread = lock(&self.thread).take();
        if let (Ok(_), Some(thread)) = (woken, thread)
            && thread.join().is_err()
        {
            log::error!("the thread that answers importing processes panicked; please report this");
        }
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("origin", &self.state.origin).finish_non_exhaustive()
    }
}

impl Export {
    /// True if the exported memory still exists. Asks the driver, because the library is not notified when memory is freed that `mp_alloc`
    /// did not allocate.
    fn lives(&self) -> bool {
        let found = self.backend.locate(self.allocation.base).ok().flatten();
        found.is_some_and(|found| found.id == self.allocation.id)
    }
}

impl ServiceState {
    /// Runs the main loop of the thread that answers importers, until the service is closed.
    fn serve(&self) {
        loop {
            let connections = lock(&self.connections).clone();
            let mut watched = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            watched.extend(connections.iter().map(|connection| PollFd::new(&connection.socket, PollFlags::IN)));
            let timeout = (!lock(&self.tended).is_empty()).then_some(&TEND_EVERY);
            if let Err(error) = poll(&mut watched, timeout)
                && error != Errno::INTR
            {
                log::error!("waiting for importing processes failed: {error}; no more memory is exported");
                return;
            }
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            if !watched[0].revents().is_empty() {
                // An unread value would wake the thread again and again.
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

    /// Accepts a connection from an importer of the same user, and refuses other users.
    fn accept(&self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match Socket::make(|| rustix::net::accept_with(&self.listener, flags)) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return,
            Err(error) => {
                log::warn!("the connection of an importing process failed: {error}; trying again");
                // The process is probably out of descriptors. The listener stays readable until a descriptor is closed, so this thread
                // would spin without the pause.
                std::thread::sleep(std::time::Duration::from_millis(50));
                return;
            }
        };
        let Ok(Credentials { user, process }) = Credentials::of_peer(&socket) else { return };
        let connection = Connection { socket, process, board: OnceLock::new(), imported: Mutex::default() };
        let refuse = |connection: &Connection, text: String| {
            // The socket can always hold the first packet of a connection.
            let refusal = Packet { text, ..Packet::new(Subject::Refused, 0, AllocationKey { backend: 0, allocation: 0 }) };
            let _ = refusal.send(&connection.socket, None);
        };
        if user != self.origin.user {
            let text = format!(
                "the exporting process runs as user {} and this process as user {user}: run both as the same user",
                self.origin.user
            );
            return refuse(&connection, text);
        }
        let mut connections = lock(&self.connections);
        if connections.len() >= MOST_CONNECTIONS {
            return refuse(
                &connection,
                format!("the exporting process has {MOST_CONNECTIONS} importers, which is the maximum: close imports in other processes"),
            );
        }
        connections.push(Arc::new(connection));
    }

    /// Answers the pending requests of an importer. Returns false if the importer has exited or has violated the protocol.
    fn listen_to(&self, connection: &Connection) -> bool {
        loop {
            let answer = match Packet::receive(&connection.socket, None) {
                Ok(Some(request)) if request.subject == Subject::Import => self.answer(connection, request),
                Ok(Some(packet)) if packet.subject == Subject::Leave => {
                    self.leave(packet.key, packet.secret, packet.departure, connection.process);
                    continue;
                }
                Err(Errno::AGAIN) => return true,
                Err(Errno::MFILE) => {
                    // The request was lost, so its number is unknown. An answer with number 0 applies to the importer's pending request.
                    let text = "the exporting process is out of file descriptors (EMFILE): raise its `ulimit -n`".into();
                    log::warn!(
                        "the connection of an importing process failed: this process is out of file descriptors (EMFILE); raise `ulimit -n`"
                    );
                    Some(Packet { text, ..Packet::new(Subject::Refused, 0, AllocationKey { backend: 0, allocation: 0 }) })
                }
                Ok(Some(_)) | Ok(None) | Err(_) => return false,
            };
            // An importer sends one request and then waits, so the socket can hold the answer. If not, the connection is closed.
            if answer.is_none_or(|answer| answer.send(&connection.socket, None).is_err()) {
                return false;
            }
        }
    }

    /// Returns the answer to a request of an importer, or `None` if the importer has violated the protocol.
    fn answer(&self, connection: &Connection, request: Packet) -> Option<Packet> {
        let Packet { number, key, slot, secret, .. } = request;
        let gone = || Some(Packet::new(Subject::Gone, number, key));
        // The driver is called while this thread holds no lock, because the call may take long or block.
        let Some(export) = self.find(key, secret) else { return gone() };
        if connection.board.get().is_none() {
            let board = Board::open(&request.board?).ok()?;
            let _ = connection.board.set(board);
        }
        match export.backend.export(&export.allocation) {
            Ok(shared) => {
                // If another thread withdraws the export at the same time, it either has done so before this lock, or will find the import
                // in the table.
                let exports = lock(&self.exports);
                let Some(party) = exports.by_key.get(&key).and_then(|exported| exported.holder(secret)) else { return gone() };
                lock(&connection.imported).insert((key, party.as_ref().map(|party| party.number)), slot, number);
                Some(Packet { shared: Some(shared), secret: self.origin.proof(), ..Packet::new(Subject::Granted, number, key) })
            }
            Err(error) => Some(Packet { text: error.to_string(), ..Packet::new(Subject::Refused, number, key) }),
        }
    }

    /// Returns the export with this key and secret. Returns `None` if there is no such export, or if its memory no longer exists.
    fn find(&self, key: AllocationKey, secret: Secret) -> Option<Export> {
        let exported = lock(&self.exports).by_key.get(&key).filter(|exported| exported.holder(secret).is_some()).cloned()?;
        self.check(key, exported)
    }

    /// Returns the export if its memory still exists. Otherwise withdraws the export and returns `None`.
    fn check(&self, key: AllocationKey, exported: ExportRecord) -> Option<Export> {
        if !exported.export.lives() {
            self.withdraw(key);
            return None;
        }
        Some(exported.export)
    }

    /// Ends the export of an allocation, and notifies the importers that have mapped the allocation.
    fn withdraw(&self, key: AllocationKey) {
        let withdrawn = lock(&self.exports).by_key.remove(&key);
        if withdrawn.is_some() {
            self.tell(key);
        }
    }

    /// Notifies every importer of this allocation, through its board (shared table), that the memory was freed.
    fn tell(&self, key: AllocationKey) {
        for connection in lock(&self.connections).iter() {
            let mut imported = lock(&connection.imported);
            let granted: Vec<_> = imported.of(key).collect();
            for (granted, (slot, request)) in granted {
                imported.remove(granted);
                connection.board.get().into_iter().for_each(|board| board.withdraw(slot, request));
            }
        }
    }

    /// Records that an importer stops using an allocation, and ends the waits that can no longer complete because of this.
    fn leave(&self, key: AllocationKey, secret: Secret, departure: Departure, process: i32) {
        let exported = lock(&self.exports).by_key.get(&key).cloned();
        match exported.as_ref().and_then(|exported| Some((&exported.export, exported.holder(secret)?))) {
            Some((export, Some(party))) => self.lose_party(export, Some(party), departure, process),
            Some((export, None)) => {
                let peer = LostPeer { raises: Some(departure.steps), ..LostPeer::of(process, None) };
                self.fail_waits(export, None, peer);
            }
            None => {}
        }
    }

    /// Ends the waits for counters that an importer should have set, because the importer has exited or has stopped using the allocation.
    /// Waits that can still complete are not ended. `party` is `None` if the importer has no secret of its own.
    fn lose_party(&self, export: &Export, party: Option<&Party>, departure: Departure, process: i32) {
        let left = party.map(|party| (party.on_leave)(departure, process));
        if left != Some(None) {
            // Each flag for which streams wait has a recorded signaller. Kernels are stopped through a counter that any process may set.
            let number = party.filter(|_| !departure.streams_go_on).map(|party| party.number);
            self.fail_waits(export, number, LostPeer::of(process, left.flatten()));
        }
    }

    /// Ends the waits for counters that an importer sets in an allocation. This applies to current waits and to those of later steps.
    /// `party` is the importer's number, or `None` if all importers are meant.
    fn fail_waits(&self, export: &Export, party: Option<u32>, peer: LostPeer) {
        log::debug!("{:#x}: {peer}", export.allocation.base);
        export.backend.fail_waits(&export.allocation, party, peer);
        let backend = Arc::downgrade(&export.backend);
        let mut tended = lock(&self.tended);
        if !tended.iter().any(|other| other.ptr_eq(&backend)) {
            tended.push(backend);
        }
    }

    /// Removes the connection of an importer that has exited. Ends the waits for counters that this importer sets in memory of this
    /// process.
    fn lose(&self, connection: &Arc<Connection>) {
        lock(&self.connections).retain(|other| !Arc::ptr_eq(other, connection));
        let imported = std::mem::take(&mut lock(&connection.imported).by_key);
        let left = imported.into_iter().filter(|(_, place)| !connection.has_closed(*place));
        for ((key, number), _) in left {
            let Some(exported) = lock(&self.exports).by_key.get(&key).cloned() else { continue };
            let party = exported.granted.iter().flat_map(|(_, party)| party).find(|party| Some(party.number) == number);
            self.lose_party(&exported.export, party, Departure::ENDED, connection.process);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_used_again_forgets_what_was_there_and_nothing_else() {
        let key = |allocation| (AllocationKey { backend: 1, allocation }, None);
        let mut imported = ImportTable::default();
        imported.insert(key(1), 0, 1);
        imported.insert(key(2), 1, 2);
        // The importer has closed both allocations. It imports the first one again in the slot of the second, and a third one in the slot
        // of the first.
        imported.insert(key(1), 1, 3);
        imported.insert(key(3), 0, 4);
        assert_eq!((imported.by_key.len(), imported.by_slot.len()), (2, 2));
        assert_eq!(imported.remove(key(2)), None);
        assert_eq!(imported.remove(key(1)), Some((1, 3)));
        assert_eq!(imported.remove(key(3)), Some((0, 4)));
        assert!(imported.by_slot.is_empty());
    }
}
