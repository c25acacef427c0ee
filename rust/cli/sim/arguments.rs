//! Command-line arguments of `mpgpu sim`.

use crate::arguments::{StagedPaths, device, engine, named, size};
use clap::Args;
use mpgpu_core::plan::Engine;
use mpgpu_core::topology::DeviceId;
use std::str::FromStr;

#[derive(Args)]
pub struct SimArguments {
    /// SOURCE:DESTINATION:BYTES as for `mpgpu plan`, or SOURCE:DESTINATION with --sizes
    #[arg(required = true)]
    pub transfers: Vec<Pair>,
    /// Machine to simulate: a preset's name, a topology file, `discovered` (by the driver) or `probed` (the stored probe); by default the
    /// value of MPGPU_TOPOLOGY, else this machine, else hgx-h200
    #[arg(long)]
    pub topology: Option<String>,
    /// Bytes of each transfer: 1M,64M, or 1M..512M for every power of two between
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    pub sizes: Vec<Sizes>,
    /// Engines (how copies are issued) to compare
    #[arg(long, value_parser = engine(), value_delimiter = ',', default_value = "auto")]
    pub engine: Vec<Engine>,
    /// Maximum numbers of paths of one transfer to compare, one table column for each value; by default 1, and the number that the model
    /// chooses
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub max_paths: Vec<u32>,
    /// Allow (on) or forbid (off) copies between GPUs to pass through host memory; `on,off` compares both
    #[arg(long, value_parser = named([("on", true), ("off", false)]), value_delimiter = ',', default_value = "on")]
    pub host: Vec<bool>,
    /// Numbers of executions in flight to compare. Each execution has its own stream and buffers; all complete before the next round begins
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub window: Vec<u32>,
    /// Plan each transfer without knowledge of the others, and issue it from its own process, like one rank for each GPU
    #[arg(long)]
    pub apart: bool,
    #[command(flatten)]
    pub staged: StagedPaths,
    /// Simulate a kernel on each GPU before the copies of each execution. The kernel moves TIMES times the number of bytes that the GPU
    /// sends, at RATE 10^9 bytes/s, as in 8@790. The table then gives the time of the kernel and the copies
    #[arg(long, value_name = "TIMES@RATE", conflicts_with = "adapt")]
    pub kernel: Option<Kernel>,
    /// Simulate host memory that is pageable (not pinned)
    #[arg(long)]
    pub pageable: bool,
    /// Show how busy each link and shared resource is in the last case of the table (last row, last column)
    #[arg(long)]
    pub resources: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub adapt: AdaptArguments,
}

/// Options for plans that choose their variant by measured times.
#[derive(Args)]
pub struct AdaptArguments {
    /// Simulate plans that measure several variants (for example all paths, or direct copies only) and use the fastest: one plan for all
    /// transfers, or with --apart one plan for each transfer. With --window N, N copies of each plan choose separately
    #[arg(long, conflicts_with_all = ["sizes", "max_paths", "engine", "host", "resources"])]
    pub adapt: bool,
    /// Simulate a machine whose links differ from the topology: multiply the bandwidth of NAME (`nvlink`, `pcie`, `host`, or a resource
    /// that --resources lists) by FACTOR
    #[arg(long, value_name = "NAME=FACTOR", requires = "adapt")]
    pub real: Vec<Factor>,
    /// Simulate another program that uses the links of NAME: multiply their bandwidth by FACTOR from execution FROM of the first plan to
    /// execution TO, as in host=0.4@2000..4000
    #[arg(long, value_name = "NAME=FACTOR@FROM..TO", requires = "adapt")]
    pub tenant: Vec<Visit>,
    /// Number of executions of the first plan to simulate
    #[arg(long, default_value_t = 10_000, requires = "adapt", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub executions: u32,
    /// Number of earlier executions that are still queued when the program enqueues the next one. Their times are not known yet when the
    /// variant of the next execution is chosen. With 0, the program waits for each execution
    #[arg(long, default_value_t = 2, requires = "adapt", value_parser = clap::value_parser!(u32).range(..=100_000))]
    pub ahead: u32,
    /// Random variation of the simulated time of an execution: its standard deviation divided by its mean
    #[arg(long, default_value_t = 0.02, requires = "adapt", value_parser = noise)]
    pub noise: f64,
    /// Seed of the random numbers for the noise and for the choice of variants
    #[arg(long, default_value_t = 1, requires = "adapt")]
    pub seed: u64,
    /// Write a chart (SVG) of the variant that each plan uses over time to this file
    #[arg(long, value_name = "FILE", requires = "adapt")]
    pub svg: Option<std::path::PathBuf>,
}

/// Model of a compute kernel. Its time is proportional to the number of bytes that it reads and writes.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Number of bytes that the kernel reads and writes, divided by the number of bytes that its GPU sends.
    pub times: f64,
    /// Rate in bytes/s at which the kernel reads and writes memory.
    pub rate: f64,
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let positive = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0 && number.is_finite());
        let parts = text.split_once('@').and_then(|(times, rate)| Some((positive(times)?, positive(rate)?)));
        let (times, rate) = parts.ok_or("must be TIMES@RATE, both more than 0, as in 8@790")?;
        Ok(Kernel { times, rate: rate * 1e9 })
    }
}

/// Factor by which the capacity of a resource is multiplied, with the name of the resource, written `host=0.3`.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    pub name: String,
    pub factor: f64,
}

impl FromStr for Factor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once('=').and_then(|(name, factor)| Some((name, factor.parse::<f64>().ok()?)));
        match parts {
            Some((name, factor)) if (0.01..=100.0).contains(&factor) => Ok(Factor { name: name.into(), factor }),
            Some((_, factor)) => Err(format!("{factor}: must be from 0.01 to 100 times the capacity")),
            None => Err("must be NAME=FACTOR, as in host=0.3".into()),
        }
    }
}

/// Factor by which the capacity of a resource is multiplied during a range of executions, with the name of the resource, written
/// `host=0.4@2000..4000`.
#[derive(Clone, Debug, PartialEq)]
pub struct Visit {
    pub leaves: Factor,
    pub during: std::ops::Range<u64>,
}

impl FromStr for Visit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once('@').and_then(|(leaves, during)| {
            let (from, to) = during.split_once("..")?;
            Some((leaves, from.parse().ok()?, to.parse().ok()?))
        });
        let (leaves, from, to) = parts.ok_or("must be NAME=FACTOR@FROM..TO, as in host=0.4@2000..4000")?;
        if from >= to {
            return Err(format!("{from}..{to}: the first execution must be before the last one"));
        }
        Ok(Visit { leaves: leaves.parse()?, during: from..to })
    }
}

fn noise(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|noise| (0.0..=0.5).contains(noise)).ok_or_else(|| "must be from 0 to 0.5".into())
}

impl SimArguments {
    pub const EXAMPLES: &str = "Examples:\n  \
        mpgpu sim --topology beluga gpu0:gpu1 --sizes 1M..512M --max-paths 1,2,3\n  \
        mpgpu sim --topology narval gpu0:gpu1:64M --engine stream,graph --window 1,4,16\n  \
        mpgpu sim --topology narval gpu0:gpu1 gpu1:gpu0 --apart --host on,off --sizes 4M..256M\n  \
        mpgpu sim --topology hgx-h200 host0:gpu0:1G --max-paths 1,2,4,8 --resources\n  \
        mpgpu sim --topology beluga gpu0:gpu1 gpu1:gpu2 gpu2:gpu3 gpu3:gpu0 --sizes 1M..256M --max-paths 1,2,3 --kernel 8@790\n  \
        mpgpu sim --adapt gpu0:gpu1:256M gpu1:gpu0:256M --apart --real host=0.5 --tenant host=0.4@2000..4000 --svg chosen.svg\n\n\
        Each cell of the table is the rate of all transfers together in the steady state (10^9 bytes/s), and its ratio to the first column. \
        All times are modelled; docs/reference/simulator.md describes the model and its errors.";
}

/// Source and destination of a transfer, written `gpu0:gpu1:64M`. The size is omitted if `--sizes` gives it.
#[derive(Copy, Clone)]
pub struct Pair {
    pub src: DeviceId,
    pub dst: DeviceId,
    pub bytes: Option<u64>,
}

impl FromStr for Pair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(src), Some(dst), bytes, None) => {
                Ok(Pair { src: device(src)?, dst: device(dst)?, bytes: bytes.map(positive).transpose()? })
            }
            _ => Err("must be SOURCE:DESTINATION:BYTES, as in gpu0:gpu1:64M, or SOURCE:DESTINATION with --sizes".into()),
        }
    }
}

/// List of sizes in bytes: a single size, or all powers of two between two sizes.
#[derive(Clone)]
pub struct Sizes(pub Vec<u64>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((least, most)) = text.split_once("..") else { return Ok(Sizes(vec![positive(text)?])) };
        let (least, most) = (positive(least)?, positive(most)?);
        if least > most {
            return Err(format!("{text}: the first size must not exceed the second"));
        }
        Ok(Sizes(std::iter::successors(Some(least), |bytes| bytes.checked_mul(2)).take_while(|bytes| *bytes <= most).collect()))
    }
}

fn positive(text: &str) -> Result<u64, String> {
    match size(text)? {
        0 => Err("0: a transfer to simulate must have 1 byte or more".into()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_sizes_is_every_power_of_two_between() {
        let sizes = |text: &str| text.parse::<Sizes>().map(|sizes| sizes.0);
        assert_eq!(sizes("1M..8M"), Ok(vec![1 << 20, 2 << 20, 4 << 20, 8 << 20]));
        assert_eq!(sizes("3K..7K"), Ok(vec![3 << 10, 6 << 10]));
        assert_eq!(sizes("64M"), Ok(vec![64 << 20]));
        for wrong in ["8M..1M", "0", "1M..", "1MB", "0..1M"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn factors_and_tenants_are_read_and_refused() {
        let factor = Factor { name: "gpu0>gpu1".into(), factor: 0.5 };
        assert_eq!("gpu0>gpu1=0.5".parse(), Ok(factor.clone()));
        assert_eq!("gpu0>gpu1=0.5@5..9".parse(), Ok(Visit { leaves: factor, during: 5..9 }));
        assert!(["host", "host=", "host=0", "host=nan", "host=-1"].iter().all(|text| text.parse::<Factor>().is_err()));
        assert!(["host=1", "host=1@5", "host=1@9..5", "host=1@-1..5"].iter().all(|text| text.parse::<Visit>().is_err()));
    }

    #[test]
    fn a_pair_may_leave_its_size_to_the_sweep() {
        let pair: Pair = "gpu0:host1".parse().expect("a pair");
        assert_eq!((pair.src, pair.dst, pair.bytes), (DeviceId::gpu(0), DeviceId::host(1), None));
        assert!("gpu0".parse::<Pair>().is_err() && "gpu0:gpu1:1M:2".parse::<Pair>().is_err());
        assert!("gpu0:gpu1:0".parse::<Pair>().is_err());
    }
}
