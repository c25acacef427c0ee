//! Protects children of `fork` from using objects that belong to the parent.
//!
//! A child has a copy of this library's memory, but not its threads and, on CUDA, not the driver. Threads that do not exist in the child
//! may have held locks at the time of the fork. Every object therefore records the generation (a number that changes with each fork) of the
//! process that created it. No other process uses, locks or frees the object. A child closes the sockets immediately. If it kept them open,
//! peers of the parent would not notice the parent's exit.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Result;
use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Descriptors of all open sockets of this library. `fork` waits while a thread holds this lock.
static SOCKETS: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// Returns the generation of this process, a number that differs from the generations of all its ancestors. Only the first call makes a
/// system call.
pub fn generation() -> u32 {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: the handlers live as long as the program. `in_child` does only what is allowed in a child of `fork`.
        let code = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if code != 0 {
            log::warn!("pthread_atfork failed with code {code}; children of fork must not use mpgpu");
        }
    });
    GENERATION.load(Ordering::Relaxed)
}

/// Registers `work` to be called when the process calls `exit` or returns from `main`. A child of `fork` inherits the registration, so
/// `work` must first check the generation of the process.
pub fn at_exit(work: extern "C" fn()) {
    // SAFETY: the function lives as long as the program.
    if unsafe { libc::atexit(work) } != 0 {
        log::debug!("atexit failed: it accepts no more functions");
    }
}

/// Guard of the lock [`SOCKETS`], stored here while this process forks.
struct Forking(UnsafeCell<Option<MutexGuard<'static, BTreeSet<RawFd>>>>);

// SAFETY: only the thread that holds the lock stored inside, or is about to store it, accesses the cell.
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
    // SAFETY: this thread acquired the lock in `before`.
    drop(unsafe { (*FORKING.0.get()).take() });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as in `in_parent`. The only thread of the child is a copy of the thread that called `before`.
    let Some(mut held) = (unsafe { (*FORKING.0.get()).take() }) else { return };
    for socket in held.iter() {
        // SAFETY: the descriptor belongs to this library. Nothing else in this process closes it, because its owner is of another
        // generation.
        unsafe { libc::close(*socket) };
    }
    held.clear();
}

/// Socket or other descriptor that is closed in a child of `fork`.
#[derive(Debug)]
pub struct Socket {
    descriptor: ManuallyDrop<OwnedFd>,
    generation: u32,
}

impl Socket {
    /// Creates a socket from the descriptor that `make` returns. `make` must not block, because forks wait for it.
    pub fn make(make: impl FnOnce() -> Result<OwnedFd>) -> Result<Socket> {
        let generation = generation();
        let mut open = sockets();
        let descriptor = make()?;
        open.insert(descriptor.as_raw_fd());
        Ok(Socket { descriptor: ManuallyDrop::new(descriptor), generation })
    }

    /// True if the socket is open in this process. False if the process inherited the object by `fork`.
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
        // A child of `fork` has already closed the descriptor, and its number may now refer to another file.
        if self.is_here() {
            let mut open = sockets();
            open.remove(&self.descriptor.as_raw_fd());
            // SAFETY: the descriptor is not used again.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

/// Maximum number of generations of forked processes that have separate values of an [`OfProcess`]. A process that is `DEPTH` forks below
/// another process shares the value with that process.
pub const DEPTH: usize = 16;

/// Value that each process creates for itself, because a lock that a child inherits from its parent may stay locked forever.
pub struct OfProcess<T> {
    each: [OnceLock<T>; DEPTH],
    make: fn() -> T,
}

impl<T> OfProcess<T> {
    /// Creates a container for values. Each process creates its own value by calling `make` when it first uses the container.
    pub const fn new(make: fn() -> T) -> OfProcess<T> {
        OfProcess { each: [const { OnceLock::new() }; DEPTH], make }
    }

    /// Returns the value that belongs to this process, and creates it at the first use.
    pub fn get(&self) -> &T {
        self.each[generation() as usize % DEPTH].get_or_init(self.make)
    }
}
