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

/// Cuboid part of the domain, with one layer of ghost cells on each side. It is a kernel argument, so it has no
/// std::array, which device code cannot index.
struct block {
    std::int64_t domain[3]; ///< number of cells of the whole domain
    std::int64_t first[3];  ///< position of the block's first cell in the whole domain
    std::int64_t cells[3];  ///< number of cells of the block
};

/// Number of faces of a block. Faces are numbered in the order lower x, upper x, lower y, upper y, lower z, upper z.
constexpr int faces = 6;
/// Returns the number of the face of the neighbour block that touches this face.
JACOBI3D_BOTH constexpr int opposite(int face) {
    return face ^ 1;
}

/// Returns the number of elements of the block's arrays, including ghost cells.
JACOBI3D_BOTH inline std::int64_t element_count(const block &b) {
    return (b.cells[0] + 2) * (b.cells[1] + 2) * (b.cells[2] + 2);
}

/// Returns the index of a cell's element in the arrays of a block. Coordinates are relative to the first computed cell;
/// -1 and `cells[d]` are ghost cells.
JACOBI3D_BOTH inline std::int64_t element_of(const block &b, std::int64_t x, std::int64_t y, std::int64_t z) {
    return x + 1 + (b.cells[0] + 2) * (y + 1 + (b.cells[1] + 2) * (z + 1));
}

/// Returns the number of cells in a face.
JACOBI3D_BOTH inline std::int64_t face_cells(const block &b, int face) {
    const int d = face / 2;
    return b.cells[d == 0 ? 1 : 0] * b.cells[d == 2 ? 1 : 2];
}

/// Returns the index of the element of cell `i` of a face. The cell is in the outermost computed layer, or in the layer
/// of ghost cells outside it.
JACOBI3D_BOTH inline std::int64_t face_element(const block &b, int face, std::int64_t i, bool ghost) {
    const int d = face / 2;
    const std::int64_t across = face % 2 == 0 ? (ghost ? -1 : 0) : (ghost ? b.cells[d] : b.cells[d] - 1);
    const std::int64_t width = b.cells[d == 0 ? 1 : 0];
    const std::int64_t u = i % width;
    const std::int64_t v = i / width;
    return d == 0 ? element_of(b, across, u, v) : d == 1 ? element_of(b, u, across, v) : element_of(b, u, v, across);
}

/// True if a face is inside the domain, so that a neighbour block touches it.
JACOBI3D_BOTH inline bool is_inside(const block &b, int face) {
    const int d = face / 2;
    return face % 2 == 0 ? b.first[d] > 0 : b.first[d] + b.cells[d] < b.domain[d];
}

/// Value of ghost cells that have never been received. It occurs nowhere else in the domain.
constexpr double never_received = -1.0e300;

/// Returns the initial value of an element. All cells, including the fixed cells around the domain, have pseudo-random
/// values from 0 to 1, so that data in the wrong place is detected. The values are multiples of 2^-53, and therefore
/// exactly equal on every device.
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
    // Finalizer of splitmix64.
    key = (key + 1) * 0x9E3779B97F4A7C15U;
    key = (key ^ (key >> 30U)) * 0xBF58476D1CE4E5B9U;
    key = (key ^ (key >> 27U)) * 0x94D049BB133111EBU;
    key ^= key >> 31U;
    return static_cast<double>(key >> 11U) * (1.0 / 9007199254740992.0);
}

/// Returns the new value of a cell from those of its neighbours. The operands are always added in the same order, and
/// no product is added to another value. So the result is bitwise equal on all devices and for every division of the
/// domain.
JACOBI3D_BOTH inline double relaxed(double x_lower, double x_upper, double y_lower, double y_upper, double z_lower,
                                    double z_upper) {
    return (((x_lower + x_upper) + (y_lower + y_upper)) + (z_lower + z_upper)) * (1.0 / 6.0);
}

/// Division of a domain into blocks, and of the blocks among ranks. Each rank has the same number of consecutive
/// blocks.
struct division {
    std::array<std::int64_t, 3> domain;
    std::array<int, 3> blocks; ///< number of blocks in each dimension

    [[nodiscard]] int count() const { return blocks[0] * blocks[1] * blocks[2]; }
    /// Returns the block with this number. Consecutive numbers are adjacent along x.
    [[nodiscard]] block at(int number) const;
    /// Returns the number of the neighbour block at a face. The face must be inside the domain.
    [[nodiscard]] int neighbour(int number, int face) const;
};

/// Divides a domain into `blocks` blocks so that the total surface is smallest and each block has at least one cell.
/// Throws `std::invalid_argument` if that is impossible.
division divide(const std::array<std::int64_t, 3> &domain, int blocks);

/// Returns the size of the domain for `ranks` ranks under weak scaling. The dimensions are multiplied, x first, by the
/// prime factors of `ranks` one after the other.
std::array<std::int64_t, 3> scaled(std::array<std::int64_t, 3> domain, int ranks);

#endif // MPGPU_EXAMPLES_JACOBI3D_DOMAIN_HPP
