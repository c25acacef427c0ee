//! Defines the identity by which processes of a node recognize each other.

use super::error::IpcError;
use super::handle::Secret;
use rustix::io::Errno;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// Identity of a process. It includes the properties that must be equal for two processes to share memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Boot id of the kernel, which identifies the node until it restarts. All containers of a node have the same boot id.
    pub boot: [u8; 16],
    /// Inode number of the network namespace, in which the names of abstract sockets are visible. By default each container has its own
    /// namespace.
    pub network: u32,
    /// Effective user id of the process. Two processes can share memory only if their user ids are equal.
    pub user: u32,
    /// Process id, used in messages. It is meaningful only within the process's PID namespace.
    pub process: u32,
    /// Random number that the process draws when it first exports memory, so that another process with a reused process id is not mistaken
    /// for it. The first half is part of the socket's name, which every process can read. The second half is secret and proves the identity
    /// of the exporter to importers.
    pub token: [u8; 16],
}

impl ProcessIdentity {
    /// Returns the identity of this process, which includes the random number `token`. The first call fails if the process is out of file
    /// descriptors.
    pub fn here(token: [u8; 16]) -> Result<ProcessIdentity, IpcError> {
        static NODE: OnceLock<([u8; 16], u32)> = OnceLock::new();
        let (boot, network) = match NODE.get() {
            Some(known) => *known,
            None => {
                let text = match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
                    // An unreadable boot id must cause an error here. An empty boot id would make this process appear to be on another
                    // node.
                    Err(error) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                        return Err(IpcError::system("reading the boot id of the kernel")(Errno::MFILE));
                    }
                    text => text.unwrap_or_default(),
                };
                let network = std::fs::metadata("/proc/self/ns/net").map_or(0, |namespace| namespace.ino() as u32);
                *NODE.get_or_init(|| (boot_of(&text), network))
            }
        };
        Ok(ProcessIdentity { boot, network, user: rustix::process::geteuid().as_raw(), process: std::process::id(), token })
    }

    /// Returns an error with the reason if this process cannot share memory with the process that has this identity.
    pub fn check(&self) -> Result<(), IpcError> {
        let here = ProcessIdentity::here(self.token)?;
        let refuse = |why: String| Err(IpcError::NotSupported(why));
        if self.boot != here.boot {
            return refuse(format!("the handle is from another node (process {} there): move these bytes with MPI", self.process));
        }
        if self.network != here.network {
            return refuse(format!(
                "the handle is from another container (process {}; network namespace {}, here {}): run both processes in one container, \
                 or with the network of the host, or move these bytes with MPI",
                self.process, self.network, here.network
            ));
        }
        if self.user != here.user {
            return refuse(format!(
                "the handle is from a process of another user (process {}, user {}; here user {}): run both processes as the same user",
                self.process, self.user, here.user
            ));
        }
        Ok(())
    }

    /// Returns the name of the abstract socket at which the process with this identity accepts connections, without the leading NUL.
    pub(super) fn socket(&self) -> String {
        let mut name = String::from("mpgpu-");
        for byte in &self.token[..8] {
            name.push_str(&format!("{byte:02x}"));
        }
        name
    }

    /// Returns the proof of identity that an exporter sends when it grants a request to map memory. Only processes that hold a handle of
    /// the exporter know it.
    pub(super) fn proof(&self) -> Secret {
        let mut proof = [0; 16];
        proof[..8].copy_from_slice(&self.token[8..]);
        Secret(proof)
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.process)
    }
}

/// Parses the hexadecimal digits of a UUID. Returns zeros if the text is not a UUID.
fn boot_of(text: &str) -> [u8; 16] {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}
