//! What the command line may say.

use clap::{Args, Parser, Subcommand, ValueEnum};
use mpgpu::engine::BackendChoice;
use mpgpu::plan::{Engine, Options};
use mpgpu::topology::DeviceId;
use mpgpu::units::parse_size;
use std::path::PathBuf;
use std::str::FromStr;

/// Plans copies between the GPUs and host memory of one node over every link that helps.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Show the presets, or one machine as a table or a file
    Topo(TopoArguments),
    /// Show what would be done for given transfers, and why other paths are left out
    #[command(after_help = "Examples:\n  \
        mpgpu plan --topology beluga gpu0:gpu1:512M\n  \
        mpgpu plan --topology hgx-h200 host0:gpu0:1G --max-paths 4\n  \
        mpgpu plan --topology beluga gpu0:gpu1:128M gpu1:gpu2:128M gpu2:gpu3:128M gpu3:gpu0:128M --no-host-path\n\n\
        All times are modelled.")]
    Plan(PlanArguments),
    /// Measure mpgpu against plain copies on this machine, and check every byte
    #[command(after_help = "Examples:\n  \
        mpgpu bench --list\n  \
        mpgpu bench --case d2d,latency --json result.json\n  \
        mpgpu bench --case d2d --sizes 64M,1G --repeat 50 --plans\n\n\
        Without a GPU the host backend is measured, against memcpy on one thread.")]
    Bench(BenchArguments),
}

#[derive(Args)]
pub struct TopoArguments {
    /// A preset's name or a topology file; without it the presets are listed
    pub topology: Option<String>,
    /// Print the topology as a TOML file
    #[arg(long, requires = "topology")]
    pub toml: bool,
}

#[derive(Args)]
pub struct PlanArguments {
    /// SOURCE:DESTINATION:BYTES, where a device is gpuN or hostN and bytes may end in K, M, G or T (multiples of 1024)
    #[arg(required = true)]
    pub transfers: Vec<Transfer>,
    /// A preset's name or a topology file
    #[arg(long, default_value = mpgpu::topology::DEFAULT_PRESET)]
    pub topology: String,
    /// Executor to plan for
    #[arg(long, value_enum, default_value = "auto")]
    pub engine: EngineName,
    /// The most paths that one transfer may use
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_paths: Option<u32>,
    /// Keep copies between GPUs out of host memory
    #[arg(long)]
    pub no_host_path: bool,
    /// Bytes of one chunk on staged paths, 4K or more
    #[arg(long, value_parser = size)]
    pub chunk_bytes: Option<u64>,
    /// Transfers below this size take one path
    #[arg(long, value_parser = size)]
    pub min_bytes: Option<u64>,
    /// The most staging memory on each device
    #[arg(long, value_parser = size)]
    pub staging_bytes: Option<u64>,
    /// Host memory is not pinned
    #[arg(long)]
    pub pageable: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl PlanArguments {
    pub fn options(&self) -> Options {
        let default = Options::default();
        Options {
            engine: self.engine.into(),
            max_paths: self.max_paths.unwrap_or(default.max_paths),
            host_path: !self.no_host_path,
            chunk_bytes: self.chunk_bytes,
            min_bytes: self.min_bytes,
            staging_bytes: self.staging_bytes.unwrap_or(default.staging_bytes),
        }
    }
}

#[derive(Args)]
pub struct BenchArguments {
    /// Print the cases and exit
    #[arg(long)]
    pub list: bool,
    /// Cases to run, separated by commas; all without it
    #[arg(long, value_delimiter = ',', value_name = "CASE")]
    pub case: Vec<String>,
    /// Sizes of one transfer (of one face in halo26), separated by commas; bytes may end in K, M or G
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = bench_size)]
    pub sizes: Vec<u64>,
    /// Rounds in which everything is timed once; by default as many as take about half a second
    #[arg(long, value_parser = rounds)]
    pub repeat: Option<usize>,
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

#[derive(Copy, Clone, ValueEnum)]
pub enum BackendName {
    Auto,
    Host,
    Cuda,
}

impl From<BackendName> for BackendChoice {
    fn from(name: BackendName) -> BackendChoice {
        match name {
            BackendName::Auto => BackendChoice::Auto,
            BackendName::Host => BackendChoice::Host,
            BackendName::Cuda => BackendChoice::Cuda,
        }
    }
}

#[derive(Copy, Clone, ValueEnum)]
pub enum EngineName {
    Auto,
    Stream,
    Graph,
    Batch,
    Kernel,
}

impl From<EngineName> for Engine {
    fn from(name: EngineName) -> Engine {
        match name {
            EngineName::Auto => Engine::Auto,
            EngineName::Stream => Engine::Stream,
            EngineName::Graph => Engine::Graph,
            EngineName::Batch => Engine::Batch,
            EngineName::Kernel => Engine::Kernel,
        }
    }
}

#[derive(Copy, Clone)]
pub struct Transfer {
    pub src: DeviceId,
    pub dst: DeviceId,
    pub bytes: u64,
}

impl FromStr for Transfer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let (Some(src), Some(dst), Some(bytes), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            return Err("must be SOURCE:DESTINATION:BYTES, as in gpu0:gpu1:64M".into());
        };
        Ok(Transfer { src: device(src)?, dst: device(dst)?, bytes: size(bytes)? })
    }
}

fn device(text: &str) -> Result<DeviceId, String> {
    // The C ABI's numbers are 32-bit signed.
    let number = |digits: &str| digits.parse::<u32>().ok().filter(|&n| n < 1 << 30);
    let gpu = text.strip_prefix("gpu").and_then(number).map(DeviceId::gpu);
    gpu.or_else(|| text.strip_prefix("host").and_then(number).map(DeviceId::host))
        .ok_or_else(|| format!("{text}: a device is gpu0, gpu1, … or host0, host1, …"))
}

fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| format!("{text}: {error}"))
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
