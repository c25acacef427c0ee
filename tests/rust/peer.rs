//! Runs a second process (peer) for a test. The peer is this test program, which has a context and executes orders from its standard input
//! line by line (`child_obeys`).

use crate::node::*;
use mpgpu::abi::*;
use mpgpu_ipc::Handle;
use rustix::fd::{AsFd, OwnedFd};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;

/// Process that has a context and executes orders of a test.
pub struct Peer {
    pub process: Child,
    pub orders: ChildStdin,
    pub answers: BufReader<ChildStdout>,
}

impl Peer {
    pub fn start() -> Peer {
        Peer::of(Command::new(std::env::current_exe().expect("this program")))
    }

    pub fn of(command: Command) -> Peer {
        Peer::running(command, "peer::child_obeys")
    }

    /// Starts a peer. The test named `obeys` executes the orders in it.
    pub fn running(mut command: Command, obeys: &str) -> Peer {
        command.args(["--ignored", "--exact", obeys, "--nocapture", "--test-threads=1"]).env("SHARE_TEST_CHILD", "1");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program runs");
        let orders = process.stdin.take().expect("a pipe");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        Peer { process, orders, answers }
    }

    /// Sends an order to the peer and returns its answer.
    pub fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("the peer reads");
        self.hear().unwrap_or_else(|| panic!("the peer ended at {order:?}"))
    }

    /// Returns the peer's next answer, or `None` if the peer has exited.
    pub fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.answers.read_line(&mut line).expect("the peer writes text") == 0 {
                return None;
            }
            if let Some((_, answer)) = line.split_once("ANSWER ") {
                return Some(answer.trim_end().to_owned());
            }
        }
    }

    /// Sends an order that must succeed, and returns the rest of the answer.
    #[track_caller]
    pub fn tell(&mut self, order: &str) -> String {
        let answer = self.ask(order);
        answer.strip_prefix("0").unwrap_or_else(|| panic!("{order}: {answer}")).trim_start().to_owned()
    }

    fn signal(&self, signal: rustix::process::Signal) -> rustix::process::Pid {
        let process = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(process, signal).expect("the peer exists");
        process
    }

    /// Stops all threads of the peer by a signal, and returns when they have stopped.
    pub fn stop(&self) {
        let process = self.signal(rustix::process::Signal::STOP);
        let stopped = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::UNTRACED).expect("the peer is ours");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()), "the peer ended");
    }

    pub fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// Kills the peer immediately and waits for its end.
    pub fn kill(&mut self) {
        self.process.kill().expect("the peer exists");
        self.process.wait().expect("the peer was ours");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn pattern(seed: usize, i: usize) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(101)) as u8
}

pub fn fill(memory: *mut u8, bytes: usize, seed: usize) {
    // SAFETY: memory of the host backend of this size, which nothing else accesses meanwhile.
    unsafe { std::slice::from_raw_parts_mut(memory, bytes) }.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(seed, i));
}

/// True if memory contains the pattern of `seed`, starting with byte number `from` of the pattern.
pub fn holds(memory: *const u8, bytes: usize, seed: usize, from: usize) -> bool {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(memory, bytes) }.iter().enumerate().all(|(i, byte)| *byte == pattern(seed, from + i))
}

pub fn export(node: &Node, memory: *const u8, bytes: usize) -> mp_memory_handle_t {
    let mut handle = mp_memory_handle_t { bytes: [0; 128] };
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_memory_export(node.context, memory.cast(), bytes as u64, &mut handle) });
    handle
}

pub fn try_import(node: &Node, handle: &mp_memory_handle_t) -> (mp_status_t, *mut u8) {
    let (mut pointer, mut device, mut bytes) = (poison(), i32::MAX, u64::MAX);
    // SAFETY: all pointers are valid for the call.
    let status = unsafe { mp_memory_import(node.context, handle, MP_DEVICE_AUTO, &mut pointer, &mut device, null_mut(), &mut bytes) };
    let said = Handle::decode(&handle.bytes).map(|handle| (handle.number, handle.bytes));
    assert_eq!((device, bytes), if status == MP_SUCCESS { said.expect("a handle") } else { (i32::MAX, u64::MAX) });
    (status, pointer.cast())
}

#[track_caller]
pub fn import(node: &Node, handle: &mp_memory_handle_t) -> *mut u8 {
    let (status, pointer) = try_import(node, handle);
    ok(status);
    pointer
}

#[track_caller]
pub fn import_refused(node: &Node, handle: &mp_memory_handle_t, expected: mp_status_t) -> String {
    let (status, pointer) = try_import(node, handle);
    let message = refused(status, expected);
    assert_eq!(pointer, poison(), "an output was written");
    message
}

pub fn close(node: &Node, pointer: *mut u8) {
    // SAFETY: the tests close what they no longer use.
    ok(unsafe { mp_memory_close(node.context, pointer.cast()) });
}

pub fn hex(handle: &mp_memory_handle_t) -> String {
    handle.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn from_hex(text: &str) -> mp_memory_handle_t {
    let mut handle = mp_memory_handle_t { bytes: [0; 128] };
    for (i, byte) in handle.bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hexadecimal digits");
    }
    handle
}

/// Returns the address of the socket at which the exporter of a handle listens.
pub fn socket_of(handle: &mp_memory_handle_t) -> rustix::net::SocketAddrUnix {
    let token: String =
        Handle::decode(&handle.bytes).expect("a handle").origin.token[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    rustix::net::SocketAddrUnix::new_abstract_name(format!("mpgpu-{token}").as_bytes()).expect("a name")
}

/// Requests an allocation from the service that listens at a socket, without permission. Returns the answer and the file descriptor that it
/// contains, or `None` if the service closes the connection.
pub fn ask_for(name: &rustix::net::SocketAddrUnix, backend: u8, allocation: u64, secret: [u8; 16]) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    use rustix::net::*;
    let board = rustix::fs::memfd_create("board", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memory file");
    rustix::fs::ftruncate(&board, 1 << 19).expect("room");
    rustix::fs::fcntl_add_seals(&board, rustix::fs::SealFlags::SHRINK).expect("a file of our own");
    let stranger = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&stranger, name).expect("the service listens");
    let mut packet = [0; 448];
    packet[..8].copy_from_slice(b"mpgpu-s3");
    packet[9] = backend;
    packet[12] = 1;
    packet[16..24].copy_from_slice(&allocation.to_le_bytes());
    packet[104..120].copy_from_slice(&secret);
    let (boards, mut space) = ([board.as_fd()], [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&boards)));
    sendmsg(&stranger, &[std::io::IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL).expect("the service reads");
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let heard = recvmsg(&stranger, &mut [std::io::IoSliceMut::new(&mut packet)], &mut ancillary, RecvFlags::empty()).ok()?;
    let mut file = None;
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = part {
            file = files.next();
        }
    }
    (heard.bytes > 0).then(|| (packet[..heard.bytes].to_vec(), file))
}

/// Returns a handle with contents that `change` has modified, and with a valid checksum.
pub fn forged(handle: &mp_memory_handle_t, change: impl FnOnce(&mut Handle)) -> mp_memory_handle_t {
    let mut decoded = Handle::decode(&handle.bytes).expect("a handle");
    change(&mut decoded);
    mp_memory_handle_t { bytes: decoded.encode() }
}

/// Returns the number of file descriptors and the number of mappings of memory files that an idle process has.
pub fn holdings(process: &str) -> (usize, usize) {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("procfs");
    let shared = maps.lines().filter(|line| line.contains("memfd:mpgpu")).count();
    (std::fs::read_dir(format!("/proc/{process}/fd")).expect("procfs").count(), shared)
}

/// Returns the mappings of this process: first address, end address, and inode of the file.
pub fn mappings() -> Vec<(usize, usize, String)> {
    let number = |text: &str| usize::from_str_radix(text, 16).expect("hexadecimal digits");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    let parse = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (first, end) = words[0].split_once('-').expect("two addresses");
        (number(first), number(end), words[4].to_owned())
    };
    maps.lines().map(parse).collect()
}

/// Returns the inode of the memory file that is mapped at an address.
pub fn file_at(pointer: *const u8) -> String {
    let mut all = mappings().into_iter();
    all.find(|(first, end, _)| (*first..*end).contains(&pointer.addr())).expect("a mapping").2
}

/// Returns the number of mappings of a memory file. Only imports map a file of a peer, so other tests do not affect the number.
pub fn mapped(file: &str) -> usize {
    mappings().iter().filter(|(_, _, inode)| inode == file).count()
}

/// Returns the number of files that this library has in /dev/shm, including those of other tests. The interposer's table is not counted,
/// because any process may use it.
pub fn names() -> usize {
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let ours = |name: &String| name.contains("mpgpu") && !name.starts_with("mpgpu-owners-");
    std::fs::read_dir("/dev/shm").map_or(0, |names| names.flatten().map(name).filter(ours).count())
}

pub fn signal(counter: *mut u64, value: u64) -> mp_signal_t {
    mp_signal_t { counter, value }
}

pub fn wait_in(node: &Node, stream: mp_stream_t, signals: &[mp_signal_t]) {
    // SAFETY: the list is valid for the call.
    ok(unsafe { mp_stream_wait_signals(node.context, stream, signals.as_ptr(), signals.len()) });
}

pub fn raise_in(node: &Node, stream: mp_stream_t, signals: &[mp_signal_t]) {
    // SAFETY: as above.
    ok(unsafe { mp_stream_raise_signals(node.context, stream, signals.as_ptr(), signals.len()) });
}

/// Allocates counters in a context, all of which are 0.
pub fn counters(node: &Node, count: usize) -> *mut u64 {
    let mut counters = null_mut();
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_alloc_shared(node.context, MP_DEVICE_HOST, 8 * count as u64, &mut counters) });
    counters.cast()
}

/// Waits on the host until a counter has reached a value, for at most `seconds`.
pub fn wait_for(node: &Node, counter: *mut u64, value: u64, seconds: f64) -> mp_status_t {
    // SAFETY: the library must check the address.
    unsafe { mp_signal_synchronize(node.context, counter, value, seconds) }
}

/// Executes the orders of the test that has started this program. Does nothing if no test has started it.
#[test]
#[ignore = "a process that other tests start"]
fn child_obeys() {
    if std::env::var_os("SHARE_TEST_CHILD").is_none() {
        return;
    }
    if let Ok(kill_at) = std::env::var("SHARE_TEST_KILL_AT") {
        return crate::killed::trace(kill_at.parse().expect("a number"));
    }
    let mut node = Some(Node::new(c"beluga"));
    let mut offered = None;
    let mut memory: Vec<(*mut u8, usize)> = Vec::new();
    let mut imports: Vec<*mut u8> = Vec::new();
    let mut files: Vec<std::fs::File> = Vec::new();
    let failed = |status: mp_status_t| format!("{} {}", status as i32, last_error());
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let words: Vec<&str> = line.split_whitespace().collect();
        let n = |at: usize| words[at].parse::<usize>().expect("a number");
        let here = || node.as_ref().expect("the context was not destroyed");
        let answer = match words[0] {
            // alloc DEVICE BYTES SEED
            "alloc" => {
                let device: i32 = words[1].parse().expect("a device");
                let pointer = if device < 0 { here().alloc_shared(device, n(2)) } else { here().alloc(device, n(2)) };
                fill(pointer, n(2), n(3));
                memory.push((pointer, n(2)));
                format!("0 {}", memory.len() - 1)
            }
            // export MEMORY OFFSET BYTES
            "export" => format!("0 {}", hex(&export(here(), memory[n(1)].0.wrapping_add(n(2)), n(3)))),
            // free MEMORY
            "free" => {
                here().free(memory[n(1)].0);
                "0".into()
            }
            // check MEMORY SEED
            "check" => format!("0 {}", holds(memory[n(1)].0, memory[n(1)].1, n(2), 0)),
            // import HANDLE
            "import" => match try_import(here(), &from_hex(words[1])) {
                (MP_SUCCESS, pointer) => {
                    imports.push(pointer);
                    format!("0 {}", imports.len() - 1)
                }
                (status, _) => failed(status),
            },
            // close IMPORT
            "close" => {
                close(here(), imports[n(1)]);
                "0".into()
            }
            // look IMPORT BYTES SEED FROM
            "look" => format!("0 {}", holds(imports[n(1)], n(2), n(3), n(4))),
            // put IMPORT DEVICE MEMORY DEVICE BYTES: executes a plan that copies memory of this process into memory of another process
            "put" => {
                let (to, from) = (words[2].parse().expect("a device"), words[4].parse().expect("a device"));
                let plan = here().plan(&[transfer(imports[n(1)], to, memory[n(3)].0, from, n(5))]);
                here().run(plan);
                ok(mp_plan_destroy(plan));
                "0".into()
            }
            // pump DATA FLAG MEMORY FREE ROUNDS BYTES: in each round, puts MEMORY into the import DATA and sets the counter FLAG, after the
            // receiver has acknowledged the previous round in the counter FREE. All work is in one stream, and the host does not wait.
            "pump" => {
                let (data, flag, source, free, rounds, bytes) =
                    (imports[n(1)], imports[n(2)].cast::<u64>(), memory[n(3)].0, memory[n(4)].0.cast::<u64>(), n(5), n(6));
                let stream = here().stream(0);
                for round in 0..rounds {
                    wait_in(here(), stream, &[signal(free, round as u64)]);
                    let plan = here().plan(&[transfer(data, 1, source.wrapping_add(round * bytes), 0, bytes)]);
                    // SAFETY: the plan's memory exists until the stream has been synchronised.
                    ok(unsafe { mp_execute(plan, stream, null_mut()) });
                    raise_in(here(), stream, &[signal(flag, round as u64 + 1)]);
                    ok(mp_plan_destroy(plan));
                }
                ok(mp_stream_synchronize(here().context, stream));
                "0".into()
            }
            // knock HANDLE: requests memory from the exporter without permission, and returns the answer
            "knock" => {
                let stranger =
                    rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, None).expect("a socket");
                rustix::net::connect(&stranger, &socket_of(&from_hex(words[1]))).expect("the service listens");
                let mut heard = [0; 448];
                let count = rustix::net::recv(&stranger, &mut heard[..], rustix::net::RecvFlags::empty()).expect("an answer").0;
                format!("0 {}", String::from_utf8_lossy(&heard[128..count]).trim_end_matches('\0'))
            }
            // fill LEFT: opens files until only LEFT file descriptors are available
            "fill" => {
                let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
                let room = rustix::process::Rlimit { current: Some(256), maximum: most };
                rustix::process::setrlimit(rustix::process::Resource::Nofile, room).expect("a lower limit");
                files.truncate(0);
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    files.push(file);
                }
                files.truncate(files.len() - n(1));
                "0".into()
            }
            // limit BYTES: limits the size of files of this process
            "limit" => {
                let limit = rustix::process::Rlimit { current: Some(n(1) as u64), maximum: Some(n(1) as u64) };
                rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).expect("a lower limit");
                "0".into()
            }
            "mark" => {
                crate::killed::mark();
                "0".into()
            }
            "offer" => {
                let (offer, handles) = crate::killed::offer(here());
                offered = Some(offer);
                format!("0 {handles}")
            }
            "take_back" => {
                crate::killed::take_back(here(), offered.take().expect("an offer"));
                "0".into()
            }
            // exchange HANDLE HANDLE SEED
            "exchange" => {
                let statuses = crate::killed::exchange(here(), offered.take().expect("an offer"), [words[1], words[2]], n(3));
                statuses.iter().map(|status| (*status as i32).to_string()).collect::<Vec<_>>().join(" ")
            }
            "works" => {
                crate::killed::works(here());
                "0".into()
            }
            "fork" => format!("0 {}", crate::forked::fork_once(here())),
            // fork_under_load ROUNDS
            "fork_under_load" => {
                let codes: Vec<String> = crate::forked::fork_under_load(here(), n(1)).iter().map(i32::to_string).collect();
                format!("0 {}", codes.join(" "))
            }
            // meet PATH RANK RANKS: creates a node whose ranks connect through the socket PATH
            "meet" => {
                let path = std::ffi::CString::new(words[1]).expect("no NUL");
                let options = mp_node_options_t {
                    size: size_of::<mp_node_options_t>(),
                    devices: std::ptr::null(),
                    device_count: 0,
                    socket: path.as_ptr(),
                    failure: std::ptr::null(),
                };
                // SAFETY: all pointers are valid for the call.
                ok(unsafe { mp_node_create(here().context, n(2) as u32, n(3) as u32, None, null_mut(), &options, &mut null_mut()) });
                "0".into()
            }
            "linger" => format!("0 {}", crate::forked::linger()),
            "service" => format!("0 {}", crate::forked::service_time()),
            // descriptors COUNT: limits the number of descriptors of this process
            "descriptors" => {
                let limit = rustix::process::Rlimit { current: Some(n(1) as u64), maximum: Some(n(1) as u64) };
                rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("a lower limit");
                "0".into()
            }
            // interrupt MILLISECONDS: from now on interrupts this thread by a signal at this interval
            "interrupt" => {
                extern "C" fn nothing(_: libc::c_int) {}
                let handler: extern "C" fn(libc::c_int) = nothing;
                // SAFETY: a handler that does nothing, without SA_RESTART.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = handler as *const () as usize;
                    assert_eq!(libc::sigaction(libc::SIGUSR1, &action, null_mut()), 0);
                }
                // SAFETY: no argument is a pointer.
                let (thread, every) = (unsafe { libc::pthread_self() }, std::time::Duration::from_millis(n(1) as u64));
                std::thread::spawn(move || {
                    loop {
                        std::thread::sleep(every);
                        // SAFETY: the thread that executes orders exists as long as the process.
                        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                    }
                });
                "0".into()
            }
            // await MEMORY VALUE: returns the status of a wait for a counter
            "await" => match wait_for(here(), memory[n(1)].0.cast(), n(2) as u64, 0.0) {
                MP_SUCCESS => "0".into(),
                status => failed(status),
            },
            // refuse MEMORY: exports memory, which must fail
            "refuse" => {
                let mut handle = mp_memory_handle_t { bytes: [0; 128] };
                // SAFETY: the output is valid for the call.
                failed(unsafe { mp_memory_export(here().context, memory[n(1)].0.cast(), 1, &mut handle) })
            }
            // raise IMPORT VALUE
            "raise" => {
                raise_in(here(), null_mut(), &[signal(imports[n(1)].cast(), n(2) as u64)]);
                ok(mp_stream_synchronize(here().context, null_mut()));
                "0".into()
            }
            // leave IMPORT VALUE: declares that this process will set no counter there to a value above VALUE
            "leave" => {
                // SAFETY: no argument is read through.
                ok(unsafe { mp_memory_leave(here().context, imports[n(1)].cast(), n(2) as u64) });
                "0".into()
            }
            // wait MEMORY VALUE: makes later work in the default stream wait for a signal
            "wait" => {
                wait_in(here(), null_mut(), &[signal(memory[n(1)].0.cast(), n(2) as u64)]);
                "0".into()
            }
            "synchronize" => match mp_stream_synchronize(here().context, null_mut()) {
                MP_SUCCESS => "0".into(),
                status => failed(status),
            },
            "holdings" => {
                let (descriptors, mappings) = holdings("self");
                format!("0 {descriptors} {mappings}")
            }
            "destroy" => {
                ok(mp_context_destroy(node.take().expect("once").context));
                "0".into()
            }
            "exit" => std::process::exit(0),
            other => panic!("{other}: unknown order"),
        };
        println!("\nANSWER {answer}");
    }
}
