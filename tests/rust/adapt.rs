//! Tests plans that choose among their variants by measured times. Tests the rule alone, and several such plans ("players") that run on
//! simulated machines that differ from the model.

use mpgpu_core::adapt::{Choice, Chooser, Conditions, Game, MAX_VARIANTS, MOST_UNDER_WAY, Player, Tenant, World, variants};
use mpgpu_core::plan::{Options, Plan, Shape, plan};
use mpgpu_core::topology::{DeviceId, Machine, MemoryKind, preset};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::rc::Rc;

const EXECUTIONS: u64 = 10_000;
/// Number of executions after a change over which the lost time is measured.
const STRETCH: u64 = 500;

/// Generator of numbers from 0 to 1 (SplitMix64).
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Record of a chooser in a simulated world, in which execution `n` of variant `v` takes `times(n)[v]` ms with random deviations of
/// relative size `noise`.
struct Course {
    /// Lost time and time of the best variant, each summed up to every execution.
    sums: Vec<(f64, f64)>,
    /// Time lost by trial executions of variants other than the active one.
    tries: f64,
    measured: u64,
    switches: u64,
}

impl Course {
    fn run<const N: usize>(times: impl Fn(u64) -> [f64; N], noise: f64, late: u64, seed: u64) -> Course {
        Course::run_with(16, times, noise, late, seed)
    }

    fn run_with<const N: usize>(steady: u32, times: impl Fn(u64) -> [f64; N], noise: f64, late: u64, seed: u64) -> Course {
        Course::of(&mut Chooser::new(&[None; N], steady, seed), times, noise, late, seed)
    }

    fn of<const N: usize>(chooser: &mut Chooser, times: impl Fn(u64) -> [f64; N], noise: f64, late: u64, seed: u64) -> Course {
        let mut random = Uniform(!seed);
        let mut reports: VecDeque<(u64, usize, u64)> = VecDeque::new();
        let mut course = Course { sums: vec![(0.0, 0.0)], tries: 0.0, measured: 0, switches: 0 };
        for execution in 0..EXECUTIONS {
            while let Some(&(_, variant, ns)) = reports.front().filter(|report| report.0 <= execution) {
                reports.pop_front();
                chooser.measured(variant, ns);
            }
            let Choice { variant, measure } = chooser.next_execution(reports.len());
            let times = times(execution);
            let time = times[variant];
            course.tries += (time - times[chooser.in_force()]).max(0.0);
            let best = times.iter().copied().fold(f64::INFINITY, f64::min);
            let (lost, all) = course.sums[execution as usize];
            course.sums.push((lost + time - best, all + best));
            if measure {
                course.measured += 1;
                let taken = time * (1.0 + noise * (2.0 * random.next() - 1.0)) * if random.next() < 0.005 { 2.0 } else { 1.0 };
                if random.next() < 0.99 {
                    reports.push_back((execution + 1 + late, variant, (taken * 1e6) as u64));
                }
            }
        }
        course.switches = chooser.switches();
        course
    }

    fn lost(&self, from: u64, to: u64) -> f64 {
        let (begin, end) = (self.sums[from as usize], self.sums[to as usize]);
        (end.0 - begin.0) / (end.1 - begin.1)
    }

    fn time(&self) -> f64 {
        self.sums[EXECUTIONS as usize].0 + self.sums[EXECUTIONS as usize].1
    }
}

#[test]
fn a_plan_with_one_variant_is_never_measured() {
    for known in [&[][..], &[None][..]] {
        let mut chooser = Chooser::new(known, 16, 1);
        assert!((0..10_000).all(|_| chooser.next_execution(0) == Choice { variant: 0, measure: false }));
    }
}

#[test]
fn a_steady_plan_is_measured_the_more_seldom_the_longer_its_steady_stretch_and_changes_nothing() {
    let [often, seldom] = [16, 64].map(|steady| Course::run_with(steady, |_| [1.0, 1.05, 1.3], 0.04, 2, 1));
    println!("measured {} and {} of {EXECUTIONS}, tries among them", often.measured, seldom.measured);
    assert!(often.measured < EXECUTIONS / 8 && seldom.measured < EXECUTIONS / 20);
    assert!(often.switches == 0 && seldom.switches == 0);
}

#[test]
fn a_later_run_starts_from_what_an_earlier_one_knew() {
    let mut chooser = Chooser::new(&[Some(2000), None, Some(1000)], 16, 1);
    assert_eq!((chooser.in_force(), chooser.next_execution(0)), (2, Choice { variant: 2, measure: true }));
    assert_eq!([0, 1, 2, 3].map(|variant| chooser.median(variant)), [Some(2000), None, Some(1000), None]);
    // By this time, conditions have changed.
    for _ in 0..100 {
        let Choice { variant, measure } = chooser.next_execution(0);
        if measure {
            chooser.measured(variant, [700, 900, 3000][variant]);
        }
    }
    assert_eq!(chooser.in_force(), 0);
}

/// Returns the loss that is permitted after the active variant becomes slower. The loss ends when the slowdown has been measured and
/// confirmed and another variant is active.
fn of_slowdown(times: f64) -> f64 {
    (times - 1.0) * (16.0 + 10.0) / STRETCH as f64 + 0.015
}

#[test]
fn a_slowdown_by_half_costs_five_percent_of_500_executions_and_one_by_five_what_it_takes_to_be_seen() {
    for (slower, least) in [(1.2, 0.05), (1.5, 0.05), (1.7, 0.05), (2.5, of_slowdown(2.5)), (6.0, of_slowdown(6.0))] {
        let mut worst = 0.0_f64;
        for seed in 0..40 {
            let change = 3000 + 37 * seed;
            let course =
                Course::run(|n| if n < change { [1.0, 1.06, 1.12] } else { [slower, 1.0 + 0.3 * (slower - 1.0), 1.12] }, 0.03, 2, seed);
            worst = worst.max(course.lost(change, change + STRETCH));
        }
        println!("{slower} times slower: {:.2} % over {STRETCH}", 100.0 * worst);
        assert!(worst <= least, "{slower}: {worst} of {least}");
    }
}

/// Returns the loss that is permitted after an inactive variant becomes faster. The loss ends when that variant has been tried, confirmed
/// and made active. A variant that was slower before is tried less often.
fn of_gain(slower: f64, gain: f64) -> f64 {
    let tried = 1.5 * (256.0 * (slower - 1.0)).max(64.0);
    gain * (tried + 60.0).min(STRETCH as f64) / STRETCH as f64 + 0.01
}

#[test]
fn a_variant_that_becomes_the_fastest_unseen_is_found_by_tries_that_are_the_more_seldom_the_slower_it_was() {
    for (slower, gain, most) in [
        (1.1, 0.15, 0.05),
        (1.3, 0.12, 0.05),
        (1.8, 0.12, of_gain(1.8, 0.12)),
        (1.2, 0.4, of_gain(1.2, 0.4)),
        (3.0, 0.12, of_gain(3.0, 0.12)),
    ] {
        let mut worst = 0.0_f64;
        for seed in 0..40 {
            let change = 3000 + 37 * seed;
            let course = Course::run(|n| if n < change { [slower, slower, 1.0] } else { [1.0 / (1.0 + gain), 1.0, 1.0] }, 0.03, 2, seed);
            worst = worst.max(course.lost(change, change + STRETCH));
        }
        println!("{gain} gained by what was {slower} times as slow: {:.2} % over {STRETCH}, bound {:.0} %", 100.0 * worst, 100.0 * most);
        assert!(worst <= most, "{slower}, {gain}: {worst}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_world_that_stays_loses_two_percent_at_most_and_tries_one(
        times in prop::array::uniform3(1.0..6.0_f64), noise in 0.0..0.1_f64, late in 0..20_u64, seed: u64,
    ) {
        let course = Course::run(|_| times, noise, late, seed);
        let worst = times.iter().copied().fold(0.0, f64::max);
        // The loss before the first measurement occurs only once.
        let first = worst * (late + 12) as f64 / course.time();
        prop_assert!(course.lost(0, EXECUTIONS) <= 0.02 + first, "lost {}", course.lost(0, EXECUTIONS));
        prop_assert!(course.tries <= 0.01 * course.time() + worst * (late + 20) as f64, "tries {}", course.tries / course.time());
    }

    #[test]
    fn tries_stay_bounded_while_everything_changes(seed: u64, every in 50..2000_u64, late in 0..8_u64) {
        let times = |n: u64| std::array::from_fn::<f64, 3, _>(|v| 1.0 + 3.0 * Uniform(seed ^ (n / every * 4 + v as u64)).next());
        let course = Course::run(times, 0.03, late, seed);
        // A trial may detect only afterwards that a change has made it slow. This part of the loss is added later.
        prop_assert!(course.tries <= 0.015 * course.time() + 4.0 * (late + 12) as f64, "tries {}", course.tries / course.time());
        prop_assert!(course.switches <= 3 + 10 + EXECUTIONS / every.min(1024) * 2, "{} switches", course.switches);
    }

    #[test]
    fn whatever_is_reported_a_variant_is_chosen_and_equal_choosers_choose_alike(
        variants in 1..=MAX_VARIANTS, seed: u64, steps in prop::collection::vec((any::<bool>(), 0..6_usize, any::<u64>()), 0..500),
    ) {
        let mut choosers = [(); 2].map(|()| Chooser::new(&vec![None; variants], 16, seed));
        for (reports, variant, ns) in steps {
            let [one, other] = choosers.each_mut().map(|chooser| {
                if reports {
                    chooser.measured(variant, ns >> (ns % 64));
                }
                chooser.next_execution(0)
            });
            prop_assert!(one == other && one.variant < variants && choosers[0].in_force() < variants);
        }
    }
}

fn put(src: usize, dst: usize, mib: u64) -> Shape {
    let (src_device, dst_device) = (DeviceId::gpu(src as u32), DeviceId::gpu(dst as u32));
    Shape { source: 0, dst_device, src_device, dst_kind: MemoryKind::Device, src_kind: MemoryKind::Device, bytes: mib << 20 }
}

/// Returns plans ("players") that copy to the right neighbour in a ring of up to four GPUs, or eight on `hgx-h200`. On `beluga`, the second
/// four copy to the left neighbour.
fn ring(machine: &Machine, count: usize, mib: u64) -> Vec<Player> {
    let gpus = (machine.gpu_count() as usize).min(count.max(2));
    let player = |process: usize| {
        let gpu = process % gpus;
        let shapes = vec![put(gpu, (gpu + if process < gpus { 1 } else { gpus - 1 }) % gpus, mib)];
        let planned = |options: &Options| plan(machine, &shapes, options);
        let options = Options::default();
        let variants: Rc<[Plan]> = planned(&options).and_then(|all| variants(all, &options, planned)).expect("planned").into();
        Player { process, shapes, variants }
    };
    (0..count).map(player).collect()
}

/// Simulated machines: the capacity that differs from the model, and its factor.
const REAL: [(&str, f64); 10] = [
    ("host", 1.0),
    ("host", 0.3),
    ("host", 0.6),
    ("host", 3.0),
    ("pcie", 0.3),
    ("pcie", 0.6),
    ("pcie", 3.0),
    ("nvlink", 0.3),
    ("nvlink", 0.6),
    ("nvlink", 3.0),
];

fn machine(name: &str) -> Machine {
    Machine::new(preset(name).expect("a preset")).expect("well formed")
}

/// Returns other users of host memory, which leave fractions of its bandwidth: first `leaves[0]` for 2,000 executions, then `leaves[1]` for
/// 1,000.
fn tenants(machine: &Machine, leaves: [f64; 2]) -> Vec<Tenant> {
    let resources = machine.resources_named("host");
    let during = [2000..4000, 6000..7000];
    leaves.into_iter().zip(during).map(|(leaves, during)| Tenant { resources: resources.clone(), leaves, during }).collect()
}

fn world(name: &str, (what, factor): (&str, f64), players: usize, mib: u64, leaves: Option<[f64; 2]>) -> World {
    let machine = machine(name);
    let scaled = machine.resources_named(what);
    let real = machine.scaled(|resource| if scaled.contains(&resource) { factor } else { 1.0 });
    World::new(real, ring(&machine, players, mib), leaves.map_or(Vec::new(), |leaves| tenants(&machine, leaves)))
}

fn play(world: &mut World, seed: u64) -> Game {
    world.play(&Conditions { executions: EXECUTIONS, seed, ..Conditions::default() }).expect("it runs")
}

#[test]
fn one_plan_loses_two_percent_at_most_on_machines_that_are_not_the_models() {
    for name in ["hgx-h200", "beluga"] {
        // If other users leave 0.2 of a bandwidth that is itself 0.3 of the model's, an execution takes four times as long. In this case 5
        // % of the executions miss the bound.
        for (leaves, seldom) in [(None, 0.05), (Some([0.7, 0.5]), 0.05), (Some([0.4, 0.2]), 0.15)] {
            let (mut most, mut worst, mut least) = (0.0_f64, 0.0_f64, f64::INFINITY);
            for real in REAL {
                let mut world = world(name, real, 1, 256, leaves);
                for seed in 1..=3 {
                    let play = play(&mut world, seed);
                    let (lost, stretch) = (play.lost(0, EXECUTIONS), play.worst(STRETCH).0);
                    assert!(lost <= 0.02, "{name}, {real:?}, {leaves:?}: {lost}");
                    assert!(stretch <= seldom, "{name}, {real:?}, {leaves:?}: {stretch} over {STRETCH}");
                    most = most.max(lost);
                    worst = worst.max(stretch);
                    least = least.min(play.end().did / play.end().plain);
                }
            }
            println!(
                "{name}, tenants leave {leaves:?}: lost {:.2} % at most, {:.2} % over any {STRETCH}; {least:.3} of plain copies at least",
                100.0 * most,
                100.0 * worst
            );
        }
    }
}

/// Returns a simulation of one program that copies `mib` MiB between two devices of a machine on which the capacity of the resources `what`
/// is that of the model times a factor.
fn program(name: &str, (what, factor): (&str, f64), (src, dst): (DeviceId, DeviceId), mib: u64) -> World {
    let machine = machine(name);
    let kind = |device: DeviceId| if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
    let shapes = vec![Shape { source: 0, dst_device: dst, src_device: src, dst_kind: kind(dst), src_kind: kind(src), bytes: mib << 20 }];
    let planned = |options: &Options| plan(&machine, &shapes, options);
    let options = Options::default();
    let variants: Rc<[Plan]> = planned(&options).and_then(|all| variants(all, &options, planned)).expect("planned").into();
    let scaled = machine.resources_named(what);
    let real = machine.scaled(|resource| if scaled.contains(&resource) { factor } else { 1.0 });
    World::new(real, vec![Player { process: 0, shapes, variants }], Vec::new())
}

/// Copies that the simulated programs make: preset of the machine, source and destination.
const COPIES: [(&str, DeviceId, DeviceId); 5] = [
    ("hgx-h200", DeviceId::HOST, DeviceId::gpu(0)),
    ("hgx-h200", DeviceId::gpu(1), DeviceId::HOST),
    ("hgx-h200", DeviceId::gpu(0), DeviceId::gpu(1)),
    ("dgx1-v100", DeviceId::HOST, DeviceId::gpu(0)),
    ("beluga", DeviceId::gpu(0), DeviceId::gpu(1)),
];

/// Tests short programs that wait for each copy. With a correct model they must be as fast as long programs.
#[test]
fn programs_of_ten_copies_are_nearly_as_fast_as_programs_of_ten_thousand() {
    for (name, src, dst) in COPIES {
        for mib in [64, 256] {
            let mut world = program(name, ("host", 1.0), (src, dst), mib);
            for seed in 1..=5 {
                let of_plain = |executions| {
                    let game = world.play(&Conditions { executions, seed, late: 0, ..Conditions::default() }).expect("it runs");
                    game.end().did / game.end().plain
                };
                let [short, long] = [10, EXECUTIONS].map(of_plain);
                println!("{name}, {src} to {dst}, {mib} MiB: {short:.3} of plain copies in 10 copies, {long:.3} in {EXECUTIONS}");
                assert!(short >= 0.95 * long, "{name}, {src} to {dst}, {mib} MiB: {short} after ten copies, {long} after many");
            }
        }
    }
}

/// Tests short programs on machines that differ from the model. They must lose little against plain copies. A single program may lose more,
/// because one measured time in a hundred is never reported. One case loses more: if the active variant is as fast as predicted, but plain
/// copies are much faster than predicted, no measured time shows this before the budget allows a trial execution of the plain copies. The
/// two goals contradict each other here: only a trial among the first five copies would limit the loss to 5 % of 30 copies, and with a
/// correct model this trial costs the time of 1.4 copies, so that ten copies would reach only 0.88 of the gain.
#[test]
fn programs_of_thirty_copies_lose_five_percent_at_most_where_the_model_is_wrong() {
    for (name, src, dst) in COPIES {
        for mib in [64, 256] {
            for real in REAL {
                let mut world = program(name, real, (src, dst), mib);
                let is_hidden = (name, real) == ("dgx1-v100", ("pcie", 3.0));
                let (most, on_average) = if is_hidden { (0.2, 0.2) } else { (0.07, 0.05) };
                let mut all = 0.0;
                for seed in 1..=5 {
                    let mut lost = |executions| {
                        let game = world.play(&Conditions { executions, seed, late: 0, ..Conditions::default() }).expect("it runs");
                        1.0 - game.end().did / game.end().plain
                    };
                    let (short, long) = (lost(30), lost(EXECUTIONS));
                    println!("{name}, {src} to {dst}, {mib} MiB, {real:?}: lost {short:.3} in 30 copies, {long:.3} in {EXECUTIONS}");
                    assert!(short <= most && long <= 0.02, "{name}, {src} to {dst}, {mib} MiB, {real:?}: lost {short}, {long}");
                    all += short;
                }
                assert!(all <= 5.0 * on_average, "{name}, {src} to {dst}, {mib} MiB, {real:?}: lost {} on average", all / 5.0);
            }
        }
    }
}

/// Tests programs that enqueue each copy when 1,000 earlier copies are still queued. Executions that are enqueued after the first 20 have
/// completed must use the best variant. No execution that is enqueued earlier can know more than the model.
#[test]
fn copies_that_are_enqueued_a_thousand_ahead_learn_within_the_time_of_twenty() {
    const AHEAD: usize = 1000;
    let mut least = f64::INFINITY;
    for (name, src, dst) in COPIES {
        for mib in [64, 256] {
            for real in REAL {
                let mut world = program(name, real, (src, dst), mib);
                let (mut all, seeds) = (0.0, 5);
                for seed in 1..=seeds {
                    let conditions = Conditions { executions: 2 * AHEAD as u64 + 20, seed, late: AHEAD as u64, ..Conditions::default() };
                    let game = world.play(&conditions).expect("it runs");
                    let of_best = |from: usize, to: usize| {
                        let (begin, end) = (game.moments[from], game.moments[to]);
                        (end.did - begin.did) / (end.best - begin.best)
                    };
                    let (queued, learned) = (of_best(0, AHEAD), of_best(AHEAD + 20, 2 * AHEAD + 20));
                    let model = game.end().model.max(game.end().plain) / game.end().best;
                    println!(
                        "{name}, {src} to {dst}, {mib} MiB, {real:?}: {queued:.3} of the best while nothing is known, then {learned:.3}"
                    );
                    assert!(model < 0.99 || queued >= 0.88, "{name}, {src} to {dst}, {mib} MiB, {real:?}: {queued} with a correct model");
                    least = least.min(learned);
                    all += learned / f64::from(seeds as u32);
                }
                assert!(all >= 0.98, "{name}, {src} to {dst}, {mib} MiB, {real:?}: {all} of the best");
            }
        }
    }
    println!("at least {least:.3} of the best after the time of 20 copies");
}

/// Simulates several players (plans that choose variants) on all machines in `real`. Prints and returns the smallest performance, relative
/// to the best joint choice and to plain copies.
fn together(name: &str, players: usize, mib: u64, leaves: Option<[f64; 2]>, real: &[(&str, f64)]) -> (f64, f64) {
    let (mut of_best, mut of_plain, mut switches) = (f64::INFINITY, f64::INFINITY, 0);
    for &real in real {
        let mut world = world(name, real, players, mib, leaves);
        for seed in 1..=3 {
            let play = play(&mut world, seed);
            of_best = of_best.min(play.end().did / play.end().best);
            of_plain = of_plain.min(play.end().did / play.end().plain);
            switches = switches.max((0..players).map(|player| play.switches(player, 8000, EXECUTIONS)).max().unwrap_or(0));
            // A player that has not changed its variant for long must have no reason to change it.
            if (0..players).all(|player| play.switches(player, 9000, EXECUTIONS) == 0) {
                let joint: Vec<u8> = play.players.iter().map(|player| player.in_force.last().expect("a first one").2 as u8).collect();
                let gain = world.gain_alone(EXECUTIONS - 1, &joint).expect("it runs");
                assert!(gain < 0.06, "{name}, {real:?}: one of {players} would gain {gain} by changing alone, {joint:?}");
            }
        }
    }
    println!(
        "{players} players on {name}, {mib} MiB, tenants leave {leaves:?}: {of_best:.3} of the best, {of_plain:.3} of plain copies, {switches} switches in 2,000"
    );
    assert!(switches <= 6, "{switches} switches of a player in the last 2,000 executions");
    (of_best, of_plain)
}

#[test]
fn players_that_choose_alone_settle_and_reach_nearly_the_best_joint_choice() {
    for (name, players, mib, least) in [
        ("hgx-h200", 2, 64, 0.98),
        ("hgx-h200", 4, 64, 0.98),
        ("hgx-h200", 8, 64, 0.98),
        ("hgx-h200", 2, 256, 0.98),
        ("hgx-h200", 4, 256, 0.98),
        // More players than optimal use host memory, because each of them still gains a little.
        ("hgx-h200", 8, 256, 0.96),
        ("beluga", 2, 64, 0.98),
        // If host memory has 0.3 of the modelled bandwidth, too many players use it.
        ("beluga", 4, 64, 0.95),
    ] {
        let (of_best, of_plain) = together(name, players, mib, None, &REAL);
        assert!(of_best >= least && of_plain >= 0.98, "{players} on {name}: {of_best} of the best, {of_plain} of plain copies");
    }
}

#[test]
fn players_that_choose_alone_keep_up_with_tenants() {
    for (name, players, least) in [("hgx-h200", 2, 0.98), ("hgx-h200", 4, 0.97), ("hgx-h200", 8, 0.97), ("beluga", 2, 0.98)] {
        let (of_best, of_plain) = together(name, players, 64, Some([0.7, 0.5]), &REAL);
        assert!(of_best >= least && of_plain >= 0.98, "{players} on {name}: {of_best} of the best, {of_plain} of plain copies");
    }
}

/// No rule that observes only its own times can do better here: a player that leaves the relays to the others becomes slower.
#[test]
fn where_each_gains_by_what_the_others_lose_players_that_choose_alone_end_below_plain_copies() {
    let (of_best, of_plain) = together("beluga", 8, 64, None, &[("host", 1.0)]);
    assert!((0.8..0.98).contains(&of_best) && (0.8..0.98).contains(&of_plain));
}

/// Tests a program that keeps several copies in flight. Many executions are then requested before the time of the first is known.
#[test]
fn among_others_what_may_be_slow_is_tried_once_and_what_gains_is_found() {
    let mut tried_twice = 0;
    for seed in 0..100 {
        // The time of an execution includes waiting behind whole copies of other players.
        let mut chooser = Chooser::among_others(3, 64, seed);
        let course = Course::of(&mut chooser, |_| [20.0, 20.0, 1.0], 0.02, 6, seed);
        tried_twice += u32::from(course.lost(0, STRETCH) > 0.05);
        assert!(course.lost(0, EXECUTIONS) <= 0.02, "{seed}: {}", course.lost(0, EXECUTIONS));
        assert_eq!(chooser.in_force(), 2);
        let mut chooser = Chooser::among_others(3, 64, seed);
        Course::of(&mut chooser, |_| [0.95, 0.97, 1.0], 0.01, 6, seed);
        assert_eq!(chooser.in_force(), 0, "{seed}");
    }
    assert!(tried_twice <= 5, "{tried_twice} of 100: a time in a hundred is never reported");
}

/// Returns the variants that the first `executions` executions of a program use if variant `v` takes `times[v]` ms and the model predicts
/// `predicted[v]` ms. The program waits for each execution.
fn first_variants(predicted: [f64; 3], times: [f64; 3], executions: usize) -> Vec<usize> {
    let mut chooser = Chooser::new(&[None; 3], 64, 1).expecting(predicted.map(|ms| ms * 1e-3));
    let execute = |_| {
        let Choice { variant, measure } = chooser.next_execution(0);
        if measure {
            chooser.measured(variant, (times[variant] * 1e6) as u64);
        }
        variant
    };
    (0..executions).map(execute).collect()
}

#[test]
fn a_large_expected_gain_is_used_from_the_first_execution_and_given_up_when_it_is_not_there() {
    let predicted = [1.0, 1.5, 2.0];
    assert_eq!(first_variants(predicted, predicted, 4), [0; 4], "no execution tries what is expected to be slower");
    assert_eq!(first_variants(predicted, [0.9, 1.4, 1.9], 4), [0; 4]);
    let taken = first_variants(predicted, [3.0, 3.5, 2.0], 12);
    assert!(taken[0] == 0 && taken[1] == 2, "the second execution uses the plain copies: {taken:?}");
    assert!(taken[7..].iter().all(|v| *v == 2), "{taken:?}");
}

#[test]
fn a_small_expected_gain_starts_with_plain_copies_and_is_tried_in_small_steps() {
    let taken = first_variants([0.9, 0.95, 1.0], [0.9, 0.95, 1.0], 12);
    assert!(taken[..3] == [2, 1, 0] && taken[6..].iter().filter(|v| **v == 0).count() >= 5, "{taken:?}");
    let taken = first_variants([0.9, 0.95, 1.0], [3.0, 1.7, 1.0], 24);
    assert!(!taken.contains(&0) && taken.iter().filter(|v| **v == 1).count() <= 2, "{taken:?}");
}

#[test]
fn executions_that_are_enqueued_far_ahead_use_the_variant_that_is_expected_to_be_much_faster() {
    for (predicted, variant) in [([1.0, 1.5, 2.0], 0), ([1.9, 1.95, 2.0], 2)] {
        let mut chooser = Chooser::new(&[None; 3], 64, 1).expecting(predicted);
        let (mut under_way, mut chosen) = (0, [0; 3]);
        for execution in 1..=1000 {
            let choice = chooser.next_execution(under_way);
            assert!(choice.measure || choice.variant == variant, "only a measured execution uses another variant: {choice:?}");
            assert!(variant == 2 || execution > 16 || choice.variant == 0, "a short program tries nothing that is expected to be slower");
            under_way += usize::from(choice.measure);
            chosen[choice.variant] += 1;
            assert_eq!(chooser.unmeasured(), variant);
            // Each variant is measured within the time of 20 executions.
            assert!(execution < 20 || chosen.iter().all(|chosen| *chosen > 0), "{chosen:?}");
        }
        assert!(under_way == MOST_UNDER_WAY && chosen[variant] >= 990, "{under_way} measured, {chosen:?}");
    }
}

#[test]
fn without_measured_times_the_model_decides() {
    let mut chooser = Chooser::new(&[None; 3], 64, 1).expecting([0.9, 0.95, 1.0]);
    assert_eq!((chooser.in_force(), chooser.unmeasurable()), (2, 0));
    let mut measured = chooser.clone();
    chooser.fix();
    assert_eq!((chooser.in_force(), chooser.unmeasured()), (0, 0));
    measured.measured(2, 1000);
    measured.fix();
    assert_eq!(measured.in_force(), 2);
}

#[test]
fn while_nothing_is_known_what_is_not_measured_are_the_plain_copies() {
    let mut chooser = Chooser::new(&[None; 3], 64, 1);
    for _ in 0..64 {
        chooser.next_execution(0);
        assert_eq!(chooser.unmeasured(), 2);
    }
    (0..4).for_each(|_| (0..3).for_each(|variant| chooser.measured(variant, [900, 950, 1000][variant])));
    assert_eq!((chooser.in_force(), chooser.unmeasured()), (0, 0));
}
