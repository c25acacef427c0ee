//! Divides a copy of pieces among the links of several GPUs. A helper is a GPU that copies a part of the pieces over its own link to host
//! memory. Its kernel accesses the memory of the other GPU directly, so no data is staged.

use super::device::{Caller, Mark, Primary};
use super::driver::{Driver, OutsideCapture, call, handle};
use super::kernel::Kernel;
use super::parts::Core;
use crate::backend::{BackendError, Endpoints, KernelBounds, Pieces, StreamHandle};
use crate::block_list::{BlockList, LAYERS_PER_LAUNCH};
use std::ops::Range;

/// Ranges for which one call has determined that kernels of the GPU can access them. Each entry has a flag that is true for host memory. A
/// look-up that finds a range moves it to the front.
#[derive(Default)]
pub(super) struct KnownRanges(Vec<(Range<u64>, bool)>);

impl KnownRanges {
    /// Returns true for host memory. Returns an error if kernels of the GPU cannot access the range.
    pub fn is_host(&mut self, core: &Core, gpu: usize, address: u64, bytes: u64) -> Result<bool, BackendError> {
        let end = address.saturating_add(bytes);
        if let Some(at) = self.0.iter().position(|(range, _)| range.start <= address && end <= range.end) {
            self.0.swap(0, at);
            return Ok(self.0[0].1);
        }
        let attributes = core.gpus.attributes(address)?;
        if !core.kernel_reaches(gpu, address, bytes, &attributes)? {
            return Err(BackendError::NotSupported(format!(
                "GPU {gpu} cannot access {address:#x} ({bytes} bytes), which is pageable host memory or memory of a GPU without peer \
                 access: register the host memory as pinned memory, or use a plan"
            )));
        }
        let is_host = !attributes.is_device();
        // Some drivers report no range for host memory.
        let uniform = attributes.uniform_range().filter(|range| range.start <= address && end <= range.end);
        self.0.push((uniform.unwrap_or(address..end), is_host));
        Ok(is_host)
    }
}

/// Parameters of the kernel launches of one call.
pub(super) struct PieceLaunch<'a> {
    pub primary: &'a Primary,
    pub kernel: &'a Kernel,
    pub stream: StreamHandle,
    pub gpu: usize,
    pub blocks: u32,
    pub is_paced: bool,
    pub helpers: Vec<Helper<'a>>,
}

/// GPU that copies a part of the pieces.
pub(super) struct Helper<'a> {
    primary: &'a Primary,
    kernel: &'a Kernel,
    /// Part of the bytes, from 0 to 1.
    share: f64,
}

impl Core {
    /// Returns the GPUs that help with a copy in a stream of `gpu`: those whose kernels can access all memory in `known`. A GPU without a
    /// context helps only if the caller permits the creation of its context.
    pub fn helpers(&self, gpu: usize, known: &KnownRanges, bounds: &KernelBounds<'_>) -> Vec<Helper<'_>> {
        let asked = bounds.helpers.filter(|helpers| helpers.of as usize == gpu);
        let gpus = asked.iter().flat_map(|helpers| helpers.gpus.iter().map(|helper| (helpers.may_create, helper)));
        gpus.filter_map(|(may_create, &(helper, share))| {
            let helper = helper as usize;
            let is_usable = helper != gpu && helper < self.gpus.devices.len() && (may_create || self.gpus.has_context(helper));
            if !is_usable {
                return None;
            }
            let primary = self.gpus.peered(helper).ok()?;
            let _current = primary.enter().ok()?;
            let reaches = |range: &Range<u64>| {
                let known = self.gpus.attributes(range.start)?;
                self.kernel_reaches(helper, range.start, range.end - range.start, &known)
            };
            known.0.iter().all(|(range, _)| matches!(reaches(range), Ok(true))).then_some(())?;
            Some(Helper { primary, kernel: primary.kernel()?, share })
        })
        .collect()
    }

    /// Launches the kernels that copy all pieces: one on the stream's GPU, and one on each helper. Later work in the stream waits for all of
    /// them. The context of the stream's GPU must be current.
    pub fn launch_parts(&self, launch: &PieceLaunch<'_>, pieces: &Pieces<'_>, list: &BlockList) -> Result<(), BackendError> {
        let driver = self.gpus.driver;
        let layers = match pieces {
            Pieces::Listed(_) => &[],
            Pieces::Blocks(copy) => copy.layers,
        };
        let list = BlockList { is_paced: u32::from(launch.is_paced), ..*list };
        let shares: Vec<f64> = launch.helpers.iter().map(|helper| helper.share).collect();
        let (own, parts) = divide(pieces, list.count, &shares);
        let before = if parts.iter().any(|part| !part.is_empty()) { Some(launch.primary.record(launch.stream.0)?) } else { None };
        launch.copy(driver, &of_part(&list, &own), layers)?;
        let Some(before) = before else { return Ok(()) };
        for (helper, part) in launch.helpers.iter().zip(parts).filter(|(_, part)| !part.is_empty()) {
            let part = of_part(&list, &part);
            if let Err(error) = self.launch_on(helper, launch, &before, &part, layers) {
                log::debug!("a GPU does not help with a copy of pieces: {error}");
                launch.copy(driver, &part, layers)?;
            }
        }
        Ok(())
    }

    /// Enqueues a helper's part in a stream of the helper, after the event `before`. The caller's stream then waits for the part.
    fn launch_on(
        &self,
        helper: &Helper<'_>,
        launch: &PieceLaunch<'_>,
        before: &Mark,
        part: &BlockList,
        layers: &[Endpoints],
    ) -> Result<(), BackendError> {
        let driver = self.gpus.driver;
        let caller = Caller::new(launch.stream.0, launch.gpu);
        let wait = |stream: usize, mark: &Mark| {
            // SAFETY: `mark` keeps the event valid. Each stream belongs to this library, or the caller keeps it valid.
            unsafe { call!(driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        let stream = helper.primary.lane(caller, false)?;
        let enqueued = wait(stream, before).and_then(|()| {
            let _current = helper.primary.enter()?;
            copy_layers(helper.kernel, launch.blocks, stream, driver, part, layers)?;
            helper.primary.record(stream)
        });
        // If the caller's stream cannot wait for the helper, the helper must have finished before the caller continues.
        let joined = enqueued.and_then(|end| wait(launch.stream.0, &end)).inspect_err(|_| {
            let _outside = OutsideCapture::enter(driver);
            // SAFETY: The stream belongs to this library.
            unsafe { (driver.cuStreamSynchronize)(handle(stream)) };
        });
        helper.primary.give_lane_back(stream, caller, false);
        joined
    }
}

impl PieceLaunch<'_> {
    /// Launches the kernel of the stream's GPU in the caller's stream.
    fn copy(&self, driver: &Driver, list: &BlockList, layers: &[Endpoints]) -> Result<(), BackendError> {
        if list.count == 0 { Ok(()) } else { copy_layers(self.kernel, self.blocks, self.stream.0, driver, list, layers) }
    }
}

/// Launches a kernel in a stream of its context, which must be current. If the kernel's argument cannot contain all layers, launches it
/// several times. A list of pieces has no layers and needs one launch.
fn copy_layers(
    kernel: &Kernel,
    blocks: u32,
    stream: usize,
    driver: &Driver,
    list: &BlockList,
    layers: &[Endpoints],
) -> Result<(), BackendError> {
    let blocks = blocks.min(kernel.processors());
    // SAFETY: The backend has checked that the kernel's GPU can access all ends, and the kernel compares indices with the number of blocks.
    let launch = |list: &BlockList| unsafe { kernel.copy_blocks(driver, list, blocks, handle(stream)) };
    if layers.is_empty() { launch(list) } else { layers.chunks(LAYERS_PER_LAUNCH).try_for_each(|layers| launch(&list.with_layers(layers))) }
}

fn of_part(list: &BlockList, part: &Range<u64>) -> BlockList {
    BlockList { first: part.start, count: part.end - part.start, ..*list }
}

/// Divides `count` list entries among the stream's GPU and the helpers. `shares` contains each helper's share of the bytes. Returns the range
/// of the stream's GPU, which comes first, and the range of each helper.
fn divide(pieces: &Pieces<'_>, count: u64, shares: &[f64]) -> (Range<u64>, Vec<Range<u64>>) {
    let mut ends = Vec::with_capacity(shares.len());
    let mut share = 1.0 - shares.iter().sum::<f64>();
    match pieces {
        _ if shares.is_empty() => return (0..count, Vec::new()),
        Pieces::Blocks(_) => {
            for own in shares {
                ends.push(((count as f64 * share) as u64).min(count));
                share += own;
            }
        }
        Pieces::Listed(segments) => {
            let all: f64 = segments.iter().map(|segment| segment.bytes as f64).sum();
            let (mut at, mut bytes) = (0, 0.0);
            for own in shares {
                while at < segments.len() && bytes < all * share {
                    bytes += segments[at].bytes as f64;
                    at += 1;
                }
                ends.push(at as u64);
                share += own;
            }
        }
    }
    let parts = ends.iter().enumerate().map(|(at, &from)| from..ends.get(at + 1).copied().unwrap_or(count)).collect();
    (0..ends[0], parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{BlockCopy, BlockEnd, Indices, Segment};

    #[test]
    fn parts_cover_all_entries_once_and_have_their_shares() {
        let end = BlockEnd { stride: 8, blocks: 1000, indices: Indices::InOrder };
        let blocks = Pieces::Blocks(BlockCopy { layers: &[], dst: end, src: end, count: 1000, bytes: 8 });
        let divided = |pieces: &Pieces<'_>, count: u64, shares: &[f64]| {
            let (own, parts) = divide(pieces, count, shares);
            (own, parts.iter().map(|part| (part.start, part.end)).collect::<Vec<_>>())
        };
        assert_eq!(divided(&blocks, 1000, &[]), (0..1000, vec![]));
        assert_eq!(divided(&blocks, 1000, &[0.5]), (0..500, vec![(500, 1000)]));
        assert_eq!(divided(&blocks, 1000, &[0.25, 0.25]), (0..500, vec![(500, 750), (750, 1000)]));
        let segments: Vec<Segment> = [100, 1, 1, 1, 97].map(|bytes| Segment { dst: 1, src: 2, bytes }).into();
        assert_eq!(divided(&Pieces::Listed(&segments), 5, &[0.5]), (0..1, vec![(1, 5)]));
        assert_eq!(divided(&Pieces::Listed(&segments[..1]), 1, &[0.4, 0.4]), (0..1, vec![(1, 1), (1, 1)]));
    }
}
