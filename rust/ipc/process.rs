//! Who a process is, seen from the others of its node.

use super::error::IpcError;
use super::handle::Secret;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// What two processes that share memory must have in common, and what identifies one process.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The boot id of the kernel: identifies the node until it restarts. Containers of a node share it.
    pub boot: [u8; 16],
    /// The network namespace, in which an abstract socket's name is known. Containers have one each unless asked otherwise.
    pub network: u32,
    /// The effective user.
    pub user: u32,
    /// The process's number, for people: it means something in its own container alone.
    pub process: u32,
    /// Drawn at random when the process first exports, so that a number used again is not the process of before. Half of it names the
    /// socket, which everybody can read; the other half is how an exporter shows importers that it is the one.
    pub token: [u8; 16],
}

impl ProcessIdentity {
    /// This process, with its token.
    pub fn here(token: [u8; 16]) -> ProcessIdentity {
        static NODE: OnceLock<([u8; 16], u32)> = OnceLock::new();
        let (boot, network) = *NODE.get_or_init(|| {
            let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let network = std::fs::metadata("/proc/self/ns/net").map_or(0, |namespace| namespace.ino() as u32);
            (boot_of(&text), network)
        });
        ProcessIdentity { boot, network, user: rustix::process::geteuid().as_raw(), process: std::process::id(), token }
    }

    /// Refuses what this process cannot reach, with the reason.
    pub fn check(&self) -> Result<(), IpcError> {
        let here = ProcessIdentity::here(self.token);
        let refuse = |why: String| Err(IpcError::NotSupported(why));
        if self.boot != here.boot {
            return refuse(format!("the handle is from another node (process {} there): move these bytes with MPI", self.process));
        }
        if self.network != here.network {
            return refuse(format!(
                "the handle is from another container (process {}; network namespace {}, here {}): run both in one, or with the host's \
                 network, or move these bytes with MPI",
                self.process, self.network, here.network
            ));
        }
        if self.user != here.user {
            return refuse(format!(
                "the handle is from a process of another user (process {}, user {}; here user {}): run both as one user",
                self.process, self.user, here.user
            ));
        }
        Ok(())
    }

    /// The name of the socket at which this process answers; abstract, so a leading NUL is understood.
    pub(super) fn socket(&self) -> String {
        let mut name = String::from("mpgpu-");
        for byte in &self.token[..8] {
            name.push_str(&format!("{byte:02x}"));
        }
        name
    }

    /// What an exporter sends with what it grants. Only those who hold a handle of it know this.
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

/// The hexadecimal digits of a UUID; zeros where it is none.
fn boot_of(text: &str) -> [u8; 16] {
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}
