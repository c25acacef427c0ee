//! The GPU build of the fused copy kernel: one launch moves many segments.
//!
//! The kernel is part of the library as PTX (`cpp/segment_copy_kernel.ptx`), which the driver translates for the GPU at hand when a
//! plan first needs it. `tests/gpu/ptx` compiles it from `cpp/segment_copy_kernel.cu` and tells when the two differ.

use super::device::handle;
use super::driver::{CUdevice, CUfunction, CUmodule, CUstream, Driver, call};
use crate::backend::BackendError;
use crate::ffi::bridge::Segment;
use cudarc::driver::sys::CUdevice_attribute;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

const PTX: &str = concat!(include_str!("../../../cpp/segment_copy_kernel.ptx"), "\0");

/// As in `cpp/segment_copy.hpp`.
const SEGMENTS_PER_LAUNCH: usize = 120;
const TILE_SHIFT: u32 = 14;
const LANES: u32 = 256;

/// The argument of a launch, `mpgpu::SegmentList`.
#[repr(C)]
struct SegmentList {
    segments: [Segment; SEGMENTS_PER_LAUNCH],
    first_tile: [u64; SEGMENTS_PER_LAUNCH + 1],
    count: u32,
    tile_shift: u32,
}

/// Kernel arguments may take this much on every architecture.
const _: () = assert!(size_of::<SegmentList>() == 3856 && size_of::<SegmentList>() <= 4096);

impl SegmentList {
    /// As `mpgpu::fill`: at most [`SEGMENTS_PER_LAUNCH`] segments, their tiles numbered through.
    fn new(segments: &[Segment]) -> SegmentList {
        let mut list = SegmentList {
            segments: [Segment { dst: 0, src: 0, bytes: 0 }; SEGMENTS_PER_LAUNCH],
            first_tile: [0; SEGMENTS_PER_LAUNCH + 1],
            count: segments.len() as u32,
            tile_shift: TILE_SHIFT,
        };
        list.segments[..segments.len()].copy_from_slice(segments);
        for (i, segment) in segments.iter().enumerate() {
            list.first_tile[i + 1] = list.first_tile[i] + segment.bytes.div_ceil(1 << TILE_SHIFT);
        }
        list
    }

    fn tiles(&self) -> u64 {
        self.first_tile[self.count as usize]
    }
}

/// The kernel in one context.
#[derive(Debug)]
pub(super) struct Kernel {
    module: usize,
    function: usize,
    /// Blocks of a launch at most: one for each multiprocessor, as more only wait for each other, or what [`Kernel::limit`] says.
    most_blocks: AtomicU32,
}

impl Kernel {
    /// Loads the kernel into the current context, which is that of `device`.
    pub fn load(driver: &Driver, device: CUdevice) -> Result<Kernel, BackendError> {
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is PTX that ends with a NUL; the output is valid for the call.
        unsafe { call!(driver, cuModuleLoadData(&mut module, PTX.as_ptr().cast())) }?;
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module has just been loaded; the name ends with a NUL; the output is valid for the call.
        unsafe { call!(driver, cuModuleGetFunction(&mut function, module, c"mpgpu_copy_segments".as_ptr())) }?;
        let processors = driver.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
        Ok(Kernel {
            module: module.expose_provenance(),
            function: function.expose_provenance(),
            most_blocks: AtomicU32::new(u32::try_from(processors).unwrap_or(0).max(1)),
        })
    }

    /// From now on a launch takes so many blocks at most.
    pub fn limit(&self, blocks: u32) {
        self.most_blocks.store(blocks.max(1), Ordering::Relaxed);
    }

    /// Enqueues the copy of all segments in `stream`, a stream of the kernel's context, which is current.
    ///
    /// # Safety
    ///
    /// The GPU reaches every source and destination; they stay valid until the copies have run.
    pub unsafe fn launch(&self, driver: &Driver, segments: &[Segment], stream: CUstream) -> Result<(), BackendError> {
        for segments in segments.chunks(SEGMENTS_PER_LAUNCH) {
            let mut list = SegmentList::new(segments);
            let blocks = list.tiles().min(u64::from(self.most_blocks.load(Ordering::Relaxed))) as u32;
            if blocks == 0 {
                continue;
            }
            let mut arguments: [*mut c_void; 1] = [(&raw mut list).cast()];
            let (function, none) = (handle(self.function), std::ptr::null_mut());
            // SAFETY: the function takes one argument of this type, which the driver copies before it returns.
            unsafe { call!(driver, cuLaunchKernel(function, blocks, 1, 1, LANES, 1, 1, 0, stream, arguments.as_mut_ptr(), none)) }?;
        }
        Ok(())
    }

    /// # Safety
    ///
    /// The kernel's context is current, and the kernel is not used again.
    pub unsafe fn unload(&self, driver: &Driver) {
        // SAFETY: loaded in `load`.
        unsafe { (driver.cuModuleUnload)(handle(self.module)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_a_launch_is_that_of_the_kernels_source() {
        let header = include_str!("../../../cpp/segment_copy.hpp");
        for constant in ["kSegmentsPerLaunch = 120;", "kTileShift = 14;", "kLanes = 256;"] {
            assert!(header.contains(constant), "{constant}");
        }
        assert!(PTX.contains(&format!(".b8 mpgpu_copy_segments_param_0[{}]", size_of::<SegmentList>())), "parameter of the PTX");
    }

    #[test]
    fn tiles_are_numbered_through_all_segments() {
        let segment = |bytes| Segment { dst: 1, src: 2, bytes };
        let list = SegmentList::new(&[segment(0), segment(1), segment(1 << 14), segment((1 << 14) + 1)]);
        assert_eq!((list.count, &list.first_tile[..5]), (4, &[0, 0, 1, 2, 4][..]));
        assert_eq!(list.tiles(), 4);
    }
}
