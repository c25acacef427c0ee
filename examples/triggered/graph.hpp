// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
#define MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP

#include "work.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Directed graph, stored by incoming edges.
struct graph {
    std::vector<std::uint64_t> offsets; ///< index of each vertex's first edge in `sources`; one more than vertices
    std::vector<std::uint32_t> sources;
    std::vector<std::uint32_t> outgoing; ///< number of edges from each vertex
    [[nodiscard]] std::size_t vertices() const { return outgoing.size(); }
};

/// Generates an R-MAT graph (Chakrabarti, Zhan and Faloutsos, SDM 2004) of 2^scale vertices with `degree` edges per
/// vertex. The vertices are then numbered at random, so that equal parts have about equally many edges. The graph
/// depends only on the arguments.
graph generate(unsigned scale, unsigned degree, std::uint64_t seed);

/// Reads a graph from a file in Matrix Market's coordinate format. An entry of row i and column j is an edge from j to
/// i, and its value is ignored. Throws `std::invalid_argument` with the wrong line.
graph read_matrix(const std::string &path);

/// Returns the graph with all edges reversed.
graph transposed(const graph &g);

/// Returns the distances from `root` along `edge_length`. `sweeps` receives the number of sweeps up to and including
/// the first without a change. Like the kernels, each sweep reads the result of the previous one.
std::vector<std::uint32_t> distances(const graph &g, std::uint32_t root, int &sweeps);

/// Returns the PageRank divided by the number of outgoing edges after `steps` steps, with the kernels' summation order:
/// bitwise equal.
std::vector<float> ranks(const graph &g, float damping, int steps);

/// Returns the factors after `steps` steps of alternating least squares over a graph and its transpose: the result of
/// the last step and its input. The arithmetic is that of the kernels.
std::array<std::vector<latent>, 2> factors(const graph &g, const graph &back, int steps);

#endif // MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
