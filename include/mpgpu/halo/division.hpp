// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_DIVISION_HPP
#define MPGPU_HALO_DIVISION_HPP

/// @file
/// Division of a mesh among ranks, and the regions of cells that ranks send to each other. Part of mpgpu/halo.hpp;
/// include that header.

#include <mpgpu/halo/boxes.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Position of a cell in an array, and the distances between the starts of adjacent rows and of adjacent planes. All
/// are counted in elements.
struct array_place {
    std::int64_t first;
    std::int64_t row;
    std::int64_t plane;
};

/// Properties of a variable that are equal on all ranks.
struct variable {
    std::uint64_t element_bytes = 0;
    std::array<bool, 3> staggered = {false, false, false};

    [[nodiscard]] bool operator==(const variable &other) const noexcept {
        return element_bytes == other.element_bytes && staggered == other.staggered;
    }
};

/// Box of a rank, with its arrays.
struct rank_box {
    box cells;
    int rank;
    std::size_t array;               ///< index of the box's first array among the arrays of the rank
    std::vector<array_place> places; ///< for each variable: position of the first computed cell
};

/// Division of a mesh among ranks, and the layouts of all arrays. Equal on all ranks.
struct division {
    domain whole;
    layers depth; ///< number of layers to exchange
    int ranks = 0;
    std::vector<variable> variables;
    std::vector<rank_box> boxes; ///< ordered by rank
};

/// Region: box of cells of one variable that a sender copies to ghost cells of a receiver.
struct region {
    std::uint64_t element_bytes;
    cell_index cells;
    std::size_t source_array; ///< index of the array among the arrays of the sender
    array_place source;       ///< position of the first cell in that array
    std::size_t ghost_array;  ///< index of the array among the arrays of the receiver
    array_place ghost;        ///< position of the first cell in that array
};

[[nodiscard]] inline std::uint64_t bytes_of(const region &r) noexcept {
    return static_cast<std::uint64_t>(r.cells[0] * r.cells[1] * r.cells[2]) * r.element_bytes;
}

/// Regions that one rank sends to another, or to itself.
struct connection {
    int from;
    int to;
    std::vector<region> regions;
};

/// Connections of all ranks, ordered by sender, then by receiver. Equal on all ranks.
struct connections {
    std::size_t ranks = 0;
    std::vector<connection> pairs;
};

[[nodiscard]] inline array_layout layout_of(const rank_array &one, const domain &whole) noexcept {
    array_layout otherwise;
    otherwise.ghost = whole.ghost;
    return one.layout.value_or(otherwise);
}

/// Returns the position of the first computed cell in an array whose layout is valid.
[[nodiscard]] inline array_place place_in(const box &own, const array_layout &layout) noexcept {
    const cell_index e = array_extents(own, layout);
    array_place at{};
    at.row = layout.row != 0 ? layout.row : e[0];
    at.plane = layout.plane != 0 ? layout.plane : at.row * e[1];
    at.first = layout.ghost.low[0] + layout.ghost.low[1] * at.row + layout.ghost.low[2] * at.plane;
    return at;
}

/// Returns the variables of a rank that has `boxes` boxes. They are described by the arrays of its first box.
[[nodiscard]] inline std::vector<variable> variables_of(const rank_arrays &arrays, std::size_t boxes) {
    std::vector<variable> made;
    for (std::size_t v = 0; v < arrays.size() / boxes; ++v) {
        made.push_back({arrays[v].element_bytes, arrays[v].layout.value_or(array_layout{}).staggered});
    }
    return made;
}

/// Adds the boxes of a rank to a division. The arguments must be valid.
inline void add_boxes(division &all, int rank, const rank_boxes &boxes, const rank_arrays &arrays) {
    for (std::size_t b = 0; b < boxes.size(); ++b) {
        const std::size_t first = b * all.variables.size();
        rank_box made{boxes[b], rank, first, {}};
        for (std::size_t v = 0; v < all.variables.size(); ++v) {
            made.places.push_back(place_in(boxes[b], layout_of(arrays[first + v], all.whole)));
        }
        all.boxes.push_back(std::move(made));
    }
}

constexpr std::int64_t most_cells = std::int64_t{1} << 40; // so that sums of a few values cannot overflow

/// Checks a domain and the number of layers to exchange. Returns the error, or nothing if they are valid.
[[nodiscard]] inline std::optional<error_details> wrong(const domain &whole, const layers &depth,
                                                        const std::vector<variable> &variables) {
    for (std::size_t d = 0; d < 3; ++d) {
        const std::string in = std::string(" in ") + "xyz"[d] + ": ";
        const std::int64_t cells = whole.cells.cells[d];
        if (cells < 1 || cells > most_cells || whole.cells.first[d] < -most_cells ||
            whole.cells.first[d] > most_cells) {
            return invalid("domain", "cells" + in + std::to_string(cells) + ", the first at " +
                                         std::to_string(whole.cells.first[d]) +
                                         ": must be 1 to 2^40 cells, the first at -2^40 to 2^40");
        }
        const bool staggered =
            std::any_of(variables.begin(), variables.end(), [d](const variable &v) { return v.staggered[d]; });
        // Deeper ghost cells of a periodic dimension would be beyond the images next to the mesh.
        const std::int64_t most = whole.periodic[d] ? cells - (staggered ? 1 : 0) : most_cells;
        for (const std::int64_t layers : {depth.low[d], depth.high[d]}) {
            if (layers < 0 || layers > most) {
                return invalid("how", "layers to exchange" + in + std::to_string(layers) + ": must be 0 to " +
                                          std::to_string(most) +
                                          (!whole.periodic[d] ? ""
                                           : staggered        ? ", one less than the cells of the periodic mesh "
                                                                "with a staggered variable"
                                                              : ", the cells of the periodic mesh") +
                                          "; exchange fewer layers or use a larger mesh");
            }
        }
    }
    if (whole.reach < neighbours::faces || whole.reach > neighbours::corners) {
        return invalid("domain",
                       "reach: " + std::to_string(static_cast<int>(whole.reach)) + ": must be faces, edges or corners");
    }
    return std::nullopt;
}

/// Checks the layout and the size of an array. Returns the error as text, or an empty text if they are valid.
[[nodiscard]] inline std::string wrong_layout(const rank_array &one, const box &own, const domain &whole,
                                              const layers &depth) {
    const array_layout layout = layout_of(one, whole);
    for (std::size_t d = 0; d < 3; ++d) {
        for (const bool high : {false, true}) {
            const std::int64_t width = (high ? layout.ghost.high : layout.ghost.low)[d];
            const std::int64_t needed = (high ? depth.high : depth.low)[d];
            const std::string side = std::string(high ? " at the high" : " at the low") + " side in " + "xyz"[d];
            if (width < 0 || width > most_cells) {
                return std::to_string(width) + " ghost cells" + side + ": must be 0 to 2^40";
            }
            if (width < needed) {
                return std::to_string(width) + " ghost cells" + side + ", and " + std::to_string(needed) +
                       " layers to exchange: use a wider array, or set options::depth";
            }
        }
    }
    const cell_index e = array_extents(own, layout);
    const std::string extents = std::to_string(e[0]) + " x " + std::to_string(e[1]) + " x " + std::to_string(e[2]) +
                                " elements including ghost cells";
    const std::optional<std::int64_t> tight = product(layout.row != 0 ? layout.row : e[0], e[1]);
    if (!tight) {
        return extents + ": too many";
    }
    if ((layout.row != 0 && layout.row < e[0]) || (layout.plane != 0 && layout.plane < *tight)) {
        return "layout.row is " + std::to_string(layout.row) + " and layout.plane is " + std::to_string(layout.plane) +
               ": row must be 0 or at least " + std::to_string(e[0]) + " elements, and plane must be 0 or at least " +
               std::to_string(e[1]) + " rows";
    }
    const array_place at = place_in(own, layout);
    const std::optional<std::int64_t> planes = product(at.plane, e[2] - 1);
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4;
    if (!planes || *planes >= most || *tight >= most) {
        return extents + ": too many";
    }
    // The padding after the last row, and after the last plane, may be missing.
    const std::int64_t elements = *planes + at.row * (e[1] - 1) + e[0];
    const bool padded = layout.row != 0 || layout.plane != 0;
    const auto least = static_cast<std::uint64_t>(elements);
    if (padded ? one.size < least : one.size != least) {
        return std::to_string(one.size) + " elements: must be " +
               (padded ? "at least " + std::to_string(elements) + ", with padding, for " : "") + extents;
    }
    return {};
}

/// Checks the arrays of a rank. Returns the error, or nothing if the arrays are valid. The domain must be valid.
[[nodiscard]] inline std::optional<error_details> wrong(const domain &whole, const layers &depth, int rank,
                                                        const rank_boxes &boxes, const rank_arrays &arrays) {
    const std::string whose = "rank " + std::to_string(rank);
    if (arrays.empty()) {
        return invalid("arrays", whose + " has no variables: give each rank one array or more");
    }
    if (boxes.empty() || arrays.size() % boxes.size() != 0) {
        return invalid("boxes", whose + " has " + std::to_string(boxes.size()) + " boxes and " +
                                    std::to_string(arrays.size()) +
                                    " arrays: pass one box or more, and an array for each box and variable");
    }
    const std::vector<variable> variables = variables_of(arrays, boxes.size());
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const rank_array &one = arrays[i];
        const std::size_t b = i / variables.size();
        const std::size_t v = i % variables.size();
        const std::string what =
            whose + (boxes.size() > 1 ? ", box " + std::to_string(b) : "") + ", variable " + std::to_string(v) + ": ";
        if (is_empty(boxes[b]) || is_empty(overlap(boxes[b], whole.cells)) ||
            overlap(boxes[b], whole.cells).cells != boxes[b].cells) {
            return invalid("boxes", whose + ", box " + std::to_string(b) + ": cells " + text_of(boxes[b]) +
                                        ": must be one cell or more, all in the domain, " + text_of(whole.cells));
        }
        const std::string layout = wrong_layout(one, boxes[b], whole, depth);
        if (!layout.empty()) {
            return invalid("arrays", what + layout);
        }
        if (one.data == nullptr || one.element_bytes == 0 ||
            one.element_bytes > std::numeric_limits<std::uint64_t>::max() / 2 / one.size) {
            return invalid("arrays", what + "the address is null, the element size is 0, or the array is too large");
        }
        if (one.location != arrays[0].location) {
            return invalid("arrays", what + "is on device " + std::to_string(one.location.id()) +
                                         ", variable 0 on device " + std::to_string(arrays[0].location.id()) +
                                         ": all arrays of a rank must be on one device");
        }
        if (!(variables_of({one}, 1)[0] == variables[v])) {
            return invalid("arrays", what + "element size or staggering differs from that of box 0");
        }
    }
    return std::nullopt;
}

/// Returns an error that names two boxes that overlap, or nothing if no boxes overlap.
[[nodiscard]] inline std::optional<error_details> overlapping(const division &all) {
    std::vector<box> boxes;
    for (const rank_box &b : all.boxes) {
        boxes.push_back(b.cells);
    }
    const box_index index(boxes);
    std::optional<error_details> found;
    for (std::size_t a = 0; a < boxes.size() && !found; ++a) {
        std::size_t least = boxes.size();
        index.for_each_in(boxes[a], [&](std::size_t b) { least = b > a ? std::min(least, b) : least; });
        if (least < boxes.size()) {
            found = invalid("boxes", "rank " + std::to_string(all.boxes[a].rank) + " computes the cells " +
                                         text_of(boxes[a]) + " and rank " + std::to_string(all.boxes[least].rank) +
                                         " the cells " + text_of(boxes[least]) + ": the cells " +
                                         text_of(overlap(boxes[a], boxes[least])) +
                                         " are in both boxes; pass boxes that do not overlap");
        }
    }
    return found;
}

/// Returns the boxes of all ranks of a grid. Throws if the grid is wrong, or if its number of ranks differs from the
/// number of elements of `arrays`.
[[nodiscard]] inline std::vector<rank_boxes> checked_boxes(const grid &g, array_view<const rank_arrays> arrays) {
    std::optional<error_details> found = wrong(g);
    if (!found && arrays.size() != static_cast<std::size_t>(rank_count(g))) {
        found = invalid("arrays", "arrays of " + std::to_string(arrays.size()) + " ranks: the grid has " +
                                      std::to_string(rank_count(g)) + " ranks");
    }
    if (found) {
        fail(std::move(*found));
    }
    std::vector<rank_boxes> boxes(arrays.size());
    for (int rank = 0; rank < rank_count(g); ++rank) {
        boxes[static_cast<std::size_t>(rank)] = {box_of(g, rank)};
    }
    return boxes;
}

/// Returns the division of a mesh among ranks of one process. Throws if the arguments are wrong.
[[nodiscard]] inline division checked(const domain &whole, array_view<const rank_boxes> boxes,
                                      array_view<const rank_arrays> arrays, const std::optional<layers> &depth) {
    division all;
    all.whole = whole;
    all.depth = depth.value_or(whole.ghost);
    all.ranks = static_cast<int>(boxes.size());
    std::optional<error_details> found = wrong(whole, all.depth, {});
    if (!found && (arrays.size() != boxes.size() || boxes.empty())) {
        found = invalid("arrays", "arrays of " + std::to_string(arrays.size()) + " ranks and boxes of " +
                                      std::to_string(boxes.size()) + ": pass both for each rank");
    }
    for (std::size_t rank = 0; !found && rank < boxes.size(); ++rank) {
        const auto number = static_cast<int>(rank);
        found = wrong(whole, all.depth, number, boxes[rank], arrays[rank]);
        if (found) {
            break;
        }
        const std::vector<variable> own = variables_of(arrays[rank], boxes[rank].size());
        all.variables = rank == 0 ? own : all.variables;
        found = wrong(whole, all.depth, own);
        if (own != all.variables) {
            found = invalid("arrays", "rank " + std::to_string(rank) +
                                          " has different variables from rank 0: their number, element sizes and "
                                          "staggering must be the same on all ranks, in the same order");
        }
        if (!found) {
            add_boxes(all, number, boxes[rank], arrays[rank]);
        }
    }
    found = found ? found : overlapping(all);
    if (found) {
        fail(std::move(*found));
    }
    return all;
}

/// Returns the position of another cell in an array. `offset` is its distance from the cell at `from`.
[[nodiscard]] inline array_place at_offset(array_place from, const cell_index &first, const cell_index &own) noexcept {
    from.first += (first[0] - own[0]) + (first[1] - own[1]) * from.row + (first[2] - own[2]) * from.plane;
    return from;
}

/// Function object that finds the regions to receive, for all variables that are staggered in the same dimensions.
class region_search {
  public:
    region_search(const division &division, const std::vector<box> &cells, const box_index &index,
                  std::array<bool, 3> kind)
        : all_(division), staggered_(kind), owned_(owned_elements(division.whole, cells, index, kind)),
          elements_(elements_in(cells, kind)) {}

    /// Adds all regions that box `to` receives to `found`. The keys of `found` are the sending and the receiving rank.
    void operator()(std::size_t to, std::map<std::pair<int, int>, std::vector<region>> &found) const {
        const rank_box &receiver = all_.boxes[to];
        const box own = elements_of(receiver.cells, staggered_);
        const box wanted = grown(own, all_.depth);
        for_each_image(all_.whole, [&](const cell_index &image) {
            elements_.for_each_in(moved(wanted, image, -1), [&](std::size_t from) {
                if (from == to && image == cell_index{}) {
                    return;
                }
                for (const box &part : owned_[from]) {
                    for_each_side(overlap(wanted, moved(part, image)), own, all_.whole.reach, [&](const box &cells) {
                        add(found[{all_.boxes[from].rank, receiver.rank}], cells, all_.boxes[from], image, receiver);
                    });
                }
            });
        });
    }

  private:
    [[nodiscard]] static box_index elements_in(std::vector<box> boxes, const std::array<bool, 3> &kind) {
        for (box &b : boxes) {
            b = elements_of(b, kind);
        }
        return box_index(std::move(boxes));
    }

    void add(std::vector<region> &to, const box &cells, const rank_box &sender, const cell_index &image,
             const rank_box &receiver) const {
        for (std::size_t v = 0; v < all_.variables.size(); ++v) {
            if (all_.variables[v].staggered == staggered_) {
                to.push_back({all_.variables[v].element_bytes, cells.cells, sender.array + v,
                              at_offset(sender.places[v], moved(cells, image, -1).first, sender.cells.first),
                              receiver.array + v, at_offset(receiver.places[v], cells.first, receiver.cells.first)});
            }
        }
    }

    const division &all_;
    std::array<bool, 3> staggered_;
    std::vector<std::vector<box>> owned_; ///< for each box: elements that it owns
    box_index elements_;
};

/// Returns all regions that ranks send to each other.
[[nodiscard]] inline connections connect(const division &all) {
    std::vector<box> cells;
    for (const rank_box &b : all.boxes) {
        cells.push_back(b.cells);
    }
    const box_index index(cells);
    std::map<std::array<bool, 3>, region_search> kinds;
    for (const variable &v : all.variables) {
        if (kinds.count(v.staggered) == 0) {
            kinds.emplace(v.staggered, region_search(all, cells, index, v.staggered));
        }
    }
    std::map<std::pair<int, int>, std::vector<region>> found;
    for (std::size_t to = 0; to < all.boxes.size(); ++to) {
        for (const auto &[staggered, search] : kinds) {
            search(to, found);
        }
    }
    connections made;
    made.ranks = static_cast<std::size_t>(all.ranks);
    for (auto &[ranks, regions] : found) {
        made.pairs.push_back({ranks.first, ranks.second, std::move(regions)});
    }
    return made;
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_DIVISION_HPP
