//! Implements `mpgpu tune partitions`, which shows the trials that a program has made with its own kernels for transfers in partitions.

use crate::arguments::{Failure, write_file};
use crate::draw::{HeatMap, heat};
use crate::text::columns;
use clap::Args;
use mpgpu_core::units::{size, time};
use mpgpu_measure::tune::{self, PartitionMover, PartitionTrial, PartitionTuning};
use std::collections::BTreeSet;
use std::path::PathBuf;

pub const EXAMPLES: &str = "Examples:\n  \
    MPGPU_TUNING_FILE=tuning.toml ./app               a program that tunes partitions with its kernels\n  \
    mpgpu tune partitions tuning.toml                 prints its trials, and the time of an execution in each trial\n  \
    mpgpu tune partitions tuning.toml --svg tried.svg chart: number of partitions and agent, speed-up as colour\n\n\
    Speed-ups are relative to one partition that copy engines move after a kernel of as many blocks.";

#[derive(Args)]
pub struct PartitionsArguments {
    /// The tuning file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write a chart (SVG) of the speed-ups, as colours, to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub fn run(arguments: &PartitionsArguments) -> Result<String, Failure> {
    let file = arguments.file.display();
    let tuning = tune::read(&arguments.file).map_err(|error| format!("{file}: {error}"))?;
    let tried: Vec<Tried> = tuning.partitions.into_iter().filter(|of| !of.trials.is_empty()).map(Tried::new).collect();
    if tried.is_empty() {
        return Err(format!(
            "{file}: contains no trials; a program that tunes partitions stores its trials there if MPGPU_TUNING_FILE names the file"
        )
        .into());
    }
    let nature = if tuning.origin == tune::Origin::Cuda { "" } else { ", by CPU threads: these times do not describe GPUs" };
    let mut text = format!("{}{nature}\n", tuning.topology);
    text.extend(tried.iter().map(Tried::table));
    if let Some(svg) = &arguments.svg {
        write_file(svg, &heat(&tried.iter().map(Tried::map).collect::<Vec<_>>()))?;
        text += &format!("\nwritten: {}\n", svg.display());
    }
    Ok(text)
}

/// Trials for one batch of transfers, sorted.
struct Tried(PartitionTuning);

impl Tried {
    fn new(mut of: PartitionTuning) -> Tried {
        of.trials.sort_unstable_by_key(|trial| (trial.mover, trial.blocks, trial.count));
        Tried(of)
    }

    fn title(&self) -> String {
        format!("{} in a step (batch {})", size(self.0.bytes), self.0.shape)
    }

    /// Returns, as text, the size of one partition if the transfers are cut into `count` partitions each. The sizes are summed over all
    /// transfers.
    fn each(&self, count: u32) -> String {
        size(self.0.bytes.div_ceil(u64::from(count)))
    }

    /// Returns the speed-up of a trial compared with a trial with the same number of blocks in which copy engines moved each transfer as
    /// one partition. Returns `None` if there was no such trial.
    fn gain(&self, of: &PartitionTrial) -> Option<f64> {
        let is_bulk = |trial: &&PartitionTrial| (trial.mover, trial.count, trial.blocks) == (PartitionMover::CopyEngine, 1, of.blocks);
        self.0.trials.iter().find(is_bulk).map(|bulk| bulk.ns as f64 / of.ns.max(1) as f64)
    }

    fn varies_blocks(&self) -> bool {
        self.0.trials.iter().any(|trial| trial.blocks > 0)
    }

    fn table(&self) -> String {
        let blocks = |text: String| self.varies_blocks().then_some(text);
        let heading = ["moved by", "partitions", "of each"].map(String::from).into_iter().chain(blocks("blocks".into()));
        let mut rows: Vec<Vec<String>> = vec![heading.chain(["step", "speed-up"].map(String::from)).collect()];
        let best = self.0.trials.iter().min_by_key(|trial| trial.ns);
        for trial in &self.0.trials {
            let PartitionTrial { mover, count, blocks: number, ns } = *trial;
            let gain = self.gain(trial).map_or("-".into(), |gain| format!("{gain:.2}"));
            let mark = if Some(trial) == best { "best" } else { "" };
            let row = [name_of(mover).into(), count.to_string(), self.each(count)].into_iter().chain(blocks(number.to_string()));
            rows.push(row.chain([time(ns as f64 * 1e-9), gain, mark.into()]).collect());
        }
        let lines: String = columns(&rows, 1).map(|line| format!("  {}\n", line.trim_end())).collect();
        format!("\n{}\n{lines}", self.title())
    }

    fn map(&self) -> HeatMap {
        let counts: BTreeSet<u32> = self.0.trials.iter().map(|trial| trial.count).collect();
        let kinds: BTreeSet<(PartitionMover, u32)> = self.0.trials.iter().map(|trial| (trial.mover, trial.blocks)).collect();
        let row = |(mover, blocks): (PartitionMover, u32)| {
            let name = if blocks > 0 { format!("{}, {blocks} blocks", name_of(mover)) } else { name_of(mover).into() };
            let trial =
                |count: &u32| self.0.trials.iter().find(|trial| (trial.mover, trial.blocks, trial.count) == (mover, blocks, *count));
            (name, counts.iter().map(|count| trial(count).and_then(|trial| self.gain(trial))).collect())
        };
        HeatMap {
            title: self.title(),
            columns: counts.iter().map(|count| [count.to_string(), self.each(*count)]).collect(),
            rows: kinds.into_iter().map(row).collect(),
        }
    }
}

fn name_of(mover: PartitionMover) -> &'static str {
    match mover {
        PartitionMover::Automatic => "as steps choose",
        PartitionMover::CopyEngine => "copy engines",
        PartitionMover::Producer => "producers",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_become_a_table_and_a_picture() {
        let trial = |mover, count, blocks, us: u64| PartitionTrial { mover, count, blocks, ns: us * 1000 };
        let (engine, producer) = (PartitionMover::CopyEngine, PartitionMover::Producer);
        let of = |blocks, factor: u64| {
            [trial(engine, 1, blocks, 1360 * factor), trial(engine, 16, blocks, 850 * factor), trial(producer, 16, blocks, 763 * factor)]
        };
        let entry = |shape: &str, trials: &[PartitionTrial]| PartitionTuning {
            shape: shape.into(),
            bytes: 256 << 20,
            count: 16,
            trials: trials.to_vec(),
        };
        let tried = Tried::new(entry("00000000000000aa", &of(0, 1)));
        assert_eq!(
            tried.table(),
            "\n256.0 MiB in a step (batch 00000000000000aa)
  moved by      partitions    of each      step  speed-up
  copy engines           1  256.0 MiB   1.36 ms      1.00
  copy engines          16   16.0 MiB  850.0 us      1.60
  producers             16   16.0 MiB  763.0 us      1.78  best\n"
        );
        let varied = Tried::new(entry("00000000000000bb", &[of(64, 2), of(512, 1)].concat()));
        let table = varied.table();
        assert!(table.contains("blocks") && table.matches("1.78").count() == 2, "{table}");
        let picture = heat(&[tried.map(), varied.map()]);
        assert!(picture.contains("producers, 512 blocks") && picture.contains(">1.60<"), "{picture}");
        assert_eq!(picture.matches("class=\"e\"").count(), 3, "nothing was tried there");
        let alone = Tried::new(entry("00000000000000cc", &[trial(producer, 4, 0, 5)]));
        assert!(alone.table().contains(" -"), "{}", alone.table());
    }
}
