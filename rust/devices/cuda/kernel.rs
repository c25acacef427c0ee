//! Launches three kinds of kernels on GPUs. The fused copy kernel copies many segments in one launch. The wait kernel waits for signals.
//! Action kernels execute lists of actions, which wait for flags, copy segments and set flags.
//!
//! The library contains the kernels as PTX (`cpp/segment_copy_kernel.ptx`). The driver compiles the PTX for a GPU when a kernel is first
//! needed. The script `tests/gpu/ptx` generates the PTX from `cpp/segment_copy_kernel.cu` and reports when the two differ. On Hopper and
//! later GPUs, an action kernel can start before the preceding kernel of its stream has ended. The action kernel then waits for that end
//! itself. The kernels for these GPUs are in a separate PTX file.

use super::driver::handle;
use super::driver::{CUdevice, CUfunction, CUmodule, CUstream, Driver, call, call_optional};
use crate::backend::{ActionGrid, BackendError, MOST_ACTIONS, Signal};
use crate::block_list::{BlockList, PIECE_LANES, group_lanes};
use crate::bridge::Segment;
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
use std::ffi::{CStr, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

/// PTX for GPUs and drivers that do not allow a kernel to start before the preceding kernel has ended.
const PTX: &str = concat!(include_str!("../../../cpp/segment_copy_kernel.ptx"), "\0");
/// PTX for compute capability 9.0 and higher. Its action kernels may start early and wait for the end of the preceding kernel.
const EARLY_PTX: &str = concat!(include_str!("../../../cpp/segment_copy_kernel_sm90.ptx"), "\0");

/// Maximum number of segments per launch of the copy kernel. Equals `kSegmentsPerLaunch` of `cpp/segment_copy.hpp`.
pub(super) const SEGMENTS_PER_LAUNCH: usize = 120;
/// Maximum number of segments in the shorter argument of the copy kernel. Equals `kFewSegments` of `cpp/segment_copy.hpp`.
const FEW_SEGMENTS: usize = 32;
/// Binary logarithm of the copy kernel's tile size in bytes (16 KiB). Equals `kTileShift` of `cpp/segment_copy.hpp`.
const TILE_SHIFT: u32 = 14;
/// Number of threads per block of the copy kernel. Equals `kLanes` of `cpp/segment_copy.hpp`.
const LANES: u32 = 256;
/// Binary logarithm of the tile size in bytes, for segments with an end in host memory. A warp copies a tile in two passes.
const PIECE_TILE_SHIFT: u32 = 12;

/// Argument of a launch of the copy kernel, with the memory layout of `mpgpu::SegmentListOf<N>`. `M` is `N + 1`.
#[repr(C)]
struct SegmentList<const N: usize, const M: usize> {
    segments: [Segment; N],
    first_tile: [u64; M],
    count: u32,
    tile_shift: u32,
}

type Many = SegmentList<SEGMENTS_PER_LAUNCH, { SEGMENTS_PER_LAUNCH + 1 }>;
type Few = SegmentList<FEW_SEGMENTS, { FEW_SEGMENTS + 1 }>;

/// Check of the sizes of the copy kernel's argument types. Every GPU architecture supports kernel arguments of up to 4096 bytes.
const _: () = assert!(size_of::<Many>() == 3856 && size_of::<Many>() <= 4096 && size_of::<Few>() == 1040);

impl<const N: usize, const M: usize> SegmentList<N, M> {
    /// Creates the argument for at most `N` segments and numbers their tiles consecutively, like `mpgpu::fill`.
    fn new(segments: &[Segment]) -> Self {
        SegmentList::with_tiles(segments, TILE_SHIFT)
    }

    fn with_tiles(segments: &[Segment], tile_shift: u32) -> Self {
        let mut list = SegmentList {
            segments: [Segment { dst: 0, src: 0, bytes: 0 }; N],
            first_tile: [0; M],
            count: segments.len() as u32,
            tile_shift,
        };
        list.segments[..segments.len()].copy_from_slice(segments);
        for (i, segment) in segments.iter().enumerate() {
            list.first_tile[i + 1] = list.first_tile[i] + segment.bytes.div_ceil(1 << tile_shift);
        }
        list
    }

    fn tiles(&self) -> u64 {
        self.first_tile[self.count as usize]
    }
}

/// Maximum number of signals per launch of the wait kernel. Equals `kSignalsPerWait` of `cpp/signal_wait.hpp`.
pub(super) const SIGNALS_PER_WAIT: usize = 32;

/// Argument of a launch of the wait kernel, with the memory layout of `mpgpu::SignalList`.
#[repr(C)]
struct SignalList {
    counters: [u64; SIGNALS_PER_WAIT],
    values: [u64; SIGNALS_PER_WAIT],
    count: u64,
}

/// Maximum number of actions in the smaller argument of an action kernel. Equals `kFewActions` of `cpp/actions.hpp`.
const FEW_ACTIONS: usize = 8;
/// Number of threads per block of an action kernel that has several blocks. Equals `kWideLanes` of `cpp/actions.hpp`.
const WIDE_LANES: c_uint = 512;

/// First CUDA version (12.3) that can capture a launch that starts before the preceding kernel has ended.
const EARLY_IN_GRAPHS: i32 = 12030;

/// Argument of a launch of an action kernel, with the memory layout of `mpgpu::ActionListOf<N>`.
#[repr(C)]
struct ActionList<const N: usize> {
    actions: [Segment; N],
    words: u64,
    stop: u64,
    turn: u64,
    count: u32,
    tile_shift: u32,
}

impl<const N: usize> ActionList<N> {
    /// Creates the launch argument for at most `N` actions.
    fn new(actions: &[Segment], ActionGrid { words, stop, turn, .. }: ActionGrid, tile_shift: u32) -> Self {
        let count = list_of(actions, turn).len() as u32;
        let actions_of = |index| actions.get(index).copied().unwrap_or(Segment { dst: 0, src: 0, bytes: 0 });
        ActionList { actions: std::array::from_fn(actions_of), words, stop, turn, count, tile_shift }
    }
}

/// Returns the actions that one launch executes. `turn` is the address of a word that is 0 or 1 and that each launch toggles, or 0 if there
/// is no such word. With this word, each launch executes one half of the list. The function then returns the first half, which has as many
/// actions as the second.
fn list_of(actions: &[Segment], turn: u64) -> &[Segment] {
    if turn == 0 { actions } else { &actions[..actions.len() / 2] }
}

/// Launch dimensions of an action kernel: number of blocks, number of threads per block, and the binary logarithm of a block's tile size in
/// bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct ActionWidth {
    blocks: c_uint,
    lanes: c_uint,
    tile_shift: u32,
}

impl ActionWidth {
    /// Maximum binary logarithm of the tile size. Equals the limit of `cpp/segment_copy.hpp`.
    const MAX_TILE_SHIFT: u32 = 30;

    fn of(actions: &[Segment], grid: ActionGrid) -> Self {
        if grid.blocks <= 1 {
            return ActionWidth { blocks: 1, lanes: LANES, tile_shift: ActionWidth::MAX_TILE_SHIFT };
        }
        // All copies between two actions of other kinds run concurrently.
        let at_a_time = list_of(actions, grid.turn).split(|action| action.bytes == 0);
        let bytes: u64 = at_a_time.map(|copies| copies.iter().map(|copy| copy.bytes).sum()).max().unwrap_or(0);
        let share = bytes.div_ceil(u64::from(grid.blocks)).next_power_of_two().trailing_zeros();
        ActionWidth { blocks: grid.blocks, lanes: WIDE_LANES, tile_shift: share.min(ActionWidth::MAX_TILE_SHIFT) }
    }
}

/// Returns the launch attribute that allows a kernel to start before the preceding kernel of its stream has ended.
fn early() -> sys::CUlaunchAttribute {
    // SAFETY: The structure consists of integers and pointers, for which zero is a valid value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}

/// Handles of all kernels, which were loaded in one context.
#[derive(Debug)]
pub(super) struct Kernel {
    module: usize,
    /// Handle of the wait kernel, whose argument is a [`SignalList`].
    wait: usize,
    /// Handle of the action kernel for up to [`MOST_ACTIONS`] actions, whose argument is an [`ActionList`].
    actions: usize,
    /// Handle of the action kernel for up to [`FEW_ACTIONS`] actions, whose argument is a shorter [`ActionList`].
    few_actions: usize,
    /// True if both action kernels may start before the preceding kernel of their stream has ended.
    is_early: bool,
    /// Handle of the copy kernel for up to [`SEGMENTS_PER_LAUNCH`] segments, whose argument is a [`Many`].
    many: usize,
    /// Handle of the copy kernel for up to [`FEW_SEGMENTS`] segments, whose argument is a [`Few`].
    few: usize,
    /// Handle of the copy kernel for segments with an end in host memory. Its arguments are a [`Many`], the number of lanes of a group, and
    /// 1 if stores are paced, otherwise 0.
    pieces: usize,
    /// Handle of the copy kernel for pieces, whose argument is a [`BlockList`].
    blocks: usize,
    /// Maximum number of blocks per launch, which [`Kernel::limit`] sets. The default is one block per multiprocessor, because further
    /// blocks would only wait for each other.
    most_blocks: AtomicU32,
}

/// Use of host memory in a plan: none, only as source, or as destination. If a plan uses host memory, kernel launches have fewer blocks.
/// More blocks would not increase the rate of the PCIe link, but they slow down concurrent copy engines, most of all if the blocks write to
/// host memory (see `core::plan::mechanism`).
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostEnds {
    /// Neither a source nor a destination is in host memory.
    #[default]
    None,
    /// Some sources are in host memory, but no destination is.
    Read,
    /// A destination is in host memory.
    Written,
}

/// Maximum number of launches of one graph that run at the same time (`nodes::most_at_once`).
const LAUNCHES_AT_ONCE: u32 = 4;

/// Copy kernel of a GPU, with the limits that apply to one plan.
#[derive(Copy, Clone, Debug)]
pub(super) struct Copier<'a> {
    kernel: &'a Kernel,
    host: HostEnds,
    /// Maximum number of multiprocessors that kernels with an end in host memory use.
    host_blocks: u32,
    /// True if kernels that write host memory pace their stores.
    is_paced: bool,
}

/// Parameters of one launch of the copy kernel, in a stream or in a graph.
pub(super) struct KernelLaunch {
    pub function: CUfunction,
    pub blocks: c_uint,
    pub lanes: c_uint,
    /// Array that contains the addresses of the kernel's arguments. It is valid until [`Copier::with_launch`] returns.
    pub arguments: *mut *mut c_void,
}

impl Kernel {
    /// Loads all kernels into the current context, which must belong to `device`.
    pub fn load(driver: &Driver, device: CUdevice) -> Result<Kernel, BackendError> {
        let mut module: CUmodule = std::ptr::null_mut();
        let is_early = driver.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) >= 9
            && driver.cuLaunchKernelEx.is_some()
            && driver.version() >= EARLY_IN_GRAPHS;
        let image = if is_early { EARLY_PTX } else { PTX };
        // SAFETY: The image is PTX that ends with a NUL. The output is a variable that outlives the call.
        unsafe { call!(driver, cuModuleLoadData(&mut module, image.as_ptr().cast())) }?;
        Kernel::in_module(driver, device, module, is_early).inspect_err(|_| {
            // SAFETY: The module was loaded above, and nothing else uses it.
            unsafe { (driver.cuModuleUnload)(module) };
        })
    }

    fn in_module(driver: &Driver, device: CUdevice, module: CUmodule, is_early: bool) -> Result<Kernel, BackendError> {
        let function = |name: &CStr| {
            let mut function: CUfunction = std::ptr::null_mut();
            // SAFETY: The module has just been loaded, and the name ends with a NUL. The output is a variable that outlives the call.
            unsafe { call!(driver, cuModuleGetFunction(&mut function, module, name.as_ptr())) }?;
            // This call makes the driver load the function now. Otherwise, the driver would load it at its first launch and might wait for
            // the whole device. This wait would never end if a stream waits for a signal that depends on the launch (CUDA C++ Programming
            // Guide, "Lazy Loading").
            let (mut threads, attribute) = (0, CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as c_uint);
            // SAFETY: The function belongs to the module, which is loaded. The output is a variable that outlives the call.
            unsafe { call!(driver, cuFuncGetAttribute(&mut threads, attribute, function)) }?;
            Ok(function.expose_provenance())
        };
        let processors = driver.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
        Ok(Kernel {
            module: module.expose_provenance(),
            wait: function(c"mpgpu_wait_signals")?,
            actions: function(c"mpgpu_run_actions")?,
            few_actions: function(c"mpgpu_run_few_actions")?,
            is_early,
            many: function(c"mpgpu_copy_segments")?,
            few: function(c"mpgpu_copy_few_segments")?,
            pieces: function(c"mpgpu_copy_pieces")?,
            blocks: function(c"mpgpu_copy_blocks")?,
            most_blocks: AtomicU32::new(u32::try_from(processors).unwrap_or(0).max(1)),
        })
    }

    /// Limits all later launches of the copy kernel to `blocks` thread blocks.
    pub fn limit(&self, blocks: u32) {
        self.most_blocks.store(blocks.max(1), Ordering::Relaxed);
    }

    /// Returns the copy kernel with the limits for a plan that uses host memory as `host` states.
    pub fn copier(&self, host: HostEnds, host_blocks: u32, is_paced: bool) -> Copier<'_> {
        Copier { kernel: self, host, host_blocks, is_paced }
    }

    /// Enqueues the copy of `list` in `stream`. The stream must belong to the kernel's context, which must be current.
    ///
    /// # Safety
    ///
    /// The GPU can access the list and all sources and destinations. They stay valid until the copies have completed.
    pub unsafe fn copy_blocks(&self, driver: &Driver, list: &BlockList, blocks: u32, stream: CUstream) -> Result<(), BackendError> {
        let mut list = *list;
        let mut arguments: [*mut c_void; 1] = [(&raw mut list).cast()];
        let (function, none) = (handle(self.blocks), std::ptr::null_mut());
        // SAFETY: The function takes one argument of this type, which the driver copies before it returns.
        unsafe { call!(driver, cuLaunchKernel(function, blocks, 1, 1, PIECE_LANES, 1, 1, 0, stream, arguments.as_mut_ptr(), none)) }
    }

    /// Enqueues in `stream` a wait for all signals in the list `signals`. The stream must belong to the kernel's context, which must be
    /// current.
    ///
    /// # Safety
    ///
    /// The GPU can read the counters at the addresses that the CPU uses. The counters stay valid until the wait has ended.
    pub unsafe fn wait(&self, driver: &Driver, signals: &[Signal], stream: CUstream) -> Result<(), BackendError> {
        for signals in signals.chunks(SIGNALS_PER_WAIT) {
            let mut list = SignalList { counters: [0; SIGNALS_PER_WAIT], values: [0; SIGNALS_PER_WAIT], count: signals.len() as u64 };
            for (index, signal) in signals.iter().enumerate() {
                (list.counters[index], list.values[index]) = (signal.counter, signal.value);
            }
            let mut arguments: [*mut c_void; 1] = [(&raw mut list).cast()];
            let (function, lanes, none) = (handle(self.wait), SIGNALS_PER_WAIT as c_uint, std::ptr::null_mut());
            // SAFETY: The function has one argument of this type, which the driver copies before it returns.
            unsafe { call!(driver, cuLaunchKernel(function, 1, 1, 1, lanes, 1, 1, 0, stream, arguments.as_mut_ptr(), none)) }?;
        }
        Ok(())
    }

    /// Returns the maximum number of blocks per launch. By default, this is the number of multiprocessors.
    pub fn processors(&self) -> u32 {
        self.most_blocks.load(Ordering::Relaxed)
    }

    /// Enqueues in `stream` a kernel that executes the list `actions`, which contains at most [`MOST_ACTIONS`] actions. The stream must
    /// belong to the kernel's context, which must be current.
    ///
    /// # Safety
    ///
    /// The GPU can access all memory, flags and words at the given addresses. They stay valid until the kernel has run.
    pub unsafe fn run(&self, driver: &Driver, actions: &[Segment], grid: ActionGrid, stream: CUstream) -> Result<(), BackendError> {
        let ActionWidth { blocks, lanes, tile_shift } = ActionWidth::of(actions, grid);
        let launch = |function: usize, list: *mut c_void| {
            let (mut arguments, none) = ([list], std::ptr::null_mut());
            let (function, arguments) = (handle(function), arguments.as_mut_ptr());
            if !self.is_early {
                // SAFETY: The function has one argument of the type passed below, which the driver copies before it returns.
                return unsafe { call!(driver, cuLaunchKernel(function, blocks, 1, 1, lanes, 1, 1, 0, stream, arguments, none)) };
            }
            let mut early = early();
            let config = sys::CUlaunchConfig {
                gridDimX: blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: lanes,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                hStream: stream.cast(),
                attrs: &raw mut early,
                numAttrs: 1,
            };
            // SAFETY: The function has one argument of the type passed below, which the driver copies before it returns. The kernel itself
            // waits for the end of the preceding work (`begin` in its source).
            unsafe { call_optional!(driver, cuLaunchKernelEx(&config, function, arguments, none)) }
        };
        if actions.len() <= FEW_ACTIONS {
            let mut list = ActionList::<FEW_ACTIONS>::new(actions, grid, tile_shift);
            launch(self.few_actions, (&raw mut list).cast())
        } else {
            let mut list = ActionList::<MOST_ACTIONS>::new(actions, grid, tile_shift);
            launch(self.actions, (&raw mut list).cast())
        }
    }

    /// # Safety
    ///
    /// The kernel's context is current, and the kernel is not used again.
    pub unsafe fn unload(&self, driver: &Driver) {
        // SAFETY: `load` loaded the module. The caller guarantees that the kernel is not used again.
        unsafe { (driver.cuModuleUnload)(handle(self.module)) };
    }
}

impl Copier<'_> {
    /// Calls `make` with the parameters of a launch that copies at most [`SEGMENTS_PER_LAUNCH`] segments and runs concurrently with other
    /// launches. Returns the result of `make`, or `None` if there is nothing to copy.
    pub fn with_launch<T>(&self, segments: &[Segment], make: impl FnOnce(&KernelLaunch) -> T) -> Option<T> {
        self.with_blocks(segments, LAUNCHES_AT_ONCE, make)
    }

    /// Calls `make` with the parameters of a launch. `at_once` launches run at the same time. Short lists of segments use an argument type
    /// with about a quarter of the size, because the driver copies the argument at each launch and the GPU fetches it.
    fn with_blocks<T>(&self, segments: &[Segment], at_once: u32, make: impl FnOnce(&KernelLaunch) -> T) -> Option<T> {
        if self.host != HostEnds::None {
            return self.with_pieces(segments, at_once, make);
        }
        if segments.len() <= FEW_SEGMENTS {
            let mut list = Few::new(segments);
            self.with_argument(self.kernel.few, list.tiles(), (&raw mut list).cast(), make)
        } else {
            let mut list = Many::new(segments);
            self.with_argument(self.kernel.many, list.tiles(), (&raw mut list).cast(), make)
        }
    }

    fn with_argument<T>(&self, function: usize, tiles: u64, argument: *mut c_void, make: impl FnOnce(&KernelLaunch) -> T) -> Option<T> {
        let mut arguments = [argument];
        let blocks = tiles.min(u64::from(self.kernel.processors())) as c_uint;
        let launch = KernelLaunch { function: handle(function), blocks, lanes: LANES, arguments: arguments.as_mut_ptr() };
        (blocks > 0).then(|| make(&launch))
    }

    /// Calls `make` with the parameters of a launch for segments with an end in host memory. `at_once` such launches run at the same time.
    /// Together they use at most `host_blocks` multiprocessors, but each launch uses at least one. If `is_paced` is true, launches that write
    /// host memory pace their stores.
    fn with_pieces<T>(&self, segments: &[Segment], at_once: u32, make: impl FnOnce(&KernelLaunch) -> T) -> Option<T> {
        let bytes: u64 = segments.iter().map(|segment| segment.bytes).sum();
        let mut lanes = group_lanes(bytes / segments.len().max(1) as u64);
        let most = (self.host_blocks / at_once).clamp(1, self.kernel.processors());
        let mut list = Many::with_tiles(segments, PIECE_TILE_SHIFT);
        let blocks = list.tiles().div_ceil(u64::from(PIECE_LANES / lanes)).min(u64::from(most)) as c_uint;
        let mut is_paced = u32::from(self.is_paced && self.host == HostEnds::Written);
        let mut arguments: [*mut c_void; 3] = [(&raw mut list).cast(), (&raw mut lanes).cast(), (&raw mut is_paced).cast()];
        let launch = KernelLaunch { function: handle(self.kernel.pieces), blocks, lanes: PIECE_LANES, arguments: arguments.as_mut_ptr() };
        (blocks > 0).then(|| make(&launch))
    }

    /// Enqueues in `stream` one launch that copies all segments of the list `segments`. The stream must belong to the kernel's context,
    /// which must be current.
    ///
    /// # Safety
    ///
    /// The GPU can access every source and destination. They stay valid until the copies have finished.
    pub unsafe fn launch(&self, driver: &Driver, segments: &[Segment], stream: CUstream) -> Result<(), BackendError> {
        for segments in segments.chunks(SEGMENTS_PER_LAUNCH) {
            let launched = self.with_blocks(segments, 1, |launch| {
                let KernelLaunch { function, blocks, lanes, arguments } = *launch;
                let none = std::ptr::null_mut();
                // SAFETY: `with_blocks` chose the function and its arguments together. The driver copies the arguments before it returns.
                unsafe { call!(driver, cuLaunchKernel(function, blocks, 1, 1, lanes, 1, 1, 0, stream, arguments, none)) }
            });
            launched.unwrap_or(Ok(()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_a_launch_is_that_of_the_kernels_source() {
        let in_ptx = |text: String| [PTX, EARLY_PTX].iter().all(|ptx| ptx.contains(&text));
        let header = include_str!("../../../cpp/segment_copy.hpp");
        for constant in ["kSegmentsPerLaunch = 120;", "kFewSegments = 32;", "kTileShift = 14;", "kLanes = 256;"] {
            assert!(header.contains(constant), "{constant}");
        }
        for (name, bytes) in [("mpgpu_copy_segments", size_of::<Many>()), ("mpgpu_copy_few_segments", size_of::<Few>())] {
            assert!(in_ptx(format!(".b8 {name}_param_0[{bytes}]")), "{name}: parameter of the PTX");
        }
        for constant in ["kActionsPerLaunch = 120;", "kFewActions = 8;", "kWideLanes = 512;", "kActionWords = 3;"] {
            assert!(include_str!("../../../cpp/actions.hpp").contains(constant), "{constant}");
        }
        assert_eq!((MOST_ACTIONS, ActionGrid::WORDS), (120, 3));
        for (name, bytes) in [("actions", size_of::<ActionList<MOST_ACTIONS>>()), ("few_actions", size_of::<ActionList<FEW_ACTIONS>>())] {
            assert!(in_ptx(format!(".b8 mpgpu_run_{name}_param_0[{bytes}]")), "parameter of the PTX");
        }
        assert!(include_str!("../../../cpp/signal_wait.hpp").contains("kSignalsPerWait = 32;"));
        assert!(in_ptx(format!(".b8 mpgpu_wait_signals_param_0[{}]", size_of::<SignalList>())), "parameter of the PTX");
        // A kernel that starts early must wait for the preceding kernel, so each of the two action kernels contains one such wait.
        assert_eq!([PTX, EARLY_PTX].map(|ptx| ptx.matches("griddepcontrol.wait;").count()), [0, 2]);
    }

    #[test]
    fn tiles_are_numbered_through_all_segments() {
        let segment = |bytes| Segment { dst: 1, src: 2, bytes };
        let list = Few::new(&[segment(0), segment(1), segment(1 << 14), segment((1 << 14) + 1)]);
        assert_eq!((list.count, &list.first_tile[..5]), (4, &[0, 0, 1, 2, 4][..]));
        assert_eq!(list.tiles(), 4);
        assert_eq!(Many::new(&[segment(1); SEGMENTS_PER_LAUNCH]).tiles(), 120);
    }

    #[test]
    fn actions_take_a_block_for_each_8_kib_and_a_quarter_of_the_gpu_or_what_is_asked_for_at_most() {
        let blocks = [8, 16 << 10, 17 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20].map(|bytes| ActionGrid::blocks_for(bytes, None, 132));
        assert_eq!(blocks, [1, 1, 3, 8, 32, 33, 33]);
        assert_eq!([Some(5), Some(500), Some(0)].map(|asked| ActionGrid::blocks_for(4 << 20, asked, 132)), [5, 132, 1]);
        assert_eq!(ActionGrid::blocks_for(4 << 20, None, 2), 1);
    }

    #[test]
    fn blocks_of_actions_divide_what_is_copied_at_a_time() {
        let wait = Segment { dst: 1, src: 1, bytes: 0 };
        let width = |bytes: &[u64], blocks| {
            let copies = bytes.iter().map(|bytes| Segment { dst: 1, src: 2, bytes: *bytes });
            let actions: Vec<Segment> = [wait].into_iter().chain(copies).collect();
            let ActionWidth { blocks, lanes, tile_shift } =
                ActionWidth::of(&actions, ActionGrid { words: 64, blocks, ..ActionGrid::default() });
            (blocks, lanes, tile_shift)
        };
        assert_eq!([0, 1].map(|blocks| width(&[4 << 20], blocks)), [(1, 256, 30); 2]);
        assert_eq!(width(&[256 << 10], 32), (32, 512, 13));
        assert_eq!(width(&[4 << 20], 33), (33, 512, 17));
        assert_eq!(width(&[10_000; 100], 33), (33, 512, 15), "a tile each, and blocks take them by turns");
    }

    #[test]
    fn a_launch_takes_the_smaller_argument_where_it_holds_all_segments_and_no_more_blocks_than_processors() {
        let kernel = Kernel {
            module: 0,
            wait: 0,
            actions: 0,
            few_actions: 0,
            is_early: false,
            many: 0x10,
            few: 0x20,
            pieces: 0x30,
            blocks: 0,
            most_blocks: 132.into(),
        };
        let launch_for = |host, count: usize, bytes| {
            let segments = vec![Segment { dst: 1, src: 2, bytes }; count];
            kernel.copier(host, 4, true).with_launch(&segments, |launch| (launch.function.addr(), launch.blocks))
        };
        let launch = |count, bytes| launch_for(HostEnds::None, count, bytes);
        assert_eq!(launch(FEW_SEGMENTS, 1), Some((0x20, 32)));
        assert_eq!(launch(FEW_SEGMENTS + 1, 1), Some((0x10, 33)));
        assert_eq!(launch(SEGMENTS_PER_LAUNCH, 240_000), Some((0x10, 132)));
        assert_eq!(launch(3, 0), None);
        for host in [HostEnds::Read, HostEnds::Written] {
            assert_eq!(launch_for(host, 3, 1), Some((0x30, 1)));
            assert_eq!(launch_for(host, SEGMENTS_PER_LAUNCH, 240_000), Some((0x30, 1)), "four launches of a graph run at once");
        }
    }
}
