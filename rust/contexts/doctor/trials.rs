//! Tries each system call that is needed to share memory and signals between processes. Containers deny some of these calls.

use crate::ipc::segment::SharedRegion;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use std::mem::MaybeUninit;

/// Result of trying one system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Description of the trial, including the name of the system call.
    pub what: &'static str,
    /// `Ok` if the system call succeeded; otherwise its error.
    pub result: Result<(), Errno>,
}

/// Tries all system calls that are needed and returns the result of each.
pub fn all() -> Vec<Trial> {
    let trial = |what, result: Result<(), Errno>| Trial { what, result };
    vec![
        trial("a memory file (memfd_create)", memory_file().map(drop)),
        trial("a seal on it (F_ADD_SEALS)", memory_file().and_then(|file| rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK))),
        trial("a shared mapping of it (mmap)", SharedRegion::new(4096).map(drop)),
        trial("an eventfd", eventfd(0, EventfdFlags::CLOEXEC).map(drop)),
        trial("an abstract Unix socket", connection().map(drop)),
        trial("a descriptor sent over it (SCM_RIGHTS)", pass_descriptor()),
    ]
}

fn memory_file() -> Result<OwnedFd, Errno> {
    rustix::fs::memfd_create("mpgpu-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
}

/// Returns the two ends of a connection over an abstract Unix socket.
fn connection() -> Result<[OwnedFd; 2], Errno> {
    let socket = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (listener, client) = (socket()?, socket()?);
    // The kernel chooses the abstract name. A name from the process number could collide with that of a process in another container.
    rustix::net::bind(&listener, &SocketAddrUnix::new_unnamed())?;
    rustix::net::listen(&listener, 1)?;
    let name = rustix::net::getsockname(&listener)?;
    rustix::net::connect(&client, &name)?;
    Ok([rustix::net::acceptfrom_with(&listener, SocketFlags::CLOEXEC)?.0, client])
}

fn pass_descriptor() -> Result<(), Errno> {
    let [here, there] = connection()?;
    let file = memory_file()?;
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    if !message.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS);
    }
    rustix::net::sendmsg(&here, &[IoSlice::new(b"file")], &mut message, SendFlags::NOSIGNAL)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    rustix::net::recvmsg(&there, &mut [IoSliceMut::new(&mut bytes)], &mut message, flags)?;
    let has_come = message.drain().any(|part| match part {
        RecvAncillaryMessage::ScmRights(files) => files.count() == 1,
        _ => false,
    });
    if has_come { Ok(()) } else { Err(Errno::BADMSG) }
}
