//! Executes random plans on sixteen threads and all GPUs, and checks every byte; tests/rust/executions.rs describes the work of a thread.
//! Buffers are allocated by the library, by `cudaMalloc` or from a pool, or are pinned, registered or pageable. Streams are those of the
//! library, those of the program and the default streams.
//!
//! `CAMPAIGN_EXECUTIONS` and `CAMPAIGN_SECONDS` limit the campaign; the first limit that is reached ends it. `CAMPAIGN_SEED` sets the seed.
//! With `LONG_TESTS=1` the default is a million executions.

#[path = "../rust/common/mod.rs"]
mod common;
#[path = "../rust/executions.rs"]
mod executions;
#[path = "../rust/node/mod.rs"]
mod node;

use self::common::{is_long, setting};
use self::executions::{Access, Campaign, Machine as Place};
use self::node::context_options;
use super::scale::scaled;
use super::staging::free_bytes;
use super::*;
use mpgpu::abi::{mp_context_options_t, mp_stream_t};
use std::collections::BTreeMap;
use std::ffi::CString;

struct Gpus {
    count: u32,
    /// Topology with which the planner uses relays, if there are two to four GPUs. Otherwise `None`.
    topology: Option<CString>,
    primaries: Vec<usize>,
}

impl Gpus {
    fn new(count: u32) -> Gpus {
        let topology = forced().map(|topology| {
            let path = std::env::temp_dir().join(format!("mpgpu-campaign-{}.toml", std::process::id()));
            std::fs::write(&path, topology.to_toml()).expect("a file for the test");
            CString::new(path.to_str().expect("UTF-8")).expect("no NUL")
        });
        let primaries = (0..count).map(|gpu| {
            set_device(gpu);
            current().expose_provenance()
        });
        let gpus = Gpus { count, topology, primaries: primaries.collect() };
        gpus.let_all_into_pools(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        set_device(0);
        gpus
    }

    /// Gives all other GPUs access to the default memory pool of each GPU, or revokes the access.
    fn let_all_into_pools(&self, flags: sys::CUmemAccess_flags) {
        for gpu in 0..self.count as i32 {
            let others = (0..self.count as i32).filter(|other| *other != gpu);
            let descriptions: Vec<_> = others
                .map(|id| {
                    let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id };
                    sys::CUmemAccessDesc { location, flags }
                })
                .collect();
            if descriptions.is_empty() {
                continue;
            }
            let mut pool = std::ptr::null_mut();
            // SAFETY: inputs and outputs are valid for the calls. The pool is the GPU's default pool.
            unsafe {
                ok(sys::cuDeviceGetDefaultMemPool(&mut pool, gpu));
                ok(sys::cuMemPoolSetAccess(pool, descriptions.as_ptr(), descriptions.len()));
            }
        }
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        if let Some(file) = &self.topology {
            let _ = std::fs::remove_file(file.to_str().expect("UTF-8"));
        }
        // After a failed assertion the driver may refuse this call too.
        if !std::thread::panicking() {
            self.let_all_into_pools(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE);
        }
    }
}

impl Place for Gpus {
    fn options(&self) -> mp_context_options_t {
        let topology = self.topology.as_ref().map_or(std::ptr::null(), |file| file.as_ptr());
        mp_context_options_t { backend: 2, topology, ..context_options() }
    }
    fn gpus(&self) -> u32 {
        self.count
    }
    fn spans(&self) -> [u64; 2] {
        [256 << 10, 8 << 20]
    }
    fn staging(&self) -> [u64; 3] {
        [1 << 20, 4 << 20, 16 << 20]
    }
    fn stages(&self) -> bool {
        self.topology.is_some()
    }
    fn on_gpus(&self) -> u64 {
        let free: u64 = free_bytes(self.count).into_iter().sum();
        set_device(0);
        let (mut one, mut total) = (0, 0);
        // SAFETY: the outputs are valid for the call. All GPUs of a node are equal, and only differences matter.
        ok(unsafe { sys::cuMemGetInfo_v2(&mut one, &mut total) });
        (total as u64 * u64::from(self.count)).saturating_sub(free)
    }
    fn enter(&self, thread: u64) -> Box<dyn Access> {
        let gpu = (thread % u64::from(self.count)) as usize;
        let mut memory = Memory { primaries: self.primaries.clone(), home: gpu, streams: vec![], others: vec![], foreign: BTreeMap::new() };
        for gpu in 0..self.primaries.len() {
            memory.enter(gpu);
            memory.streams.push(memory.stream(sys::CUstream_flags::CU_STREAM_NON_BLOCKING));
        }
        memory.enter(gpu);
        memory.others =
            vec![memory.stream(sys::CUstream_flags::CU_STREAM_NON_BLOCKING), memory.stream(sys::CUstream_flags::CU_STREAM_DEFAULT)];
        Box::new(memory)
    }
}

const PAGE: usize = 4096;

/// Origin of a buffer that the library has not allocated.
enum Origin {
    Plain,
    Pool,
    Pinned,
    Registered(#[expect(dead_code, reason = "owns the memory")] Vec<u8>),
    Ordinary(#[expect(dead_code, reason = "owns the memory")] Vec<u8>),
}

/// Access of one thread to memory: a stream on each GPU, which is not ordered with other streams.
struct Memory {
    primaries: Vec<usize>,
    /// Number of the GPU that is current on this thread. The thread uses the default streams of this GPU.
    home: usize,
    streams: Vec<usize>,
    /// Streams of the program in which the library enqueues work.
    others: Vec<usize>,
    foreign: BTreeMap<usize, Origin>,
}

impl Memory {
    fn enter(&self, gpu: usize) {
        // SAFETY: a primary context, retained for the rest of the process.
        ok(unsafe { sys::cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(self.primaries[gpu])) });
    }

    /// Makes the given GPU current and calls `call` with this thread's stream on it.
    fn at<T>(&self, device: i32, call: impl FnOnce(sys::CUstream) -> T) -> T {
        self.enter(device as usize);
        let stream = self.streams.get(device as usize).copied().unwrap_or(0);
        let result = call(std::ptr::with_exposed_provenance_mut(stream));
        self.enter(self.home);
        result
    }

    /// Creates a stream in the current context.
    fn stream(&self, flags: sys::CUstream_flags) -> usize {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuStreamCreate(&mut stream, flags as u32) });
        stream.expose_provenance()
    }
}

impl Access for Memory {
    fn fill(&mut self, device: i32, address: usize, byte: u8, count: usize) {
        if device < 0 {
            // SAFETY: host memory of the thread with at least `count` bytes, which no execution uses meanwhile.
            return unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_bytes(byte, count) };
        }
        // SAFETY: as above, on a GPU.
        self.at(device, |stream| ok(unsafe { sys::cuMemsetD8Async(address as u64, byte, count, stream) }));
    }

    fn write(&mut self, device: i32, address: usize, bytes: &[u8]) {
        if device < 0 {
            // SAFETY: as in `fill`.
            return unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), std::ptr::with_exposed_provenance_mut(address), bytes.len()) };
        }
        // SAFETY: as in `fill`. The bytes do not change before `wait`.
        self.at(device, |stream| ok(unsafe { sys::cuMemcpyHtoDAsync_v2(address as u64, bytes.as_ptr().cast(), bytes.len(), stream) }));
    }

    fn read(&mut self, device: i32, address: usize, bytes: &mut [u8]) {
        if device < 0 {
            // SAFETY: as in `fill`.
            return unsafe { std::ptr::copy_nonoverlapping(std::ptr::with_exposed_provenance(address), bytes.as_mut_ptr(), bytes.len()) };
        }
        // SAFETY: as in `write`.
        self.at(device, |stream| ok(unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address as u64, bytes.len(), stream) }));
    }

    fn wait(&mut self) {
        for gpu in 0..self.streams.len() {
            // SAFETY: a stream of this thread.
            self.at(gpu as i32, |stream| ok(unsafe { sys::cuStreamSynchronize(stream) }));
        }
    }

    fn allocate(&mut self, device: i32, bytes: usize, kind: u64) -> Option<usize> {
        let (address, origin) = if device < 0 {
            match kind % 3 {
                0 => {
                    let mut pointer = std::ptr::null_mut();
                    // SAFETY: the output is valid for the call.
                    ok(unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) });
                    (pointer.expose_provenance(), Origin::Pinned)
                }
                registered => {
                    // Each buffer has its own pages, because whole pages are registered.
                    let whole = bytes.next_multiple_of(PAGE);
                    let mut memory = vec![0_u8; whole + PAGE];
                    let address = memory.as_mut_ptr().expose_provenance().next_multiple_of(PAGE);
                    if registered == 1 {
                        let pointer = std::ptr::with_exposed_provenance_mut(address);
                        // SAFETY: the vector exists until it is unregistered.
                        ok(unsafe { sys::cuMemHostRegister_v2(pointer, whole, sys::CU_MEMHOSTREGISTER_PORTABLE) });
                    }
                    (address, if registered == 1 { Origin::Registered(memory) } else { Origin::Ordinary(memory) })
                }
            }
        } else {
            let mut address = 0;
            let pooled = kind.is_multiple_of(2);
            // SAFETY: the output is valid for the calls.
            self.at(device, |stream| unsafe {
                if pooled {
                    ok(sys::cuMemAllocAsync(&mut address, bytes, stream));
                    ok(sys::cuStreamSynchronize(stream));
                } else {
                    ok(sys::cuMemAlloc_v2(&mut address, bytes));
                }
            });
            (address as usize, if pooled { Origin::Pool } else { Origin::Plain })
        };
        self.foreign.insert(address, origin);
        Some(address)
    }

    fn free(&mut self, device: i32, address: usize) {
        let pointer = std::ptr::with_exposed_provenance_mut(address);
        let origin = self.foreign.remove(&address).expect("memory of this thread");
        // SAFETY: allocated above, and all executions that use it have finished.
        unsafe {
            match &origin {
                Origin::Plain => self.at(device, |_| ok(sys::cuMemFree_v2(address as u64))),
                Origin::Pool => self.at(device, |stream| {
                    ok(sys::cuMemFreeAsync(address as u64, stream));
                    ok(sys::cuStreamSynchronize(stream));
                }),
                Origin::Pinned => ok(sys::cuMemFreeHost(pointer)),
                Origin::Registered(_) => ok(sys::cuMemHostUnregister(pointer)),
                Origin::Ordinary(_) => (),
            }
        }
    }

    fn streams(&self) -> Vec<mp_stream_t> {
        // The default streams are denoted by their three handles.
        [0, 1, 2].into_iter().chain(self.others.iter().copied()).map(std::ptr::with_exposed_provenance_mut).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for stream in self.streams.iter().chain(&self.others) {
            // SAFETY: created by this thread, and all of its work has finished.
            ok(unsafe { sys::cuStreamDestroy_v2(std::ptr::with_exposed_provenance_mut(*stream)) });
        }
    }
}

#[test]
fn random_executions_of_sixteen_threads_deliver_every_byte_and_leave_nothing_behind() {
    let Some(turn) = gpus(1) else { return };
    let usual = if is_long() { 1_000_000 } else { scaled(20_000, 500) };
    let campaign = Campaign {
        executions: setting("CAMPAIGN_EXECUTIONS", usual),
        seconds: setting("CAMPAIGN_SECONDS", if is_long() { 480 } else { 60 }),
        seed: setting("CAMPAIGN_SEED", 1),
        threads: 16,
    };
    assert!(campaign.run(&Gpus::new(turn.count)) > 0);
}
