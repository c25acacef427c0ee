// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP

#include <array>
#include <cstdint>
#include <vector>

/// Tetrahedral mesh of the unit cube with a hole in the middle. The unknowns are the values at the vertices that are
/// not on the surface of the cube. These vertices are perturbed and numbered first, in random order. The vertices on
/// the surface of the cube are numbered last.
struct mesh {
    std::vector<std::array<double, 3>> vertices;
    std::vector<std::array<std::int32_t, 4>> elements; ///< vertices of each tetrahedron
    /// Number of unknowns, which are the values at the vertices 0 to `unknowns - 1`. All other vertices are on the
    /// surface of the cube, where the solution is 0.
    std::int32_t unknowns = 0;
};

/// Returns the mesh of a cube with `cells` cells along an edge. The mesh is the same on all ranks.
mesh make_mesh(std::int32_t cells);

/// Returns the rank that owns each unknown, by recursive coordinate bisection: divides the unknowns into two parts
/// along the longest side of their bounding box, and each part again, until there is one part per rank.
std::vector<int> divide(const mesh &m, int ranks);

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_MESH_HPP
