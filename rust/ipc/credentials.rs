//! Reads the user and the process at the other end of a Unix socket.

use rustix::fd::{AsFd, AsRawFd};
use rustix::io::{Errno, Result};
use std::fmt;

/// User and process at the other end of a Unix socket, as reported by the kernel (`SO_PEERCRED`).
///
/// Access decisions use only the user. The process id is 0 if the peer runs in a PID namespace that is not visible here, for example in
/// another container, so it is used only in messages. The exit of a peer is detected by the end of its connection.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Effective user id of the process at the other end of the socket.
    pub user: u32,
    /// Id of the process at the other end of the socket, in this PID namespace. 0 if the process is not visible in this namespace.
    pub process: i32,
}

impl Credentials {
    /// Reads the credentials of the process at the other end of `socket`.
    pub fn of_peer(socket: &impl AsFd) -> Result<Credentials> {
        let mut said = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // The process id type of rustix cannot be 0, and reading a 0 into it is undefined behaviour, so libc is called directly.
        // SAFETY: the descriptor is open during the call. The kernel writes at most `bytes` bytes into `said`, whose fields may hold any
        // value.
        let result = unsafe {
            libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut said).cast(), &raw mut bytes)
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
        }
        Ok(Credentials { user: said.uid, process: said.pid })
    }
}

impl fmt::Display for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            0 => write!(f, "a process of another PID namespace"),
            process => write!(f, "process {process}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_names_user_and_process_and_a_process_that_is_not_visible_is_said_to_be_so() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let peer = Credentials::of_peer(&here).expect("the kernel knows");
        assert_eq!(peer, Credentials { user: rustix::process::geteuid().as_raw(), process: std::process::id() as i32 });
        assert_eq!(Credentials { process: 0, ..peer }.to_string(), "a process of another PID namespace");
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert_eq!(Credentials::of_peer(&file), Err(Errno::NOTSOCK));
    }
}
