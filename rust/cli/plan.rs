//! Implements `mpgpu plan`, which shows the plan for given transfers.

use crate::arguments::{Failure, StagedPaths, Transfer, engine, shape, size};
use crate::machine;
use crate::text::print_json;
use clap::Args;
use mpgpu_contexts::PlanOptions;
use mpgpu_core::plan::{Engine, Options, Plan, Shape, plan};
use mpgpu_core::topology::Machine;
use std::collections::BTreeMap;

#[derive(Args)]
pub struct PlanArguments {
    #[command(flatten)]
    pub what: Request,
    /// Print JSON, with bytes, seconds, and the device numbers of the C API
    #[arg(long)]
    pub json: bool,
}

/// Transfers, and options for planning them.
#[derive(Args)]
pub struct Request {
    /// SOURCE:DESTINATION:BYTES, as in gpu0:gpu1:64M. A device is gpuN or hostN (memory of NUMA domain N); bytes may end in K, M, G or T
    /// (multiples of 1024)
    #[arg(required = true, value_name = "TRANSFER")]
    pub transfers: Vec<Transfer>,
    /// Engine (how copies are issued) to plan for
    #[arg(long, value_parser = engine())]
    pub engine: Option<Engine>,
    /// Maximum number of paths for one transfer; with 1, each transfer is one direct copy
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_paths: Option<u32>,
    /// Do not copy between GPUs through host memory
    #[arg(long)]
    pub no_host_path: bool,
    #[command(flatten)]
    pub staged: StagedPaths,
    /// Size below which a transfer uses one path
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub min_bytes: Option<u64>,
    /// Plan for pageable host memory, which a GPU cannot access directly
    #[arg(long)]
    pub pageable: bool,
    /// Treat transfers of equal size from one device as a broadcast of the same bytes, so that a destination may forward them
    #[arg(long)]
    pub one_source: bool,
    /// Machine to plan for: a preset's name, a topology file, `discovered` (by the driver) or `probed` (the stored probe); by default the
    /// value of MPGPU_TOPOLOGY, else this machine, else hgx-h200
    #[arg(long)]
    pub topology: Option<String>,
}

impl Request {
    /// Returns the options for a plan of a context. The context takes the values of missing options from the environment.
    pub fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            engine: self.engine,
            max_paths: self.max_paths,
            host_path: self.no_host_path.then_some(false),
            chunk_bytes: self.staged.chunk_bytes,
            relay_chunks: self.staged.relay_chunks,
            host_chunks: self.staged.host_chunks,
            min_bytes: self.min_bytes,
            staging_bytes: self.staged.staging_bytes,
            relays: self.staged.relay_gpus,
            adapt: None,
        }
    }

    /// Returns the options for a direct call of the planner. Environment variables have no influence.
    pub fn options(&self) -> Options {
        let default = self.staged.options();
        Options {
            engine: self.engine.unwrap_or(default.engine),
            max_paths: self.max_paths.unwrap_or(default.max_paths),
            host_path: !self.no_host_path,
            min_bytes: self.min_bytes,
            ..default
        }
    }

    /// Returns the planner's description of each requested transfer.
    pub fn batch(&self) -> Vec<Shape> {
        let mut first: BTreeMap<_, u32> = BTreeMap::new();
        let mut source = |at: u32, t: &Transfer| if self.one_source { *first.entry((t.src, t.bytes)).or_insert(at + 1) } else { 0 };
        (0..).zip(&self.transfers).map(|(at, t)| Shape { source: source(at, t), ..shape(t.src, t.dst, t.bytes, self.pageable) }).collect()
    }

    /// Returns the index of the first transfer that reads the same source as the transfer with index `at`.
    pub fn source_of(&self, at: usize) -> usize {
        let of = &self.transfers[at];
        let same = |other: &Transfer| (other.src, other.bytes) == (of.src, of.bytes);
        self.transfers.iter().position(same).filter(|_| self.one_source).unwrap_or(at)
    }

    /// Plans the requested transfers. Returns the selected machine and the plan.
    pub fn plan(&self) -> Result<(Machine, Plan), Failure> {
        let machine = machine::in_force(self.topology.as_deref())?.machine;
        let plan = plan(&machine, &self.batch(), &self.options())?;
        Ok((machine, plan))
    }
}

/// Runs the subcommand. Returns the plan as text. With `--json`, prints the plan directly and returns an empty text.
pub fn run(arguments: &PlanArguments) -> Result<String, Failure> {
    let (machine, plan) = arguments.what.plan()?;
    if arguments.json {
        print_json(&plan.json(&machine))?;
        return Ok(String::new());
    }
    Ok(plan.describe(&machine))
}
