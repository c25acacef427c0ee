//! Starts the threads of the library with signals blocked, so that the program's signals are handled by the program's threads.

use crate::remaining;
use std::mem::MaybeUninit;

/// Signals that the system sends to a thread because of an error of the thread itself, such as an invalid memory access. If they were
/// blocked, they would end the process without calling the program's handler (`sigaction(2)`).
const FAULTS: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Calls `start` with all signals blocked except those that report faults of the thread. Threads that `start` creates inherit the blocked
/// signals for their whole lifetime. A signal that arrives during the call is delivered to the calling thread afterwards. All threads of
/// the library are started by this function. The first call also starts the thread that ends the process when no thread of the program is
/// left (`remaining`).
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
