//! Tests the machine model: which topology files are valid, the presets, and the routes of copies.

use mpgpu_core::topology::{
    self, CostUnit, Costs, DeviceId, Link, LinkId, LinkKind, MAX_FILE_BYTES, Machine, Node, NodeId, NodeKind, Route, SharedResource,
    Topology, TopologyError,
};
use proptest::prelude::*;
use std::path::PathBuf;

const DOC: &str = include_str!("../../docs/reference/topology.md");

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const HOST: DeviceId = DeviceId::HOST;

fn machine(preset: &str) -> Machine {
    Machine::new(topology::load(preset).expect("a preset is valid")).expect("a preset compiles")
}

fn compile(text: &str) -> Machine {
    Machine::new(topology::parse(text).unwrap_or_else(|error| panic!("{error}"))).expect("what parses compiles")
}

fn refused(text: &str) -> String {
    topology::parse(text).expect_err("the text is wrong").to_string()
}

/// Returns the route of a copy as text, such as `gpu0>nvswitch nvswitch>gpu1`. Returns `None` if there is no route.
fn way(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<String> {
    let name = |link: &LinkId| machine.resources()[link.0 as usize].name.clone();
    machine.route(from, to).map(|route| route.links.iter().map(name).collect::<Vec<_>>().join(" "))
}

fn resource_names(machine: &Machine, route: &Route) -> Vec<String> {
    route.resources.iter().map(|id| machine.resources()[id.0 as usize].name.clone()).collect()
}

// Tests of presets.

#[test]
fn every_preset_compiles_and_joins_every_gpu_to_host_memory() {
    for name in topology::preset_names() {
        let machine = machine(name);
        assert_eq!(machine.topology().name, name);
        assert!(machine.gpu_count() >= 4 && machine.host_count() >= 1, "{name}");
        for gpu in (0..machine.gpu_count()).map(DeviceId::gpu) {
            // Behind a switch that connects several servers, a GPU can access only the host memory of its own server.
            let is_near = |host: &DeviceId| name != "gb200-nvl72" || !host.0 == gpu.0 / 2;
            for host in (0..machine.host_count()).map(DeviceId::host).filter(is_near) {
                assert!(machine.route(gpu, host).is_some() && machine.route(host, gpu).is_some(), "{name}: {gpu} and {host}");
            }
        }
    }
}

#[test]
fn every_link_figure_of_a_preset_has_its_source_above_it() {
    for name in topology::preset_names() {
        let lines: Vec<&str> = topology::preset_text(name).expect("listed").lines().collect();
        for (number, _) in lines.iter().enumerate().filter(|(_, line)| **line == "[[link]]") {
            assert!(lines[number - 1].starts_with("# "), "{name}: line {} has no source", number + 1);
        }
    }
}

#[test]
fn behind_an_nvswitch_a_relay_leaves_through_the_port_of_the_direct_copy() {
    for name in ["hgx-h100", "hgx-h200"] {
        let machine = machine(name);
        assert_eq!(way(&machine, GPU0, GPU1).as_deref(), Some("gpu0>nvswitch nvswitch>gpu1"), "{name}");
        let direct = machine.route(GPU0, GPU1).expect("joined");
        let first_hop = machine.route(GPU0, DeviceId::gpu(2)).expect("joined");
        let shared: Vec<_> = direct.resources.iter().filter(|id| first_hop.resources.contains(id)).collect();
        assert!(shared.iter().any(|id| machine.resources()[id.0 as usize].name == "gpu0>nvswitch"), "{name}");
    }
}

#[test]
fn between_directly_wired_gpus_a_relay_is_a_whole_link_more() {
    for name in ["beluga", "narval", "gh200-4", "hgx-h100-4"] {
        let machine = machine(name);
        let direct = machine.route(GPU0, GPU1).expect("joined");
        assert_eq!(direct.links.len(), 1, "{name}");
        for relay in (2..4).map(DeviceId::gpu) {
            for hop in [machine.route(GPU0, relay), machine.route(relay, GPU1)] {
                let hop = hop.expect("joined");
                assert!(hop.resources.iter().all(|id| !direct.resources.contains(id)), "{name}");
                assert_eq!(hop.bandwidth, direct.bandwidth, "{name}");
            }
        }
    }
}

#[test]
fn hgx_h200_has_the_readings() {
    let machine = machine("hgx-h200");
    let bandwidth = |from, to| machine.route(from, to).expect("joined").bandwidth;
    assert_eq!(bandwidth(GPU0, GPU1), 396e9);
    assert_eq!((bandwidth(GPU0, HOST), bandwidth(HOST, GPU1)), (55e9, 55e9));
    // Hops of 4 MiB chunks through host memory, one after the other, were measured as 50 to 51 GB/s.
    let chunk = 4.0 * 1024.0 * 1024.0;
    let host_path = chunk / (chunk / bandwidth(GPU0, HOST) + machine.costs().chunk_via_host);
    assert!((50e9..53e9).contains(&host_path), "{host_path}");
    // GPUs 0 and 1 share a path to host memory, but GPUs 0 and 4 share only the memory itself.
    let drawn = |gpu| resource_names(&machine, machine.route(HOST, DeviceId::gpu(gpu)).expect("joined"));
    let both = |a: u32, b: u32| drawn(a).into_iter().filter(|name| drawn(b).contains(name)).collect::<Vec<_>>();
    assert_eq!(both(0, 1), ["host0>root0", "root0.read", "host0.read", "host0"]);
    assert_eq!(both(0, 4), ["host0.read", "host0"]);
}

#[test]
fn the_dgx1_has_six_lanes_per_gpu_and_no_peer_copy_between_sockets_without_nvlink() {
    let machine = machine("dgx1-v100");
    for gpu in 0..8 {
        let routes = (0..8).filter(|&other| other != gpu).filter_map(|other| machine.route(DeviceId::gpu(gpu), DeviceId::gpu(other)));
        let lanes: f64 = routes.map(|route| route.bandwidth / 23.95e9).sum();
        assert_eq!(lanes, 6.0, "gpu{gpu}");
    }
    assert_eq!(way(&machine, GPU0, DeviceId::gpu(4)).as_deref(), Some("gpu0>gpu4"));
    assert_eq!(way(&machine, GPU0, DeviceId::gpu(5)), None);
    assert_eq!(way(&machine, GPU0, DeviceId::host(1)).as_deref(), Some("gpu0>plx0 plx0>root0 root0>root1 root1>host1"));
    assert_eq!(machine.route(GPU0, DeviceId::host(1)).map(|route| route.bandwidth), Some(6e9));
}

#[test]
fn summit_copies_between_its_sockets_through_host_memory_alone() {
    let machine = machine("summit");
    assert_eq!(way(&machine, GPU0, DeviceId::gpu(2)).as_deref(), Some("gpu0>gpu2"));
    assert_eq!(way(&machine, GPU0, DeviceId::gpu(3)), None);
    assert_eq!(way(&machine, GPU0, HOST).as_deref(), Some("gpu0>power9-0 power9-0>host0"));
    assert_eq!(way(&machine, HOST, DeviceId::gpu(3)).as_deref(), Some("host0>power9-0 power9-0>power9-1 power9-1>gpu3"));
}

#[test]
fn without_nvlink_gpus_copy_through_a_root_complex_that_forwards() {
    assert_eq!(way(&machine("pcie-4"), GPU0, GPU1).as_deref(), Some("gpu0>root0 root0>gpu1"));
}

// Tests of routes.

const NODES: &str = r#"
name = "test"
node = [
    { name = "a", kind = "gpu" },
    { name = "b", kind = "gpu" },
    { name = "host", kind = "host" },
    { name = "s", kind = "switch", peer = true },
    { name = "t", kind = "switch", peer = true },
    { name = "root", kind = "switch", peer = false },
]
"#;

#[test]
fn a_missing_direction_has_no_route() {
    let machine = compile(&format!("{NODES}[[link]]\none_way = [[\"a\", \"b\"]]\nkind = \"nvlink\"\nbandwidth = 1e9\nlatency = 2e-6"));
    let route = machine.route(GPU0, GPU1).expect("one way");
    assert_eq!((route.bandwidth, route.latency), (1e9, 2e-6));
    assert_eq!(machine.route(GPU1, GPU0), None);
}

#[test]
fn each_direction_has_its_own_bandwidth() {
    let links = "[[link]]\nbetween = [[\"a\", \"root\"], [\"root\", \"host\"]]\nkind = \"pcie\"\nbandwidth = 3e9\nbandwidth_back = 2e9";
    let machine = compile(&format!("{NODES}{links}"));
    assert_eq!(machine.route(GPU0, HOST).map(|route| route.bandwidth), Some(3e9));
    assert_eq!(machine.route(HOST, GPU0).map(|route| route.bandwidth), Some(2e9));
}

#[test]
fn a_copy_between_gpus_passes_no_switch_without_peer_and_no_device() {
    let links = r#"[[link]]
between = [["a", "root"], ["b", "root"], ["root", "host"], ["b", "host"]]
kind = "pcie"
bandwidth = 3e9"#;
    let machine = compile(&format!("{NODES}{links}"));
    assert_eq!(way(&machine, GPU0, GPU1), None);
    assert_eq!(way(&machine, GPU0, HOST).as_deref(), Some("a>root root>host"));
    assert_eq!(way(&machine, GPU1, HOST).as_deref(), Some("b>host"));
}

#[test]
fn the_widest_route_wins_then_the_shortest_then_the_first_in_node_order() {
    let link = |pairs: &str, bandwidth: f64| format!("[[link]]\nbetween = {pairs}\nkind = \"pcie\"\nbandwidth = {bandwidth:e}\n");
    let wide = compile(&format!("{NODES}{}{}", link(r#"[["a", "b"]]"#, 1e9), link(r#"[["a", "s"], ["s", "t"], ["t", "b"]]"#, 2e9)));
    assert_eq!(way(&wide, GPU0, GPU1).as_deref(), Some("a>s s>t t>b"));
    let short = compile(&format!("{NODES}{}", link(r#"[["a", "s"], ["s", "t"], ["t", "b"], ["a", "b"]]"#, 2e9)));
    assert_eq!(way(&short, GPU0, GPU1).as_deref(), Some("a>b"));
    let tie = compile(&format!("{NODES}{}", link(r#"[["a", "t"], ["t", "b"], ["a", "s"], ["s", "b"]]"#, 2e9)));
    assert_eq!(way(&tie, GPU0, GPU1).as_deref(), Some("a>s s>b"));
}

#[test]
fn a_shared_resource_narrows_a_route_and_can_move_it() {
    let links = "[[link]]\nbetween = [[\"a\", \"s\"], [\"s\", \"b\"], [\"a\", \"t\"], [\"t\", \"b\"]]\nkind = \"pcie\"\nbandwidth = 4e9\n";
    let shared =
        |name: &str, capacity: f64, links: &str| format!("[[shared]]\nname = \"{name}\"\ncapacity = {capacity:e}\nlinks = {links}\n");
    let one = shared("s.fabric", 2e9, r#"["a>s", "s>b"]"#);
    let moved = compile(&format!("{NODES}{links}{one}"));
    assert_eq!(way(&moved, GPU0, GPU1).as_deref(), Some("a>t t>b"));
    let both = compile(&format!("{NODES}{links}{one}{}", shared("t.fabric", 1e9, r#"["a>t"]"#)));
    let route = both.route(GPU0, GPU1).expect("joined");
    assert_eq!(route.bandwidth, 2e9);
    assert_eq!(resource_names(&both, route), ["a>s", "s>b", "s.fabric"]);
}

#[test]
fn of_two_kinds_of_link_between_the_same_nodes_the_wider_is_taken_and_both_are_resources() {
    let link = |kind: &str, bandwidth: f64| format!("[[link]]\nbetween = [[\"a\", \"b\"]]\nkind = \"{kind}\"\nbandwidth = {bandwidth:e}\n");
    let links = link("pcie", 1e9) + &link("nvlink", 2e9);
    let machine = compile(&format!("{NODES}{links}[[shared]]\nname = \"slot\"\ncapacity = 1e9\nlinks = [\"a>b:pcie\"]"));
    assert_eq!(way(&machine, GPU0, GPU1).as_deref(), Some("a>b:nvlink"));
    let names: Vec<_> = machine.resources().iter().map(|resource| resource.name.as_str()).collect();
    assert_eq!(names, ["a>b:pcie", "b>a:pcie", "a>b:nvlink", "b>a:nvlink", "slot"]);
}

#[test]
fn a_copy_inside_a_device_draws_on_nothing() {
    let machine = machine("beluga");
    for device in machine.devices() {
        let route = machine.route(device, device).expect("every device reaches itself");
        assert!(route.links.is_empty() && route.resources.is_empty());
        assert_eq!((route.bandwidth, route.latency), (f64::INFINITY, 0.0));
    }
}

#[test]
fn devices_that_the_machine_lacks_have_no_route() {
    let machine = machine("beluga");
    for device in [DeviceId(4), DeviceId(-2), DeviceId(i32::MIN), DeviceId(i32::MAX)] {
        assert!(!machine.contains(device) && machine.device_name(device).is_none());
        assert_eq!(machine.route(device, GPU0).or(machine.route(GPU0, device)).or(machine.route(device, device)), None);
    }
    assert_eq!((machine.device_name(DeviceId(3)), machine.device_name(HOST)), (Some("gpu3"), Some("host0")));
    assert_eq!((DeviceId(3).to_string(), DeviceId(-1).to_string()), ("gpu3".into(), "host0".into()));
    assert_eq!(DeviceId(i32::MIN).to_string(), "host2147483647");
}

#[test]
fn threads_can_share_a_machine() {
    fn shareable<T: Send + Sync + 'static>() {}
    shareable::<Machine>();
}

// Tests of topology files.

#[test]
fn errors_name_the_entry_the_value_and_the_remedy() {
    let link = r#"[[link]]
between = [["a", "b"]]
kind = "nvlink"
bandwidth = 1e9
"#;
    let good = format!("{NODES}{link}");
    topology::parse(&good).expect("the base of all cases is right");
    let shared = |links: &str| format!("{good}[[shared]]\nname = \"x\"\ncapacity = 1e9\nlinks = {links}\n");
    let cases: &[(String, &[&str])] = &[
        (good.replace("bandwidth", "bandwith"), &["line 14, column 1", "bandwith", "expected"]),
        (good.replace("1e9", "\"fast\""), &["line 14, column 13", "fast", "expected f64"]),
        (good.replace("1e9", "45"), &["link a>b:nvlink", "bandwidth = 4.5e1", "bytes per second", "45e9"]),
        (good.replace("1e9", "nan"), &["link a>b:nvlink", "bandwidth = NaN", "bytes per second"]),
        (good.replace("1e9", "inf"), &["bandwidth = inf"]),
        (good.replace("1e9", "-1e9"), &["bandwidth = -1e9"]),
        (good.replace("1e9", "0"), &["bandwidth = 0e0"]),
        (good.replace("1e9", "1e300"), &["bandwidth = 1e300", "between 1e3 and 1e15"]),
        (good.replace("1e9", "1e9\nlatency = -1e-9"), &["link a>b:nvlink", "latency = -1e-9", "seconds"]),
        (good.replace("1e9", "1e9\nlatency = 2"), &["latency = 2e0", "between 0 and 1"]),
        (good.replace("[\"a\", \"b\"]", "[\"a\", \"c\"]"), &["[[link]] 1", "no node \"c\"", "declare it"]),
        (good.replace("[\"a\", \"b\"]", "[\"a\", \"a\"]"), &["link a>a:nvlink", "itself", "remove it"]),
        (good.replace("[\"a\", \"b\"]", "[\"a\", \"b\"], [\"b\", \"a\"]"), &["link b>a:nvlink", "twice"]),
        (good.replace("[[\"a\", \"b\"]]", "[]"), &["[[link]] 1", "between", "one_way"]),
        (good.replace("kind = \"nvlink\"", "kind = \"nvlink\"\none_way = [[\"a\", \"s\"]]"), &["[[link]] 1", "either `between`"]),
        (good.replace("between", "bandwidth_back = 1e9\none_way"), &["[[link]] 1", "bandwidth_back", "no way back"]),
        (good.replace("\"nvlink\"", "\"ethernet\""), &["line 13", "ethernet", "nvlink", "pcie"]),
        (good.replace("name = \"b\"", "name = \"a\""), &["node 2", "\"a\"", "already taken by node 1"]),
        (good.replace("name = \"t\"", "name = \"t>u\""), &["node 5", "\"t>u\"", "letters, digits"]),
        (good.replace("name = \"t\"", "name = \"\""), &["node 5", "\"\"", "1 to 64"]),
        (good.replace("kind = \"host\"", "kind = \"host\", peer = true"), &["node 3 (\"host\")", "`peer`", "remove it"]),
        (shared("[\"a>c\"]"), &["shared resource \"x\"", "no link \"a>c\"", "from>to"]),
        (shared("[\"a>b:pcie\"]"), &["no link \"a>b:pcie\""]),
        (shared("[\"ab\"]"), &["no link \"ab\""]),
        (shared("[\"a>b\", \"a>b:nvlink\"]"), &["shared resource \"x\"", "a>b:nvlink", "twice"]),
        (shared("[]"), &["shared resource \"x\"", "no link uses it"]),
        (shared("[\"a>b\"]").replace("\"x\"", "\"a>b\""), &["shared resource 1", "\"a>b\"", "letters"]),
        (shared("[\"a>b\"]").replace("capacity = 1e9", "capacity = 0"), &["shared resource \"x\"", "capacity = 0e0"]),
        (shared("[\"a>b\"]").replace("capacity = 1e9", "capacity = 1e9\nstaged = 0"), &["shared resource \"x\"", "staged = 0e0"]),
        (
            format!("{}[[shared]]\nname = \"x\"\ncapacity = 1e9\nlinks = [\"a>b\"]", shared("[\"a>b\"]")),
            &["shared resource 2", "taken by shared resource 1"],
        ),
        (format!("{good}[costs]\ncopy = -1"), &["costs: copy = -1e0", "seconds"]),
        (format!("{good}[costs]\nkernel_efficiency = 0"), &["kernel_efficiency = 0e0", "above 0 and at most 1"]),
        (format!("{good}[costs]\nkernel_efficiency = nan"), &["kernel_efficiency = NaN"]),
        (format!("{good}[costs]\nlaunch = 1e-6"), &["launch", "expected one of", "kernel"]),
        ("name = \"x\"\nnode = []".into(), &["no device", "kind \"gpu\""]),
        ("name = \"x\"".into(), &["missing field `node`"]),
        (good.replace("name = \"test\"", ""), &["missing field `name`"]),
        (good.replace("node = [", "node = "), &["line 4, column 5", "expected"]),
    ];
    for (text, wanted) in cases {
        let message = refused(text);
        for part in *wanted {
            assert!(message.contains(part), "{message:?} does not say {part:?}, for:\n{text}");
        }
        assert!(!message.contains('\n'), "{message:?} has one line");
    }
    let ambiguous = shared("[\"a>b\"]").replace(link, &format!("{link}{}", link.replace("nvlink", "pcie")));
    let message = refused(&ambiguous);
    assert!(message.contains("\"a>b\" could be a>b:nvlink or a>b:pcie"), "{message}");
}

#[test]
fn an_unknown_name_is_answered_with_the_presets() {
    let message = topology::load("no-such-machine").expect_err("unknown").to_string();
    assert!(message.contains("\"no-such-machine\"") && message.contains("no file with this path"), "{message}");
    for name in topology::preset_names() {
        assert!(message.contains(name), "{message}");
    }
    for odd in ["", "beluga\0", "./beluga"] {
        assert!(matches!(topology::load(odd), Err(TopologyError::NotFound { .. })), "{odd:?}");
    }
}

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("topology-{}-{name}", std::process::id()))
}

#[test]
fn a_file_is_read_and_its_errors_name_it() {
    let path = scratch("file.toml");
    let name = path.to_str().expect("UTF-8");
    let text = topology::preset_text("summit").expect("a preset");
    std::fs::write(&path, text).expect("writable");
    assert_eq!(topology::load(name), Ok(topology::preset("summit").expect("a preset")));
    std::fs::write(&path, text.replace("47.9e9", "47.9")).expect("writable");
    let message = topology::load(name).expect_err("47.9 bytes per second").to_string();
    assert!(message.contains(name) && message.contains("link gpu0>gpu1:nvlink: bandwidth = 4.79e1"), "{message}");
    std::fs::write(&path, b"name = \"\xff\"").expect("writable");
    assert!(topology::load(name).expect_err("not UTF-8").to_string().contains("UTF-8"));
    std::fs::write(&path, vec![b'#'; MAX_FILE_BYTES + 1]).expect("writable");
    assert!(topology::load(name).expect_err("too long").to_string().contains(&MAX_FILE_BYTES.to_string()));
    std::fs::remove_file(&path).expect("ours");
    let folder = env!("CARGO_TARGET_TMPDIR");
    assert!(matches!(topology::load(folder), Err(TopologyError::Unreadable { .. })));
}

#[test]
fn costs_that_a_file_leaves_out_have_their_defaults() {
    let text = format!("{NODES}[costs]\ncopy = 1e-6");
    assert_eq!(topology::parse(&text).expect("valid").costs, Costs { copy: 1e-6, ..Costs::default() });
    assert_eq!(topology::preset("hgx-h200").expect("a preset").costs, Costs::default());
}

#[test]
fn presets_survive_the_way_into_a_file_and_back() {
    for name in topology::preset_names() {
        let topology = topology::preset(name).expect("a preset");
        assert_eq!(topology::parse(&topology.to_toml()), Ok(topology), "{name}");
    }
}

#[test]
fn hostile_text_is_refused_with_a_short_error() {
    let deep = 400_000;
    let nodes: String = (0..5_000).map(|n| format!("{{ name = \"n{n}\", kind = \"switch\" }}, ")).collect();
    let cases = [
        format!("name = {}", "[".repeat(deep)),
        format!("name = {}", "{a = ".repeat(deep / 4)),
        format!("{}a = 1", "a.".repeat(deep)),
        format!("[{}a]", "a.".repeat(deep)),
        format!("[[{}a]]", "a.".repeat(deep)),
        format!("{} = 1", "k".repeat(deep)),
        format!("name = \"{}", "x".repeat(deep)),
        format!("name = \"x\"\nnode = [{{ name = \"{}\", kind = \"gpu\" }}]", "n".repeat(deep)),
        format!("name = \"x\"\nnode = [{nodes}]"),
        format!("name = \"x\"\nnode = [{}]", nodes.replace("switch", "gpu")),
        format!("{NODES}[[link]]\nkind = \"pcie\"\nbandwidth = 1e9\nbetween = [{}]", "[\"a\", \"b\"], ".repeat(20_000)),
        format!("{NODES}[[link]]\nkind = \"pcie\"\nbandwidth = 1e9\nbetween = [[\"a\", \"{}\"]]", "b".repeat(deep)),
        format!("{NODES}[[shared]]\nname = \"{0}\"\ncapacity = 1e9\nlinks = [\"{0}>b\"]", "b".repeat(deep)),
        "a".repeat(MAX_FILE_BYTES + 1),
    ];
    for text in cases {
        let message = refused(&text);
        assert!(message.len() < 700, "{} bytes of error for {:?}...", message.len(), &text[..60.min(text.len())]);
    }
}

#[test]
fn the_largest_machine_allowed_compiles() {
    let devices = topology::MAX_DEVICES;
    let nodes = (0..devices + topology::MAX_SWITCHES)
        .map(|n| Node { name: format!("n{n}"), kind: if n < devices { NodeKind::Gpu } else { NodeKind::Switch { peer: n % 2 == 0 } } });
    let nodes: Vec<_> = nodes.collect();
    let count = nodes.len() as u32;
    let ends = (1..count).flat_map(|step| (0..count).map(move |from| (NodeId(from), NodeId((from + step) % count))));
    let links = ends.take(topology::MAX_LINKS);
    let links = links.map(|(from, to)| Link { from, to, kind: LinkKind::Pcie, bandwidth: 1e9 + f64::from(from.0), latency: 0.0 });
    let topology = Topology {
        name: "large".into(),
        description: String::new(),
        nodes,
        links: links.collect(),
        shared: Vec::new(),
        costs: Costs::default(),
    };
    assert_eq!(Machine::new(topology.clone()).expect("within the limits").gpu_count() as usize, devices);
    assert_eq!(topology::parse(&topology.to_toml()), Ok(topology));
}

// Tests of the documentation page.

#[test]
fn the_example_of_the_page_is_a_machine_and_its_claims_hold() {
    let (_, rest) = DOC.split_once("```toml\n").expect("the page has an example");
    let (example, _) = rest.split_once("```").expect("it ends");
    let machine = compile(example);
    assert_eq!((machine.gpu_count(), machine.host_count()), (2, 1));
    assert_eq!(way(&machine, GPU0, GPU1).as_deref(), Some("gpu0>gpu1:nvlink"));
    assert_eq!(way(&machine, GPU0, HOST).as_deref(), Some("gpu0>root root>host0"));
    assert_eq!(machine.route(HOST, GPU0).map(|route| route.bandwidth), Some(24e9));
}

#[test]
fn the_page_lists_every_preset_and_the_default_costs() {
    for name in topology::preset_names() {
        assert!(DOC.contains(&format!("| `{name}` |")), "{name}");
    }
    for cost in Costs::TABLE {
        // The binary number 6.7e-6 is not exactly 6.7 millionths. If it is rounded to a picosecond, it is printed as it was written.
        let value = match cost.unit {
            CostUnit::Seconds => format!("{}e-6", (cost.default * 1e12).round() / 1e6),
            CostUnit::Part => cost.default.to_string(),
        };
        assert!(DOC.contains(&format!("| `{}` | {value} |", cost.name)), "{} = {value}", cost.name);
    }
}

#[test]
fn every_cost_is_read_written_and_checked_under_its_name() {
    let text = topology::preset_text("beluga").expect("a preset");
    let head = text.split("[costs]").next().expect("a table of costs");
    for (index, cost) in Costs::TABLE.iter().enumerate() {
        assert!(!cost.meaning.is_empty() && !cost.source.is_empty() && Costs::TABLE[..index].iter().all(|other| other.name != cost.name));
        let with = |value: f64| topology::parse(&format!("{head}[costs]\n{} = {value:e}\n", cost.name));
        let found = with(0.25).expect("in range");
        assert_eq!((cost.of)(&found.costs), 0.25, "{}", cost.name);
        let mut others = Costs::TABLE.iter().filter(|other| other.name != cost.name);
        assert!(others.all(|other| (other.of)(&found.costs) == other.default), "{}", cost.name);
        assert_eq!(topology::parse(&found.to_toml()), Ok(found));
        for wrong in [-0.25, 1.5, f64::NAN] {
            let error = with(wrong).expect_err("out of range").to_string();
            assert!(error.contains(cost.name), "{error}");
        }
    }
    let error = topology::parse(&format!("{head}[costs]\nchunk = 9e-6\n")).expect_err("a name of an earlier form").to_string();
    assert!(error.contains("unknown field `chunk`") && error.contains("chunk_via_host"), "{error}");
}

// Property tests. With `LONG_TESTS=1` there are a hundred times as many cases.

fn cases(usual: u32) -> ProptestConfig {
    let long = std::env::var_os("LONG_TESTS").is_some_and(|value| value == "1");
    ProptestConfig { cases: if long { usual * 100 } else { usual }, failure_persistence: None, ..ProptestConfig::default() }
}

fn any_kind() -> impl Strategy<Value = NodeKind> {
    prop_oneof![
        3 => Just(NodeKind::Gpu),
        1 => Just(NodeKind::Host),
        2 => any::<bool>().prop_map(|peer| NodeKind::Switch { peer }),
    ]
}

/// Generates a bandwidth from a few values, so that equal bandwidths are common.
fn any_bandwidth() -> impl Strategy<Value = f64> {
    prop_oneof![5 => (1..3u32).prop_map(|n| f64::from(n) * 1e9), 1 => 1e3..1e15f64]
}

fn any_link_kind() -> impl Strategy<Value = LinkKind> {
    prop_oneof![4 => Just(LinkKind::Nvlink), 1 => Just(LinkKind::Pcie), 1 => Just(LinkKind::Host)]
}

fn any_latency() -> impl Strategy<Value = f64> {
    prop_oneof![3 => Just(0.0), 1 => 0.0..1e-3f64]
}

prop_compose! {
    /// Generates a valid topology of up to `most` nodes. Some links have only one direction, some pairs of nodes have links of several
    /// kinds, and there are shared resources.
    fn any_topology(most: usize)(
        kinds in prop::collection::vec(any_kind(), 1..most),
        name in any::<String>(),
        description in any::<String>(),
        links in prop::collection::vec(
            (any::<u32>(), any::<u32>(), any_link_kind(), any_bandwidth(), prop::option::of(any_bandwidth()), any_latency()),
            0..4 * most,
        ),
        shared in prop::collection::vec((any_bandwidth(), prop::option::of(any_bandwidth()), any::<u32>(), 1..6usize), 0..4),
        costs in prop::array::uniform15(0.0..1.0f64),
        kernel_efficiency in prop_oneof![Just(1.0), 1e-9..1.0f64],
    ) -> Topology {
        let mut nodes: Vec<_> = kinds.into_iter().enumerate().map(|(n, kind)| Node { name: format!("n{n}"), kind }).collect();
        nodes[0].kind = if nodes[0].kind == NodeKind::Host { NodeKind::Host } else { NodeKind::Gpu };
        let count = nodes.len() as u32;
        let mut unique: Vec<Link> = Vec::new();
        for (from, to, kind, bandwidth, back, latency) in links {
            let (from, to) = (NodeId(from % count), NodeId(to % count));
            for (from, to, bandwidth) in [Some((from, to, bandwidth)), back.map(|back| (to, from, back))].into_iter().flatten() {
                if from != to && !unique.iter().any(|link| (link.from, link.to, link.kind) == (from, to, kind)) {
                    unique.push(Link { from, to, kind, bandwidth, latency });
                }
            }
        }
        let all = unique.len() as u32;
        let shared = shared.into_iter().enumerate().filter(|_| all > 0).map(|(n, (capacity, staged, first, many))| {
            let mut links: Vec<_> = (0..many as u32).map(|n| LinkId(first.wrapping_add(n) % all)).collect();
            links.sort_unstable();
            links.dedup();
            SharedResource { name: format!("r{n}"), capacity, staged, links }
        });
        let [copy, issue, chunk, relay_chunk, join, gpu_join, lane, pull, graph, graph_node, graph_first_node, batch, batch_segment, kernel, kernel_segment] = costs;
        let costs = Costs {
            copy,
            issue,
            chunk_via_host: chunk,
            chunk_via_gpu: relay_chunk,
            fork_join_staged: join,
            fork_join_gpus: gpu_join,
            fork_join_issue: lane,
            hand_over: chunk,
            pull,
            graph_launch: graph,
            graph_node,
            graph_instantiate: graph_first_node,
            graph_gap: graph_first_node,
            scattered: kernel_efficiency / 4.0,
            batch,
            batch_segment,
            kernel,
            kernel_segment,
            kernel_efficiency,
            // Any number will do that a file can store like other values.
            pageable_to_gpu: kernel_efficiency / 3.0,
            pageable_from_gpu: kernel_efficiency / 2.0,
            thread_copy: kernel_efficiency,
        };
        Topology { name, description, nodes, shared: shared.collect(), links: unique, costs }
    }
}

/// Finds the best route by trying every route. Routes are compared by bandwidth, then by number of links, then by the order of nodes.
fn best_by_trial(topology: &Topology, from: NodeId, to: NodeId) -> Option<(f64, Vec<NodeId>)> {
    let gpu = |node: NodeId| topology.nodes[node.0 as usize].kind == NodeKind::Gpu;
    let peer_only = gpu(from) && gpu(to);
    let capacity = |link: usize| {
        let shared = topology.shared.iter().filter(|shared| shared.links.contains(&LinkId(link as u32))).map(|shared| shared.capacity);
        shared.fold(topology.links[link].bandwidth, f64::min)
    };
    let mut best: Option<(f64, Vec<NodeId>)> = None;
    let mut open = vec![(f64::INFINITY, vec![from])];
    while let Some((width, nodes)) = open.pop() {
        let here = nodes[nodes.len() - 1];
        if here == to {
            let key = |(width, nodes): &(f64, Vec<NodeId>)| (-*width, nodes.len(), nodes.clone());
            if best.as_ref().is_none_or(|best| key(&(width, nodes.clone())) < key(best)) {
                best = Some((width, nodes));
            }
            continue;
        }
        let passes = matches!(topology.nodes[here.0 as usize].kind, NodeKind::Switch { peer } if peer || !peer_only);
        if here != from && !passes {
            continue;
        }
        for (index, link) in topology.links.iter().enumerate().filter(|(_, link)| link.from == here && !nodes.contains(&link.to)) {
            let mut further = nodes.clone();
            further.push(link.to);
            open.push((width.min(capacity(index)), further));
        }
    }
    best
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn routes_are_the_best_there_are(topology in any_topology(7)) {
        let machine = Machine::new(topology.clone()).expect("valid");
        prop_assert_eq!(&machine, &Machine::new(topology.clone()).expect("valid"), "the same topology gives the same machine");
        let node = |device: DeviceId| {
            let name = machine.device_name(device).expect("own device");
            NodeId(topology.nodes.iter().position(|node| node.name == name).expect("own node") as u32)
        };
        for from in machine.devices() {
            for to in machine.devices().filter(|&to| to != from) {
                let best = best_by_trial(&topology, node(from), node(to));
                let route = machine.route(from, to);
                let found = route.map(|route| {
                    let ends = route.links.iter().map(|link| topology.links[link.0 as usize].to);
                    (route.bandwidth, std::iter::once(node(from)).chain(ends).collect::<Vec<_>>())
                });
                prop_assert_eq!(&found, &best, "{} to {}", from, to);
                let Some(route) = route else { continue };
                prop_assert!(route.resources.is_sorted_by(|a, b| a < b));
                for link in &route.links {
                    prop_assert!(route.resources.contains(&topology::ResourceId(link.0)));
                }
            }
        }
    }

    #[test]
    fn any_topology_survives_the_way_into_a_file_and_back(topology in any_topology(12)) {
        let text = topology.to_toml();
        match topology::parse(&text) {
            Ok(back) => prop_assert_eq!(back, topology),
            Err(error) => prop_assert!(false, "{}\n{}", error, text),
        }
    }

    #[test]
    fn a_topology_built_wrongly_in_code_is_refused_and_never_panics(
        mut topology in any_topology(6),
        what in 0..7usize,
        id in any::<u32>(),
        value in any::<f64>(),
        name in any::<String>(),
    ) {
        match what {
            0 => topology.links.push(Link { from: NodeId(id), to: NodeId(0), kind: LinkKind::Pcie, bandwidth: value, latency: value }),
            1 => topology.shared.push(SharedResource { name, capacity: value, staged: None, links: vec![LinkId(id)] }),
            2 => topology.nodes.push(Node { name, kind: NodeKind::Gpu }),
            3 => topology.costs.copy = value,
            4 => topology.costs.kernel_efficiency = value,
            5 => topology.nodes.truncate(id as usize % 3),
            _ => topology.links.iter_mut().for_each(|link| link.latency = value),
        }
        let text = topology.to_toml();
        prop_assert_eq!(topology.check().is_ok(), Machine::new(topology.clone()).is_ok());
        if topology.check().is_ok() {
            prop_assert_eq!(topology::parse(&text), Ok(topology));
        } else {
            prop_assert!(topology::parse(&text).is_err(), "refused in code, taken from a file:\n{}", text);
        }
    }
}

/// Change of a file, as by a careless or malicious user.
#[derive(Clone, Debug)]
enum Edit {
    Delete(usize, usize),
    Repeat(usize, usize),
    Insert(usize, String),
    /// Replaces number n of all numbers, strings and bracketed values in the file by this text.
    Value(usize, &'static str),
    DeleteLine(usize),
    SwapLines(usize, usize),
    Truncate(usize),
}

fn any_edit() -> impl Strategy<Value = Edit> {
    let values = [
        "0",
        "-1",
        "1e400",
        "-0.0",
        "nan",
        "inf",
        "-inf",
        "99999999999999999999",
        "1e-300",
        "1979-05-27",
        "\"\"",
        "\"gpu0\"",
        "\"gpu0>gpu1\"",
        "true",
        "[]",
        "{}",
        "[[]]",
        "[[\"gpu0\", \"gpu0\"]]",
        "'\\u0000'",
        "\"\\uD800\"",
        "\"host0\"",
    ];
    prop_oneof![
        (any::<usize>(), 1..40usize).prop_map(|(at, many)| Edit::Delete(at, many)),
        (any::<usize>(), 1..200usize).prop_map(|(at, many)| Edit::Repeat(at, many)),
        (any::<usize>(), "\\PC{1,6}|[\\[\\]{}\"'=.,#\\n]{1,4}").prop_map(|(at, text)| Edit::Insert(at, text)),
        (any::<usize>(), prop::sample::select(values.to_vec())).prop_map(|(nth, value)| Edit::Value(nth, value)),
        any::<usize>().prop_map(Edit::DeleteLine),
        (any::<usize>(), any::<usize>()).prop_map(|(a, b)| Edit::SwapLines(a, b)),
        any::<usize>().prop_map(Edit::Truncate),
    ]
}

fn apply(text: &mut String, edit: &Edit) {
    let floor = |text: &str, at: usize| (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let boundary = |text: &str, at: usize| floor(text, at % (text.len() + 1));
    match *edit {
        Edit::Delete(at, many) => {
            let start = boundary(text, at);
            let end = floor(text, start + many);
            text.replace_range(start..end, "");
        }
        Edit::Repeat(at, many) => {
            let start = boundary(text, at);
            let end = floor(text, start + many);
            let piece = text[start..end].to_owned();
            text.insert_str(end, &piece);
        }
        Edit::Insert(at, ref new) => {
            let at = boundary(text, at);
            text.insert_str(at, new);
        }
        Edit::Value(nth, value) => {
            let starts: Vec<usize> = text.match_indices(" = ").map(|(at, found)| at + found.len()).collect();
            if let Some(&start) = starts.get(nth % starts.len().max(1)) {
                let end = text[start..].find([',', '\n', '}']).map_or(text.len(), |length| start + length);
                text.replace_range(start..end, value);
            }
        }
        Edit::DeleteLine(nth) => {
            let mut lines: Vec<&str> = text.lines().collect();
            if !lines.is_empty() {
                lines.remove(nth % lines.len());
            }
            *text = lines.join("\n");
        }
        Edit::SwapLines(a, b) => {
            let mut lines: Vec<&str> = text.lines().collect();
            if !lines.is_empty() {
                let count = lines.len();
                lines.swap(a % count, b % count);
            }
            *text = lines.join("\n");
        }
        Edit::Truncate(at) => text.truncate(boundary(text, at)),
    }
}

/// Checks that a text either causes an error of limited length, or is a topology that can be compiled, written and read again.
fn refused_or_sound(text: &str) -> Result<(), TestCaseError> {
    match topology::parse(text) {
        Err(error) => prop_assert!(error.to_string().len() < 2_000, "{}", error),
        Ok(topology) => {
            prop_assert!(Machine::new(topology.clone()).is_ok());
            prop_assert_eq!(topology::parse(&topology.to_toml()), Ok(topology));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(1024))]

    #[test]
    fn damaged_presets_are_refused_or_sound(
        preset in prop::sample::select(topology::preset_names().collect::<Vec<_>>()),
        edits in prop::collection::vec(any_edit(), 1..8),
    ) {
        let mut text = topology::preset_text(preset).expect("listed").to_owned();
        for edit in &edits {
            apply(&mut text, edit);
        }
        refused_or_sound(&text)?;
    }

    #[test]
    fn random_text_is_refused_or_sound(text in prop_oneof![
        any::<String>(),
        "[\\[\\]{}\"'=.,#\\n a-z0-9_+-]{0,200}",
        "((name|node|link|shared|costs|kind|peer|between|bandwidth)( = |\\.|\\n)(\"gpu\"|1e9|\\[|\\]|\\{|\\}|true|,)?){0,40}",
    ]) {
        refused_or_sound(&text)?;
    }
}
