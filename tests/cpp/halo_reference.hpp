// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_HALO_REFERENCE_HPP
#define MPGPU_TESTS_HALO_REFERENCE_HPP

/// @file
/// Computes the value that every cell of every array must have after a halo exchange. The computation is independent of
/// the arithmetic in halo.hpp: for each cell of an array, it determines the corresponding cell of the whole mesh and
/// the neighbour that owns this cell.

#include <mpgpu/halo.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace halo_reference {

using mpgpu::halo::grid;
using cell = std::array<std::int64_t, 3>;

/// Byte with which ghost cells are filled before an exchange.
constexpr unsigned char untouched = 0xA5;

/// Returns the first cell and the number of cells that belong to position `p` of `ranks` positions in one dimension.
/// The cells are counted position by position.
inline std::pair<std::int64_t, std::int64_t> part(std::int64_t cells, int ranks, int p) {
    std::int64_t first = 0;
    std::int64_t left = cells;
    for (int i = 0;; ++i) {
        const std::int64_t count = (left + (ranks - i) - 1) / (ranks - i); // an equal part of the rest, rounded up
        if (i == p) {
            return {first, count};
        }
        first += count;
        left -= count;
    }
}

/// Returns the position of a rank in the grid of ranks. The x coordinate varies fastest.
inline std::array<int, 3> place(const grid &g, int rank) {
    std::array<int, 3> at{};
    for (int i = 0; i < rank; ++i) {
        for (std::size_t d = 0; d < 3 && ++at.at(d) == g.ranks.at(d); ++d) {
            at.at(d) = 0;
        }
    }
    return at;
}

/// Returns the first computed cell and the number of computed cells of a rank, in each dimension.
inline std::pair<cell, cell> own(const grid &g, int rank) {
    const std::array<int, 3> at = place(g, rank);
    cell first{};
    cell cells{};
    for (std::size_t d = 0; d < 3; ++d) {
        std::tie(first.at(d), cells.at(d)) = part(g.cells.at(d), g.ranks.at(d), at.at(d));
    }
    return {first, cells};
}

inline std::size_t elements(const grid &g, int rank) {
    const cell cells = own(g, rank).second;
    std::size_t product = 1;
    for (std::size_t d = 0; d < 3; ++d) {
        product *= static_cast<std::size_t>(cells.at(d) + 2 * g.ghost.at(d));
    }
    return product;
}

/// Calls `visit(element, position, crossed)` for each cell of a rank's array. The arguments are the index in memory,
/// the position in the mesh (not wrapped), and the number of dimensions in which the cell is a ghost cell.
template <class Visit> void for_each(const grid &g, int rank, const Visit &visit) {
    const auto [first, cells] = own(g, rank);
    std::size_t element = 0;
    cell i{};
    for (i[2] = -g.ghost[2]; i[2] < cells[2] + g.ghost[2]; ++i[2]) {
        for (i[1] = -g.ghost[1]; i[1] < cells[1] + g.ghost[1]; ++i[1]) {
            for (i[0] = -g.ghost[0]; i[0] < cells[0] + g.ghost[0]; ++i[0], ++element) {
                cell position{};
                int crossed = 0;
                for (std::size_t d = 0; d < 3; ++d) {
                    position.at(d) = first.at(d) + i.at(d);
                    crossed += i.at(d) < 0 || i.at(d) >= cells.at(d) ? 1 : 0;
                }
                visit(element, position, crossed);
            }
        }
    }
}

/// Wraps a position into the mesh. Returns false if the position is outside a mesh that is not periodic.
inline bool wrap(const grid &g, cell &position) {
    for (std::size_t d = 0; d < 3; ++d) {
        if (position.at(d) < 0 || position.at(d) >= g.cells.at(d)) {
            if (!g.periodic.at(d)) {
                return false;
            }
            position.at(d) = (position.at(d) + g.cells.at(d)) % g.cells.at(d);
        }
    }
    return true;
}

/// Computes the value of one cell of the mesh for a variable in a cycle. It is different for all cells, variables and
/// cycles of a test.
inline void value(const grid &g, const cell &position, std::size_t variable, std::uint64_t cycle, unsigned char *bytes,
                  std::size_t count) {
    const auto index = static_cast<std::uint64_t>(position[0] + g.cells[0] * (position[1] + g.cells[1] * position[2]));
    const std::uint64_t number = (index + 1) + (cycle << 20U) + (static_cast<std::uint64_t>(variable) << 29U);
    const std::uint64_t mixed = number * 0x9E3779B97F4A7C15U; // odd, so that different numbers remain different
    for (std::size_t b = 0; b < count; ++b) {
        // Four bytes come from the number itself, because the low half of a product distinguishes all low halves.
        bytes[b] = static_cast<unsigned char>(mixed >> (8 * (b % 8)));
    }
}

inline unsigned char *bytes_of(const mpgpu::halo::rank_array &one, std::size_t element) {
    return static_cast<unsigned char *>(one.data) + element * one.element_bytes;
}

/// Sets the computed cells of a rank to the values of a cycle, and its ghost cells to `untouched`.
inline void fill(const grid &g, int rank, const mpgpu::halo::rank_arrays &arrays, std::uint64_t cycle) {
    for_each(g, rank, [&](std::size_t element, const cell &position, int crossed) {
        for (std::size_t v = 0; v < arrays.size(); ++v) {
            unsigned char *at = bytes_of(arrays[v], element);
            if (crossed == 0) {
                value(g, position, v, cycle, at, arrays[v].element_bytes);
            } else {
                std::memset(at, untouched, arrays[v].element_bytes);
            }
        }
    });
}

/// Returns a description of the first cell that has a wrong value after an exchange. The text is empty if all values
/// are right.
inline std::string first_difference(const grid &g, int rank, const mpgpu::halo::rank_arrays &arrays,
                                    std::uint64_t cycle) {
    std::string found;
    std::vector<unsigned char> expected;
    for_each(g, rank, [&](std::size_t element, const cell &position, int crossed) {
        for (std::size_t v = 0; v < arrays.size() && found.empty(); ++v) {
            const std::size_t bytes = arrays[v].element_bytes;
            expected.assign(bytes, untouched);
            cell source = position;
            if (crossed <= static_cast<int>(g.reach) && wrap(g, source)) {
                value(g, source, v, cycle, expected.data(), bytes);
            }
            if (std::memcmp(expected.data(), bytes_of(arrays[v], element), bytes) != 0) {
                found = "cycle " + std::to_string(cycle) + ", rank " + std::to_string(rank) + ", variable " +
                        std::to_string(v) + ": wrong at (" + std::to_string(position[0]) + ", " +
                        std::to_string(position[1]) + ", " + std::to_string(position[2]) + ") of the mesh, a " +
                        (crossed == 0 ? "computed cell" : "ghost cell");
            }
        }
    });
    return found;
}

/// Returns the number of bytes that one exchange must move to rank `rank`.
inline std::uint64_t received_bytes(const grid &g, int rank, const std::vector<std::size_t> &sizes) {
    std::uint64_t cells = 0;
    for_each(g, rank, [&](std::size_t, cell position, int crossed) {
        cells += crossed > 0 && crossed <= static_cast<int>(g.reach) && wrap(g, position) ? 1 : 0;
    });
    std::uint64_t bytes = 0;
    for (const std::size_t size : sizes) {
        bytes += cells * size;
    }
    return bytes;
}

/// Returns the number of bytes that one exchange must move to all ranks together.
inline std::uint64_t exchanged_bytes(const grid &g, const std::vector<std::size_t> &sizes) {
    std::uint64_t bytes = 0;
    for (int rank = 0; rank < g.ranks[0] * g.ranks[1] * g.ranks[2]; ++rank) {
        bytes += received_bytes(g, rank, sizes);
    }
    return bytes;
}

/// Returns a random grid of one to three dimensions, and the element sizes of one to four variables. The grid has up to
/// twelve ranks, or exactly `ranks` if that is not 0.
inline std::pair<grid, std::vector<std::size_t>> random_problem(std::mt19937 &random, int ranks = 0) {
    const auto between = [&](int least, int most) {
        return least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
    };
    grid g;
    const int dimensions = between(1, 3);
    int left = ranks != 0 ? ranks : between(1, 12);
    for (int d = 0; d < dimensions; ++d) {
        const auto at = static_cast<std::size_t>(d);
        int share = left;
        if (d + 1 < dimensions) {
            do {
                share = between(1, left);
            } while (left % share != 0);
        }
        left /= share;
        g.ranks.at(at) = share;
        g.ghost.at(at) = between(1, 3);
        g.periodic.at(at) = between(0, 1) == 1;
        g.cells.at(at) = share * (static_cast<int>(g.ghost.at(at)) + between(0, 5)) + between(0, share - 1);
    }
    // The contiguous dimension, and the dimensions of a problem with fewer than three, are random.
    for (std::size_t d = 2; d > 0; --d) {
        const std::size_t with = random() % (d + 1);
        std::swap(g.ranks.at(d), g.ranks.at(with));
        std::swap(g.ghost.at(d), g.ghost.at(with));
        std::swap(g.cells.at(d), g.cells.at(with));
        const bool periodic = g.periodic.at(d);
        g.periodic.at(d) = g.periodic.at(with);
        g.periodic.at(with) = periodic;
    }
    g.reach = static_cast<mpgpu::halo::neighbours>(between(1, 3));
    std::vector<std::size_t> sizes(static_cast<std::size_t>(between(1, 4)));
    for (std::size_t &bytes : sizes) {
        bytes = between(0, 1) == 0 ? 4 : 8;
    }
    return {g, sizes};
}

/// Returns the regions that the ranks of a grid send to each other, for variables with the given element sizes.
inline mpgpu::halo::detail::connections connections_of(const grid &g, const std::vector<std::size_t> &sizes) {
    mpgpu::halo::rank_arrays arrays;
    for (const std::size_t bytes : sizes) {
        arrays.push_back({nullptr, mpgpu::device::host(), bytes, 0});
    }
    mpgpu::halo::detail::division all;
    all.whole = mpgpu::halo::domain_of(g);
    all.depth = all.whole.ghost;
    all.ranks = mpgpu::halo::rank_count(g);
    all.variables = mpgpu::halo::detail::variables_of(arrays, 1);
    for (int rank = 0; rank < all.ranks; ++rank) {
        mpgpu::halo::detail::add_boxes(all, rank, {mpgpu::halo::box_of(g, rank)}, arrays);
    }
    return mpgpu::halo::detail::connect(all);
}

} // namespace halo_reference

#endif // MPGPU_TESTS_HALO_REFERENCE_HPP
