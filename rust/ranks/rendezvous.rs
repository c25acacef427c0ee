//! Implements an allgather for ranks without MPI, over a Unix socket whose path all ranks know.
//!
//! Rank 0 listens and the other ranks connect. Each allgather goes through rank 0. Both sides of a connection ask the operating system for
//! the credentials of the peer. Only processes of the same user are accepted.

use super::exchange::{Allgather, check_rank};
use crate::contexts::Error;
use crate::ipc::fork::Socket;
use crate::ipc::{Credentials, patiently};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::symlink_metadata;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum time for which a rank waits until the others connect or send data. Ranks of a job start within seconds of each other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Magic number at the start of the first message on a connection. The rank and the number of ranks follow in this message. The last
/// character is the version of the protocol.
const MAGIC: [u8; 8] = *b"mpgpu-r1";
const GREETING: usize = 16;

/// Maximum number of connections on which no first message has arrived yet. They may belong to ranks or to unrelated processes.
const MOST_SILENT: usize = 64;

/// Maximum length in bytes of an error text that rank 0 sends.
const REASON: usize = 1024;

/// Connections of one rank to the other ranks.
pub(super) struct Rendezvous {
    /// Sockets to other ranks. Rank 0 has a socket for each other rank, in rank order. Each other rank has only the socket to rank 0.
    peers: Vec<Socket>,
    rank: u32,
    /// Reason why the connections were closed. `None` while they are open.
    ended: Option<String>,
}

impl Rendezvous {
    /// Connects this rank to the other ranks through the Unix socket at `path`. Blocks until all ranks are connected, for at most a minute.
    pub fn meet(path: &Path, rank: u32, ranks: u32) -> Result<Rendezvous, Error> {
        check_rank(rank, ranks)?;
        let until = Instant::now() + PATIENCE;
        let address = SocketAddrUnix::new(path).map_err(|error| {
            let bytes = path.as_os_str().len();
            refused(path, &format!("the path has {bytes} bytes, but the path of a socket must have 1 to 107 ({error}): use a shorter path"))
        })?;
        let peers = if rank == 0 {
            let listener = Listener::bind(path, &address)?;
            let mut peers: Vec<Option<Socket>> = (1..ranks).map(|_| None).collect();
            let came = accept(&listener.socket, &mut peers, ranks, until);
            let peers: Vec<Socket> = peers.into_iter().flatten().collect();
            came.and_then(|()| answer(&peers, &[], until)).map_err(|reason| {
                dismiss(&peers, &reason);
                failed(path, &reason)
            })?;
            peers
        } else {
            let root = connect(path, &address, until)?;
            let greeting = [MAGIC.as_slice(), &rank.to_le_bytes(), &ranks.to_le_bytes()].concat();
            // Rank 0 has been listening since before this rank connected, so it gets the full time again.
            let until = Instant::now() + PATIENCE;
            write(&root, &greeting, until).map_err(|error| failed(path, &lost(0, error)))?;
            hear(&root, &mut [], until).map_err(|reason| failed(path, &reason))?;
            vec![root]
        };
        Ok(Rendezvous { peers, rank, ended: None })
    }

    fn exchange(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        if self.rank > 0 {
            let root = &self.peers[0];
            // Rank 0 may have closed the connection and sent the reason. An error of the write is ignored, because the read reports that
            // reason.
            let _ = write(root, send, until);
            hear(root, receive, until)
        } else {
            let (own, others) = receive.split_at_mut(send.len());
            own.copy_from_slice(send);
            let rooms: Vec<&mut [u8]> = others.chunks_exact_mut(send.len().max(1)).collect();
            read(&self.peers, rooms, until).map_err(|(peer, error)| lost(peer + 1, error))?;
            answer(&self.peers, receive, until)
        }
    }
}

impl Allgather for Rendezvous {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        if let Some(reason) = &self.ended {
            return Err(format!("the ranks have closed their connections ({reason}): create the node object again on all ranks"));
        }
        self.exchange(send, receive).inspect_err(|reason| {
            // The other ranks are notified, so that they do not wait for this rank.
            dismiss(if self.rank == 0 { &self.peers } else { &[] }, reason);
            self.peers.clear();
            self.ended = Some(reason.clone());
        })
    }
}

/// Listening socket of rank 0. Dropping this value removes the socket's file.
struct Listener<'a> {
    socket: Socket,
    path: &'a Path,
    /// Device and inode numbers of the socket's file. They show whether another file has replaced it. `None` before the file exists.
    file: Option<(u64, u64)>,
}

impl Listener<'_> {
    fn bind<'a>(path: &'a Path, address: &SocketAddrUnix) -> Result<Listener<'a>, Error> {
        let system = |error: Errno| failed(path, &error.to_string());
        let socket = open().map_err(system)?;
        match rustix::net::bind(&socket, address) {
            Err(Errno::ADDRINUSE) => {
                check_left_over(path, address)?;
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(path, &error.to_string())),
                    _ => rustix::net::bind(&socket, address).map_err(system)?,
                }
            }
            bound => bound.map_err(system)?,
        }
        let listener = Listener { socket, path, file: symlink_metadata(path).ok().map(|file| (file.dev(), file.ino())) };
        rustix::net::listen(&listener.socket, 1024).map_err(system)?;
        Ok(listener)
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        let found = symlink_metadata(self.path).ok().map(|file| (file.dev(), file.ino()));
        if found.is_some() && found == self.file {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

/// Returns an error if a file exists at `path`, unless it is a socket of this user on which no process listens. A job that was killed
/// leaves such a socket.
fn check_left_over(path: &Path, address: &SocketAddrUnix) -> Result<(), Error> {
    check_kind(path)?;
    let socket = open().map_err(|error| failed(path, &error.to_string()))?;
    match rustix::net::connect(&socket, address) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(()),
        Ok(()) => {
            let who = Credentials::of_peer(&socket).map_or("a process".into(), |peer| peer.to_string());
            Err(refused(
                path,
                &format!("{who} already listens at this path, perhaps as rank 0 of another job: give each job a path of its own"),
            ))
        }
        Err(error) => Err(refused(path, &format!("another process may listen at this path ({error}): give each job a path of its own"))),
    }
}

/// Returns an error if a file exists at `path` that is not a socket of this user.
fn check_kind(path: &Path) -> Result<(), Error> {
    let Ok(file) = symlink_metadata(path) else { return Ok(()) };
    let user = rustix::process::geteuid().as_raw();
    if !file.file_type().is_socket() {
        return Err(refused(path, "the path is in use by a file that is not a socket: name an unused path"));
    }
    if file.uid() != user {
        return Err(refused(
            path,
            &format!(
                "the path is a socket of user {}, but this process runs as user {user}: name a path in a folder of your own",
                file.uid()
            ),
        ));
    }
    Ok(())
}

fn open() -> rustix::io::Result<Socket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Socket::make(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None))
}

/// Connects to rank 0. Waits until rank 0 listens, but not longer than until the time `until`.
fn connect(path: &Path, address: &SocketAddrUnix, until: Instant) -> Result<Socket, Error> {
    let socket = open().map_err(|error| failed(path, &error.to_string()))?;
    loop {
        match rustix::net::connect(&socket, address) {
            Ok(()) => break,
            Err(Errno::INTR) => continue,
            // Rank 0 does not listen yet, or its backlog is full. If the socket is left over from a job that was killed, rank 0 removes it.
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => check_kind(path)?,
            Err(error) => return Err(failed(path, &error.to_string())),
        }
        if Instant::now() >= until {
            return Err(failed(path, &format!("rank 0 did not start to listen within {} s", PATIENCE.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let listens = Credentials::of_peer(&socket).map_err(|error| failed(path, &error.to_string()))?;
    if listens.user != rustix::process::geteuid().as_raw() {
        let user = listens.user;
        let reason = format!("{listens} (user {user}) listens at this path and is not trusted: name a path in a folder of your own");
        return Err(refused(path, &reason));
    }
    Ok(socket)
}

/// Accepted connection whose first message has not arrived completely.
struct Newcomer {
    socket: Socket,
    said: [u8; GREETING],
    bytes: usize,
}

/// Accepts connections until every rank is connected. Unrelated processes may connect too. Their connections are ignored, even if they
/// close, stay silent or send arbitrary data.
fn accept(listener: &Socket, peers: &mut [Option<Socket>], ranks: u32, until: Instant) -> Result<(), String> {
    let mut newcomers: Vec<Newcomer> = Vec::new();
    while let Some(missing) = peers.iter().position(Option::is_none) {
        let seated: Vec<usize> = (0..peers.len()).filter(|index| peers[*index].is_some()).collect();
        let of_peers = seated.iter().filter_map(|index| peers[*index].as_ref());
        let sockets = std::iter::once(listener).chain(of_peers).chain(newcomers.iter().map(|newcomer| &newcomer.socket));
        let mut watched: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        if !wait(&mut watched, until).map_err(|error| error.to_string())? {
            return Err(format!("rank {} did not connect within {} s", missing + 1, PATIENCE.as_secs()));
        }
        let has_news: Vec<bool> = watched.iter().map(|polled| !polled.revents().is_empty()).collect();
        drop(watched);
        // A connected rank sends nothing until all are connected, so a readable socket here means that the rank has closed the connection.
        if let Some(gone) = seated.iter().zip(&has_news[1..]).position(|(_, has_news)| *has_news) {
            return Err(lost(seated[gone] + 1, Errno::CONNRESET));
        }
        let mut news = has_news[1 + seated.len()..].iter();
        for mut newcomer in std::mem::take(&mut newcomers) {
            if news.next() == Some(&true) && !newcomer.listen() {
                continue;
            }
            if newcomer.bytes < GREETING {
                newcomers.push(newcomer);
            } else if let Some((number, all)) = newcomer.rank() {
                let place = number.checked_sub(1).and_then(|index| peers.get_mut(index as usize));
                let reason = match place {
                    Some(place @ None) if all == ranks => {
                        *place = Some(newcomer.socket);
                        continue;
                    }
                    Some(Some(_)) if all == ranks => {
                        format!("a second rank {number} has connected: give each rank its own number, and each job its own path")
                    }
                    _ => {
                        format!(
                            "rank {number} of {all} has connected, but rank 0 is one of {ranks}: pass the same number of ranks on all ranks"
                        )
                    }
                };
                dismiss(&[newcomer.socket], &reason);
                return Err(reason);
            }
        }
        if has_news[0] {
            newcomers.extend(let_in(listener)?);
            if newcomers.len() > MOST_SILENT {
                newcomers.remove(0);
            }
        }
    }
    Ok(())
}

/// Accepts the next connection. Returns `None` if the peer is a process of another user.
fn let_in(listener: &Socket) -> Result<Option<Newcomer>, String> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match Socket::make(|| rustix::net::accept_with(listener, flags)) {
        Ok(socket) => {
            let is_ours = Credentials::of_peer(&socket).is_ok_and(|peer| peer.user == rustix::process::geteuid().as_raw());
            Ok(is_ours.then_some(Newcomer { socket, said: [0; GREETING], bytes: 0 }))
        }
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

impl Newcomer {
    /// Reads as much of the connection's first message as has arrived. Returns false if the connection was closed.
    fn listen(&mut self) -> bool {
        match rustix::net::recv(&self.socket, &mut self.said[self.bytes..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => false,
            Ok((bytes, _)) => {
                self.bytes += bytes;
                true
            }
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }

    /// Returns the rank and the number of ranks from the first message of the connection. `None` if the message is not from a rank.
    fn rank(&self) -> Option<(u32, u32)> {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| self.said[at + byte]));
        (self.said[..8] == MAGIC).then(|| (number(8), number(12)))
    }
}

/// Waits until one of the sockets is readable. Returns false on a time-out.
fn wait(watched: &mut [PollFd<'_>], until: Instant) -> rustix::io::Result<bool> {
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).map_err(|_| Errno::INVAL)?;
        match poll(watched, Some(&left)) {
            Err(Errno::INTR) => {}
            ready => return ready.map(|ready| ready > 0),
        }
    }
}

/// Fills each buffer with data from the socket at the same index. On an error, returns the index of the socket that was closed or sent no
/// data in time.
fn read(sockets: &[Socket], mut rooms: Vec<&mut [u8]>, until: Instant) -> Result<(), (usize, Errno)> {
    loop {
        let mut open = Vec::new();
        for (index, (socket, room)) in sockets.iter().zip(&mut rooms).enumerate() {
            while !room.is_empty() {
                match rustix::net::recv(socket, &mut **room, RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return Err((index, Errno::CONNRESET)),
                    Ok((bytes, _)) => *room = &mut std::mem::take(room)[bytes..],
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err((index, error)),
                }
            }
            if !room.is_empty() {
                open.push(index);
            }
        }
        let Some(first) = open.first() else { return Ok(()) };
        let mut watched: Vec<PollFd<'_>> = open.iter().map(|index| PollFd::new(&sockets[*index], PollFlags::IN)).collect();
        if !wait(&mut watched, until).map_err(|error| (*first, error))? {
            return Err((*first, Errno::TIMEDOUT));
        }
    }
}

fn write(socket: &Socket, mut bytes: &[u8], until: Instant) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        // A closed connection is reported as an error and not by SIGPIPE.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = patiently(socket, PollFlags::OUT, Some(until), || rustix::net::send(socket, bytes, flags));
        bytes = &bytes[sent.map_err(|error| if error == Errno::AGAIN { Errno::TIMEDOUT } else { error })?..];
    }
    Ok(())
}

/// Sends data from rank 0 to all other ranks.
fn answer(peers: &[Socket], bytes: &[u8], until: Instant) -> Result<(), String> {
    peers.iter().enumerate().try_for_each(|(peer, socket)| {
        let sent = write(socket, &0_u32.to_le_bytes(), until).and_then(|()| write(socket, bytes, until));
        sent.map_err(|error| lost(peer + 1, error))
    })
}

/// Sends an error text from rank 0 to all other ranks. Text that does not fit into the socket's buffer is dropped.
fn dismiss(peers: &[Socket], reason: &str) {
    let text = &reason.as_bytes()[..reason.len().min(REASON)];
    let frame = [&(text.len() as u32).to_le_bytes(), text].concat();
    for peer in peers {
        let _ = write(peer, &frame, Instant::now());
    }
}

/// Reads the answer of rank 0 into the buffer `room`. If rank 0 has sent an error text instead of an answer, returns an error with this
/// text.
fn hear(root: &Socket, room: &mut [u8], until: Instant) -> Result<(), String> {
    let read = |room: &mut [u8]| read(std::slice::from_ref(root), vec![room], until).map_err(|(_, error)| lost(0, error));
    let mut length = [0; 4];
    read(&mut length)?;
    match u32::from_le_bytes(length) as usize {
        0 => read(room),
        bytes => {
            let mut text = [0; REASON];
            let text = &mut text[..bytes.min(REASON)];
            read(text)?;
            Err(String::from_utf8_lossy(text).into_owned())
        }
    }
}

fn lost(rank: usize, error: Errno) -> String {
    match error {
        Errno::TIMEDOUT => format!("rank {rank} has sent nothing for {} s", PATIENCE.as_secs()),
        Errno::CONNRESET | Errno::PIPE => format!("rank {rank} has exited or closed its connection"),
        error => format!("rank {rank}: {error}"),
    }
}

fn failed(path: &Path, reason: &str) -> Error {
    Error::Allgather(format!("connecting to the other ranks at {}: {reason}", path.display()))
}

fn refused(path: &Path, reason: &str) -> Error {
    Error::NodeArgument { argument: c"socket", reason: format!("socket={}: {reason}", path.display()) }
}
