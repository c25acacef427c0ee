//! `mpgpu plan`: what would be done for given transfers.

use crate::arguments::{EngineName, Transfer, size};
use clap::Args;
use mpgpu::backend::MemoryKind;
use mpgpu::plan::{Options, Shape, plan};
use mpgpu::topology::{self, DeviceId, Machine};
use std::error::Error;

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
    fn options(&self) -> Options {
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

/// The plan as a text or as JSON.
pub fn run(arguments: &PlanArguments) -> Result<String, Box<dyn Error>> {
    let machine = Machine::new(topology::load(&arguments.topology)?)?;
    let kind = |device: DeviceId| match device.is_host() {
        true if arguments.pageable => MemoryKind::Pageable,
        true => MemoryKind::Pinned,
        false => MemoryKind::Device,
    };
    let batch: Vec<Shape> = arguments
        .transfers
        .iter()
        .map(|t| Shape { dst_device: t.dst, src_device: t.src, dst_kind: kind(t.dst), src_kind: kind(t.src), bytes: t.bytes })
        .collect();
    let plan = plan(&machine, &batch, &arguments.options())?;
    if arguments.json {
        return Ok(format!("{:#}\n", plan.to_json(&machine)));
    }
    Ok(plan.describe(&machine))
}
