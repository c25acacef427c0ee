//! What a child of `fork` inherits and must leave alone.
//!
//! A child has a copy of this library's memory, but not its threads and, on CUDA, not the driver; locks may be held by threads that it does
//! not have. So every object knows the process that made it (its generation, counted in forks), and no other process uses, locks or frees
//! it. A child closes the sockets at once: while it held them, peers of the parent would not notice the parent's end.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Result;
use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Sockets that are open. No child of `fork` is made while this is locked.
static SOCKETS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// The generation of this process: it differs from those of all processes from which this one was forked. Takes no system call.
pub fn generation() -> u32 {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers live as long as the program; `in_child` does only what a child of `fork` may do.
        let code = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if code != 0 {
            log::warn!("pthread_atfork: code {code}; children of fork must not use this library");
        }
    });
    GENERATION.load(Ordering::Relaxed)
}

/// Has `work` called when the process ends, by `exit` or the end of `main`. A child of `fork` inherits that: `work` looks at the generation first.
pub fn at_exit(work: extern "C" fn()) {
    // SAFETY: a function that lives as long as the program.
    if unsafe { libc::atexit(work) } != 0 {
        log::debug!("atexit: no room for one more");
    }
}

/// The lock of [`SOCKETS`] while the process forks.
struct Forking(UnsafeCell<Option<MutexGuard<'static, BTreeSet<RawFd>>>>);

// SAFETY: only whoever holds the lock that is in it, or is about to put there, touches it.
unsafe impl Sync for Forking {}

static FORKING: Forking = Forking(UnsafeCell::new(None));

fn sockets() -> MutexGuard<'static, BTreeSet<RawFd>> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before() {
    let held = sockets();
    // SAFETY: this thread holds the lock.
    unsafe { *FORKING.0.get() = Some(held) };
}

extern "C" fn in_parent() {
    // SAFETY: this thread has taken the lock in `before`.
    drop(unsafe { (*FORKING.0.get()).take() });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as above; the child is this thread.
    let Some(mut held) = (unsafe { (*FORKING.0.get()).take() }) else { return };
    for socket in held.iter() {
        // SAFETY: a descriptor of ours, which nothing in this process closes: what owns it is of another generation.
        unsafe { libc::close(*socket) };
    }
    held.clear();
}

/// A descriptor that a child of `fork` does not get.
#[derive(Debug)]
pub struct Socket {
    descriptor: ManuallyDrop<OwnedFd>,
    generation: u32,
}

impl Socket {
    /// What `make` returns, which must not wait.
    pub fn make(make: impl FnOnce() -> Result<OwnedFd>) -> Result<Socket> {
        let generation = generation();
        let mut open = sockets();
        let descriptor = make()?;
        open.insert(descriptor.as_raw_fd());
        Ok(Socket { descriptor: ManuallyDrop::new(descriptor), generation })
    }

    /// Whether it is open in this process, and not only in one from which this one was forked.
    pub fn is_here(&self) -> bool {
        self.generation == generation()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A child has closed it, and another file may have its number.
        if self.is_here() {
            let mut open = sockets();
            open.remove(&self.descriptor.as_raw_fd());
            // SAFETY: it is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

/// So many forks deep each process has its own value of an [`OfProcess`]; one deeper, it gets that of the first process.
pub const DEPTH: usize = 16;

/// A value that each process has for itself, because a parent's may stay locked for ever in a child.
pub struct OfProcess<T> {
    each: [OnceLock<T>; DEPTH],
    make: fn() -> T,
}

impl<T> OfProcess<T> {
    /// Made by `make` when a process first uses it.
    pub const fn new(make: fn() -> T) -> OfProcess<T> {
        OfProcess { each: [const { OnceLock::new() }; DEPTH], make }
    }

    /// This process's.
    pub fn get(&self) -> &T {
        self.each[generation() as usize % DEPTH].get_or_init(self.make)
    }
}
