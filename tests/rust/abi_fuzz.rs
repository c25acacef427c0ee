//! Fuzz test that makes random sequences of calls with random, stale and invented arguments. The library must never crash, accepted copies
//! must be correct, and no other memory may be written. `LONG_TESTS=1` runs a hundred times as many sequences.
//!
//! The library must trust addresses of pageable host memory, so all host ranges in this test exist.

use crate::node::*;
use mpgpu::abi::*;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::collections::BTreeMap;
use std::ptr::{null, null_mut};

/// Call of the sequence: the number of its function, and random numbers from which its arguments are built.
type Call = (u8, [u16; 8]);

const GUARD: u8 = 0xC7;
const GPUS: i32 = 4;

/// Objects that the test has created, and the expected contents of its memory.
struct World {
    contexts: Vec<mp_context_t>,
    plans: Vec<(mp_plan_t, Vec<mp_transfer_t>)>,
    requests: Vec<mp_request_t>,
    streams: Vec<mp_stream_t>,
    events: Vec<mp_event_t>,
    /// Live memory by address, with the context that owns it, its device and its expected contents.
    memory: BTreeMap<usize, (mp_context_t, i32, Vec<u8>)>,
    /// Addresses that were freed.
    freed: Vec<usize>,
    /// Exported handles, with the address of the memory, which may have been freed since.
    exported: Vec<(mp_memory_handle_t, usize)>,
    /// Pageable host memory. No transfer may access the bytes before and after its middle part.
    own: Vec<u8>,
    own_expected: Vec<u8>,
}

const OWN: usize = 4096;

/// Returns one of the known values, possibly a stale one, or the invented value.
fn pick<T: Copy>(known: &[T], choice: u16, made_up: T) -> T {
    if known.is_empty() || choice.is_multiple_of(16) { made_up } else { known[choice as usize / 16 % known.len()] }
}

fn handle<T>(known: &[*mut T], choice: u16) -> *mut T {
    // The number is chosen so that it is not a handle of another test in this process.
    let made_up = [0, 1, 0xDEAD_BEEF, 0x1_10FF_FFF1, usize::MAX, 0x1_20FF_FFF1, 0x7FFF_FFFF_3000_0000][choice as usize / 16 % 7];
    pick(known, choice, std::ptr::without_provenance_mut(made_up))
}

fn odd_number(choice: u16) -> u64 {
    let small = u64::from(choice >> 3);
    [0, small, 1, u64::MAX, u64::MAX - small, 1 << 63, (1 << 40) + small, u64::from(u32::MAX) + small][choice as usize % 8]
}

impl World {
    fn new() -> World {
        let own = vec![GUARD; 3 * OWN];
        World {
            contexts: Vec::new(),
            plans: Vec::new(),
            requests: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            memory: BTreeMap::new(),
            freed: Vec::new(),
            exported: Vec::new(),
            own_expected: own.clone(),
            own,
        }
    }

    fn context(&self, choice: u16) -> mp_context_t {
        handle(&self.contexts, choice)
    }

    /// Returns address and device of one end of a transfer. The address is usually inside live memory, sometimes near its end, freed, NULL
    /// or unmapped.
    fn end(&mut self, context: mp_context_t, choice: [u16; 3]) -> (*mut u8, i32) {
        let nowhere = i32::from(choice[2] as i16);
        let offset = usize::from(choice[1]) % 3000;
        match choice[0] % 16 {
            0 => (null_mut(), i32::from(choice[2]) % (GPUS + 2)),
            1 => (std::ptr::without_provenance_mut(usize::MAX - offset), i32::from(choice[2]) % GPUS),
            2 if !self.freed.is_empty() => {
                (std::ptr::without_provenance_mut(self.freed[usize::from(choice[1]) % self.freed.len()]), i32::from(choice[2]) % GPUS)
            }
            // A range of at most OWN bytes from this address stays inside the host memory that transfers may access.
            3 => (self.own[OWN..].as_mut_ptr(), if choice[1].is_multiple_of(4) { MP_DEVICE_AUTO } else { MP_DEVICE_HOST }),
            _ if self.memory.is_empty() => (null_mut(), nowhere),
            _ => {
                // The memory usually belongs to this context, because a plan for memory of another context is refused.
                let mine = self.memory.values().filter(|(owner, _, _)| *owner == context).count();
                let any = mine == 0 || choice[0] % 16 == 4;
                let at = usize::from(choice[1]) / 8 % if any { self.memory.len() } else { mine };
                let mut candidates = self.memory.iter().filter(|(_, (owner, _, _))| any || *owner == context);
                let (address, (_, device, _)) = candidates.nth(at).expect("in range");
                let device = if choice[2].is_multiple_of(16) { nowhere } else { *device };
                // A wrong address must be declared as GPU memory. Otherwise the library would take it as pageable host memory and read it.
                let device = if device < 0 && choice[2].is_multiple_of(16) { nowhere & 7 } else { device };
                let device = if choice[2] % 8 == 1 { MP_DEVICE_AUTO } else { device };
                (std::ptr::with_exposed_provenance_mut::<u8>(address + offset), device)
            }
        }
    }

    /// Returns the expected contents of a range, or `None` if the test does not know the whole range.
    fn bytes(&mut self, address: usize, length: usize) -> Option<&mut [u8]> {
        let own = self.own.as_ptr().addr();
        if (own..own + self.own.len()).contains(&address) {
            return self.own_expected.get_mut(address - own..(address - own).checked_add(length)?);
        }
        let (base, (_, _, bytes)) = self.memory.range_mut(..=address).next_back()?;
        bytes.get_mut(address - base..(address - base).checked_add(length)?)
    }

    /// Updates the expected contents of memory after an execution of these transfers.
    fn expect(&mut self, transfers: &[mp_transfer_t]) {
        let moved: Vec<Vec<u8>> = transfers
            .iter()
            .map(|t| match t.bytes {
                0 => Vec::new(),
                n => self.bytes(t.src.addr(), n as usize).expect("an accepted source is known").to_vec(),
            })
            .collect();
        for (t, moved) in transfers.iter().zip(moved).filter(|(t, _)| t.bytes > 0) {
            self.bytes(t.dst.addr(), t.bytes as usize).expect("an accepted destination is known").copy_from_slice(&moved);
        }
    }

    fn check(&self) {
        for (address, (_, device, expected)) in &self.memory {
            // SAFETY: the library allocated this memory and it was not freed. All work has finished.
            let found = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(*address), expected.len()) };
            assert!(found == expected, "memory of device {device} is not what the accepted copies make it");
        }
        assert!(self.own == self.own_expected, "host memory is not what the accepted copies make it");
    }

    fn make(&mut self, (which, n): Call) {
        let context = self.context(n[0]);
        // SAFETY: pointers are NULL or valid for the call. The library must check ranges; host ranges are real.
        unsafe {
            match which % 29 {
                0 => self.create_context(n),
                1 if n[1].is_multiple_of(8) => self.destroy_context(context),
                2..=4 => self.alloc(context, n),
                5 => self.free(context, n),
                6..=9 => self.plan(context, n),
                10..=13 => self.execute(n),
                23 => self.prepare(n),
                14 => {
                    let plan = pick(&self.plans.iter().map(|p| p.0).collect::<Vec<_>>(), n[1], poison());
                    mp_plan_destroy(plan);
                }
                15 => {
                    let mut request = handle(&self.requests, n[1]);
                    let mut done = 0;
                    match n[2] % 4 {
                        0 => mp_wait(&mut request, null_mut()),
                        1 => mp_test(&mut request, &mut done, null_mut()),
                        2 => mp_request_destroy(&mut request),
                        _ => mp_wait(null_mut(), null_mut()),
                    };
                }
                16 => {
                    let mut stream = poison();
                    if mp_stream_create(context, i32::from(n[1] as i16 % 7), &mut stream) == MP_SUCCESS {
                        self.streams.push(stream);
                    } else {
                        assert_eq!(stream, poison());
                    }
                }
                17 => {
                    let stream = handle(&self.streams, n[1]);
                    match n[2] % 5 {
                        0 => mp_stream_destroy(context, stream),
                        1 => mp_stream_launch_host(context, stream, Some(nothing), null_mut(), None),
                        2 => mp_stream_launch_host(context, stream, None, null_mut(), None),
                        3 => mp_stream_launch_host(context, stream, Some(nothing), null_mut(), Some(nothing)),
                        _ => mp_stream_synchronize(context, stream),
                    };
                }
                18 => {
                    let mut event = poison();
                    if mp_event_create(context, &mut event) == MP_SUCCESS {
                        self.events.push(event);
                    }
                }
                19 => {
                    let (event, stream) = (handle(&self.events, n[1]), handle(&self.streams, n[2]));
                    match n[3] % 4 {
                        0 => mp_event_destroy(context, event),
                        1 => mp_event_record(context, event, stream),
                        2 => mp_stream_wait_event(context, stream, event),
                        _ => mp_event_synchronize(context, event),
                    };
                }
                20 => self.describe(context, n),
                24 => self.export(context, n),
                25 => self.import(context, n),
                26 => self.signal(context, n),
                27 => self.copy_pieces(context, n),
                28 => self.copy_blocks(context, n),
                21 => {
                    // The size may be any value, because the buffer is larger than the largest struct that the library reads.
                    let mut room = [0_u64; 512];
                    room[0] = odd_number(n[1]);
                    let status = mp_context_statistics(context, room.as_mut_ptr().cast());
                    assert!(status == MP_SUCCESS || room[1..].iter().all(|word| *word == 0));
                    assert!(room[8..].iter().all(|word| *word == 0), "written beyond what the library knows");
                    mp_context_device_statistics(context, i32::from(n[2] as i16), room.as_mut_ptr().cast());
                }
                22 => {
                    let mut room = [0_u64; 512];
                    room[0] = odd_number(n[1]);
                    mp_plan_get_info(pick(&self.plans.iter().map(|p| p.0).collect::<Vec<_>>(), n[2], poison()), room.as_mut_ptr().cast());
                    assert!(room[7..].iter().all(|word| *word == 0));
                    mp_last_error_info(room.as_mut_ptr().cast());
                    mp_status_string(i32::from(n[3] as i16));
                    mp_log_set_callback(6 + i32::from(n[3]), None, null_mut());
                }
                _ => {
                    let (mut gpus, mut hosts) = (-1, -1);
                    let mut backend = mp_backend_t::MP_BACKEND_AUTO;
                    let wanted = if n[1].is_multiple_of(4) { null_mut() } else { &raw mut gpus };
                    let status = mp_context_get_info(context, &mut backend, wanted, &mut hosts);
                    assert!(status == MP_SUCCESS || (gpus, hosts) == (-1, -1));
                    assert_eq!(status == MP_SUCCESS, backend == mp_backend_t::MP_BACKEND_HOST);
                    let mut capturing = -1;
                    let status = mp_stream_get_info(context, poison(), null_mut(), &mut capturing);
                    assert_eq!(status == MP_SUCCESS, capturing == 0);
                }
            }
        }
    }

    fn create_context(&mut self, n: [u16; 8]) {
        if self.contexts.len() >= 3 {
            return;
        }
        let options = mp_context_options_t {
            topology: [c"beluga", c"beluga", c"beluga", c"nowhere"][n[1] as usize % 4].as_ptr(),
            backend: [0, 1, 0, 2, 3, -1][n[2] as usize % 6],
            staging_bytes: [0, 1 << 14, 1 << 16, 1][n[3] as usize % 4],
            cache_plans: [0, 1, 3, u64::MAX][n[4] as usize % 4],
            signal_wait: [0, 1, 2, 3][n[6] as usize % 4],
            host_threads: [0, 1, -1, 257][n[6] as usize / 4 % 4],
            ..context_options()
        };
        let mut context = poison();
        // SAFETY: all pointers are valid for the call.
        if unsafe { mp_context_create_versioned(&options, MP_VERSION + u32::from(n[5].is_multiple_of(8)) * 100, &mut context) }
            == MP_SUCCESS
        {
            self.contexts.push(context);
        } else {
            assert_eq!(context, poison());
        }
    }

    fn destroy_context(&mut self, context: mp_context_t) {
        if mp_context_destroy(context) == MP_SUCCESS {
            let of_it = |(_, (owner, _, _)): &(&usize, &(mp_context_t, i32, Vec<u8>))| *owner == context;
            self.freed.extend(self.memory.iter().filter(of_it).map(|(address, _)| *address));
            self.memory.retain(|_, (owner, _, _)| *owner != context);
        }
    }

    unsafe fn alloc(&mut self, context: mp_context_t, n: [u16; 8]) {
        let (device, bytes) =
            (i32::from(n[1] as i16 % 7), if n[2].is_multiple_of(8) { odd_number(n[3]) } else { u64::from(n[3] % 4096) + 1 });
        let mut memory = poison();
        // SAFETY: the output is valid for the call.
        let status = unsafe { mp_alloc(context, device, bytes, &mut memory) };
        if status == MP_SUCCESS {
            assert!((-2..GPUS).contains(&device) && bytes > 0);
            if bytes > 1 << 20 {
                // The system may promise more memory than it has, so the test does not touch it. SAFETY: just allocated, and not used.
                ok(unsafe { mp_free(context, memory) });
                return;
            }
            let expected: Vec<u8> = (0..bytes).map(|i| (i as u16 ^ n[4]) as u8).collect();
            // SAFETY: new memory of this size, of the host backend.
            unsafe { std::ptr::copy_nonoverlapping(expected.as_ptr(), memory.cast(), expected.len()) };
            self.memory.insert(memory.expose_provenance(), (context, device, expected));
        } else {
            assert_eq!(memory, poison());
        }
    }

    unsafe fn free(&mut self, context: mp_context_t, n: [u16; 8]) {
        let addresses: Vec<usize> = self.memory.keys().chain(&self.freed).copied().collect();
        let address = pick(&addresses, n[1], 0x1000) + usize::from(n[2].is_multiple_of(8));
        // SAFETY: all work has finished. The library must detect whether the address is an allocation.
        let status = unsafe { mp_free(context, std::ptr::without_provenance_mut(address)) };
        let live = self.memory.get(&address).is_some_and(|(owner, _, _)| *owner == context);
        assert_eq!(status == MP_SUCCESS, live);
        if live {
            self.memory.remove(&address);
            self.freed.push(address);
        }
    }

    unsafe fn plan(&mut self, context: mp_context_t, n: [u16; 8]) {
        let mut transfers = Vec::new();
        for i in 0..n[1] % 4 {
            let mix = |k: usize| n[k].rotate_left(u32::from(i) * 5).wrapping_mul(2 * i + 1);
            let ((dst, dst_device), (src, src_device)) =
                (self.end(context, [mix(2), mix(3), mix(4)]), self.end(context, [mix(5), mix(6), mix(7)]));
            let on_host = may_be_host(dst_device) || may_be_host(src_device);
            let bytes = if mix(7).is_multiple_of(8) && !on_host { odd_number(mix(3)) as usize } else { usize::from(mix(4)) % 2048 };
            transfers.push(transfer(dst, dst_device, src, src_device, bytes));
        }
        // A host range must exist as long as the plan. It is inside the test's own memory, or inside an allocation of this context. This
        // context would treat host memory of another context as pageable memory, and could not detect that it was freed.
        for t in &mut transfers {
            for (address, device) in [(t.dst.addr(), t.dst_device), (t.src.addr(), t.src_device)] {
                let foreign = self
                    .memory
                    .range(..=address)
                    .next_back()
                    .is_some_and(|(base, (owner, _, bytes))| address - base < bytes.len() && *owner != context);
                let known = self.bytes(address, t.bytes as usize).is_some();
                if may_be_host(device) && address != 0 && t.bytes > 0 && (foreign || !known) {
                    t.bytes = 0;
                }
            }
        }
        let options = mp_plan_options_t {
            engine: i32::from(n[2] % 7) - 1,
            max_paths: u32::from(n[3] % 5),
            host_path: i32::from(n[4] % 5) - 1,
            chunk_bytes: [0, 4096, 1][n[5] as usize % 3],
            min_bytes: u64::from(n[6] % 2),
            staging_bytes: [0, 0, 0, 1 << 13, u64::MAX][n[7] as usize % 5],
            ..plan_options()
        };
        let options = if !n[2].is_multiple_of(4) { null() } else { &raw const options };
        let mut plan = poison();
        // SAFETY: all pointers are valid for the call.
        if unsafe { mp_plan(context, transfers.as_ptr(), transfers.len(), options, &mut plan) } == MP_SUCCESS {
            self.plans.push((plan, transfers));
        } else {
            assert_eq!(plan, poison());
        }
    }

    unsafe fn execute(&mut self, n: [u16; 8]) {
        let (plan, transfers) = if self.plans.is_empty() || n[1].is_multiple_of(16) {
            (handle(&[], n[1]), Vec::new())
        } else {
            self.plans[usize::from(n[1]) / 16 % self.plans.len()].clone()
        };
        let stream = if n[2].is_multiple_of(2) { null_mut() } else { handle(&self.streams, n[3]) };
        let mut request = poison();
        // SAFETY: the output is valid for the call. The library must detect whether the plan's memory still exists.
        let status = unsafe { mp_execute(plan, stream, &mut request) };
        if status != MP_SUCCESS {
            assert_eq!(request, poison());
            return;
        }
        let mut waiting = request;
        // SAFETY: the request is valid for the call.
        ok(unsafe { mp_wait(&mut waiting, null_mut()) });
        self.requests.push(request);
        self.expect(&transfers);
    }

    /// True if the result does not depend on the order of the copies: no destination overlaps a source or another destination.
    fn is_clear(copies: &[mp_segment_t]) -> bool {
        let apart = |a: usize, b: usize, bytes: [u64; 2]| {
            a.checked_add(bytes[0] as usize).is_none_or(|end| end <= b) || a >= b.saturating_add(bytes[1] as usize)
        };
        let copies: Vec<&mp_segment_t> = copies.iter().filter(|copy| copy.bytes > 0).collect();
        copies.iter().enumerate().all(|(at, one)| {
            copies.iter().enumerate().all(|(other, two)| {
                let bytes = [one.bytes, two.bytes];
                apart(one.dst.addr(), two.src.addr(), bytes) && (at == other || apart(one.dst.addr(), two.dst.addr(), bytes))
            })
        })
    }

    /// Checks the result of a copy of pieces, waits for it, and updates the expected contents of memory.
    unsafe fn copied(&mut self, context: mp_context_t, status: mp_status_t, mut request: mp_request_t, copies: &[mp_segment_t]) {
        if status != MP_SUCCESS {
            assert_eq!(request, poison());
            return;
        }
        // SAFETY: the request is valid for the call.
        ok(unsafe { mp_wait(&mut request, null_mut()) });
        for copy in copies.iter().filter(|copy| copy.bytes > 0) {
            for address in [copy.dst.addr(), copy.src.addr()] {
                let (_, (owner, _, _)) = self.memory.range(..=address).next_back().expect("an accepted address is known");
                assert_eq!(*owner, context, "memory of another context was accepted");
            }
            let moved = self.bytes(copy.src.addr(), copy.bytes as usize).expect("an accepted source is known").to_vec();
            self.bytes(copy.dst.addr(), copy.bytes as usize).expect("an accepted destination is known").copy_from_slice(&moved);
        }
    }

    unsafe fn copy_pieces(&mut self, context: mp_context_t, n: [u16; 8]) {
        let mut pieces = Vec::new();
        for i in 0..n[1] % 4 {
            let mix = |k: usize| n[k].rotate_left(u32::from(i) * 5).wrapping_mul(2 * i + 1);
            let ((dst, _), (src, _)) = (self.end(context, [mix(2), mix(3), mix(4)]), self.end(context, [mix(5), mix(6), mix(7)]));
            let bytes = if mix(7).is_multiple_of(16) { odd_number(mix(3)) } else { u64::from(mix(4)) % 1024 };
            pieces.push(mp_segment_t { dst: dst.cast(), src: src.cast(), bytes });
        }
        if !World::is_clear(&pieces) {
            return;
        }
        let stream = if n[2].is_multiple_of(2) { null_mut() } else { handle(&self.streams, n[3]) };
        let mut request = poison();
        // SAFETY: the list and the output are valid for the calls. The library must check the addresses.
        unsafe {
            let status = mp_copy_pieces(context, pieces.as_ptr(), pieces.len(), null(), stream, &mut request);
            self.copied(context, status, request, &pieces);
        }
    }

    unsafe fn copy_blocks(&mut self, context: mp_context_t, n: [u16; 8]) {
        let ((dst, _), (src, _)) = (self.end(context, [n[1], n[2], 0]), self.end(context, [n[3], n[4], 0]));
        let (bytes, count) = (u64::from(n[5] % 100), u64::from(n[6] % 8));
        let strides = [bytes + u64::from(n[5] >> 8) % 32, if n[7].is_multiple_of(2) { 0 } else { bytes }];
        // The order of destinations is reversed, and sources may repeat.
        let lists = [(0..count as u32).rev().collect::<Vec<u32>>(), (0..count as u32).map(|at| (at * u32::from(n[7])) % 9).collect()];
        let blocks = mp_blocks_t {
            dst: &dst.cast(),
            src: &src.cast_const().cast(),
            layers: 1,
            block_bytes: bytes,
            count,
            dst_stride: strides[0],
            src_stride: strides[1],
            dst_blocks: count.max(1),
            src_blocks: 8,
            dst_index: lists[0].as_ptr().cast(),
            src_index: lists[1].as_ptr().cast(),
            index_bytes: 4,
            ..blocks()
        };
        let copies: Vec<mp_segment_t> = lists[0]
            .iter()
            .zip(&lists[1])
            .map(|(to, from)| mp_segment_t {
                dst: dst.wrapping_add((u64::from(*to) * strides[0]) as usize).cast(),
                src: src.wrapping_add((u64::from(*from) * bytes) as usize).cast(),
                bytes,
            })
            .collect();
        if !World::is_clear(&copies) {
            return;
        }
        let mut request = poison();
        // SAFETY: all pointers are valid for the calls. The library must check the arrays.
        unsafe {
            let status = mp_copy_blocks(context, &blocks, null(), null_mut(), &mut request);
            let is_beyond = bytes > 0 && lists[1].contains(&8);
            assert!(status != MP_SUCCESS || !is_beyond, "an index out of range was accepted");
            self.copied(context, status, request, &copies);
        }
    }

    /// Prepares a plan. A plan whose memory was freed must be refused. No data is copied.
    fn prepare(&mut self, n: [u16; 8]) {
        let plan = pick(&self.plans.iter().map(|p| p.0).collect::<Vec<_>>(), n[1], poison());
        mp_plan_prepare(plan, if n[2].is_multiple_of(2) { null_mut() } else { handle(&self.streams, n[3]) });
    }

    unsafe fn export(&mut self, context: mp_context_t, n: [u16; 8]) {
        let addresses: Vec<usize> = self.memory.keys().chain(&self.freed).copied().collect();
        let (base, offset) = (pick(&addresses, n[1], 0x1000), usize::from(n[2]) % 64);
        let bytes = if n[3].is_multiple_of(4) { odd_number(n[4]) } else { u64::from(n[4]) % 4096 };
        let mut handle = mp_memory_handle_t { bytes: [GUARD; 128] };
        // SAFETY: the output is valid for the call. The library must check the range.
        let status = unsafe { mp_memory_export(context, std::ptr::without_provenance_mut(base + offset), bytes, &mut handle) };
        // An address that was freed may now lie inside a later, larger allocation.
        let address = base + offset;
        let live = self.memory.range(..=address).next_back().is_some_and(|(first, (owner, device, held))| {
            let left = held.len().saturating_sub(address - first);
            // Host memory of `mp_alloc` cannot be shared with other processes.
            *owner == context && *device >= 0 && bytes > 0 && bytes <= left as u64
        });
        assert_eq!(status == MP_SUCCESS, live, "{status:?}");
        assert!(live || handle.bytes == [GUARD; 128], "an output was written");
        if live {
            self.exported.push((handle, address));
        }
    }

    /// Imports handles of this process (valid, damaged and invented ones), and closes them again.
    unsafe fn import(&mut self, context: mp_context_t, n: [u16; 8]) {
        let made_up = (mp_memory_handle_t { bytes: [n[2] as u8; 128] }, 0);
        let (mut handle, address) = pick(&self.exported, n[1], made_up);
        let damaged = n[3].is_multiple_of(4);
        if damaged {
            handle.bytes[usize::from(n[4]) % 128] ^= 1 << (n[5] % 8);
        }
        let (mut pointer, mut device, mut bytes) = (poison(), 77, 77);
        // SAFETY: all pointers are valid for the calls.
        unsafe {
            let status = mp_memory_import(context, &handle, MP_DEVICE_AUTO, &mut pointer, &mut device, null_mut(), &mut bytes);
            if status != MP_SUCCESS {
                assert_eq!((pointer, device, bytes), (poison(), 77, 77), "an output was written");
                return;
            }
            assert!(!damaged && pointer.addr() == address, "a handle was taken for another");
            // An address can be closed only after its import, and only once. Another address cannot be closed.
            assert_eq!(mp_memory_close(context, pointer.cast::<u8>().wrapping_add(4096 * 64).cast()), MP_ERROR_INVALID_POINTER);
            ok(mp_memory_close(context, pointer));
            assert_eq!(mp_memory_close(context, pointer), MP_ERROR_INVALID_POINTER);
        }
    }

    /// Reads and sets counters and queries if they have reached a value. No stream waits, because a wait for a counter that nobody sets
    /// would never end.
    unsafe fn signal(&mut self, context: mp_context_t, n: [u16; 8]) {
        let addresses: Vec<usize> = self.memory.keys().chain(&self.freed).copied().collect();
        let counter = std::ptr::without_provenance_mut::<u64>(pick(&addresses, n[1], 8) + usize::from(n[2]) % 64);
        let signals = [mp_signal_t { counter, value: odd_number(n[3]) }];
        let seconds = [0.0, -1.0, f64::NAN, f64::NEG_INFINITY][usize::from(n[4]) % 4];
        // SAFETY: the list is valid for the calls. The library must check the address.
        unsafe {
            mp_signal_synchronize(context, counter, odd_number(n[3]), seconds);
            let (mut value, mut reached, mut counters) = (77, 77, poison());
            let read = mp_signal_read(context, counter, &mut value);
            let tested = mp_signal_test(context, counter, value, &mut reached);
            assert_eq!((read, reached), (tested, if read == MP_SUCCESS { 1 } else { 77 }));
            // The counter is set to its current value, because the test compares this memory.
            assert_eq!(mp_signal_raise(context, counter, value), read);
            if mp_alloc_shared(context, MP_DEVICE_HOST, 8 * u64::from(n[7] % 99), &mut counters) == MP_SUCCESS {
                ok(mp_signal_read(context, counters.cast(), &mut value));
                assert_eq!(value, 0);
                ok(mp_free(context, counters));
            } else {
                assert_eq!(counters, poison());
            }
            mp_stream_wait_signals(context, handle(&self.streams, n[5]), signals.as_ptr(), 0);
            mp_stream_raise_signals(context, poison(), signals.as_ptr(), 1);
            mp_stream_wait_signals(context, poison(), null(), usize::from(n[6]));
        }
    }

    unsafe fn describe(&self, context: mp_context_t, n: [u16; 8]) {
        let mut text = [GUARD; 300];
        let capacity = usize::from(n[1]) % 256;
        let (mut length, format) = (0, i32::from(n[2] % 4) - 1);
        let plan = pick(&self.plans.iter().map(|p| p.0).collect::<Vec<_>>(), n[3], poison());
        // SAFETY: the buffer has at least this capacity.
        unsafe {
            if n[4].is_multiple_of(2) {
                mp_context_describe(context, format, text.as_mut_ptr().cast(), capacity, &mut length);
            } else {
                mp_plan_describe(plan, format, text.as_mut_ptr().cast(), capacity, &mut length);
            }
        }
        assert!(text[capacity..].iter().all(|byte| *byte == GUARD), "text beyond the capacity");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for &context in &self.contexts {
            let _ = mp_context_destroy(context);
        }
    }
}

/// True if the library may take an address with this device as pageable host memory, which it then accesses without a check.
fn may_be_host(device: i32) -> bool {
    device < 0 || device == MP_DEVICE_AUTO
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    prop::collection::vec((any::<u8>(), any::<[u16; 8]>()), 1..150)
}

proptest! {
    #![proptest_config(crate::common::config(300))]

    #[test]
    fn random_calls_never_crash_and_only_accepted_copies_change_memory(calls in calls()) {
        let mut world = World::new();
        // The sequence starts with two contexts that have memory. Otherwise most sequences would consist of refused calls only.
        for context in 0..2_u16 {
            world.create_context([1, context, 0, 2 - context, 0, 1, 0, 0]);
        }
        for i in 0..12_u16 {
            let context = world.contexts[usize::from(i % 2)];
            // SAFETY: as in `make`.
            unsafe { world.alloc(context, [0, i % 5, 1, 4000, i, 0, 0, 0]) };
        }
        for call in calls {
            world.make(call);
        }
        world.check();
    }
}

#[test]
fn the_random_calls_reach_accepted_copies_and_refusals() {
    // This test counts how many calls of generated sequences succeed, to detect if the test above makes only refused calls.
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut accepted, mut planned) = (0_u64, 0);
    for _ in 0..50 {
        let sequence = calls().new_tree(&mut runner).expect("a sequence").current();
        let mut world = World::new();
        world.create_context([1, 0, 0, 2, 0, 1, 0, 0]);
        for i in 0..8_u16 {
            let context = world.contexts[0];
            // SAFETY: as in `make`.
            unsafe { world.alloc(context, [0, i % 5, 1, 4000, i, 0, 0, 0]) };
        }
        sequence.into_iter().for_each(|call| world.make(call));
        accepted += world.requests.len() as u64;
        planned += world.plans.iter().filter(|(_, transfers)| transfers.iter().any(|t| t.bytes > 0)).count();
    }
    assert!(accepted > 100 && planned > 25, "{accepted} executions, {planned} plans that copy something");
}
