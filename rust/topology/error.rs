//! What can be wrong with a topology, each error with the entry, the value at fault and the remedy.

use super::check::{CAPACITY_RANGE, MAX_DEVICES, MAX_LINKS, MAX_SHARED, MAX_SWITCHES, MAX_TIME};
use super::file::MAX_FILE_BYTES;
use std::path::PathBuf;

/// Why a topology cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// Neither a preset nor a file.
    #[error(
        "topology {name:?} is no preset and no such file exists; presets are {presets}, anything else is taken as the path of a TOML file"
    )]
    NotFound {
        /// What was asked for.
        name: String,
        /// The presets, separated by commas.
        presets: String,
    },
    /// A file that is there but cannot be read.
    #[error("topology file {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// An error in a file that was read.
    #[error("topology file {}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<TopologyError>,
    },
    /// Text too long to be looked at.
    #[error("the topology has more than {MAX_FILE_BYTES} bytes of text; a node's description has a few kilobytes, check that this is one")]
    TooLong,
    /// Not TOML, an unknown key, a missing key, or a value of the wrong type. The text gives line, column and key.
    #[error("the topology is not valid: {0}")]
    Syntax(String),
    /// A name with characters that link references could not hold.
    #[error("{entry}: the name {name:?} must have 1 to 64 letters, digits, '_', '-' or '.'")]
    BadName {
        /// Where.
        entry: String,
        /// The name.
        name: String,
    },
    /// Two nodes or two shared resources of one name.
    #[error("{entry}: the name {name:?} is already taken by {taken_by}; give each its own")]
    NameTaken {
        /// Where.
        entry: String,
        /// The name.
        name: String,
        /// Who has it.
        taken_by: String,
    },
    /// `peer` where it means nothing.
    #[error("{entry}: `peer` says whether GPU-to-GPU copies pass a switch; remove it, or set kind = \"switch\"")]
    PeerOnDevice {
        /// Where.
        entry: String,
    },
    /// Both, or neither, of `between` and `one_way`.
    #[error(
        "{entry}: give either `between` (both directions) or `one_way` (first to second node), a list of [\"from\", \"to\"] pairs with \
         at least one"
    )]
    LinkEnds {
        /// Where.
        entry: String,
    },
    /// `bandwidth_back` on a link of one direction.
    #[error("{entry}: `bandwidth_back` belongs to `between`; a `one_way` link has no way back")]
    BandwidthBack {
        /// Where.
        entry: String,
    },
    /// A link to a node that the topology does not have.
    #[error("{entry}: there is no node {node}; declare it, or correct the name")]
    UnknownNode {
        /// Where.
        entry: String,
        /// What was named.
        node: String,
    },
    /// A link from a node to itself.
    #[error("{entry} joins a node to itself; copies inside a device need no link, remove it")]
    SelfLink {
        /// Which link.
        entry: String,
    },
    /// Two links of one kind between the same nodes in the same direction.
    #[error("{entry} is given twice; add the bandwidths up into one link, or give the second another kind")]
    DuplicateLink {
        /// Which link.
        entry: String,
    },
    /// A shared resource that names a link that is not there.
    #[error("{entry}: there is no link {link}; links are named \"from>to\", or \"from>to:kind\" where several kinds join the same nodes")]
    UnknownLink {
        /// Where.
        entry: String,
        /// What was named.
        link: String,
    },
    /// A shared resource that names two links at once.
    #[error("{entry}: {link} could be {first} or {second}; name the one meant")]
    AmbiguousLink {
        /// Where.
        entry: String,
        /// What was named.
        link: String,
        /// One reading.
        first: String,
        /// Another.
        second: String,
    },
    /// A shared resource that names a link twice.
    #[error("{entry}: the link {link} is listed twice; list it once")]
    RepeatedLink {
        /// Where.
        entry: String,
        /// The link.
        link: String,
    },
    /// A shared resource without links.
    #[error("{entry}: no link draws on it; list the links that share it, or remove it")]
    EmptyShared {
        /// Where.
        entry: String,
    },
    /// A bandwidth or capacity that is not a sensible number of bytes per second.
    #[error(
        "{entry}: {quantity} = {value:e} must be between {:e} and {:e}; it is in bytes per second, 45 GB/s is 45e9",
        CAPACITY_RANGE.start(), CAPACITY_RANGE.end()
    )]
    Capacity {
        /// Where.
        entry: String,
        /// Which key.
        quantity: &'static str,
        /// The value.
        value: f64,
    },
    /// A latency or cost that is not a sensible number of seconds.
    #[error("{entry}: {quantity} = {value:e} must be between 0 and {MAX_TIME}; it is in seconds, 2 us is 2e-6")]
    Time {
        /// Where.
        entry: String,
        /// Which key.
        quantity: &'static str,
        /// The value.
        value: f64,
    },
    /// An efficiency outside (0, 1].
    #[error(
        "costs: kernel_efficiency = {value:e} must be above 0 and at most 1; it is the part of a link's bandwidth that a kernel reaches"
    )]
    Efficiency {
        /// The value.
        value: f64,
    },
    /// A table `[probe]` that cannot be what a probe wrote.
    #[error("[probe]: {reason}")]
    Probe {
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// A file that cannot be written.
    #[error("topology file {}: it cannot be written: {reason}; name another file, or set XDG_CACHE_HOME to a directory that can be", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A file that was probed on another machine, or on this one as it was.
    #[error(
        "topology file {} is not of this machine as it is now: {reason}; probe again with `mpgpu probe`, or take the table [probe] out of the \
         file to use its figures all the same", path.display()
    )]
    Stale {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// No GPU and no host.
    #[error("the topology has no device; declare at least one node of kind \"gpu\" or \"host\"")]
    NoDevice,
    /// More of something than the library plans for.
    #[error(
        "the topology has {count} {what}; at most {MAX_DEVICES} devices, {MAX_SWITCHES} switches, {MAX_LINKS} directed links and \
         {MAX_SHARED} shared resources are allowed, a topology describes one node"
    )]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many.
        count: usize,
    },
}
