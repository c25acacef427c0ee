//! Ranks without MPI: they meet at a socket, whose path all of them know.
//!
//! Rank 0 listens, the others connect, and each allgather goes through rank 0. Only processes of the same user are let in.

use super::exchange::Allgather;
use rustix::net::sockopt::socket_peercred;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a rank waits for the others to come, or to say something. Ranks of a job start within seconds of each other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connections by which ranks tell each other what they have.
pub(super) struct Rendezvous {
    /// At rank 0 those of the others, in the order of ranks; elsewhere that of rank 0.
    peers: Vec<UnixStream>,
    rank: u32,
}

impl Rendezvous {
    /// Meets the other ranks at `path`. Blocks until all are there, for a minute at most.
    pub fn meet(path: &Path, rank: u32, ranks: u32) -> Result<Rendezvous, String> {
        let until = Instant::now() + PATIENCE;
        let failed = |what: &str| {
            let path = path.display().to_string();
            let what = what.to_owned();
            move |error: std::io::Error| format!("{what} {path}: {error}")
        };
        if rank == 0 {
            return Rendezvous::listen(path, ranks, until).map_err(failed("meeting the other ranks at"));
        }
        let mut stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                // Rank 0 has not come yet.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(failed("meeting rank 0 at")(error)),
            }
        };
        let greet = |stream: &mut UnixStream| {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(&rank.to_le_bytes())
        };
        greet(&mut stream).map_err(failed("meeting rank 0 at"))?;
        Ok(Rendezvous { peers: vec![stream], rank })
    }

    fn listen(path: &Path, ranks: u32, until: Instant) -> std::io::Result<Rendezvous> {
        let listener = match UnixListener::bind(path) {
            // Left by a job that was killed: nobody answers there.
            Err(error) if error.kind() == ErrorKind::AddrInUse && UnixStream::connect(path).is_err() => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        let came = Rendezvous::accept(&listener, ranks, until);
        let _ = std::fs::remove_file(path);
        came.map(|peers| Rendezvous { peers, rank: 0 })
    }

    fn accept(listener: &UnixListener, ranks: u32, until: Instant) -> std::io::Result<Vec<UnixStream>> {
        listener.set_nonblocking(true)?;
        let mut peers: Vec<Option<UnixStream>> = (1..ranks).map(|_| None).collect();
        while let Some(missing) = peers.iter().position(Option::is_none) {
            let (mut stream, _) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Err(std::io::Error::new(ErrorKind::TimedOut, format!("rank {} has not come", missing + 1)));
                }
                Err(error) => return Err(error),
            };
            if socket_peercred(&stream)?.uid != rustix::process::geteuid() {
                continue;
            }
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let mut number = [0; 4];
            stream.read_exact(&mut number)?;
            let number = u32::from_le_bytes(number);
            match number.checked_sub(1).and_then(|index| peers.get_mut(index as usize)) {
                Some(place @ None) => *place = Some(stream),
                _ => {
                    return Err(std::io::Error::other(format!("a second rank {number} has come, or one of more than {ranks}")));
                }
            }
        }
        Ok(peers.into_iter().flatten().collect())
    }

    fn exchange(&mut self, send: &[u8], receive: &mut [u8]) -> std::io::Result<()> {
        if self.rank > 0 {
            let root = &mut self.peers[0];
            root.write_all(send)?;
            return root.read_exact(receive);
        }
        let (own, others) = receive.split_at_mut(send.len());
        own.copy_from_slice(send);
        if !send.is_empty() {
            for (peer, room) in self.peers.iter_mut().zip(others.chunks_exact_mut(send.len())) {
                peer.read_exact(room)?;
            }
        }
        self.peers.iter_mut().try_for_each(|peer| peer.write_all(receive))
    }
}

impl Allgather for Rendezvous {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.exchange(send, receive).map_err(|error| {
            // So that the others do not wait for this one.
            self.peers.iter().for_each(|peer| drop(peer.shutdown(Shutdown::Both)));
            format!("a rank has gone, or says nothing for {} s: {error}", PATIENCE.as_secs())
        })
    }
}
