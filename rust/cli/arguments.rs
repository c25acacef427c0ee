//! Command-line arguments that several subcommands share.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use mpgpu_contexts::BackendChoice;
use mpgpu_core::plan::{Engine, Options, Relays, Shape};
use mpgpu_core::topology::{DeviceId, MemoryKind};
use mpgpu_core::units::parse_size;
use std::error::Error;
use std::path::Path;
use std::str::FromStr;

/// Error with which a subcommand ends, as shown to the user.
pub type Failure = Box<dyn Error>;

/// Returns a parser for command-line values that accepts the names in `values`, and returns the value that belongs to the given name.
pub fn named<T: Copy + Send + Sync + 'static, const N: usize>(values: [(&'static str, T); N]) -> impl TypedValueParser<Value = T> {
    // The parser has already rejected other names.
    let value = move |name: String| values.iter().find(|(known, _)| *known == name).unwrap_or(&values[0]).1;
    PossibleValuesParser::new(values.map(|(name, _)| name)).map(value)
}

/// Returns the parser for the value of `--backend`.
pub fn backend() -> impl TypedValueParser<Value = BackendChoice> {
    named([("auto", BackendChoice::Auto), ("host", BackendChoice::Host), ("cuda", BackendChoice::Cuda)])
}

/// Returns the parser for the value of `--engine`.
pub fn engine() -> impl TypedValueParser<Value = Engine> {
    named([Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel].map(|engine| (engine.name(), engine)))
}

/// Options for staged paths, which all subcommands that make plans accept.
#[derive(Args)]
pub struct StagedPaths {
    /// GPUs that may relay bytes of copies between other devices: all, none, or a list such as 0,3
    #[arg(long, value_name = "GPUS", value_parser = relays)]
    pub relay_gpus: Option<Relays>,
    /// Bytes of one chunk on staged paths, 4K or more; by default the model chooses
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub chunk_bytes: Option<u64>,
    /// Number of chunks on each path through another GPU, instead of --chunk-bytes
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub relay_chunks: Option<u32>,
    /// Number of chunks on each path through host memory, instead of --chunk-bytes
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub host_chunks: Option<u32>,
    /// Maximum amount of staging memory on each device
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub staging_bytes: Option<u64>,
}

impl StagedPaths {
    /// Returns the options in the form that the planner takes.
    pub fn options(&self) -> Options {
        let default = Options::default();
        Options {
            relays: self.relay_gpus.unwrap_or(default.relays),
            chunk_bytes: self.chunk_bytes,
            relay_chunks: self.relay_chunks,
            host_chunks: self.host_chunks,
            staging_bytes: self.staging_bytes.unwrap_or(default.staging_bytes),
            ..default
        }
    }
}

/// Parses the value of `--relay-gpus`. This function exists because clap requires an error type other than `&str`.
fn relays(text: &str) -> Result<Relays, String> {
    text.parse().map_err(str::to_owned)
}

/// Transfer that the user requests on the command line, written `gpu0:gpu1:64M`.
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

/// Parses the name of a device, such as `gpu0` or `host0`.
pub fn device(text: &str) -> Result<DeviceId, String> {
    // Device numbers in the C ABI are signed 32-bit integers, so numbers from 2^30 are rejected.
    let number = |digits: &str| digits.parse::<u32>().ok().filter(|&n| n < 1 << 30);
    let gpu = text.strip_prefix("gpu").and_then(number).map(DeviceId::gpu);
    gpu.or_else(|| text.strip_prefix("host").and_then(number).map(DeviceId::host))
        .ok_or_else(|| format!("{text}: must be a device: gpu0, gpu1, … or host0, host1, …"))
}

/// Returns the planner's description of a transfer between these devices. Host memory is pageable if `pageable` is true, and pinned if it
/// is false.
pub fn shape(src_device: DeviceId, dst_device: DeviceId, bytes: u64, pageable: bool) -> Shape {
    let kind = |device: DeviceId| match (device.is_host(), pageable) {
        (false, _) => MemoryKind::Device,
        (true, false) => MemoryKind::Pinned,
        (true, true) => MemoryKind::Pageable,
    };
    Shape { source: 0, dst_device, src_device, dst_kind: kind(dst_device), src_kind: kind(src_device), bytes }
}

/// Parses a size in bytes, such as `64M`.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| format!("{text}: {error}"))
}

/// Writes `text` to a file that the user has named. The error names the file.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| {
        let advice = match error.kind() {
            std::io::ErrorKind::NotFound => "; create the folder first",
            std::io::ErrorKind::PermissionDenied => "; choose a place that you may write to",
            std::io::ErrorKind::IsADirectory => "; name a file in it",
            _ => "",
        };
        format!("cannot write {}: {error}{advice}", path.display()).into()
    })
}
