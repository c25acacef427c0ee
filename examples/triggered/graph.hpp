// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
#define MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP

#include "work.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Directed graph, which stores the incoming edges of each vertex.
struct graph {
    std::vector<std::uint64_t> offsets; ///< index in `sources` of each vertex's first edge, and the number of edges
    std::vector<std::uint32_t> sources;
    std::vector<std::uint32_t> outgoing; ///< number of edges from each vertex
    [[nodiscard]] std::size_t vertices() const { return outgoing.size(); }
};

/// Generates an R-MAT graph (Chakrabarti, Zhan and Faloutsos, SDM 2004) of 2^scale vertices with `degree` edges per
/// vertex. The vertices are then renumbered at random, so that equal numbers of vertices have about equally many edges.
/// Equal arguments give equal graphs.
graph generate(unsigned scale, unsigned degree, std::uint64_t seed);

/// Reads a graph from a file in Matrix Market's coordinate format. An entry of row i and column j is an edge from j to
/// i, and its value is ignored. Throws `std::invalid_argument` with the wrong line.
graph read_matrix(const std::string &path);

/// Returns the graph with all edges reversed.
graph transposed(const graph &g);

/// Computes the distance of each vertex from `root`; the length of an edge is `edge_length`. `sweeps` receives the
/// number of sweeps, including the last, which changes nothing. Each sweep reads only the result of the previous one,
/// as the kernels do.
std::vector<std::uint32_t> distances(const graph &g, std::uint32_t root, int &sweeps);

/// Computes PageRank for `steps` time steps. Returns the rank of each vertex divided by its number of outgoing edges.
/// Sums are added in the same order as in the kernels, so results are bitwise equal.
std::vector<float> ranks(const graph &g, float damping, int steps);

/// Computes alternating least squares for `steps` time steps, over a graph and its transpose. Returns the result of the
/// last time step and its input. The arithmetic is the same as in the kernels.
std::array<std::vector<latent>, 2> factors(const graph &g, const graph &back, int steps);

#endif // MPGPU_EXAMPLES_TRIGGERED_GRAPH_HPP
