//! Simulates CUDA graphs, stream captures, user objects and kernels.

use super::super::driver::{CUcontext, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstream};
use super::{CURRENT, Code, Driver, INVALID_VALUE, Node, Task, call, copy_bytes, current, driver, enqueue, may_copy, node, put};
use crate::block_list::{BlockList, ListEnd, PIECE_LANES};
use crate::bridge::{Segment, copy_blocks_on_cpu};
use crate::ipc::signal;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::with_exposed_provenance_mut;
use std::sync::{Arc, LazyLock};

/// Graphs, executable graphs and user objects of the simulated driver.
#[derive(Default)]
pub struct Graphs {
    pub graphs: HashMap<usize, Graph>,
    pub execs: HashMap<usize, Graph>,
    /// Reference count and destructor of each user object.
    pub objects: HashMap<usize, (u32, HostCall)>,
    pub modules: u32,
    /// Graph into which all streams are being captured; 0 if there is no capture.
    captured: usize,
}

/// Graph or executable graph.
#[derive(Clone, Default)]
pub struct Graph {
    work: Vec<Work>,
    objects: Vec<usize>,
}

#[derive(Copy, Clone)]
pub struct HostCall {
    function: unsafe extern "C" fn(*mut c_void),
    user: usize,
}

#[derive(Clone)]
enum Work {
    Host(HostCall),
    /// Copy that runs in a certain context.
    Copy(usize, Segment),
    Kernel(Vec<Segment>),
}

impl HostCall {
    /// Calls the host function. Must not be called while the node is locked, because the function may call the driver.
    pub(super) fn run(self) {
        // SAFETY: the backend passed a function of this type with its argument.
        unsafe { (self.function)(with_exposed_provenance_mut(self.user)) }
    }
}

/// Returns the double of a driver that also has graphs, user objects and kernels.
pub fn whole() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
        cuGraphCreate: create,
        cuGraphDestroy: destroy,
        cuGraphAddMemcpyNode: add_copy,
        cuGraphExecMemcpyNodeSetParams: set_copy,
        cuGraphAddKernelNode: Some(add_kernel),
        cuGraphExecKernelNodeSetParams: Some(set_kernel),
        cuGraphInstantiateWithFlags: Some(instantiate),
        cuGraphExecDestroy: destroy_exec,
        cuGraphLaunch: launch,
        cuStreamGetCaptureInfo_v2: Some(capture_info),
        cuUserObjectCreate: Some(create_object),
        cuUserObjectRelease: Some(release_object),
        cuGraphRetainUserObject: Some(retain_object),
        cuModuleLoadData: load_module,
        cuModuleGetFunction: get_function,
        cuModuleUnload: unload_module,
        cuLaunchKernel: launch_kernel,
        ..driver().clone()
    });
    &DRIVER
}

/// Returns the double of [`whole`], in which kernels can also be launched early (programmatic stream serialization).
pub fn whole_with_early_launches() -> &'static Driver {
    static DRIVER: LazyLock<Driver> =
        LazyLock::new(|| Driver { cuDriverGetVersion: version, cuLaunchKernelEx: Some(launch_early), ..whole().clone() });
    &DRIVER
}

/// Ends the capture of all streams and returns the captured graph.
pub fn captured() -> CUgraph {
    node(|node| {
        node.capturing = false;
        with_exposed_provenance_mut(std::mem::take(&mut node.graphs.captured))
    })
}

fn captured_graph(node: &mut Node) -> usize {
    if node.graphs.captured == 0 {
        node.graphs.captured = node.new_handle();
        node.graphs.graphs.insert(node.graphs.captured, Graph::default());
    }
    node.graphs.captured
}

impl Node {
    /// Adds a copy in the current context to the graph that is being captured.
    pub(super) fn capture_copy(&mut self, dst: u64, src: u64, bytes: usize) {
        let graph = captured_graph(self);
        let copy = Work::Copy(current(), Segment { dst, src, bytes: bytes as u64 });
        self.graphs.graphs.entry(graph).or_default().work.push(copy);
    }
}

unsafe extern "C" fn capture_info(
    _: CUstream,
    status: *mut c_uint,
    _: *mut c_ulonglong,
    graph: *mut CUgraph,
    _: *mut *const CUgraphNode,
    _: *mut usize,
) -> Code {
    call("cuStreamGetCaptureInfo", |node| {
        put(status, c_uint::from(node.capturing));
        let captured = if node.capturing { captured_graph(node) } else { 0 };
        put(graph, with_exposed_provenance_mut(captured))
    })
}

/// Runs a host function immediately. If streams have queues, enqueues the function instead; during a capture, adds it to the graph.
pub(super) unsafe extern "C" fn launch_host(stream: CUstream, function: unsafe extern "C" fn(*mut c_void), user: *mut c_void) -> Code {
    let host = HostCall { function, user: user.expose_provenance() };
    let mut runs = false;
    let code = call("cuLaunchHostFunc", |node| {
        if node.capturing {
            let graph = captured_graph(node);
            node.graphs.graphs.entry(graph).or_default().work.push(Work::Host(host));
        } else {
            runs = true;
        }
        0
    });
    if !runs {
        return code;
    }
    if super::node(|node| node.room.is_some()) {
        return super::enqueue("cuLaunchHostFunc", stream, super::Task::Function(Some(host), Arc::default()));
    }
    host.run();
    code
}

unsafe extern "C" fn create_object(
    out: *mut sys::CUuserObject,
    user: *mut c_void,
    function: unsafe extern "C" fn(*mut c_void),
    references: c_uint,
    _: c_uint,
) -> Code {
    call("cuUserObjectCreate", |node| {
        let object = node.new_handle();
        node.graphs.objects.insert(object, (references, HostCall { function, user: user.expose_provenance() }));
        put(out, with_exposed_provenance_mut(object))
    })
}

impl Graphs {
    /// Releases references to user objects. Returns the destructors of objects that have no references any more.
    fn release(&mut self, objects: &[usize]) -> Vec<HostCall> {
        let mut dead = Vec::new();
        for object in objects {
            if let Some((references, destroy)) = self.objects.get_mut(object) {
                *references -= 1;
                if *references == 0 {
                    dead.push(*destroy);
                    self.objects.remove(object);
                }
            }
        }
        dead
    }
}

unsafe extern "C" fn release_object(object: sys::CUuserObject, _: c_uint) -> Code {
    let mut dead = Vec::new();
    let code = call("cuUserObjectRelease", |node| {
        dead = node.graphs.release(&[object.addr()]);
        0
    });
    dead.into_iter().for_each(HostCall::run);
    code
}

/// Transfers a reference to a user object from the caller to the graph, as the backend requests.
unsafe extern "C" fn retain_object(graph: CUgraph, object: sys::CUuserObject, _: c_uint, _: c_uint) -> Code {
    call("cuGraphRetainUserObject", |node| match node.graphs.graphs.get_mut(&graph.addr()) {
        Some(graph) => {
            graph.objects.push(object.addr());
            0
        }
        None => INVALID_VALUE,
    })
}

unsafe extern "C" fn create(out: *mut CUgraph, _: c_uint) -> Code {
    call("cuGraphCreate", |node| {
        let graph = node.new_handle();
        node.graphs.graphs.insert(graph, Graph::default());
        put(out, with_exposed_provenance_mut(graph))
    })
}

unsafe extern "C" fn destroy(graph: CUgraph) -> Code {
    remove("cuGraphDestroy", |graphs| graphs.graphs.remove(&graph.addr()))
}

unsafe extern "C" fn destroy_exec(exec: CUgraphExec) -> Code {
    remove("cuGraphExecDestroy", |graphs| graphs.execs.remove(&exec.addr()))
}

fn remove(function: &'static str, take: impl FnOnce(&mut Graphs) -> Option<Graph>) -> Code {
    let mut dead = Vec::new();
    let code = call(function, |node| {
        let Some(gone) = take(&mut node.graphs) else { return INVALID_VALUE };
        dead = node.graphs.release(&gone.objects);
        0
    });
    dead.into_iter().for_each(HostCall::run);
    code
}

/// Instantiates a graph. The executable graph gets copies of its nodes and references to its user objects.
unsafe extern "C" fn instantiate(out: *mut CUgraphExec, graph: CUgraph, _: c_ulonglong) -> Code {
    call("cuGraphInstantiateWithFlags", |node| {
        let Some(graph) = node.graphs.graphs.get(&graph.addr()).cloned() else { return INVALID_VALUE };
        for object in &graph.objects {
            node.graphs.objects.entry(*object).and_modify(|(references, _)| *references += 1);
        }
        let exec = node.new_handle();
        node.graphs.execs.insert(exec, graph);
        put(out, with_exposed_provenance_mut(exec))
    })
}

fn add(function: &'static str, out: *mut CUgraphNode, graph: CUgraph, work: Work) -> Code {
    call(function, |node| {
        let Some(graph) = node.graphs.graphs.get_mut(&graph.addr()) else { return INVALID_VALUE };
        graph.work.push(work);
        put(out, with_exposed_provenance_mut(graph.work.len()))
    })
}

fn set(function: &'static str, exec: CUgraphExec, at: CUgraphNode, work: Work) -> Code {
    call(function, |node| {
        let found = node.graphs.execs.get_mut(&exec.addr()).and_then(|exec| exec.work.get_mut(at.addr().wrapping_sub(1)));
        found.map_or(INVALID_VALUE, |found| {
            *found = work;
            0
        })
    })
}

fn copy_of(copy: *const sys::CUDA_MEMCPY3D, context: CUcontext) -> Work {
    // SAFETY: the backend passes parameters that are valid for the call.
    let copy = unsafe { &*copy };
    Work::Copy(context.addr(), Segment { dst: copy.dstDevice, src: copy.srcDevice, bytes: copy.WidthInBytes as u64 })
}

unsafe extern "C" fn add_copy(
    out: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: usize,
    copy: *const sys::CUDA_MEMCPY3D,
    context: CUcontext,
) -> Code {
    add("cuGraphAddMemcpyNode", out, graph, copy_of(copy, context))
}

unsafe extern "C" fn set_copy(exec: CUgraphExec, at: CUgraphNode, copy: *const sys::CUDA_MEMCPY3D, context: CUcontext) -> Code {
    set("cuGraphExecMemcpyNodeSetParams", exec, at, copy_of(copy, context))
}

unsafe extern "C" fn add_kernel(
    out: *mut CUgraphNode,
    graph: CUgraph,
    _: *const CUgraphNode,
    _: usize,
    kernel: *const sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Code {
    // SAFETY: the backend passes parameters that are valid for the call.
    let work = unsafe { Work::Kernel(segments((*kernel).func, (*kernel).kernelParams)) };
    add("cuGraphAddKernelNode", out, graph, work)
}

unsafe extern "C" fn set_kernel(exec: CUgraphExec, at: CUgraphNode, kernel: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) -> Code {
    // SAFETY: as above.
    let work = unsafe { Work::Kernel(segments((*kernel).func, (*kernel).kernelParams)) };
    set("cuGraphExecKernelNodeSetParams", exec, at, work)
}

/// Executes the nodes of an executable graph immediately, in the order in which they were added.
unsafe extern "C" fn launch(exec: CUgraphExec, _: CUstream) -> Code {
    let mut work = Vec::new();
    let mut code = call("cuGraphLaunch", |node| {
        let Some(exec) = node.graphs.execs.get(&exec.addr()) else { return INVALID_VALUE };
        work = exec.work.clone();
        0
    });
    for work in work {
        match work {
            Work::Host(host) => host.run(),
            Work::Copy(context, Segment { dst, src, bytes }) => node(|node| {
                CURRENT.with_borrow_mut(|current| current.push(context));
                let copied = copy_bytes(node, dst, src, bytes as usize);
                CURRENT.with_borrow_mut(Vec::pop);
                code = if code == 0 { copied } else { code };
            }),
            Work::Kernel(segments) => node(|node| copy_segments(node, &segments)),
        }
    }
    code
}

const WAIT: usize = 0x10;
const MANY: usize = 0x20;
const FEW: usize = 0x30;
const ACTIONS: usize = 0x50;
const FEW_ACTIONS: usize = 0x70;
const PIECES: usize = 0x90;
const BLOCKS: usize = 0xb0;

/// Returns the copy segments of a kernel launch, from the kernel's argument.
unsafe fn segments(function: CUfunction, arguments: *mut *mut c_void) -> Vec<Segment> {
    if function.addr() == BLOCKS {
        // SAFETY: the one argument of this function is a list.
        return listed(unsafe { &*(*arguments).cast::<BlockList>() });
    }
    let count_at = match function.addr() {
        MANY | PIECES => 120 * 24 + 121 * 8,
        FEW => 32 * 24 + 33 * 8,
        ACTIONS => 120 * 24 + 24,
        FEW_ACTIONS => 8 * 24 + 24,
        _ => return Vec::new(),
    };
    // SAFETY: `SegmentListOf<most>` of cpp/segment_copy.hpp contains the segments, one number more than segments, and the number of
    // segments. `ActionList` of cpp/actions.hpp has three words instead of the numbers, and two sets of actions if the last of the words is
    // the address of a turn counter.
    unsafe {
        let list = *arguments;
        let count = list.cast::<u8>().add(count_at).cast::<u32>().read();
        let by_turns = [ACTIONS, FEW_ACTIONS].contains(&function.addr()) && list.cast::<u8>().add(count_at - 8).cast::<u64>().read() != 0;
        let count = if by_turns { 2 * count } else { count };
        (0..count as usize).map(|index| list.cast::<Segment>().add(index).read()).collect()
    }
}

/// Returns the copies of a list of blocks or pieces. Blocks whose index is out of range are omitted.
fn listed(list: &BlockList) -> Vec<Segment> {
    // SAFETY: Lists and indices are in memory of this process, which also represents memory of GPUs.
    let word = |address: u64, width: u64| unsafe {
        if width == 4 {
            u64::from(std::ptr::with_exposed_provenance::<u32>(address as usize).read())
        } else {
            std::ptr::with_exposed_provenance::<u64>(address as usize).read()
        }
    };
    if list.pieces != 0 {
        let word = |at: u64| word(list.pieces + 8 * at, 8);
        return (list.first..list.first + list.count)
            .map(|at| Segment { dst: word(3 * at), src: word(3 * at + 1), bytes: word(3 * at + 2) })
            .collect();
    }
    let block = |end: &ListEnd, at: u64| if end.index == 0 { at } else { word(end.index + at * end.width, end.width) };
    let mut segments = Vec::new();
    for layer in &list.layers[..list.layer_count as usize] {
        for at in list.first..list.first + list.count {
            let (dst, src) = (block(&list.dst, at), block(&list.src, at));
            if dst < list.dst.blocks && src < list.src.blocks {
                let (dst, src) = (layer.dst + dst * list.dst.stride, layer.src + src * list.src.stride);
                segments.push(Segment { dst, src, bytes: list.bytes });
            }
        }
    }
    segments
}

/// Runs the CPU build of the kernel that copies blocks and pieces, with the groups and lanes of a launch of `blocks` blocks. Returns an
/// error if a piece is outside its allocation.
fn run_list(node: &Node, list: &BlockList, blocks: c_uint) -> Code {
    if listed(list).iter().any(|copy| copy.bytes > 0 && !may_copy(node, copy.dst, copy.src, copy.bytes as usize)) {
        return INVALID_VALUE;
    }
    // SAFETY: All copies are inside known memory or memory of the test. If a list contains a destination twice, the caller accepts bytes of
    // either source.
    unsafe { copy_blocks_on_cpu(list, blocks * (PIECE_LANES / list.lanes), list.lanes) };
    0
}

fn copy_segments(node: &Node, segments: &[Segment]) {
    for Segment { dst, src, bytes } in segments.iter().filter(|segment| segment.bytes > 0) {
        copy_bytes(node, *dst, *src, *bytes as usize);
    }
}

unsafe extern "C" fn load_module(out: *mut CUmodule, _: *const c_void) -> Code {
    call("cuModuleLoadData", |node| {
        node.graphs.modules += 1;
        put(out, with_exposed_provenance_mut(0x40))
    })
}

unsafe extern "C" fn unload_module(_: CUmodule) -> Code {
    call("cuModuleUnload", |node| {
        node.graphs.modules -= 1;
        0
    })
}

unsafe extern "C" fn get_function(out: *mut CUfunction, _: CUmodule, name: *const c_char) -> Code {
    // SAFETY: the backend passes a NUL-terminated string.
    let function = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"mpgpu_wait_signals" => WAIT,
        b"mpgpu_copy_segments" => MANY,
        b"mpgpu_copy_pieces" => PIECES,
        b"mpgpu_copy_blocks" => BLOCKS,
        b"mpgpu_run_actions" => ACTIONS,
        b"mpgpu_run_few_actions" => FEW_ACTIONS,
        _ => FEW,
    };
    call("cuModuleGetFunction", |_| put(out, with_exposed_provenance_mut(function)))
}

/// Runs a kernel immediately: copies data and sets flags, without waiting for signals and flags. A kernel that copies blocks or pieces runs
/// in stream order if queues are limited.
unsafe extern "C" fn launch_kernel(
    function: CUfunction,
    blocks: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    stream: CUstream,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Code {
    if function.addr() != BLOCKS || node(|node| node.room.is_none() || node.is_captured(stream.addr())) {
        return launched("cuLaunchKernel", function, blocks, arguments);
    }
    // SAFETY: the one argument of this function is a list.
    let list = unsafe { *(*arguments).cast::<BlockList>() };
    let work = move |node: &mut Node| {
        if run_list(node, &list, blocks) != 0 {
            node.stuck.push("a kernel left its memory");
        }
    };
    let refused = call("cuLaunchKernel", |_| 0);
    if refused == 0 { enqueue("cuLaunchKernel", stream, Task::Work(Box::new(work))) } else { refused }
}

unsafe extern "C" fn version(out: *mut c_int) -> Code {
    put(out, 12030)
}

/// Launches a kernel that itself waits for the end of the previous work in the stream.
unsafe extern "C" fn launch_early(
    config: *const sys::CUlaunchConfig,
    function: CUfunction,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Code {
    // SAFETY: the backend passes a configuration and its attributes.
    let (config, attributes) = unsafe { (&*config, std::slice::from_raw_parts((*config).attrs, (*config).numAttrs as usize)) };
    let early = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    // SAFETY: the attribute's id selects the member.
    assert!(matches!(attributes, [one] if one.id == early && unsafe { one.value.programmaticStreamSerializationAllowed } == 1));
    assert_eq!([config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ, config.sharedMemBytes], [1, 1, 1, 1, 0]);
    launched("cuLaunchKernelEx", function, config.gridDimX, arguments)
}

fn launched(name: &'static str, function: CUfunction, blocks: c_uint, arguments: *mut *mut c_void) -> Code {
    call(name, |node| {
        // SAFETY: the backend passes the argument of the function.
        let segments = unsafe { segments(function, arguments) };
        let are_actions = [ACTIONS, FEW_ACTIONS].contains(&function.addr());
        if are_actions {
            node.actions.push((segments.clone(), blocks));
        }
        if node.capturing {
            let graph = captured_graph(node);
            node.graphs.graphs.entry(graph).or_default().work.push(Work::Kernel(segments));
        } else if function.addr() == BLOCKS {
            // SAFETY: the one argument of this function is a list.
            return run_list(node, unsafe { &*(*arguments).cast::<BlockList>() }, blocks);
        } else {
            copy_segments(node, &segments);
            let flags = segments.iter().filter(|action| are_actions && action.bytes == 0 && action.dst == 0 && action.src != 0);
            // SAFETY: flags of a test that outlive its streams.
            flags.for_each(|action| unsafe { signal::store(action.src & !1, if action.src & 1 == 1 { u64::from(blocks) } else { 1 }) });
        }
        0
    })
}
