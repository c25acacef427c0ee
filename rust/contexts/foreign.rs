//! Limits the bytes that copies from or to memory of another process send through host memory, if the program itself has opened the memory
//! (for example by `cudaIpcOpenMemHandle`).
//!
//! The two processes plan their copies separately, and neither knows the copies of the other. If each process copies to the other's GPU,
//! the parts of the copies that pass through host memory slow each other down. Between two H200, such copies reach 0.83 of the rate of
//! direct copies with 9 % of the bytes through host memory in chunks of 1 MiB, and 1.055 with 6 % in chunks of 4 MiB.
//!
//! A *host path* is a path through host memory.

use crate::plan::{self, Options, PathPlan};
use crate::topology::DeviceId;
use std::sync::Arc;

/// Largest fraction of the bytes of a batch that may pass through host memory.
const MOST: f64 = 0.06;

/// Smallest size in bytes of the chunks that pass through host memory, except the last chunk of a path.
const LEAST_CHUNK: u64 = 4 << 20;

/// Number of plans that are checked: the given plan, and then plans that send fewer bytes through host memory. If none is within the
/// limits, the copies do not pass through host memory.
const TRIES: usize = 3;

/// Returns a plan whose host paths are within the limits, and its options. `planned` is the plan for `options`, and is returned if it is
/// within the limits. The function `plan` plans the same transfers with other options.
pub(super) fn limit<E>(
    mut planned: Arc<plan::Plan>,
    options: &Options,
    plan: impl Fn(&Options) -> Result<Arc<plan::Plan>, E>,
) -> Result<(Arc<plan::Plan>, Options), E> {
    let mut options = *options;
    for left in (0..TRIES).rev() {
        let bytes: u64 = planned.transfers.iter().map(|transfer| transfer.shape.bytes).sum();
        let through = host_bytes(&planned);
        let share = through as f64 / bytes.max(1) as f64;
        if share <= MOST
            && host_paths(&planned).all(|path| path.chunks == 1 && path.bytes >= LEAST_CHUNK || path.chunk_bytes >= LEAST_CHUNK)
        {
            return Ok((planned, options));
        }
        let most = (MOST * bytes as f64) as u64;
        if left == 0 || most < LEAST_CHUNK {
            break;
        }
        // `host_share` multiplies the bytes of the host paths. The planner then scales the bytes of all paths of a transfer so that their
        // sum is the size of the transfer. `factor` takes this into account: it changes the fraction of the host paths from `share` to
        // `wanted`. `wanted` is a little below the limit, because the bytes of a path are rounded.
        let wanted = share.min(0.97 * MOST);
        let factor = wanted * (1.0 - share) / (share * (1.0 - wanted));
        let mut tuned = options.tuned.unwrap_or_default();
        tuned.host_share = ((f64::from(tuned.host_share) * factor) as u16).max(*plan::WEIGHTS.start());
        let relayed =
            planned.transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter(|path| path.via.is_some_and(|via| !via.is_host()));
        let relay_chunks = options.relay_chunks.or(relayed.map(|path| path.chunks).max());
        options = Options { tuned: Some(tuned), chunk_bytes: Some(LEAST_CHUNK), host_chunks: None, relay_chunks, ..options };
        planned = plan(&options)?;
    }
    options.host_path = false;
    Ok((plan(&options)?, options))
}

/// Returns the paths of a plan that pass through host memory.
fn host_paths(planned: &plan::Plan) -> impl Iterator<Item = &PathPlan> {
    planned.transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter(|path| path.via.is_some_and(DeviceId::is_host))
}

/// Returns the number of bytes of a plan that pass through host memory.
fn host_bytes(planned: &plan::Plan) -> u64 {
    host_paths(planned).map(|path| path.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryKind;
    use crate::plan::Shape;
    use crate::topology::{Machine, preset};

    /// Plans a copy of this size from GPU 0 to GPU 1 within the limits. Returns the plan, and the plan without limits.
    fn planned(name: &str, bytes: u64) -> [Arc<plan::Plan>; 2] {
        let machine = Machine::new(preset(name).expect("a preset")).expect("well formed");
        let [src_device, dst_device] = [0, 1].map(DeviceId::gpu);
        let batch = [Shape { source: 0, dst_device, src_device, dst_kind: MemoryKind::Device, src_kind: MemoryKind::Device, bytes }];
        let plan = |options: &Options| plan::plan(&machine, &batch, options).map(Arc::new);
        let free = plan(&Options::default()).expect("planned");
        let (limited, options) = limit(free.clone(), &Options::default(), plan).expect("planned");
        assert!(
            Arc::ptr_eq(&limited, &free) || limited.program == plan(&options).expect("planned").program,
            "the options belong to the plan"
        );
        [limited, free]
    }

    #[test]
    fn a_small_part_passes_through_the_host_in_large_chunks() {
        for name in ["hgx-h200", "dgx1-v100", "beluga", "narval"] {
            for mib in [1, 8, 16, 64, 70, 100, 256, 1000, 4096] {
                let [limited, free] = planned(name, mib << 20);
                let through = host_bytes(&limited);
                assert!(through as f64 <= MOST * (mib << 20) as f64, "{name}, {mib} MiB: {through} bytes of the host paths");
                assert!(through <= host_bytes(&free), "{name}, {mib} MiB");
                for path in host_paths(&limited) {
                    assert!(path.bytes.min(path.chunk_bytes) >= LEAST_CHUNK, "{name}, {mib} MiB: {path:?}");
                }
            }
        }
    }

    #[test]
    fn large_copies_between_two_gpus_still_gain() {
        let [limited, free] = planned("hgx-h200", 256 << 20);
        assert!(host_bytes(&free) as f64 > MOST * f64::from(256 << 20), "without the limit, more bytes pass through the host");
        assert!(host_bytes(&limited) >= 3 * LEAST_CHUNK);
        assert!(limited.predicted < 0.97 * limited.one_path, "{} of {} s", limited.predicted, limited.one_path);
    }
}
