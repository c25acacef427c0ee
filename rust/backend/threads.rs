//! Threads of the library, which leave the program's signals to the program's threads.

use crate::remaining;
use std::mem::MaybeUninit;

/// Signals that a thread raises by its own fault. If they were blocked, they would end the process without calling the program's handler
/// (`sigaction(2)`).
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Calls `start` with every signal blocked except those of faults, so that threads which it starts block them for their whole lifetime. A
/// signal that arrives meanwhile reaches the calling thread afterwards. All threads of the library are started here. The first call also
/// starts the thread that lets the process end when no other is left (`remaining`).
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let (mut blocked, mut before) = (MaybeUninit::<libc::sigset_t>::zeroed(), MaybeUninit::<libc::sigset_t>::zeroed());
    // SAFETY: both sets are valid for the calls. They are integer arrays, for which zero is a value if a call fails.
    let has_blocked = unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        FAULTS.iter().for_each(|signal| _ = libc::sigdelset(blocked.as_mut_ptr(), *signal));
        libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr()) == 0
    };
    remaining::watch();
    let started = start();
    if has_blocked {
        // SAFETY: the call above has filled the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    started
}
