//! GPUs that groups of processes have assigned to this process. A later group of the same context offers no others, so that two groups do not
//! use one GPU for different processes.

use super::state::ContextState;
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::sync::{Arc, Weak};

/// Claims of a context, oldest first.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<Vec<Weak<GpuClaim>>>);

/// GPUs that a group of processes has assigned to this process, while the group exists.
#[derive(Debug)]
pub struct GpuClaim(Vec<DeviceId>);

impl ContextState {
    /// Records the GPUs that a group of processes has assigned to this process. The group keeps the returned object.
    pub fn claim_gpus(&self, gpus: Vec<DeviceId>) -> Arc<GpuClaim> {
        let claim = Arc::new(GpuClaim(gpus));
        let mut claims = lock(&self.claims.0);
        claims.retain(|other| other.strong_count() > 0);
        claims.push(Arc::downgrade(&claim));
        claim
    }

    /// Returns the GPUs that the oldest existing group has assigned to this process. Returns no GPU if there is no group, or if that group
    /// has assigned no GPU to this process.
    pub fn claimed_gpus(&self) -> Vec<DeviceId> {
        let oldest = lock(&self.claims.0).iter().find_map(Weak::upgrade);
        oldest.map_or_else(Vec::new, |claim| claim.0.clone())
    }
}
