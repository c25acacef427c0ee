//! GPUs that node groups (groups of all ranks of a node object) have assigned to this process. Node groups that are created later in the
//! same context use only the GPUs that the oldest one has assigned, so that two node groups do not assign one GPU to different processes.

use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::sync::{Arc, Weak};

/// GPUs that the node groups of a context have assigned to this process, oldest node group first.
#[derive(Debug, Default)]
pub struct Claims(Mutex<Vec<Weak<GpuClaim>>>);

/// GPUs that one node group has assigned to this process. The object exists as long as the node group.
#[derive(Debug)]
pub struct GpuClaim(Vec<DeviceId>);

impl Claims {
    /// Records the GPUs that a new node group has assigned to this process. The node group owns the returned object.
    pub fn add(&self, gpus: Vec<DeviceId>) -> Arc<GpuClaim> {
        let claim = Arc::new(GpuClaim(gpus));
        let mut claims = lock(&self.0);
        claims.retain(|other| other.strong_count() > 0);
        claims.push(Arc::downgrade(&claim));
        claim
    }

    /// Returns the GPUs that the oldest existing node group has assigned to this process. Returns no GPU if no node group exists, or if it
    /// has assigned no GPU to this process.
    pub fn oldest(&self) -> Vec<DeviceId> {
        let oldest = lock(&self.0).iter().find_map(Weak::upgrade);
        oldest.map_or_else(Vec::new, |claim| claim.0.clone())
    }
}
