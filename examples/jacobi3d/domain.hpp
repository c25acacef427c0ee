// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_DOMAIN_HPP
#define MPGPU_EXAMPLES_JACOBI3D_DOMAIN_HPP

#include <array>
#include <cstdint>

#ifdef __CUDACC__
#define JACOBI3D_BOTH __host__ __device__
#else
#define JACOBI3D_BOTH
#endif

/// A cuboid of the domain, with one ghost cell at either end of each dimension. A plain value that a kernel takes: no
/// std::array, which device code may not index.
struct block {
    std::int64_t domain[3]; ///< cells of the whole domain
    std::int64_t first[3];  ///< of the domain's cells, the first that is computed here
    std::int64_t cells[3];  ///< computed here
};

/// Faces are numbered: lower x, upper x, lower y, upper y, lower z, upper z.
constexpr int faces = 6;
/// The face of the neighbour that a face lies against.
JACOBI3D_BOTH constexpr int opposite(int face) {
    return face ^ 1;
}

/// Elements of the block's arrays, ghost cells included.
JACOBI3D_BOTH inline std::int64_t element_count(const block &b) {
    return (b.cells[0] + 2) * (b.cells[1] + 2) * (b.cells[2] + 2);
}

/// The element of a cell, counted from the block's first computed one: -1 and `cells[d]` are ghost cells.
JACOBI3D_BOTH inline std::int64_t element_of(const block &b, std::int64_t x, std::int64_t y, std::int64_t z) {
    return x + 1 + (b.cells[0] + 2) * (y + 1 + (b.cells[1] + 2) * (z + 1));
}

/// Cells of a face.
JACOBI3D_BOTH inline std::int64_t face_cells(const block &b, int face) {
    const int d = face / 2;
    return b.cells[d == 0 ? 1 : 0] * b.cells[d == 2 ? 1 : 2];
}

/// The element of a face's cell `i`: of the outermost computed layer, or of the layer of ghost cells outside it.
JACOBI3D_BOTH inline std::int64_t face_element(const block &b, int face, std::int64_t i, bool ghost) {
    const int d = face / 2;
    const std::int64_t across = face % 2 == 0 ? (ghost ? -1 : 0) : (ghost ? b.cells[d] : b.cells[d] - 1);
    const std::int64_t width = b.cells[d == 0 ? 1 : 0];
    const std::int64_t u = i % width;
    const std::int64_t v = i / width;
    return d == 0 ? element_of(b, across, u, v) : d == 1 ? element_of(b, u, across, v) : element_of(b, u, v, across);
}

/// Whether a face lies inside the domain, so that there is a neighbour.
JACOBI3D_BOTH inline bool is_inside(const block &b, int face) {
    const int d = face / 2;
    return face % 2 == 0 ? b.first[d] > 0 : b.first[d] + b.cells[d] < b.domain[d];
}

/// In the ghost cells towards a neighbour before the first exchange: no value of the domain.
constexpr double never_received = -1.0e300;

/// The value of an element before the first iteration. Cells of the domain, and the fixed ones around it, have values
/// from 0 to 1 that look random, so that a cell in the wrong place is seen; they are multiples of 2^-53, the same on
/// every device.
JACOBI3D_BOTH inline double initial_value(const block &b, std::int64_t element) {
    std::int64_t rest = element;
    std::uint64_t key = 0;
    std::uint64_t stride = 1;
    for (int d = 0; d < 3; ++d) {
        const std::int64_t extent = b.cells[d] + 2;
        const std::int64_t i = rest % extent - 1;
        rest /= extent;
        if ((i < 0 && is_inside(b, 2 * d)) || (i == b.cells[d] && is_inside(b, 2 * d + 1))) {
            return never_received;
        }
        key += stride * static_cast<std::uint64_t>(b.first[d] + i + 1);
        stride *= static_cast<std::uint64_t>(b.domain[d] + 2);
    }
    // The finaliser of splitmix64.
    key = (key + 1) * 0x9E3779B97F4A7C15U;
    key = (key ^ (key >> 30U)) * 0xBF58476D1CE4E5B9U;
    key = (key ^ (key >> 27U)) * 0x94D049BB133111EBU;
    key ^= key >> 31U;
    return static_cast<double>(key >> 11U) * (1.0 / 9007199254740992.0);
}

/// The new value of a cell. The same operands are added in the same order everywhere, and no product is added to
/// anything, so that the result does not depend on the device or on how the domain is divided, bit by bit.
JACOBI3D_BOTH inline double relaxed(double x_lower, double x_upper, double y_lower, double y_upper, double z_lower,
                                    double z_upper) {
    return (((x_lower + x_upper) + (y_lower + y_upper)) + (z_lower + z_upper)) * (1.0 / 6.0);
}

/// How a domain is divided into blocks, and the blocks among ranks: each rank has as many, with consecutive numbers.
struct division {
    std::array<std::int64_t, 3> domain;
    std::array<int, 3> blocks; ///< in each dimension

    [[nodiscard]] int count() const { return blocks[0] * blocks[1] * blocks[2]; }
    /// The block of a number; numbers go through x first.
    [[nodiscard]] block at(int number) const;
    /// The number of the block beyond a face that lies inside the domain.
    [[nodiscard]] int neighbour(int number, int face) const;
};

/// Divides a domain into so many blocks, with the smallest surface among the ways in which each has a cell. Throws
/// `std::invalid_argument` where there is none.
division divide(const std::array<std::int64_t, 3> &domain, int blocks);

/// The domain of so many ranks in weak scaling: dimensions are multiplied in turn, x first, by the prime factors of
/// the number of ranks.
std::array<std::int64_t, 3> scaled(std::array<std::int64_t, 3> domain, int ranks);

#endif // MPGPU_EXAMPLES_JACOBI3D_DOMAIN_HPP
