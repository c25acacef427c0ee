//! Threads of the library, which leave the program's signals to the program's threads.

use crate::remaining;
use std::mem::MaybeUninit;

/// Signals that a thread raises by a fault of its own. Blocked, they would end the process past the program's handler (`sigaction(2)`).
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Calls `start` with every signal blocked but those of faults, so that threads which it starts block them for as long as they live. A signal that
/// comes meanwhile reaches the calling thread afterwards. All threads of the library are started here, and with the first the one that lets the
/// process end when no other is left (`remaining`).
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let (mut blocked, mut before) = (MaybeUninit::<libc::sigset_t>::zeroed(), MaybeUninit::<libc::sigset_t>::zeroed());
    // SAFETY: both sets are valid for the calls; an integer array, for which zero is a value, where a call should fail.
    let has_blocked = unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        FAULTS.iter().for_each(|signal| _ = libc::sigdelset(blocked.as_mut_ptr(), *signal));
        libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr()) == 0
    };
    remaining::watch();
    let started = start();
    if has_blocked {
        // SAFETY: the call above has filled it.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    started
}
