//! Tests tuning: the results of the search, the contents of the tuning file, and the values that contexts use.

use crate::common::{Random, config, machine_and_batch};
use mpgpu_contexts::{Config, Context, Error, PlanOptions, Transfer, Verify};
use mpgpu_core::plan::{Engine, Options, Passing, Plan, PlanError, Shape, Tuned, plan, validate};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, Machine, preset, preset_names};
use mpgpu_devices::host::HostBackend;
use mpgpu_measure::tune::{
    Advice, Campaign, Case, Class, ClassTuning, EngineTuning, Origin, PartitionMover, PartitionTrial, PartitionTuning, Pattern, Preference,
    Score, Search, Setting, Side, Simulated, SizeTuning, Trials, TunedPoint, Tuning, Verdict, digest, grid, parse, search_partitions,
    short, spread_partitions,
};
use proptest::prelude::*;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn machine(name: &str) -> Machine {
    Machine::new(preset(name).expect("a preset")).expect("valid")
}

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

fn through(plan: &Plan, of: impl Fn(DeviceId) -> bool) -> f64 {
    let paths = || plan.transfers.iter().flat_map(|t| t.paths.iter());
    let there: u64 = paths().filter(|path| path.via.is_some_and(&of)).map(|path| path.bytes).sum();
    there as f64 / paths().map(|path| path.bytes).sum::<u64>() as f64
}

// ---- effect of tuned values on a plan

#[test]
fn weights_move_bytes_between_paths_and_leave_the_sum() {
    let machine = machine("beluga");
    let batch = [shape(0, 1, 256 * MIB)];
    let with = |host_share, relay_share| {
        let options = Options { tuned: Some(Tuned { host_share, relay_share, several: false }), ..Options::default() };
        let plan = plan(&machine, &batch, &options).expect("planned");
        validate(&plan.program, options.staging_bytes).expect("valid");
        assert_eq!(plan.transfers[0].paths.iter().map(|path| path.bytes).sum::<u64>(), 256 * MIB);
        (through(&plan, DeviceId::is_host), through(&plan, |via| !via.is_host()))
    };
    let (host, relays) = with(1000, 1000);
    assert!(host > 0.05 && relays > 0.5, "{host} {relays}");
    let (less, _) = with(800, 1000);
    // This is the weighted part of the path divided by the sum of the weighted parts of all paths.
    assert!((less - 0.8 * host / (0.8 * host + 1.0 - host)).abs() < 1e-3, "{less} of {host}");
    let (_, more) = with(1000, 1300);
    assert!((more - 1.3 * relays / (1.3 * relays + 1.0 - relays)).abs() < 1e-3, "{more} of {relays}");
    let unit = Options { tuned: Some(Tuned::default()), ..Options::default() };
    assert_eq!(
        plan(&machine, &batch, &unit).expect("planned").program,
        plan(&machine, &batch, &Options::default()).expect("planned").program
    );
}

#[test]
fn measured_gains_overrule_the_models_doubt_and_a_plan_says_so() {
    // An exchange between all of four GPUs behind a switch, for which the model expects no gain of further paths over one relay.
    let base = Options { passing: Passing::Off, ..Options::default() };
    let machine = machine("hgx-h200");
    let pairs = (0..4).flat_map(|src| (0..4).map(move |dst| (src, dst))).filter(|(src, dst)| src != dst);
    let batch: Vec<Shape> = pairs.map(|(src, dst)| shape(src, dst, 64 * MIB)).collect();
    let paths = |plan: &Plan| plan.transfers.iter().map(|transfer| transfer.paths.len()).sum::<usize>();
    let model = plan(&machine, &batch, &base).expect("planned");
    assert_eq!(paths(&model), batch.len(), "{}", model.describe(&machine));
    assert!(!model.describe(&machine).contains("tuned"));
    let tuned = Some(Tuned { several: true, ..Tuned::default() });
    let plan = plan(&machine, &batch, &Options { tuned, ..base }).expect("planned");
    assert!(paths(&plan) > batch.len(), "{}", plan.describe(&machine));
    assert!(plan.describe(&machine).contains("tuned: options come from a tuning file"), "{}", plan.describe(&machine));
    assert_eq!(plan.to_json(&machine)["tuned"]["several_paths"], true);
}

#[test]
fn a_weight_out_of_range_is_refused_with_the_range() {
    let machine = machine("beluga");
    for (host_share, relay_share) in [(0, 1000), (1000, 49), (20_001, 1000)] {
        let options = Options { tuned: Some(Tuned { host_share, relay_share, several: false }), ..Options::default() };
        let error = plan(&machine, &[shape(0, 1, 8)], &options).expect_err("refused");
        assert!(matches!(error, PlanError::Weight { .. }) && error.to_string().contains("from 50 to 20000"), "{error}");
    }
}

// ---- batches to which a tuned value applies

#[test]
fn classes_tell_patterns_links_and_memories_apart() {
    let machine = machine("dgx1-v100");
    let of = |batch: &[Shape]| Class::of(&machine, batch).map(|(class, bytes)| (class.from, class.to, class.pattern, bytes));
    let gpu = |pattern, bytes| Some((Side::Gpu, Side::Gpu, pattern, bytes));
    assert_eq!(of(&[shape(0, 3, MIB)]), gpu(Pattern::Single, MIB));
    assert_eq!(of(&[shape(0, 3, MIB), shape(3, 0, MIB)]), gpu(Pattern::BothWays, MIB));
    assert_eq!(of(&[shape(0, 1, MIB), shape(1, 2, 2 * MIB), shape(2, 0, MIB)]), gpu(Pattern::Shift, 2 * MIB));
    let pairs = (0..64).map(|i| (i / 8, i % 8)).filter(|(from, to)| from != to);
    let all: Vec<Shape> = pairs.clone().map(|(from, to)| shape(from, to, MIB)).collect();
    assert_eq!(of(&all), gpu(Pattern::Exchange, MIB));
    let from_host: Vec<Shape> = (0..8).map(|to| shape(-1, to, MIB)).collect();
    // The batches are: all transfers but one; one message twice instead of another; the transfers of seven of the eight GPUs.
    let mut twice = all.clone();
    twice[0] = all[1];
    let fewer: Vec<Shape> = pairs.filter(|(from, to)| *from < 7 && *to < 7).map(|(from, to)| shape(from, to, MIB)).collect();
    for part in [&all[1..], &twice, &fewer, &[shape(0, 1, MIB), shape(0, 2, MIB)], &from_host] {
        assert_eq!(of(part), None, "{part:?}");
    }
    assert_eq!(of(&[shape(-1, 0, MIB)]), Some((Side::Host, Side::Gpu, Pattern::Single, MIB)));
    let pageable = Shape { src_kind: MemoryKind::Pageable, ..shape(-1, 0, MIB) };
    for untuned in [
        &[][..],
        &[shape(0, 0, MIB)],
        &[shape(-1, -2, MIB)],
        &[shape(0, 1, 0)],
        &[pageable],
        // The batches are: two messages between the same devices; one to a GPU and one to the host; sizes that differ too much.
        &[shape(0, 1, MIB), shape(0, 1, MIB)],
        &[shape(0, 1, MIB), shape(0, -1, MIB)],
        &[shape(0, 1, MIB), shape(1, 2, 2 * MIB + 1)],
    ] {
        assert_eq!(of(untuned), None, "{untuned:?}");
    }
    // The pairs have two NVLinks, one, and none.
    let class = |batch: &[Shape]| Class::of(&machine, batch).expect("a class").0;
    let [two, one, none] = [(0, 3), (0, 1), (0, 5)].map(|(src, dst)| class(&[shape(src, dst, MIB)]));
    assert!(!two.is_like(&one) && !one.is_like(&none) && two.is_like(&class(&[shape(7, 6, 5 * MIB)])));
    assert_eq!(none.direct, 0.0);
    assert_eq!(Case::D2d.batches(&machine, MIB).len(), 3, "a representative of each");
}

#[test]
fn every_case_has_batches_on_every_preset_that_has_the_gpus() {
    for name in preset_names() {
        let machine = machine(name);
        for case in Case::ALL {
            let batches = case.batches(&machine, MIB);
            assert!(!batches.is_empty(), "{name} {}", case.name());
            assert_eq!(Case::named(case.name()), Some(case));
        }
    }
}

// ---- the search

/// Computes the time of a plan by a formula, and counts the calls.
struct Formula<F> {
    seconds: F,
    asked: usize,
}

impl<F: FnMut(&Plan) -> f64> Score for Formula<F> {
    type Error = Infallible;

    fn seconds(&mut self, plan: &Plan) -> Result<f64, Infallible> {
        self.asked += 1;
        Ok((self.seconds)(plan))
    }

    fn least_gain(&self) -> f64 {
        0.005
    }
}

/// Returns a formula whose optimum has this fraction of data through host memory, this fraction through relays, and this chunk size. Every
/// path has a small cost.
fn planted(host: f64, relays: f64, chunk: u64) -> impl FnMut(&Plan) -> f64 {
    move |plan| {
        let off = (through(plan, DeviceId::is_host) - host).abs() * 3.0 + (through(plan, |via| !via.is_host()) - relays).abs();
        let staged = plan.transfers[0].paths.iter().filter(|path| path.via.is_some()).max_by_key(|path| path.bytes);
        let chunks = staged.map_or(0.0, |path| (path.chunk_bytes as f64 / chunk as f64).log2().abs());
        1.0 + off + 0.02 * chunks
    }
}

#[test]
fn the_short_search_finds_a_planted_optimum_by_a_tenth_of_the_grids_scores() {
    let machine = machine("beluga");
    let batch = [shape(0, 1, 256 * MIB)];
    for (host, relays, chunk) in [(0.05, 0.7, 4 * MIB), (0.12, 0.5, 256 << 10), (0.0, 0.6, MIB), (0.0, 0.0, MIB)] {
        let mut score = Formula { seconds: planted(host, relays, chunk), asked: 0 };
        let found = short(Trials::new(&machine, &batch, &Options::default(), Engine::Graph, &mut score)).expect("planned");
        let asked = score.asked;
        assert!(found.evaluations <= 90 && asked <= found.evaluations + 2, "{} scores, {asked} asked", found.evaluations);
        let (is_host, is_relayed) = (through(&found.best.plan, DeviceId::is_host), through(&found.best.plan, |via| !via.is_host()));
        assert!((is_host - host).abs() < 0.01, "through the host {is_host}, planted {host}");
        assert!((is_relayed - relays).abs() < 0.03, "through relays {is_relayed}, planted {relays}");
        assert_eq!(found.best.plan.options.engine, Engine::Graph);
        let mut score = Formula { seconds: planted(host, relays, chunk), asked: 0 };
        let whole = grid(Trials::new(&machine, &batch, &Options::default(), Engine::Graph, &mut score), |_, _| {}).expect("planned");
        assert!(whole.evaluations > 10 * found.evaluations, "{} against {}", whole.evaluations, found.evaluations);
        assert!(found.best.seconds <= whole.best.seconds * 1.02, "{} against {}", found.best.seconds, whole.best.seconds);
    }
}

#[test]
fn a_model_that_is_right_is_left_alone() {
    let machine = machine("beluga");
    let batch = [shape(0, 1, 256 * MIB)];
    // Every plan other than the model's is slower, or is faster by less than the minimum gain for which a setting is stored.
    let model = plan(&machine, &batch, &Options { engine: Engine::Stream, ..Options::default() }).expect("planned");
    for other in [1.1, 0.997] {
        let seconds = |plan: &Plan| if plan.program == model.program { 1.0 } else { other };
        let mut score = Formula { seconds, asked: 0 };
        let found = short(Trials::new(&machine, &batch, &Options::default(), Engine::Stream, &mut score)).expect("planned");
        assert_eq!(found.best.setting, Setting::default());
        assert_eq!(found.best.plan.program, model.program);
    }
}

/// Formula whose scores have random errors of up to 10 %, and whose direct comparisons consist of rounds.
struct Noisy<F> {
    seconds: F,
    random: Random,
}

impl<F: FnMut(&Plan) -> f64> Noisy<F> {
    fn once(&mut self, plan: &Plan) -> f64 {
        (self.seconds)(plan) * (1.0 + self.random.below(1000) as f64 / 10_000.0)
    }
}

impl<F: FnMut(&Plan) -> f64> Score for Noisy<F> {
    type Error = Infallible;

    fn seconds(&mut self, plan: &Plan) -> Result<f64, Infallible> {
        Ok(self.once(plan))
    }

    fn least_gain(&self) -> f64 {
        0.01
    }

    fn duel(&mut self, incumbent: &Plan, challenger: &Plan) -> Result<Verdict, Infallible> {
        let rounds: Vec<(f64, f64)> = (0..31).map(|_| (self.once(incumbent), self.once(challenger))).collect();
        Ok(Verdict::of(&rounds, self.least_gain()))
    }
}

#[test]
fn noise_alone_takes_nobody_from_the_models_plan() {
    let machine = machine("beluga");
    let batch = [shape(0, 1, 64 * MIB)];
    let mut astray = 0;
    for seed in 0..50 {
        // All plans take the same time except for noise, so some plan always seems to be faster.
        let mut score = Noisy { seconds: |_: &Plan| 1.0, random: Random(seed) };
        let found = short(Trials::new(&machine, &batch, &Options::default(), Engine::Graph, &mut score)).expect("planned");
        astray += usize::from(found.best.setting != Setting::default());
    }
    // One of a hundred comparisons of equal plans may be won by chance.
    assert!(astray <= 2, "{astray} of 50");
}

#[test]
fn a_real_gain_is_found_through_the_noise() {
    let machine = machine("beluga");
    let batch = [shape(0, 1, 256 * MIB)];
    for seed in 0..20 {
        let mut score = Noisy { seconds: planted(0.0, 0.3, MIB), random: Random(seed) };
        let found = short(Trials::new(&machine, &batch, &Options::default(), Engine::Graph, &mut score)).expect("planned");
        let (start, best) = (planted(0.0, 0.3, MIB)(&found.start.plan), planted(0.0, 0.3, MIB)(&found.best.plan));
        assert!(best < 0.9 * start, "seed {seed}: {best} of {start}");
    }
}

proptest! {
    #![proptest_config(config(60))]

    /// Tests random machines and batches: the result is never slower than the model's plan, and is a valid program.
    #[test]
    fn nothing_that_is_found_is_worse_than_the_start(seed in any::<u64>()) {
        let mut random = Random(seed);
        let (machine, batch, options) = machine_and_batch(&mut random, 1 << 22);
        let base = Options { tuned: None, chunk_bytes: None, max_paths: u32::MAX, ..options };
        if plan(&machine, &batch, &base).is_err() {
            return Ok(());
        }
        let engine = [Engine::Stream, Engine::Graph][random.below(2) as usize];
        // Times are arbitrary, but equal for equal programs.
        let salt = random.next();
        let seconds = |plan: &Plan| {
            let ops = plan.program.ops.iter().flat_map(|op| op.copies.iter().map(|copy| copy.bytes));
            1.0 + Random(ops.fold(salt, |sum, bytes| sum.wrapping_mul(31).wrapping_add(bytes))).below(1000) as f64 / 1000.0
        };
        let mut score = Formula { seconds, asked: 0 };
        let found = match random.chance(20) {
            true => grid(Trials::new(&machine, &batch, &base, engine, &mut score), |_, _| {}),
            false => short(Trials::new(&machine, &batch, &base, engine, &mut score)),
        };
        let found = found.map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(found.best.seconds <= found.start.seconds);
        let again = plan(&machine, &batch, &found.best.setting.options(&Options { engine, ..base })).expect("planned before");
        prop_assert_eq!(&again.program, &found.best.plan.program);
        prop_assert!(validate(&again.program, base.staging_bytes).is_ok());
    }

    /// Tests that plans with any values in the tuning file are valid.
    #[test]
    fn plans_under_any_setting_are_valid_programs(seed in any::<u64>()) {
        let mut random = Random(seed);
        let (machine, batch, options) = machine_and_batch(&mut random, 1 << 24);
        let setting = setting(&mut random);
        let options = setting.options(&options);
        match plan(&machine, &batch, &options) {
            Ok(plan) => prop_assert!(validate(&plan.program, options.staging_bytes).is_ok(), "{}", plan.describe(&machine)),
            Err(error) => prop_assert!(matches!(error, PlanError::NoRoute { .. } | PlanError::Staging { .. }), "{error}"),
        }
    }
}

#[test]
fn a_search_for_paths_leaves_shares_and_chunks_to_the_model() {
    let machine = machine("hgx-h100-4");
    let sizes = [16 * MIB, 64 * MIB, 256 * MIB];
    let short = Campaign { machine: &machine, sizes: &sizes, base: Options::default(), search: Search::Short, in_force: None };
    let campaign = Campaign { search: Search::Paths, ..short.clone() };
    let mut score = Simulated { machine: &machine };
    for (size, batch) in campaign.batches(Case::AllToAll) {
        let mut search = |by: &Campaign<'_>| by.point(Case::AllToAll, size, batch.clone(), &mut score, |_, _, _| {});
        let (found, all) = (search(&campaign).expect("tuned").expect("a class"), search(&short).expect("tuned").expect("a class"));
        assert!(found.short() <= found.chosen && all.short() <= found.short() && found.short_evaluations() < all.short_evaluations());
        for result in [&found.stream, &found.graph] {
            let setting = result.best().setting;
            assert_eq!(setting, Setting { max_paths: setting.max_paths, host_path: setting.host_path, ..Setting::default() });
        }
    }
}

#[test]
fn a_campaign_in_the_simulator_gains_and_its_tuning_reproduces_the_gain() {
    let machine = machine("hgx-h200");
    let sizes = [4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB];
    let campaign = Campaign { machine: &machine, sizes: &sizes, base: Options::default(), search: Search::Short, in_force: None };
    let mut score = Simulated { machine: &machine };
    let mut points = Vec::new();
    for case in [Case::D2d, Case::D2h, Case::Bidir] {
        for (size, batch) in campaign.batches(case) {
            points.extend(campaign.point(case, size, batch, &mut score, |_, _, _| {}).expect("tuned"));
        }
    }
    let tuning = campaign.tuning(&points, Origin::Simulator, &mut score).expect("tuned");
    assert_eq!(tuning.classes.len(), 3);
    assert_eq!(parse(&tuning.to_toml()), Ok(tuning.clone()));
    let mut gained = 0;
    for point in &points {
        let config = Config::default();
        let advice = tuning.advice(&machine, &point.batch, Engine::Auto);
        let options = PlanOptions::default().resolve_tuned(&config, advice.as_ref()).expect("options");
        let seconds = score.seconds(&plan(&machine, &point.batch, &options).expect("planned")).expect("scored");
        let (engine, best) = point.choice();
        assert_eq!(seconds, best, "{} {}: {advice:?}", point.case.name(), point.size);
        assert!(engine == Engine::Auto || seconds < point.chosen, "{}", point.case.name());
        gained += usize::from(engine != Engine::Auto);
    }
    assert!(gained > 1, "{gained}");

    // If a tuning is active, the choice of a context is compared with the best plan. The search still starts from the model's plan.
    let judge = Campaign { in_force: Some(&tuning), ..campaign.clone() };
    for point in &points {
        let judged = judge.point(point.case, point.size, point.batch.clone(), &mut score, |_, _, _| {}).expect("tuned").expect("a class");
        let (engine, best) = point.choice();
        assert_eq!((judged.chosen, judged.choice()), (best, (Engine::Auto, best)), "{} {} {engine:?}", point.case.name(), point.size);
        let starts =
            |point: &TunedPoint| [&point.stream, &point.graph].map(|result| (result.short.start.seconds, result.short.evaluations));
        assert_eq!(starts(&judged), starts(point));
    }
    let other = Tuning { classes: Vec::new(), ..tuning.clone() };
    let (first, judge) = (&points[0], Campaign { in_force: Some(&other), ..campaign.clone() });
    let judged = judge.point(first.case, first.size, first.batch.clone(), &mut score, |_, _, _| {}).expect("tuned").expect("a class");
    assert_eq!(judged.chosen, first.chosen, "what nothing is tuned for is the model's");
    // For 4 MiB between GPUs one path is best, and for 64 MiB two paths. The threshold is between the two sizes, for both engines.
    let d2d = &tuning.classes[points.iter().position(|point| point.case == Case::D2d).expect("tuned")];
    for of_engine in [&d2d.stream, &d2d.graph] {
        let least = of_engine.min_bytes.expect("a threshold");
        assert!((4 * MIB..=64 * MIB).contains(&least) && of_engine.sizes.iter().any(|size| size.from_bytes <= least), "{of_engine:?}");
    }
}

#[test]
fn chunks_that_were_tuned_for_one_size_follow_the_square_root_of_others() {
    let setting = Setting { chunk_bytes: Some(4 * MIB), relay_share: Some(1100), ..Setting::default() };
    let found = SizeTuning { from_bytes: 8 * MIB, at_bytes: Some(16 * MIB), setting };
    assert_eq!(found.setting_for(16 * MIB), setting);
    for (bytes, chunk) in [(64 * MIB, 8 * MIB), (4 * MIB, 2 * MIB), (12 * MIB, 887 * 4096), (1, 4096)] {
        assert_eq!(found.setting_for(bytes), Setting { chunk_bytes: Some(chunk), ..setting }, "{bytes}");
    }
    // The setting is not scaled if its size is not recorded, or if the number of chunks is that of the model.
    assert_eq!(SizeTuning { at_bytes: None, ..found }.setting_for(64 * MIB), setting);
    let shares = Setting { chunk_bytes: None, ..setting };
    assert_eq!(SizeTuning { setting: shares, ..found }.setting_for(64 * MIB), shares);
}

// ---- the tuning file

fn setting(random: &mut Random) -> Setting {
    let mut share = || random.chance(60).then(|| 50 + random.below(19_951) as u16);
    let (host_share, relay_share) = (share(), share());
    Setting {
        max_paths: random.chance(60).then(|| 1 + random.below(9) as u32),
        host_path: random.chance(30).then(|| random.chance(50)),
        chunk_bytes: random.chance(50).then(|| 4096 + random.below(1 << 24)),
        host_share,
        relay_share,
    }
}

fn tuning(random: &mut Random) -> Tuning {
    let ascending = |random: &mut Random| {
        let mut from = 0;
        (0..random.below(4))
            .map(|_| {
                from += 1 + random.below(1 << 28);
                from
            })
            .collect::<Vec<u64>>()
    };
    let engine = |random: &mut Random| EngineTuning {
        min_bytes: random.chance(50).then(|| random.below(1 << 30)),
        sizes: ascending(random)
            .into_iter()
            .map(|from_bytes| {
                let at_bytes = random.chance(50).then(|| 1 + random.below(1 << 30));
                SizeTuning { from_bytes, at_bytes, setting: setting(random) }
            })
            .collect(),
    };
    let mut classes: Vec<ClassTuning> = Vec::new();
    for _ in 0..random.below(5) {
        let sides = [(Side::Gpu, Side::Gpu), (Side::Gpu, Side::Host), (Side::Host, Side::Gpu)];
        let (from, to) = sides[random.below(3) as usize];
        let pattern = [Pattern::Single, Pattern::BothWays, Pattern::Shift, Pattern::Exchange][random.below(4) as usize];
        let class = Class { from, to, pattern, direct: [0.0, 12.345e9, 4.79e10, 3.96e11][random.below(4) as usize] };
        if classes.iter().any(|known| known.class.is_like(&class)) {
            continue;
        }
        let engines = [Engine::Auto, Engine::Stream, Engine::Graph];
        let preference = |random: &mut Random, from_bytes| Preference { from_bytes, engine: engines[random.below(3) as usize] };
        let preferences = ascending(random).into_iter().map(|from_bytes| preference(random, from_bytes)).collect();
        classes.push(ClassTuning { class, engine: preferences, stream: engine(random), graph: engine(random) });
    }
    Tuning {
        topology: ["beluga", "a \"quoted\" name", ""][random.below(3) as usize].to_owned(),
        digest: format!("{:016x}", random.next()),
        origin: [Origin::Simulator, Origin::Host, Origin::Cuda][random.below(3) as usize],
        classes,
        partitions: (0..random.below(4)).map(|shape| partition_tuning(random, shape)).collect(),
    }
}

fn partition_tuning(random: &mut Random, shape: u64) -> PartitionTuning {
    let mut count = || 1 + random.below(4096) as u32;
    let first = count();
    let trial = |count, mover| PartitionTrial { mover, count, blocks: count % 3, ns: u64::from(count) << 20 };
    let trials = [PartitionMover::CopyEngine, PartitionMover::Producer].map(|mover| trial(count(), mover)).to_vec();
    PartitionTuning { shape: format!("{shape:016x}"), bytes: random.below(1 << 50), count: first, trials }
}

#[test]
fn what_a_file_says_of_partitions_is_checked() {
    let trial = PartitionTrial { mover: PartitionMover::Producer, count: 77, blocks: 0, ns: 5 };
    let whole = Tuning {
        topology: "beluga".into(),
        digest: "0123456789abcdef".into(),
        origin: Origin::Host,
        classes: Vec::new(),
        partitions: vec![PartitionTuning { shape: "00000000000000aa".into(), bytes: 1, count: 24, trials: vec![trial] }],
    };
    let text = whole.to_toml();
    assert_eq!(parse(&text), Ok(whole));
    for (from, to, said) in [
        ("00000000000000aa", "aa", "shape = aa: must be the 16 hexadecimal digits"),
        ("count = 24", "count = 4097", "count = 4097: must be 1 to 4096"),
        ("count = 77", "count = 4097", "count = 4097: must be 1 to 4096"),
        ("producer", "kernel", "unknown variant `kernel`"),
        ("[[partitions]]", "[[partitions]]\nshape = \"00000000000000aa\"\nbytes = 1\ncount = 1\n[[partitions]]", "occurs twice"),
    ] {
        let error = parse(&text.replacen(from, to, 1)).expect_err(to).to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Returns a time in seconds that grows with the logarithmic distance of `count` from the optimum `best`.
fn distance(count: u32, best: f64) -> f64 {
    1.0 + (f64::from(count.max(1)) / best).ln().abs()
}

#[test]
fn the_search_for_partitions_comes_close_to_the_best_in_few_trials_and_asks_for_none_twice() {
    for best in [3.0, 90.0, 12.0, 400.0, 1.0, 4096.0] {
        let mut asked = Vec::new();
        let score = |count: u32| {
            assert!(!asked.contains(&count), "{count}");
            asked.push(count);
            Ok::<_, ()>(Some(distance(count, best)))
        };
        let (found, seconds) = search_partitions(&[12], score).expect("no error").expect("some");
        // The result differs from the optimum by at most half of a factor of 1.5.
        assert!(seconds <= 1.0 + 0.41 / 2.0, "{found} takes {seconds}, the best is {best}");
        assert!(asked.len() <= 16, "{} trials", asked.len());
    }
}

#[test]
fn the_search_for_partitions_begins_with_numbers_over_the_whole_range() {
    assert_eq!(spread_partitions(9, 256 * MIB), [1, 4, 9, 16, 64, 256]);
    assert_eq!(spread_partitions(1, 1 << 20), [1, 4, 16]);
    assert_eq!(spread_partitions(1, 5), [1]);
    // There are two minima. The model's number of chunks is near the worse one.
    let score = |count: u32| Ok::<_, ()>(Some(distance(count, 3.0).min(distance(count, 200.0) - 0.3)));
    let near = |starts: &[u32]| search_partitions(starts, score).expect("no error").expect("some").0;
    assert_eq!((near(&[4]), near(&spread_partitions(4, 256 * MIB))), (3, 171));
}

#[test]
fn newer_trials_replace_those_with_as_many_blocks_and_the_best_of_all_is_kept() {
    let trial = |mover, count, blocks, ns| PartitionTrial { mover, count, blocks, ns };
    let (engine, producer) = (PartitionMover::CopyEngine, PartitionMover::Producer);
    let known =
        PartitionTuning { shape: String::new(), bytes: 1, count: 3, trials: vec![trial(engine, 3, 0, 30), trial(engine, 4, 64, 20)] };
    let with = |newer: &[PartitionTrial]| {
        let found = known.clone().with(newer);
        (found.count, found.trials.len())
    };
    assert_eq!(with(&[trial(engine, 9, 0, 25), trial(producer, 1, 0, 5)]), (4, 3));
    assert_eq!(with(&[trial(engine, 9, 64, 25)]), (9, 2));
    assert_eq!(with(&[trial(producer, 9, 64, 5)]), (3, 2));
}

#[test]
fn the_search_for_partitions_leaves_out_what_is_refused_and_ends_with_the_first_error() {
    let refusing = |count: u32| Ok::<_, ()>((count != 24).then(|| distance(count, 100.0)));
    let (best, _) = search_partitions(&[12], refusing).expect("no error").expect("some");
    assert_eq!(best, 93, "24 is refused, and factors of one and a half lead past it");
    assert_eq!(search_partitions(&[20], |_| Ok::<_, ()>(None)), Ok(None));
    let mut left = 3;
    let failing = |count| {
        left -= 1;
        if left == 0 { Err("it failed") } else { Ok(Some(distance(count, 1000.0))) }
    };
    assert_eq!(search_partitions(&[12], failing), Err("it failed"));
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn what_is_written_is_read_back(seed in any::<u64>()) {
        let tuning = tuning(&mut Random(seed));
        prop_assert_eq!(parse(&tuning.to_toml()), Ok(tuning));
    }

    /// Tests damaged files, with bytes that are changed, missing or duplicated. Such a file must be read as a tuning that can be written
    /// again, or cause an error with the location.
    #[test]
    fn a_damaged_file_is_read_or_refused_and_breaks_nothing(seed in any::<u64>()) {
        let mut random = Random(seed);
        let mut bytes = tuning(&mut random).to_toml().into_bytes();
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(4) {
                0 => bytes[at] = b' ' + random.below(95) as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, b"0919-\"[]{}=,.\n#e"[random.below(16) as usize]),
                _ => {
                    let line: Vec<u8> = bytes[at..].iter().copied().take_while(|byte| *byte != b'\n').chain([b'\n']).collect();
                    bytes.splice(at..at, line);
                }
            }
        }
        let text = String::from_utf8(bytes).expect("ASCII");
        match parse(&text) {
            Ok(tuning) => prop_assert_eq!(parse(&tuning.to_toml()), Ok(tuning)),
            Err(error) => {
                let error = error.to_string();
                prop_assert!(error.contains("line ") || error.contains("version"), "{error}\n{text}");
            }
        }
    }
}

const SMALL: &str = r#"version = 1
topology = "beluga"
digest = "0123456789abcdef"
origin = "cuda"

[[class]]
from = "gpu"
to = "gpu"
pattern = "single"
direct = 4.79e10
engine = [{ from_bytes = 0, engine = "stream" }, { from_bytes = 16777216, engine = "graph" }]
[class.stream]
min_bytes = 524288
sizes = [{ from_bytes = 524288, max_paths = 2, chunk_bytes = 65536 }]
[class.graph]
sizes = [{ from_bytes = 16777216, host_share = 0.92, relay_share = 1.1 }]
"#;

#[test]
fn mistakes_are_refused_with_line_value_and_remedy() {
    let error = |from: &str, to: &str| {
        assert!(SMALL.contains(from), "{from}");
        parse(&SMALL.replace(from, to)).expect_err(to).to_string()
    };
    assert!(parse(SMALL).is_ok());
    for (from, to, says) in [
        ("version = 1", "version = 2", &["version = 2", "reads version 1", "tune again"][..]),
        ("version = 1\n", "", &["version"]),
        ("0123456789abcdef", "beef", &["line 3", "digest = beef", "16 hexadecimal digits"]),
        ("\"cuda\"", "\"rocm\"", &["line 4", "rocm", "cuda"]),
        ("pattern = \"single\"", "pattern = \"double\"", &["line 9", "double", "both-ways"]),
        ("direct = 4.79e10", "direct = -1.0", &["line 10", "direct = -1", "bytes per second"]),
        ("min_bytes", "min_byte", &["line 13", "min_byte", "min_bytes"]),
        ("from_bytes = 16777216, engine", "from_bytes = 0, engine", &["line 11", "from_bytes = 0", "more than 0"]),
        ("max_paths = 2", "max_paths = 0", &["line 14", "max_paths = 0", "1 or more"]),
        ("chunk_bytes = 65536", "chunk_bytes = 100", &["line 14", "chunk_bytes = 100", "4096 or more"]),
        ("chunk_bytes = 65536", "chunk_bytes = 65536, at_bytes = 0", &["line 14", "at_bytes = 0", "1 or more"]),
        ("host_share = 0.92", "host_share = 0.01", &["line 16", "host_share = 0.01", "between 0.05 and 20"]),
        ("relay_share = 1.1", "relay_share = nan", &["line 16", "relay_share = NaN", "between 0.05 and 20"]),
        ("relay_share = 1.1", "relay_share = \"1\"", &["line 16", "column", "expected f64"]),
    ] {
        let error = error(from, to);
        assert!(says.iter().all(|part| error.contains(part)), "{to}: {error}");
    }
    let class = &SMALL[SMALL.find("[[class]]").expect("a class")..];
    let twice = parse(&format!("{SMALL}\n{class}")).expect_err("refused").to_string();
    assert!(twice.contains("line 18") && twice.contains("line 6"), "{twice}");
    let long = parse(&"#".repeat(mpgpu_measure::tune::MAX_FILE_BYTES + 1)).expect_err("refused").to_string();
    assert!(long.contains("more than 1048576 bytes"), "{long}");
}

#[test]
fn the_digest_follows_every_figure_and_no_name() {
    let beluga = preset("beluga").expect("a preset");
    let same = digest(&beluga);
    let mut renamed = beluga.clone();
    (renamed.name, renamed.description) = ("other".into(), "text".into());
    assert_eq!(digest(&renamed), same);
    let mut faster = beluga.clone();
    faster.links[0].bandwidth *= 1.0 + 1e-12;
    let mut dearer = beluga.clone();
    dearer.costs.graph_node += 1e-12;
    let mut shared = beluga.clone();
    shared.links.pop();
    for other in [faster, dearer, shared] {
        assert_ne!(digest(&other), same);
    }
    let all: std::collections::BTreeSet<String> = preset_names().map(|name| digest(&preset(name).expect("a preset"))).collect();
    assert_eq!(all.len(), preset_names().count());
}

// ---- the active tuning

/// Temporary file that is removed when the value is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("mpgpu-{name}-{}.toml", std::process::id()));
        std::fs::write(&path, text).expect("written");
        Scratch(path)
    }

    fn path(&self) -> String {
        self.0.to_str().expect("UTF-8").to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn small_for(machine: &Machine, origin: &str) -> String {
    SMALL.replace("0123456789abcdef", &digest(machine.topology())).replace("cuda", origin)
}

fn context(machine: Machine, config: Config) -> Result<Context, Error> {
    let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
    Context::with_backend(Arc::new(machine), backend, config)
}

#[test]
fn advice_goes_by_class_size_and_engine() {
    let machine = machine("beluga");
    let tuning = parse(&small_for(&machine, "simulator")).expect("a tuning");
    let advice = |batch: &[Shape], engine| tuning.advice(&machine, batch, engine);
    let at = |bytes| [shape(0, 1, bytes)];
    let stream = Setting { max_paths: Some(2), chunk_bytes: Some(65536), ..Setting::default() };
    let graph = Setting { host_share: Some(920), relay_share: Some(1100), ..Setting::default() };
    // The threshold of an engine also applies below the first tuned size.
    let below = Advice { engine: Engine::Stream, min_bytes: Some(524_288), setting: Setting::default() };
    assert_eq!(advice(&at(524_287), Engine::Auto), Some(below));
    assert_eq!(advice(&at(524_288), Engine::Auto), Some(Advice { setting: stream, ..below }));
    let large = Advice { engine: Engine::Graph, min_bytes: None, setting: graph };
    assert_eq!(advice(&at(1 << 24), Engine::Auto), Some(large));
    assert_eq!(advice(&at(1 << 40), Engine::Auto), Some(large), "the last holds without end");
    // A caller that requests an engine gets the values that were found for that engine.
    assert_eq!(advice(&at(1 << 30), Engine::Stream), Some(Advice { setting: stream, ..below }));
    assert_eq!(advice(&at(1000), Engine::Graph), None);
    for engine in [Engine::Batch, Engine::Kernel] {
        assert_eq!(advice(&at(1 << 30), engine), None);
    }
    assert_eq!(advice(&[shape(0, 1, MIB), shape(1, 0, MIB)], Engine::Auto), None, "another pattern");
    assert_eq!(advice(&[shape(-1, 1, MIB)], Engine::Auto), None, "other memories");
}

#[test]
fn the_call_wins_over_the_environment_it_over_the_file_and_the_file_over_the_model() {
    let advice = Advice {
        engine: Engine::Graph,
        min_bytes: Some(4096),
        setting: Setting { max_paths: Some(3), host_path: Some(false), chunk_bytes: Some(8192), host_share: Some(900), relay_share: None },
    };
    let environment = Config { max_paths: Some(2), min_bytes: Some(1 << 20), host_threads: 3, ..Config::default() };
    let resolve = |call: PlanOptions, config: &Config| call.resolve_tuned(config, Some(&advice)).expect("accepted");
    let tuned = resolve(PlanOptions::default(), &Config::default());
    assert_eq!((tuned.engine, tuned.max_paths, tuned.host_path), (Engine::Graph, 3, false));
    assert_eq!((tuned.chunk_bytes, tuned.min_bytes), (Some(8192), Some(4096)));
    assert_eq!(tuned.tuned, Some(Tuned { host_share: 900, relay_share: 1000, several: true }));
    let from_environment = resolve(PlanOptions::default(), &environment);
    assert_eq!((from_environment.max_paths, from_environment.min_bytes, from_environment.chunk_bytes), (2, Some(1 << 20), Some(8192)));
    assert_eq!(from_environment.tuned.map(|tuned| tuned.several), Some(false), "two paths were not measured against one");
    let call = PlanOptions { max_paths: Some(4), engine: Some(Engine::Stream), chunk_bytes: Some(4096), ..PlanOptions::default() };
    let called = resolve(call, &environment);
    assert_eq!((called.max_paths, called.engine, called.chunk_bytes, called.host_path), (4, Engine::Stream, Some(4096), false));
    let none = PlanOptions::default().resolve_tuned(&environment, None).expect("accepted");
    assert_eq!(none, Options { max_paths: 2, min_bytes: Some(1 << 20), threads: 3, ..Options::default() });
}

#[test]
fn a_context_plans_by_its_tuning_file_says_so_and_moves_the_right_bytes() {
    let file = Scratch::new("in-force", &small_for(&machine("beluga"), "simulator"));
    let config = Config { tuning_file: Some(file.path()), verify: Verify::Bytes, ..Config::default() };
    let context = context(machine("beluga"), config).expect("a context");
    let text = context.describe();
    assert!(text.contains("tuned values are active: made for beluga") && text.contains(&file.path()), "{text}");
    assert_eq!(context.to_json()["tuning"]["classes"], 1);

    let bytes = 5_000_001;
    let buffer = |device| context.allocate(DeviceId(device), bytes).expect("memory");
    let transfer = Transfer { dst: buffer(1), dst_device: DeviceId(1), src: buffer(0), src_device: DeviceId(0), bytes };
    let plan = |options: &PlanOptions| context.plan(&[transfer], options).expect("planned");
    let tuned = plan(&PlanOptions::default());
    assert!(tuned.describe().contains("tuned: options come from a tuning file"), "{}", tuned.describe());
    let paths = &tuned.planned().transfers[0].paths;
    assert_eq!((paths.len(), tuned.planned().options.engine), (2, Engine::Stream), "{}", tuned.describe());
    assert!(paths.iter().all(|path| path.via.is_none() || path.chunk_bytes == 65536), "{}", tuned.describe());
    tuned.execute(mpgpu_backend::StreamHandle(0)).expect("enqueued").wait().expect("every byte is compared");

    assert_eq!(plan(&PlanOptions { max_paths: Some(1), ..PlanOptions::default() }).paths(), 1);
    // An equal request is found in the cache. A request that explicitly contains the model's values is a different request.
    let hits = context.statistics().cache.hits;
    assert!(Arc::ptr_eq(&plan(&PlanOptions::default()), &tuned));
    assert_eq!(context.statistics().cache.hits, hits + 1);
    let most = plan(&PlanOptions { max_paths: Some(u32::MAX), ..PlanOptions::default() });
    assert!(!Arc::ptr_eq(&most, &tuned));
    // Plans that the tuner itself makes are not affected by the tuning.
    let bare = context.plan_with(&[transfer], &Options::default()).expect("planned");
    assert_eq!(bare.planned().options, Options::default());
    assert!(!bare.describe().contains("tuned"));
}

#[test]
fn a_stale_or_foreign_file_is_refused_with_an_explanation() {
    let refused = |text: &str, on: &str| {
        let file = Scratch::new(&format!("refused-{}", on.len() + text.len()), text);
        let error = context(machine(on), Config { tuning_file: Some(file.path()), ..Config::default() }).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("tuning file {}: ", file.path())), "{error}");
        error
    };
    let beluga = machine("beluga");
    let foreign = refused(&small_for(&beluga, "simulator"), "narval");
    for part in
        ["made for topology beluga", &digest(beluga.topology()), "active topology is narval", "Tune again", "unset MPGPU_TUNING_FILE"]
    {
        assert!(foreign.contains(part), "{part}: {foreign}");
    }
    assert!(refused(SMALL, "beluga").contains("digest 0123456789abcdef"), "figures have changed since");
    let elsewhere = refused(&small_for(&beluga, "cuda"), "beluga");
    assert!(elsewhere.contains("made on the cuda backend") && elsewhere.contains("this is the host backend"), "{elsewhere}");
    assert!(refused("version = 1\n", "beluga").contains("topology"));
    let missing =
        context(beluga, Config { tuning_file: Some("/no/such.toml".into()), ..Config::default() }).expect_err("refused").to_string();
    assert!(missing.contains("/no/such.toml") && missing.contains("mpgpu tune --output"), "{missing}");
}

#[test]
fn a_file_tuned_on_this_backend_is_taken() {
    let beluga = machine("beluga");
    let file = Scratch::new("host", &small_for(&beluga, "host"));
    assert!(context(beluga, Config { tuning_file: Some(file.path()), ..Config::default() }).is_ok());
}
