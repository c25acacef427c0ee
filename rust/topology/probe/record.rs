//! What a file remembers of its probe, and of which machine it speaks.

use super::Residuals;

/// The version of what is measured and written. A file of another one is stale.
pub const FORMAT: u32 = 1;

/// A GPU of the machine that was probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// As NVML writes it; the virtual device's name on the host backend.
    pub uuid: String,
    /// As its maker calls it.
    pub name: String,
}

/// Which machine, and which software of it, a probe is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// `cuda` or `host`.
    pub backend: String,
    /// A hash of the machine's identity.
    pub host: String,
    /// The driver's version.
    pub driver: String,
    /// In the order of the topology's GPUs.
    pub gpus: Vec<Gpu>,
}

/// What a file remembers of its probe: the table `[probe]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// See [`FORMAT`].
    pub format: u32,
    /// The library's version.
    pub version: String,
    /// When, for people.
    pub date: Option<String>,
    /// Of which machine.
    pub fingerprint: Fingerprint,
    /// How many measurements.
    pub measurements: u32,
    /// How well the topology predicts sets that it was not fitted to.
    pub residuals: Residuals,
    /// What a reader should know.
    pub notes: Vec<String>,
}
