// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_MESH_HPP
#define MPGPU_EXAMPLES_HALO3D_MESH_HPP

#include <cstdint>

#ifdef __CUDACC__
#define HALO3D_BOTH __host__ __device__
#else
#define HALO3D_BOTH
#endif

/// Part of the mesh that one rank computes: sizes and position in each dimension. It is a kernel argument, so it has no
/// std::array, which device code cannot index.
struct mesh {
    std::int64_t cells[3]; ///< number of cells of the whole mesh
    std::int64_t first[3]; ///< position of the rank's first computed cell in the whole mesh
    std::int64_t own[3];   ///< number of cells that the rank computes
    std::int64_t ghost[3]; ///< number of ghost cells at each end
    bool periodic[3];
};

/// Value of all ghost cells before an exchange. Ghost cells outside a mesh that is not periodic keep it.
constexpr double untouched = -1.0;

/// Cell of the mesh to which an element of a rank's arrays belongs.
struct cell {
    std::int64_t at[3]; ///< position in the whole mesh; beyond a periodic boundary, that of the cell at the other end
    bool computed;      ///< true if this rank computes the cell, false for a ghost cell
    bool exists;        ///< true if the cell is in the mesh
};

HALO3D_BOTH inline std::int64_t element_count(const mesh &m) {
    std::int64_t count = 1;
    for (int d = 0; d < 3; ++d) {
        count *= m.own[d] + 2 * m.ghost[d];
    }
    return count;
}

HALO3D_BOTH inline cell cell_of(const mesh &m, std::int64_t element) {
    cell found{{0, 0, 0}, true, true};
    for (int d = 0; d < 3; ++d) {
        const std::int64_t extent = m.own[d] + 2 * m.ghost[d];
        const std::int64_t i = element % extent;
        element /= extent;
        const std::int64_t at = m.first[d] + i - m.ghost[d];
        found.computed = found.computed && i >= m.ghost[d] && i < m.ghost[d] + m.own[d];
        found.exists = found.exists && (m.periodic[d] || (at >= 0 && at < m.cells[d]));
        found.at[d] = (at + m.cells[d]) % m.cells[d];
    }
    return found;
}

/// Returns the value of a cell in a cycle. Values are whole numbers below 2^53, which are exact in double precision, so
/// that different cells have different values.
HALO3D_BOTH inline double value_of(const mesh &m, const cell &c, int variable, int cycle) {
    const std::int64_t index = c.at[0] + m.cells[0] * (c.at[1] + m.cells[1] * c.at[2]);
    return static_cast<double>(index * 4096 + std::int64_t{cycle % 512} * 8 + variable % 8);
}

/// Returns the value to which an element is set before an exchange.
HALO3D_BOTH inline double value_before(const mesh &m, std::int64_t element, int variable, int cycle) {
    const cell c = cell_of(m, element);
    return c.computed ? value_of(m, c, variable, cycle) : untouched;
}

/// Returns the value that an element must have after an exchange.
HALO3D_BOTH inline double value_after(const mesh &m, std::int64_t element, int variable, int cycle) {
    const cell c = cell_of(m, element);
    return c.exists ? value_of(m, c, variable, cycle) : untouched;
}

#endif // MPGPU_EXAMPLES_HALO3D_MESH_HPP
