//! What the command line may say.

use clap::{Args, Parser, Subcommand, ValueEnum};
use mpgpu::plan::{Engine, Options};
use mpgpu::topology::DeviceId;
use mpgpu::units::parse_size;
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
