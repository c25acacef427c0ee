//! Contexts that plan alone tell each other what they have in flight through host memory: the file, the rule, and bytes that are right
//! whatever is taken.

use crate::common::{Random, config};
use crate::peer::Peer;
use mpgpu_core::plan::Place;
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_runtime::backend::*;
use mpgpu_runtime::context::traffic::{Announcer, HostUse, WATCHED, Watch};
use mpgpu_runtime::context::{Config, Context, Plan, PlanOptions, Transfer};
use mpgpu_runtime::host::HostBackend;
use mpgpu_runtime::ipc::traffic::{FURTHEST, SLOT_BYTES, SLOTS, now};
use mpgpu_runtime::ipc::{Handle, TrafficPage};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const SECOND: u64 = 1_000_000_000;

/// A folder of a test's own in place of `/dev/shm`, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mpgpu-test-traffic-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("a new folder");
        Folder(path)
    }

    fn open(&self) -> TrafficPage {
        TrafficPage::open(self).expect("a file of this user")
    }

    fn announcer(&self) -> Announcer {
        Announcer::new(self.open())
    }

    fn file(&self) -> PathBuf {
        self.join(format!("mpgpu-traffic-1-{}", rustix::process::geteuid().as_raw()))
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn announce(page: &mut TrafficPage, now: u64, until: u64, domains: u64) -> Option<usize> {
    page.announce(now, until, domains).expect("the file is there")
}

#[test]
fn others_are_counted_from_their_announcement_to_its_end_where_they_copy_through_the_same_memory() {
    let folder = Folder::new();
    let (mut here, mut there, mut elsewhere) = (folder.open(), folder.open(), folder.open());
    let start = 100 * SECOND;
    assert_eq!(announce(&mut here, start, start + 9 * SECOND, 0b01), Some(0));
    assert_eq!(announce(&mut there, start, start + 2 * SECOND, 0b11), Some(1));
    assert_eq!(announce(&mut elsewhere, start, start + 9 * SECOND, 0b10), Some(1));
    // Its own entry is none of the others.
    for (after, others) in [(1, 1), (2 * SECOND - 1, 1), (2 * SECOND, 0)] {
        assert_eq!(announce(&mut here, start + after, start + 9 * SECOND, 0b01), Some(others), "after {after} ns");
    }
    drop(here);
    assert_eq!(announce(&mut there, start + 3 * SECOND, start + 4 * SECOND, 0b01), Some(0), "who has left is not in flight");
}

#[test]
fn the_last_to_have_the_file_open_removes_it() {
    let folder = Folder::new();
    let (first, second) = (folder.open(), folder.open());
    let mode = std::fs::metadata(folder.file()).expect("the file").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    drop(first);
    assert!(folder.file().exists());
    drop(second);
    assert!(!folder.file().exists());
    // One that somebody else has put in its place stays.
    let third = folder.open();
    std::fs::remove_file(folder.file()).expect("removed by hand");
    let fourth = folder.open();
    drop(third);
    assert!(folder.file().exists());
    drop(fourth);
    assert_eq!(std::fs::read_dir(&*folder).expect("a folder").count(), 0);
}

#[test]
fn whatever_else_has_the_name_is_refused_and_left_alone() {
    let folder = Folder::new();
    let (file, target) = (folder.file(), folder.join("target"));
    let refused = |what: &str| {
        TrafficPage::open(&folder).map(drop).expect_err(what);
        assert!(file.symlink_metadata().is_ok(), "{what} was removed");
        if file.is_dir() { std::fs::remove_dir(&file) } else { std::fs::remove_file(&file) }.expect("it can be removed");
    };
    std::fs::write(&target, "bytes").expect("a file");
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o600)).expect("a file of our own");
    symlink(&target, &file).expect("a link");
    refused("a symbolic link");
    symlink(folder.join("nothing"), &file).expect("a link");
    refused("a symbolic link to nothing");
    assert!(!folder.join("nothing").exists());
    std::fs::hard_link(&target, &file).expect("a link");
    refused("a file of another name");
    std::fs::create_dir(&file).expect("a folder");
    refused("a folder");
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0)
        .expect("a pipe");
    refused("a pipe");
    let with_mode = |bytes: usize, mode: u32| {
        std::fs::write(&file, vec![0; bytes]).expect("a file");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).expect("a file of our own");
    };
    with_mode(SLOTS * SLOT_BYTES + 1, 0o600);
    refused("a larger file");
    with_mode(SLOTS * SLOT_BYTES, 0o620);
    refused("a file that others may write");
    with_mode(0, 0o600);
    if std::os::unix::fs::chown(&file, Some(1), None).is_ok() {
        refused("another user's file");
    }
    assert_eq!(std::fs::read(&target).expect("the file"), b"bytes");
    TrafficPage::open(&folder.join("nothing")).map(drop).expect_err("no such folder");
    // One that keeps its lock to itself keeps nobody waiting.
    let lock = std::fs::File::create(&file).expect("a file");
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("a file of our own");
    lock.lock().expect("nobody else has it");
    refused("a file locked for good");
}

#[test]
fn entries_that_nobody_has_made_end_by_themselves() {
    let folder = Folder::new();
    let mut random = Random(5);
    let (mut page, mut other) = (folder.open(), folder.open());
    let mut time = 50 * SECOND;
    for round in 0..200 {
        let garbage: Vec<u8> = match round % 4 {
            0 => vec![0xFF; SLOTS * SLOT_BYTES],
            1 => Vec::new(),
            2 => (0..random.below((SLOTS * SLOT_BYTES) as u64)).map(|_| random.next() as u8).collect(),
            // Entries that could be: each ends within the next 40 s.
            _ => (0..SLOTS).flat_map(|_| [random.next(), time + random.below(2 * FURTHEST), 1, 0]).flat_map(u64::to_le_bytes).collect(),
        };
        std::fs::write(folder.file(), garbage).expect("a file of our own");
        let others = announce(&mut page, time, time + SECOND, 1);
        assert!(others.is_none_or(|others| others < SLOTS));
        time += FURTHEST + 2 * SECOND;
        // A second look finds a slot where the first has lost its own.
        for _ in 0..2 {
            announce(&mut page, time, time + SECOND, 1);
            announce(&mut other, time, time + SECOND, 1);
        }
        // Entries that lay further ahead at first have come into reach.
        let none_left = round % 4 != 3;
        let both = [announce(&mut page, time, time + SECOND, 1), announce(&mut other, time, time + SECOND, 1)];
        assert!(!none_left || both == [Some(1); 2], "round {round}: {both:?}");
        time += 2 * FURTHEST;
    }
}

#[test]
fn a_context_that_finds_no_slot_is_told_so_and_gets_one_that_was_given_up() {
    let folder = Folder::new();
    let start = 100 * SECOND;
    let mut first = folder.open();
    announce(&mut first, start, start + SECOND, 1);
    let mut others: Vec<_> = (1..SLOTS).map(|_| folder.open()).collect();
    for (at, other) in others.iter_mut().enumerate() {
        assert_eq!(announce(other, start, start + 4 * SECOND, 1), Some(at + 1));
    }
    let mut late = folder.open();
    assert_eq!(announce(&mut late, start + SECOND, start + 5 * SECOND, 1), None);
    // A second after the end of its entry the first has lost its slot.
    assert_eq!(announce(&mut late, start + 2 * SECOND - 1, start + 5 * SECOND, 1), None);
    assert_eq!(announce(&mut late, start + 2 * SECOND, start + 5 * SECOND, 1), Some(SLOTS - 1));
    assert_eq!(announce(&mut first, start + 2 * SECOND, start + 9 * SECOND, 1), None);
    drop(others.pop());
    assert_eq!(announce(&mut first, start + 2 * SECOND, start + 9 * SECOND, 1), Some(SLOTS - 1));
    assert_eq!(announce(&mut late, start + 4 * SECOND, start + 9 * SECOND, 1), Some(1), "the others have ended");
}

#[test]
fn threads_that_open_and_close_the_file_at_once_share_one_and_leave_none() {
    let folder = Folder::new();
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let folder = &folder;
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..300 {
                    let mut page = folder.open();
                    announce(&mut page, SECOND, 2 * SECOND, 1);
                    assert!(folder.file().exists(), "removed while it was in use");
                    if random.chance(50) {
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    assert!(!folder.file().exists());
    // Of several that take one slot at once all but one take another at their next look.
    let counted: Vec<_> = std::thread::scope(|scope| {
        let threads = [(); 8].map(|()| {
            scope.spawn(|| {
                let mut page = folder.open();
                for _ in 0..20 {
                    barrier.wait();
                    announce(&mut page, 10 * SECOND, 20 * SECOND, 1);
                }
                barrier.wait();
                let counted = announce(&mut page, 10 * SECOND, 20 * SECOND, 1);
                barrier.wait();
                counted
            })
        });
        threads.into_iter().map(|thread| thread.join().expect("no assertion failed")).collect()
    });
    assert_eq!(counted, [Some(7); 8]);
    assert!(!folder.file().exists());
}

/// A process that obeys [`child_obeys`].
fn child(folder: &Folder) -> Peer {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.env("TRAFFIC_TEST_FOLDER", folder.as_os_str());
    Peer::running(command, "traffic::child_obeys")
}

#[test]
fn a_killed_process_is_counted_until_its_entry_ends_and_keeps_no_file() {
    let folder = Folder::new();
    let mut peers = [child(&folder), child(&folder)];
    let start = 100 * SECOND;
    assert_eq!(peers[0].tell(&format!("announce {start} {} 1", start + 5 * SECOND)), "0");
    assert_eq!(peers[1].tell(&format!("announce {start} {} 1", start + 3 * SECOND)), "1");
    peers.iter_mut().for_each(Peer::kill);
    assert!(folder.file().exists());
    let mut page = folder.open();
    for (after, others) in [(0, 2), (3, 1), (5, 0)] {
        assert_eq!(announce(&mut page, start + after * SECOND, start + 9 * SECOND, 1), Some(others), "after {after} s");
    }
    drop(page);
    assert!(!folder.file().exists(), "the lock of a killed process is held by nobody");
}

#[test]
fn a_child_of_fork_has_no_part_in_what_its_parent_announces() {
    let folder = Folder::new();
    let mut page = folder.open();
    announce(&mut page, SECOND, 9 * SECOND, 1);
    let mut parent = child(&folder);
    assert_eq!(parent.tell(&format!("announce {SECOND} {} 1", 9 * SECOND)), "1");
    let forked = rustix::process::Pid::from_raw(parent.tell("fork").parse().expect("a number")).expect("a process");
    // The child has dropped what it inherited.
    assert_eq!(announce(&mut page, 2 * SECOND, 9 * SECOND, 1), Some(1), "the parent's entry is there");
    parent.tell("leave");
    assert_eq!(announce(&mut page, 2 * SECOND, 9 * SECOND, 1), Some(0));
    drop(page);
    let removed = !folder.file().exists();
    rustix::process::kill_process(forked, rustix::process::Signal::KILL).expect("it waits");
    assert!(removed, "the child holds no lock");
}

#[test]
fn more_is_allowed_only_after_a_tenth_of_a_second_and_less_at_once() {
    let mut watch = Watch::default();
    let mut look = |milliseconds: u64, others| watch.look(milliseconds * 1_000_000, others);
    let looks = [
        (1000, 0, HostUse::None),
        (1099, 0, HostUse::None),
        (1100, 0, HostUse::All),
        (1101, 1, HostUse::Half),
        (1102, 0, HostUse::Half),
        (1201, 0, HostUse::Half),
        (1202, 0, HostUse::All),
        (1203, 2, HostUse::None),
        (1302, 1, HostUse::None),
        (1401, 1, HostUse::None),
        (1402, 1, HostUse::Half),
        (9000, 0, HostUse::Half),
        (9100, 0, HostUse::All),
        (9101, 127, HostUse::None),
    ];
    for (at, others, level) in looks {
        assert_eq!(look(at, others), level, "at {at} ms with {others} others");
    }
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn what_is_allowed_is_what_every_look_of_a_tenth_of_a_second_has_allowed(looks in prop::collection::vec((0..150_u64, 0..4_usize), 1..60)) {
        let mut watch = Watch::default();
        let mut seen: Vec<(u64, usize)> = Vec::new();
        let mut time = 0;
        for (after, others) in looks {
            time += after * 1_000_000;
            seen.push((time, others));
            // The others since the last look that lies a tenth of a second back.
            let most = seen.iter().rposition(|(at, _)| at + WATCHED <= time).map(|from| seen[from..].iter().map(|look| look.1).max());
            let allowed = match most.flatten() {
                Some(0) => HostUse::All,
                Some(1) => HostUse::Half,
                _ => HostUse::None,
            };
            prop_assert_eq!(watch.look(time, others), allowed);
        }
    }
}

/// Has an announcer execute so many times, in steps of so many milliseconds.
fn steps(announcer: &mut Announcer, time: &mut u64, count: u64, milliseconds: u64) -> HostUse {
    let mut level = HostUse::None;
    for _ in 0..count {
        *time += milliseconds * 1_000_000;
        level = announcer.execute(*time, 1000, 1).expect("the file is there");
    }
    level
}

#[test]
fn contexts_come_to_half_and_to_nothing_as_they_get_more_and_back_as_they_end() {
    let folder = Folder::new();
    let (mut first, mut time) = (folder.announcer(), SECOND);
    assert_eq!(steps(&mut first, &mut time, 1, 1), HostUse::None);
    assert_eq!(steps(&mut first, &mut time, 200, 1), HostUse::All);
    let mut second = folder.announcer();
    assert_eq!(steps(&mut second, &mut time, 1, 0), HostUse::None, "who comes anew keeps off host memory");
    assert_eq!(steps(&mut first, &mut time, 1, 10), HostUse::Half, "and others see it before it takes more");
    let mut both = |time: &mut u64, count| {
        (0..count).map(|_| [steps(&mut first, time, 1, 1), steps(&mut second, time, 1, 1)]).last().expect("some steps")
    };
    assert_eq!(both(&mut time, 200), [HostUse::Half; 2]);
    let mut third = folder.announcer();
    third.execute(time, 1000, 1).expect("the file is there");
    assert_eq!(both(&mut time, 10), [HostUse::None; 2]);
    drop(third);
    assert_eq!(both(&mut time, 100), [HostUse::Half; 2]);
    // One that copies through other memory is none of them.
    let mut elsewhere = folder.announcer();
    elsewhere.execute(time, 1000, 2).expect("the file is there");
    assert_eq!(both(&mut time, 10), [HostUse::Half; 2]);
    // Who only ends is in flight for a while yet.
    assert_eq!(steps(&mut first, &mut time, 50, 1), HostUse::Half);
    assert_eq!(steps(&mut first, &mut time, 400, 1), HostUse::All);
}

#[test]
fn a_time_loop_of_any_pace_is_in_flight_between_its_steps() {
    for milliseconds in [1, 30, 400, 4_900] {
        let folder = Folder::new();
        let (mut looped, mut page, mut time) = (folder.announcer(), folder.open(), SECOND);
        steps(&mut looped, &mut time, 3, milliseconds);
        for _ in 0..20 {
            time += milliseconds * 999_999;
            assert_eq!(announce(&mut page, time, time + 1, 1), Some(1), "steps of {milliseconds} ms");
            time += milliseconds;
            // Several exchanges in a step.
            steps(&mut looped, &mut time, 40, 0);
        }
        assert_eq!(announce(&mut page, time + 10 * SECOND, time + 10 * SECOND, 1), Some(0));
    }
}

#[test]
fn what_is_enqueued_ahead_is_in_flight_for_as_long_as_it_is_modelled_to_take_and_no_longer_than_ten_seconds() {
    let folder = Folder::new();
    let (mut ahead, mut page, time) = (folder.announcer(), folder.open(), SECOND);
    // Enqueued at once, before anything has run.
    (0..5).for_each(|_| _ = ahead.execute(time, SECOND, 1).expect("the file is there"));
    assert_eq!(announce(&mut page, time + 5 * SECOND - 1, time, 1), Some(1));
    assert_eq!(announce(&mut page, time + 6 * SECOND, time, 1), Some(0));
    (0..1000).for_each(|_| _ = ahead.execute(time, SECOND, 1).expect("the file is there"));
    assert_eq!(announce(&mut page, time + 10 * SECOND, time, 1), Some(1));
    assert_eq!(announce(&mut page, time + 11 * SECOND, time, 1), Some(0));
    // Nor is it in the way of what comes later.
    ahead.execute(time + 30 * SECOND, u64::MAX, u64::MAX).expect("the file is there");
    assert_eq!(announce(&mut page, time + 60 * SECOND, time, 1), Some(0));
}

#[test]
fn a_context_whose_file_is_lost_keeps_off_host_memory() {
    let folder = Folder::new();
    let (mut announcer, mut time) = (folder.announcer(), SECOND);
    assert_eq!(steps(&mut announcer, &mut time, 20, 10), HostUse::All);
    // Shortened under it: what a mapping would not survive.
    std::fs::File::create(folder.file()).expect("a file of our own").set_len(0).expect("shorter");
    assert_eq!(steps(&mut announcer, &mut time, 20, 10), HostUse::All);
    let mut other = folder.announcer();
    other.execute(time, SECOND, 1).expect("the file is there");
    assert_eq!(steps(&mut announcer, &mut time, 20, 10), HostUse::Half, "and it knows others again");
}

/// The host backend; it keeps how much the last execution took through host memory, and can be told that streams are being captured.
struct Watched {
    inner: HostBackend,
    through_host: AtomicU64,
    prepared: AtomicU64,
    is_capturing: AtomicBool,
}

/// Bytes of a program that are staged in host memory.
fn through_host(execution: &Execution<'_>) -> u64 {
    let in_host = |place| matches!(place, Place::Slot { ring, .. } if execution.program.rings[ring.0 as usize].device.is_host());
    let copies = execution.program.ops.iter().flat_map(|op| &op.copies);
    copies.filter(|copy| in_host(copy.to)).map(|copy| copy.bytes).sum()
}

macro_rules! delegate {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result { self.inner.$name($($argument),*) })*
    };
}

impl Backend for Watched {
    delegate! {
        fn name() -> &'static str;
        fn allocate(device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
        fn allocate_shared(device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
        fn free(address: u64) -> Result<(), BackendError>;
        fn locate(address: u64) -> Result<Option<Allocation>, BackendError>;
        fn allocated_bytes(device: DeviceId) -> u64;
        fn create_stream(device: DeviceId) -> Result<StreamHandle, BackendError>;
        fn destroy_stream(stream: StreamHandle) -> Result<(), BackendError>;
        fn stream_count(device: DeviceId) -> u64;
        fn synchronize_stream(stream: StreamHandle) -> Result<(), BackendError>;
        fn launch_host(stream: StreamHandle, work: HostFunction) -> Result<(), BackendError>;
        fn create_event() -> Result<EventHandle, BackendError>;
        fn destroy_event(event: EventHandle) -> Result<(), BackendError>;
        fn record_event(event: EventHandle, stream: StreamHandle) -> Result<(), BackendError>;
        fn stream_wait_event(stream: StreamHandle, event: EventHandle) -> Result<(), BackendError>;
        fn synchronize_event(event: EventHandle) -> Result<(), BackendError>;
        fn synchronize() -> Result<(), BackendError>;
        fn device_uuid(device: DeviceId) -> Result<[u8; 16], BackendError>;
        fn exportable(address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError>;
        fn export(allocation: &Allocation) -> Result<Shared, BackendError>;
        fn map(shared: Shared, allocation: &Allocation) -> Result<u64, BackendError>;
        fn unmap(base: u64) -> Result<(), BackendError>;
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        self.through_host.store(through_host(execution), Ordering::Relaxed);
        self.inner.submit(execution)
    }
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.prepared.fetch_add(1, Ordering::Relaxed);
        self.inner.prepare(execution)
    }
    fn is_capturing(&self, _: StreamHandle) -> Result<bool, BackendError> {
        Ok(self.is_capturing.load(Ordering::Relaxed))
    }
}

const BYTES: u64 = 16 << 20;

/// One of two processes that put to each other.
struct Side {
    context: Context,
    backend: Arc<Watched>,
    /// Where it sends from, and where it receives.
    source: u64,
    inbox: u64,
    gpu: DeviceId,
}

impl Side {
    fn new(folder: &Path, gpu: u32) -> Side {
        Side::with(Config { traffic_folder: folder.into(), ..Config::default() }, gpu)
    }

    fn with(config: Config, gpu: u32) -> Side {
        let machine = Machine::new(load("beluga").expect("a preset")).expect("well formed");
        let inner = HostBackend::new(machine.gpu_count(), machine.host_count());
        let [through_host, prepared] = [0, 0].map(AtomicU64::new);
        let backend = Arc::new(Watched { inner, through_host, prepared, is_capturing: AtomicBool::new(false) });
        let context = Context::with_backend(Arc::new(machine), backend.clone(), config).expect("a context");
        let gpu = DeviceId::gpu(gpu);
        let allocate = || context.allocate(gpu, BYTES).expect("memory");
        let (source, inbox) = (allocate(), allocate());
        Side { context, backend, source, inbox, gpu }
    }

    fn export(&self) -> String {
        let handle = self.context.export_memory(self.inbox, BYTES).expect("shareable memory");
        handle.encode().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn plan_to(&self, handle: &str) -> Arc<Plan> {
        let handle = Handle::decode(&crate::peer::from_hex(handle).bytes).expect("a handle");
        let (theirs, device) = self.context.import_memory(&handle).expect("mapped");
        self.plan(theirs, device, &PlanOptions::default())
    }

    fn plan(&self, dst: u64, dst_device: DeviceId, options: &PlanOptions) -> Arc<Plan> {
        let put = Transfer { dst, dst_device, src: self.source, src_device: self.gpu, bytes: BYTES };
        self.context.plan(&[put], options).expect("a plan")
    }

    /// Puts what this round wants, and returns what the execution was allowed.
    fn put(&self, plan: &Plan, round: usize) -> HostUse {
        crate::peer::fill(std::ptr::with_exposed_provenance_mut(self.source as usize), BYTES as usize, round);
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("copied");
        plan.host_use().expect("it has variants")
    }

    /// Whether the other has put what the round wants, every byte.
    fn holds(&self, round: usize) -> bool {
        crate::peer::holds(std::ptr::with_exposed_provenance(self.inbox as usize), BYTES as usize, round, 0)
    }
}

/// Obeys the test that has started this program. Does nothing otherwise.
#[test]
#[ignore = "a process that other tests start"]
fn child_obeys() {
    let Some(folder) = std::env::var_os("TRAFFIC_TEST_FOLDER") else { return };
    let (mut page, mut side, mut plan) = (None, None, None);
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let words: Vec<&str> = line.split_whitespace().collect();
        let n = |at: usize| words[at].parse::<u64>().expect("a number");
        let answer = match words[0] {
            // announce NOW UNTIL DOMAINS
            "announce" => {
                let page = page.get_or_insert_with(|| TrafficPage::open(folder.as_ref()).expect("a file of this user"));
                announce(page, n(1), n(2), n(3)).expect("a slot").to_string()
            }
            "leave" => {
                page = None;
                String::new()
            }
            // A child of `fork` that drops what it has inherited, and waits.
            "fork" => {
                let (mut ready, mut there) = std::io::pipe().expect("a pipe");
                // SAFETY: the child frees what it has a copy of, writes a byte and waits for signals.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    drop(page.take());
                    let _ = there.write(&[0]);
                    loop {
                        // SAFETY: no argument.
                        unsafe { libc::pause() };
                    }
                }
                drop(there);
                ready.read_exact(&mut [0]).expect("the child runs");
                child.to_string()
            }
            "export" => side.get_or_insert_with(|| Side::new(folder.as_ref(), 1)).export(),
            // import HANDLE
            "import" => {
                plan = Some(side.as_ref().expect("an export").plan_to(words[1]));
                String::new()
            }
            // put ROUND
            "put" => {
                let level = side.as_ref().zip(plan.as_ref()).map(|(side, plan)| side.put(plan, n(1) as usize));
                format!("{:?}", level.expect("an import"))
            }
            // holds ROUND
            "holds" => side.as_ref().expect("an export").holds(n(1) as usize).to_string(),
            other => panic!("{other}: unknown order"),
        };
        println!("\nANSWER 0 {answer}");
    }
}

#[test]
fn two_processes_that_put_to_each_other_take_what_the_other_leaves_and_every_byte_arrives() {
    let folder = Folder::new();
    let (here, mut there) = (Side::new(&folder, 0), child(&folder));
    let plan = here.plan_to(&there.tell("export"));
    there.tell(&format!("import {}", here.export()));
    let text = plan.describe();
    assert!(text.contains("executions take all paths while no other context copies through this host memory"), "{text}");
    assert!(text.contains("half of the host path while one does"), "{text}");
    let mut rounds = 0..;
    let staged = |level: HostUse| (level, here.backend.through_host.load(Ordering::Relaxed));
    let mut seen = std::collections::BTreeMap::new();
    let started = Instant::now();
    // Rounds until `done`; the other puts too where `both` says so.
    let mut until = |what: &str, both: bool, there: &mut Peer, done: &dyn Fn(HostUse, Option<&str>) -> bool| {
        loop {
            let round = rounds.next().expect("there are more numbers");
            if both {
                writeln!(there.orders, "put {}", round + 1).expect("the peer reads");
            }
            let (level, bytes) = staged(here.put(&plan, round));
            *seen.entry(level).or_insert(bytes) = bytes;
            let theirs = both.then(|| there.hear().expect("it lives"));
            assert!(!both || here.holds(round + 1), "round {round}: what was put here is wrong");
            assert_eq!(there.tell(&format!("holds {round}")), "true", "round {round}: what was put there is wrong, {level:?}");
            if done(level, theirs.as_deref().and_then(|answer| answer.strip_prefix("0 "))) {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(300), "{what}: {level:?}, there {theirs:?}");
        }
    };
    let both_half = |level: HostUse, theirs: Option<&str>| level == HostUse::Half && theirs == Some("Half");
    let both_one = |level: HostUse, theirs: Option<&str>| level == HostUse::None && theirs == Some("None");
    until("both", true, &mut there, &both_half);
    let mut third = folder.open();
    third.announce(now(), now() + FURTHEST, u64::MAX).expect("the file is there");
    until("three", true, &mut there, &both_one);
    drop(third);
    until("both again", true, &mut there, &both_half);
    until("alone", false, &mut there, &|level, _| level == HostUse::All);
    until("both at last", true, &mut there, &both_half);
    let [one, half, all] = [HostUse::None, HostUse::Half, HostUse::All].map(|level| seen[&level]);
    assert!(one == 0 && 3 * half > all && 2 * all > 3 * half, "bytes through host memory: {seen:?}");
    // Nobody knows when a captured execution runs.
    here.backend.is_capturing.store(true, Ordering::Relaxed);
    here.put(&plan, 0);
    assert_eq!(here.backend.through_host.load(Ordering::Relaxed), 0);
    // Nor is a trace of anything but the plan that was described.
    here.backend.is_capturing.store(false, Ordering::Relaxed);
    plan.trace(StreamHandle(0)).expect("times");
    assert_eq!(here.backend.through_host.load(Ordering::Relaxed), 0);
    plan.prepare(StreamHandle(0)).expect("prepared");
    assert_eq!(here.backend.prepared.load(Ordering::Relaxed), 3);
    here.context.close().expect("closed");
    there.kill();
    drop(folder.open());
    assert!(!folder.file().exists());
}

#[test]
fn a_plan_has_variants_only_where_others_could_be_in_its_way_and_nobody_has_decided() {
    let (folder, absent) = (Folder::new(), PathBuf::from("/nowhere"));
    let mut there = child(&folder);
    let handle = there.tell("export");
    let variants = |config: Config, options: &PlanOptions| {
        let here = Side::with(config, 0);
        assert!(here.plan(here.inbox, here.gpu, options).host_use().is_none(), "a plan of one process");
        let handle = Handle::decode(&crate::peer::from_hex(&handle).bytes).expect("a handle");
        let (theirs, device) = here.context.import_memory(&handle).expect("mapped");
        let plan = here.plan(theirs, device, options);
        let again = here.plan(theirs, device, options);
        assert!(Arc::ptr_eq(&plan, &again));
        let counts = here.context.statistics().cache;
        assert_eq!((counts.hits, counts.misses, counts.shape_hits, counts.entries), (1, 2, 0, 2), "variants are no requests");
        here.put_any(&plan);
        let staged = here.backend.through_host.load(Ordering::Relaxed) > 0;
        assert_eq!(here.context.statistics().executions, 1);
        (plan.host_use().is_some(), staged)
    };
    let default = Config { traffic_folder: folder.to_path_buf(), ..Config::default() };
    let asked = |host_path| PlanOptions { host_path: Some(host_path), ..PlanOptions::default() };
    let any = PlanOptions::default();
    assert_eq!(variants(default.clone(), &any), (true, false));
    assert_eq!(variants(default.clone(), &asked(true)), (false, true));
    assert_eq!(variants(default.clone(), &asked(false)), (false, false));
    assert_eq!(variants(Config { host_path: Some(true), ..default.clone() }, &any), (false, true));
    assert_eq!(variants(Config { host_path: Some(false), ..default.clone() }, &any), (false, false));
    // Where nobody can know of the others.
    assert_eq!(variants(Config { traffic_folder: absent, ..default.clone() }, &any), (false, false));
    assert_eq!(variants(default, &PlanOptions { max_paths: Some(1), ..any }), (false, false));
    assert_eq!(std::fs::metadata(folder.file()).ok().map(|file| file.nlink()), None);
}

impl Side {
    fn put_any(&self, plan: &Plan) {
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("copied");
    }
}
