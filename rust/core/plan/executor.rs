//! Cost of issuing the operations of a program on streams or as a graph.

use super::options::Options;
use crate::program::Engine;
use crate::topology::Costs;

/// Returns the time that the issuing thread needs for each further operation of a plan with staged paths, in seconds. If the options allow
/// a graph, it is the time of a graph node.
pub(super) fn issue(options: &Options, costs: &Costs) -> f64 {
    if matches!(options.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
}
