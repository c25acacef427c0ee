//! Compiles the CPU build of the kernels in `cpp/` and the private bridge that joins them to this crate, which launches them.

use std::path::Path;

fn main() {
    let root = Path::new("../..").canonicalize().expect("the package lies in its workspace");
    let cpp = root.join("cpp");
    cxx_build::CFG.include_prefix = "mpgpu";
    cxx_build::bridge("bridge.rs")
        .include(&cpp)
        .file(cpp.join("segment_copy.cpp"))
        .file(cpp.join("actions.cpp"))
        .std("c++17")
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        // The archive is linked into programs that know nothing of these symbols.
        .flag_if_supported("-fvisibility=hidden")
        // Nothing in cpp/ throws or asks for a type at run time; without both, it needs no C++ run-time support.
        .flag_if_supported("-fno-exceptions")
        .flag_if_supported("-fno-rtti")
        .compile("mpgpu-kernels");
    println!("cargo::rerun-if-changed=bridge.rs");
    for name in ["segment_copy.cpp", "segment_copy.hpp", "actions.cpp", "actions.hpp", "portable.hpp"] {
        println!("cargo::rerun-if-changed={}", cpp.join(name).display());
    }
}
