//! Presets: topology files of known machines that are part of the library. No other code depends on these machines.

use super::{Topology, parse};

const PRESETS: &[(&str, &str)] = &[
    ("beluga", include_str!("presets/beluga.toml")),
    ("narval", include_str!("presets/narval.toml")),
    ("dgx1-v100", include_str!("presets/dgx1-v100.toml")),
    ("summit", include_str!("presets/summit.toml")),
    ("gh200-4", include_str!("presets/gh200-4.toml")),
    ("dgx-a100", include_str!("presets/dgx-a100.toml")),
    ("hgx-h100-4", include_str!("presets/hgx-h100-4.toml")),
    ("hgx-h100", include_str!("presets/hgx-h100.toml")),
    ("hgx-h200", include_str!("presets/hgx-h200.toml")),
    ("hgx-b200", include_str!("presets/hgx-b200.toml")),
    ("gb200-nvl72", include_str!("presets/gb200-nvl72.toml")),
    ("pcie-4", include_str!("presets/pcie-4.toml")),
    ("pcie-4-nopeer", include_str!("presets/pcie-4-nopeer.toml")),
];

/// Names of the preset topologies whose rates and costs were not measured. They are published values, scaled by measurements on another
/// machine.
pub const MODELLED_PRESETS: [&str; 2] = ["hgx-b200", "gb200-nvl72"];

/// Returns the names of all presets.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|&(name, _)| name)
}

/// Returns the topology file of the preset with the name `name`, or `None` if there is no such preset. Its comments give the source of
/// every figure. Users can start from this text when they write a file for another machine.
pub fn preset_text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|&&(known, _)| known == name).map(|&(_, text)| text)
}

/// Returns the topology of the preset with the name `name`, or `None` if there is no such preset.
pub fn preset(name: &str) -> Option<Topology> {
    parse(preset_text(name)?).ok()
}
