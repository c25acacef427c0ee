//! Reproduces published results on multi-path transfers in UCX by simulation. The file `tests/rust/papers.md` contains the tables.
//!
//! Sojoodi et al. 2024 (streams) and 2026 (graphs) measure puts, OMB's bandwidth tests and a Jacobi ring on nodes of four V100 (`beluga`)
//! and four A100 (`narval`). They use one to three GPU paths, with and without a path through host memory. Here mpgpu's planner makes plans
//! for the same transfers on models of these machines, and the simulator runs the plans. Conditions of the papers that affect the results
//! are the same: each put is planned for an idle machine ("this offline tuning does not consider the ongoing communication", 2024, section
//! 3.2), relays are selected manually, and each rank is a separate process.

use mpgpu_core::model::simulate::{Rank, Steady, steady};
use mpgpu_core::plan::{Engine, Options, Passing, Shape, plan};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, LinkId, Machine, Topology, preset};
use mpgpu_core::units::size;
use std::error::Error;
use std::fmt::{self, Write};

const MACHINES: [&str; 2] = ["beluga", "narval"];
const ENGINES: [Engine; 2] = [Engine::Stream, Engine::Graph];
const MIB: u64 = 1 << 20;
const PUT_SIZES: [u64; 10] = [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB];
const RING_SIZES: [u64; 4] = [32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB];

/// Number of paths over GPUs, including the direct path, and whether there is also a path through host memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Paths {
    gpu: u32,
    host: bool,
}

const PATHS: [Paths; 5] = [
    Paths { gpu: 2, host: false },
    Paths { gpu: 3, host: false },
    Paths { gpu: 1, host: true },
    Paths { gpu: 2, host: true },
    Paths { gpu: 3, host: true },
];
const THREE: Paths = Paths { gpu: 3, host: false };
const THREE_AND_HOST: Paths = Paths { gpu: 3, host: true };

/// Results of puts from GPU 0 to GPU 1, or in both directions.
struct Puts {
    machine: &'static str,
    both_directions: bool,
    window: u32,
    rows: Vec<PutRow>,
}

struct PutRow {
    bytes: u64,
    /// Rate in GB/s over one path with streams, summed over both directions.
    one_path: f64,
    /// Speed-up over one path, for each entry of [`PATHS`] and of [`ENGINES`].
    speedup: [[f64; 2]; 5],
    /// Speed-up of three GPU paths and the host path with streams over one path, if both directions are planned together. The papers do not
    /// do this.
    together: f64,
}

/// Results of a ring in which each of four GPUs sends to the next.
struct Ring {
    machine: &'static str,
    rows: Vec<RingRow>,
    /// Result for the largest size with a compute kernel before the copies of each time step ([`KERNEL`]).
    application: RingRow,
}

/// Time in seconds of the compute kernel of a Jacobi time step for each byte of an exchanged row. The kernel reads and writes eight rows,
/// half of which belong to each of the two exchanges. Its rate is not published. With this value, the speed-ups with two paths agree with
/// the papers on both machines.
const KERNEL: f64 = 8.0 / 300e9;

struct RingRow {
    bytes: u64,
    one_path: f64,
    /// Speed-up with two and with three paths, for each entry of [`ENGINES`].
    speedup: [[f64; 2]; 2],
    /// Speed-up if all four transfers are planned together, with any number of paths but without host memory.
    together: f64,
}

/// Statement that the papers make, and whether it is true in the simulation.
struct Claim {
    what: String,
    published: String,
    here: String,
    holds: bool,
}

struct Papers {
    puts: Vec<Puts>,
    rings: Vec<Ring>,
    claims: Vec<Claim>,
}

/// Runs all simulations and returns the results.
fn reproduce() -> Result<Papers, Box<dyn Error>> {
    let mut puts = Vec::new();
    for machine in MACHINES {
        for both_directions in [false, true] {
            for window in [1, 4, 16] {
                let rows = PUT_SIZES.iter().map(|&bytes| put_row(machine, both_directions, window, bytes));
                puts.push(Puts { machine, both_directions, window, rows: rows.collect::<Result<_, _>>()? });
            }
        }
    }
    let mut rings = Vec::new();
    for machine in MACHINES {
        let rows = RING_SIZES.iter().map(|&bytes| ring_row(machine, bytes, 0.0)).collect::<Result<_, _>>()?;
        let largest = RING_SIZES[RING_SIZES.len() - 1];
        rings.push(Ring { machine, rows, application: ring_row(machine, largest, KERNEL * largest as f64)? });
    }
    let claims = claims(&puts, &rings);
    Ok(Papers { puts, rings, claims })
}

/// Returns the planner's description of a transfer between two GPUs.
fn shape(src_device: DeviceId, dst_device: DeviceId, bytes: u64) -> Shape {
    let kind = MemoryKind::Device;
    Shape { source: 0, dst_device, src_device, dst_kind: kind, src_kind: kind, bytes }
}

fn put_row(name: &str, both_directions: bool, window: u32, bytes: u64) -> Result<PutRow, Box<dyn Error>> {
    let topology = preset(name).ok_or(name)?;
    let machine = Machine::new(topology.clone())?;
    let ways: &[(u32, u32)] = if both_directions { &[(0, 1), (1, 0)] } else { &[(0, 1)] };
    let run = |paths: Paths, engine: Engine| -> Result<Steady, Box<dyn Error>> {
        let relays: Vec<u32> = (2..1 + paths.gpu).collect();
        let ranks = ways.iter().map(|&(src, dst)| rank(&topology, src, dst, bytes, &relays, paths, engine));
        Ok(steady(&machine, &ranks.collect::<Result<Vec<_>, _>>()?, window)?)
    };
    let one_path = run(Paths { gpu: 1, host: false }, Engine::Stream)?;
    let mut speedup = [[0.0; 2]; 5];
    for (paths, of) in PATHS.iter().zip(&mut speedup) {
        for (engine, of) in ENGINES.iter().zip(of) {
            *of = one_path.seconds / run(*paths, *engine)?.seconds;
        }
    }
    let shapes: Vec<_> = ways.iter().map(|&(src, dst)| shape(DeviceId::gpu(src), DeviceId::gpu(dst), bytes)).collect();
    let options = Options { engine: Engine::Stream, passing: Passing::Off, ..Options::default() };
    let together = steady(&machine, &[plan(&machine, &shapes, &options)?.as_rank()], window)?;
    Ok(PutRow { bytes, one_path: one_path.rate(), speedup, together: one_path.seconds / together.seconds })
}

fn ring_row(name: &str, bytes: u64, kernel: f64) -> Result<RingRow, Box<dyn Error>> {
    let topology = preset(name).ok_or(name)?;
    let machine = Machine::new(topology.clone())?;
    let run = |gpu: u32, engine: Engine| -> Result<Steady, Box<dyn Error>> {
        // With two paths, the relay is the GPU at distance two, so that every link carries one hop (2024, figure 7).
        let relays = |from: u32| (2..=gpu).map(move |step| (from + step) % 4).collect::<Vec<_>>();
        let paths = Paths { gpu, host: false };
        let ranks = (0..4).map(|from| rank(&topology, from, (from + 1) % 4, bytes, &relays(from), paths, engine));
        let ranks = ranks.map(|rank| Ok::<_, Box<dyn Error>>(Rank { kernel, ..rank? }));
        Ok(steady(&machine, &ranks.collect::<Result<Vec<_>, _>>()?, 1)?)
    };
    let one_path = run(1, Engine::Stream)?;
    let mut speedup = [[0.0; 2]; 2];
    for (paths, of) in [2, 3].iter().zip(&mut speedup) {
        for (engine, of) in ENGINES.iter().zip(of) {
            *of = one_path.seconds / run(*paths, *engine)?.seconds;
        }
    }
    let shapes: Vec<_> = (0..4).map(|from| shape(DeviceId::gpu(from), DeviceId::gpu((from + 1) % 4), bytes)).collect();
    let options = Options { engine: Engine::Stream, host_path: false, passing: Passing::Off, ..Options::default() };
    let together = steady(&machine, &[Rank { kernel, ..plan(&machine, &shapes, &options)?.as_rank() }], 1)?;
    Ok(RingRow { bytes, one_path: one_path.rate(), speedup, together: one_path.seconds / together.seconds })
}

/// Returns the plan of a process for one put. The process plans for a machine on which only the GPUs in `relays` may relay.
fn rank(topology: &Topology, src: u32, dst: u32, bytes: u64, relays: &[u32], paths: Paths, engine: Engine) -> Result<Rank, Box<dyn Error>> {
    let open: Vec<DeviceId> = [src, dst].iter().chain(relays).map(|&gpu| DeviceId::gpu(gpu)).collect();
    let machine = Machine::new(without_other_gpus(topology, &open))?;
    let options = Options { engine, host_path: paths.host, passing: Passing::Off, ..Options::default() };
    let shapes = vec![shape(DeviceId::gpu(src), DeviceId::gpu(dst), bytes)];
    Ok(plan(&machine, &shapes, &options)?.as_rank())
}

/// Returns the topology with only the links of the devices in `open`. Devices keep their numbers, so that a program for it also runs on the
/// whole machine.
fn without_other_gpus(topology: &Topology, open: &[DeviceId]) -> Topology {
    let mut gpus = 0;
    let closed: Vec<bool> = topology
        .nodes
        .iter()
        .map(|node| {
            let is_gpu = node.kind == mpgpu_core::topology::NodeKind::Gpu;
            gpus += u32::from(is_gpu);
            is_gpu && !open.contains(&DeviceId::gpu(gpus - 1))
        })
        .collect();
    let mut reduced = topology.clone();
    let mut number = vec![None; topology.links.len()];
    reduced.links.clear();
    for (link, number) in topology.links.iter().zip(&mut number) {
        if !closed[link.from.0 as usize] && !closed[link.to.0 as usize] {
            *number = Some(LinkId(reduced.links.len() as u32));
            reduced.links.push(link.clone());
        }
    }
    for shared in &mut reduced.shared {
        shared.links = shared.links.iter().filter_map(|link| number[link.0 as usize]).collect();
    }
    reduced.shared.retain(|shared| !shared.links.is_empty());
    reduced
}

impl PutRow {
    /// Returns the speed-up for an entry of [`PATHS`] and of [`ENGINES`].
    fn times(&self, paths: Paths, engine: Engine) -> f64 {
        let of = PATHS.iter().zip(&self.speedup).find(|(other, _)| **other == paths).map_or([f64::NAN; 2], |(_, of)| *of);
        if engine == Engine::Graph { of[1] } else { of[0] }
    }
}

fn claims(puts: &[Puts], rings: &[Ring]) -> Vec<Claim> {
    let mut claims = Vec::new();
    let mut claim = |what: String, published: &str, here: String, holds: bool| {
        claims.push(Claim { what, published: published.into(), here, holds });
    };
    let table = |machine: &'static str, both: bool, window: u32| {
        puts.iter()
            .filter(move |puts| (puts.machine, puts.both_directions, puts.window) == (machine, both, window))
            .flat_map(|puts| &puts.rows)
    };
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    for (engine, published) in ENGINES.iter().zip([[2.85, 2.75], [2.95, 2.85]]) {
        for (machine, published) in MACHINES.iter().zip(published) {
            let best = most(&mut table(machine, false, 16).map(|row| row.times(THREE_AND_HOST, *engine)));
            let off = best / published - 1.0;
            claim(
                format!("`{machine}`, put, {}: best speedup, three GPU paths and host", engine.name()),
                &format!("{published:.2}"),
                format!("{best:.2} ({:+.0} %)", 100.0 * off),
                off.abs() <= 0.1,
            );
        }
    }
    for machine in MACHINES {
        let all = |row: &PutRow| most(&mut row.speedup.iter().flatten().copied());
        let small = most(&mut [1, 16].iter().flat_map(|&window| table(machine, false, window)).filter(|row| row.bytes <= MIB).map(all));
        claim(format!("`{machine}`, put: best speedup at 1 MiB"), "no gain", format!("{small:.2}"), small <= 1.02);

        let host = |row: &PutRow, engine: Engine| row.times(THREE_AND_HOST, engine) / row.times(THREE, engine);
        let gains =
            [1, 16].iter().flat_map(|&window| table(machine, false, window)).flat_map(|row| ENGINES.map(|engine| host(row, engine)));
        let gain = most(&mut gains.into_iter());
        claim(
            format!("`{machine}`, put: most that the host adds to three GPU paths"),
            "at most 15 %",
            format!("{:.0} %", 100.0 * (gain - 1.0)),
            gain <= 1.15,
        );

        for window in [1, 16] {
            let large = table(machine, true, window).filter(|row| row.bytes >= 64 * MIB);
            let ratios: Vec<f64> = large.flat_map(|row| ENGINES.map(|engine| host(row, engine))).collect();
            let (from, to) = (least(&mut ratios.iter().copied()), most(&mut ratios.iter().copied()));
            claim(
                format!("`{machine}`, both directions, window {window}: three GPU paths with the host against without, from 64 MiB on"),
                "slower",
                format!("{from:.2} to {to:.2} times"),
                to < 1.0,
            );
        }

        let middle = |window: u32| {
            let rows = table(machine, false, window).filter(|row| (8 * MIB..=64 * MIB).contains(&row.bytes));
            rows.flat_map(|row| PATHS.map(|paths| row.one_path * row.times(paths, Engine::Stream))).collect::<Vec<_>>()
        };
        let ratios: Vec<f64> = middle(16).iter().zip(middle(1)).map(|(wide, narrow)| wide / narrow).collect();
        let (from, to) = (least(&mut ratios.iter().copied()), most(&mut ratios.iter().copied()));
        claim(
            format!("`{machine}`, put, 8 to 64 MiB, all paths: bandwidth of window 16 against window 1"),
            "better",
            format!("{from:.2} to {to:.2} times"),
            from > 1.0,
        );

        let best = |engine: Engine| most(&mut table(machine, false, 16).map(|row| row.times(THREE_AND_HOST, engine)));
        let at_best = best(Engine::Graph) / best(Engine::Stream);
        claim(
            format!("`{machine}`, put: best speedup with graphs against the best with streams"),
            "3 to 4 % more",
            format!("{:+.1} %", 100.0 * (at_best - 1.0)),
            (1.02..=1.05).contains(&at_best),
        );
        let gain = |row: &PutRow| row.times(THREE_AND_HOST, Engine::Graph) / row.times(THREE_AND_HOST, Engine::Stream);
        let gains: Vec<f64> = table(machine, false, 1).map(gain).collect();
        claim(
            format!("`{machine}`, put, window 1: graphs against streams at any size"),
            "faster from 8 MiB on, slower below",
            format!(
                "{:+.1} % to {:+.1} %",
                100.0 * (least(&mut gains.iter().copied()) - 1.0),
                100.0 * (most(&mut gains.iter().copied()) - 1.0)
            ),
            gains.iter().zip(table(machine, false, 1)).all(|(gain, row)| if row.bytes >= 8 * MIB { *gain > 1.0 } else { *gain < 1.0 }),
        );
    }
    let middle = |machine: &'static str| {
        let rows: Vec<f64> = table(machine, false, 1)
            .filter(|row| (8 * MIB..=64 * MIB).contains(&row.bytes))
            .map(|row| row.times(THREE, Engine::Stream))
            .collect();
        rows
    };
    let (beluga, narval) = (middle(MACHINES[0]), middle(MACHINES[1]));
    claim(
        "window 1, 8 to 64 MiB, three GPU paths: speedup on `narval` against `beluga`".into(),
        "less",
        format!(
            "{:.2} to {:.2} times",
            least(&mut narval.iter().zip(&beluga).map(|(n, b)| n / b)),
            most(&mut narval.iter().zip(&beluga).map(|(n, b)| n / b))
        ),
        narval.iter().zip(&beluga).all(|(narval, beluga)| narval < beluga),
    );
    for (ring, published) in rings.iter().zip(["1.26 over 1.20", "1.15 over 1.08"]) {
        let ordered = ring
            .rows
            .iter()
            .all(|row| (0..2).all(|engine| row.speedup[0][engine] > row.speedup[1][engine] && row.speedup[1][engine] > 1.0));
        let last = &ring.rows[ring.rows.len() - 1];
        claim(
            format!("`{}`, Jacobi ring: two paths better than three, three better than one", ring.machine),
            &format!("{published}, whole application"),
            format!("{:.2} over {:.2}, the exchange alone, 256 MiB", last.speedup[0][0], last.speedup[1][0]),
            ordered,
        );
        let [two, three] = ring.application.speedup.map(|engines| engines[0]);
        claim(
            format!("`{}`, Jacobi, steps with a kernel: two and three paths", ring.machine),
            &published.replace("over", "and"),
            format!("{two:.2} and {three:.2}, 256 MiB"),
            two > three
                && published
                    .split(" over ")
                    .zip([two, three])
                    .all(|(read, here)| (read.parse::<f64>().unwrap_or(0.0) / here - 1.0).abs() < 0.04),
        );
    }
    claims
}

impl fmt::Display for Papers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "| | published | here | |\n| --- | --- | --- | --- |")?;
        for Claim { what, published, here, holds } in &self.claims {
            writeln!(out, "| {what} | {published} | {here} | {} |", if *holds { "holds" } else { "**differs**" })?;
        }
        for puts in &self.puts {
            let direction = if puts.both_directions { "both directions" } else { "one direction" };
            writeln!(out, "\n**`{}`, put, {direction}, window {}**\n", puts.machine, puts.window)?;
            write!(out, "| size | 1 path, GB/s |")?;
            for paths in PATHS {
                write!(out, " {}{} |", paths.gpu, if paths.host { " + host" } else { "" })?;
            }
            writeln!(out, "{}", if puts.both_directions { " planned together |" } else { "" })?;
            writeln!(out, "{}", "| --- ".repeat(PATHS.len() + 2 + usize::from(puts.both_directions)) + "|")?;
            for row in &puts.rows {
                write!(out, "| {} | {:.1} |", size(row.bytes), row.one_path)?;
                for [stream, graph] in row.speedup {
                    write!(out, " {stream:.2} / {graph:.2} |")?;
                }
                if puts.both_directions {
                    write!(out, " {:.2} |", row.together)?;
                }
                out.write_char('\n')?;
            }
        }
        for ring in &self.rings {
            writeln!(out, "\n**`{}`, ring of four, one direction**\n", ring.machine)?;
            writeln!(out, "| message | 1 path, GB/s | 2 paths | 3 paths | planned together |\n| --- | --- | --- | --- | --- |")?;
            for RingRow { bytes, one_path, speedup: [two, three], together } in &ring.rows {
                let [two, three] = [two, three].map(|of| format!("{:.2} / {:.2}", of[0], of[1]));
                writeln!(out, "| {} | {one_path:.1} | {two} | {three} | {together:.2} |", size(*bytes))?;
            }
        }
        Ok(())
    }
}

const BEGIN: &str = "<!-- printed by the test simulator::papers -->\n";
const END: &str = "<!-- end -->\n";

/// Tests that the tables on the page equal the current results. If `UPDATE_DOCS=1` is set, writes the tables instead.
#[test]
fn the_published_results_come_out_as_the_tables_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/rust/papers.md");
    let page = std::fs::read_to_string(path).expect("the tables");
    let now = reproduce().expect("the presets can be planned for").to_string();
    let (before, rest) = page.split_once(BEGIN).expect("the mark before the tables");
    let (kept, after) = rest.split_once(END).expect("the mark behind the tables");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        return std::fs::write(path, format!("{before}{BEGIN}\n{now}\n{END}{after}")).expect("the tables are writable");
    }
    let changed = now.trim().lines().zip(kept.trim().lines()).find(|(now, kept)| now != kept);
    assert!(now.trim() == kept.trim(), "{changed:?}, now and before; UPDATE_DOCS=1 cargo test --test library papers");
}

/// Tests which statements of the papers hold. `tests/rust/papers.md` explains the differences, and must be changed if a statement becomes
/// true or false.
#[test]
fn the_published_shape_holds_but_for_what_the_page_explains() {
    let papers = reproduce().expect("the presets can be planned for");
    let differs: Vec<&str> = papers.claims.iter().filter(|claim| !claim.holds).map(|claim| claim.what.as_str()).collect();
    let expected = [
        "`beluga`, both directions, window 1: three GPU paths with the host against without, from 64 MiB on",
        "`beluga`, both directions, window 16: three GPU paths with the host against without, from 64 MiB on",
        "`beluga`, put: best speedup with graphs against the best with streams",
        "`beluga`, put, window 1: graphs against streams at any size",
        "`narval`, both directions, window 16: three GPU paths with the host against without, from 64 MiB on",
        "`narval`, put: best speedup with graphs against the best with streams",
        "`narval`, put, window 1: graphs against streams at any size",
    ];
    assert_eq!(differs, expected);
    assert!(papers.claims.len() >= 20);
}

#[test]
fn a_machine_without_some_gpus_keeps_the_numbers_of_the_others() {
    let topology = preset("beluga").expect("a preset");
    let reduced = Machine::new(without_other_gpus(&topology, &[DeviceId::gpu(0), DeviceId::gpu(3)])).expect("valid");
    let whole = Machine::new(topology).expect("valid");
    let (a, b, c) = (DeviceId::gpu(0), DeviceId::gpu(3), DeviceId::gpu(1));
    let bandwidth = |machine: &Machine, from, to| machine.route(from, to).map(|route| route.bandwidth);
    assert_eq!(bandwidth(&reduced, a, b), bandwidth(&whole, a, b));
    assert_eq!(bandwidth(&reduced, a, DeviceId::HOST), bandwidth(&whole, a, DeviceId::HOST));
    assert_eq!(bandwidth(&reduced, a, c), None);
}
