//! What the processes of a user have in flight through host memory of this node.
//!
//! Processes that plan alone meet in host memory, and each knows of its own copies only. So each context that might copy through host
//! memory has a slot of a file in `/dev/shm` and writes there until when it copies, and through which host domains. Entries end by
//! themselves, and the kernel takes back the lock of a process that is killed: nothing lasts that someone would have to clear away.
//!
//! The file is read and written, not mapped: whoever may open it may shorten it, which would kill a process that has it mapped. Nothing in
//! it is trusted. Wrong entries make plans take fewer or more paths.

use super::fork::Socket;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, lstat, open, unlink};
use rustix::io::{Errno, Result};
use rustix::process::{Resource, geteuid, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Contexts that can be known at a time.
pub const SLOTS: usize = 128;

/// Bytes of a slot: token, end and domains, each eight bytes in little-endian order, and eight of padding.
pub const SLOT_BYTES: usize = 32;

const BYTES: usize = SLOTS * SLOT_BYTES;

/// Nanoseconds: nobody says that he copies for longer. What says so is no entry.
pub const FURTHEST: u64 = 20_000_000_000;

/// Nanoseconds after its end for which an entry keeps its slot.
const KEPT: u64 = 1_000_000_000;

/// So often the file is opened while somebody who was the last removes it.
const TRIES: usize = 300;

/// Nanoseconds of a clock that all processes of the node share.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// What a context says of itself.
#[derive(Copy, Clone)]
struct Announcement {
    /// Whose it is, drawn at random; 0: nobody's.
    token: u64,
    /// When its copies end, by [`now`].
    until: u64,
    /// A bit for each host domain.
    domains: u64,
}

impl Announcement {
    const NONE: Announcement = Announcement { token: 0, until: 0, domains: 0 };

    fn decode(bytes: &[u8]) -> Announcement {
        let word = |at: usize| bytes[8 * at..8 * (at + 1)].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        Announcement { token: word(0), until: word(1), domains: word(2) }
    }

    fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.token, self.until, self.domains]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn is_free(&self, now: u64) -> bool {
        self.token == 0 || self.until.saturating_add(KEPT) <= now || self.until > now.saturating_add(FURTHEST)
    }

    fn is_in_flight(&self, now: u64) -> bool {
        self.token != 0 && (now + 1..=now.saturating_add(FURTHEST)).contains(&self.until)
    }
}

/// The file, opened by one context.
#[derive(Debug)]
pub struct TrafficPage {
    file: Socket,
    path: PathBuf,
    token: u64,
    /// The one that was this context's, or the first to be tried.
    slot: usize,
}

impl TrafficPage {
    /// The file of this user in `folder`, made if there is none. Refuses anything else of that name.
    pub fn open(folder: &Path) -> Result<TrafficPage> {
        // Beyond this limit the system would kill the process by SIGXFSZ instead of refusing.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < BYTES as u64) {
            return Err(Errno::FBIG);
        }
        let mut token = [0; 8];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
        let token = u64::from_le_bytes(token) | 1;
        let path = folder.join(format!("mpgpu-traffic-1-{}", geteuid().as_raw()));
        for _ in 0..TRIES {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let file = Socket::make(|| open(&path, flags, Mode::RUSR | Mode::WUSR))?;
            check(&fstat(&file)?)?;
            match flock(&file, FlockOperation::NonBlockingLockShared) {
                // Whoever was the last may have removed it meanwhile.
                Ok(()) if is_at(&file, &path) => return Ok(TrafficPage { file, path, token, slot: token as usize / 2 % SLOTS }),
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(error),
            }
        }
        Err(Errno::WOULDBLOCK)
    }

    /// Says that this context copies through `domains` until then, and returns how many others copy through one of them now. `None` where
    /// every slot is taken, so that the others do not know of this context.
    pub fn announce(&mut self, now: u64, until: u64, domains: u64) -> Result<Option<usize>> {
        let entries = self.entries()?;
        if entries[self.slot].token != self.token {
            // New here, or another took the slot while this context was silent.
            let mut slots = (0..SLOTS).map(|next| (self.slot + next) % SLOTS);
            let Some(free) = slots.find(|slot| entries[*slot].is_free(now)) else { return Ok(None) };
            self.slot = free;
        }
        self.write(Announcement { token: self.token, until, domains })?;
        let others = entries.iter().filter(|entry| entry.token != self.token && entry.domains & domains != 0);
        Ok(Some(others.filter(|entry| entry.is_in_flight(now)).count()))
    }

    fn entries(&self) -> Result<[Announcement; SLOTS]> {
        // What the file lacks is zeros.
        let mut bytes = [0; BYTES];
        rustix::io::pread(&self.file, &mut bytes, 0)?;
        Ok(std::array::from_fn(|slot| Announcement::decode(&bytes[slot * SLOT_BYTES..])))
    }

    fn write(&self, entry: Announcement) -> Result<()> {
        rustix::io::pwrite(&self.file, &entry.encode(), (self.slot * SLOT_BYTES) as u64).map(drop)
    }
}

impl Drop for TrafficPage {
    /// Takes the entry back. Whoever is the last to have the file open removes it.
    fn drop(&mut self) {
        if !self.file.is_here() {
            return;
        }
        if self.entries().is_ok_and(|entries| entries[self.slot].token == self.token) {
            let _ = self.write(Announcement::NONE);
        }
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&self.file, &self.path) {
            let _ = unlink(&self.path);
        }
    }
}

/// Refuses what this library has not made for this user.
fn check(file: &Stat) -> Result<()> {
    let mode = Mode::from_raw_mode(file.st_mode);
    let is_private = file.st_uid == geteuid().as_raw() && !mode.intersects(Mode::RWXG | Mode::RWXO);
    let is_file = FileType::from_raw_mode(file.st_mode) == FileType::RegularFile && file.st_nlink <= 1 && file.st_size <= BYTES as i64;
    if is_private && is_file { Ok(()) } else { Err(Errno::PERM) }
}

/// Whether the file still has its name.
fn is_at(file: &Socket, path: &Path) -> bool {
    let number = |stat: Stat| (stat.st_dev, stat.st_ino);
    let (here, there) = (fstat(file).map(number), lstat(path).map(number));
    here.is_ok() && here == there
}
