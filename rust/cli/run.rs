//! `mpgpu run`: runs a program that is not changed, with the copies that gain taken by mpgpu.

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

/// Exit codes of a shell, `env` and `nohup` for a program that does not exist, and for one that cannot be executed.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

pub const EXAMPLES: &str = "Examples:\n  \
    mpgpu run python train.py\n  \
    mpgpu run mpirun -n 4 ./simulation      where the launcher passes the environment on\n  \
    mpgpu run --check ./simulation          every taken copy is compared byte by byte\n\n\
    The exit code is that of the program; 127 if it was not found, 126 if it cannot be executed.\n\
    At its end it says how many copies were taken in all processes, and why others were not.\n\
    docs/guide/unchanged.md says what gains.";

#[derive(Args)]
pub struct RunArguments {
    /// Compare source and destination after every copy that is taken (slow)
    #[arg(long)]
    check: bool,
    /// Also where a library is loaded with RTLD_DEEPBIND: sets LD_AUDIT to libmpgpu_audit.so, beside libmpgpu_preload.so
    #[arg(long)]
    audit: bool,
    /// Append to this file what each process has copied, at that process's end
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Path of libmpgpu_preload.so [default: where it is installed, or in LD_LIBRARY_PATH]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments; `--` may stand before it
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Runs the program as a child of the same terminal, says what became of the copies of all processes under it, and ends as the program has
/// ended: by its exit code or its signal. Returns only if nothing was started.
pub fn run(arguments: &RunArguments) -> Result<String, Failure> {
    let library = match &arguments.library {
        Some(path) => path.canonicalize().map_err(|error| format!("--library {}: {error}", path.display()))?,
        None => find()?,
    };
    if library.to_string_lossy().contains([' ', ':']) {
        return Err(format!("{}: the loader takes no path with a blank or a colon; copy the library elsewhere", library.display()).into());
    }
    let mut program = Command::new(&arguments.program[0]);
    program.args(&arguments.program[1..]).env("LD_PRELOAD", before("LD_PRELOAD", &library));
    if arguments.audit {
        let auditor = library.with_file_name(AUDITOR);
        if !auditor.is_file() {
            return Err(format!("--audit: there is no {}", auditor.display()).into());
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
    // Before there is a child, so that no signal is lost between.
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
    // Nobody may read it any more: that is no reason to end otherwise than the program.
    let _ = std::io::stderr().write_all(sums.report(arguments.check)?.as_bytes());
    if let Some(signal) = status.signal() {
        // The core is the program's, if anybody's.
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
        signal_hook::low_level::emulate_default_handler(signal)?;
    }
    std::process::exit(status.code().unwrap_or(1))
}

/// A bit for each signal from 1 up which this process was started to ignore, as by `nohup`: the program inherits it, unless we catch it.
fn ignored_signals() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).ok_or("/proc/self/status has no SigIgn")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

/// Waits for the program, and passes on to it what this process is sent. What the terminal sends, the program has got too.
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

/// Options of AddressSanitizer that let its runtime stand behind a preloaded library. Its check of the order protects its interceptors of the C
/// library, of which the interposer defines none. The runtime cannot be preloaded first instead: programs without it, which the program starts,
/// would be sanitized too, and for programs under a launcher nobody knows it. Options of the user come later and win.
fn behind_sanitizers(options: Option<OsString>) -> OsString {
    let mut all = OsString::from("verify_asan_link_order=0");
    if let Some(options) = options.filter(|options| !options.is_empty()) {
        all.push(":");
        all.push(options);
    }
    all
}

/// A library before those that a variable of the loader names already.
fn before(variable: &str, library: &Path) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = env::var_os(variable).filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// The library where it is installed or built.
fn find() -> Result<PathBuf, Failure> {
    let here = env::current_exe()?.canonicalize()?;
    let folder = here.parent().unwrap_or(Path::new("/"));
    let multiarch = format!("../lib/{}-linux-gnu", env::consts::ARCH);
    // CMake names the folder into which it installs libraries, seen from that of this command.
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
                "{LIBRARY} is not beside {}, in ../lib, in LD_LIBRARY_PATH or known to ldconfig: build it with CMake, and name it by --library",
                here.display()
            )
            .into()
        })
}

/// Where the loader's cache has the library: of a system whose libraries lie elsewhere than beside its commands.
fn known_to_loader() -> Option<PathBuf> {
    // Users have no sbin in PATH.
    let path = env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let cache = Command::new("ldconfig").arg("-p").env("PATH", path).output().ok()?;
    // "	libmpgpu_preload.so (libc6,x86-64) => /usr/local/lib/libmpgpu_preload.so"
    let cache = String::from_utf8_lossy(&cache.stdout);
    let line = cache.lines().find(|line| line.split_whitespace().next() == Some(LIBRARY))?;
    Some(PathBuf::from(line.split_once(" => ")?.1))
}
