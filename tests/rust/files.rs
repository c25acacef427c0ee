//! Tests mapped files as sources of transfers, on the host backend through the C ABI.

use crate::common::Random;
use crate::node::*;
use mpgpu::abi::*;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::{null, null_mut};

const BYTES: usize = (9 << 20) + 4099;

/// File with known contents, in a folder of its own. Dropping it removes both.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> (Scratch, Vec<u8>) {
        let folder = std::env::temp_dir().join(format!("mpgpu-mapped-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let contents: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        let scratch = Scratch(folder.join("weights"));
        std::fs::write(&scratch.0, &contents).expect("a file");
        (scratch, contents)
    }

    fn map(&self, node: &Node, bypass_cache: i32) -> *const u8 {
        let file = File::open(&self.0).expect("the file");
        let (mut data, mut bytes) = (null(), 0);
        // SAFETY: the outputs are valid for the call.
        ok(unsafe { mp_file_map(node.context, file.as_raw_fd(), bypass_cache, &mut data, &mut bytes) });
        assert_eq!(bytes, BYTES as u64);
        data.cast()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.parent().expect("a folder"));
    }
}

#[test]
fn random_ranges_of_a_file_arrive_on_gpus_and_in_host_memory() {
    let node = Node::new(c"beluga");
    let (scratch, contents) = Scratch::new("ranges");
    let mut random = Random(59);
    for round in 0..24 {
        let file = scratch.map(&node, round % 2);
        let batch: Vec<(usize, usize, *mut u8)> = (0..1 + random.below(6))
            .map(|number| {
                let begin = random.below(BYTES as u64) as usize;
                let bytes = 1 + random.below((BYTES - begin) as u64) as usize;
                (begin, bytes, node.alloc(number as i32 % 5 - 1, bytes))
            })
            .collect();
        let transfers: Vec<mp_transfer_t> = (0..)
            .zip(&batch)
            .map(|(number, (begin, bytes, to))| transfer(*to, number % 5 - 1, file.wrapping_add(*begin), MP_DEVICE_HOST, *bytes))
            .collect();
        let plan = node.plan(&transfers);
        node.run(plan);
        for (begin, bytes, to) in &batch {
            // SAFETY: virtual devices have memory of the process, and the execution has ended.
            let arrived = unsafe { std::slice::from_raw_parts(*to, *bytes) };
            assert!(arrived == &contents[*begin..begin + bytes], "round {round}: bytes {begin} to {}", begin + bytes);
        }
        ok(mp_plan_destroy(plan));
        batch.iter().for_each(|(_, _, to)| node.free(*to));
        // SAFETY: mapped above.
        ok(unsafe { mp_file_unmap(node.context, file.cast()) });
        // SAFETY: as above; the address is only looked up.
        let why = refused(unsafe { mp_file_unmap(node.context, file.cast()) }, mp_status_t::MP_ERROR_INVALID_POINTER);
        assert!(why.contains("is not the start address of a file mapping"), "{why}");
    }
}

#[test]
fn a_mapped_file_that_becomes_shorter_or_is_a_destination_is_an_error_of_the_execution() {
    let node = Node::new(c"beluga");
    for bypass_cache in [0, 1] {
        let (scratch, _) = Scratch::new("shorter");
        let file = scratch.map(&node, bypass_cache);
        let (on_gpu, stream) = (node.alloc(0, BYTES), node.stream(0));
        let into = node.plan(&[transfer(file.cast_mut(), -1, on_gpu, 0, BYTES)]);
        let plan = node.plan(&[transfer(on_gpu, 0, file, -1, BYTES)]);
        node.run(plan);
        let error_of = |plan| {
            let mut request = null_mut();
            // SAFETY: the output is valid for the call.
            unsafe {
                ok(mp_execute(plan, stream, &mut request));
                assert_ne!(mp_wait(&mut request, null_mut()), mp_status_t::MP_SUCCESS);
            }
            last_error()
        };
        assert!(error_of(into).contains("transfer 0: writing host memory at 0x"), "{}", last_error());
        File::options().write(true).open(&scratch.0).and_then(|file| file.set_len(1 << 20)).expect("a shorter file");
        assert!(error_of(plan).contains("its file became shorter"), "{}", last_error());
        ok(mp_plan_destroy(plan));
        ok(mp_plan_destroy(into));
    }
    node.still_works();
}

#[test]
fn what_is_no_file_is_refused_and_writes_no_output() {
    let node = Node::new(c"beluga");
    let (scratch, _) = Scratch::new("refused");
    let (file, null_device) = (File::open(&scratch.0).expect("the file"), File::open("/dev/null").expect("a device"));
    let (mut data, mut bytes) = (poison::<std::ffi::c_void>().cast_const(), 77);
    let mut map = |descriptor: i32, bypass_cache: i32, expected| {
        // SAFETY: the outputs are valid for the call.
        let why = refused(unsafe { mp_file_map(node.context, descriptor, bypass_cache, &mut data, &mut bytes) }, expected);
        assert_eq!((data.addr(), bytes), (poison::<u8>().addr(), 77));
        why
    };
    use mp_status_t::{MP_ERROR_DRIVER, MP_ERROR_INVALID_ARGUMENT, MP_ERROR_NOT_SUPPORTED};
    assert!(map(null_device.as_raw_fd(), 0, MP_ERROR_NOT_SUPPORTED).contains("not a regular file"));
    assert_eq!(last_argument().as_deref(), Some("descriptor"));
    assert!(map(-1, 0, MP_ERROR_INVALID_ARGUMENT).contains("descriptor=-1"));
    assert!(map(1 << 20, 0, MP_ERROR_DRIVER).contains("file descriptor 1048576"));
    assert!(map(file.as_raw_fd(), 2, MP_ERROR_INVALID_ARGUMENT).contains("bypass_cache=2: must be 0 or 1"));
}
