//! Implements `mpgpu topo`, which shows a machine as a table, a drawing, a file, or JSON.

use crate::arguments::{Failure, shape, write_file};
use crate::draw::{self, Cable, Together, cables};
use crate::machine::{Source, found, named};
use crate::text::{table, wrap};
use clap::Args;
use mpgpu_core::plan::{Options, plan};
use mpgpu_core::topology::{self, Cost, CostUnit, Costs, DeviceId, Machine, Topology};
use mpgpu_core::units::time;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Size in bytes of the copies for which the table shows the combined rate of all paths. At this size startup times are negligible.
const LARGE: u64 = 1 << 30;

#[derive(Args)]
pub struct TopoArguments {
    /// Machine to show: a preset's name, a topology file, `discovered` (by the driver) or `probed` (the stored probe); by default the value
    /// of MPGPU_TOPOLOGY, else this machine, else the presets
    pub topology: Option<String>,
    /// List the presets
    #[arg(long, conflicts_with_all = ["topology", "toml", "svg"])]
    pub presets: bool,
    /// Print the topology as a TOML file, to edit for your own machine. Presets name the source of each figure
    #[arg(long, conflicts_with = "json")]
    pub toml: bool,
    /// Write a drawing (SVG) of the machine to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "toml"])]
    pub svg: Option<PathBuf>,
    /// Print JSON, with rates in bytes/s and times in seconds
    #[arg(long)]
    pub json: bool,
}

/// Runs the subcommand and returns the text for standard output.
pub fn run(arguments: &TopoArguments) -> Result<String, Failure> {
    let source = match &arguments.topology {
        _ if arguments.presets => Err("with --presets, the presets are listed and no machine is shown".into()),
        Some(name) => named(name).map(Ok)?,
        None => found()?,
    };
    let source = match source {
        Ok(source) => source,
        Err(_) if arguments.presets && arguments.json => return Ok(format!("{:#}\n", presets_json())),
        Err(_) if arguments.presets => return Ok(presets()),
        Err(why) if arguments.toml || arguments.svg.is_some() => {
            return Err(format!("there is no machine to show: {why}; name a preset or a topology file, as in `mpgpu topo beluga`").into());
        }
        Err(_) if arguments.json => return Ok(format!("{:#}\n", presets_json())),
        Err(why) => return Ok(format!("No GPU found: {why}.\n\n{}", presets())),
    };
    if let Some(file) = &arguments.svg {
        write_file(file, &draw::machine(source.machine.topology()))?;
        return Ok(String::new());
    }
    if arguments.toml {
        let preset = arguments.topology.as_deref().and_then(topology::preset_text);
        return Ok(preset.map_or_else(|| source.machine.topology().to_toml(), str::to_owned));
    }
    if arguments.json {
        return Ok(format!("{:#}\n", to_json(&source)));
    }
    Ok(describe(&source))
}

fn presets() -> String {
    let mut text = String::from("Presets, for --topology and MPGPU_TOPOLOGY:\n");
    for name in topology::preset_names() {
        let description = topology::preset(name).map(|preset| preset.description).unwrap_or_default();
        text += &format!("  {name:<12} {description}\n");
    }
    text + "`mpgpu topo NAME` shows one as a table, `--svg FILE` draws it, `--toml` prints it as a file to edit.\n"
}

fn presets_json() -> Value {
    let preset = |name| json!({"name": name, "description": topology::preset(name).map(|preset| preset.description)});
    json!({"presets": topology::preset_names().map(preset).collect::<Vec<_>>()})
}

/// Returns the description of a machine as text.
fn describe(source: &Source) -> String {
    let machine = &source.machine;
    let topology = machine.topology();
    let mut text = format!("{} ({})\n", topology.name, source.origin);
    for line in wrap(&topology.description, 100) {
        text += &format!("  {line}\n");
    }
    text += "\nDirect copies between two memories, from row to column, GB/s (10^9 bytes per second);\n\
             '-' if no copy engine can make the copy:\n";
    text += &matrix(machine, |from, to| machine.route(from, to).map(|route| gigabytes(route.bandwidth)));
    text += "\nCopies over all paths that help, modelled for 1 GiB without other traffic, GB/s (+ relays used):\n";
    text += &matrix(machine, |from, to| all_paths(machine, from, to));
    text += "\nLinks: GB/s in each direction, GB/s of both directions together if they share capacity, and latency:\n";
    text += &links(topology);
    text += "\nFixed costs (described in docs/reference/topology.md):\n";
    text += &costs(&topology.costs);
    text + &format!("\n{}\n", source.remark)
}

/// Returns the devices that the tables show: at most 20, because 20 columns fill a wide terminal. On a machine with more devices, only the
/// first 20 are shown.
fn shown(machine: &Machine) -> Vec<DeviceId> {
    const MOST: usize = 20;
    let devices: Vec<DeviceId> = machine.devices().collect();
    if devices.len() <= MOST {
        return devices;
    }
    let hosts = devices.iter().copied().filter(|device| device.is_host()).take(4);
    devices.iter().copied().filter(|device| !device.is_host()).take(MOST - 4).chain(hosts).collect()
}

/// Returns a table with a row for each source device and a column for each destination device. `cell` returns the content of one cell.
fn matrix(machine: &Machine, cell: impl Fn(DeviceId, DeviceId) -> Option<String>) -> String {
    let (shown, devices) = (shown(machine), machine.devices().count());
    let name = |device: DeviceId| machine.device_name(device).unwrap_or_default().to_owned();
    let mut rows = vec![std::iter::once(String::new()).chain(shown.iter().map(|&to| name(to))).collect::<Vec<_>>()];
    for &from in &shown {
        let cells = shown.iter().map(|&to| if from == to { String::new() } else { cell(from, to).unwrap_or_else(|| "-".into()) });
        rows.push(std::iter::once(name(from)).chain(cells).collect());
    }
    let mut text = table(&rows);
    if shown.len() < devices {
        text += &format!("  ({} of {devices} devices; --json lists the routes between all devices)\n", shown.len());
    }
    text
}

/// Returns the rate in GB/s that the planner predicts for one large isolated copy, and the number of relays, for example `132.1 +3`.
/// Returns `None` if no plan is possible.
fn all_paths(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<String> {
    let planned = large_copy(machine, from, to)?;
    let relays = planned.transfers[0].paths.iter().filter(|path| path.via.is_some()).count();
    let rate = gigabytes(LARGE as f64 / planned.predicted);
    Some(if relays == 0 { rate } else { format!("{rate} +{relays}") })
}

fn large_copy(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<mpgpu_core::plan::Plan> {
    plan(machine, &[shape(from, to, LARGE, false)], &Options::default()).ok()
}

/// Returns a list of the topology's links as text. Links of one kind with the same figures share one line.
fn links(topology: &Topology) -> String {
    let (cables, shared) = cables(topology);
    let name = |node: usize| topology.nodes[node].name.clone();
    let figures = |cable: &Cable| {
        (
            cable.kind.name(),
            cable.there,
            cable.back,
            cable.both,
            cable.latency.to_bits(),
            cable.marks_there.clone(),
            cable.marks_back.clone(),
        )
    };
    let mut groups: Vec<Vec<&Cable>> = Vec::new();
    for cable in &cables {
        match groups.iter_mut().find(|group| figures(group[0]) == figures(cable)) {
            Some(group) => group.push(cable),
            None => groups.push(vec![cable]),
        }
    }
    let mut text = String::new();
    for group in groups {
        let one = group[0];
        let rate = match (one.there, one.back) {
            (Some(there), Some(back)) if there == back => gigabytes(there),
            (Some(there), Some(back)) => format!("{} there, {} back", gigabytes(there), gigabytes(back)),
            (there, back) => format!("{}, one way", gigabytes(there.or(back).unwrap_or(0.0))),
        };
        let both = one.both.map_or(String::new(), |both| format!(", both together {}", both.text(gigabytes)));
        let latency = if one.latency > 0.0 { format!(", latency {}", time(one.latency)) } else { String::new() };
        let mut shares: Vec<usize> = one.marks_there.iter().chain(&one.marks_back).copied().collect();
        shares.sort_unstable();
        shares.dedup();
        let marks = match shares.iter().map(|&mark| shared[mark].name.as_str()).collect::<Vec<_>>().join(", ") {
            names if names.is_empty() => names,
            names => format!(", shares {names}"),
        };
        text += &format!("  {:<7} {rate}{both}{latency}{marks}\n", one.kind.name());
        let pairs: Vec<String> = group.iter().map(|cable| format!("{}-{}", name(cable.a), name(cable.b))).collect();
        for line in wrap(&pairs.join(" "), 88) {
            text += &format!("            {line}\n");
        }
    }
    if cables.iter().all(|cable| cable.latency == 0.0) {
        text += "  No link has a latency of its own: the fixed costs include the start-up time of copies.\n";
    }
    if !shared.is_empty() {
        text += "\nShared by several links, GB/s together:\n";
        let rows: Vec<Vec<String>> = shared
            .iter()
            .map(|resource| {
                let drawn = resource.links.iter().map(|link| &topology.links[link.0 as usize]);
                let drawn = drawn.map(|link| format!("{}>{}", name(link.from.0 as usize), name(link.to.0 as usize)));
                let drawn = drawn.collect::<Vec<_>>().join(" ");
                vec![resource.name.clone(), Together::of(resource).text(gigabytes), drawn]
            })
            .collect();
        let [width, rate] = [(0, 0), (1, 6)].map(|(column, least)| rows.iter().map(|row| row[column].len()).fold(least, usize::max));
        for row in rows {
            text += &format!("  {:<width$}  {:>rate$}  {}\n", row[0], row[1], row[2]);
        }
    }
    text
}

fn costs(costs: &Costs) -> String {
    let part = |cost: &Cost| match cost.unit {
        // Small costs are shown with two decimals, because the cost of each contiguous copy of a kernel (segment) is less than a tenth of a
        // microsecond.
        CostUnit::Seconds if (cost.of)(costs) < 1e-6 => format!("{} {:.2} us", cost.name, (cost.of)(costs) * 1e6),
        CostUnit::Seconds => format!("{} {}", cost.name, time((cost.of)(costs))),
        CostUnit::Part => format!("{} {:.0} %", cost.name, 100.0 * (cost.of)(costs)),
    };
    let parts: Vec<String> = Costs::TABLE.iter().map(part).collect();
    let mut text = String::new();
    for line in wrap(&parts.join("; "), 98) {
        text += &format!("  {line}\n");
    }
    if *costs == Costs::default() {
        text += "  These are the defaults, measured on H200 and assumed for other machines.\n";
    }
    text
}

fn gigabytes(rate: f64) -> String {
    if rate.is_finite() { format!("{:.1}", rate / 1e9) } else { "-".into() }
}

fn to_json(source: &Source) -> Value {
    let machine = &source.machine;
    let topology = machine.topology();
    let name = |node: topology::NodeId| &topology.nodes[node.0 as usize].name;
    let devices: Vec<DeviceId> = machine.devices().collect();
    let shown = shown(machine);
    let pairs = || devices.iter().flat_map(|&from| devices.iter().filter(move |&&to| to != from).map(move |&to| (from, to)));
    let link_names: Vec<&str> = machine.resources().iter().take(topology.links.len()).map(|resource| resource.name.as_str()).collect();
    let nodes = topology.nodes.iter().map(|node| {
        let (kind, peer) = match node.kind {
            topology::NodeKind::Gpu => ("gpu", None),
            topology::NodeKind::Host => ("host", None),
            topology::NodeKind::Switch { peer } => ("switch", Some(peer)),
        };
        json!({"name": node.name, "kind": kind, "peer": peer})
    });
    let links = topology.links.iter().zip(&link_names).map(|(link, full)| {
        json!({
            "name": full, "from": name(link.from), "to": name(link.to), "kind": link.kind.name(),
            "bytes_per_second": link.bandwidth, "latency_seconds": link.latency,
        })
    });
    let shared = topology.shared.iter().map(|shared| {
        let links: Vec<&str> = shared.links.iter().map(|link| link_names[link.0 as usize]).collect();
        json!({"name": shared.name, "bytes_per_second": shared.capacity, "staged_bytes_per_second": shared.staged, "links": links})
    });
    let routes = pairs().map(|(from, to)| {
        let route = machine.route(from, to);
        let links = route.map(|route| route.links.iter().map(|link| link_names[link.0 as usize]).collect::<Vec<_>>());
        let large = if shown.contains(&from) && shown.contains(&to) { large_copy(machine, from, to) } else { None };
        let vias = large.as_ref().map(|plan| plan.transfers[0].paths.iter().map(|path| path.via.map(|via| via.0)).collect::<Vec<_>>());
        json!({
            "from": from.0,
            "to": to.0,
            "bytes_per_second": route.map(|route| route.bandwidth),
            "latency_seconds": route.map(|route| route.latency),
            "links": links,
            "all_paths": large.map(|plan| json!({
                "bytes": LARGE, "modelled_bytes_per_second": LARGE as f64 / plan.predicted, "paths_via": vias,
            })),
        })
    });
    let costs = &topology.costs;
    json!({
        "name": topology.name,
        "description": topology.description,
        "origin": source.origin,
        "devices": devices.iter().map(|&device| json!({"device": device.0, "name": machine.device_name(device)})).collect::<Vec<_>>(),
        "nodes": nodes.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "shared": shared.collect::<Vec<_>>(),
        "routes": routes.collect::<Vec<_>>(),
        "costs": crate::probe::costs(&topology.costs),
        "costs_are_defaults": *costs == Costs::default(),
    })
}
