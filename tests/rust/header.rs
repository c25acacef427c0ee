//! Tests that `include/mpgpu/mpgpu.h` is the output of cbindgen for `rust/ffi`, and that strict compilers accept it.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header() -> PathBuf {
    root().join("include/mpgpu/mpgpu.h")
}

#[test]
fn the_header_is_what_the_sources_generate() {
    let checked_in = std::fs::read_to_string(header()).expect("the header is there");
    assert!(
        checked_in == include_str!(concat!(env!("OUT_DIR"), "/mpgpu.h")),
        "include/mpgpu/mpgpu.h differs from what rust/ffi generates; run UPDATE_HEADER=1 cargo build, and look at the difference"
    );
}

/// Program that uses every initialiser and the inline function.
const PROGRAM: &str = r#"
#include <mpgpu/mpgpu.h>
#include <mpgpu/mpgpu.h>

int main(void) {
    mp_context_options_t context_options = MP_CONTEXT_OPTIONS_INIT;
    mp_plan_options_t plan_options = MP_PLAN_OPTIONS_INIT;
    mp_probe_options_t probe_options = MP_PROBE_OPTIONS_INIT;
    mp_plan_info_t plan_info = MP_PLAN_INFO_INIT;
    mp_statistics_t statistics = MP_STATISTICS_INIT;
    mp_device_statistics_t device_statistics = MP_DEVICE_STATISTICS_INIT;
    mp_error_info_t error_info = MP_ERROR_INFO_INIT;
    mp_messenger_options_t messenger_options = MP_MESSENGER_OPTIONS_INIT;
    mp_message_info_t message_info = MP_MESSAGE_INFO_INIT;
    mp_context_t context = NULL;
    mp_stream_t stream = NULL;
    struct CUstream_st *cuda_stream = stream;
    struct CUevent_st *cuda_event = (mp_event_t)NULL;
    if (context_options.size + plan_options.size + probe_options.size + plan_info.size + statistics.size + device_statistics.size + error_info.size + messenger_options.size + message_info.size + (MP_ANY_RANK == -2147483647) + (MP_RANK_ELSEWHERE(5) == -1073741829) == 0)
        return 1;
    if (MP_DEVICE_HOST_NUMA(0) != MP_DEVICE_HOST || MP_DEVICE_HOST_NUMA(1 + 1) != -3 || MP_VERSION != mp_version())
        return 2;
    (void)cuda_stream;
    (void)cuda_event;
    return mp_context_create(&context_options, &context) == MP_SUCCESS ? 0 : 3;
}
"#;

#[test]
fn strict_compilers_accept_the_header_as_c_and_as_cpp() {
    let folder = std::env::temp_dir().join(format!("mpgpu-header-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    let source = folder.join("program.c");
    std::fs::write(&source, PROGRAM).expect("the file can be written");
    let mut tried = 0;
    for compiler in [std::env::var("CC").unwrap_or("cc".to_owned()), "gcc".to_owned(), "clang".to_owned()] {
        for language in [["-xc", "-std=c99"], ["-xc", "-std=c17"], ["-xc++", "-std=c++17"]] {
            let mut command = Command::new(&compiler);
            command.args(language).args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wshadow"]);
            // Compilers that are not installed are skipped. At least one is installed, because it built this crate.
            let Ok(output) = command.arg("-I").arg(root().join("include")).arg(&source).output() else { continue };
            assert!(output.status.success(), "{compiler} {language:?}:\n{}", String::from_utf8_lossy(&output.stderr));
            tried += 1;
        }
    }
    std::fs::remove_dir_all(&folder).expect("the folder was the test's own");
    assert!(tried >= 3, "no C compiler was found");
}

/// Returns the C++ headers that need neither MPI nor CUDA.
fn cpp_headers(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the headers are there").map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
    let is_plain = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).expect("text");
        path.extension().is_some_and(|extension| extension == "hpp") && !text.contains("mpi.h")
    };
    folders.iter().flat_map(|folder| cpp_headers(folder)).chain(files.into_iter().filter(is_plain)).collect()
}

#[test]
fn a_compiler_before_cpp17_is_told_so_first_by_every_cpp_header() {
    let compiler = std::env::var("CXX").unwrap_or("c++".to_owned());
    let headers = cpp_headers(&root().join("include/mpgpu"));
    assert!(headers.len() > 20, "{headers:?}");
    for header in headers {
        let mut command = Command::new(&compiler);
        command.args(["-xc++", "-std=c++14", "-fsyntax-only", "-Wfatal-errors", "-I"]).arg(root().join("include")).arg(&header);
        let output = command.output().expect("a C++ compiler, to build this crate");
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().find(|line| line.contains("error:")).unwrap_or_default();
        assert!(!output.status.success() && first.contains("mpgpu: the C++ headers need C++17: -std=c++17"), "{header:?}:\n{said}");
    }
}

#[test]
fn every_macro_has_the_prefix() {
    let text = std::fs::read_to_string(header()).expect("the header is there");
    let macros: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#define ")).collect();
    assert!(macros.len() > 10, "the header was not read");
    assert!(macros.iter().all(|name| name.starts_with("MP_") || name.starts_with("MPGPU_H")), "{macros:?}");
}
