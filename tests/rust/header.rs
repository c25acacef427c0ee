//! `include/mpgpu/mpgpu.h` is what cbindgen makes of `rust/ffi`, and a header that strict compilers accept.

use std::path::{Path, PathBuf};

/// The files of the C ABI in the order in which the header presents them.
const SOURCES: [&str; 8] = ["version", "types", "error", "log", "context", "memory", "stream", "plan"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn generate() -> String {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml is valid");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES.iter().chain(["request"].iter()) {
        builder = builder.with_src(root().join("rust/ffi").join(source).with_extension("rs"));
    }
    let mut text = Vec::new();
    builder.generate().expect("rust/ffi is what cbindgen understands").write(&mut text);
    String::from_utf8(text).expect("the header is UTF-8")
}

fn header() -> PathBuf {
    root().join("include/mpgpu/mpgpu.h")
}

#[test]
fn the_header_is_what_the_sources_generate() {
    let generated = generate();
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(header(), &generated).expect("the header can be written");
    }
    let checked_in = std::fs::read_to_string(header()).expect("the header is there");
    assert!(
        checked_in == generated,
        "include/mpgpu/mpgpu.h differs from what rust/ffi generates; run UPDATE_HEADER=1 cargo test --test header, and look at the diff"
    );
}
