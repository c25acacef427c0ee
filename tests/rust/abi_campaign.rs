//! Fuzz test that calls every function of the C ABI with random arguments for a chosen time. Each call must return a status and must not
//! write outside its outputs. The test `abi_fuzz` complements it: that test makes short sequences of calls, which can be shrunk, and checks
//! every copied byte.
//!
//! One run consists of rounds. Each round has its own contexts and its own seed, so a run can be split, and a single round can be repeated.
//! `FUZZ_CALLS` and `FUZZ_SECONDS` limit it, `FUZZ_SEED` sets the seed, `FUZZ_ROUND` is the first round, and `FUZZ_TRACE=1` prints every
//! call before it is made. The number of the current round is printed every ten seconds, so that a crash can be reproduced from there. With
//! one thread a round makes the same calls each time; with four threads it does not.
//!
//! Errors that the library cannot detect are excluded. The library must trust addresses of pageable host memory, so all host ranges in this
//! test exist. Streams wait only for counters that another call will set.

use crate::common::{Random, resident_bytes, setting};
use crate::node::*;
use mpgpu::abi::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_void};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const GUARD: u8 = 0xC7;
/// Bytes of pageable host memory that transfers may access. An equal amount of memory before and after it must stay unchanged.
const OWN: usize = 1 << 16;
/// Number of calls that each thread makes in a round.
const ROUND: u64 = 20_000;
/// Number of contexts that exist for a whole round. Transfers use host memory of these contexts only, because no other thread frees it.
const LASTING: usize = 2;
/// Maximum number of remembered handles of one kind, including destroyed ones.
const REMEMBERED: usize = 24;
/// Number of contexts that are created and destroyed while a round runs.
const CONTEXTS: usize = 6;
const COUNTERS: u64 = 64;

/// Handles of one kind that all threads share. The threads continue to use a handle after it was destroyed.
#[derive(Default)]
struct Pool(Mutex<Vec<usize>>);

impl Pool {
    fn all(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Stores a handle. If the pool is full, removes a random handle and returns it.
    fn put<T>(&self, random: &mut Random, handle: *mut T, most: usize) -> Option<*mut T> {
        let mut all = self.all();
        if all.len() < most {
            all.push(handle.addr());
            return None;
        }
        let at = random.below(most as u64) as usize;
        Some(std::ptr::without_provenance_mut(std::mem::replace(&mut all[at], handle.addr())))
    }

    /// Returns a handle for an argument. This is usually a handle that was created, sometimes one with a flipped bit, or a random number.
    /// The bits to flip are chosen so that the result is not a handle of another test in this process.
    fn pick<T>(&self, random: &mut Random) -> *mut T {
        let all = self.all();
        let known = all.get(random.below(all.len() as u64) as usize).copied();
        drop(all);
        let nonsense = [0, 1, 0xDEAD_BEEF, usize::MAX, 0x1_10FF_FFF1, 0x7FFF_FFFF_3000_0000, random.next() as usize];
        std::ptr::without_provenance_mut(match (random.below(24), known) {
            (0, _) | (_, None) => nonsense[random.below(7) as usize],
            (1, Some(known)) => known ^ (1 << (16 + random.below(17))),
            (_, Some(known)) => known,
        })
    }
}

#[derive(Default)]
struct Pools {
    contexts: Pool,
    plans: Pool,
    requests: Pool,
    streams: Pool,
    events: Pool,
    exported: Mutex<Vec<mp_memory_handle_t>>,
}

/// Memory allocated by `mp_alloc`.
#[derive(Copy, Clone)]
struct Memory {
    owner: usize,
    device: i32,
    address: usize,
    bytes: u64,
}

/// Counters in memory of a context that exists for the whole round, with the stream that sets them. The last counter is used by no stream.
/// Nothing in that stream ever waits.
struct Counters {
    owner: mp_context_t,
    first: usize,
    raiser: mp_stream_t,
    values: [u64; COUNTERS as usize],
}

/// Number of calls and number of successful calls, by the name of the function.
type Counts = BTreeMap<&'static str, [u64; 2]>;

/// Allgather function of a node with one rank.
unsafe extern "C" fn copy_to_itself(_: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32 {
    // SAFETY: both buffers are large enough for the data of the only rank.
    unsafe { receive.cast::<u8>().copy_from_nonoverlapping(send.cast(), bytes) };
    0
}

unsafe extern "C" fn ignore(_: *mut c_void, _: i32) {}

unsafe extern "C" fn no_allgather(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> i32 {
    -3
}

/// State of one thread during one round.
struct Fuzzer<'a> {
    random: Random,
    pools: &'a Pools,
    lasting: &'a [usize],
    alone: bool,
    trace: bool,
    counts: Counts,
    calls: u64,
    mine: Vec<Memory>,
    gone: Vec<usize>,
    /// Plans that only this thread executes, because one thread must not free memory while another thread passes it to the library.
    planned: Vec<usize>,
    counters: Vec<Counters>,
    /// Address of pageable host memory that exists longer than the contexts.
    own: usize,
    /// Buffer for every struct and text that is passed. It is so large that a wrong size or capacity that the library accepts affects only
    /// this buffer.
    room: Vec<u64>,
}

/// Makes one call and checks its status. The arguments must not borrow the fuzzer.
macro_rules! call {
    ($self:ident, $name:ident($($argument:expr),* $(,)?)) => {{
        $self.before(stringify!($name));
        // SAFETY: pointers are NULL, misaligned or valid for the call. The library must check ranges; host ranges are real.
        #[allow(unused_unsafe)]
        let status = unsafe { $name($($argument),*) };
        $self.after(stringify!($name), status)
    }};
}

/// Makes one call of a function that returns no status.
macro_rules! ask {
    ($self:ident, $name:ident($($argument:expr),* $(,)?)) => {{
        $self.before(stringify!($name));
        // SAFETY: no pointer is passed.
        #[allow(unused_unsafe)]
        let answer = unsafe { $name($($argument),*) };
        $self.counts.entry(stringify!($name)).or_default()[1] += 1;
        answer
    }};
}

fn pointer<T>(address: usize) -> *mut T {
    std::ptr::without_provenance_mut(address)
}

/// Function that produces partitions: marks all partitions ready at once, or fails if there are none.
unsafe extern "C" fn produced(_: *mut c_void, triggers: *const mp_trigger_t, count: usize, _: mp_stream_t) -> i32 {
    for index in 0..count {
        // SAFETY: the library passes `count` triggers, with a flag for each partition. The memory that they refer to exists until the step
        // has ended.
        unsafe {
            let trigger = *triggers.add(index);
            (0..trigger.partitions as usize).for_each(|partition| trigger.ready.add(partition).write_volatile(1));
        }
    }
    0
}

impl Fuzzer<'_> {
    /// Actions of the test, each with its relative frequency.
    #[expect(clippy::type_complexity, reason = "a table")]
    const ACTIONS: [(u64, fn(&mut Self)); 19] = [
        (4, Self::texts),
        (1, Self::log),
        (1, Self::context),
        (1, Self::probe),
        (3, Self::describe),
        (6, Self::statistics),
        (10, Self::alloc),
        (10, Self::free),
        (12, Self::stream),
        (10, Self::event),
        (12, Self::plan),
        (6, Self::plan_questions),
        (14, Self::execute),
        (8, Self::pieces),
        (14, Self::request),
        (8, Self::share),
        (8, Self::signal),
        (3, Self::node),
        (3, Self::message),
    ];

    fn before(&mut self, name: &'static str) {
        self.calls += 1;
        self.counts.entry(name).or_default()[0] += 1;
        if self.trace {
            eprintln!("call {}: {name}", self.calls);
        }
    }

    fn after(&mut self, name: &'static str, status: mp_status_t) -> bool {
        if status == MP_SUCCESS {
            self.counts.entry(name).or_default()[1] += 1;
            return true;
        }
        let said = || format!("{name}, call {} of this thread's round: {status:?}, {}", self.calls, last_error());
        assert!(!matches!(status, MP_ERROR_INTERNAL | MP_ERROR_DATA_CORRUPTION), "{}", said());
        assert!(!self.calls.is_multiple_of(16) || !last_error().is_empty(), "{}", said());
        false
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.random.below(n) == 0
    }

    /// Returns a random number: usually a small one or a boundary value, sometimes any number.
    fn odd(&mut self) -> u64 {
        let small = self.random.next() >> (40 + self.below(24));
        [0, small, 1, u64::MAX - small, (1 << 63) + small, (1 << 40) + small, u64::from(u32::MAX) + small, self.random.next()]
            [self.below(8) as usize]
    }

    fn odd_i32(&mut self) -> i32 {
        let small = self.below(16) as i32 - 5;
        [small, small, small, small, i32::MIN, i32::MAX, MP_DEVICE_AUTO, self.random.next() as i32][self.below(8) as usize]
    }

    /// Returns a pointer for an output: `place`, NULL, or a misaligned address.
    fn out<T>(&mut self, place: *mut T) -> *mut T {
        match self.below(24) {
            0 => null_mut(),
            1 if align_of::<T>() > 1 => place.wrapping_byte_add(1),
            _ => place,
        }
    }

    /// Copies a struct into the buffer, with a right or wrong size field, and sometimes with an additional field that this version does not
    /// know.
    fn sized<T: Copy>(&mut self, value: T) -> *mut T {
        let exact = size_of::<T>();
        self.room[..600].fill(0);
        // SAFETY: the buffer is larger and aligned.
        unsafe { self.room.as_mut_ptr().cast::<T>().write(value) };
        let wild = self.odd();
        self.room[0] = match self.below(16) {
            0 => wild,
            1 => exact as u64 - 8,
            2 => exact as u64 + 8 * self.below(20),
            3 => self.below(5000),
            _ => exact as u64,
        };
        if self.one_in(32) {
            let at = exact / 8 + self.below(400) as usize;
            self.room[at] = self.odd();
        }
        let place = self.room.as_mut_ptr().cast();
        self.out(place)
    }

    /// Returns a text buffer and its capacity. `guarded` then detects writes beyond the capacity.
    fn text(&mut self) -> (*mut std::ffi::c_char, usize) {
        let capacity = match self.below(4) {
            0 => self.below(64),
            1 => self.below(4096),
            _ => 8 * self.room.len() as u64 - 64,
        } as usize;
        // SAFETY: the bytes belong to the buffer.
        let room = unsafe { std::slice::from_raw_parts_mut(self.room.as_mut_ptr().cast::<u8>(), 8 * self.room.len()) };
        room[capacity..capacity + 64].fill(GUARD);
        if self.one_in(8) { (null_mut(), self.odd() as usize) } else { (room.as_mut_ptr().cast(), capacity) }
    }

    fn guarded(&self, (text, capacity): (*mut std::ffi::c_char, usize)) {
        // SAFETY: the bytes belong to the buffer.
        let room = unsafe { std::slice::from_raw_parts(self.room.as_ptr().cast::<u8>(), 8 * self.room.len()) };
        assert!(text.is_null() || room[capacity..capacity + 64].iter().all(|byte| *byte == GUARD), "text beyond the capacity");
    }

    /// Returns a meaningless string, a valid name, or NULL.
    fn string(&mut self) -> Option<CString> {
        let names =
            ["beluga", "beluga", "beluga", "pcie-4", "gh200-4", "summit", "hgx-h200", "/", "/dev/null", "..", "", "probed", "discovered"];
        match self.below(16) {
            0 => None,
            1 => {
                let length = self.below(6000);
                Some((0..length).map(|_| 1 + self.below(255) as u8).collect())
            }
            2 => Some((0..self.below(12)).map(|_| 32 + self.below(95) as u8).collect()),
            _ => Some(names[self.below(13) as usize].bytes().collect()),
        }
        .map(|bytes: Vec<u8>| CString::new(bytes).expect("no NUL"))
    }

    fn a_context(&mut self) -> mp_context_t {
        // The handle is usually a valid one, so that not all calls are refused.
        if self.one_in(4) {
            self.pools.contexts.pick(&mut self.random)
        } else {
            pointer(self.lasting[self.random.below(LASTING as u64) as usize])
        }
    }

    /// Returns an address: of live memory, of freed memory, or of no memory. With several threads, freed memory may meanwhile belong to
    /// another thread.
    fn an_address(&mut self) -> usize {
        let offset = if self.one_in(2) { 0 } else { self.below(5000) as usize };
        match self.below(16) {
            0 => 0,
            1 => usize::MAX - offset,
            2 => self.random.next() as usize,
            3 => self.own + OWN + offset,
            4 | 5 if self.alone && !self.gone.is_empty() => self.gone[self.random.below(self.gone.len() as u64) as usize] + offset,
            _ if !self.mine.is_empty() => {
                let memory = self.mine[self.random.below(self.mine.len() as u64) as usize];
                // The bytes after it may belong to another thread.
                memory.address + if self.alone { offset } else { offset % memory.bytes as usize }
            }
            _ => 64,
        }
    }

    // --- the actions ---------------------------------------------------------------------------------------------------

    fn texts(&mut self) {
        let (status, info) = (self.odd_i32(), error_info());
        ask!(self, mp_version());
        assert!(!ask!(self, mp_version_string()).is_null());
        assert!(!ask!(self, mp_status_string(status)).is_null());
        assert!(!ask!(self, mp_last_error()).is_null());
        let info = self.sized(info);
        call!(self, mp_last_error_info(info));
        let text = |given: bool| if given { c"a text".as_ptr() } else { null() };
        let (argument, message) = (text(self.one_in(2)), text(self.one_in(2)));
        call!(self, mp_last_error_set(status, -1, argument, message));
    }

    fn log(&mut self) {
        unsafe extern "C" fn count(_: i32, _: *const std::ffi::c_char, _: *const std::ffi::c_char, user: *mut c_void) {
            // SAFETY: the pointer is passed below and is static.
            unsafe { &*user.cast::<AtomicU64>() }.fetch_add(1, Ordering::Relaxed);
        }
        static RECORDS: AtomicU64 = AtomicU64::new(0);
        let level = self.odd_i32();
        let callback = if self.one_in(4) { None } else { Some(count as unsafe extern "C" fn(_, _, _, _)) };
        call!(self, mp_log_set_callback(level, callback, (&raw const RECORDS).cast_mut().cast()));
    }

    fn context(&mut self) {
        if self.one_in(2) {
            let (context, mut gpus, mut hosts) = (self.a_context(), -1, -1);
            let mut backend = mp_backend_t::MP_BACKEND_AUTO;
            let outs = (self.out(&mut backend), self.out(&mut gpus), self.out(&mut hosts));
            call!(self, mp_context_get_info(context, outs.0, outs.1, outs.2));
            let (mut of, mut capturing, stream) = (77, -1, self.a_stream());
            let outs = (self.out(&mut of), self.out(&mut capturing));
            call!(self, mp_stream_get_info(context, stream, outs.0, outs.1));
            assert!((MP_DEVICE_HOST - 8..=77).contains(&of), "device {of}");
        }
        if self.one_in(2) {
            // A lasting context is not destroyed before its round ends.
            let context: mp_context_t = self.pools.contexts.pick(&mut self.random);
            if !self.lasting.contains(&context.addr()) {
                call!(self, mp_context_destroy(context));
            }
            return;
        }
        let topology = self.string();
        let backend = if self.one_in(4) { self.below(5) as i32 - 1 } else { 1 };
        let options = mp_context_options_t {
            topology: topology.as_ref().map_or(std::ptr::null(), |text| text.as_ptr()),
            backend,
            staging_bytes: [0, 1 << 14, 1 << 16, 1, 1 << 20, self.odd()][self.below(6) as usize],
            cache_plans: [0, 1, 3, 20, u64::MAX][self.below(5) as usize],
            signal_wait: self.below(4) as i32 - i32::from(self.one_in(8)),
            host_threads: [0, 0, -1, 1, 4, 256, 257, -2][self.below(8) as usize],
            cache_graphs: [0, 1, u64::MAX][self.below(3) as usize],
            ..context_options()
        };
        let version = if self.one_in(8) { self.odd() as u32 } else { MP_VERSION };
        let options = self.sized(options);
        let mut context = poison();
        let out = self.out(&mut context);
        if call!(self, mp_context_create_versioned(options, version, out)) {
            if let Some(old) =
                self.pools.contexts.put(&mut self.random, context, CONTEXTS).filter(|old| !self.lasting.contains(&old.addr()))
            {
                // Fails if it was already destroyed.
                call!(self, mp_context_destroy(old));
            }
        } else {
            assert_eq!(context, poison(), "an output was written");
        }
    }

    fn probe(&mut self) {
        let file = self.string();
        let options = mp_probe_options_t {
            size: 0,
            file: file.as_ref().map_or(std::ptr::null(), |text| text.as_ptr()),
            keep: 3 + self.below(100) as i32,
            quick: self.odd_i32(),
        };
        let (options, context) = (self.sized(options), self.a_context());
        // A probe takes seconds, so only arguments that are refused are passed. NULL, and the shorter struct of an old program, would be
        // accepted.
        if !options.is_null() && self.room[0] as usize >= size_of::<mp_probe_options_t>() {
            assert!(!call!(self, mp_context_probe(context, options)));
        }
        let (context, mut length) = (self.a_context(), 0);
        let text = self.text();
        let out = self.out(&mut length);
        call!(self, mp_context_probed(context, text.0, text.1, out));
        self.guarded(text);
    }

    fn describe(&mut self) {
        let (context, format, mut length) = (self.a_context(), self.below(5) as i32 - 1, 0);
        let plan = self.pools.plans.pick(&mut self.random);
        let text = self.text();
        let out = self.out(&mut length);
        if self.one_in(4) {
            call!(self, mp_context_describe(context, format, text.0, text.1, out));
        } else {
            call!(self, mp_plan_describe(plan, format, text.0, text.1, out));
        }
        self.guarded(text);
    }

    fn statistics(&mut self) {
        let (context, device) = (self.a_context(), self.odd_i32());
        if self.one_in(2) {
            let out = self.sized(statistics());
            call!(self, mp_context_statistics(context, out));
        } else {
            let out = self.sized(device_statistics());
            call!(self, mp_context_device_statistics(context, device, out));
        }
        assert!(self.room[520..600].iter().all(|word| *word == 0), "written beyond what the library knows");
        let mut uuid = [GUARD; 24];
        let out = self.out(uuid.as_mut_ptr());
        call!(self, mp_device_uuid(context, device, out));
        assert_eq!(uuid[16..], [GUARD; 8]);
    }

    fn alloc(&mut self) {
        let (context, device) = (self.a_context(), if self.one_in(8) { self.odd_i32() } else { self.below(5) as i32 - 1 });
        let bytes = if self.one_in(8) { self.odd() } else { 1 + (self.random.next() >> (44 + self.below(16))) };
        let mut memory = poison();
        let out = self.out(&mut memory);
        let done = if self.one_in(4) {
            call!(self, mp_alloc_shared(context, device, bytes, out))
        } else {
            call!(self, mp_alloc(context, device, bytes, out))
        };
        if !done {
            assert_eq!(memory, poison(), "an output was written");
        } else if bytes > 4 << 20 || self.mine.len() >= REMEMBERED {
            // The system may promise more memory than it has, so the test does not touch the memory. No work uses it yet, so any stream may
            // be passed.
            let stream = self.a_stream();
            if !call!(self, mp_free_async(context, memory, stream)) {
                call!(self, mp_free(context, memory));
            }
            self.forget(memory.addr());
        } else {
            self.mine.push(Memory { owner: context.addr(), device, address: memory.addr(), bytes });
        }
    }

    fn free(&mut self) {
        let context = self.a_context();
        if self.one_in(2) || self.mine.is_empty() {
            // Wrong addresses are inside an allocation, of another context, freed, or were never allocated.
            let address = self.an_address();
            if self.mine.iter().all(|memory| memory.address != address) {
                let stream = self.a_stream();
                if self.one_in(2) {
                    call!(self, mp_free(context, pointer(address)));
                } else {
                    call!(self, mp_free_async(context, pointer(address), stream));
                }
            }
            return;
        }
        let memory = self.mine.swap_remove(self.random.below(self.mine.len() as u64) as usize);
        let freed = call!(self, mp_free(pointer(memory.owner), pointer(memory.address)));
        assert!(freed || !self.lasting.contains(&memory.owner), "memory could not be freed: {}", last_error());
        self.forget(memory.address);
    }

    fn forget(&mut self, address: usize) {
        if self.gone.len() >= REMEMBERED {
            self.gone.swap_remove(0);
        }
        self.gone.push(address);
    }

    fn a_stream(&mut self) -> mp_stream_t {
        if self.one_in(3) { null_mut() } else { self.pools.streams.pick(&mut self.random) }
    }

    fn stream(&mut self) {
        let (context, device, stream) = (self.a_context(), self.below(9) as i32 - 3, self.a_stream());
        match self.below(6) {
            0 => {
                let mut stream = poison();
                let out = self.out(&mut stream);
                if !call!(self, mp_stream_create(context, device, out)) {
                    assert_eq!(stream, poison(), "an output was written");
                } else if let Some(old) = self.pools.streams.put(&mut self.random, stream, REMEMBERED) {
                    for &context in self.lasting {
                        call!(self, mp_stream_destroy(pointer(context), old));
                    }
                }
            }
            1 if self.one_in(2) => drop(call!(self, mp_stream_destroy(context, stream))),
            1 | 2 => drop(call!(self, mp_stream_synchronize(context, stream))),
            3 => drop(call!(self, mp_stream_launch_host(context, stream, None, null_mut(), None))),
            _ => {
                let release = self.one_in(2).then_some(nothing as unsafe extern "C" fn(*mut c_void));
                call!(self, mp_stream_launch_host(context, stream, Some(nothing), null_mut(), release));
            }
        }
    }

    fn event(&mut self) {
        let (context, event, stream) = (self.a_context(), self.pools.events.pick(&mut self.random), self.a_stream());
        match self.below(8) {
            0 => {
                let mut event = poison();
                let out = self.out(&mut event);
                if !call!(self, mp_event_create(context, out)) {
                    assert_eq!(event, poison(), "an output was written");
                } else if let Some(old) = self.pools.events.put(&mut self.random, event, REMEMBERED) {
                    for &context in self.lasting {
                        call!(self, mp_event_destroy(pointer(context), old));
                    }
                }
            }
            1 if self.one_in(2) => drop(call!(self, mp_event_destroy(context, event))),
            1..=3 => drop(call!(self, mp_event_record(context, event, stream))),
            4 | 5 => drop(call!(self, mp_stream_wait_event(context, stream, event))),
            _ => drop(call!(self, mp_event_synchronize(context, event))),
        }
    }

    /// Returns address and device of one end of a transfer of `bytes` bytes, and the number of bytes that exist there. A range of host
    /// memory always exists.
    fn end(&mut self, context: mp_context_t, bytes: u64) -> (usize, i32, u64) {
        let gpu = self.below(4) as i32;
        match self.below(16) {
            0 => (self.an_address(), gpu, bytes),
            1 => {
                let bytes = bytes.min(OWN as u64);
                let at = OWN + self.below(OWN as u64 - bytes + 1) as usize;
                let device = if self.one_in(2) { MP_DEVICE_AUTO } else { MP_DEVICE_HOST };
                (self.own + at, device, bytes)
            }
            2 => (self.an_address(), self.odd_i32(), 0),
            _ => {
                let held: Vec<Memory> = self.mine.iter().filter(|memory| memory.owner == context.addr()).copied().collect();
                let Some(&memory) = held.get(self.below(held.len() as u64) as usize) else { return (64, gpu, bytes) };
                let offset = self.below(memory.bytes);
                let inside = memory.bytes - offset;
                let lasts = self.lasting.contains(&memory.owner);
                match memory.device {
                    // The address is wrong only in ways that the library can detect.
                    0.. if self.one_in(8) => (memory.address + offset as usize, gpu, bytes),
                    0.. => (memory.address + offset as usize, memory.device, bytes.min(inside)),
                    _ if lasts => {
                        let device = if self.one_in(2) { MP_DEVICE_AUTO } else { memory.device };
                        (memory.address + offset as usize, device, bytes.min(inside))
                    }
                    _ => (64, gpu, bytes),
                }
            }
        }
    }

    fn plan(&mut self) {
        let context = self.a_context();
        let count = if self.one_in(64) { 100 } else { self.below(4) };
        let mut transfers = Vec::new();
        for _ in 0..count {
            let bytes = if self.one_in(16) { self.odd() } else { self.random.next() >> (46 + self.below(18)) };
            let ((dst, dst_device, most), (src, src_device, also)) = (self.end(context, bytes), self.end(context, bytes));
            let bytes = bytes.min(most).min(also) as usize;
            transfers.push(transfer(std::ptr::with_exposed_provenance_mut(dst), dst_device, pointer(src), src_device, bytes));
        }
        let options = mp_plan_options_t {
            engine: self.below(7) as i32 - 1,
            max_paths: if self.one_in(4) { self.odd() as u32 } else { self.below(5) as u32 },
            host_path: self.below(4) as i32 - i32::from(self.one_in(8)),
            chunk_bytes: [0, 4096, 8192, 1, self.odd()][self.below(5) as usize],
            relay_chunks: [0, 0, 1, 3, self.odd() as u32][self.below(5) as usize],
            host_chunks: [0, 0, 2, u32::MAX][self.below(4) as usize],
            min_bytes: self.below(2),
            staging_bytes: [0, 0, 0, 1 << 13, self.odd()][self.below(5) as usize],
            ..plan_options()
        };
        let options = if self.one_in(2) { null_mut() } else { self.sized(options) };
        // The count may exceed the length of the list only if the library refuses the call before it reads the list.
        let (list, count) = match self.below(24) {
            0 => (null_mut(), self.odd() as usize),
            1 => (transfers.as_mut_ptr().wrapping_byte_add(4), (self.odd() as usize).saturating_add(1)),
            2 => (transfers.as_mut_ptr(), usize::MAX - self.below(1 << 20) as usize),
            _ => (transfers.as_mut_ptr(), transfers.len()),
        };
        let mut plan = poison();
        let out = self.out(&mut plan);
        if !call!(self, mp_plan(context, list, count, options, out)) {
            assert_eq!(plan, poison(), "an output was written");
        } else {
            if self.planned.len() >= REMEMBERED {
                self.planned.swap_remove(0);
            }
            self.planned.push(plan.addr());
            if let Some(old) = self.pools.plans.put(&mut self.random, plan, REMEMBERED) {
                call!(self, mp_plan_destroy(old));
            }
        }
    }

    /// Creates a node with this process as its only rank and a plan of it, and destroys both. Other threads must not destroy a plan that
    /// this thread executes.
    fn node(&mut self) {
        let context = self.a_context();
        let (rank, ranks) = if self.one_in(8) { (self.odd() as u32, self.odd() as u32) } else { (0, 1) };
        let device = self.odd_i32();
        let options = mp_node_options_t {
            size: size_of::<mp_node_options_t>(),
            devices: &device,
            device_count: self.below(2) as usize,
            socket: null(),
            failure: if self.one_in(16) { c"no reason".as_ptr() } else { null() },
        };
        let mut defaults = partition_options(0);
        let options = if self.one_in(2) { null_mut() } else { self.sized(options) };
        let allgather: mp_allgather_t = match self.below(12) {
            0 => None,
            1 => Some(no_allgather),
            _ => Some(copy_to_itself),
        };
        let mut node = poison();
        let out = self.out(&mut node);
        if !call!(self, mp_node_create(context, rank, ranks, allgather, null_mut(), options, out)) {
            assert_eq!(node, poison(), "an output was written");
            // A handle of another kind, or no handle.
            node = pointer(self.odd() as usize);
        }
        let window = mp_window_t { memory: pointer(self.an_address()), bytes: self.below(200) };
        let mut end = || mp_node_end_t { rank: self.below(2) as u32, window: self.below(2) as u32, offset: self.below(300) };
        let [dst, src] = [end(), end()];
        let transfer = mp_node_transfer_t { dst, src, bytes: self.below(100) };
        let (windows, transfers) = (self.below(2) as usize, self.below(2) as usize);
        let mut plan = poison();
        let out = self.out(&mut plan);
        if call!(self, mp_node_plan(node, &window, windows, &transfer, transfers, null(), null(), out)) {
            if windows * transfers == 0 {
                call!(self, mp_execute(plan, null_mut(), null_mut()));
            }
            call!(self, mp_plan_destroy(plan));
        } else {
            assert_eq!(plan, poison(), "an output was written");
        }
        let odd = mp_partition_options_t {
            count: self.odd() as u32 % 5000,
            arrivals: self.odd_i32(),
            stores: self.odd_i32(),
            ..partition_options(self.below(5) as i32)
        };
        let options = if self.one_in(2) { &raw mut defaults } else { self.sized(odd) };
        // The ends are often such that every plan accepts them.
        let none = mp_node_end_t { rank: 0, window: 0, offset: 0 };
        let (transfer, windows, transfers) = match self.one_in(2) {
            true => (mp_node_transfer_t { dst: none, src: none, bytes: 0 }, 1, 1),
            false => (transfer, windows, transfers),
        };
        let mut plan = poison();
        let out = self.out(&mut plan);
        if call!(self, mp_node_plan(node, &window, windows, &transfer, transfers, options, null(), out)) {
            let (stream, room) = (self.a_stream(), self.sized(trigger()));
            let (rank, index) = if self.one_in(4) { (self.below(2), self.below(2)) } else { (0, 0) };
            call!(self, mp_plan_get_trigger(plan, rank as u32, index as usize, room));
            call!(self, mp_plan_arm(plan, stream));
            if windows * transfers == 0 {
                call!(self, mp_execute(plan, null_mut(), null_mut()));
                call!(self, mp_plan_synchronize(plan, if self.one_in(4) { -1.0 } else { 10.0 }));
            }
            // If nobody marks its partitions ready, the plan is armed but not executed.
            call!(self, mp_plan_destroy(plan));
        } else {
            assert_eq!(plan, poison(), "an output was written");
        }
        let tuning = mp_partition_tuning_t { rounds: self.odd() as u32 % 3, ..partition_tuning(self.odd() as u32 % 32) };
        let (tuning, best) = (if self.one_in(2) { null_mut() } else { self.sized(tuning) }, self.sized(partition_options(0)));
        let produce: mp_produce_t = if self.one_in(8) { None } else { Some(produced) };
        // Tuning executes the transfer. If the transfer had bytes, the library would treat freed memory as memory of the program.
        let transfer = if windows * transfers > 0 { mp_node_transfer_t { dst: none, src: none, bytes: 0 } } else { transfer };
        call!(self, mp_node_tune_partitions(node, &window, windows, &transfer, transfers, produce, null_mut(), tuning, null(), best));
        let (mut gpus, mut count) = ([0_i32; 64], 0);
        call!(
            self,
            mp_node_devices(node, if self.one_in(4) { null_mut() } else { gpus.as_mut_ptr() }, self.below(64) as usize, &mut count)
        );
        let name = [null(), c"a call".as_ptr(), c"mp_node_plan".as_ptr(), c"".as_ptr()][self.below(4) as usize];
        let (mine, mut all) = ([7_u8; 16], [0_u8; 16]);
        let send = if self.one_in(8) { null() } else { mine.as_ptr().cast() };
        let receive = if self.one_in(8) { null_mut() } else { all.as_mut_ptr().cast() };
        call!(self, mp_node_allgather(node, name, send, receive, self.below(17) as usize));
        call!(self, mp_node_device(node, if self.one_in(4) { null_mut() } else { gpus.as_mut_ptr() }));
        call!(self, mp_node_fail(node, if self.one_in(2) { null() } else { c"no reason".as_ptr() }));
        call!(self, mp_node_destroy(node));
        if self.one_in(4) {
            call!(self, mp_node_destroy(node));
        }
    }

    /// Creates a messenger in a node with this process as its only rank, sends messages to itself, and destroys the messenger while some
    /// messages remain.
    fn message(&mut self) {
        let context = self.a_context();
        let (mut node, mut messenger) = (null_mut(), poison());
        if !call!(self, mp_node_create(context, 0, 1, Some(copy_to_itself), null_mut(), null(), &mut node)) {
            node = pointer(self.odd() as usize);
        }
        let options = mp_messenger_options_t {
            size: size_of::<mp_messenger_options_t>(),
            operations: self.below(6) as u32,
            messages: self.below(4) as u32,
        };
        let options = if self.one_in(2) { null_mut() } else { self.sized(options) };
        let out = self.out(&mut messenger);
        if !call!(self, mp_messenger_create(node, options, out)) {
            assert_eq!(messenger, poison(), "an output was written");
            messenger = pointer(self.odd() as usize);
        }
        // One stream is for operations, and one waits for them. Sometimes other streams replace both, also streams of other threads. The
        // wait may be enqueued before the work for which it waits; destroying the messenger releases such a wait.
        let (mut own_stream, mut waiting) = (null_mut(), null_mut());
        call!(self, mp_stream_create(context, 0, &mut own_stream));
        call!(self, mp_stream_create(context, 0, &mut waiting));
        let (mut memory, header) = (vec![0_u8; 4096], [7_u8; 300]);
        let base = memory.as_mut_ptr();
        let (mut requests, mut descriptor) = (Vec::<mp_request_t>::new(), mp_message_descriptor_t { bytes: [GUARD; 64] });
        for _ in 0..self.below(24) {
            let (at, bytes) = (self.below(2000) as usize, self.below(2000));
            let data = if self.one_in(12) { null_mut() } else { base.wrapping_add(at).cast::<c_void>() };
            let stream = match self.below(64) {
                0..4 => pointer(self.odd() as usize | 1 << 20),
                4..12 => self.a_stream(),
                _ => own_stream,
            };
            let (rank, tag, mask) = (self.below(20) as i32 / 9 - 1, self.below(2), if self.one_in(2) { u64::MAX } else { 0 });
            let mut request = poison();
            let out = if self.one_in(4) { null_mut() } else { self.out(&mut request) };
            let known = requests.get(self.random.below(requests.len() as u64) as usize).copied().unwrap_or(poison());
            let capacity = self.below(300) as usize;
            let (mut number, mut metadata) = (77, [0_u8; 300]);
            let asked = mp_message_info_t { metadata: metadata.as_mut_ptr().cast(), metadata_capacity: capacity, ..message_info() };
            let made = match self.below(12) {
                0..4 => {
                    let metadata = if self.one_in(4) { self.below(300) as usize } else { self.below(257) as usize };
                    call!(self, mp_send(messenger, data, bytes, rank as u32, tag, header.as_ptr().cast(), metadata, stream, out))
                }
                4..7 => call!(self, mp_receive(messenger, data, bytes, rank, tag, mask, stream, out)),
                7 => {
                    let (place, room) = (self.out(&mut descriptor), bytes.min(64));
                    call!(self, mp_message_describe(messenger, data, room, stream, place, out))
                }
                8 => {
                    let mut descriptor = descriptor;
                    if self.one_in(4) {
                        descriptor.bytes[self.below(64) as usize] ^= 1;
                    }
                    call!(self, mp_message_fetch(messenger, &descriptor, data, bytes, stream, out))
                }
                9 => {
                    let (found, told) = (self.out(&mut number), self.sized(asked));
                    let told = if self.one_in(2) { null_mut() } else { told };
                    call!(self, mp_message_probe(messenger, rank, tag, mask, found, told));
                    false
                }
                10 => {
                    let (matched, told) = (self.out(&mut number), self.sized(asked));
                    call!(self, mp_message_get_info(known, matched, told));
                    // Such calls are rare, because each operation that waits for later work takes the ten seconds after which a messenger
                    // gives up.
                    let stream = match self.below(512) {
                        0 => own_stream,
                        1..5 => self.a_stream(),
                        _ if waiting.is_null() => poison(),
                        _ => waiting,
                    };
                    call!(self, mp_stream_wait_request(stream, known));
                    false
                }
                _ => {
                    let place = self.out(&mut number);
                    call!(self, mp_request_cancel(known, place));
                    call!(self, mp_request_set_callback(known, if self.one_in(8) { None } else { Some(ignore) }, null_mut()));
                    false
                }
            };
            if made && request != poison() {
                requests.push(request);
            }
        }
        call!(self, mp_messenger_destroy(messenger));
        // All other operations have ended by now.
        for mut request in requests {
            let mut number = 77;
            let (done, told) = (self.out(&mut number), self.sized(message_info()));
            match self.below(4) {
                0 => call!(self, mp_wait(&mut request, told)),
                1 => call!(self, mp_test(&mut request, done, told)),
                2 => call!(self, mp_wait(&mut request, null_mut())),
                _ => call!(self, mp_request_destroy(&mut request)),
            };
        }
        call!(self, mp_stream_destroy(context, own_stream));
        call!(self, mp_stream_destroy(context, waiting));
        call!(self, mp_node_destroy(node));
    }

    fn plan_questions(&mut self) {
        let plan = self.pools.plans.pick(&mut self.random);
        if self.one_in(16) {
            call!(self, mp_plan_destroy(plan));
        }
        let info = self.sized(plan_info());
        call!(self, mp_plan_get_info(plan, info));
        assert!(self.room[520..600].iter().all(|word| *word == 0), "written beyond what the library knows");
    }

    fn execute(&mut self) {
        let mine = self.planned.get(self.random.below(self.planned.len() as u64) as usize).copied();
        let plan = if self.alone { self.pools.plans.pick(&mut self.random) } else { pointer(mine.unwrap_or(0xDEAD_BEEF)) };
        let stream = self.a_stream();
        if self.one_in(8) {
            call!(self, mp_plan_prepare(plan, stream));
        }
        if self.one_in(2) {
            call!(self, mp_execute(plan, stream, null_mut()));
            return;
        }
        let mut request: mp_request_t = poison();
        let out = if self.one_in(16) { (&raw mut request).wrapping_byte_add(1) } else { &raw mut request };
        if !call!(self, mp_execute(plan, stream, out)) {
            assert_eq!(request, poison(), "an output was written");
        } else if let Some(mut old) = self.pools.requests.put(&mut self.random, request, REMEMBERED) {
            // Fails if it was already waited for.
            call!(self, mp_request_destroy(&mut old));
        }
    }

    /// Copies blocks and pieces without a plan. Index lists in host memory are always readable, because the library cannot check them.
    fn pieces(&mut self) {
        let (context, stream) = (self.a_context(), self.a_stream());
        let options = mp_piece_options_t {
            multiprocessors: [0, 1, 4, self.odd() as u32][self.below(4) as usize],
            paced: self.below(4) as i32 - i32::from(self.one_in(8)),
            ..piece_options()
        };
        let mut request: mp_request_t = poison();
        let out = if self.one_in(2) { null_mut() } else { self.out(&mut request) };
        let done =
            if self.one_in(2) { self.listed_pieces(context, options, stream, out) } else { self.blocks(context, options, stream, out) };
        if !done || out.is_null() {
            assert_eq!(request, poison(), "an output was written");
        } else if let Some(mut old) = self.pools.requests.put(&mut self.random, request, REMEMBERED) {
            // Fails if the request was already waited for.
            call!(self, mp_request_destroy(&mut old));
        }
    }

    fn listed_pieces(&mut self, context: mp_context_t, options: mp_piece_options_t, stream: mp_stream_t, out: *mut mp_request_t) -> bool {
        let mut pieces = Vec::new();
        for _ in 0..self.below(6) {
            let bytes = if self.one_in(32) { self.odd() } else { self.random.next() >> (46 + self.below(18)) };
            let ((dst, _, most), (src, _, also)) = (self.end(context, bytes), self.end(context, bytes));
            pieces.push(mp_segment_t { dst: pointer(dst), src: pointer(src), bytes: bytes.min(most).min(also) });
        }
        let (list, count) = match self.below(24) {
            0 => (null(), self.odd() as usize),
            1 => (pieces.as_ptr().wrapping_byte_add(4), (self.odd() as usize).saturating_add(1)),
            2 => (pieces.as_ptr(), usize::MAX - self.below(1 << 20) as usize),
            _ => (pieces.as_ptr(), pieces.len()),
        };
        let options = if self.one_in(2) { null_mut() } else { self.sized(options) };
        call!(self, mp_copy_pieces(context, list, count, options, stream, out))
    }

    fn blocks(&mut self, context: mp_context_t, options: mp_piece_options_t, stream: mp_stream_t, out: *mut mp_request_t) -> bool {
        let bytes = if self.one_in(16) { self.odd() } else { self.below(400) };
        let (count, width) = (self.below(20), [4, 8][self.below(2) as usize]);
        let (mut dst, mut src, mut room) = (Vec::new(), Vec::new(), [u64::MAX; 2]);
        for _ in 0..self.below(4) {
            for (array, room) in [&mut dst, &mut src].into_iter().zip(&mut room) {
                let (address, _, exists) = self.end(context, 1 << 14);
                array.push(pointer::<c_void>(address));
                *room = exists.min(*room);
            }
        }
        let shape = |fuzzer: &mut Self, room: u64| {
            let stride = match fuzzer.below(16) {
                0 => fuzzer.odd(),
                1..8 => 0,
                _ => bytes.saturating_add(fuzzer.below(64)),
            };
            let fits = (room.saturating_sub(bytes) / stride.max(bytes).max(1)).saturating_add(1);
            (stride, if fuzzer.one_in(8) { fuzzer.odd() } else { fits.min(64) })
        };
        let [(dst_stride, dst_blocks), (src_stride, src_blocks)] = [shape(self, room[0]), shape(self, room[1])];
        // Index lists in host memory belong to this thread and exist until the call returns. Index lists in GPU memory have random contents.
        let list = |fuzzer: &mut Self, blocks: u64| {
            let below = if fuzzer.one_in(8) { fuzzer.odd() } else { blocks };
            (0..20)
                .map(|_| if width == 4 { fuzzer.below(below) | fuzzer.below(below) << 32 } else { fuzzer.below(below) })
                .collect::<Vec<u64>>()
        };
        let lists = [list(self, dst_blocks), list(self, src_blocks)];
        let mut is_host = false;
        let mut index = |fuzzer: &mut Self, list: &[u64]| -> *const c_void {
            let on_gpu = fuzzer.mine.iter().find(|memory| memory.owner == context.addr() && memory.device >= 0).copied();
            match (fuzzer.below(8), on_gpu) {
                (0..3, _) => null(),
                (3, Some(memory)) => pointer(memory.address + 8 * fuzzer.below(memory.bytes / 8 + 1) as usize),
                (4, _) => list.as_ptr().wrapping_byte_add(1).cast(),
                _ => {
                    is_host = true;
                    list.as_ptr().cast()
                }
            }
        };
        let (dst_index, src_index) = (index(self, &lists[0]), index(self, &lists[1]));
        let (layers, own) = (dst.len() as u64, self.one_in(2));
        let blocks = mp_blocks_t {
            dst: if self.one_in(24) { null() } else { dst.as_ptr() },
            src: if self.one_in(24) { null() } else { src.as_ptr().cast() },
            layers: if self.one_in(24) { u64::MAX - self.below(1 << 20) } else { layers },
            block_bytes: bytes,
            // With a list in host memory, the count is never wrong, because the library would read beyond the list.
            count: if self.one_in(16) && !is_host { self.odd() } else { count },
            dst_stride,
            src_stride,
            dst_blocks,
            src_blocks,
            dst_index,
            src_index,
            index_bytes: if self.one_in(16) { self.odd() as u32 & !12 } else { width },
            reserved: u32::from(self.one_in(24)),
            ..blocks()
        };
        // `sized` has one buffer, so only one of the two structs can have another size.
        if own {
            let blocks = self.sized(blocks);
            call!(self, mp_copy_blocks(context, blocks, &options, stream, out))
        } else {
            let options = if self.one_in(2) { null_mut() } else { self.sized(options) };
            call!(self, mp_copy_blocks(context, &blocks, options, stream, out))
        }
    }

    fn request(&mut self) {
        let mut request: mp_request_t = self.pools.requests.pick(&mut self.random);
        let mut done = 77;
        let (place, done) = (self.out(&mut request), self.out(&mut done));
        match self.below(3) {
            0 => call!(self, mp_wait(place, null_mut())),
            1 => call!(self, mp_test(place, done, null_mut())),
            _ => call!(self, mp_request_destroy(place)),
        };
    }

    fn share(&mut self) {
        let context = self.a_context();
        if self.one_in(2) {
            let (address, bytes) = (self.an_address(), if self.one_in(3) { self.odd() } else { self.below(5000) });
            let mut handle = mp_memory_handle_t { bytes: [GUARD; 128] };
            let out = self.out(&mut handle);
            if call!(self, mp_memory_export(context, pointer(address), bytes, out)) {
                let mut exported = self.pools.exported.lock().expect("no panic");
                if exported.len() >= REMEMBERED {
                    exported.swap_remove(self.random.below(REMEMBERED as u64) as usize);
                }
                exported.push(handle);
            } else {
                assert_eq!(handle.bytes, [GUARD; 128], "an output was written");
            }
            return;
        }
        let mut handle = {
            let exported = self.pools.exported.lock().expect("no panic");
            exported.get(self.random.below(exported.len() as u64) as usize).copied().unwrap_or(mp_memory_handle_t { bytes: [GUARD; 128] })
        };
        let damaged = self.one_in(4);
        if damaged {
            let (at, bit) = (self.below(128) as usize, self.below(8));
            handle.bytes[at] ^= 1 << bit;
        }
        let (mut memory, mut device, mut seen, mut bytes) = (poison(), 77, poison(), 77);
        let outs = (self.out(&mut memory), self.out(&mut device), self.out(&mut seen), self.out(&mut bytes));
        let handle = self.out(&mut handle);
        let kernels = if self.one_in(2) { MP_DEVICE_AUTO } else { self.below(6) as i32 - 1 };
        if call!(self, mp_memory_import(context, handle, kernels, outs.0, outs.1, outs.2, outs.3)) {
            assert!(!damaged, "a damaged handle was taken for another");
            let is_right = if kernels == MP_DEVICE_AUTO { seen.is_null() } else { seen == memory };
            assert!(is_right || seen == poison(), "virtual devices have one address for all");
            // The value exceeds every value for which something waits.
            call!(self, mp_memory_leave(context, memory, u64::MAX / 2));
            call!(self, mp_memory_close(context, memory));
        } else {
            assert_eq!((memory, device, seen, bytes), (poison(), 77, poison(), 77), "an output was written");
        }
        let address = self.an_address();
        call!(self, mp_memory_leave(context, pointer(address), address as u64));
        call!(self, mp_memory_close(context, pointer(address)));
        // Pages that nothing else uses and that several threads may register at once.
        static OWN: [u8; 1 << 16] = [7; 1 << 16];
        let (own, size) = (OWN.as_ptr().wrapping_add(self.below(1 << 15) as usize).cast_mut().cast(), self.below(1 << 15));
        let huge = self.below(4) as i32 - 1;
        let has_registered = call!(self, mp_memory_register(context, own, size, huge));
        assert!(!has_registered || size > 0 && (0..2).contains(&huge), "{size} bytes, huge_pages={huge}");
        call!(self, mp_memory_unregister(context, if has_registered { own } else { pointer(address) }));
        // The program that runs is a file that cannot change meanwhile.
        let program = std::fs::File::open("/proc/self/exe").expect("this program");
        let descriptor = if self.one_in(3) { -(self.below(3) as i32) - 1 } else { program.as_raw_fd() };
        let (mut file, mut bytes, bypass) = (poison::<c_void>().cast_const(), 77, self.below(4) as i32 - 1);
        if call!(self, mp_file_map(context, descriptor, bypass, &mut file, &mut bytes)) {
            assert!((0..2).contains(&bypass) && descriptor >= 0 && bytes == program.metadata().expect("a file").len());
            call!(self, mp_file_unmap(context, file));
        } else {
            assert_eq!((file.addr(), bytes), (poison::<c_void>().addr(), 77), "an output was written");
        }
        call!(self, mp_file_unmap(context, pointer(address)));
        let (kind, participants, root) = (self.below(7) as i32 - 1, self.below(6) as u32, self.below(6) as u32);
        let sizes: Vec<u64> = (0..25).map(|_| if self.one_in(9) { u64::MAX } else { self.below(4) }).collect();
        let mut pieces = [mp_piece_t { from: 77, to: 77, send_offset: 77, receive_offset: 77, bytes: 77 }; 26];
        let (room, mut count) = (if self.one_in(2) { 26 } else { self.below(26) as usize }, 77);
        let is_equal = self.one_in(2);
        let list = if is_equal { null() } else { sizes.as_ptr() };
        let is_written = call!(self, mp_collective(kind, participants, root, sizes[0], list, pieces.as_mut_ptr(), room, &mut count));
        let written = pieces.iter().filter(|piece| piece.to != 77).count();
        assert!(written == if is_written { count } else { 0 } && written <= room && (0..5).contains(&kind) | !is_written);
        let (adopted, bytes, device) = (pointer(self.an_address()), self.below(99), self.below(6) as i32 - 1);
        let payload = if self.one_in(4) { null() } else { [GUARD; 64].as_ptr().cast() };
        let has_adopted = call!(self, mp_memory_adopt(context, adopted, bytes, device, payload));
        assert!(!has_adopted, "virtual devices have no CUDA IPC");
    }

    fn signal(&mut self) {
        let (context, stream) = (self.a_context(), self.a_stream());
        let at = self.below(LASTING as u64) as usize;
        let index = self.below(COUNTERS) as usize;
        let Counters { owner, first, raiser, values } = &mut self.counters[at];
        let (owner, raiser, counter) = (*owner, *raiser, *first + 8 * index);
        values[index] += self.random.below(3);
        let value = values[index];
        let spare = pointer(*first + 8 * COUNTERS as usize);
        let good = [mp_signal_t { counter: pointer(counter), value }];
        let odd = mp_signal_t { counter: pointer(self.an_address()), value: self.odd() };
        match self.below(8) {
            6 => {
                let (mut counters, count) = (poison(), if self.one_in(4) { self.odd() } else { self.below(64) });
                let out = self.out(&mut counters);
                if call!(self, mp_alloc_shared(context, MP_DEVICE_HOST, count.saturating_mul(8), out)) {
                    let mut first = 77;
                    // Other threads may destroy the context, so its memory must not be read.
                    if self.lasting.contains(&context.addr()) && call!(self, mp_signal_read(context, counters.cast(), &mut first)) {
                        assert_eq!(first, 0);
                    }
                    call!(self, mp_free(context, counters));
                } else {
                    assert_eq!(counters, poison(), "an output was written");
                }
            }
            7 => {
                // If a counter that streams use were set to a smaller value, a wait might never end.
                let (mut reached, mut now) = (77, 77);
                let outs = (self.out(&mut reached), self.out(&mut now));
                call!(self, mp_signal_test(owner, pointer(counter), value, outs.0));
                call!(self, mp_signal_read(owner, pointer(counter), outs.1));
                assert!(matches!(reached, 0 | 1 | 77));
                call!(self, mp_signal_raise(owner, spare, value));
                call!(self, mp_signal_raise(owner, pointer(counter + 4), value));
                if self.lasting.contains(&context.addr()) {
                    call!(self, mp_signal_read(context, odd.counter, outs.1));
                    call!(self, mp_signal_test(context, odd.counter, odd.value, outs.0));
                }
            }
            0 | 1 => {
                // The counter is set first. Otherwise a wait might already be enqueued when the context is destroyed, and destroying it
                // would block for ever.
                if self.one_in(4) {
                    call!(self, mp_stream_launch_host(owner, raiser, Some(nothing), null_mut(), None));
                }
                // A random handle may be the handle of this stream.
                if call!(self, mp_stream_raise_signals(owner, raiser, good.as_ptr(), 1)) {
                    call!(self, mp_stream_wait_signals(owner, stream, good.as_ptr(), 1));
                }
            }
            2 => {
                let seconds = [0.0, 1e-5, -1.0, f64::NAN, f64::NEG_INFINITY][self.below(5) as usize];
                call!(self, mp_signal_synchronize(owner, pointer(counter), value, seconds));
                // Memory that another thread may free in the meantime is not read.
                if self.lasting.contains(&context.addr()) {
                    call!(self, mp_signal_synchronize(context, odd.counter, odd.value, seconds));
                }
            }
            3 => {
                // Streams do not wait for other memory, because nothing would end such a wait. They do not set counters in other memory
                // either, because that would overwrite it.
                let (mine, wrong) = ([good[0], odd], [mp_signal_t { counter: pointer(counter + 4), value }]);
                call!(self, mp_stream_wait_signals(context, poison(), mine.as_ptr(), 2));
                call!(self, mp_stream_raise_signals(context, poison(), mine.as_ptr(), 2));
                call!(self, mp_stream_wait_signals(owner, stream, wrong.as_ptr(), 1));
                call!(self, mp_stream_raise_signals(owner, stream, wrong.as_ptr(), 1));
            }
            4 => {
                let huge = self.odd() as usize;
                call!(self, mp_stream_wait_signals(context, stream, null_mut(), huge));
                call!(self, mp_kernel_wait_signals(context, null_mut(), huge));
                call!(self, mp_kernel_wait_signals(owner, good.as_ptr(), 1));
                call!(self, mp_stream_raise_signals(context, stream, null_mut(), huge));
            }
            _ => {
                let huge = usize::MAX - self.below(1000) as usize;
                call!(self, mp_stream_wait_signals(context, stream, good.as_ptr(), huge));
                call!(self, mp_stream_raise_signals(context, stream, good.as_ptr().wrapping_byte_add(1), 1 + huge / 2));
            }
        }
    }

    /// Makes about `calls` calls.
    fn run(&mut self, calls: u64) {
        let total: u64 = Self::ACTIONS.iter().map(|(weight, _)| weight).sum();
        for at in 0..LASTING {
            let owner: mp_context_t = pointer(self.lasting[at]);
            let (mut first, mut raiser) = (null_mut(), null_mut());
            assert!(call!(self, mp_alloc_shared(owner, MP_DEVICE_HOST, 8 * (COUNTERS + 1), &mut first)), "{}", last_error());
            assert!(call!(self, mp_stream_create(owner, MP_DEVICE_HOST, &mut raiser)), "{}", last_error());
            self.counters.push(Counters { owner, first: first.addr(), raiser, values: [0; COUNTERS as usize] });
        }
        while self.calls < calls {
            let mut at = self.below(total);
            let (_, action) =
                Self::ACTIONS.iter().find(|(weight, _)| at.checked_sub(*weight).map(|left| at = left).is_none()).expect("in range");
            action(self);
        }
    }
}

/// Runs one round of `calls` calls, most of which are refused. Returns the number of calls and of successful calls by function.
fn round(seed: u64, threads: u64, calls: u64, trace: bool) -> Counts {
    // The memory is created before the contexts, and therefore dropped after them. Unfinished work may write to it until then.
    let mut owns: Vec<Vec<u8>> = (0..threads).map(|_| vec![GUARD; 3 * OWN]).collect();
    let places: Vec<usize> = owns.iter_mut().map(|own| own.as_mut_ptr().expose_provenance()).collect();
    let pools = Pools::default();
    let nodes: Vec<Node> = [c"beluga", c"pcie-4"].map(Node::new).into();
    let lasting: Vec<usize> = nodes.iter().map(|node| node.context.addr()).collect();
    let fuzz = |thread: u64| {
        let mut fuzzer = Fuzzer {
            random: Random(Random(seed).next().wrapping_add(thread)),
            pools: &pools,
            lasting: &lasting,
            alone: threads == 1,
            trace,
            counts: Counts::new(),
            calls: 0,
            mine: Vec::new(),
            gone: Vec::new(),
            planned: Vec::new(),
            counters: Vec::new(),
            own: places[thread as usize],
            room: vec![0; 8192],
        };
        fuzzer.run(calls / threads);
        fuzzer.counts
    };
    let done: Vec<_> = if threads == 1 {
        vec![fuzz(0)]
    } else {
        std::thread::scope(|scope| {
            let fuzz = &fuzz;
            let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || fuzz(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    };
    for context in pools.contexts.all().iter().chain(&lasting) {
        let _ = mp_context_destroy(pointer(*context));
    }
    let mut counts = Counts::new();
    for &place in &places {
        // SAFETY: ordinary memory of this size, and all work has finished.
        let own = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(place), 3 * OWN) };
        assert!(own[..OWN].iter().chain(&own[2 * OWN..]).all(|byte| *byte == GUARD), "bytes around host memory were written");
    }
    for called in done {
        for (name, [calls, accepted]) in called {
            let sum = counts.entry(name).or_default();
            *sum = [sum[0] + calls, sum[1] + accepted];
        }
    }
    counts
}

fn campaign(threads: u64) {
    let usual = if crate::common::is_long() { 3_000_000 } else { 60_000 };
    let (calls, seconds, seed) = (setting("FUZZ_CALLS", usual), setting("FUZZ_SECONDS", u64::MAX), setting("FUZZ_SEED", 1));
    let (first, trace) = (setting("FUZZ_ROUND", 0), setting("FUZZ_TRACE", 0) == 1);
    let (begun, mut said, mut counts, mut done, mut rounds) = (Instant::now(), Instant::now(), Counts::new(), 0, 0);
    let resident = resident_bytes() >> 20;
    while done < calls && begun.elapsed().as_secs() < seconds {
        let number = first + rounds;
        let say = || eprintln!("campaign: {threads} threads, seed {seed}, round {number} begins, {done} calls before it");
        if said.elapsed() > Duration::from_secs(10) || trace {
            said = Instant::now();
            say();
        }
        let result = std::panic::catch_unwind(|| round(seed << 32 ^ number, threads, ROUND.min(calls), trace));
        let called = result.unwrap_or_else(|panic| {
            say();
            std::panic::resume_unwind(panic)
        });
        for (name, [calls, accepted]) in called {
            done += calls;
            let sum = counts.entry(name).or_insert([0, 0]);
            *sum = [sum[0] + calls, sum[1] + accepted];
        }
        rounds += 1;
    }
    let accepted: u64 = counts.values().map(|[_, accepted]| accepted).sum();
    let line = format!(
        "campaign: {done} calls of {} functions by {threads} threads, seed {seed}, rounds {first} to {}: 0 aborts; {accepted} calls succeeded; \
         {:.0} s; memory {resident} MiB before, {} after",
        counts.len(),
        first + rounds,
        begun.elapsed().as_secs_f64(),
        resident_bytes() >> 20,
    );
    // Write directly to standard error, because the test harness captures the output of passing tests.
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[test]
fn random_calls_of_every_function_end_with_a_status() {
    campaign(1);
}

#[test]
fn random_calls_of_every_function_from_four_threads_end_with_a_status() {
    campaign(4);
}

/// Returns the functions that the header declares, except the inline one.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/include/mpgpu/mpgpu.h")).expect("the header is there");
    let code = header.lines().filter(|line| !line.starts_with("///") && !line.starts_with(" *") && !line.starts_with("static inline"));
    let before_parenthesis = code.flat_map(|line| {
        let pieces: Vec<&str> = line.split('(').collect();
        pieces[..pieces.len() - 1]
            .iter()
            .map(|piece| piece.rsplit(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap_or("").to_owned())
            .collect::<Vec<_>>()
    });
    before_parenthesis.filter(|name| name.starts_with("mp_")).collect()
}

#[test]
fn the_campaign_calls_every_function_that_the_header_declares_and_each_succeeds() {
    let declared = declared();
    assert!(declared.len() > 35, "{declared:?}");
    let counts = round(1, 1, 60_000, false);
    for name in &declared {
        let [calls, accepted] = counts.get(&**name).copied().unwrap_or_default();
        assert!(calls > 0, "{name} is never called: add it to an action of tests/rust/abi_campaign.rs");
        // A probe takes seconds, and virtual devices have no CUDA IPC.
        let refused = name.starts_with("mp_context_probe") || name == "mp_memory_adopt";
        assert!(refused || accepted > 0, "{name} was called {calls} times and never succeeded");
    }
    assert!(counts.keys().all(|name| declared.contains(*name)), "{:?}", counts.keys());
}
