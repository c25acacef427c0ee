//! Tests ranks that connect to each other through a socket to form a node. Existing files at its path are not changed, processes that are
//! no ranks are rejected, and exits of ranks are detected.

use crate::node_plans::context;
use crate::peer::Peer;
use mpgpu_contexts::{Error, PlanOptions};
use mpgpu_ranks::NodeGroup;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for errors that must be detected immediately. It is much longer than the detection takes, and shorter than the time for which
/// ranks wait for each other.
const AT_ONCE: Duration = Duration::from_secs(30);

/// Number of a user that exists on every system and owns no files.
const NOBODY: u32 = 65534;

pub fn free_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("mpgpu-meeting-{name}-{}", std::process::id()))
}

fn rank(rank: u32, ranks: u32, path: &Path) -> Result<Arc<NodeGroup>, Error> {
    NodeGroup::at_socket(&context("beluga", Some(vec![rank % 4])), rank, ranks, path, &[]).map(Arc::new)
}

/// Checks that all ranks immediately refuse to use an existing file at the path, and that the error names the file.
fn is_refused(path: &Path, ranks: &[(u32, u32)], expected: &str) {
    for (number, ranks) in ranks {
        let begin = Instant::now();
        let error = rank(*number, *ranks, path).expect_err("it is refused");
        assert!(matches!(error, Error::NodeArgument { argument, .. } if argument == c"socket"), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(path.to_str().expect("text")) && text.contains(expected), "{text}");
        assert!(begin.elapsed() < AT_ONCE, "it was waited for");
    }
}

#[test]
fn what_lies_at_the_path_of_a_meeting_is_left_alone() {
    let everybody = [(0, 1), (0, 2), (1, 2)];
    let [file, link, folder, left] = ["file", "link", "folder", "left"].map(free_path);
    std::fs::write(&file, "results").expect("a file");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    std::fs::create_dir(&folder).expect("a folder");
    is_refused(&file, &everybody, "in use by a file that is not a socket");
    is_refused(&link, &everybody, "in use by a file that is not a socket");
    is_refused(&folder, &everybody, "in use by a file that is not a socket");
    assert_eq!(std::fs::read_to_string(&link).expect("it is there"), "results");
    // Another process listens at the socket.
    let listener = UnixListener::bind(&left).expect("a socket");
    is_refused(&left, &[(0, 1), (0, 2)], &format!("process {} already listens at this path", std::process::id()));
    UnixStream::connect(&left).expect("it is still there");
    drop(listener);
    // No process listens at the socket, and it belongs to another user.
    if std::os::unix::fs::chown(&left, Some(NOBODY), None).is_ok() {
        is_refused(&left, &everybody, "the path is a socket of user 65534");
        std::os::unix::fs::chown(&left, Some(0), None).expect("it is there");
    }
    // A socket of this user at which no process listens is replaced.
    rank(0, 1, &left).expect("a node");
    assert!(!left.exists(), "the meeting has left something");
    [file, link].iter().for_each(|path| std::fs::remove_file(path).expect("it is there"));
    std::fs::remove_dir(folder).expect("it is there");
    let long = std::env::temp_dir().join("x".repeat(200));
    is_refused(&long, &everybody, "but the path of a socket must have 1 to 107");
}

#[test]
fn a_file_that_has_taken_the_place_of_the_socket_stays() {
    let path = free_path("replaced");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| rank(0, 2, &path));
        let mut second = connected(&path);
        std::fs::remove_file(&path).expect("the socket");
        std::fs::write(&path, "results").expect("a file");
        greet(&mut second, 1, 2);
        // The rank connects, and is notified that its number is invalid.
        drop(second);
        first.join().expect("no panic").expect_err("it has gone");
    });
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "results");
    std::fs::remove_file(&path).expect("it is there");
}

#[test]
fn a_rank_that_does_not_exist_is_refused_at_once() {
    let (path, begin) = (free_path("number"), Instant::now());
    for (number, ranks) in [(3, 2), (2, 2), (0, 0), (0, 5000)] {
        let error = rank(number, ranks, &path).expect_err("there is no such rank");
        assert!(matches!(error, Error::NodeArgument { argument, .. } if argument == c"rank"), "{error:?}");
    }
    assert!(begin.elapsed() < AT_ONCE, "it was waited for");
    assert!(!path.exists());
}

/// Connects to the socket as soon as a process listens there.
fn connected(path: &Path) -> UnixStream {
    loop {
        if let Ok(stream) = UnixStream::connect(path) {
            return stream;
        }
        std::thread::yield_now();
    }
}

/// Sends the first message of a rank to the process that listens.
fn greet(stream: &mut UnixStream, rank: u32, ranks: u32) {
    stream.write_all(&[b"mpgpu-r1".as_slice(), &rank.to_le_bytes(), &ranks.to_le_bytes()].concat()).expect("it listens");
}

#[test]
fn strangers_neither_end_a_meeting_nor_hold_it_up() {
    let (path, begin) = (free_path("strangers"), Instant::now());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| rank(0, 3, &path));
        drop(connected(&path));
        let silent: Vec<UnixStream> = (0..100).map(|_| connected(&path)).collect();
        connected(&path).write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it listens");
        connected(&path).write_all(&[0; 7]).expect("it listens");
        let others = [1, 2].map(|number| {
            scope.spawn({
                let path = &path;
                move || rank(number, 3, path)
            })
        });
        let nodes = std::iter::once(first).chain(others).map(|rank| rank.join().expect("no panic").expect("a node"));
        let plans: Vec<_> =
            nodes.map(|node| scope.spawn(move || node.plan(&[], &[], &PlanOptions::default()).map(|plan| plan.destroy()))).collect();
        plans.into_iter().for_each(|plan| plan.join().expect("no panic").expect("a plan").expect("given back"));
        drop(silent);
    });
    assert!(begin.elapsed() < AT_ONCE, "a stranger was waited for");
}

#[test]
fn ranks_that_do_not_go_together_are_told_why() {
    for (wrong, expected) in [((1, 3), "rank 1 of 3 has connected, but rank 0 is one of 2"), ((1, 2), "a second rank 1 has connected")] {
        let path = free_path("together");
        let ranks = if wrong.1 == 2 { 3 } else { 2 };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| rank(0, ranks, &path));
            let mut others: Vec<UnixStream> = Vec::new();
            for _ in 0..ranks - 1 {
                let mut other = connected(&path);
                greet(&mut other, wrong.0, if wrong.1 == 2 { 3 } else { wrong.1 });
                others.push(other);
            }
            let error = first.join().expect("no panic").expect_err("it fails").to_string();
            assert!(error.contains(expected), "{error}");
            for mut other in others {
                let mut said = Vec::new();
                other.read_to_end(&mut said).expect("it is hung up on");
                assert!(String::from_utf8_lossy(&said).contains(expected), "{said:?}");
            }
        });
    }
}

#[test]
fn a_rank_that_has_ended_is_noticed_though_its_child_lives() {
    let path = free_path("child");
    let mut second = Peer::start();
    let node = std::thread::scope(|scope| {
        let first = scope.spawn(|| rank(0, 2, &path));
        second.tell(&format!("meet {} 1 2", path.display()));
        first.join().expect("no panic").expect("a node")
    });
    let child = rustix::process::Pid::from_raw(second.tell("linger").parse().expect("a number")).expect("a process");
    second.kill();
    let begin = Instant::now();
    let error = node.plan(&[], &[], &PlanOptions::default()).expect_err("rank 1 has ended").to_string();
    let waited = begin.elapsed();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).expect("it lingers");
    assert!(error.contains("rank 1 has exited"), "{error}");
    assert!(waited < AT_ONCE, "its child kept its connection open");
    let error = node.plan(&[], &[], &PlanOptions::default()).expect_err("for good").to_string();
    assert!(error.contains("rank 1 has exited") && error.contains("create the node object again"), "{error}");
}

/// Calls `work` with a socket in a child process of another user. Returns the child's process ID and its output, or `None` if this process
/// may not change the user. The child makes only system calls, because other threads of this program may hold locks.
fn as_nobody(work: impl FnOnce(&rustix::fd::OwnedFd) -> Option<Vec<u8>>) -> Option<(libc::pid_t, std::io::PipeReader)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    // SAFETY: see above.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: changes only this process, which has one thread.
        let is_nobody = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) } == 0;
        if let Some(said) = is_nobody.then(|| work(&socket)).flatten() {
            let _ = writer.write_all(&said);
        }
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0, "fork");
    Some((child, reader))
}

/// True if this process runs only the named test. Otherwise runs the test in a separate process and returns false. Children of other tests
/// in this process would inherit its connections, which would then stay open.
fn is_alone(name: &str) -> bool {
    const ALONE: &str = "MEETING_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let run = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .expect("it starts");
    assert!(run.status.success(), "{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    false
}

fn await_end(child: libc::pid_t) {
    // SAFETY: a child of this process.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

#[test]
fn a_socket_at_which_another_user_listens_is_told_nothing() {
    if !is_alone("meeting::a_socket_at_which_another_user_listens_is_told_nothing") {
        return;
    }
    let (path, before) = (free_path("trap"), free_path("trap before it listens"));
    let address = SocketAddrUnix::new(&before).expect("a path");
    let trap = as_nobody(|socket| {
        rustix::net::bind(socket, &address).ok()?;
        rustix::net::listen(socket, 8).ok()?;
        rustix::fs::rename(&before, &path).ok()?;
        let victim = rustix::net::accept(socket).ok()?;
        let mut heard = [0; 4096];
        let (bytes, _) = rustix::net::recv(&victim, &mut heard[..], rustix::net::RecvFlags::empty()).ok()?;
        Some([b"heard ".as_slice(), &heard[..bytes]].concat())
    });
    let Some((child, mut said)) = trap else {
        eprintln!("skipped: this user may not become another");
        return;
    };
    while !path.exists() {
        std::thread::yield_now();
    }
    let begin = Instant::now();
    let error = rank(1, 2, &path).expect_err("it is a trap");
    assert!(begin.elapsed() < AT_ONCE, "it was waited for");
    assert!(matches!(error, Error::NodeArgument { argument, .. } if argument == c"socket"), "{error:?}");
    assert!(error.to_string().contains("user 65534"), "{error}");
    let mut heard = String::new();
    said.read_to_string(&mut heard).expect("a pipe");
    assert_eq!(heard, "heard ", "another user was told something");
    is_refused(&path, &[(0, 2)], "the path is a socket of user 65534");
    await_end(child);
    std::fs::remove_file(&path).expect("it is there");
}

#[test]
fn a_rank_of_another_user_is_not_let_in() {
    if !is_alone("meeting::a_rank_of_another_user_is_not_let_in") {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let path = free_path("stranger");
    let address = SocketAddrUnix::new(&path).expect("a path");
    let greeting = [b"mpgpu-r1".as_slice(), &1_u32.to_le_bytes(), &2_u32.to_le_bytes()].concat();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| rank(0, 2, &path));
        while !path.exists() || UnixStream::connect(&path).is_err() {
            std::thread::yield_now();
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("a socket of this user");
        let stranger = as_nobody(|socket| {
            rustix::net::connect(socket, &address).ok()?;
            // The connection may be closed before this call, or by it.
            let _ = rustix::net::send(socket, &greeting, SendFlags::NOSIGNAL);
            let mut heard = [0; 4096];
            let heard = rustix::net::recv(socket, &mut heard[..], rustix::net::RecvFlags::empty()).map_or(0, |(bytes, _)| bytes);
            Some(format!("heard {heard} bytes").into_bytes())
        });
        if let Some((child, mut said)) = stranger {
            let mut heard = String::new();
            said.read_to_string(&mut heard).expect("a pipe");
            assert_eq!(heard, "heard 0 bytes");
            await_end(child);
        }
        rank(1, 2, &path).expect("the real rank");
        first.join().expect("no panic").expect("a node");
    });
}
