//! Finds GPUs by UUID, and returns the topology of a set of GPUs. The set may include GPUs that are not visible to this process.

use crate::backend::uuid_of_number;
use crate::contexts::{Context, Error, PROBED, probe_files};
use crate::topology::{self, DeviceId, Topology};

/// UUID of a GPU, which is equal in all processes.
pub(super) type Uuid = [u8; 16];

/// Returns the number in this process of the GPU with this UUID, or `None` if the GPU is not visible to this process.
pub(super) fn device_of(context: &Context, uuid: &Uuid) -> Option<DeviceId> {
    (0..context.machine().gpu_count()).map(DeviceId::gpu).find(|gpu| context.backend().device_uuid(*gpu).is_ok_and(|here| here == *uuid))
}

/// Returns the topology of the GPUs with these UUIDs, in this order. Returns `None` if this process does not know the topology. If all of
/// these GPUs are visible, the result is the topology of the context's machine. Otherwise the result comes from a topology file or from
/// stored measurements that contain all of them, or else from NVML.
pub(super) fn topology_of(context: &Context, gpus: &[Uuid]) -> Result<Option<Topology>, Error> {
    let here: Option<Vec<u32>> = gpus.iter().map(|uuid| device_of(context, uuid).map(|gpu| gpu.0 as u32)).collect();
    if let Some(here) = here {
        return Ok(context.machine().topology().with_gpus(&here));
    }
    let name = context.config().topology.as_deref();
    let backend = context.backend();
    if backend.is_virtual() {
        let whole = topology::load(name.unwrap_or(topology::DEFAULT_PRESET))?;
        let number = |uuid: &Uuid| (0..128).find(|number| uuid_of_number(DeviceId::gpu(*number)) == *uuid);
        let numbers: Option<Vec<u32>> = gpus.iter().map(number).collect();
        return Ok(numbers.and_then(|numbers| whole.with_gpus(&numbers)));
    }
    let Some((identity, seen)) = backend.out_of_sight(gpus)? else { return Ok(None) };
    let now = probe_files::fingerprint(backend.name(), identity);
    let probed = context.config().cache_dir.as_deref().and_then(|directory| probe_files::kept(directory, &now));
    Ok(match (name.filter(|name| *name != PROBED), probed) {
        // Measurements of the visible GPUs alone are not sufficient here.
        (Some(name), _) if topology::load_probed(name).is_ok_and(|(_, record)| record.is_some()) => probe_files::named(name, &now).ok(),
        (_, Some((_, topology))) => Some(topology),
        _ => Some(topology::discover::topology(&seen)),
    })
}
