//! Extracts the declarations that cffi reads from `include/mpgpu/mpgpu.h`. Writes the result to `header.h` in cargo's target folder, where
//! maturin looks for it. So the C header is the only source of the Python declarations.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Returns the header without the parts that cffi cannot parse: comments, preprocessor directives (except definitions of numbers), C++
/// code, initialisers and function bodies.
fn declarations(header: &str) -> String {
    let mut out = String::new();
    let mut lines = header.lines();
    while let Some(line) = lines.next() {
        let start = line.trim_start();
        if start.starts_with("///") {
            continue;
        } else if start.starts_with("/*") {
            let mut line = line;
            while !line.contains("*/") {
                line = lines.next().expect("the comment ends");
            }
        } else if start == "#ifdef __cplusplus" {
            lines.by_ref().find(|line| line.starts_with("#endif")).expect("the C++ part ends");
        } else if let Some(macro_) = start.strip_prefix("#define ") {
            // A number such as `#define MP_DEVICE_HOST (-1)` is accepted by cffi without parentheses and type.
            if let Some((name, value)) = macro_.split_once(' ') {
                let value = value.trim_start_matches('(').trim_end_matches(')').trim_end_matches("ull");
                let digits = value.trim_start_matches('-');
                let number =
                    digits.parse::<u64>().is_ok() || digits.strip_prefix("0x").is_some_and(|hex| u64::from_str_radix(hex, 16).is_ok());
                if number && !name.contains('(') {
                    out += &format!("#define {name} {value}\n");
                }
            }
            let mut line = line;
            while line.ends_with('\\') {
                line = lines.next().expect("the macro ends");
            }
        } else if start.starts_with('#') || start.starts_with("typedef char mp_enumerations_have_32_bits") {
            continue;
        } else if start.starts_with("static inline") {
            lines.by_ref().find(|line| *line == "}").expect("the function ends");
        } else if !start.is_empty() {
            out += line;
            out.push('\n');
        }
    }
    out
}

fn main() {
    let header = Path::new("../include/mpgpu/mpgpu.h");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", header.display());
    let text = declarations(&fs::read_to_string(header).expect("the header lies beside this folder"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo runs this"));
    // The output folder is TARGET_FOLDER[/TRIPLE]/PROFILE/build/PACKAGE/out. Cargo puts its marker file into the target folder only if
    // cargo created that folder.
    let mut target = out.ancestors().nth(4).expect("the output lies in cargo's target folder");
    if target.file_name() == env::var_os("TARGET").as_deref() {
        target = target.parent().expect("the output lies in cargo's target folder");
    }
    fs::write(target.join("header.h"), text).expect("the target folder can be written");
    // Two libraries of one process may contain this crate, or cxx. Each of them must call its own copy of the functions.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
