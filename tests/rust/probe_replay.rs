//! The probe on readings of real machines: eight sets of four H200 as they were read, modelled anew by the code as it is.
//!
//! `readings/*.txt` hold what `mpgpu probe --check --json` wrote, one reading to a line. A set of copies that is in no reading gets what the
//! readings of sets like it say; those are few, because the same times lead to the same questions as far as the code is the same.

use mpgpu::backend::MemoryKind;
use mpgpu::model::{Flow, PathModel, finish};
use mpgpu::plan::{self, Mechanism, Options, Shape};
use mpgpu::topology::probe::{Group, Hop, Pipeline, ProbeOptions, Probed, Rig, Timing, Verdict, Work, probe};
use mpgpu::topology::{self, DeviceId, Machine, NodeKind};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;

const MACHINES: [(&str, &str); 8] = [
    ("first", include_str!("readings/h200x4-first.txt")),
    ("second", include_str!("readings/h200x4-second.txt")),
    ("third", include_str!("readings/h200x4-third.txt")),
    ("fourth", include_str!("readings/h200x4-fourth.txt")),
    ("fifth", include_str!("readings/h200x4-fifth.txt")),
    ("sixth", include_str!("readings/h200x4-sixth.txt")),
    ("seventh", include_str!("readings/h200x4-seventh.txt")),
    ("eighth", include_str!("readings/h200x4-eighth.txt")),
];

type Ends = (DeviceId, DeviceId);

/// What was copied: ends and middle of each copy, and whether by one lane so often.
type Key = (Vec<(Ends, Option<DeviceId>)>, Option<(u8, u32)>);

/// A reading: bytes of each copy in the order of its key, chunks of the pipelines, seconds of each run.
#[derive(Clone, Debug)]
struct Read {
    bytes: Vec<u64>,
    chunks: Vec<u32>,
    seconds: Vec<f64>,
    issue: f64,
}

/// A plan of the check: its paths, and what it took.
struct Check {
    case: String,
    bytes: u64,
    paths: Vec<(Ends, Option<DeviceId>, u64, u32)>,
    measured: f64,
}

struct Replay {
    readings: BTreeMap<Key, Vec<Read>>,
    checks: Vec<Check>,
    /// How often each key was asked for.
    asked: BTreeMap<Key, usize>,
    /// Sets that no reading has.
    unknown: u32,
    all: u32,
}

fn device(text: &str) -> DeviceId {
    if text == "h" { DeviceId::HOST } else { DeviceId::gpu(text.parse().expect("a number")) }
}

/// `0>1:77` or `0>h>1:77:3`.
fn path(text: &str) -> (Ends, Option<DeviceId>, Vec<&str>) {
    let mut parts = text.split(':');
    let way: Vec<DeviceId> = parts.next().expect("a way").split('>').map(device).collect();
    ((way[0], way[way.len() - 1]), (way.len() == 3).then(|| way[1]), parts.collect())
}

fn number(mechanism: Mechanism) -> u8 {
    match mechanism {
        Mechanism::Copy => 0,
        Mechanism::Batch => 1,
        Mechanism::Kernel => 2,
    }
}

fn sorted(copies: Vec<(Ends, Option<DeviceId>, u64, u32)>, many: Option<(u8, u32)>) -> (Key, Vec<u64>, Vec<u32>) {
    let mut copies = copies;
    copies.sort_by_key(|copy| (copy.0, copy.1));
    let key = (copies.iter().map(|copy| (copy.0, copy.1)).collect(), many);
    (key, copies.iter().map(|copy| copy.2).collect(), copies.iter().map(|copy| copy.3).collect())
}

impl Replay {
    fn new(text: &str) -> Replay {
        let mut replay = Replay { readings: BTreeMap::new(), checks: Vec::new(), asked: BTreeMap::new(), unknown: 0, all: 0 };
        for line in text.lines() {
            let fields: Vec<&str> = line.split('|').collect();
            let seconds = |text: &str| text.parse::<f64>().expect("microseconds") * 1e-6;
            if fields[0] == "check" {
                let of = |text| {
                    let (ends, via, rest) = path(text);
                    (ends, via, rest[0].parse().expect("bytes"), rest[1].parse().expect("chunks"))
                };
                let paths = fields[3].split(' ').map(of).collect();
                let bytes = fields[2].parse().expect("bytes");
                replay.checks.push(Check { case: fields[1].into(), bytes, paths, measured: seconds(fields[4]) });
                continue;
            }
            let of = |text: &str| {
                let (ends, via, rest) = path(text);
                let bytes = match rest[0].strip_suffix('b') {
                    Some(bytes) => bytes.parse().expect("bytes"),
                    None => rest[0].parse::<u64>().expect("pages") * 4096,
                };
                (ends, via, bytes, rest.get(1).map_or(1, |chunks| chunks.parse().expect("chunks")))
            };
            let copies = fields[1].split(' ').chain(fields[2].split(' ')).filter(|text| !text.is_empty()).map(of).collect();
            let many = fields[0].split_once(' ').map(|(mechanism, count)| {
                let known = [("copy", Mechanism::Copy), ("batch", Mechanism::Batch), ("kernel", Mechanism::Kernel)];
                let found = known.iter().find(|known| known.0 == mechanism).expect("a mechanism").1;
                (number(found), count.parse().expect("a count"))
            });
            let (key, bytes, chunks) = sorted(copies, many);
            let runs = fields[3].split(' ').map(seconds).collect();
            replay.readings.entry(key).or_default().push(Read { bytes, chunks, seconds: runs, issue: seconds(fields[4]) });
        }
        replay
    }

    /// The reading of this set that is nearest in bytes and chunks, scaled to these; of several as near by turns.
    fn near(&mut self, key: &Key, bytes: &[u64], chunks: &[u32]) -> Option<Read> {
        const START: f64 = 7e-6;
        let of_key = self.readings.get(key)?;
        let total = |bytes: &[u64]| bytes.iter().sum::<u64>() as f64;
        let apart = |read: &Read| {
            let each = read.bytes.iter().zip(bytes).map(|(a, b)| (*a as f64 / *b as f64).ln().abs()).fold(0.0, f64::max);
            each + if read.chunks == chunks { 0.0 } else { 10.0 }
        };
        let least = of_key.iter().map(apart).fold(f64::INFINITY, f64::min);
        let near: Vec<&Read> = of_key.iter().filter(|read| apart(read) < least + 0.02).collect();
        let turn = self.asked.entry(key.clone()).or_default();
        let read = near[*turn % near.len()];
        *turn += 1;
        let factor = total(bytes) / total(&read.bytes);
        let scaled = |seconds: &f64| if *seconds < 2.0 * START { *seconds } else { START + (seconds - START) * factor };
        Some(Read { seconds: read.seconds.iter().map(scaled).collect(), ..read.clone() })
    }

    /// For sets that were not read: what these machines share, by the rule of the model. Ports of 396 GB/s, 101 GB/s both ways for each GPU,
    /// and for all GPUs what all of them read and wrote.
    fn guess(&self, copies: &[(Ends, Option<DeviceId>, u64, u32)]) -> f64 {
        let gpus = (0..4).map(DeviceId::gpu);
        let sum = |wanted: &dyn Fn(DeviceId, DeviceId) -> bool| {
            copies.iter().filter(|copy| wanted(copy.0.0, copy.0.1)).map(|copy| copy.2 as f64).sum::<f64>()
        };
        let all = |hops: &[Ends]| {
            let key = (hops.iter().map(|ends| (*ends, None)).collect::<Vec<_>>(), None);
            let of_key = self.readings.get(&key).map(Vec::as_slice).unwrap_or_default();
            let rates = of_key.iter().flat_map(|read| read.seconds.iter().map(|s| read.bytes.iter().sum::<u64>() as f64 / s));
            let mut rates: Vec<f64> = rates.collect();
            rates.sort_by(f64::total_cmp);
            rates.get(rates.len() / 2).copied().unwrap_or(180e9)
        };
        let host = DeviceId::HOST;
        let out: Vec<Ends> = (0..4).map(|gpu| (host, DeviceId::gpu(gpu))).collect();
        let into: Vec<Ends> = (0..4).map(|gpu| (DeviceId::gpu(gpu), host)).collect();
        let mut both: Vec<Ends> = out.iter().chain(&into).copied().collect();
        both.sort_unstable();
        let mut seconds = [
            sum(&|from, _| from.is_host()) / all(&out),
            sum(&|_, to| to.is_host()) / all(&into),
            sum(&|from, to| from.is_host() || to.is_host()) / all(&both),
        ]
        .into_iter()
        .fold(0.0, f64::max);
        for gpu in gpus {
            for (load, capacity) in [
                (sum(&|from, to| from == gpu && !to.is_host()), 396e9),
                (sum(&|from, to| to == gpu && !from.is_host()), 396e9),
                (sum(&|from, to| from == gpu && to.is_host()), 55.5e9),
                (sum(&|from, to| to == gpu && from.is_host()), 55.5e9),
                (sum(&|from, to| (to == gpu && from.is_host()) || (from == gpu && to.is_host())), 101e9),
            ] {
                seconds = seconds.max(load / capacity);
            }
        }
        7e-6 + seconds
    }
}

impl Rig for Replay {
    type Error = Infallible;

    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Infallible> {
        let plain = |hop: &Hop| ((hop.from, hop.to), None, hop.bytes, 1);
        let staged = |pipeline: &Pipeline| ((pipeline.hop.from, pipeline.hop.to), Some(pipeline.via), pipeline.hop.bytes, pipeline.chunks);
        let (copies, many): (Vec<_>, _) = match *work {
            Work::Together(hops) => (hops.iter().map(plain).collect(), None),
            Work::Many { hop, count, mechanism } => (vec![plain(&hop)], Some((number(mechanism), count))),
            Work::Paths { direct, staged: pipelines } => (direct.iter().map(plain).chain(pipelines.iter().map(staged)).collect(), None),
        };
        let (key, bytes, chunks) = sorted(copies.clone(), many);
        self.all += 1;
        let read = self.near(&key, &bytes, &chunks).unwrap_or_else(|| {
            self.unknown += 1;
            if copies.iter().any(|copy| copy.1.is_some()) && std::env::var_os("REPLAY_SHOW").is_some() {
                eprintln!("unknown {copies:?}");
            }
            let seconds = match work {
                Work::Paths { direct, staged } => known(direct, staged),
                _ => self.guess(&copies),
            };
            Read { bytes, chunks, seconds: vec![seconds; 3], issue: 10e-6 }
        });
        Ok((0..repetitions as usize).map(|run| Timing { issue: read.issue, total: read.seconds[run % read.seconds.len()] }).collect())
    }

    fn check(&mut self, _: DeviceId, _: DeviceId) -> Result<Verdict, Infallible> {
        Ok(Verdict::Intact)
    }

    fn room(&self) -> u64 {
        1 << 30
    }
}

/// Pipelines that were not read on this machine, as they were on the others: 9 us for a chunk through the host, 4 us through a GPU, 90 GB/s of two in
/// both directions of a link, 210 of all in host memory.
fn known(direct: &[Hop], staged: &[Pipeline]) -> f64 {
    let seconds = |pipeline: &Pipeline| {
        let (bytes, chunks) = (pipeline.hop.bytes as f64, f64::from(pipeline.chunks));
        let (other, chunk) = if pipeline.via.is_host() { (55.5e9, 9e-6) } else { (396e9, 4e-6) };
        12e-6 + bytes / 55.5e9 + bytes / chunks / other + (chunks + 1.0) * chunk
    };
    let rate = |hop: &Hop| if hop.from.is_host() || hop.to.is_host() { 55.5e9 } else { 396e9 };
    let through_host = || staged.iter().filter(|pipeline| pipeline.via.is_host()).map(|pipeline| pipeline.hop.bytes as f64);
    let crossing = if through_host().count() > 1 { through_host().fold(0.0, f64::max) / 45e9 } else { 0.0 };
    let memory = 2.0 * through_host().sum::<f64>() / 210e9;
    let plain = direct.iter().map(|hop| 12e-6 + hop.bytes as f64 / rate(hop));
    plain.chain(staged.iter().map(seconds)).fold(crossing.max(memory), f64::max)
}

/// Four GPUs and a host, every two joined, and nothing known of how fast.
fn blank() -> Machine {
    let mut topology = topology::preset("hgx-h100-4").expect("listed");
    topology.links.iter_mut().for_each(|link| (link.bandwidth, link.latency) = (1e9, 0.0));
    topology.shared.clear();
    topology.costs = topology::Costs { chunk: 9e-6, relay_chunk: 9e-6, join: 7e-6, issue: 2.7e-6, ..topology::Costs::default() };
    Machine::new(topology).expect("well formed")
}

fn replayed(text: &str) -> (Replay, Probed) {
    let mut replay = Replay::new(text);
    let Ok(found) = probe(&blank(), &mut replay, &ProbeOptions::default(), &mut |_| {});
    (replay, found)
}

/// What the plan of a check is predicted to take.
fn predicted(machine: &Machine, check: &Check) -> f64 {
    let kind = |device: DeviceId| if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
    if check.paths.iter().all(|path| path.1.is_none()) {
        let shape = |&((src, dst), _, bytes, _): &(Ends, Option<DeviceId>, u64, u32)| Shape {
            src_device: src,
            dst_device: dst,
            src_kind: kind(src),
            dst_kind: kind(dst),
            bytes,
        };
        let batch: Vec<Shape> = check.paths.iter().map(shape).collect();
        let options = Options { max_paths: 1, host_path: false, ..Options::default() };
        return plan::plan(machine, &batch, &options).expect("a plan").predicted;
    }
    let costs = machine.costs();
    let route = |from, to| machine.route(from, to).expect("a hop");
    let model = |&((from, to), via, bytes, chunks): &(Ends, Option<DeviceId>, u64, u32)| match via {
        None => (PathModel::new(machine, &[route(from, to)]), bytes, 1, costs.copy),
        Some(via) => (PathModel::new(machine, &[route(from, via), route(via, to)]), bytes, chunks, costs.copy),
    };
    let paths: Vec<_> = check.paths.iter().map(model).collect();
    let flow = |(path, bytes, chunks, head): &(PathModel, u64, u32, f64)| -> (u64, u32, f64) {
        let _ = path;
        (*bytes, *chunks, *head)
    };
    let flows = paths.iter().map(|one| {
        let (bytes, chunks, head) = flow(one);
        Flow { path: &one.0, bytes, chunks, head, efficiency: 1.0 }
    });
    finish(machine, flows, 1)
}

/// |predicted / measured - 1| of the plans from 16 MiB up, but for all-to-alls, which planners of the time issued otherwise.
fn errors(machine: &Machine, replay: &Replay) -> Vec<(f64, String)> {
    let checks = replay.checks.iter().filter(|check| check.bytes >= 16 << 20 && check.case != "all to all");
    let error = |check: &Check| {
        let error = predicted(machine, check) / check.measured - 1.0;
        (error.abs(), format!("{} {} MiB {:+.1} %", check.case, check.bytes >> 20, error * 100.0))
    };
    let mut errors: Vec<_> = checks.map(error).collect();
    errors.sort_by(|a, b| a.0.total_cmp(&b.0));
    errors
}

#[test]
fn four_h200_as_they_were_read_are_a_switch_with_ports_and_their_plans_are_predicted() {
    for (name, text) in MACHINES {
        let (replay, found) = replayed(text);
        println!("== {name}: {} of {} not read, {:?}\n{}", replay.unknown, replay.all, found.residuals, found.topology.to_toml());
        let switches = found.topology.nodes.iter().filter(|node| node.kind == NodeKind::Switch { peer: true }).count();
        assert_eq!(switches, 1, "{name}: {:?}", found.groups);
        // Reads at once: 146 to 154 GB/s of three and 161 of four on the fifth set, 131 to 153 and 157 to 165 on the sixth.
        let reads = |count: usize| {
            let is_it = move |group: &&Group| group.hops.len() == count && group.hops.iter().all(|(from, _)| from.is_host());
            found.groups.iter().filter(is_it).map(|group| group.capacity).collect::<Vec<f64>>()
        };
        for (set, three, four) in [("fifth", 146e9..154e9, 150e9..166e9), ("sixth", 131e9..150e9, 155e9..166e9)] {
            let are =
                |count, number, within: Range<f64>| reads(count).len() == number && reads(count).iter().all(|one| within.contains(one));
            assert!(name != set || are(3, 4, three) && are(4, 1, four), "{name}: {:?}", found.groups);
        }
        let costs = &found.topology.costs;
        // The copy that `join` is held against was not read by these probes: it is scaled from longer ones.
        let relay = if name == "eighth" { 6e-6..7e-6 } else { 3e-6..5.5e-6 };
        assert!((8e-6..10e-6).contains(&costs.chunk) && relay.contains(&costs.relay_chunk), "{name}: {costs:?}");
        // Opposite pipelines, whose hand-overs are not the links'; all in a ring, whose staging the cache keeps. The ring was read of the eighth alone.
        for group in &found.groups {
            let [is_link, is_all] =
                [2, 8].map(|hops| group.hops.len() == hops && group.hops.iter().all(|(a, b)| a.is_host() || b.is_host()));
            let staged = group.staged.unwrap_or(group.capacity);
            assert!(!is_link || (82e9..112e9).contains(&staged), "{name}: {group:?}");
            assert!(
                !is_all || name != "eighth" || (150e9..157e9).contains(&group.capacity) && (240e9..260e9).contains(&staged),
                "{group:?}"
            );
        }
        let machine = Machine::new(found.topology).expect("well formed");
        let errors = errors(&machine, &replay);
        println!("{errors:#?}");
        let (median, worst) = (&errors[errors.len() / 2], &errors[errors.len() - 1]);
        // From host memory of the second set the check read a sixth less than the probe had, which had one buffer.
        let most = match name {
            "second" => 0.25,
            "sixth" => 0.10,
            // Others used the host: what its memory gave changed by 10 % from second to second.
            "seventh" => 0.22,
            _ => 0.16,
        };
        assert!(median.0 <= 0.04 && worst.0 <= most, "{name}: {median:?} {worst:?}");
    }
}
