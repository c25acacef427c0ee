//! Tests the `mpgpu` command as a user sees it: its output, the files that it writes, and the remedies in its errors.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the command without GPUs, even on a machine with GPUs, and without the caller's environment variables for mpgpu.
fn mpgpu(arguments: &[&str]) -> Output {
    mpgpu_with(&[], arguments)
}

/// Like `mpgpu`, with additional environment variables.
fn mpgpu_with(environment: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpgpu"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MPGPU_")) {
        command.env_remove(name);
    }
    command.env("CUDA_VISIBLE_DEVICES", "").envs(environment.iter().copied()).args(arguments).output().expect("the command starts")
}

/// Returns the standard output of a command that succeeds without warnings.
#[track_caller]
fn output(arguments: &[&str]) -> String {
    // The backend is requested explicitly, so that missing GPUs cause no warning.
    let run = mpgpu_with(&[("MPGPU_BACKEND", "host")], arguments);
    let (text, errors) = (String::from_utf8(run.stdout).expect("UTF-8"), String::from_utf8_lossy(&run.stderr).into_owned());
    assert!(run.status.success() && errors.is_empty(), "{arguments:?}: {errors}");
    text
}

/// Returns the error output of a command that fails. Its standard output must be empty.
#[track_caller]
fn error(arguments: &[&str]) -> String {
    let run = mpgpu(arguments);
    assert!(!run.status.success() && run.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stdout));
    String::from_utf8(run.stderr).expect("UTF-8")
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&output(arguments)).expect("JSON")
}

/// Temporary folder that is removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("mpgpu-command-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path in UTF-8").to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// Checks that an SVG picture is valid: its root has a size, all elements are closed, and all numbers are valid.
#[track_caller]
fn assert_picture(svg: &str) {
    assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=") && svg.ends_with("</svg>\n"), "{svg:.200}");
    for bad in ["NaN", "inf", "width=\"-", "height=\"-"] {
        assert!(!svg.contains(bad), "{bad} in {svg}");
    }
    for element in ["svg", "text", "title", "style"] {
        assert_eq!(svg.matches(&format!("<{element}")).count(), svg.matches(&format!("</{element}>")).count(), "{element}");
    }
}

fn presets() -> Vec<&'static str> {
    mpgpu_core::topology::preset_names().collect()
}

#[test]
fn without_a_gpu_topo_lists_the_presets_and_says_why() {
    let text = output(&["topo"]);
    assert!(text.starts_with("No GPU found: "), "{text}");
    for name in presets() {
        assert!(text.contains(&format!("  {name} ")), "{name} in {text}");
    }
    assert!(!output(&["topo", "--presets"]).contains("No GPU"));
    assert_eq!(json(&["topo", "--json"])["presets"].as_array().map(Vec::len), Some(presets().len()));
}

/// Runs `mpgpu doctor` and parses each line of its output as severity, topic and text. A remedy is appended to the text of its finding.
/// Also returns whether the command succeeded.
#[track_caller]
fn doctor(environment: &[(&str, &str)], prefix: &str) -> (Vec<[String; 3]>, bool) {
    let run = mpgpu_with(environment, &["doctor", "--no-trials"]);
    assert!(run.stderr.is_empty(), "{}", String::from_utf8_lossy(&run.stderr));
    let text = String::from_utf8(run.stdout).expect("UTF-8");
    let mut lines: Vec<&str> =
        text.lines().map(|line| line.strip_prefix(prefix).unwrap_or_else(|| panic!("no {prefix} in {line}"))).collect();
    let summary = lines.pop().expect("a summary");
    let mut found: Vec<[String; 3]> = Vec::new();
    for line in lines {
        match line.strip_prefix("                   -> ") {
            Some(remedy) => found.last_mut().expect("a line before")[2] += remedy,
            None => found.push([&line[..9], &line[9..19], &line[19..]].map(|part| part.trim_end().to_owned())),
        }
    }
    let count = |level: &str| found.iter().filter(|line| line[0] == level).count();
    let counts = ["well", "absent", "slow", "unknown", "refused"].map(|level| format!("{} {level}", count(level)));
    assert_eq!(summary, counts.join(", "), "{text}");
    assert_eq!(found.len(), ["well", "absent", "slow", "unknown", "refused"].map(count).iter().sum::<usize>(), "{text}");
    assert_eq!(run.status.success(), count("refused") == 0, "{text}");
    (found, run.status.success())
}

#[test]
fn without_a_gpu_the_doctor_says_so_and_looks_at_what_is_there() {
    let (found, _) = doctor(&[], "");
    let of = |topic: &str| found.iter().find(|line| line[1] == topic).unwrap_or_else(|| panic!("{topic} in {found:?}"));
    assert!(of("driver")[0] == "absent" && of("driver")[2].contains("host backend"), "{found:?}");
    for topic in ["memory", "limits", "shm", "sharing", "settings", "files"] {
        of(topic);
    }
    assert_eq!(doctor(&[], "").0.len(), found.len());
}

#[test]
fn under_a_launcher_the_doctor_says_of_which_rank_each_line_is() {
    doctor(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")], "[3.1] ");
}

#[test]
fn what_the_doctor_refuses_is_its_exit_code() {
    let (found, is_sound) = doctor(&[("MPGPU_TOPOLOGY", "no-such-file.toml")], "");
    let refused = found.iter().find(|line| line[1] == "topology").expect("a line");
    assert!(!is_sound && refused[0] == "refused" && refused[2].contains("no-such-file.toml"), "{found:?}");
    let (found, is_sound) = doctor(&[("MPGPU_ENGIN", "graph")], "");
    assert!(is_sound && found.iter().any(|line| line[1] == "settings" && line[2].contains("did you mean MPGPU_ENGINE")), "{found:?}");
    let run = mpgpu_with(&[("MPGPU_ENGINE", "grpah")], &["doctor", "--no-trials", "--json"]);
    let value: Value = serde_json::from_slice(&run.stdout).expect("JSON");
    let levels = value["findings"].as_array().expect("a list").iter().map(|finding| finding["level"].as_str().expect("a level"));
    assert_eq!(levels.filter(|level| *level == "refused").count() as u64, value["refused"].as_u64().expect("a number"));
    assert!(!run.status.success() && value["refused"] != 0);
}

#[test]
fn topo_shows_links_both_directions_relays_and_what_is_assumed() {
    let text = output(&["topo", "hgx-h200"]);
    for part in [
        "GB/s (10^9 bytes per second)",
        "nvlink  396.0, both together 778.0",
        "198.0 there, 173.0 back, shares root0.read, root0.write, host0.read, host0.write, host0",
        "host0.read   153.0, staged 198.0  host0>root0 host0>root1",
        "copy 6.7 us; issue 2.2 us",
        "mpgpu topo hgx-h200 --toml",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("  gpu0 ")).collect();
    assert!(rows.len() == 2 && rows[0].contains("396.0") && rows[1].contains(" +1"), "a copy alone, and one over all paths: {rows:?}");
    let (folder, preset) = (Folder::new("staged"), output(&["topo", "hgx-h200", "--toml"]));
    let file = folder.file("node.toml");
    let other = preset
        .replace("capacity = 153e9\nstaged = 198e9", "capacity = 153e9\nstaged = 190e9")
        .replace("capacity = 778e9", "capacity = 778e9\nstaged = 700e9");
    std::fs::write(&file, other).expect("written");
    let (text, value) = (output(&["topo", &file]), json(&["topo", &file, "--json"]));
    assert!(text.contains("host0.read   153.0, staged 190.0  host0>root0") && text.contains("both together 778.0, staged 700.0"), "{text}");
    let staged = value["shared"].as_array().expect("a list").iter().filter(|of| of["staged_bytes_per_second"] == 190e9);
    assert_eq!(staged.count(), 1, "{value}");
    let assumed = "defaults, measured on H200 and assumed for other machines";
    assert!(output(&["topo", "summit"]).contains(assumed), "whose costs are not known");
}

#[test]
fn a_presets_file_names_the_source_of_each_figure_and_is_read_back_as_the_same_machine() {
    let folder = Folder::new("toml");
    let file = folder.file("node.toml");
    for name in presets() {
        let toml = output(&["topo", name, "--toml"]);
        assert!(toml.contains("\n# "), "{name}: comments with sources");
        std::fs::write(&file, toml).expect("written");
        let ([mut preset, mut copy], file) = ([name, &file].map(|name| json(&["topo", name, "--json"])), &file);
        assert_eq!((preset["origin"].take(), copy["origin"].take()), ("preset".into(), "file".into()), "{file}");
        assert_eq!(preset, copy);
    }
}

#[test]
fn every_preset_is_drawn_with_every_node_and_every_link() {
    let folder = Folder::new("machines");
    for name in presets() {
        let file = folder.file("machine.svg");
        output(&["topo", name, "--svg", &file]);
        let (svg, machine) = (read(&file), json(&["topo", name, "--json"]));
        assert_picture(&svg);
        for node in machine["nodes"].as_array().expect("a list") {
            assert!(svg.contains(&format!(">{}</text>", node["name"].as_str().expect("a name"))), "{name}: {node}");
        }
        // A single line in the drawing represents both directions of a link.
        assert_eq!(svg.matches("<path class=").count(), machine["links"].as_array().expect("a list").len() / 2, "{name}");
        // Each label has an opaque background, which is drawn above all lines and below all labels.
        assert_eq!(svg.matches("<rect class=\"g\"").count(), svg.matches("<text class=\"k\"").count(), "{name}");
        let order = [svg.rfind("<path "), svg.find("<rect class=\"g\""), svg.rfind("<rect class=\"g\""), svg.find("<text class=\"k\"")];
        assert!(order.is_sorted() && order[0].is_some(), "{name}: {order:?}");
    }
}

/// Returns the topology file of a machine of `gpus` GPUs behind one switch. Each host memory belongs to four GPUs.
fn behind_one_switch(gpus: usize) -> String {
    let list = |of: &dyn Fn(usize) -> String, count: usize| (0..count).map(of).collect::<Vec<_>>().join(", ");
    let (gpu, host) =
        (|at| format!("{{ name = \"gpu{at}\", kind = \"gpu\" }}"), |at| format!("{{ name = \"host{at}\", kind = \"host\" }}"));
    let (ports, links) = (|at| format!("[\"gpu{at}\", \"nvswitch\"]"), |at| format!("[\"gpu{at}\", \"host{}\"]", at / 4));
    format!(
        "name = \"domain\"\ndescription = \"{gpus} GPUs\"\nnode = [{}, {}, {{ name = \"nvswitch\", kind = \"switch\", peer = true }}]\n\
         [[link]]\nbetween = [{}]\nkind = \"nvlink\"\nbandwidth = 800e9\n[[link]]\nbetween = [{}]\nkind = \"pcie\"\nbandwidth = 55e9\n",
        list(&gpu, gpus),
        list(&host, gpus / 4),
        list(&ports, gpus),
        list(&links, gpus)
    )
}

#[test]
fn a_machine_of_144_gpus_is_planned_simulated_and_drawn() {
    let folder = Folder::new("domain");
    let [file, machine, run] = ["domain.toml", "machine.svg", "run.svg"].map(|name| folder.file(name));
    std::fs::write(&file, behind_one_switch(144)).expect("written");
    output(&["topo", &file, "--svg", &machine]);
    let ring: Vec<String> = (0..144).map(|gpu| format!("gpu{gpu}:gpu{}:16M", (gpu + 1) % 144)).collect();
    let with = |command: &[&str]| -> Vec<String> {
        command.iter().map(|word| (*word).to_owned()).chain(["--topology".into(), file.clone()]).chain(ring.clone()).collect()
    };
    let words = |words: &[String]| json(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let plan = words(&with(&["plan", "--json"]));
    assert_eq!(plan["transfers"].as_array().map(Vec::len), Some(144));
    let seconds = |value: &Value| value.as_f64().expect("seconds");
    let (bound, modelled) = (seconds(&plan["bound"]["seconds"]), seconds(&plan["modelled_seconds"]));
    assert!(bound > 0.9 * f64::from(16 << 20) / 855e9 && bound <= modelled, "{bound} {modelled}");
    let trace = words(&with(&["trace", "--json", "--svg", &run]));
    assert!(seconds(&trace["last_byte_seconds"]) >= bound);
    for (picture, count) in [(machine, 144), (run, 144)] {
        let svg = read(&picture);
        assert_picture(&svg);
        assert!((0..count).all(|gpu| svg.contains(&format!("gpu{gpu}"))));
    }
}

#[test]
fn one_source_is_passed_on_in_plans_and_traces() {
    let transfers = ["gpu0:gpu1:64M", "gpu0:gpu2:64M", "gpu0:gpu3:64M", "--topology", "beluga", "--json"];
    let seconds = |more: &[&str]| {
        let plan = json(&[&["plan"][..], &transfers, more].concat());
        let via = plan["transfers"].as_array().expect("transfers").iter().flat_map(|t| t["paths"].as_array().expect("paths"));
        let passed_on = via.filter(|path| path["via"].as_i64().is_some_and(|via| via > 0) && path["slots"] == 0).count();
        (plan["modelled_seconds"].as_f64().expect("seconds"), passed_on)
    };
    let ((alone, none), (together, passed_on)) = (seconds(&[]), seconds(&["--one-source"]));
    assert!(none == 0 && passed_on > 0 && together < 0.5 * alone, "{alone} {none}, {together} {passed_on}");
    let traced = |more: &[&str]| json(&[&["trace"][..], &transfers, &["--one-source"], more].concat())["plan"]["transfers"].clone();
    assert_eq!(traced(&[]), traced(&["--measure", "--backend", "host"]), "the same plan");
}

#[test]
fn plan_says_what_is_done_and_why_not_more() {
    let text = output(&["plan", "--topology", "dgx1-v100", "gpu0:gpu5:256M"]);
    for part in [
        "modelled: ",
        " times as fast as one path for each transfer",
        "\nlower bound of the time: ",
        ", limited by gpu0>",
        "; the plan reaches 0.",
        "  via gpu1  ",
        "  via gpu4, gpu6  ",
        " chunks of ",
        "at most 23.9 GB/s (gpu0>gpu1)",
        "not direct: no copy engine can copy from gpu0 to gpu5 directly",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let small = output(&["plan", "--topology", "dgx1-v100", "gpu0:gpu5:256K"]);
    assert!(small.contains("not via gpu6, gpu7: no copy engine can copy from gpu0 to the relay"), "{small}");
    let both = output(&["plan", "--topology", "narval", "gpu0:gpu1:12M", "gpu1:gpu0:12M", "gpu0:gpu1:12M", "gpu1:gpu0:12M"]);
    assert!(both.contains("not direct: gpu1>gpu0 is busy for "), "{both}");
    let ring = ["gpu0:gpu1:128M", "gpu1:gpu2:128M", "gpu2:gpu3:128M", "gpu3:gpu0:128M"];
    let text = output(&[&["plan", "--topology", "beluga", "--no-host-path"][..], &ring].concat());
    assert!(text.contains("4 transfers of 128.0 MiB, each:") && text.contains("3: gpu3>gpu0 (gpu1)"), "{text}");
    assert_eq!(text.matches("host_path is off").count(), 1, "alike reasons are given once: {text}");
}

#[test]
fn a_plan_as_json_holds_what_the_text_says() {
    let plan = json(&["plan", "--topology", "hgx-h200", "gpu0:gpu1:1G", "--max-paths", "3", "--json"]);
    let transfer = &plan["transfers"][0];
    let paths = transfer["paths"].as_array().expect("a list");
    assert_eq!(paths.iter().filter_map(|path| path["bytes"].as_u64()).sum::<u64>(), 1 << 30);
    assert_eq!((&paths[0]["via"], &paths[0]["limited_by"]), (&Value::Null, &"gpu0>nvswitch".into()));
    assert_eq!((&paths[1]["via"], &paths[1]["slots"]), (&(-1).into(), &4.into()));
    let bound = &plan["bound"];
    let reached = bound["seconds"].as_f64().expect("seconds") / plan["modelled_seconds"].as_f64().expect("seconds");
    assert!((0.95..1.0).contains(&reached) && bound["limits"][0]["resource"] == "gpu0>nvswitch" && bound["reason"].is_null(), "{bound}");
    assert_eq!(transfer["rejected"].as_array().map(Vec::len), Some(6));
    assert_eq!(transfer["rejected"][0]["code"], "shares_direct");
    assert_eq!((&plan["options"]["max_paths"], &plan["bytes"]), (&3.into(), &(1_u64 << 30).into()));
    let speedup = plan["modelled_seconds_one_path"].as_f64().expect("seconds") / plan["modelled_seconds"].as_f64().expect("seconds");
    assert!((speedup - plan["modelled_speedup"].as_f64().expect("a number")).abs() < 1e-9);
    assert_eq!(plan["staging"][0]["device"], -1);
}

#[test]
fn trace_simulates_a_run_and_writes_it_for_people_and_for_viewers() {
    let folder = Folder::new("trace");
    let (svg, perfetto) = (folder.file("run.svg"), folder.file("run.json"));
    let text = output(&["trace", "--topology", "beluga", "gpu0:gpu1:64M", "--svg", &svg, "--perfetto", &perfetto]);
    assert!(text.contains("simulated") && text.contains("gpu0 lane 0: gpu0>gpu1") && text.contains("GB/s while busy"), "{text}");
    let svg = read(&svg);
    assert_picture(&svg);
    for part in ["Modelled by the simulator", "gpu0&gt;gpu1 via gpu2", "lane 0: gpu0&gt;gpu1", "time in us", "47.9 GB/s"] {
        assert!(svg.contains(part), "{part}");
    }
    // The picture marks the end time that the text output states, and compares it with a simulation of one path.
    let last = |text: &str| {
        let (_, rest) = text.split_once("last byte after ").expect("the time of the last byte");
        rest.split_once(" (").expect("a rate").0.to_owned()
    };
    let plain = output(&["trace", "--topology", "beluga", "gpu0:gpu1:64M", "--max-paths", "1"]);
    for part in [format!(">last copy ends at {}</text>", last(&text)), ">plain copies</text>".into(), format!(">{}</text>", last(&plain))] {
        assert!(svg.contains(&part), "{part}");
    }
    let trace: Value = serde_json::from_str(&read(&perfetto)).expect("JSON");
    assert_eq!(trace["otherData"]["modelled"], true);
    let events = trace["traceEvents"].as_array().expect("a list");
    let of = |kind: &str| events.iter().filter(|event| event["ph"] == kind).collect::<Vec<_>>();
    let plan = json(&["plan", "--topology", "beluga", "gpu0:gpu1:64M", "--json"]);
    let operations = plan["operations"].as_u64().expect("a number") as usize;
    assert_eq!(of("X").iter().filter(|slice| slice["args"]["operation"].is_u64()).count(), operations);
    // Every arrow starts inside a slice and ends at the beginning of another slice, on the threads that the arrow names.
    for (flow, at_begin) in of("s").into_iter().map(|flow| (flow, false)).chain(of("f").into_iter().map(|flow| (flow, true))) {
        let at = flow["ts"].as_f64().expect("a time");
        let binds = |slice: &&&Value| {
            let begin = slice["ts"].as_f64().expect("a time");
            let inside = at >= begin && at < begin + slice["dur"].as_f64().expect("a time");
            (&slice["pid"], &slice["tid"]) == (&flow["pid"], &flow["tid"]) && if at_begin { at == begin } else { inside }
        };
        assert_eq!(of("X").iter().filter(binds).count(), 1, "{flow}");
    }
    assert_eq!(of("s").len(), of("f").len());
    assert!(of("s").len() > 10, "chunks wait for each other");
    // Slices of one thread must not overlap, because a viewer would nest them.
    for thread in of("M").iter().filter(|event| event["name"] == "thread_name") {
        let own = |slice: &&&Value| (&slice["pid"], &slice["tid"]) == (&thread["pid"], &thread["tid"]);
        let slices = of("X");
        let mut ends = 0.0;
        for slice in slices.iter().filter(own) {
            let begin = slice["ts"].as_f64().expect("a time");
            assert!(begin >= ends - 1e-3, "{slice}");
            ends = begin + slice["dur"].as_f64().expect("a time");
        }
    }
}

#[test]
fn trace_measures_on_the_host_backend_and_says_what_that_is() {
    let arguments = ["trace", "--measure", "--backend", "host", "--topology", "beluga", "gpu0:gpu1:4M", "host0:gpu2:1M"];
    let folder = Folder::new("measured");
    let svg = folder.file("run.svg");
    let text = output(&[&arguments[..], &["--svg", &svg]].concat());
    assert!(text.contains("measured") && text.contains("measured times, but not of GPUs"), "{text}");
    let svg = read(&svg);
    assert_picture(&svg);
    assert!(["last copy ends at", "the same transfers by plain copies: "].iter().all(|part| svg.contains(part)), "{svg}");
    let trace = json(&[&arguments[..], &["--pageable", "--json"]].concat());
    assert_eq!((&trace["modelled"], &trace["precision_seconds"]), (&false.into(), &0.0.into()));
    let spans = trace["spans"].as_array().expect("a list");
    assert_eq!(Some(spans.len() as u64), trace["plan"]["operations"].as_u64());
    assert!(spans.iter().all(|span| span["end_seconds"].as_f64() >= span["begin_seconds"].as_f64()));
    assert!(trace["plan"]["transfers"][1]["rejected"][0]["code"] == "pageable", "{}", trace["plan"]);
}

#[test]
fn predictions_are_checked_with_and_without_host_memory() {
    let folder = Folder::new("check");
    let machine = folder.file("machine.toml");
    let gpus = "{ name = \"gpu0\", kind = \"gpu\" }, { name = \"gpu1\", kind = \"gpu\" }";
    let link = |ends: &str| format!("[[link]]\nbetween = [{ends}]\nkind = \"pcie\"\nbandwidth = 25e9\n");
    let peers = link("[\"gpu0\", \"gpu1\"]");
    let to_host = link("[\"gpu0\", \"host0\"], [\"gpu1\", \"host0\"]");
    let with_host = format!("node = [{gpus}, {{ name = \"host0\", kind = \"host\" }}]\n{peers}{to_host}");
    // With two GPUs there are four cases between them and four with the host, at two sizes each.
    for (text, plans) in [(with_host, 16), (format!("node = [{gpus}]\n{peers}"), 8)] {
        std::fs::write(&machine, format!("name = \"two\"\n{text}")).expect("written");
        let run = mpgpu(&["probe", "--backend", "host", "--check", "--json", "--topology", &machine]);
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{said}");
        assert_eq!(said.matches("skipped, not all of its copies have a direct route").count(), if plans == 8 { 4 } else { 0 }, "{said}");
        let report: Value = serde_json::from_slice(&run.stdout).expect("JSON");
        let checked = report["plans"].as_array().expect("plans");
        assert_eq!(checked.len(), plans);
        assert!(checked.iter().all(|plan| plan["seconds"].as_array().expect("turns").len() == 3 && plan["measured"].as_f64() > Some(0.0)));
    }
}

#[test]
fn a_probe_of_virtual_devices_is_written_where_it_is_asked_for_and_nowhere_else() {
    let folder = Folder::new("probe");
    // The test makes as few copies as possible, because a CPU makes them.
    let machine = folder.file("one.toml");
    let nodes = "node = [{ name = \"gpu0\", kind = \"gpu\" }, { name = \"host0\", kind = \"host\" }]";
    let link = "[[link]]\nbetween = [[\"gpu0\", \"host0\"]]\nkind = \"pcie\"\nbandwidth = 25e9\n";
    std::fs::write(&machine, format!("name = \"one\"\n{nodes}\n{link}")).expect("written");
    let probe = |arguments: &[&str]| {
        let environment = [("XDG_CACHE_HOME", folder.0.to_str().expect("UTF-8")), ("MPGPU_TOPOLOGY", &*machine)];
        let run = mpgpu_with(&environment, &[&["probe", "--backend", "host"], arguments].concat());
        let [text, said] = [run.stdout, run.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
        (run.status.success(), text, said)
    };
    let node = folder.file("node.toml");
    let (done, text, said) = probe(&["--output", &node]);
    assert!(done && !text.contains("tuned") && said.contains("written to") && !read(&node).is_empty(), "{said}");
    let (done, text, _) = probe(&["--stdout"]);
    assert!(done && text.contains("[probe]") && !text.contains("tuned"));
    let (done, text, said) = probe(&[]);
    assert!(done && text.contains("fixed costs") && !text.contains("tuned") && said.contains("not stored: pass --output FILE"), "{said}");
    let (done, text, said) = probe(&["--quick", "--json"]);
    let quick: Value = serde_json::from_str(&text).expect("JSON");
    assert!(done && quick["probe"]["tuning"].is_null() && quick["probe"]["file"].is_null(), "{said}");
    let (done, _, said) = probe(&["--check"]);
    assert!(!done && said.contains("name a file with --output"), "{said}");
    assert!(!folder.0.join("mpgpu").exists(), "a probe of virtual devices lies where no context looks");
}

#[test]
fn a_judgement_is_of_the_tuning_in_force_and_says_so() {
    let folder = Folder::new("judge");
    let file = folder.file("tuning.toml");
    let case = ["--topology", "pcie-4", "--cases", "h2d", "--sizes", "64K"];
    let made = mpgpu(&[&["tune", "--simulate", "--output", &file], &case[..]].concat());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let judge = |tuning: &str, more: &[&str]| {
        let run = mpgpu_with(&[("MPGPU_TUNING_FILE", tuning)], &[&["tune", "--judge", "--backend", "host"], &case[..], more].concat());
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8(run.stdout).expect("UTF-8")
    };
    let (tuned, model) = (judge(&file, &[]), judge("none", &[]));
    assert!(
        tuned.contains("the plan that the tuning chooses") && tuned.contains("tuning loss") && !tuned.contains("model loss"),
        "{tuned}"
    );
    assert!(model.contains("the plan that the model chooses") && model.contains("model loss") && !model.contains("tuning"), "{model}");
    for (tuning, is_tuned) in [(&*file, true), ("none", false)] {
        let json: Value = serde_json::from_str(&judge(tuning, &["--json"])).expect("JSON");
        let (machine, point) = (&json["machines"][0], &json["machines"][0]["points"][0]);
        assert_eq!((machine["judged_tuning"].is_string(), point["model_seconds"].is_null()), (is_tuned, is_tuned), "{machine}");
        assert!(point["choice_seconds"].as_f64() > Some(0.0) && point["choice_loss_percent"].is_f64(), "{point}");
        assert_eq!(json["judged"]["worst_model_loss_percent"].is_null(), is_tuned, "{json}");
    }
}

#[test]
fn the_names_of_this_machine_are_known_wherever_a_machine_is_named() {
    if mpgpu_devices::cuda::device_count().is_ok() {
        return crate::skip::skip("there are GPUs, which have a topology");
    }
    for name in ["discovered", "probed"] {
        let transfer = "gpu0:gpu1:1M";
        for arguments in [&["topo", name][..], &["plan", "--topology", name, transfer], &["trace", "--topology", name, transfer]] {
            let error = error(arguments);
            assert!(error.contains(name) && error.contains("name a preset") && !error.contains("presets are"), "{arguments:?}: {error}");
        }
        let tune = error(&["tune", "--simulate", "--topology", name, "--cases", "d2d", "--sizes", "1M"]);
        let sim = error(&["sim", "--topology", name, "gpu0:gpu1"]);
        assert!(tune.contains("name a preset") && sim.contains("name a preset"), "{tune}{sim}");
    }
}

#[test]
fn errors_name_the_value_and_what_to_do() {
    let folder = Folder::new("errors");
    let broken = folder.file("broken.toml");
    std::fs::write(&broken, "name = 1\n").expect("written");
    let missing = folder.file("no/such/folder.svg");
    let here = folder.0.to_str().expect("a path in UTF-8").to_owned();
    let plan = |transfer: &str| error(&["plan", "--topology", "beluga", transfer]);
    for (error, parts) in [
        (error(&["topo", "belluga"]), ["belluga", "presets are beluga, narval"]),
        (error(&["topo", &broken]), ["broken.toml", "name"]),
        (error(&["topo", "--toml"]), ["there is no machine to show", "mpgpu topo beluga"]),
        (error(&["trace", "--topology", "beluga", "gpu0:gpu1:1M", "--svg", &missing]), ["folder.svg", "create the folder first"]),
        (error(&["trace", "--topology", "beluga", "gpu0:gpu1:1M", "--svg", &here]), ["cannot write", "name a file in it"]),
        (plan("gpu0:gpu1"), ["gpu0:gpu1", "SOURCE:DESTINATION:BYTES, as in gpu0:gpu1:64M"]),
        (plan("gpu0-gpu1-64M"), ["gpu0-gpu1-64M", "SOURCE:DESTINATION:BYTES"]),
        (plan("gpu0:cpu:64M"), ["cpu", "gpu0, gpu1, … or host0, host1, …"]),
        (plan("gpu0:gpu1:64MB"), ["64MB", "K, M, G or T"]),
        (plan("gpu0:gpu9:64M"), ["transfer 0", "this machine has GPUs 0 to 3"]),
        (error(&["plan", "--topology", "beluga"]), ["TRANSFER", "--help"]),
        (error(&["plan", "--topology", "beluga", "gpu0:gpu1:1M", "--max-paths", "0"]), ["--max-paths", "1.."]),
        (error(&["plan", "--topology", "beluga", "gpu0:gpu1:1M", "--chunk-bytes", "1K"]), ["chunk_bytes=1024", "4096 or more"]),
        (
            error(&["plan", "--topology", "beluga", "gpu0:gpu1:1M", "--relay-gpus", "2,x"]),
            ["--relay-gpus", "all, none, or numbers of GPUs"],
        ),
        (error(&["trace", "--topology", "beluga", "gpu0:gpu1:1M", "--backend", "host"]), ["--measure", "required"]),
        (error(&["trace", "--measure", "--backend", "cuda", "gpu0:gpu1:1M"]), ["mpgpu: ", "driver"]),
    ] {
        for part in parts {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}

#[test]
fn help_texts_teach_by_examples_that_work() {
    for command in ["topo", "plan", "trace"] {
        let help = output(&[command, "--help"]);
        let examples: Vec<&str> = help.lines().filter_map(|line| line.trim().strip_prefix("mpgpu ")).collect();
        assert!(examples.len() > 2, "{help}");
        let folder = Folder::new(&format!("help-{command}"));
        for example in examples {
            // An explanation follows two blanks, and shell syntax follows ';', '|' or '>'. Only the part before is run. Commands that use
            // the real machine are run by other tests.
            let line = example.split("  ").next().unwrap_or_default().split([';', '|', '>']).next().unwrap_or_default();
            let words: Vec<String> = line
                .split_whitespace()
                .map(|word| if word.ends_with(".svg") || word.ends_with(".json") { folder.file(word) } else { word.to_owned() })
                .collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let small: Vec<&str> = words.iter().map(|word| if *word == "gpu0:gpu1:256M" { "gpu0:gpu1:1M" } else { word }).collect();
            output(&small);
        }
    }
}

/// Run `docs/pictures/make` to update them.
#[test]
fn the_pictures_of_the_docs_are_current() {
    let picture = |name: &str| read(format!("{}/../../docs/pictures/{name}.svg", env!("CARGO_MANIFEST_DIR")));
    let folder = Folder::new("pictures");
    for name in ["beluga", "dgx1-v100", "gh200-4", "hgx-h200"] {
        let drawn = folder.file("topo.svg");
        output(&["topo", name, "--svg", &drawn]);
        assert!(read(&drawn) == picture(&format!("topo-{name}")), "docs/pictures/topo-{name}.svg is not current: docs/pictures/make");
    }
    let kept = picture("trace-beluga");
    let drawn = folder.file("trace.svg");
    output(&["trace", "--topology", "beluga", "gpu0:gpu1:64M", "--svg", &drawn]);
    assert!(read(&drawn) == kept && kept.len() < 40_000, "docs/pictures/trace-beluga.svg is not current: docs/pictures/make");
}

#[test]
fn a_timeline_is_drawn_without_arrows_where_that_is_asked_for() {
    let folder = Folder::new("arrows");
    let drawn = |more: &[&str]| {
        let file = folder.file("trace.svg");
        output(&[&["trace", "--topology", "beluga", "gpu0:gpu1:64M", "--svg", &file], more].concat());
        read(&file).matches("<path class=\"y\"").count()
    };
    assert!(drawn(&[]) > 0);
    assert_eq!(drawn(&["--no-arrows"]), 0);
    assert!(error(&["trace", "--topology", "beluga", "gpu0:gpu1:64M", "--no-arrows"]).contains("--svg"));
}

/// Returns the names of a plan's paths, such as `gpu0>gpu5 via gpu1, gpu4`.
fn paths(plan: &Value) -> std::collections::BTreeSet<String> {
    let device =
        |number: &Value| number.as_i64().map_or(String::new(), |n| if n < 0 { format!("host{}", -1 - n) } else { format!("gpu{n}") });
    let transfers = plan["transfers"].as_array().expect("transfers").iter();
    let named = transfers.flat_map(|transfer| {
        let ends = format!("{}>{}", device(&transfer["src_device"]), device(&transfer["dst_device"]));
        transfer["paths"].as_array().expect("paths").iter().map(move |path| {
            let earlier = path["earlier"].as_array().expect("a list").iter();
            let vias: Vec<String> = earlier.chain(Some(&path["via"]).filter(|via| !via.is_null())).map(device).collect();
            if vias.is_empty() { format!("{ends} direct") } else { format!("{ends} via {}", vias.join(", ")) }
        })
    });
    named.collect()
}

#[test]
fn trace_shows_the_paths_of_the_plan_and_no_others() {
    for what in [
        &["--topology", "dgx1-v100", "gpu0:gpu5:256M"][..],
        &["--topology", "dgx1-v100", "gpu1:gpu2:64M", "gpu0:gpu5:256M"],
        &["--topology", "beluga", "gpu0:gpu1:64M"],
        &["--topology", "beluga", "--pageable", "host0:gpu1:64M"],
        &["--topology", "hgx-h200", "gpu0:gpu1:256M", "gpu0:gpu2:256M", "gpu0:gpu3:256M"],
    ] {
        let trace = json(&[&["trace", "--json"], what].concat());
        let spans = trace["spans"].as_array().expect("spans").iter();
        let shown: std::collections::BTreeSet<String> = spans.filter_map(|span| span["path"].as_str().map(str::to_owned)).collect();
        assert_eq!(shown, paths(&trace["plan"]), "{what:?}");
    }
}

#[test]
fn bench_copies_in_every_way_also_between_processes_and_says_that_threads_are_no_gpus() {
    let bench = |arguments: &[&str]| {
        let run = mpgpu_with(&[], &[&["bench", "--backend", "host", "--bytes", "100000"], arguments].concat());
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8(run.stdout).expect("UTF-8")
    };
    let text = bench(&["--topology", "beluga"]);
    for what in
        ["GPU 0 to GPU 1", "both directions", "all GPUs to all", "another process", "pinned host memory to", "pageable host memory to"]
    {
        assert!(text.lines().any(|line| line.contains(what) && line.ends_with("yes")), "{what} in {text}");
    }
    assert!(text.contains("do not describe GPUs"), "{text}");
    let json: Value = serde_json::from_str(&bench(&["--topology", "beluga", "--json"])).expect("JSON");
    let copies = json["copies"].as_array().expect("a list");
    assert!(copies.len() == 8 && copies.iter().all(|copy| copy["bytes_right"] == true && copy["plain"].is_f64()), "{json}");
    assert_eq!(json["on_gpus"], false);
    for (arguments, why) in [(["--bytes", "0"], "1 byte or more"), (["--topology", "nowhere"], "nowhere"), (["--backend", "rocm"], "cuda")]
    {
        let said = error(&[&["bench"][..], &arguments].concat());
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn run_starts_the_program_with_the_interposer_in_its_environment_and_ends_as_it_ends() {
    let folder = Folder::new("run");
    // The dynamic loader ignores an invalid library and prints a message.
    let library = folder.file("libmpgpu_preload.so");
    std::fs::write(&library, "").expect("written");
    let run = |environment: &[(&str, &str)], arguments: &[&str], script: &str| {
        let all = [&["run", "--library", &library], arguments, &["--", "sh", "-c", script]].concat();
        let run = mpgpu_with(environment, &all);
        (run.status, String::from_utf8(run.stdout).expect("UTF-8"))
    };
    let auditor = folder.file("libmpgpu_audit.so");
    std::fs::write(&auditor, "").expect("written");
    let show = "echo $LD_PRELOAD $MPGPU_PRELOAD_REPORT $MPGPU_VERIFY; exit 7";
    let code = |(status, text): (std::process::ExitStatus, String)| (status.code(), text);
    let library = Path::new(&library).canonicalize().expect("it is there");
    let library = library.display();
    assert_eq!(code(run(&[], &[], show)), (Some(7), format!("{library}\n")));
    assert_eq!(code(run(&[("LD_PRELOAD", "other.so")], &["--check"], show)), (Some(7), format!("{library}:other.so bytes\n")));
    let report = folder.file("report");
    assert_eq!(code(run(&[], &["--report", &report], show)), (Some(7), format!("{library} {report}\n")));
    let audited = format!("{}\n", Path::new(&auditor).canonicalize().expect("it is there").display());
    assert_eq!(code(run(&[], &["--audit"], "echo $LD_AUDIT")), (Some(0), audited));
    assert_eq!(code(run(&[("MPGPU_PRELOAD_REPORT", "there")], &[], show)), (Some(7), format!("{library} there\n")));
    // `mpgpu run` ends by the same signal as the program, also if the signal was sent to `mpgpu run` itself.
    assert_eq!(run(&[], &[], "kill -KILL $$").0.signal(), Some(9));
    assert_eq!(run(&[], &[], "kill -TERM $PPID; sleep 60").0.signal(), Some(15));
    assert_eq!(
        code(run(&[], &[], "trap 'echo told; exit 3' USR1; kill -USR1 $PPID; while :; do sleep 0.01; done")),
        (Some(3), "told\n".into())
    );
}

#[test]
fn run_needs_no_dashes_before_the_program_and_exits_as_a_shell_does_if_it_cannot_be_run() {
    let folder = Folder::new("dashes");
    let [library, text] = ["libmpgpu_preload.so", "text"].map(|name| folder.file(name));
    [&library, &text].into_iter().for_each(|file| std::fs::write(file, "").expect("written"));
    let run = |arguments: &[&str]| mpgpu_with(&[], &[&["run", "--library", &library][..], arguments].concat());
    let echoed = run(&["--check", "sh", "-c", "echo $MPGPU_VERIFY \"$@\"; exit 5", "sh", "--check", "--", "-x"]);
    assert_eq!((echoed.status.code(), String::from_utf8_lossy(&echoed.stdout).as_ref()), (Some(5), "bytes --check -- -x\n"));
    for (program, code) in [("/nowhere/program", 127), ("no-program-of-this-name", 127), (&*text, 126), ("/", 126)] {
        for arguments in [&[program][..], &["--", program]] {
            let refused = run(arguments);
            let why = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert_eq!(refused.status.code(), Some(code), "{program}: {why}");
            assert!(why.starts_with(&format!("mpgpu: {program} cannot be run: ")), "{why}");
        }
    }
}

/// Compiles a program, or a library to preload, with the C compiler. Returns the path, or `None` if there is no compiler.
fn compile(folder: &Folder, name: &str, flags: &[&str], source: &str) -> Option<String> {
    let [from, to] = [format!("{name}.c"), name.to_owned()].map(|name| folder.file(&name));
    std::fs::write(&from, source).expect("written");
    let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
    let compiled = Command::new(compiler).args(flags).args([&from, "-o", &to]).output().expect("a C compiler");
    compiled.status.success().then_some(to)
}

#[test]
fn run_lets_a_sanitized_program_find_its_faults_behind_the_interposer() {
    let folder = Folder::new("sanitized");
    let library = compile(&folder, "libmpgpu_preload.so", &["-shared", "-fPIC"], "int mpgpu_here = 1;\n").expect("a library");
    let source = "#include <stdlib.h>\nint main(int argc, char **argv) {\n    (void)argv;\n    volatile char *bytes = malloc(8);\n    \
                  bytes[argc < 2 ? 0 : 8] = 1;\n    free((void *)bytes);\n    return 3;\n}\n";
    let Some(program) = compile(&folder, "program", &["-fsanitize=address"], source) else {
        return crate::skip::skip("the C compiler has no AddressSanitizer");
    };
    let run = |environment: &[(&str, &str)], arguments: &[&str]| {
        let run = mpgpu_with(environment, &[&["run", "--library", &library][..], arguments].concat());
        (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned())
    };
    let (code, said) = run(&[], &[&program]);
    assert_eq!(code, Some(3), "{said}");
    // This also works if a program without sanitizer starts the sanitized program, and with options that the user has set.
    let (code, said) = run(&[("ASAN_OPTIONS", "exitcode=9")], &["sh", "-c", "\"$0\" fault", &program]);
    assert!(code == Some(9) && said.contains("heap-buffer-overflow"), "{code:?}: {said}");
}

#[test]
fn run_leaves_signals_ignored_that_were() {
    let folder = Folder::new("nohup");
    let library = folder.file("libmpgpu_preload.so");
    std::fs::write(&library, "").expect("written");
    let script = format!(
        "trap '' HUP; exec {} run --library {library} -- sh -c 'kill -HUP $$; kill -HUP $PPID; echo alive'",
        env!("CARGO_BIN_EXE_mpgpu")
    );
    let run = std::process::Command::new("sh").args(["-c", &script]).output().expect("sh");
    assert_eq!((run.status.code(), String::from_utf8_lossy(&run.stdout).as_ref()), (Some(0), "alive\n"));
}

#[test]
fn run_tells_what_processes_have_counted_that_were_killed() {
    let folder = Folder::new("sums");
    let library = folder.file("libmpgpu_preload.so");
    std::fs::write(&library, "").expect("written");
    // Data as the interposer writes it: one outcome ("accelerated") with its numbers of copies and bytes, and its name.
    let words = [1u64, 1, 2, 2_000_000, 0, 0, 5, 1 << 20];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).chain(*b"GPU to GPU").collect();
    let counted = folder.file("counted");
    std::fs::write(&counted, bytes).expect("written");
    let script = format!("dd if={counted} of=$MPGPU_PRELOAD_SUMS bs=8 seek=1 conv=notrunc 2>/dev/null; kill -KILL $$");
    let run = mpgpu_with(&[], &["run", "--library", &library, "--", "sh", "-c", &script]);
    let told = String::from_utf8(run.stderr).expect("UTF-8");
    let told: Vec<_> = told.lines().filter(|line| line.starts_with("mpgpu: ")).collect();
    let expected = [
        "mpgpu: accelerated           5 copies,        1048576 bytes: GPU to GPU",
        "mpgpu: time saved: 0.002000 s in 2 processes (measured or modelled)",
    ];
    assert_eq!((run.status.signal(), &told[..]), (Some(9), &expected[..]));
    // Programs cannot truncate the shared memory with the counters while other programs write to it.
    let run = mpgpu_with(&[], &["run", "--library", &library, "--", "sh", "-c", "truncate -s 0 $MPGPU_PRELOAD_SUMS || echo refused"]);
    assert_eq!(String::from_utf8_lossy(&run.stdout), "refused\n");
}

#[test]
fn run_finds_the_interposer_that_the_loader_knows() {
    let folder = Folder::new("loader");
    let library = folder.file("libmpgpu_preload.so");
    std::fs::write(&library, "").expect("written");
    let ldconfig = folder.file("ldconfig");
    let lists = |text: &str| {
        std::fs::write(&ldconfig, format!("#!/bin/sh\necho '{text}'\n")).expect("written");
        std::fs::set_permissions(&ldconfig, std::fs::Permissions::from_mode(0o755)).expect("it can be run");
        let path = format!("{}:/usr/bin:/bin", folder.0.display());
        mpgpu_with(&[("PATH", &path), ("LD_LIBRARY_PATH", "")], &["run", "--", "sh", "-c", "echo $LD_PRELOAD"])
    };
    let found = lists(&format!("\tlibmpgpu_preload.so (libc6,x86-64) => {library}"));
    let library = Path::new(&library).canonicalize().expect("it is there");
    assert_eq!(String::from_utf8_lossy(&found.stdout), format!("{}\n", library.display()));
    let missing = lists("\tlibother.so (libc6,x86-64) => /lib/libother.so");
    assert!(!missing.status.success() && String::from_utf8_lossy(&missing.stderr).contains("pass its path with --library"));
}

#[test]
fn pages_are_written_for_every_subcommand_that_is_shown() {
    let folder = Folder::new("pages");
    output(&["pages", &folder.file("share")]);
    let (help, mut shown) = (output(&["--help"]), 0);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    for name in commands.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next()) {
        let page = if name == "help" { continue } else { read(folder.file(&format!("share/man/man1/mpgpu-{name}.1"))) };
        assert!(page.contains(".TH") && page.contains("SYNOPSIS"), "{name}: {page}");
        for completion in ["bash-completion/completions/mpgpu", "zsh/site-functions/_mpgpu", "fish/vendor_completions.d/mpgpu.fish"] {
            assert!(read(folder.file(&format!("share/{completion}"))).contains(name), "{completion}: {name}");
        }
        shown += 1;
    }
    // Each page describes the command in its name, such as mpgpu-bench. No other program has such a name.
    let bench = read(folder.file("share/man/man1/mpgpu-bench.1"));
    assert!(bench.contains("mpgpu bench") && bench.contains("\\-\\-case"), "{bench}");
    assert!(shown >= 8 && !help.contains("pages") && read(folder.file("share/man/man1/mpgpu.1")).contains("mpgpu\\-plan(1)"));
}

#[test]
fn run_says_what_is_missing() {
    assert!(error(&["run", "--library", "/nowhere/at.all", "--", "true"]).starts_with("mpgpu: --library /nowhere/at.all: "));
    assert!(error(&["run"]).contains("<PROGRAM>"));
    let folder = Folder::new("blank");
    let library = folder.file("a b.so");
    std::fs::write(&library, "").expect("written");
    assert!(error(&["run", "--library", &library, "--", "true"]).contains("a path with a space or a colon"));
    std::fs::rename(&library, folder.file("c.so")).expect("renamed");
    assert!(error(&["run", "--audit", "--library", &folder.file("c.so"), "--", "true"]).contains("libmpgpu_audit.so does not exist"));
    assert!(error(&["run", "--library", &folder.file("c.so"), "--", "/nowhere/program"]).contains("/nowhere/program cannot be run"));
}

#[test]
fn what_cannot_be_written_is_an_error_unless_nobody_reads_it() {
    let started = |arguments: &[&str], out: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpgpu"));
        let ended = command.args(arguments).env("MPGPU_BACKEND", "host").stdout(out).stderr(std::process::Stdio::piped()).output();
        let ended = ended.expect("the command starts");
        (ended.status.code(), String::from_utf8(ended.stderr).expect("UTF-8"))
    };
    for arguments in
        [&["--help"][..], &["--version"], &["plan", "--help"], &["help", "run"], &["topo", "--presets"], &["topo", "beluga", "--json"]]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has it");
        let (code, said) = started(arguments, full.into());
        assert!(code == Some(1) && said.starts_with("mpgpu: standard output: "), "{arguments:?}: {code:?}, {said}");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        assert_eq!(started(arguments, writer.into()), (Some(0), String::new()), "{arguments:?}");
    }
    assert_eq!(mpgpu(&["plan", "--nonsense"]).status.code(), Some(2));
}

#[test]
fn sim_takes_the_topology_that_the_environment_names() {
    let simulated = |arguments: &[&str]| {
        let run = mpgpu_with(&[("MPGPU_TOPOLOGY", "beluga")], &[&["sim", "gpu0:gpu1:64M"], arguments].concat());
        String::from_utf8(run.stdout).expect("UTF-8")
    };
    assert!(simulated(&[]).starts_with("sim for beluga: "));
    assert!(simulated(&["--topology", "narval"]).starts_with("sim for narval: "));
    assert!(output(&["sim", "gpu0:gpu1:64M"]).starts_with("sim for hgx-h200: "));
}

/// Every row of the page must name a command. Commands of this program are run if they need no GPU. Scripts and examples must exist.
#[test]
fn the_commands_of_the_papers_page_run_as_printed() {
    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let folder = Folder::new("papers");
    let trial = mpgpu_measure::tune::PartitionTrial { mover: mpgpu_measure::tune::PartitionMover::Producer, count: 16, blocks: 0, ns: 5 };
    let tuned = mpgpu_measure::tune::PartitionTuning { shape: "00000000000000aa".into(), bytes: 1 << 20, count: 16, trials: vec![trial] };
    let tuning = mpgpu_measure::tune::Tuning {
        topology: "beluga".into(),
        digest: "0123456789abcdef".into(),
        origin: mpgpu_measure::tune::Origin::Host,
        classes: Vec::new(),
        partitions: vec![tuned],
    };
    std::fs::write(folder.file("tuning.toml"), tuning.to_toml()).expect("written");
    let page = read(format!("{ROOT}/docs/papers.md"));
    let (mut run, mut there) = (0, 0);
    for printed in page.lines().filter_map(|line| line.split(" | ").nth(1)?.strip_prefix('`')?.strip_suffix('`')) {
        let words: Vec<&str> = printed.split(' ').collect();
        if words[0] != "mpgpu" {
            assert!(Path::new(ROOT).join(words[0]).exists(), "{printed}");
            there += 1;
            continue;
        }
        // Small transfers are sufficient, because the test does not check the measured values.
        let few: &[&str] = if words[1] == "bench" { &["--bytes", "100000"] } else { &[] };
        let mut command = Command::new(env!("CARGO_BIN_EXE_mpgpu"));
        let ended = command.args(&words[1..]).args(few).current_dir(&folder.0).env("MPGPU_BACKEND", "host").output();
        let ended = ended.expect("it starts");
        assert!(ended.status.success() && !ended.stdout.is_empty(), "{printed}: {}", String::from_utf8_lossy(&ended.stderr));
        run += 1;
    }
    assert!(run >= 4 && there >= 10, "{run} and {there}");
}

fn update_docs() -> bool {
    std::env::var_os("UPDATE_DOCS").is_some()
}

/// The text after `$ mpgpu` on the page must equal the command's current output, except for lines omitted at `…`. `UPDATE_DOCS=1` updates
/// lines in which only numbers have changed.
#[test]
fn the_examples_of_the_docs_are_current() {
    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/command.md");
    let folder = Folder::new("examples");
    let docs = read(PAGE);
    let shape = |line: &str| line.split_whitespace().map(|word| word.replace(|c: char| c.is_ascii_digit(), "")).collect::<Vec<_>>();
    let (mut current, mut examples) = (docs.clone(), 0);
    for block in docs.split("```console\n$ mpgpu ").skip(1) {
        let (line, shown) = block.split_once("```").expect("a block ends").0.split_once('\n').expect("output follows");
        let is_file = |word: &str| word.ends_with(".svg") || word.ends_with(".json");
        let words: Vec<String> = line.split(' ').map(|word| if is_file(word) { folder.file(word) } else { word.to_owned() }).collect();
        let printed = output(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let (mut rest, mut skip, mut now) = (printed.lines(), false, String::new());
        for expected in shown.lines() {
            let found = match expected {
                "…" => Some("…"),
                _ if skip && update_docs() => rest.find(|line| shape(line) == shape(expected)),
                _ if skip => rest.find(|line| *line == expected),
                _ => rest.next(),
            };
            assert!(update_docs() || found == Some(expected), "mpgpu {line}\n{printed}\nhas not: {expected}");
            skip = expected == "…";
            now += &format!("{}\n", found.unwrap_or_else(|| panic!("mpgpu {line}\n{printed}\nhas nothing like: {expected}")));
        }
        current = current.replace(&format!("{line}\n{shown}"), &format!("{line}\n{now}"));
        examples += 1;
    }
    assert!(examples >= 3, "{examples} examples");
    if update_docs() {
        std::fs::write(PAGE, current).expect("written");
    }
}
