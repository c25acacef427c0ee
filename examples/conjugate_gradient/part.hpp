// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_PART_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_PART_HPP

#include "mesh.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

/// Neighbour of a rank, and the vector entries that are exchanged with it.
struct neighbour {
    int rank;
    std::vector<std::int32_t> send; ///< owned entries that the neighbour needs
    std::int32_t first_ghost;       ///< first entry that receives values of the neighbour
    std::int32_t ghosts;            ///< number of these entries, which are contiguous
};

/// Linear equations of one rank, in local numbers: first the interior vertices, whose rows need no ghost entries, then
/// the other owned vertices, then the ghost vertices of each neighbour.
struct part {
    std::vector<std::int32_t> vertices; ///< number in the mesh of each local vertex
    std::int32_t interior = 0;          ///< number of interior vertices
    std::int32_t owned = 0;             ///< number of owned vertices, including interior ones
    std::vector<neighbour> neighbours;  ///< sorted by rank
    std::vector<std::int32_t> starts;   ///< first entry of each owned row in `columns` and `values` (CSR), and the end
    std::vector<std::int32_t> columns;
    std::vector<double> values;
    std::vector<double> right_side; ///< right-hand side of the owned rows

    [[nodiscard]] std::size_t size() const { return vertices.size(); }
};

/// Returns the equations of the rank `rank` for -div(grad u) + u = 1, with linear finite elements. `owner` contains the
/// rank that owns each unknown. The matrix is symmetric and positive definite.
///
/// The function does not communicate. If an element has vertices of two ranks, each of the two ranks needs the other's
/// vertices. Therefore the send list of one rank contains the same vertices as the ghost entries of the other. Both are
/// sorted by the number in the mesh.
part make_part(const mesh &m, const std::vector<int> &owner, int rank);

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_PART_HPP
