//! Implements `mpgpu run`, which runs an unmodified program and accelerates its copies.

mod sums;

use crate::arguments::Failure;
use clap::Args;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use sums::Sums;

const LIBRARY: &str = "libmpgpu_preload.so";
const AUDITOR: &str = "libmpgpu_audit.so";

/// Exit code that a shell, `env` and `nohup` return if a program does not exist. The next constant is the exit code that they return if a
/// program exists but cannot be executed.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

pub const EXAMPLES: &str = "Examples:\n  \
    mpgpu run python train.py\n  \
    mpgpu run mpirun -n 4 ./simulation      if the launcher passes the environment on\n  \
    mpgpu run --check ./simulation          compares every accelerated copy byte by byte\n\n\
    The exit code is that of the program; 127 if it was not found, 126 if it cannot be executed.\n\
    At the end a report shows how many copies of all processes were accelerated, and why others were\n\
    passed through. docs/guide/unchanged.md describes which copies gain.";

#[derive(Args)]
pub struct RunArguments {
    /// Compare source and destination after every accelerated copy (slow)
    #[arg(long)]
    check: bool,
    /// Accelerate libraries loaded with RTLD_DEEPBIND too: sets LD_AUDIT to libmpgpu_audit.so, from the folder of libmpgpu_preload.so
    #[arg(long)]
    audit: bool,
    /// Append a report of each process's copies to this file when the process ends
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Path of libmpgpu_preload.so [default: the installed one, or one in LD_LIBRARY_PATH]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Program to run, and arguments for it, optionally after `--`
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Runs the program as a child process on the same terminal. Then reports the copies of the program and of all its descendants. Finally
/// ends this process in the same way as the program ended: with the exit code of the program, or by the same signal. Returns only if the
/// program could not be started.
pub fn run(arguments: &RunArguments) -> Result<String, Failure> {
    let library = match &arguments.library {
        Some(path) => path.canonicalize().map_err(|error| format!("--library {}: {error}", path.display()))?,
        None => find()?,
    };
    if library.to_string_lossy().contains([' ', ':']) {
        return Err(format!(
            "{}: the loader does not accept a path with a space or a colon; copy the library elsewhere",
            library.display()
        )
        .into());
    }
    let mut program = Command::new(&arguments.program[0]);
    program.args(&arguments.program[1..]).env("LD_PRELOAD", before("LD_PRELOAD", &library));
    if arguments.audit {
        let auditor = library.with_file_name(AUDITOR);
        if !auditor.is_file() {
            return Err(format!("--audit: {} does not exist", auditor.display()).into());
        }
        program.env("LD_AUDIT", before("LD_AUDIT", &auditor));
    }
    if let Some(file) = &arguments.report {
        program.env("MPGPU_PRELOAD_REPORT", std::path::absolute(file)?);
    }
    if arguments.check {
        program.env("MPGPU_VERIFY", "bytes");
    }
    program.env("ASAN_OPTIONS", behind_sanitizers(env::var_os("ASAN_OPTIONS")));
    let sums = Sums::new()?;
    program.env("MPGPU_PRELOAD_SUMS", sums.path());
    // Signal handlers are installed before the child process is started, so that no signal is lost.
    let ignored = ignored_signals()?;
    let watched = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = SignalsInfo::new(watched.chain([SIGCHLD]))?;
    let mut child = match program.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("mpgpu: {} cannot be run: {error}", Path::new(&arguments.program[0]).display());
            std::process::exit(if error.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE })
        }
    };
    let status = wait(&mut child, &mut signals)?;
    // If the report cannot be written, this process still ends as the program did.
    let _ = std::io::stderr().write_all(sums.report(arguments.check)?.as_bytes());
    if let Some(signal) = status.signal() {
        // Only the core file of the program is useful. This process ends by the same signal, and must not write a core file too.
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
        signal_hook::low_level::emulate_default_handler(signal)?;
    }
    std::process::exit(status.code().unwrap_or(1))
}

/// Returns the signals that this process inherited as ignored, for example from `nohup`. The result is a bit mask in which signal 1 is the
/// lowest bit. The program inherits them too, unless this process installs a handler.
fn ignored_signals() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).ok_or("/proc/self/status has no SigIgn")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

/// Waits until the program ends. Meanwhile forwards signals that are sent to this process to the program. Signals from the terminal reach
/// the program directly.
fn wait(child: &mut Child, signals: &mut SignalsInfo<WithOrigin>) -> Result<ExitStatus, Failure> {
    loop {
        for origin in signals.wait() {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if origin.signal != SIGCHLD
                && origin.cause != Cause::Kernel
                && let Some(signal) = rustix::process::Signal::from_named_raw(origin.signal)
            {
                rustix::process::kill_process(rustix::process::Pid::from_child(child), signal)?;
            }
        }
    }
}

/// Returns options for AddressSanitizer that allow the sanitizer's runtime to be loaded after a preloaded library. The options disable a
/// check that protects the functions of the C library that the sanitizer intercepts. This is safe, because the interposer defines none of
/// these functions. Preloading the sanitizer's runtime first is no alternative: uninstrumented child processes would load it too, and its
/// path is unknown if a launcher starts the program. The user's own options follow and take precedence.
fn behind_sanitizers(options: Option<OsString>) -> OsString {
    let mut all = OsString::from("verify_asan_link_order=0");
    if let Some(options) = options.filter(|options| !options.is_empty()) {
        all.push(":");
        all.push(options);
    }
    all
}

/// Returns the value of an environment variable that lists libraries (such as `LD_PRELOAD`), with `library` added at the front.
fn before(variable: &str, library: &Path) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = env::var_os(variable).filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// Finds libmpgpu_preload.so in the places where it is installed or built, and returns its path.
fn find() -> Result<PathBuf, Failure> {
    let here = env::current_exe()?.canonicalize()?;
    let folder = here.parent().unwrap_or(Path::new("/"));
    let multiarch = format!("../lib/{}-linux-gnu", env::consts::ARCH);
    // CMake sets this variable to the folder in which libraries are installed, relative to the folder of this command.
    let installed = option_env!("MPGPU_LIBRARY_FOLDER").unwrap_or(".");
    let beside = [installed, ".", "../lib", "../lib64", &multiarch].map(|place| folder.join(place));
    let paths = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(env::split_paths(OsStr::new(&paths)))
        .map(|place| place.join(LIBRARY))
        .chain(known_to_loader())
        .find_map(|path| path.canonicalize().ok())
        .ok_or_else(|| {
            format!(
                "{LIBRARY} was not found next to {}, in ../lib, in LD_LIBRARY_PATH or by ldconfig: build it with CMake, and pass its path \
                 with --library",
                here.display()
            )
            .into()
        })
}

/// Returns the library's path from the cache of the dynamic loader. This also covers systems on which libraries are not installed near
/// their commands.
fn known_to_loader() -> Option<PathBuf> {
    // `ldconfig` is in an sbin folder, which is usually not in the PATH of users.
    let path = env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let cache = Command::new("ldconfig").arg("-p").env("PATH", path).output().ok()?;
    // A line of the cache looks like this: "  libmpgpu_preload.so (libc6,x86-64) => /usr/local/lib/libmpgpu_preload.so"
    let cache = String::from_utf8_lossy(&cache.stdout);
    let line = cache.lines().find(|line| line.split_whitespace().next() == Some(LIBRARY))?;
    Some(PathBuf::from(line.split_once(" => ")?.1))
}
