//! Compiles the CPU build of the kernels in `cpp/` and the private bridge that joins them to the Rust core.

fn main() {
    // The bridge's header and the kernels see each other through the include prefix `mpgpu/`, which is this package's root.
    cxx_build::bridge("rust/ffi/bridge.rs")
        .file("cpp/segment_copy.cpp")
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
    for path in ["rust/ffi/bridge.rs", "cpp/segment_copy.cpp", "cpp/segment_copy.hpp", "cpp/portable.hpp"] {
        println!("cargo::rerun-if-changed={path}");
    }
}
