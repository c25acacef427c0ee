// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
#define MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP

#include "work.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// A directed graph by its incoming edges.
struct graph {
    std::vector<std::uint64_t> offsets; ///< of each vertex's first edge in `sources`; one more than vertices
    std::vector<std::uint32_t> sources;
    std::vector<std::uint32_t> outgoing; ///< edges from each vertex
    [[nodiscard]] std::size_t vertices() const { return outgoing.size(); }
};

/// An R-MAT graph (Chakrabarti, Zhan and Faloutsos, SDM 2004) of 2^scale vertices with so many edges for each. The
/// vertices are then numbered at random, so that equal parts have equally many edges. The same seed, the same graph.
graph generate(unsigned scale, unsigned degree, std::uint64_t seed);

/// The graph of a file in Matrix Market's coordinate format: an entry of row i and column j is an edge from j to i, and
/// its value is not looked at. Throws `std::invalid_argument` with the line at fault.
graph read_matrix(const std::string &path);

/// The same edges, each the other way round.
graph transposed(const graph &g);

/// The distances from `root` along `edge_length`, and after how many sweeps nothing changes: the last one of these is
/// the first without a change. As the kernels do it: each sweep reads what the last one left.
std::vector<std::uint32_t> distances(const graph &g, std::uint32_t root, int &sweeps);

/// PageRank over outgoing edges after so many steps, divided as the kernels sum it up: bitwise equal.
std::vector<float> ranks(const graph &g, float damping, int steps);

/// Factors after so many steps of alternating least squares over a graph and the transposed one: what the last step has
/// made, and what it was made of. The same arithmetic as the kernels'.
std::array<std::vector<latent>, 2> factors(const graph &g, const graph &back, int steps);

#endif // MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
