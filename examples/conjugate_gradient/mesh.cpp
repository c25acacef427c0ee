// SPDX-License-Identifier: MIT OR Apache-2.0
#include "mesh.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <utility>

namespace {

constexpr double hole_radius = 0.25;
constexpr double largest_shift = 0.15; // of a vertex, in cell widths; elements keep a positive volume
constexpr std::int32_t unused = -1;

using place = std::array<std::int32_t, 3>;

/// Calls `visit` for all places of a grid. Each coordinate ranges from 0 to `count - 1`.
template <class Visit> void for_all(std::int32_t count, const Visit &visit) {
    for (place at{}; at[2] < count; ++at[2]) {
        for (at[1] = 0; at[1] < count; ++at[1]) {
            for (at[0] = 0; at[0] < count; ++at[0]) {
                visit(at);
            }
        }
    }
}

std::size_t index_of(const place &at, std::int32_t points) {
    return static_cast<std::size_t>((std::int64_t{at[2]} * points + at[1]) * points + at[0]);
}

bool is_in_hole(const place &cell, double width) {
    double square = 0.0;
    for (const std::int32_t x : cell) {
        const double distance = (x + 0.5) * width - 0.5;
        square += distance * distance;
    }
    return square < hole_radius * hole_radius;
}

/// Calls `add` with the corners of each of the six tetrahedra of a cell. The corners of a tetrahedron are those on a
/// path of three edges from corner (0, 0, 0) to corner (1, 1, 1) of the cell.
template <class Add> void divide_cell(const place &cell, const Add &add) {
    std::array<std::size_t, 3> order = {0, 1, 2};
    do {
        std::array<place, 4> corners{cell, cell, cell, cell};
        for (std::size_t step = 0; step < 3; ++step) {
            for (std::size_t later = step + 1; later < 4; ++later) {
                ++corners.at(later).at(order.at(step));
            }
        }
        add(corners);
    } while (std::next_permutation(order.begin(), order.end()));
}

/// Assigns the vertices in the range from `first` to `last` (exclusive) to `ranks` ranks, beginning with rank `rank`.
void bisect(const mesh &m, std::vector<std::int32_t>::iterator first, std::vector<std::int32_t>::iterator last,
            int rank, int ranks, std::vector<int> &owner) {
    if (ranks == 1) {
        std::for_each(first, last, [&](std::int32_t v) { owner[static_cast<std::size_t>(v)] = rank; });
        return;
    }
    const auto coordinate = [&](std::int32_t v, std::size_t d) {
        return m.vertices[static_cast<std::size_t>(v)].at(d);
    };
    std::pair<double, std::size_t> longest{-1.0, 0}; // side of the bounding box, and its dimension
    for (std::size_t d = 0; d < 3; ++d) {
        const auto ends = std::minmax_element(
            first, last, [&](std::int32_t a, std::int32_t b) { return coordinate(a, d) < coordinate(b, d); });
        longest = std::max(longest, {coordinate(*ends.second, d) - coordinate(*ends.first, d), d});
    }
    const int lower = ranks / 2;
    const auto middle = first + (last - first) * lower / ranks;
    std::nth_element(first, middle, last, [&](std::int32_t a, std::int32_t b) {
        return std::pair(coordinate(a, longest.second), a) < std::pair(coordinate(b, longest.second), b);
    });
    bisect(m, first, middle, rank, lower, owner);
    bisect(m, middle, last, rank + lower, ranks - lower, owner);
}

} // namespace

mesh make_mesh(std::int32_t cells) {
    const std::int32_t points = cells + 1;
    const double width = 1.0 / cells;
    mesh m;
    for_all(cells, [&](const place &cell) {
        if (!is_in_hole(cell, width)) {
            divide_cell(cell, [&](const std::array<place, 4> &corners) {
                auto &element = m.elements.emplace_back();
                std::transform(corners.begin(), corners.end(), element.begin(),
                               [&](const place &at) { return static_cast<std::int32_t>(index_of(at, points)); });
            });
        }
    });
    // The elements still contain indices of grid points. Grid points that are in no element are inside the hole
    // and become no vertices.
    std::vector<std::int32_t> number(static_cast<std::size_t>(points) * points * points, unused);
    for (const auto &element : m.elements) {
        std::for_each(element.begin(), element.end(), [&](std::int32_t v) { number[static_cast<std::size_t>(v)] = 0; });
    }
    std::vector<place> inner;
    std::vector<place> outer;
    for_all(points, [&](const place &at) {
        const auto is_outer = [&](std::int32_t x) { return x == 0 || x == cells; };
        if (number[index_of(at, points)] != unused) {
            (std::any_of(at.begin(), at.end(), is_outer) ? outer : inner).push_back(at);
        }
    });
    std::mt19937_64 random(1);
    std::shuffle(inner.begin(), inner.end(), random);
    m.unknowns = static_cast<std::int32_t>(inner.size());
    std::uniform_real_distribution<double> shift(-largest_shift * width, largest_shift * width);
    const auto add = [&](const place &at, bool is_shifted) {
        number[index_of(at, points)] = static_cast<std::int32_t>(m.vertices.size());
        auto &vertex = m.vertices.emplace_back();
        std::transform(at.begin(), at.end(), vertex.begin(),
                       [&](std::int32_t x) { return x * width + (is_shifted ? shift(random) : 0.0); });
    };
    std::for_each(inner.begin(), inner.end(), [&](const place &at) { add(at, true); });
    std::for_each(outer.begin(), outer.end(), [&](const place &at) { add(at, false); });
    for (auto &element : m.elements) {
        std::transform(element.begin(), element.end(), element.begin(),
                       [&](std::int32_t v) { return number[static_cast<std::size_t>(v)]; });
    }
    std::shuffle(m.elements.begin(), m.elements.end(), random);
    return m;
}

std::vector<int> divide(const mesh &m, int ranks) {
    std::vector<std::int32_t> vertices(static_cast<std::size_t>(m.unknowns));
    std::iota(vertices.begin(), vertices.end(), 0);
    std::vector<int> owner(vertices.size());
    bisect(m, vertices.begin(), vertices.end(), 0, ranks, owner);
    return owner;
}
