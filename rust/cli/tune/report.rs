//! Reports the results of tuning, as tables and as JSON.

use crate::text::table;
use mpgpu_core::plan::Engine;
use mpgpu_core::units::{size, time};
use mpgpu_measure::tune::{EngineResult, Origin, Setting, TunedPoint, Tuning};
use serde_json::{Value, json};

/// Results of tuning for one machine.
pub struct MachineReport {
    pub machine: String,
    pub digest: String,
    pub origin: Origin,
    /// Earlier tuning whose plans are evaluated; `None` if there is none.
    pub in_force: Option<Tuning>,
    pub points: Vec<TunedPoint>,
    /// New tuning; `None` if plans were only evaluated (`--judge`).
    pub tuning: Option<Tuning>,
}

/// Returns by how much the time `seconds` exceeds the time `best`, in per cent of `best`.
fn loss(seconds: f64, best: f64) -> f64 {
    (seconds / best - 1.0) * 100.0
}

/// Returns the name of the part of the library that chose the plans, for the report: the tuning if `tuned` is true, and the model if it is
/// false.
fn chooser(tuned: bool) -> &'static str {
    if tuned { "tuning" } else { "model" }
}

/// Returns a description of the result at one point (case and size) in one line, which is printed as progress.
pub fn line(point: &TunedPoint, tuned: bool) -> String {
    let (engine, seconds) = point.choice();
    let grid = match (point.exhaustive(), point.grid_evaluations()) {
        (Some(best), Some(scores)) => format!("; exhaustive search {} after {scores} evaluations", time(best)),
        _ => String::new(),
    };
    let scores = point.short_evaluations();
    format!("{} {}, tuned {} ({}) after {scores} evaluations{grid}", chooser(tuned), time(point.chosen), time(seconds), engine.name())
}

fn way(point: &TunedPoint) -> String {
    let first = &point.batch[0];
    match point.batch.len() {
        1 => format!("{}>{}", first.src_device, first.dst_device),
        2 => format!("{}<>{}", first.src_device, first.dst_device),
        many => format!("{many} transfers"),
    }
}

fn heading(report: &MachineReport) -> String {
    let how = match report.origin {
        Origin::Simulator => "simulated: all times are modelled",
        Origin::Host => "host backend: CPU threads move the bytes of virtual GPUs; these times do not describe GPUs",
        Origin::Cuda => "executed; medians",
    };
    format!("{}, {how}\n\n", report.machine)
}

/// Returns the results of tuning for one machine as a table.
pub fn tuned(report: &MachineReport) -> String {
    let exhaustive = report.points.iter().any(|point| point.exhaustive().is_some());
    let mut rows =
        vec![["case", "", "size", "model's choice", "tuned choice", "gain", "evaluations", "setting"].map(str::to_owned).to_vec()];
    if exhaustive {
        rows[0].splice(7..7, ["short loss", "grid evaluations"].map(str::to_owned));
    }
    for point in &report.points {
        let (engine, seconds) = point.choice();
        let mut row = vec![
            point.case.name().to_owned(),
            way(point),
            size(point.size),
            time(point.chosen),
            time(seconds),
            format!("{:.1} %", loss(point.chosen, seconds)),
            point.short_evaluations().to_string(),
            setting(point, engine, report.in_force.is_some()),
        ];
        if exhaustive {
            let lost = point.exhaustive().map_or(String::new(), |best| format!("{:.1} %", loss(point.short(), best)));
            row.splice(7..7, [lost, point.grid_evaluations().map_or(String::new(), |scores| scores.to_string())]);
        }
        rows.push(row);
    }
    let mut text = heading(report) + &table(&rows);
    text.push('\n');
    for tuned in report.tuning.iter().flat_map(|tuning| &tuning.classes) {
        for (engine, of) in [("streams", &tuned.stream), ("graphs", &tuned.graph)] {
            if let Some(bytes) = of.min_bytes {
                let class = &tuned.class;
                text += &format!(
                    "{} to {}, {}: with {engine}, several paths are faster from {} on\n",
                    class.from.name(),
                    class.to.name(),
                    class.pattern.name(),
                    size(bytes)
                );
            }
        }
    }
    text
}

fn setting(point: &TunedPoint, engine: Engine, tuned: bool) -> String {
    let result = match engine {
        Engine::Stream => &point.stream,
        Engine::Graph => &point.graph,
        _ => return format!("the {}'s", chooser(tuned)),
    };
    format!("{}: {}", engine.name(), words(&result.best().setting))
}

fn words(setting: &Setting) -> String {
    let Setting { max_paths, host_path, chunk_bytes, host_share, relay_share } = *setting;
    let mut words = Vec::new();
    words.extend(max_paths.map(|paths| format!("{paths} path{}", if paths == 1 { "" } else { "s" })));
    words.extend(host_path.map(|on| String::from(if on { "with host" } else { "no host" })));
    words.extend(chunk_bytes.map(|bytes| format!("chunks of {}", size(bytes))));
    words.extend(host_share.map(|share| format!("host x {:.2}", f64::from(share) / 1000.0)));
    words.extend(relay_share.map(|share| format!("relays x {:.2}", f64::from(share) / 1000.0)));
    if words.is_empty() { "the model's paths, shares and chunks".into() } else { words.join(", ") }
}

/// Comparison of the chosen plans with the best plans found, over all machines, cases and sizes.
pub struct Judged {
    /// True if a tuning file determined the plans, false if the performance model did.
    pub tuned: bool,
    /// Number of points (combinations of case and size) that were evaluated.
    pub cases: usize,
    /// Number of points (case and size) at which the chosen plan takes at most 3 % longer than the best plan.
    pub within: usize,
    /// Largest amount by which a chosen plan is slower than the best plan, in per cent of the best plan's time.
    pub worst: f64,
    /// Largest amount by which a plan from the short search is slower than the best plan, in per cent of the best plan's time.
    pub short_worst: f64,
    /// Mean number of plans that the short search measures at each point (case and size).
    pub short_scores: f64,
    /// Mean number of plans that the grid search measures at each point (case and size).
    pub grid_scores: f64,
}

/// Goal for the evaluated plans: the time of a plan exceeds the best plan's time by at most this many per cent. Nine of ten points (case
/// and size) should reach the goal.
const GOAL: f64 = 3.0;

impl Judged {
    pub fn of(reports: &[MachineReport]) -> Judged {
        let points: Vec<&TunedPoint> = reports.iter().flat_map(|report| &report.points).collect();
        let losses = |of: fn(&TunedPoint) -> f64| points.iter().filter_map(move |point| Some(loss(of(point), point.exhaustive()?)));
        let worst = |of: fn(&TunedPoint) -> f64| losses(of).fold(0.0, f64::max);
        let mean = |of: fn(&TunedPoint) -> usize| points.iter().map(|point| of(point)).sum::<usize>() as f64 / points.len().max(1) as f64;
        Judged {
            tuned: reports.iter().any(|report| report.in_force.is_some()),
            cases: points.len(),
            within: losses(|point| point.chosen).filter(|lost| *lost <= GOAL).count(),
            worst: worst(|point| point.chosen),
            short_worst: worst(TunedPoint::short),
            short_scores: mean(TunedPoint::short_evaluations),
            grid_scores: mean(|point| point.grid_evaluations().unwrap_or(0)),
        }
    }

    pub fn to_json(&self) -> Value {
        json!({
            "cases": self.cases,
            "within_3_percent": self.within,
            "worst_choice_loss_percent": self.worst,
            "worst_model_loss_percent": (!self.tuned).then_some(self.worst),
            "worst_short_loss_percent": self.short_worst,
            "mean_short_evaluations": self.short_scores,
            "mean_exhaustive_evaluations": self.grid_scores,
        })
    }
}

/// Returns the comparison of chosen plans with the best plans as a table.
pub fn judgement(reports: &[MachineReport], judged: &Judged) -> String {
    let chooser = chooser(judged.tuned);
    let loses = format!("{chooser} loss");
    let head = ["machine", "case", "", "size", chooser, "short", "best", &loses, "short loss", "evaluations", "best setting"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for report in reports {
        for point in &report.points {
            let Some(best) = point.exhaustive() else { continue };
            rows.push(vec![
                report.machine.clone(),
                point.case.name().to_owned(),
                way(point),
                size(point.size),
                time(point.chosen),
                time(point.short()),
                time(best),
                format!("{:.1} %", loss(point.chosen, best)),
                format!("{:.1} %", loss(point.short(), best)),
                format!("{}/{}", point.short_evaluations(), point.grid_evaluations().unwrap_or(0)),
                setting(point, point.choice().0, judged.tuned),
            ]);
        }
    }
    let simulated = reports.iter().any(|report| report.origin == Origin::Simulator);
    format!(
        "Times of the plan that the {chooser} chooses, of the best plan that the short search finds{}, and of the best plan of the whole \
         grid{}.\n\n{}\n\
         The {chooser}'s choice is within {GOAL} % of the best in {} of {} cases, and loses {:.1} % at most.\n\
         The short search loses {:.1} % at most, with {:.0} evaluations on average; the grid takes {:.0}.\n",
        if judged.tuned { " from the plan of the model, if that is better" } else { " from it" },
        if simulated { "; simulated: all times are modelled" } else { "" },
        table(&rows),
        judged.within,
        judged.cases,
        judged.worst,
        judged.short_worst,
        judged.short_scores,
        judged.grid_scores,
    )
}

impl MachineReport {
    pub fn to_json(&self) -> Value {
        json!({
            "topology": self.machine,
            "digest": self.digest,
            "origin": self.origin.name(),
            "judged_tuning": self.in_force.as_ref().map(Tuning::summary),
            "points": self.points.iter().map(|point| point_json(point, self.in_force.is_some())).collect::<Vec<Value>>(),
        })
    }
}

fn point_json(point: &TunedPoint, tuned: bool) -> Value {
    let lost = point.exhaustive().map(|best| loss(point.chosen, best));
    let (engine, seconds) = point.choice();
    json!({
        "case": point.case.name(),
        "transfers": point.batch.len(),
        "src_device": point.batch[0].src_device.0,
        "dst_device": point.batch[0].dst_device.0,
        "bytes": point.size,
        "choice_seconds": point.chosen,
        "model_seconds": (!tuned).then_some(point.chosen),
        "tuned_engine": engine.name(),
        "tuned_seconds": seconds,
        "gain_percent": loss(point.chosen, seconds),
        "short_seconds": point.short(),
        "evaluations": point.short_evaluations(),
        "exhaustive_seconds": point.exhaustive(),
        "exhaustive_evaluations": point.grid_evaluations(),
        "choice_loss_percent": lost,
        "model_loss_percent": lost.filter(|_| !tuned),
        "short_loss_percent": point.exhaustive().map(|best| loss(point.short(), best)),
        "stream": engine_json(&point.stream),
        "graph": engine_json(&point.graph),
    })
}

fn engine_json(result: &EngineResult) -> Value {
    let best = result.best();
    let Setting { max_paths, host_path, chunk_bytes, host_share, relay_share } = best.setting;
    let factor = |share: Option<u16>| share.map(|share| f64::from(share) / 1000.0);
    json!({
        "model_seconds": result.short.start.seconds,
        "seconds": best.seconds,
        "paths": best.paths(),
        "setting": {
            "max_paths": max_paths,
            "host_path": host_path,
            "chunk_bytes": chunk_bytes,
            "host_share": factor(host_share),
            "relay_share": factor(relay_share),
        },
    })
}
