//! Builds a CUDA graph for a program by direct driver calls, and times each call. The benchmark compares this graph with the library's
//! graphs.

use super::Failure;
use super::plain::check;
use cudarc::driver::sys;
use mpgpu_backend::{Endpoints, StreamHandle};
use mpgpu_core::plan::{Place, Program};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::time::Instant;

/// Addresses and CUDA contexts for which a program's graph is built.
pub struct Binding<'a> {
    pub program: &'a Program,
    pub endpoints: &'a [Endpoints],
    /// Base address in bytes of each staging ring (ring buffer in staging memory).
    pub rings: &'a [u64],
    /// Primary CUDA context of the GPU on which each internal stream runs.
    pub contexts: &'a [sys::CUcontext],
}

impl Binding<'_> {
    fn address(&self, place: Place) -> u64 {
        match place {
            Place::Source { transfer, offset } => self.endpoints[transfer as usize].src + offset,
            Place::Destination { transfer, offset } => self.endpoints[transfer as usize].dst + offset,
            Place::Slot { ring, slot } => self.rings[ring.0 as usize] + u64::from(slot) * self.program.rings[ring.0 as usize].slot_bytes,
        }
    }
}

/// Executable CUDA graph with one memcpy node for each copy of a program, and with the program's dependencies. It must be dropped only
/// after its launches have finished.
pub struct DriverGraph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// Graph node of each copy, in the order of the program's copies.
    nodes: Vec<sys::CUgraphNode>,
}

impl DriverGraph {
    /// Builds the graph. Also returns the times in seconds that the calling thread spends in creating the empty graph, in adding the nodes
    /// with their dependencies, and in instantiating the executable graph.
    pub fn build(binding: &Binding<'_>) -> Result<(DriverGraph, [f64; 3]), Failure> {
        let start = Instant::now();
        let mut built = DriverGraph { graph: null_mut(), exec: null_mut(), nodes: Vec::new() };
        // SAFETY: the output is valid for the call.
        check("cuGraphCreate", unsafe { sys::cuGraphCreate(&mut built.graph, 0) })?;
        let creation = start.elapsed();

        let start = Instant::now();
        let program = binding.program;
        let mut in_lane: Vec<Option<usize>> = vec![None; program.lanes.len()];
        let mut nodes: Vec<Vec<sys::CUgraphNode>> = Vec::with_capacity(program.ops.len());
        for (index, op) in program.ops.iter().enumerate() {
            let lane = op.lane.0 as usize;
            let mut before: Vec<usize> = in_lane[lane].replace(index).into_iter().chain(op.after.iter().map(|op| op.0 as usize)).collect();
            before.sort_unstable();
            before.dedup();
            let before: Vec<sys::CUgraphNode> = before.iter().flat_map(|op| nodes[*op].iter().copied()).collect();
            let mut own = Vec::with_capacity(op.copies.len());
            for copy in &op.copies {
                let parameters = memcpy(binding.address(copy.to), binding.address(copy.from), copy.bytes);
                let mut node = null_mut();
                // SAFETY: nodes of this graph. Output and parameters are valid for the call, and the context is kept until the process
                // ends.
                let code = unsafe {
                    sys::cuGraphAddMemcpyNode(&mut node, built.graph, before.as_ptr(), before.len(), &parameters, binding.contexts[lane])
                };
                check("cuGraphAddMemcpyNode", code)?;
                own.push(node);
            }
            nodes.push(own);
        }
        let construction = start.elapsed();
        built.nodes = nodes.into_iter().flatten().collect();

        let start = Instant::now();
        // SAFETY: the output is valid for the call.
        check("cuGraphInstantiateWithFlags", unsafe { sys::cuGraphInstantiateWithFlags(&mut built.exec, built.graph, 0) })?;
        let seconds = [creation, construction, start.elapsed()].map(|duration| duration.as_secs_f64());
        Ok((built, seconds))
    }

    /// Updates the nodes to the addresses of another binding of the same program. The graph must not be executing.
    pub fn repoint(&self, binding: &Binding<'_>) -> Result<(), Failure> {
        let copies = binding.program.ops.iter().flat_map(|op| op.copies.iter().map(|copy| (op.lane.0 as usize, copy)));
        for (node, (lane, copy)) in self.nodes.iter().zip(copies) {
            let parameters = memcpy(binding.address(copy.to), binding.address(copy.from), copy.bytes);
            // SAFETY: a node of the instantiated graph. The parameters are valid for the call, and the context until the process ends.
            check("cuGraphExecMemcpyNodeSetParams", unsafe {
                sys::cuGraphExecMemcpyNodeSetParams(self.exec, *node, &parameters, binding.contexts[lane])
            })?;
        }
        Ok(())
    }

    pub fn launch(&self, stream: StreamHandle) -> Result<(), Failure> {
        // SAFETY: an instantiated graph. Its nodes use allocations of the benchmark, which live until the launch was waited for.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, raw(stream)) })
    }
}

impl Drop for DriverGraph {
    fn drop(&mut self) {
        // SAFETY: created in `build`, and idle.
        unsafe {
            if !self.exec.is_null() {
                sys::cuGraphExecDestroy(self.exec);
            }
            sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Returns the CUDA stream that a stream handle of a context on the CUDA backend represents.
pub fn raw(stream: StreamHandle) -> sys::CUstream {
    with_exposed_provenance_mut(stream.0)
}

/// Returns the driver's parameters for one contiguous copy. The driver determines from the addresses on which devices the memory is.
fn memcpy(dst: u64, src: u64, bytes: u64) -> sys::CUDA_MEMCPY3D {
    let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: unified,
        srcHost: null(),
        srcDevice: src,
        srcArray: null_mut(),
        reserved0: null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: unified,
        dstHost: null_mut(),
        dstDevice: dst,
        dstArray: null_mut(),
        reserved1: null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: bytes as usize,
        Height: 1,
        Depth: 1,
    }
}
