//! The tests of `mpgpu bench --case` and of the script that measures with it.

#[path = "../rust/bench.rs"]
mod bench;
#[path = "../rust/measure.rs"]
mod measure;
