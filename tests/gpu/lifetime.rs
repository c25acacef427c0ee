//! Tests contexts that short-lived threads create and destroy. Nothing else in the process retains the primary contexts of the GPUs, but
//! they must nevertheless stay the same. A crash ends the process, so a child process runs the test.

use super::scale::scaled;
use super::*;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const THREADS: u64 = 4;
const BYTES: u64 = (1 << 20) + 7;

fn rounds() -> u64 {
    scaled(8, 2)
}

/// Creates a context, and copies from host memory over both GPUs and back to host memory.
fn come_and_go(seed: u64) {
    let context = context(None, |_| {});
    let memory = |device| (context.allocate(device, BYTES).expect("memory"), device);
    let stops = [DeviceId::HOST, GPU0, GPU1, DeviceId::HOST].map(memory);
    let content = Random(seed).bytes(BYTES as usize);
    let host = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: pinned memory of this size, which no copy uses yet.
    unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), host(stops[0].0), content.len()) };
    let stream = context.create_stream(DeviceId::gpu((seed % 2) as u32)).expect("a stream");
    for hop in stops.windows(2) {
        let ((src, src_device), (dst, dst_device)) = (hop[0], hop[1]);
        let transfer = Transfer { dst, dst_device, src, src_device, bytes: BYTES };
        context.plan(&[transfer], &PlanOptions::default()).expect("a plan").execute(stream).expect("enqueued");
    }
    context.synchronize_stream(stream).expect("it runs");
    // SAFETY: as above, and all copies have run.
    let found = unsafe { std::slice::from_raw_parts(host(stops[3].0), BYTES as usize) };
    assert_bytes(found, &content, "after three hops");
}

/// Runs the test in a child process, if the environment requests it. Otherwise does nothing.
#[test]
#[ignore = "a process that other tests start"]
fn child_comes_and_goes() {
    if std::env::var_os("LIFETIME_TEST_CHILD").is_none() {
        return;
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for round in 0..rounds() {
                    // The thread ends while the other threads are at arbitrary points of their work.
                    std::thread::spawn(move || come_and_go(thread * rounds() + round)).join().expect("no assertion failed");
                }
            });
        }
    });
    for gpu in [0, 1] {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are valid for the call.
        ok(unsafe { sys::cuDevicePrimaryCtxGetState(gpu, &mut flags, &mut active) });
        assert_eq!(active, 1, "GPU {gpu}: the primary context stays");
    }
    println!("\n{} contexts came and went", THREADS * rounds());
}

#[test]
fn contexts_may_come_and_go_on_threads_that_come_and_go() {
    let Some(_turn) = gpus(2) else { return };
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--ignored", "--exact", "lifetime::child_comes_and_goes", "--nocapture", "--test-threads=1"])
        .env("LIFETIME_TEST_CHILD", "1");
    let output = command.output().expect("this program runs");
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "the child ended with {:?}, signal {:?}\n{out}\n{err}", output.status.code(), output.status.signal());
    assert!(out.contains(&format!("{} contexts came and went", THREADS * rounds())), "the child did nothing\n{out}\n{err}");
}
