// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MESH_HPP
#define MPGPU_HALO_MESH_HPP

/// @file
/// Description of the mesh, of its division among ranks, and of the arrays. Part of mpgpu/halo.hpp; include that
/// header.

#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::halo {

/// Neighbours with which a rank exchanges cells.
enum class neighbours : std::int32_t {
    faces = 1,  ///< neighbours across faces: 6 in three dimensions
    edges = 2,  ///< neighbours across faces and edges: 18 in three dimensions
    corners = 3 ///< neighbours across faces, edges and corners: 26 in three dimensions
};

/// Mesh, and its division among ranks. The dimensions are x, y and z. Cells that are adjacent in x are adjacent in
/// memory. Keep the defaults in dimensions that a problem does not have: one cell, no ghost cells. In y and z, 0 cells
/// and 0 ranks count as 1, so `g.cells = {nx, ny}` defines a plane. A plain value.
struct grid {
    /// Number of cells of the whole mesh in each dimension, without ghost cells.
    std::array<std::int64_t, 3> cells = {1, 1, 1};
    /// Number of ranks in each dimension. Rank (x, y, z) has the number x + ranks[0] * (y + ranks[1] * z).
    std::array<int, 3> ranks = {1, 1, 1};
    /// True for each dimension that is periodic: its first cell is the neighbour of its last cell.
    std::array<bool, 3> periodic = {false, false, false};
    /// Number of ghost cells on each of the two sides in each dimension. It must not exceed the number of cells that
    /// any rank has in that dimension.
    std::array<std::int64_t, 3> ghost = {0, 0, 0};
    /// Neighbours with which a rank exchanges cells. Ghost cells of all other neighbours are not changed. Ghost cells
    /// outside a mesh that is not periodic are not changed either.
    neighbours reach = neighbours::corners;
};

/// Box of cells of the whole mesh or of one array.
struct box {
    std::array<std::int64_t, 3> first = {0, 0, 0}; ///< index of the first cell in each dimension, from 0
    std::array<std::int64_t, 3> cells = {0, 0, 0}; ///< number of cells in each dimension
};

namespace detail {

/// Returns the number of cells of the mesh in each dimension. It is 1 in dimensions that the mesh does not have.
[[nodiscard]] constexpr std::array<std::int64_t, 3> mesh_cells(const grid &g) noexcept {
    return {g.cells[0], g.cells[1] == 0 ? 1 : g.cells[1], g.cells[2] == 0 ? 1 : g.cells[2]};
}
/// Returns the number of ranks in each dimension. It is 1 in dimensions that the mesh does not have.
[[nodiscard]] constexpr std::array<int, 3> mesh_ranks(const grid &g) noexcept {
    return {g.ranks[0], g.ranks[1] == 0 ? 1 : g.ranks[1], g.ranks[2] == 0 ? 1 : g.ranks[2]};
}

} // namespace detail

/// Returns the number of ranks of a grid. If it exceeds the range of `int`, returns the largest `int`.
[[nodiscard]] constexpr int rank_count(const grid &g) noexcept {
    constexpr std::int64_t most = std::numeric_limits<int>::max();
    std::int64_t count = 1;
    for (const int ranks : detail::mesh_ranks(g)) {
        count = count * ranks < most ? count * ranks : most;
    }
    return static_cast<int>(count);
}

/// Returns the position (x, y, z) of a rank in the grid of ranks.
[[nodiscard]] constexpr std::array<int, 3> place_of(const grid &g, int rank) noexcept {
    const std::array<int, 3> ranks = detail::mesh_ranks(g);
    return {rank % ranks[0], rank / ranks[0] % ranks[1], rank / ranks[0] / ranks[1]};
}

/// Returns the box of cells of the mesh that a rank computes. Cells are divided as evenly as possible. If the number of
/// cells is not a multiple of the number of ranks in a dimension, the first ranks have one cell more.
[[nodiscard]] constexpr box box_of(const grid &g, int rank) noexcept {
    const std::array<std::int64_t, 3> cells = detail::mesh_cells(g);
    const std::array<int, 3> ranks = detail::mesh_ranks(g);
    const std::array<int, 3> place = place_of(g, rank);
    box own;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t least = cells[d] / ranks[d];
        const std::int64_t extra = cells[d] % ranks[d];
        own.first[d] = place[d] * least + (place[d] < extra ? place[d] : extra);
        own.cells[d] = least + (place[d] < extra ? 1 : 0);
    }
    return own;
}

/// Returns the number of elements of a rank's arrays in each dimension, including ghost cells.
[[nodiscard]] constexpr std::array<std::int64_t, 3> array_extents(const grid &g, int rank) noexcept {
    const box own = box_of(g, rank);
    return {own.cells[0] + 2 * g.ghost[0], own.cells[1] + 2 * g.ghost[1], own.cells[2] + 2 * g.ghost[2]};
}

/// Array of one variable on one rank, with ghost cells. A non-owning view.
struct rank_array {
    void *data;                ///< address of the first element
    device location;           ///< device that owns the memory
    std::size_t element_bytes; ///< size of one element in bytes
    std::size_t size;          ///< number of elements, including ghost cells
};

/// Arrays of all variables of one rank, all on one device. All ranks have the same variables in the same order.
using rank_arrays = std::vector<rank_array>;

/// Converts a `buffer` or a `device_span` to a `rank_array`. The elements may have any trivially copyable type.
template <class Elements> [[nodiscard]] rank_array array_of(Elements &&elements) noexcept {
    const auto whole = mpgpu::detail::as_device_span(elements);
    using element = typename decltype(whole)::element_type;
    static_assert(!std::is_const_v<element>, "mpgpu: ghost cells are written");
    return {whole.data(), whole.location(), sizeof(element), whole.size()};
}

namespace detail {

using mpgpu::detail::fail;

inline void check(mp_status_t outcome) {
    on_error().report(outcome);
}

[[nodiscard]] inline error_details refusal(status why, std::string argument, std::string message) {
    return {why, 0, std::move(argument), std::move(message)};
}

[[nodiscard]] inline error_details invalid(std::string argument, std::string message) {
    return refusal(status::invalid_argument, std::move(argument), std::move(message));
}

/// Returns the product of `a` and `b`, or nothing if it overflows.
[[nodiscard]] inline std::optional<std::int64_t> product(std::int64_t a, std::int64_t b) noexcept {
    if (b != 0 && a > std::numeric_limits<std::int64_t>::max() / b) {
        return std::nullopt;
    }
    return a * b;
}

/// Checks a grid. Returns the error, or nothing if the grid is valid.
[[nodiscard]] inline std::optional<error_details> wrong(const grid &g) {
    constexpr std::int64_t most = std::int64_t{1} << 40; // so that sums of a few values cannot overflow
    const std::array<std::int64_t, 3> cells = mesh_cells(g);
    const std::array<int, 3> ranks = mesh_ranks(g);
    for (std::size_t d = 0; d < 3; ++d) {
        const std::string in = std::string(" in ") + "xyz"[d] + ": ";
        if (cells[d] < 1 || cells[d] > most) {
            return invalid("grid", "cells" + in + std::to_string(cells[d]) + ": must be 1 to 2^40");
        }
        if (ranks[d] < 1 || ranks[d] > cells[d]) {
            return invalid("grid", "ranks" + in + std::to_string(ranks[d]) + ": must be 1 to " +
                                       std::to_string(cells[d]) + ", the cells there");
        }
        const bool shared = ranks[d] > 1 || g.periodic[d];
        const std::int64_t widest = shared ? cells[d] / ranks[d] : most;
        if (g.ghost[d] < 0 || g.ghost[d] > widest) {
            return invalid(
                "grid", "ghost cells" + in + std::to_string(g.ghost[d]) + ": must be 0 to " + std::to_string(widest) +
                            (shared ? ", the cells of the smallest rank there; use " : "; use ") +
                            (ranks[d] > 1 ? "fewer ranks in that dimension" : "fewer ghost cells or a larger mesh"));
        }
    }
    if (rank_count(g) == std::numeric_limits<int>::max()) {
        return invalid("grid", "more than 2^31 - 2 ranks");
    }
    if (g.reach < neighbours::faces || g.reach > neighbours::corners) {
        return invalid("grid",
                       "reach: " + std::to_string(static_cast<int>(g.reach)) + ": must be faces, edges or corners");
    }
    return std::nullopt;
}

/// Checks the arrays of a rank. Returns the error, or nothing if the arrays are valid. The grid must be valid.
[[nodiscard]] inline std::optional<error_details> wrong(const grid &g, int rank, const rank_arrays &arrays) {
    const std::string whose = "rank " + std::to_string(rank);
    if (arrays.empty()) {
        return invalid("arrays", whose + " has no variables: give each rank one array or more");
    }
    const std::array<std::int64_t, 3> e = array_extents(g, rank);
    std::optional<std::int64_t> elements = product(e[0], e[1]);
    elements = elements ? product(*elements, e[2]) : elements;
    for (std::size_t v = 0; v < arrays.size(); ++v) {
        const rank_array &one = arrays[v];
        const std::string what = whose + ", variable " + std::to_string(v) + ": ";
        if (!elements || one.size != static_cast<std::uint64_t>(*elements)) {
            return invalid("arrays", what + std::to_string(one.size) + " elements: must be " + std::to_string(e[0]) +
                                         " x " + std::to_string(e[1]) + " x " + std::to_string(e[2]) +
                                         ", ghost cells included");
        }
        if (one.data == nullptr || one.element_bytes == 0 ||
            one.element_bytes > std::numeric_limits<std::uint64_t>::max() / 2 / one.size) {
            return invalid("arrays", what + "the address is null, or elements have no size");
        }
        if (one.location != arrays[0].location) {
            return invalid("arrays", what + "is on device " + std::to_string(one.location.id()) +
                                         ", variable 0 on device " + std::to_string(arrays[0].location.id()) +
                                         ": all arrays of a rank must be on one device");
        }
    }
    return std::nullopt;
}

[[nodiscard]] inline std::vector<std::size_t> element_sizes(const rank_arrays &arrays) {
    std::vector<std::size_t> sizes;
    for (const rank_array &one : arrays) {
        sizes.push_back(one.element_bytes);
    }
    return sizes;
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_MESH_HPP
