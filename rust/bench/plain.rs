//! Implements the plain copies with which mpgpu is compared, and the copies by which data is verified independently of mpgpu.
//!
//! On CUDA, plain copies are written as a careful user of the driver would write them: asynchronous copies in non-blocking streams that
//! exist already, with peer access enabled, and with the arrays of a batched copy prepared in advance. On the host backend, plain copies
//! are calls of `memcpy` on the calling thread.

use super::Failure;
use cudarc::driver::sys::{self, CUresult};
use mpgpu_contexts::{Context, Transfer};
use mpgpu_core::topology::DeviceId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};

/// Method by which plain copies (copies without mpgpu) of one communication step are made.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Manner {
    /// One driver call for each copy, all in one stream.
    OneStream,
    /// One driver call for each copy, each in its own stream. There are no dependencies between the streams, and the host waits for each of
    /// them.
    Streams,
    /// One driver call for each copy, each in its own stream, except the first copy, which is in the caller's stream. Events fork the other
    /// streams from the caller's stream and join them to it again. So the communication step is ordered after earlier work and before later
    /// work in the caller's stream, as with `mp_execute`.
    Joined,
    /// One driver call for all copies.
    Batched,
    /// One `memcpy` for each copy on the calling thread.
    Memcpy,
}

impl Manner {
    pub const fn name(self) -> &'static str {
        match self {
            Manner::OneStream => "one stream",
            Manner::Streams => "a stream each",
            Manner::Joined => "forked and joined",
            Manner::Batched => "one batched copy",
            Manner::Memcpy => "memcpy, one thread",
        }
    }
}

/// Plain copies (copies without mpgpu), with an implementation for nodes with GPUs and one for nodes without.
pub trait Plain {
    /// Returns the methods in `wanted` that this node supports.
    fn manners(&self, wanted: &[Manner]) -> Vec<Manner>;
    /// Prepares the copies that later calls of `issue` start.
    fn prepare(&mut self, copies: &[Transfer]) -> Result<(), Failure>;
    /// Starts the prepared copies with the method `manner`.
    fn issue(&mut self, manner: Manner) -> Result<(), Failure>;
    /// Blocks until the copies that were started with `manner` are done.
    fn wait(&mut self, manner: Manner) -> Result<(), Failure>;
    /// Makes the CUDA context of a GPU current, as in a program that copies from this GPU.
    fn make_current(&mut self, device: DeviceId) -> Result<(), Failure>;
    /// Copies `bytes` bytes between `device` and host memory, and returns when the data has arrived.
    fn copy_now(&mut self, device: DeviceId, dst: u64, src: u64, bytes: u64) -> Result<(), Failure>;
    /// Sets every byte of a range to `value`, and returns when all bytes are set.
    fn set_now(&mut self, device: DeviceId, dst: u64, value: u8, bytes: u64) -> Result<(), Failure>;
}

/// Returns the plain copies that match the backend of a context.
pub fn of(context: &Context) -> Box<dyn Plain> {
    if super::is_on_gpus(context) { Box::new(OnCuda::default()) } else { Box::new(OnHost::default()) }
}

/// Plain copies by `memcpy`, for the host backend, on which all memory belongs to the process.
#[derive(Default)]
pub struct OnHost {
    copies: Vec<Transfer>,
}

impl Plain for OnHost {
    fn manners(&self, _: &[Manner]) -> Vec<Manner> {
        vec![Manner::Memcpy]
    }

    fn prepare(&mut self, copies: &[Transfer]) -> Result<(), Failure> {
        self.copies = copies.to_vec();
        Ok(())
    }

    fn issue(&mut self, _: Manner) -> Result<(), Failure> {
        for copy in &self.copies {
            memcpy(copy.dst, copy.src, copy.bytes);
        }
        Ok(())
    }

    fn wait(&mut self, _: Manner) -> Result<(), Failure> {
        Ok(())
    }

    fn make_current(&mut self, _: DeviceId) -> Result<(), Failure> {
        Ok(())
    }

    fn copy_now(&mut self, _: DeviceId, dst: u64, src: u64, bytes: u64) -> Result<(), Failure> {
        memcpy(dst, src, bytes);
        Ok(())
    }

    fn set_now(&mut self, _: DeviceId, dst: u64, value: u8, bytes: u64) -> Result<(), Failure> {
        set(dst, value, bytes);
        Ok(())
    }
}

fn memcpy(dst: u64, src: u64, bytes: u64) {
    let (dst, src) = (with_exposed_provenance_mut::<u8>(dst as usize), with_exposed_provenance::<u8>(src as usize));
    // SAFETY: both ranges lie in allocations of the benchmark that nothing else uses now, and they do not overlap.
    unsafe { dst.copy_from_nonoverlapping(src, bytes as usize) };
}

fn set(dst: u64, value: u8, bytes: u64) {
    // SAFETY: the range lies in an allocation of the benchmark that nothing else uses now.
    unsafe { with_exposed_provenance_mut::<u8>(dst as usize).write_bytes(value, bytes as usize) };
}

/// Plain copies by the CUDA driver. The value is created after mpgpu has opened a CUDA context, so the driver is already loaded and
/// initialized.
#[derive(Default)]
pub struct OnCuda {
    gpus: BTreeMap<i32, Gpu>,
    /// Pairs of GPUs for which peer access is enabled, with the lower number first.
    joined: BTreeSet<(DeviceId, DeviceId)>,
    copies: Vec<Transfer>,
    /// Stream of each copy, in the order of the copies. The first is the caller's stream for [`Manner::Joined`].
    streams: Vec<Stream>,
    /// Addresses of the destinations, addresses of the sources, and sizes, as arrays for the batched copy.
    batch: (Vec<u64>, Vec<u64>, Vec<usize>),
}

/// GPU in use, with its primary CUDA context and the streams that exist on it. They exist until the process ends.
struct Gpu {
    context: sys::CUcontext,
    streams: Vec<Stream>,
}

/// Non-blocking stream with an event, through which other streams can wait for its work.
#[derive(Copy, Clone)]
struct Stream {
    raw: sys::CUstream,
    event: sys::CUevent,
}

impl Stream {
    /// Creates a stream on the GPU whose CUDA context is current.
    fn new() -> Result<Stream, Failure> {
        let (mut raw, mut event) = (null_mut(), null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the output is valid for the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: as above.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Stream { raw, event })
    }

    /// Records the event after all work that is now in the stream.
    fn record(&self) -> Result<(), Failure> {
        // SAFETY: a stream and an event of one context, both kept until the process ends.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.raw) })
    }

    /// Makes later work of this stream wait for the recorded event of `other`.
    fn wait_for(&self, other: &Stream) -> Result<(), Failure> {
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, other.event, 0) })
    }
}

impl OnCuda {
    /// Makes the primary context of a GPU current, like `cudaSetDevice`. Host memory is treated as GPU 0.
    fn enter(&mut self, device: DeviceId) -> Result<&mut Gpu, Failure> {
        let ordinal = device.0.max(0);
        let gpu = match self.gpus.entry(ordinal) {
            std::collections::btree_map::Entry::Occupied(gpu) => gpu.into_mut(),
            std::collections::btree_map::Entry::Vacant(none) => {
                let mut context = null_mut();
                // SAFETY: the output is valid for the call. The context is kept until the process ends.
                check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, ordinal) })?;
                none.insert(Gpu { context, streams: Vec::new() })
            }
        };
        // SAFETY: a retained context.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(gpu.context) })?;
        Ok(gpu)
    }

    /// Returns the primary context of a GPU and makes it current. Host memory is treated as GPU 0.
    pub fn context_of(&mut self, device: DeviceId) -> Result<sys::CUcontext, Failure> {
        Ok(self.enter(device)?.context)
    }

    /// Enables peer access between two GPUs, if the hardware supports it. Without peer access the driver routes copies between them through
    /// host memory.
    pub fn enable_access(&mut self, a: DeviceId, b: DeviceId) -> Result<(), Failure> {
        if a == b || a.is_host() || b.is_host() || !self.joined.insert((a.min(b), a.max(b))) {
            return Ok(());
        }
        for (from, to) in [(a, b), (b, a)] {
            let peer = self.context_of(to)?;
            self.enter(from)?;
            // SAFETY: retained contexts.
            match unsafe { sys::cuCtxEnablePeerAccess(peer, 0) } {
                CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED | CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => {}
                result => check("cuCtxEnablePeerAccess", result)?,
            }
        }
        Ok(())
    }

    fn context(&self, device: DeviceId) -> Option<sys::CUcontext> {
        self.gpus.get(&device.0).filter(|_| !device.is_host()).map(|gpu| gpu.context)
    }

    fn enqueue(&self, copy: &Transfer, stream: sys::CUstream) -> Result<(), Failure> {
        let Transfer { dst, src, bytes, .. } = *copy;
        match (self.context(copy.dst_device), self.context(copy.src_device)) {
            (Some(to), Some(from)) => {
                // SAFETY: both ranges lie in allocations of the benchmark, which live until the copies were waited for.
                check("cuMemcpyPeerAsync", unsafe { sys::cuMemcpyPeerAsync(dst, to, src, from, bytes as usize, stream) })
            }
            // SAFETY: as above.
            _ => check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(dst, src, bytes as usize, stream) }),
        }
    }

    fn enqueue_joined(&self) -> Result<(), Failure> {
        let (Some((caller, streams)), Some((first, copies))) = (self.streams.split_first(), self.copies.split_first()) else {
            return Ok(());
        };
        caller.record()?;
        self.enqueue(first, caller.raw)?;
        for (copy, stream) in copies.iter().zip(streams) {
            stream.wait_for(caller)?;
            self.enqueue(copy, stream.raw)?;
            stream.record()?;
        }
        streams.iter().try_for_each(|stream| caller.wait_for(stream))
    }

    fn enqueue_batched(&mut self, stream: sys::CUstream) -> Result<(), Failure> {
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (dsts, srcs, sizes) = &mut self.batch;
        let mut first = 0;
        // SAFETY: three arrays of equal length and one set of attributes for all, which the driver reads before it returns. The ranges are
        // valid as for single copies. `manners` has checked that the symbol exists.
        let result = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                sizes.as_mut_ptr(),
                sizes.len(),
                &mut attributes,
                &mut first,
                1,
                stream,
            )
        };
        check("cuMemcpyBatchAsync", result)
    }
}

impl Plain for OnCuda {
    fn manners(&self, wanted: &[Manner]) -> Vec<Manner> {
        // SAFETY: the driver is loaded. The symbol is looked up but not called.
        let has_batch = unsafe { sys::culib().get::<unsafe extern "C" fn()>(b"cuMemcpyBatchAsync_v2") }.is_ok();
        wanted.iter().copied().filter(|manner| *manner != Manner::Batched || has_batch).collect()
    }

    fn prepare(&mut self, copies: &[Transfer]) -> Result<(), Failure> {
        let mut taken = BTreeMap::<DeviceId, usize>::new();
        self.streams.clear();
        for copy in copies {
            self.enter(copy.dst_device)?;
            self.enable_access(copy.src_device, copy.dst_device)?;
            // A copy is fastest in a stream of the GPU on which its source is.
            let owner = if copy.src_device.is_host() { copy.dst_device } else { copy.src_device };
            let index = taken.entry(owner).or_default();
            let gpu = self.enter(owner)?;
            if *index == gpu.streams.len() {
                gpu.streams.push(Stream::new()?);
            }
            let stream = gpu.streams[*index];
            *index += 1;
            self.streams.push(stream);
        }
        self.copies = copies.to_vec();
        let sizes = copies.iter().map(|copy| copy.bytes as usize).collect();
        self.batch = (copies.iter().map(|copy| copy.dst).collect(), copies.iter().map(|copy| copy.src).collect(), sizes);
        Ok(())
    }

    fn issue(&mut self, manner: Manner) -> Result<(), Failure> {
        match manner {
            Manner::OneStream | Manner::Memcpy => self.copies.iter().try_for_each(|copy| self.enqueue(copy, self.streams[0].raw)),
            Manner::Streams => self.copies.iter().zip(&self.streams).try_for_each(|(copy, stream)| self.enqueue(copy, stream.raw)),
            Manner::Joined => self.enqueue_joined(),
            Manner::Batched => self.enqueue_batched(self.streams[0].raw),
        }
    }

    fn wait(&mut self, manner: Manner) -> Result<(), Failure> {
        let used = if manner == Manner::Streams { self.streams.len() } else { 1 };
        // SAFETY: streams of this module.
        self.streams[..used].iter().try_for_each(|stream| check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.raw) }))
    }

    fn make_current(&mut self, device: DeviceId) -> Result<(), Failure> {
        self.enter(device).map(drop)
    }

    fn copy_now(&mut self, device: DeviceId, dst: u64, src: u64, bytes: u64) -> Result<(), Failure> {
        self.enter(device)?;
        // SAFETY: both ranges lie in allocations of the benchmark.
        check("cuMemcpy", unsafe { sys::cuMemcpy(dst, src, bytes as usize) })?;
        // SAFETY: the call has no argument. It is needed because a copy may return before its data has arrived.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    fn set_now(&mut self, device: DeviceId, dst: u64, value: u8, bytes: u64) -> Result<(), Failure> {
        if device.is_host() {
            set(dst, value, bytes);
            return Ok(());
        }
        self.enter(device)?;
        // SAFETY: the range lies in an allocation of the benchmark on this GPU.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(dst, value, bytes as usize) })?;
        // SAFETY: the call has no argument. It is needed because a memset returns early and is not ordered with non-blocking streams.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

pub fn check(what: &str, result: CUresult) -> Result<(), Failure> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the output is valid for the call. It becomes NULL or points to a static text.
    let text = unsafe {
        if sys::cuGetErrorString(result, &mut text) == CUresult::CUDA_SUCCESS && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            String::from("unknown error")
        }
    };
    Err(format!("{what}: {text} (code {})", result as u32).into())
}
