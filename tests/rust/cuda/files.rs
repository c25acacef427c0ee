//! Tests mapped files as sources of transfers that threads copy. Uses a driver double (simulated CUDA driver) whose streams execute their
//! work in order.

use super::double::{self, node};
use super::prepared;
use crate::backend::StreamHandle;
use crate::backend::files::Caching;
use crate::topology::DeviceId;
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::ptr::{null_mut, with_exposed_provenance, with_exposed_provenance_mut};

const GPU0: DeviceId = DeviceId::gpu(0);
/// Size of the file. Copies of its whole mapping read the address ranges of the process.
const BYTES: usize = (33 << 20) + 4099;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> (Scratch, Vec<u8>) {
        let path = std::env::temp_dir().join(format!("mpgpu-threads-{}-{name}", std::process::id()));
        let contents: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        std::fs::write(&path, &contents).expect("a file");
        (Scratch(path), contents)
    }

    fn file(&self) -> File {
        File::open(&self.0).expect("the file")
    }

    /// Maps the file as a program does that does not use the library for it.
    fn mapping(&self, access: libc::c_int, sharing: libc::c_int) -> u64 {
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(null_mut(), BYTES, access, sharing, self.file().as_raw_fd(), 0) };
        assert_ne!(base, libc::MAP_FAILED);
        base.expose_provenance() as u64
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn context(threads: u32) -> Context {
    double::start(2, true);
    node(|node| node.room = Some(100_000));
    prepared::context_with(double::driver(), |config| Config { host_threads: threads, staging_bytes: 8 << 20, adapt: false, ..config })
}

fn load(context: &Context, on_gpu: u64, from: u64, bytes: usize) -> Result<(), Error> {
    let transfer = Transfer { dst: on_gpu, dst_device: Transfer::AUTO, src: from, src_device: Transfer::AUTO, bytes: bytes as u64 };
    Ok(context.plan(&[transfer], &PlanOptions::default())?.execute(StreamHandle(0))?.wait()?)
}

fn arrived(on_gpu: u64, bytes: usize) -> &'static [u8] {
    // SAFETY: devices of the double have memory of the process, and the execution has ended.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance(on_gpu as usize), bytes) }
}

#[test]
fn threads_read_a_mapped_file_and_report_that_it_became_shorter() {
    for (threads, caching) in [(0, Caching::Keep), (1, Caching::Keep), (5, Caching::Keep), (5, Caching::Bypass)] {
        let context = context(threads);
        let (scratch, contents) = Scratch::new("mapped");
        let on_gpu = context.allocate(GPU0, BYTES as u64).expect("memory");
        let (address, bytes) = context.map_file(scratch.file().as_fd(), caching).expect("a mapping");
        assert_eq!(bytes, BYTES as u64);
        for (begin, end) in [(0, BYTES), (1, 4098), (4097, BYTES - 3), (BYTES - 1, BYTES)] {
            load(&context, on_gpu, address + begin as u64, end - begin).expect("it arrives");
            assert!(arrived(on_gpu, end - begin) == &contents[begin..end], "{threads} threads, {caching:?}, {begin} to {end}");
        }
        File::options().write(true).open(&scratch.0).and_then(|file| file.set_len(7 << 20)).expect("a shorter file");
        let why = load(&context, on_gpu, address, BYTES).expect_err("bytes are missing").to_string();
        assert!(why.contains("transfer 0: reading host memory at 0x") && why.contains("its file became shorter"), "{why}");
        load(&context, on_gpu, address, 7 << 20).expect("the context still works");
        assert!(arrived(on_gpu, 7 << 20) == &contents[..7 << 20]);
        context.unmap_file(address).expect("unmapped");
    }
}

#[test]
fn mappings_that_the_program_made_arrive_as_the_program_sees_them() {
    let context = context(4);
    let (scratch, contents) = Scratch::new("own");
    let on_gpu = context.allocate(GPU0, BYTES as u64).expect("memory");
    let both = libc::PROT_READ | libc::PROT_WRITE;
    for (access, sharing) in [(libc::PROT_READ, libc::MAP_SHARED), (libc::PROT_READ, libc::MAP_PRIVATE), (both, libc::MAP_PRIVATE)] {
        let (base, mut expected) = (scratch.mapping(access, sharing), contents.clone());
        for written in [None, Some(0), Some(BYTES / 2), Some(BYTES - 1)] {
            if let Some(at) = written.filter(|_| access == both) {
                // SAFETY: a byte of the mapping, which no execution uses now. The file does not change, because the mapping is private.
                unsafe { *with_exposed_provenance_mut::<u8>(base as usize + at) ^= 0x5a };
                expected[at] ^= 0x5a;
            }
            load(&context, on_gpu, base, BYTES).expect("it arrives");
            assert!(arrived(on_gpu, BYTES) == expected, "access {access}, sharing {sharing}, written {written:?}");
        }
        // SAFETY: the whole mapping, which nothing uses any more.
        unsafe { libc::munmap(with_exposed_provenance_mut(base as usize), BYTES) };
    }
    // Another file has the name of the mapped one.
    let base = scratch.mapping(libc::PROT_READ, libc::MAP_SHARED);
    std::fs::remove_file(&scratch.0).expect("removed");
    std::fs::write(&scratch.0, vec![1; BYTES]).expect("another file");
    load(&context, on_gpu, base, BYTES).expect("it arrives");
    assert!(arrived(on_gpu, BYTES) == contents);
    // SAFETY: as above.
    unsafe { libc::munmap(with_exposed_provenance_mut(base as usize), BYTES) };
}
