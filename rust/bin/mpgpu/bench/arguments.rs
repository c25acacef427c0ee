//! What `mpgpu bench` may be told.

use crate::arguments::{BackendName, EngineName, size};
use clap::Args;
use std::path::PathBuf;

#[derive(Args)]
pub struct BenchArguments {
    /// Print the cases and exit
    #[arg(long)]
    pub list: bool,
    /// Cases to run, separated by commas; all without it
    #[arg(long, value_delimiter = ',', value_name = "CASE")]
    pub case: Vec<String>,
    /// Sizes of one transfer (of one face in halo26 and halo26_bidir), separated by commas; bytes may end in K, M or G
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = bench_size)]
    pub sizes: Vec<u64>,
    /// Rounds in which everything is timed once; by default as many as take about half a second
    #[arg(long, value_parser = rounds)]
    pub repeat: Option<usize>,
    /// Thread blocks of 256 threads that make one copy between GPUs in d2d_narrow
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub narrow_blocks: u32,
    /// Executor to plan for; by default what the environment says, or the model's choice
    #[arg(long, value_enum)]
    pub engine: Option<EngineName>,
    /// Backend; by default what the environment says, or CUDA where there are GPUs
    #[arg(long, value_enum)]
    pub backend: Option<BackendName>,
    /// A preset's name or a topology file; on GPUs by default what is discovered
    #[arg(long)]
    pub topology: Option<String>,
    /// Print the plan of each case's largest size
    #[arg(long)]
    pub plans: bool,
    /// Write everything to this file as JSON too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn bench_size(text: &str) -> Result<u64, String> {
    match size(text)? {
        0 => Err("0: a size to measure is 1 byte or more".into()),
        bytes => Ok(bytes),
    }
}

fn rounds(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|rounds| *rounds > 0).ok_or_else(|| format!("{text}: must be a whole number, 1 or more"))
}
