//! Tests `mpgpu bench --case` on the host backend: every case, cases that need more hardware, and the JSON output.

use super::measure::folder;
use serde_json::Value;
use std::process::{Command, Output};

const CASES: [&str; 21] = [
    "d2d",
    "d2d_anew",
    "d2d_bidir",
    "h2d",
    "d2h",
    "h2d_pageable",
    "d2h_pageable",
    "ring",
    "all_to_all",
    "halo26",
    "halo26_bidir",
    "pieces_in",
    "pieces_out",
    "latency",
    "put_window",
    "put_signal",
    "put_paths",
    "put_latency",
    "d2d_narrow",
    "graph_phases",
    "execute_overhead",
];

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpgpu"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MPGPU_")) {
        command.env_remove(name);
    }
    command.arg("bench").args(arguments).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn every_case_runs_on_the_host_backend_and_is_reported_or_says_why_not() {
    let list = text(&bench(&["--list"]).stdout);
    let named: Vec<&str> = list.lines().filter(|line| !line.starts_with(' ')).map(|line| line.split(' ').next().unwrap_or("")).collect();
    assert_eq!(named, CASES);

    let file = folder("bench").join("result.json").to_str().expect("a path in UTF-8").to_owned();
    // Thousands of small transfers take minutes in a debug build. A few large ones use the same code.
    let few = ["--backend", "host", "--topology", "beluga", "--case", "pieces_in,pieces_out", "--sizes", "64M", "--repeat", "1"];
    assert!(bench(&few).status.success());
    let cases = CASES.into_iter().filter(|case| !case.starts_with("pieces")).collect::<Vec<_>>();
    let host = ["--backend", "host", "--topology", "beluga", "--case", &cases.join(",")];
    let run = bench(&[&host[..], &["--sizes", "8,100000", "--repeat", "3", "--plans", "--output", &file]].concat());
    let (text, progress) = (text(&run.stdout), text(&run.stderr));
    assert!(run.status.success() && text.contains("host backend"), "{text}{progress}");
    let json: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
    let results = json["results"].as_array().expect("a list");
    for case in cases {
        let of_case: Vec<_> = results.iter().filter(|result| result["case"] == case).collect();
        let skipped = json["skipped"].as_array().expect("a list").iter().find(|skipped| skipped["case"] == case);
        if ["graph_phases", "execute_overhead"].contains(&case) {
            assert!(of_case.is_empty() && skipped.is_some_and(|s| s["why"].as_str().is_some_and(|why| why.contains("CUDA"))), "{json}");
            continue;
        }
        assert!(skipped.is_none());
        // Case `put_window`: windows of 1, 4 and 16 puts in one stream, and the larger windows with one stream for each put. Case
        // `put_signal`: single puts, several back to back, and alternating ones.
        let ways = match case {
            "put_window" => 5,
            "put_signal" => 3,
            _ => 1,
        };
        assert_eq!(of_case.len(), 2 * ways, "{case}");
        assert!(text.lines().any(|line| line.starts_with(&format!("{case} ")) && line.contains("97.7 KiB")), "{text}");
        assert!(text.contains(&format!("\n{case}, 97.7 KiB:\nplan for ")), "{text}");
        for result in of_case {
            let plain = &result["plain"][0];
            for times in [&result["mpgpu"], &plain["times"]] {
                assert!(times["total"]["median"].as_f64() > Some(0.0) && times["issue"]["min"].as_f64() >= Some(0.0), "{result}");
            }
            assert!(plain["ratio"].is_f64() && result["verified"] == true && result["rounds"] == 3, "{result}");
            let manner = plain["manner"].as_str().expect("a name");
            match case {
                "put_window" => assert_eq!(manner, format!("window {}, memcpy, one thread", result["transfers"])),
                "put_signal" => assert!(manner.starts_with("in one process"), "{manner}"),
                "put_paths" => assert_eq!(manner, "the put over one path"),
                "put_latency" => assert_eq!(manner, "the signal alone"),
                "d2d_narrow" => assert_eq!(manner, "one narrow path"),
                _ => assert_eq!(manner, "memcpy, one thread"),
            }
        }
    }
    let puts = results.iter().filter(|r| r["case"] == "put_signal" && r["size"] == 8);
    assert_eq!(puts.map(|r| r["bytes"].as_u64()).collect::<Vec<_>>(), [Some(8), Some(32), Some(8)]);
}

#[test]
fn a_case_for_more_gpus_than_there_are_is_left_out_and_named() {
    let machine = folder("bench-two").join("two.toml").to_str().expect("a path in UTF-8").to_owned();
    let two_gpus = r#"
        name = "two"
        node = [{ name = "gpu0", kind = "gpu" }, { name = "gpu1", kind = "gpu" }, { name = "host0", kind = "host" }]
        [[link]]
        between = [["gpu0", "gpu1"], ["gpu0", "host0"], ["gpu1", "host0"]]
        kind = "pcie"
        bandwidth = 10e9
    "#;
    std::fs::write(&machine, two_gpus).expect("written");
    let run = bench(&["--backend", "host", "--topology", &machine, "--case", "ring,d2d", "--sizes", "8", "--repeat", "1"]);
    let (text, progress) = (text(&run.stdout), text(&run.stderr));
    assert!(text.contains("\nd2d ") && !text.contains("\nring"), "{text}");
    assert!(progress.contains("ring: skipped, needs 3 GPUs, but the machine has 2"), "{progress}");
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_runs() {
    for (arguments, parts) in [
        (["--case", "d2x"], ["d2x", "all_to_all"]),
        (["--sizes", "0"], ["0", "1 byte or more"]),
        (["--repeat", "0"], ["--repeat", "0"]),
        (["--backend", "gpu"], ["gpu", "cuda"]),
        (["--output", "no/such/folder.json"], ["no/such/folder.json", "No such file"]),
    ] {
        let run = bench(&[&["--case", "d2d", "--topology", "no-such-file"], &arguments[..]].concat());
        let said = text(&run.stderr);
        assert!(!run.status.success() && parts.iter().all(|part| said.contains(part)), "{arguments:?}: {said}");
    }
}
