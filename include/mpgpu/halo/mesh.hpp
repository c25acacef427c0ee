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

/// Order in which the ranks of a grid are numbered. It does not depend on the order of cells in memory.
enum class rank_order : std::int32_t {
    x_first, ///< x varies fastest: rank (x, y, z) has the number x + ranks[0] * (y + ranks[1] * z)
    z_first  ///< z varies fastest, as in MPI_Cart_create with `dims` equal to `ranks`: rank (x, y, z) has the number
             ///< z + ranks[2] * (y + ranks[1] * x)
};

/// Mesh, and its division among ranks. The dimensions are x, y and z. Cells that are adjacent in x are adjacent in
/// memory. Keep the defaults in dimensions that a problem does not have: one cell, no ghost cells. In y and z, 0 cells
/// and 0 ranks count as 1, so `g.cells = {nx, ny}` defines a plane. A plain value.
struct grid {
    /// Number of cells of the whole mesh in each dimension, without ghost cells.
    std::array<std::int64_t, 3> cells = {1, 1, 1};
    /// Number of ranks in each dimension.
    std::array<int, 3> ranks = {1, 1, 1};
    /// True for each dimension that is periodic: its first cell is the neighbour of its last cell.
    std::array<bool, 3> periodic = {false, false, false};
    /// Number of ghost cells on each of the two sides in each dimension. It must not exceed the number of cells that
    /// any rank has in that dimension. Arrays may have other ghost widths (`array_layout`), and an exchange may
    /// transfer another number of layers (`options::depth`).
    std::array<std::int64_t, 3> ghost = {0, 0, 0};
    /// Neighbours with which a rank exchanges cells. Ghost cells of all other neighbours are not changed. Ghost cells
    /// outside a mesh that is not periodic are not changed either.
    neighbours reach = neighbours::corners;
    /// Order in which the ranks are numbered. For any other order, pass boxes (`domain`).
    rank_order order = rank_order::x_first;
};

/// Box of cells of the whole mesh or of one array.
struct box {
    std::array<std::int64_t, 3> first = {0, 0, 0}; ///< index of the first cell in each dimension
    std::array<std::int64_t, 3> cells = {0, 0, 0}; ///< number of cells in each dimension
};

/// Numbers of layers of cells at the two sides of a box.
struct layers {
    std::array<std::int64_t, 3> low = {0, 0, 0};  ///< layers at the side of small indices, in each dimension
    std::array<std::int64_t, 3> high = {0, 0, 0}; ///< layers at the side of large indices, in each dimension
};

/// Returns equal numbers of layers for the two sides of each dimension.
[[nodiscard]] constexpr layers both_sides(const std::array<std::int64_t, 3> &width) noexcept {
    return {width, width};
}

/// Mesh that is divided among ranks by lists of boxes (`rank_boxes`). All ranks pass equal domains. A plain value.
struct domain {
    /// All cells of the mesh. Every box is inside it. Boxes need not cover it.
    box cells;
    /// True for each dimension that is periodic: its first cell is the neighbour of its last cell.
    std::array<bool, 3> periodic = {false, false, false};
    /// Ghost widths of arrays without their own `array_layout`, and number of layers that an exchange transfers unless
    /// `options::depth` is set. They may exceed the size of boxes.
    layers ghost;
    /// Ghost cells that are exchanged: those outside the box in one dimension (`faces`), in one or two dimensions
    /// (`edges`), or in one to three dimensions (`corners`).
    neighbours reach = neighbours::corners;
};

/// Boxes of cells that a rank computes: one or more. Boxes of one rank or of several ranks must not overlap.
using rank_boxes = std::vector<box>;

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
    if (g.order == rank_order::z_first) {
        return {rank / ranks[2] / ranks[1], rank / ranks[2] % ranks[1], rank % ranks[2]};
    }
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

/// Returns the domain of a grid: its cells, periodic dimensions, ghost widths and reach. If the ranks are numbered in
/// an order that is not in `rank_order`, create the plan from this domain and the boxes that `box_of` returns.
[[nodiscard]] constexpr domain domain_of(const grid &g) noexcept {
    return {{{0, 0, 0}, detail::mesh_cells(g)}, g.periodic, both_sides(g.ghost), g.reach};
}

/// Returns the number of elements of a rank's arrays in each dimension, including ghost cells. Applies to arrays
/// without an `array_layout`.
[[nodiscard]] constexpr std::array<std::int64_t, 3> array_extents(const grid &g, int rank) noexcept {
    const box own = box_of(g, rank);
    return {own.cells[0] + 2 * g.ghost[0], own.cells[1] + 2 * g.ghost[1], own.cells[2] + 2 * g.ghost[2]};
}

/// Layout of the array of a variable. Ghost widths and padding may differ between ranks.
struct array_layout {
    /// Ghost widths of the array. The first computed cell has the indices `ghost.low` in the array.
    layers ghost;
    /// True for each dimension in which the variable is staggered: its values are at the faces between cells. The array
    /// then has one computed element more in that dimension than the box has cells. Element i is at the low side of
    /// cell i. Equal on all ranks.
    ///
    /// The last face of a box is also the first face of the next box. The box that contains the cell at the high side
    /// of the face owns the face, and its value is sent to the other box. If no box contains that cell, the box at the
    /// low side owns the face.
    ///
    /// If a variable is staggered in several dimensions, an element has up to eight adjacent cells. Among the boxes
    /// that contain these cells, those at the high side of the element in z have precedence. Among the remaining boxes,
    /// those at the high side in y have precedence, and then those at the high side in x. The box that remains is the
    /// owner. Each exchange sends the value of the owner to all other boxes that share the element, whatever `reach`
    /// is.
    std::array<bool, 3> staggered = {false, false, false};
    /// Number of elements from the start of a row to that of the next row. With the value 0, rows have no padding.
    std::int64_t row = 0;
    /// Number of elements from the start of a plane to that of the next plane. With the value 0, planes have no
    /// padding.
    std::int64_t plane = 0;
};

/// Returns the number of elements of an array in each dimension, including ghost cells but not padding. `own` is the
/// box of cells that the rank computes.
[[nodiscard]] constexpr std::array<std::int64_t, 3> array_extents(const box &own, const array_layout &layout) noexcept {
    std::array<std::int64_t, 3> extents = {0, 0, 0};
    for (std::size_t d = 0; d < 3; ++d) {
        extents[d] = layout.ghost.low[d] + own.cells[d] + (layout.staggered[d] ? 1 : 0) + layout.ghost.high[d];
    }
    return extents;
}

/// Array of one variable on one rank, with ghost cells. A non-owning view.
struct rank_array {
    void *data = nullptr;             ///< address of the first element
    device location = device::host(); ///< device that owns the memory
    std::size_t element_bytes = 0;    ///< size of one element in bytes
    std::size_t size = 0;             ///< number of elements, including ghost cells and padding
    /// Layout of the array. If it is empty, the array has the ghost widths of the grid or domain, and no padding.
    std::optional<array_layout> layout = std::nullopt;
};

/// Arrays of all variables of one rank, all on one device. All ranks have the same variables in the same order. If a
/// rank has several boxes, the arrays of all variables of the first box precede those of the second box.
using rank_arrays = std::vector<rank_array>;

/// Converts a `buffer` or a `device_span` to a `rank_array`. The elements may have any trivially copyable type.
template <class Elements>
[[nodiscard]] rank_array array_of(Elements &&elements,
                                  const std::optional<array_layout> &layout = std::nullopt) noexcept {
    const auto whole = mpgpu::detail::as_device_span(elements);
    using element = typename decltype(whole)::element_type;
    static_assert(!std::is_const_v<element>, "mpgpu: ghost cells are written");
    return {whole.data(), whole.location(), sizeof(element), whole.size(), layout};
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
    if (g.order != rank_order::x_first && g.order != rank_order::z_first) {
        return invalid("grid", "order: " + std::to_string(static_cast<int>(g.order)) + ": must be x_first or z_first");
    }
    return std::nullopt;
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_MESH_HPP
