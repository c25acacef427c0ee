//! Implements `mpgpu sim --adapt`, which simulates plans that choose among their variants by measured times. Time is virtual.

use super::SimArguments;
use super::arguments::Factor;
use crate::arguments::{Failure, write_file};
use crate::draw;
use crate::text::columns;
use mpgpu_core::adapt::{Conditions, Game, Player, Tenant, World, variant_name, variants};
use mpgpu_core::model::timeline::{Span, Timeline, TimelineLane};
use mpgpu_core::plan::{Shape, plan};
use mpgpu_core::topology::{DeviceId, Machine, ResourceId};
use serde_json::{Value, json};
use std::rc::Rc;

/// Maximum number of simulated plans that choose among their variants ("players"). The simulator runs every combination of their choices
/// that occurs, so a simulation of more plans would take too long.
const MOST_PLAYERS: usize = 16;

/// Number of consecutive executions over which the lost time is averaged. The worst loss that is reported is the largest such average.
const STRETCH: u64 = 500;

pub fn run(arguments: &SimArguments, model: &Machine, shapes: &[Shape]) -> Result<String, Failure> {
    let conditions = Conditions {
        executions: u64::from(arguments.adapt.executions),
        noise: arguments.adapt.noise,
        late: u64::from(arguments.adapt.ahead),
        seed: arguments.adapt.seed,
        ..Conditions::default()
    };
    let players = players(arguments, model, shapes)?;
    let play = World::new(real(arguments, model)?, players.clone(), tenants(arguments, model)?).play(&conditions)?;
    let run = Played { arguments, model, players, play };
    if let Some(file) = &arguments.adapt.svg {
        write_file(
            file,
            &draw::gantt(&run.timeline(), |span| Some(span.name.clone()), &draw::Chart { notes: &run.notes(), arrows: true, plain: None }),
        )?;
    }
    Ok(if arguments.json { format!("{:#}\n", run.to_json()) } else { run.to_text() })
}

fn players(arguments: &SimArguments, model: &Machine, shapes: &[Shape]) -> Result<Vec<Player>, Failure> {
    let &[window] = arguments.window.as_slice() else {
        return Err(format!("--window has {} values, but --adapt accepts only one", arguments.window.len()).into());
    };
    let processes: Vec<&[Shape]> = shapes.chunks(if arguments.apart { 1 } else { shapes.len() }).collect();
    let count = processes.len() * window as usize;
    if count > MOST_PLAYERS {
        return Err(format!(
            "the options require {count} plans that choose variants, but at most {MOST_PLAYERS} can be simulated; give fewer transfers or \
             a smaller --window"
        )
        .into());
    }
    let options = arguments.staged.options();
    let mut players = Vec::with_capacity(count);
    for (process, shapes) in processes.into_iter().enumerate() {
        let all = plan(model, shapes, &options)?;
        let variants: Rc<[_]> = variants(all, &options, |options| plan(model, shapes, options))?.into();
        players.extend((0..window).map(|_| Player { process, shapes: shapes.to_vec(), variants: variants.clone() }));
    }
    Ok(players)
}

fn resources(model: &Machine, of: &Factor) -> Result<Vec<ResourceId>, Failure> {
    let found = model.resources_named(&of.name);
    if found.is_empty() {
        let topology = &model.topology().name;
        let advice = "give nvlink, pcie, host, or a name that `mpgpu sim --resources` lists";
        return Err(format!("{}: no resource of {topology} has this name; {advice}", of.name).into());
    }
    Ok(found)
}

fn real(arguments: &SimArguments, model: &Machine) -> Result<Machine, Failure> {
    let mut machine = model.clone();
    for of in &arguments.adapt.real {
        let scaled = resources(model, of)?;
        machine = machine.scaled(|resource| if scaled.contains(&resource) { of.factor } else { 1.0 });
    }
    Ok(machine)
}

fn tenants(arguments: &SimArguments, model: &Machine) -> Result<Vec<Tenant>, Failure> {
    let tenant = |visit: &super::arguments::Visit| {
        let resources = resources(model, &visit.leaves)?;
        Ok(Tenant { resources, leaves: visit.leaves.factor, during: visit.during.clone() })
    };
    arguments.adapt.tenant.iter().map(tenant).collect()
}

struct Played<'a> {
    arguments: &'a SimArguments,
    model: &'a Machine,
    players: Vec<Player>,
    play: Game,
}

impl Played<'_> {
    /// Returns the name of a variant of the plan with index `player`.
    fn variant(&self, player: usize, variant: usize) -> &'static str {
        variant_name(variant, self.players[player].variants.len())
    }

    fn transfers(&self, player: usize) -> String {
        let ways = self.players[player].shapes.iter().map(|shape| format!("{}>{}", shape.src_device, shape.dst_device));
        ways.collect::<Vec<_>>().join(" ")
    }

    fn notes(&self) -> Vec<String> {
        let (end, (worst, from)) = (self.play.end(), self.play.worst(STRETCH));
        let mut real: Vec<String> = self.arguments.adapt.real.iter().map(|of| format!("{} × {}", of.name, of.factor)).collect();
        real.extend(self.arguments.adapt.tenant.iter().map(|visit| {
            let std::ops::Range { start, end } = visit.during;
            format!("{} × {} from execution {start} to {end}", visit.leaves.name, visit.leaves.factor)
        }));
        let machine = if real.is_empty() { "as modelled".to_owned() } else { real.join(", ") };
        let times = |what: f64| what / end.plain;
        let last = self.play.moments.len() as u64 - 1;
        let mut lost = format!("time lost relative to the best choice of variants: {:.2} % in total", 100.0 * self.play.lost(0, last));
        if last >= STRETCH {
            lost += &format!(", at most {:.2} % over any {STRETCH} executions (those from {from} on)", 100.0 * worst);
        }
        vec![
            format!("simulated machine: {machine}; noise {} %", 100.0 * self.arguments.adapt.noise),
            lost,
            format!(
                "speed-up over plain copies: chosen variants {:.3}, best variants {:.3}, the model's variants {:.3}",
                times(end.did),
                times(end.best),
                times(end.model)
            ),
        ]
    }

    fn title(&self) -> String {
        let players = match self.players.len() {
            1 => "one plan chooses its variant".to_owned(),
            more => format!("{more} plans choose their variants independently"),
        };
        format!(
            "{}: {players}; {} executions, seed {}",
            self.model.topology().name,
            self.arguments.adapt.executions,
            self.arguments.adapt.seed
        )
    }

    fn to_text(&self) -> String {
        let heads = ["plan", "all paths", "half the staged bytes", "plain copies", "tries", "switches"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for (player, played) in self.play.players.iter().enumerate() {
            let all: u64 = played.executed.iter().sum();
            let mut row = vec![self.transfers(player)];
            row.extend(heads[1..4].iter().map(|name| {
                let of = (0..played.executed.len()).find(|&variant| self.variant(player, variant) == *name);
                of.map_or("-".into(), |variant| format!("{:.1} %", 100.0 * played.executed[variant] as f64 / all as f64))
            }));
            row.extend([played.tries.to_string(), (played.in_force.len() - 1).to_string()]);
            rows.push(row);
        }
        let mut text = format!("sim --adapt for {}\nmodelled; {}\n\n", self.title(), self.notes()[0]);
        text.extend(columns(&rows, 1).map(|line| line + "\n"));
        text + "\n" + &self.notes()[1..].join("\n") + "\n"
    }

    fn to_json(&self) -> Value {
        let (end, (worst, from)) = (self.play.end(), self.play.worst(STRETCH));
        let players = self.play.players.iter().enumerate().map(|(player, played)| {
            let name = |variant: usize| self.variant(player, variant);
            let executions = played.executed.iter().enumerate().map(|(variant, count)| (name(variant).to_owned(), json!(count)));
            let in_force = played.in_force.iter().map(|&(seconds, _, variant)| json!({ "from": seconds, "variant": name(variant) }));
            json!({
                "transfers": self.transfers(player),
                "executions": executions.collect::<serde_json::Map<_, _>>(),
                "tries": played.tries,
                "switches": played.in_force.len() - 1,
                "in_force": in_force.collect::<Vec<_>>(),
            })
        });
        json!({
            "topology": self.model.topology().name,
            "modelled": true,
            "seed": self.arguments.adapt.seed,
            "seconds": end.time,
            "lost": end.best / end.did - 1.0,
            "worst": { "executions": STRETCH, "from": from, "lost": worst },
            "times_plain": { "chosen": end.did / end.plain, "best": end.best / end.plain, "model": end.model / end.plain },
            "players": players.collect::<Vec<_>>(),
        })
    }

    /// Returns a timeline for the drawing: for each plan, the active variant over time, and the trials of other variants.
    fn timeline(&self) -> Timeline {
        let mut timeline = Timeline { name: self.title(), modelled: true, ..Timeline::default() };
        let end = self.play.end().time;
        let mut lane = |name: String, device: DeviceId, spans: &mut dyn Iterator<Item = (f64, f64, String)>| {
            let lane = timeline.lanes.len();
            timeline.lanes.push(TimelineLane { name, device });
            timeline.spans.extend(spans.map(|(begin, end, name)| Span { lane, op: None, name, begin, end, bytes: 0 }));
        };
        if !self.arguments.adapt.tenant.is_empty() {
            let at = |execution: u64| self.play.moments[(execution as usize).min(self.play.moments.len() - 1)].time;
            let span = |visit: &super::arguments::Visit| {
                (at(visit.during.start), at(visit.during.end), format!("{} × {}", visit.leaves.name, visit.leaves.factor))
            };
            lane("tenants".into(), DeviceId::HOST, &mut self.arguments.adapt.tenant.iter().map(span));
        }
        for (player, played) in self.play.players.iter().enumerate() {
            let device = self.players[player].shapes[0].src_device;
            let ends = played.in_force.iter().skip(1).map(|next| next.0).chain([end]);
            let in_force = played.in_force.iter().zip(ends).map(|(of, end)| (of.0, end, self.variant(player, of.2).to_owned()));
            lane(format!("{} active", self.transfers(player)), device, &mut in_force.into_iter());
            let tries = played.tried.iter().map(|&(at, variant)| (at, at, self.variant(player, variant).to_owned()));
            lane("tries".into(), device, &mut tries.into_iter());
        }
        timeline
    }
}
