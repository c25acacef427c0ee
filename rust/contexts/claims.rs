//! GPUs that groups of processes have assigned to this process. A later group of the same context offers no others, so that two groups do not
//! use one GPU for different processes.

use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::sync::{Arc, Weak};

/// GPUs that the groups of a context have assigned to this process, oldest group first.
#[derive(Debug, Default)]
pub struct Claims(Mutex<Vec<Weak<GpuClaim>>>);

/// GPUs that a group of processes has assigned to this process, while the group exists.
#[derive(Debug)]
pub struct GpuClaim(Vec<DeviceId>);

impl Claims {
    /// Records the GPUs that a group of processes has assigned to this process. The group keeps the returned object.
    pub fn add(&self, gpus: Vec<DeviceId>) -> Arc<GpuClaim> {
        let claim = Arc::new(GpuClaim(gpus));
        let mut claims = lock(&self.0);
        claims.retain(|other| other.strong_count() > 0);
        claims.push(Arc::downgrade(&claim));
        claim
    }

    /// Returns the GPUs that the oldest existing group has assigned to this process. Returns no GPU if there is no group, or if that group
    /// has assigned no GPU to this process.
    pub fn oldest(&self) -> Vec<DeviceId> {
        let oldest = lock(&self.0).iter().find_map(Weak::upgrade);
        oldest.map_or_else(Vec::new, |claim| claim.0.clone())
    }
}
