// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_BOXES_HPP
#define MPGPU_HALO_BOXES_HPP

/// @file
/// Functions for boxes of cells. They intersect and subtract boxes, find the boxes that intersect a given box, and
/// determine which box owns an element of a staggered variable. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/mesh.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

using cell_index = std::array<std::int64_t, 3>;

/// Returns the index after the last cell of a box in dimension `d`.
[[nodiscard]] inline std::int64_t end_of(const box &b, std::size_t d) noexcept {
    return b.first[d] + b.cells[d];
}

[[nodiscard]] inline bool is_empty(const box &b) noexcept {
    return b.cells[0] <= 0 || b.cells[1] <= 0 || b.cells[2] <= 0;
}

/// Returns the cells that are in both boxes. The result is empty if there are none.
[[nodiscard]] inline box overlap(const box &a, const box &b) noexcept {
    box both;
    for (std::size_t d = 0; d < 3; ++d) {
        both.first[d] = std::max(a.first[d], b.first[d]);
        both.cells[d] = std::max<std::int64_t>(std::min(end_of(a, d), end_of(b, d)) - both.first[d], 0);
    }
    return both;
}

/// Returns a box moved by `times * distance` cells.
[[nodiscard]] inline box moved(box b, const cell_index &distance, std::int64_t times = 1) noexcept {
    for (std::size_t d = 0; d < 3; ++d) {
        b.first[d] += times * distance[d];
    }
    return b;
}

/// Returns a box with additional layers on its sides.
[[nodiscard]] inline box grown(box b, const layers &by) noexcept {
    for (std::size_t d = 0; d < 3; ++d) {
        b.first[d] -= by.low[d];
        b.cells[d] += by.low[d] + by.high[d];
    }
    return b;
}

/// Returns the indices of the elements of a variable that belong to a box of cells, as a box. It has one element more
/// than cells in each staggered dimension. `staggered` is `array_layout::staggered`.
[[nodiscard]] inline box elements_of(box b, const std::array<bool, 3> &staggered) noexcept {
    for (std::size_t d = 0; d < 3; ++d) {
        b.cells[d] += staggered[d] ? 1 : 0;
    }
    return b;
}

/// Removes the cells of `without` from a list of boxes that do not overlap. Boxes that are partly removed are replaced
/// by several boxes.
inline void subtract(std::vector<box> &from, const box &without) {
    std::vector<box> rest;
    for (box b : from) {
        const box both = overlap(b, without);
        if (is_empty(both)) {
            rest.push_back(b);
            continue;
        }
        for (std::size_t d = 3; d-- > 0;) { // whole planes are cut off first, so that the parts have long rows
            box below = b;
            below.cells[d] = both.first[d] - b.first[d];
            box above = b;
            above.first[d] = end_of(both, d);
            above.cells[d] = end_of(b, d) - above.first[d];
            for (const box &part : {below, above}) {
                if (!is_empty(part)) {
                    rest.push_back(part);
                }
            }
            b.first[d] = both.first[d];
            b.cells[d] = both.cells[d];
        }
    }
    from = std::move(rest);
}

/// Returns a box as text: "(0, 0, 0) to (7, 7, 0)", which are its first and its last cell.
[[nodiscard]] inline std::string text_of(const box &b) {
    const auto corner = [&b](std::int64_t share) {
        std::string text;
        for (std::size_t d = 0; d < 3; ++d) {
            text += (d == 0 ? "(" : ", ") + std::to_string(b.first[d] + share * (b.cells[d] - 1));
        }
        return text + ")";
    };
    return corner(0) + " to " + corner(1);
}

/// Search structure that finds the boxes which intersect a given box. Space is divided into buckets that are as large
/// as the largest box in each dimension. Each bucket lists the boxes whose first cell is in it.
class box_index {
  public:
    explicit box_index(std::vector<box> boxes) : boxes_(std::move(boxes)) {
        base_ = boxes_.empty() ? cell_index{} : boxes_[0].first;
        for (const box &b : boxes_) {
            for (std::size_t d = 0; d < 3; ++d) {
                base_[d] = std::min(base_[d], b.first[d]);
                size_[d] = std::max(size_[d], b.cells[d]);
            }
        }
        for (std::size_t i = 0; i < boxes_.size(); ++i) {
            cell_index bucket{};
            for (std::size_t d = 0; d < 3; ++d) {
                bucket[d] = (boxes_[i].first[d] - base_[d]) / size_[d];
                last_[d] = std::max(last_[d], bucket[d]);
            }
            buckets_[bucket].push_back(i);
        }
    }

    /// Calls `visit(i)` for each box that intersects `where`. `i` is its index in the list passed to the constructor.
    template <class Visit> void for_each_in(const box &where, const Visit &visit) const {
        cell_index first{};
        cell_index last{};
        for (std::size_t d = 0; d < 3; ++d) {
            // The first cell of a box that intersects `where` is at most `size_[d] - 1` cells before `where`.
            const std::int64_t most = end_of(where, d) - 1 - base_[d];
            if (most < 0) {
                return;
            }
            first[d] = std::max<std::int64_t>(where.first[d] - size_[d] + 1 - base_[d], 0) / size_[d];
            last[d] = std::min(most / size_[d], last_[d]);
        }
        cell_index at{};
        for (at[2] = first[2]; at[2] <= last[2]; ++at[2]) {
            for (at[1] = first[1]; at[1] <= last[1]; ++at[1]) {
                for (at[0] = first[0]; at[0] <= last[0]; ++at[0]) {
                    const auto bucket = buckets_.find(at);
                    if (bucket == buckets_.end()) {
                        continue;
                    }
                    for (const std::size_t i : bucket->second) {
                        if (!is_empty(overlap(boxes_[i], where))) {
                            visit(i);
                        }
                    }
                }
            }
        }
    }

  private:
    std::vector<box> boxes_;
    cell_index base_{};           ///< smallest index of a first cell, in each dimension
    cell_index size_ = {1, 1, 1}; ///< size of a bucket in each dimension
    cell_index last_{};           ///< largest index of a bucket, in each dimension
    std::map<cell_index, std::vector<std::size_t>> buckets_;
};

/// Calls `visit(distance)` for the mesh itself, with distance 0, and for each periodic image next to it, with the
/// distance of the image from the mesh.
template <class Visit> void for_each_image(const domain &whole, const Visit &visit) {
    const auto most = [&whole](std::size_t d) { return whole.periodic[d] ? 1 : 0; };
    for (int z = -most(2); z <= most(2); ++z) {
        for (int y = -most(1); y <= most(1); ++y) {
            for (int x = -most(0); x <= most(0); ++x) {
                visit(cell_index{x * whole.cells.cells[0], y * whole.cells.cells[1], z * whole.cells.cells[2]});
            }
        }
    }
}

/// Returns the elements of a variable that each box of cells owns, by the rule at `array_layout::staggered`. The result
/// contains a list for each box of `boxes`: boxes of elements that do not overlap. `cells` searches in `boxes`.
[[nodiscard]] inline std::vector<std::vector<box>> owned_elements(const domain &whole, const std::vector<box> &boxes,
                                                                  const box_index &cells,
                                                                  const std::array<bool, 3> &staggered) {
    // Element i of a staggered dimension is between the cells i - 1 and i. A box therefore claims the elements whose
    // indices are those of its cells, moved by 0 or 1 in each staggered dimension. `distances` lists these moves. If
    // two boxes claim an element, the box whose move is earlier in the list owns it.
    std::vector<cell_index> distances;
    for (std::int64_t i = 0; i < 8; ++i) {
        const cell_index distance = {i % 2, i / 2 % 2, i / 4};
        if ((staggered[0] || distance[0] == 0) && (staggered[1] || distance[1] == 0) &&
            (staggered[2] || distance[2] == 0)) {
            distances.push_back(distance);
        }
    }
    std::vector<std::vector<box>> owned(boxes.size());
    for (std::size_t b = 0; b < boxes.size(); ++b) {
        for (std::size_t claim = 0; claim < distances.size(); ++claim) {
            std::vector<box> parts = {moved(boxes[b], distances[claim])};
            for (std::size_t earlier = 0; earlier < claim; ++earlier) {
                for_each_image(whole, [&](const cell_index &image) {
                    const box where =
                        moved(moved(moved(boxes[b], distances[claim]), distances[earlier], -1), image, -1);
                    cells.for_each_in(where, [&](std::size_t other) {
                        subtract(parts, moved(moved(boxes[other], distances[earlier]), image));
                    });
                });
            }
            owned[b].insert(owned[b].end(), parts.begin(), parts.end());
        }
    }
    return owned;
}

/// Cuts `wanted` at the sides of `own`, and calls `visit(part)` for each part. Omits parts that are outside `own` in
/// more dimensions than `reach` allows.
template <class Visit> void for_each_side(const box &wanted, const box &own, neighbours reach, const Visit &visit) {
    for (int side = 0; side < 27; ++side) {
        const std::array<int, 3> sides = {side % 3, side / 3 % 3, side / 9}; // 0: low ghost, 1: own, 2: high ghost
        box part;
        int crossed = 0;
        for (std::size_t d = 0; d < 3; ++d) {
            const std::int64_t first = sides[d] == 0 ? wanted.first[d] : sides[d] == 1 ? own.first[d] : end_of(own, d);
            const std::int64_t end = sides[d] == 0 ? own.first[d] : sides[d] == 1 ? end_of(own, d) : end_of(wanted, d);
            part.first[d] = std::max(first, wanted.first[d]);
            part.cells[d] = std::min(end, end_of(wanted, d)) - part.first[d];
            crossed += sides[d] != 1 ? 1 : 0;
        }
        if (!is_empty(part) && crossed <= static_cast<int>(reach)) {
            visit(part);
        }
    }
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_BOXES_HPP
