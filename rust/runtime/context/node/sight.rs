//! GPUs by their names, those out of sight included: how they are joined.

use super::super::error::Error;
use super::super::lifetime::Context;
use super::super::open::PROBED;
use super::super::probe;
use super::Uuid;
use crate::backend::uuid_of_number;
use crate::cuda;
use crate::topology::{self, DeviceId, Topology};

impl Context {
    /// The number that a GPU has here; `None` for one out of sight.
    pub(super) fn device_of(&self, uuid: &Uuid) -> Option<DeviceId> {
        (0..self.machine().gpu_count()).map(DeviceId::gpu).find(|gpu| self.backend().device_uuid(*gpu).is_ok_and(|here| here == *uuid))
    }

    /// The machine with these GPUs, in this order, as far as this process can tell: what it plans for where it sees them all, else a topology
    /// or a probe that has them, else what NVML shows.
    pub(super) fn topology_of(&self, gpus: &[Uuid]) -> Result<Option<Topology>, Error> {
        let here: Option<Vec<u32>> = gpus.iter().map(|uuid| self.device_of(uuid).map(|gpu| gpu.0 as u32)).collect();
        if let Some(here) = here {
            return Ok(self.machine().topology().with_gpus(&here));
        }
        let name = self.config().topology.as_deref();
        match self.backend().name() {
            "host" => {
                let whole = topology::load(name.unwrap_or(topology::DEFAULT_PRESET))?;
                let number = |uuid: &Uuid| (0..128).find(|number| uuid_of_number(DeviceId::gpu(*number)) == *uuid);
                let numbers: Option<Vec<u32>> = gpus.iter().map(number).collect();
                Ok(numbers.and_then(|numbers| whole.with_gpus(&numbers)))
            }
            "cuda" => {
                let Some((identity, seen)) = cuda::discover::out_of_sight(gpus)? else { return Ok(None) };
                let now = probe::fingerprint("cuda", identity);
                let probed = self.config().cache_dir.as_deref().and_then(|directory| probe::kept(directory, &now));
                Ok(match (name.filter(|name| *name != PROBED), probed) {
                    // One that speaks of the GPUs in sight alone does not help here.
                    (Some(name), _) if topology::load_probed(name).is_ok_and(|(_, record)| record.is_some()) => {
                        probe::named(name, &now).ok()
                    }
                    (_, Some((_, topology))) => Some(topology),
                    _ => Some(topology::discover::topology(&seen)),
                })
            }
            _ => Ok(None),
        }
    }
}
