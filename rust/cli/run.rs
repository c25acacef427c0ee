//! `mpgpu run`: runs a program that is not changed, with the copies that gain taken by mpgpu.

use crate::arguments::Failure;
use clap::Args;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBRARY: &str = "libmpgpu_preload.so";
const AUDITOR: &str = "libmpgpu_audit.so";

pub const EXAMPLES: &str = "Examples:\n  \
    mpgpu run -- python train.py\n  \
    mpgpu run -- mpirun -n 4 ./simulation      where the launcher passes the environment on\n  \
    mpgpu run --check -- ./simulation          every taken copy is compared byte by byte\n\n\
    At its end each process that has copied says how many copies were taken and why others were not.\n\
    docs/guide/unchanged.md says what gains.";

#[derive(Args)]
pub struct RunArguments {
    /// Compare source and destination after every copy that is taken (slow)
    #[arg(long)]
    check: bool,
    /// Also where a library is loaded with RTLD_DEEPBIND: sets LD_AUDIT to libmpgpu_audit.so, beside libmpgpu_preload.so
    #[arg(long)]
    audit: bool,
    /// Append the reports of all processes to this file, and not to standard error
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Path of libmpgpu_preload.so [default: beside this command, in ../lib, or in LD_LIBRARY_PATH]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, last = true)]
    program: Vec<OsString>,
}

/// Becomes the program: its process, its signals, its exit code. Returns where that fails.
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
    match &arguments.report {
        Some(file) => program.env("MPGPU_PRELOAD_REPORT", std::path::absolute(file)?),
        None if env::var_os("MPGPU_PRELOAD_REPORT").is_none() => program.env("MPGPU_PRELOAD_REPORT", "stderr"),
        None => &mut program,
    };
    if arguments.check {
        program.env("MPGPU_VERIFY", "bytes");
    }
    let error = program.exec();
    Err(format!("{} cannot be run: {error}", Path::new(&arguments.program[0]).display()).into())
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
    let beside = [".", "../lib", "../lib64", &multiarch].map(|place| folder.join(place));
    let paths = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(env::split_paths(OsStr::new(&paths)))
        .map(|place| place.join(LIBRARY))
        .find_map(|path| path.canonicalize().ok())
        .ok_or_else(|| {
            format!(
                "{LIBRARY} is not beside {}, in ../lib or in LD_LIBRARY_PATH: build it with CMake, and name it by --library",
                here.display()
            )
            .into()
        })
}
