//! The program `mpgpu-bench`.

fn main() -> std::process::ExitCode {
    mpgpu_bench::main()
}
