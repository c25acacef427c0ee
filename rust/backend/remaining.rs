//! Handles signals that should end a process in which only threads of the library remain.
//!
//! A program may leave `main` by `pthread_exit`, and its other threads may also end. The process then continues with the library's threads.
//! They block all signals, so that no signal handler of the program runs on them, and a SIGTERM would stay pending forever. One thread of
//! the library therefore watches for such signals without accepting them. If a thread of the program accepts a signal, by a handler,
//! `sigwait` or a signalfd, it receives the signal as if the library did not exist. The watching thread unblocks a pending signal only if
//! no thread of the program is left. The signal then has the effect that the program has configured: it ends the process or calls a
//! handler.

use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Signals by which users and batch systems request a process to end.
const ENDING: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Stack size in bytes of the watching thread, which lists the threads of the process.
const STACK_BYTES: usize = 128 << 10;

/// Interval between two checks of a signal that stays pending because the program blocks it.
const PAUSE: Duration = Duration::from_secs(1);

/// Id of the process in which the watching thread runs; 0 if there is none. A child of `fork` inherits the value but not the thread.
static WATCHED: AtomicU32 = AtomicU32::new(0);

/// Starts the watching thread if this process has none. The caller must have blocked all signals. If the start fails, the next call tries
/// again.
pub fn watch() {
    let process = std::process::id();
    if WATCHED.swap(process, Ordering::Relaxed) == process {
        return;
    }
    let started = ending_signals().and_then(|signals| {
        let named = std::thread::Builder::new().name("mpgpu-ending".into()).stack_size(STACK_BYTES);
        named.spawn(move || serve(&signals))
    });
    if let Err(error) = started {
        WATCHED.store(0, Ordering::Relaxed);
        log::debug!("cannot start the thread that ends the process on SIGTERM when only threads of mpgpu are left: {error}");
    }
}

fn set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is valid for the calls, which fill it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        ENDING.iter().for_each(|signal| _ = libc::sigaddset(set.as_mut_ptr(), *signal));
        set.assume_init()
    }
}

/// Returns a descriptor that is readable while one of the signals is pending. No thread reads from it, so the signals stay pending.
fn ending_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is valid for the call.
    let descriptor = unsafe { libc::signalfd(-1, &set(), libc::SFD_CLOEXEC) };
    // SAFETY: the descriptor is new, and this function owns it.
    if descriptor < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }) }
}

fn serve(signals: &OwnedFd) {
    loop {
        match poll(&mut [PollFd::new(signals, PollFlags::IN)], None) {
            Ok(_) if is_alone() => accept(),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
        // Either the thread that receives a signal is about to accept it, or the program currently blocks it.
        std::thread::sleep(PAUSE);
    }
}

/// Returns true if all running threads of the process belong to the library.
fn is_alone() -> bool {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return false };
    tasks.flatten().all(|task| std::fs::read_to_string(task.path().join("stat")).map_or(true, |stat| !is_program(&stat)))
}

/// Returns true if a thread belongs to the program and has not ended. `stat` is the thread's line in the format of `proc(5)`, "7 (name) S
/// …".
fn is_program(stat: &str) -> bool {
    let Some((name, rest)) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')) else { return true };
    !name.starts_with("mpgpu-") && !rest.trim_start().starts_with(['Z', 'X'])
}

/// Accepts pending signals on the calling thread.
fn accept() {
    // SAFETY: the set is valid for the calls. A handler of the program may run, as it would on any thread that accepts the signal.
    unsafe {
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, &set(), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::is_program;

    #[test]
    fn threads_that_have_ended_and_those_of_the_library_are_not_the_program_s() {
        assert!(is_program("7 (a.out) S 1 7 7"));
        assert!(is_program("7 (odd) name) R 1 7 7"));
        assert!(!is_program("7 (a.out) Z 1 7 7"));
        assert!(!is_program("9 (mpgpu-copy) S 1 7 7"));
    }
}
