//! Attaches host functions and staging memory to graphs that are created by stream capture.
//!
//! Objects that a captured graph uses must live as long as the graph can be launched. They are therefore attached to the graph as a user
//! object. The driver calls the destructor of the user object when the graph and all its clones and instances have been destroyed. The
//! destructor runs on a thread that must not call the driver. The destructor therefore does not free staging memory but stores the blocks
//! ([`Spare`]). The next capture that needs a block of the same size reuses a stored block. The next call that frees memory, in any context
//! of the process, frees the blocks that are still stored.

use super::driver::{CUgraph, CUstream, Driver, call_optional, lock};
use super::gpus::Gpus;
use super::memory;
use crate::backend::host_memory::HostPages;
use crate::backend::{BackendError, Execution};
use crate::topology::DeviceId;
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Alignment in bytes of staging rings. It equals the alignment in the staging memory of plans.
const ALIGNMENT: u64 = 256;

/// Block of staging memory on one device, used by one graph at a time.
struct Block {
    driver: &'static Driver,
    device: DeviceId,
    /// GPU in whose context the block was allocated.
    gpu: usize,
    /// Driver's unique number of the context in which the block was allocated.
    context: u64,
    address: u64,
    bytes: u64,
    /// Pages of a block in host memory if this library has mapped them, and otherwise `None`.
    pages: Option<HostPages>,
}

/// Staging memory of one captured execution, attached to the captured graph.
struct GraphBlocks(Vec<Block>);

impl Drop for GraphBlocks {
    /// Stores the blocks for reuse. Makes no driver call, because it runs in the destructor of a user object.
    fn drop(&mut self) {
        SPARE.put(std::mem::take(&mut self.0));
    }
}

/// Staging memory of destroyed graphs, stored for reuse. It belongs to the process, because graphs may outlive the contexts in which they
/// were captured.
struct Spare {
    blocks: Mutex<Vec<Block>>,
    /// Number of blocks that are stored for reuse. While the number is 0, no thread acquires the lock of the list of blocks.
    count: AtomicUsize,
}

static SPARE: Spare = Spare { blocks: Mutex::new(Vec::new()), count: AtomicUsize::new(0) };

impl Spare {
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Block>) -> T) -> T {
        let mut blocks = lock(&self.blocks);
        let changed = change(&mut blocks);
        self.count.store(blocks.len(), Ordering::Release);
        changed
    }

    fn put(&self, more: Vec<Block>) {
        self.change(|blocks| blocks.extend(more));
    }

    /// Removes and returns the blocks for which `wanted` returns true.
    fn take(&self, mut wanted: impl FnMut(&Block) -> bool) -> Vec<Block> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.change(|blocks| blocks.extract_if(.., |block| wanted(block)).collect())
    }
}

/// Allocates staging rings for an execution that is being captured, and attaches them to the captured graph. Returns the base address of
/// each ring. Requires the stream's context to be current.
pub(super) fn capture_rings(gpus: &Gpus, execution: &Execution<'_>, raw: CUstream) -> Result<Arc<[u64]>, BackendError> {
    let rings = &execution.program.rings;
    if rings.is_empty() {
        return Ok(execution.rings.clone());
    }
    let mut blocks = GraphBlocks(Vec::new());
    let mut bases = vec![0; rings.len()];
    for device in rings.iter().map(|ring| ring.device) {
        if blocks.0.iter().any(|block| block.device == device) {
            continue;
        }
        let here = || rings.iter().enumerate().filter(|(_, ring)| ring.device == device);
        let bytes = here().fold(0_u64, |sum, (_, ring)| sum.saturating_add(ring.bytes().next_multiple_of(ALIGNMENT)));
        let block = block(gpus, device, bytes)?;
        let mut next = block.address;
        for (index, ring) in here() {
            bases[index] = next;
            next += ring.bytes().next_multiple_of(ALIGNMENT);
        }
        blocks.0.push(block);
    }
    keep_in_graph(gpus.driver, raw, blocks, "keep staging memory for as long as a graph")?;
    Ok(bases.into())
}

/// Returns a block of exactly `bytes` bytes on `device`: a stored block of a destroyed graph, or a new block.
fn block(gpus: &Gpus, device: DeviceId, bytes: u64) -> Result<Block, BackendError> {
    let mut taken = false;
    let spare = SPARE.take(|block| {
        let fits = !taken && may_use(gpus, block) && (block.device, block.bytes) == (device, bytes);
        taken |= fits;
        fits
    });
    if let Some(block) = spare.into_iter().next() {
        return Ok(block);
    }
    let gpu = if device.is_host() { gpus.any_used() } else { device.0 as usize };
    let (address, pages) = memory::make(gpus, device, gpu, bytes)?;
    log::debug!("{}: allocated {bytes} bytes of staging memory for a graph", device.in_words());
    Ok(Block { driver: gpus.driver, device, gpu, context: gpus.primary(gpu)?.id, address, bytes, pages })
}

/// True if the block was allocated through this driver and the context of its GPU has not been reset since.
fn may_use(gpus: &Gpus, block: &Block) -> bool {
    let primary = gpus.devices.get(block.gpu).and_then(|device| device.used());
    std::ptr::eq(block.driver, gpus.driver) && primary.is_some_and(|primary| primary.id == block.context && !primary.is_lost())
}

/// Frees the stored staging memory of destroyed graphs. Like every call that frees GPU memory, it may wait for all work of a GPU.
pub(super) fn free_spare_blocks(gpus: &Gpus) {
    for block in SPARE.take(|block| std::ptr::eq(block.driver, gpus.driver)) {
        let Block { device, gpu, address, pages, .. } = &block;
        // The block may come from another context of the process that no longer exists.
        let known = gpus.primary(*gpu).is_ok() && may_use(gpus, &block);
        if known && let Err(error) = memory::give_back(gpus, *device, *gpu, *address, pages.as_ref()) {
            log::warn!("could not free staging memory of a graph: {error}");
        }
    }
}

/// Attaches the object `kept` to the graph that is being captured from a stream. The object is dropped when the graph is destroyed. Returns
/// the object's address. `purpose` describes the use of the object in an error message.
pub(super) fn keep_in_graph<T: Send>(driver: &Driver, raw: CUstream, kept: T, purpose: &str) -> Result<*mut T, BackendError> {
    if driver.cuUserObjectCreate.is_none() || driver.cuUserObjectRelease.is_none() || driver.cuGraphRetainUserObject.is_none() {
        let lacks = driver.lacks(&format!("cuUserObjectCreate to {purpose}"));
        return Err(BackendError::NotSupported(format!(
            "the stream is being captured, and {lacks}, or make this call outside of the capture"
        )));
    }
    let graph = captured_graph(driver, raw)?;
    let kept: *mut T = Box::into_raw(Box::new(kept));
    let mut object: sys::CUuserObject = null_mut();
    let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
    // SAFETY: The driver writes to a variable that outlives the call. It calls the destructor `drop_kept` once, which drops `kept`.
    unsafe { call_optional!(driver, cuUserObjectCreate(&mut object, kept.cast(), drop_kept::<T>, 1, no_sync)) }.inspect_err(|_| {
        // SAFETY: The driver created no user object, so nothing else drops `kept`.
        unsafe { drop_kept::<T>(kept.cast()) };
    })?;
    let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
    // SAFETY: The graph is being captured, and this thread may add to the capture. This function holds the only reference to the user
    // object.
    unsafe { call_optional!(driver, cuGraphRetainUserObject(graph, object, 1, moved)) }.inspect_err(|_| {
        // SAFETY: The graph did not take the reference, so this function still holds the only one.
        drop(unsafe { call_optional!(driver, cuUserObjectRelease(object, 1)) });
    })?;
    Ok(kept)
}

/// Returns the graph that is being captured from a stream.
fn captured_graph(driver: &Driver, raw: CUstream) -> Result<CUgraph, BackendError> {
    let (mut status, mut graph): (c_uint, CUgraph) = (0, null_mut());
    // SAFETY: Each output is a variable that outlives the call, or NULL if its value is not needed.
    unsafe {
        if driver.cuStreamGetCaptureInfo_v3.is_some() {
            call_optional!(driver, cuStreamGetCaptureInfo_v3(raw, &mut status, null_mut(), &mut graph, null_mut(), null_mut(), null_mut()))
        } else {
            call_optional!(driver, cuStreamGetCaptureInfo_v2(raw, &mut status, null_mut(), &mut graph, null_mut(), null_mut()))
        }
    }?;
    if graph.is_null() {
        return Err(BackendError::NotSupported("the capture of the stream ended during this call; call again".into()));
    }
    Ok(graph)
}

/// Drops an object that [`keep_in_graph`] has attached to a graph. The driver calls this destructor on any of its threads.
pub(super) unsafe extern "C" fn drop_kept<T>(kept: *mut c_void) {
    // SAFETY: `kept` was created by `Box::into_raw` for type `T`, and this function is called once for it.
    let kept = unsafe { Box::from_raw(kept.cast::<T>()) };
    if catch_unwind(AssertUnwindSafe(|| drop(kept))).is_err() {
        log::error!("resources of a graph panicked when they were dropped");
    }
}
