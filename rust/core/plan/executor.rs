//! What issuing costs while it is open who issues.

use super::options::Options;
use crate::program::Engine;
use crate::topology::Costs;

/// Seconds of the issuing thread for one more operation of a plan with staged paths: where the caller leaves that open, they go as a graph.
pub(super) fn issue(options: &Options, costs: &Costs) -> f64 {
    if matches!(options.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
}
