//! What several subcommands read from the command line.

use clap::ValueEnum;
use mpgpu::engine::BackendChoice;
use mpgpu::plan::Engine;
use mpgpu::topology::DeviceId;
use mpgpu::units::parse_size;
use std::error::Error;
use std::path::Path;
use std::str::FromStr;

/// Why a subcommand stopped.
pub type Failure = Box<dyn Error>;

/// `--backend`.
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

/// `--engine`.
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

/// What is to be copied, `gpu0:gpu1:64M`.
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

/// A device as people write it, `gpu0`.
pub fn device(text: &str) -> Result<DeviceId, String> {
    // The C ABI's numbers are 32-bit signed.
    let number = |digits: &str| digits.parse::<u32>().ok().filter(|&n| n < 1 << 30);
    let gpu = text.strip_prefix("gpu").and_then(number).map(DeviceId::gpu);
    gpu.or_else(|| text.strip_prefix("host").and_then(number).map(DeviceId::host))
        .ok_or_else(|| format!("{text}: a device is gpu0, gpu1, … or host0, host1, …"))
}

/// A size as people write it, `64M`.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|error| format!("{text}: {error}"))
}

/// Writes a file that was asked for by name.
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
