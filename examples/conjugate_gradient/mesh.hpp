// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP

#include <array>
#include <cstdint>
#include <vector>

/// Tetrahedral mesh of the unit cube with a hole in the middle. The vertices are perturbed, and numbered in random
/// order.
struct mesh {
    std::vector<std::array<double, 3>> vertices;
    std::vector<std::array<std::int32_t, 4>> elements; ///< vertices of each tetrahedron
    /// Number of unknowns. The unknowns are the values at the vertices 0 to `unknowns - 1`. All other vertices are on
    /// the surface of the cube, where the solution is 0.
    std::int32_t unknowns = 0;
};

/// Returns the mesh of a cube with `cells` cells along an edge. Equal on all ranks.
mesh make_mesh(std::int32_t cells);

/// Returns the rank that owns each unknown. Recursive coordinate bisection: divides the vertices along the longest side
/// of their bounding box into two parts, and each part again, until there is one part per rank.
std::vector<int> divide(const mesh &m, int ranks);

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP
