//! Compiles the CPU build of the kernels in `cpp/`, and the private interface through which this crate calls it.

use std::path::Path;

fn main() {
    let root = Path::new("../..").canonicalize().expect("the package lies in its workspace");
    let cpp = root.join("cpp");
    cxx_build::CFG.include_prefix = "mpgpu";
    cxx_build::bridge("bridge.rs")
        .include(&cpp)
        .file(cpp.join("segment_copy.cpp"))
        .file(cpp.join("block_copy.cpp"))
        .file(cpp.join("actions.cpp"))
        .std("c++17")
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        // The archive is linked into unrelated programs, to which these symbols must not be visible.
        .flag_if_supported("-fvisibility=hidden")
        // No code in cpp/ uses exceptions or run-time type information. With both disabled, no C++ run-time library is needed.
        .flag_if_supported("-fno-exceptions")
        .flag_if_supported("-fno-rtti")
        .compile("mpgpu-kernels");
    println!("cargo::rerun-if-changed=bridge.rs");
    for name in ["segment_copy.cpp", "segment_copy.hpp", "block_copy.cpp", "block_copy.hpp", "actions.cpp", "actions.hpp", "portable.hpp"] {
        println!("cargo::rerun-if-changed={}", cpp.join(name).display());
    }
}
