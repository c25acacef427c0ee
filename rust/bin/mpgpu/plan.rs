//! `mpgpu plan`: what would be done for given transfers.

use crate::arguments::{EngineName, Failure, Transfer, size};
use crate::machine;
use clap::Args;
use mpgpu::backend::MemoryKind;
use mpgpu::engine::PlanOptions;
use mpgpu::plan::{Options, Shape, plan};
use mpgpu::topology::{DeviceId, Machine};

#[derive(Args)]
pub struct PlanArguments {
    #[command(flatten)]
    pub what: Request,
    /// A preset's name, a topology file, `discovered` or `probed`; by default what MPGPU_TOPOLOGY names, else this machine, else hgx-h200
    #[arg(long)]
    pub topology: Option<String>,
    /// Print JSON: bytes, seconds, devices as the C ABI numbers them
    #[arg(long)]
    pub json: bool,
}

/// Transfers, and how to plan them.
#[derive(Args)]
pub struct Request {
    /// SOURCE:DESTINATION:BYTES, as in gpu0:gpu1:64M. A device is gpuN or hostN (memory of NUMA domain N); bytes may end in K, M, G or T
    /// (multiples of 1024)
    #[arg(required = true, value_name = "TRANSFER")]
    pub transfers: Vec<Transfer>,
    /// Executor to plan for
    #[arg(long, value_enum)]
    pub engine: Option<EngineName>,
    /// The most paths that one transfer may use; 1 gives the plain copy
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_paths: Option<u32>,
    /// Keep copies between GPUs out of host memory
    #[arg(long)]
    pub no_host_path: bool,
    /// Bytes of one chunk on staged paths, 4K or more; by default what the model finds best
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub chunk_bytes: Option<u64>,
    /// Transfers below this size take one path
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub min_bytes: Option<u64>,
    /// The most staging memory on each device
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub staging_bytes: Option<u64>,
    /// Host memory is ordinary memory, which a GPU cannot read and write by itself
    #[arg(long)]
    pub pageable: bool,
}

impl Request {
    /// For a context, which reads the environment.
    pub fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            engine: self.engine.map(Into::into),
            max_paths: self.max_paths,
            host_path: self.no_host_path.then_some(false),
            chunk_bytes: self.chunk_bytes,
            min_bytes: self.min_bytes,
            staging_bytes: self.staging_bytes,
        }
    }

    /// For the planner by itself, which does not.
    pub fn options(&self) -> Options {
        let default = Options::default();
        Options {
            engine: self.engine.map_or(default.engine, Into::into),
            max_paths: self.max_paths.unwrap_or(default.max_paths),
            host_path: !self.no_host_path,
            chunk_bytes: self.chunk_bytes,
            min_bytes: self.min_bytes,
            staging_bytes: self.staging_bytes.unwrap_or(default.staging_bytes),
            ..default
        }
    }

    /// The transfers as the planner sees them.
    pub fn batch(&self) -> Vec<Shape> {
        let kind = |device: DeviceId| match device.is_host() {
            true if self.pageable => MemoryKind::Pageable,
            true => MemoryKind::Pinned,
            false => MemoryKind::Device,
        };
        let shape =
            |t: &Transfer| Shape { dst_device: t.dst, src_device: t.src, dst_kind: kind(t.dst), src_kind: kind(t.src), bytes: t.bytes };
        self.transfers.iter().map(shape).collect()
    }

    /// The plan for a machine.
    pub fn plan(&self, machine: &Machine) -> Result<mpgpu::plan::Plan, Failure> {
        Ok(plan(machine, &self.batch(), &self.options())?)
    }
}

/// The plan as a text or as JSON.
pub fn run(arguments: &PlanArguments) -> Result<String, Failure> {
    let machine = machine::in_force(arguments.topology.as_deref())?.machine;
    let plan = arguments.what.plan(&machine)?;
    if arguments.json {
        return Ok(format!("{:#}\n", plan.to_json(&machine)));
    }
    Ok(plan.describe(&machine))
}
