//! Generates the C header from `rust/ffi` by cbindgen, and compares it with `include/mpgpu/mpgpu.h`, which programs include.
//!
//! A difference is a warning of the build and a failed test (`tests/rust/header.rs`). If the variable `UPDATE_HEADER` is set, the header in
//! `include` is replaced by the generated one.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Source files of the C ABI, in the order in which the header contains them.
const SOURCES: [&str; 16] = [
    "version",
    "types",
    "error",
    "log",
    "context",
    "memory",
    "stream",
    "plan",
    "collective",
    "request",
    "probe",
    "share",
    "node",
    "partition",
    "message",
    "pieces",
];

fn main() {
    let sources = SOURCES.map(|name| Path::new("rust/ffi").join(name).with_extension("rs"));
    let header = Path::new("include/mpgpu/mpgpu.h");
    let generated = generate(&sources);
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(folder.join("mpgpu.h"), &generated).expect("the folder of the build is writable");
    if env::var_os("UPDATE_HEADER").is_some() {
        fs::write(header, &generated).expect("the header can be written");
    }
    // A package of the crate alone has no header.
    if fs::read(header).is_ok_and(|checked_in| checked_in != generated) {
        println!("cargo::warning=include/mpgpu/mpgpu.h differs from rust/ffi: run UPDATE_HEADER=1 cargo build, and look at the difference");
    }
    println!("cargo::rerun-if-env-changed=UPDATE_HEADER");
    for path in sources.iter().map(PathBuf::as_path).chain([header, Path::new("cbindgen.toml")]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

fn generate(sources: &[PathBuf]) -> Vec<u8> {
    let config = cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml is valid");
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| builder.with_src(source));
    let mut text = Vec::new();
    builder.generate().expect("rust/ffi is what cbindgen understands").write(&mut text);
    text
}
