// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_BOXES_REFERENCE_HPP
#define MPGPU_TESTS_BOXES_REFERENCE_HPP

/// @file
/// Random halo exchanges between boxes, with padded arrays, staggered variables and any number of layers, and the value
/// that every element of every array must have after an exchange. For each element, the reference looks up the box of
/// each adjacent cell. It uses no function of the library.

#include "halo_part.hpp"
#include "halo_reference.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace boxes_reference {

namespace halo = mpgpu::halo;
using cell = std::array<std::int64_t, 3>;
using random_engine = std::mt19937_64;

/// Returns a number in [least, most].
inline std::int64_t any(random_engine &random, std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
}

/// Returns the number in an environment variable, or `otherwise` if it is not set.
inline std::uint64_t number_from(const char *variable, std::uint64_t otherwise) {
    const char *const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Layout of an array, with all values given.
struct full_layout {
    cell low;  ///< ghost widths
    cell high; ///< ghost widths
    std::int64_t row;
    std::int64_t plane;
    std::size_t elements;
};

/// Halo exchange: the arguments of all ranks.
struct problem {
    std::optional<halo::grid> grid; ///< grid that has these boxes, if any
    halo::domain whole;
    std::optional<halo::layers> depth;
    std::vector<halo::rank_boxes> boxes;
    std::vector<std::size_t> bytes;                      ///< for each variable: size of an element
    std::vector<std::array<bool, 3>> staggered;          ///< for each variable
    std::vector<std::vector<full_layout>> whole_layouts; ///< for each rank and array
    std::vector<std::vector<std::optional<halo::array_layout>>> given_layouts; ///< those passed to the library

    [[nodiscard]] int ranks() const { return static_cast<int>(boxes.size()); }
    [[nodiscard]] halo::layers exchanged() const { return depth.value_or(whole.ghost); }
};

/// Divides a box at random into `count` boxes. Returns fewer boxes if it has too few cells.
inline std::vector<halo::box> bisected(const halo::box &whole, std::size_t count, random_engine &random) {
    std::vector<halo::box> boxes = {whole};
    for (std::size_t tries = 0; boxes.size() < count && tries < 20 * count; ++tries) {
        halo::box &one = boxes[random() % boxes.size()];
        const auto d = static_cast<std::size_t>(any(random, 0, 2));
        if (one.cells.at(d) < 2) {
            continue;
        }
        halo::box rest = one;
        one.cells.at(d) = any(random, 1, one.cells.at(d) - 1);
        rest.first.at(d) += one.cells.at(d);
        rest.cells.at(d) -= one.cells.at(d);
        boxes.push_back(rest);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    return boxes;
}

/// Sets the domain and the boxes of a problem with `ranks` ranks.
inline void draw_boxes(problem &p, int ranks, random_engine &random) {
    std::vector<halo::box> boxes;
    do {
        for (std::size_t d = 0; d < 3; ++d) {
            p.whole.cells.first.at(d) = any(random, -5, 5);
            p.whole.cells.cells.at(d) = any(random, 0, 2) == 0 ? 1 : any(random, 1, 12);
            p.whole.periodic.at(d) = any(random, 0, 1) == 1;
        }
        const auto count = static_cast<std::size_t>(ranks * any(random, 1, any(random, 0, 1) == 0 ? 1 : 3));
        boxes = bisected(p.whole.cells, count + static_cast<std::size_t>(any(random, 0, 2)), random);
    } while (boxes.size() < static_cast<std::size_t>(ranks));
    const std::size_t left_out =
        any(random, 0, 1) == 0 ? 0 : random() % (boxes.size() - static_cast<std::size_t>(ranks) + 1);
    boxes.resize(boxes.size() - left_out); // cells of these boxes belong to no rank
    p.boxes.assign(static_cast<std::size_t>(ranks), {});
    for (std::size_t i = 0; i < boxes.size(); ++i) {
        p.boxes[i < p.boxes.size() ? i : random() % p.boxes.size()].push_back(boxes[i]);
    }
    p.whole.reach = static_cast<halo::neighbours>(any(random, 1, 3));
}

/// Sets the domain and the boxes of a problem to those of a random grid.
inline void draw_grid(problem &p, int ranks, random_engine &random) {
    std::mt19937 of_grid(static_cast<unsigned>(random()));
    halo::grid g = halo_reference::random_problem(of_grid, ranks).first;
    p.whole = {{{0, 0, 0}, g.cells}, g.periodic, {g.ghost, g.ghost}, g.reach};
    p.boxes.assign(static_cast<std::size_t>(ranks), {});
    g.order = any(random, 0, 1) == 0 ? halo::rank_order::x_first : halo::rank_order::z_first;
    int number = 0;
    for (int x = 0; x < g.ranks[0]; ++x) { // ranks are numbered by their order in these loops
        for (int y = 0; y < g.ranks[1]; ++y) {
            for (int z = 0; z < g.ranks[2]; ++z, ++number) {
                const int by_x = x + g.ranks[0] * (y + g.ranks[1] * z);
                const auto [first, cells] = halo_reference::own(g, by_x);
                const int rank = g.order == halo::rank_order::z_first ? number : by_x;
                p.boxes[static_cast<std::size_t>(rank)] = {{first, cells}};
            }
        }
    }
    p.grid = g;
    if (any(random, 0, 2) == 0) { // ranks in another order are described by boxes
        p.grid = std::nullopt;
        std::shuffle(p.boxes.begin(), p.boxes.end(), random);
    }
}

/// Sets the layouts of the arrays of all boxes of a rank.
inline void draw_layouts(problem &p, const halo::rank_boxes &boxes, random_engine &random) {
    std::vector<full_layout> &full = p.whole_layouts.emplace_back();
    std::vector<std::optional<halo::array_layout>> &given = p.given_layouts.emplace_back();
    const halo::layers depth = p.exchanged();
    for (const halo::box &own : boxes) {
        for (std::size_t v = 0; v < p.bytes.size(); ++v) {
            const bool is_default = p.staggered[v] == std::array<bool, 3>{} && any(random, 0, 2) == 0;
            full_layout made{p.whole.ghost.low, p.whole.ghost.high, 0, 0, 0};
            halo::array_layout passed;
            cell extents{};
            for (std::size_t d = 0; d < 3; ++d) {
                if (!is_default) {
                    made.low.at(d) = depth.low.at(d) + any(random, 0, 2) * any(random, 0, 1);
                    made.high.at(d) = depth.high.at(d) + any(random, 0, 2) * any(random, 0, 1);
                }
                extents.at(d) = made.low.at(d) + own.cells.at(d) + (p.staggered[v].at(d) ? 1 : 0) + made.high.at(d);
            }
            passed.row = is_default || any(random, 0, 1) == 0 ? 0 : extents[0] + any(random, 0, 3);
            made.row = passed.row != 0 ? passed.row : extents[0];
            passed.plane = is_default || any(random, 0, 1) == 0 ? 0 : made.row * extents[1] + any(random, 0, 5);
            made.plane = passed.plane != 0 ? passed.plane : made.row * extents[1];
            made.elements =
                static_cast<std::size_t>(made.plane * (extents[2] - 1) + made.row * (extents[1] - 1) + extents[0]);
            if (passed.row != 0 || passed.plane != 0) {
                made.elements += static_cast<std::size_t>(any(random, 0, 4));
            }
            passed.ghost = {made.low, made.high};
            passed.staggered = p.staggered[v];
            full.push_back(made);
            given.push_back(is_default ? std::nullopt : std::optional(passed));
        }
    }
}

/// Returns a random problem with `ranks` ranks.
inline problem random_problem(random_engine &random, int ranks) {
    problem p;
    if (any(random, 0, 2) == 0) {
        draw_grid(p, ranks, random);
    } else {
        draw_boxes(p, ranks, random);
    }
    const bool staggers = any(random, 0, 1) == 1;
    p.bytes.resize(static_cast<std::size_t>(any(random, 1, 4)));
    for (std::size_t &bytes : p.bytes) {
        bytes = std::array<std::size_t, 4>{4, 8, 8, 12}.at(random() % 4);
        std::array<bool, 3> &kind = p.staggered.emplace_back();
        for (bool &in : kind) {
            in = staggers && any(random, 0, 2) == 0;
        }
    }
    halo::layers depth;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t most = p.whole.periodic.at(d) ? p.whole.cells.cells.at(d) - (staggers ? 1 : 0) : 4;
        depth.low.at(d) = any(random, 0, std::min<std::int64_t>(most, 3));
        depth.high.at(d) = any(random, 0, 1) == 0 ? depth.low.at(d) : any(random, 0, std::min<std::int64_t>(most, 4));
        if (!p.grid) {
            p.whole.ghost.low.at(d) = depth.low.at(d) + any(random, 0, 1);
            p.whole.ghost.high.at(d) = depth.high.at(d) + any(random, 0, 1);
        } else { // arrays without a layout have the ghost widths of the grid
            depth.low.at(d) = std::min(depth.low.at(d), p.grid->ghost.at(d));
            depth.high.at(d) = std::min(depth.high.at(d), p.grid->ghost.at(d));
        }
    }
    bool possible = true; // without options::depth, all ghost cells of the domain are exchanged
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t most = p.whole.cells.cells.at(d) - (staggers ? 1 : 0);
        possible = possible &&
                   (!p.whole.periodic.at(d) || std::max(p.whole.ghost.low.at(d), p.whole.ghost.high.at(d)) <= most);
    }
    if (!possible || any(random, 0, 3) != 0) {
        p.depth = depth;
    }
    for (const halo::rank_boxes &boxes : p.boxes) {
        draw_layouts(p, boxes, random);
    }
    return p;
}

/// Returns a problem with the same boxes and depth, but with other variables and layouts.
inline problem with_other_arrays(problem p, random_engine &random) {
    if (p.bytes.size() > 1) {
        p.bytes.pop_back();
        p.staggered.pop_back();
    }
    p.bytes[0] = p.bytes[0] == 8 ? 4 : 8;
    p.whole_layouts.clear();
    p.given_layouts.clear();
    for (const halo::rank_boxes &boxes : p.boxes) {
        draw_layouts(p, boxes, random);
    }
    return p;
}

/// Wraps a position into the domain in periodic dimensions.
inline cell wrapped(const problem &p, cell position) {
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t first = p.whole.cells.first.at(d);
        const std::int64_t count = p.whole.cells.cells.at(d);
        if (p.whole.periodic.at(d)) {
            position.at(d) = first + ((position.at(d) - first) % count + count) % count;
        }
    }
    return position;
}

/// Box of a rank, or a periodic image of it.
struct box_number {
    std::size_t rank;
    std::size_t box;
    bool is_image;
};

/// Returns the box that contains a cell, which must be wrapped. Returns nothing if there is none.
inline std::optional<box_number> box_at(const problem &p, const cell &at) {
    for (std::size_t rank = 0; rank < p.boxes.size(); ++rank) {
        for (std::size_t b = 0; b < p.boxes[rank].size(); ++b) {
            bool inside = true;
            for (std::size_t d = 0; d < 3; ++d) {
                const std::int64_t offset = at.at(d) - p.boxes[rank][b].first.at(d);
                inside = inside && offset >= 0 && offset < p.boxes[rank][b].cells.at(d);
            }
            if (inside) {
                return box_number{rank, b, false};
            }
        }
    }
    return std::nullopt;
}

/// Returns the box that owns the element of variable `v` at a position: that of the first adjacent cell which is in a
/// box. Cells at the high side come first: in z, then in y, then in x.
inline std::optional<box_number> owner(const problem &p, std::size_t v, const cell &at) {
    const auto last = [&](std::size_t d) { return p.staggered[v].at(d) ? 1 : 0; };
    for (int z = 0; z <= last(2); ++z) {
        for (int y = 0; y <= last(1); ++y) {
            for (int x = 0; x <= last(0); ++x) {
                const cell near = {at[0] - x, at[1] - y, at[2] - z};
                std::optional<box_number> found = box_at(p, wrapped(p, near));
                if (found) {
                    found->is_image = near != wrapped(p, near);
                    return found;
                }
            }
        }
    }
    return std::nullopt;
}

/// Element of an array.
struct element {
    std::size_t index; ///< index in memory
    cell at;           ///< position in the mesh, not wrapped
    bool own;          ///< true if the box owns it
    bool received;     ///< true if an exchange sets it
    std::size_t from;  ///< rank that owns it, if it is received
};

/// Returns all elements of an array that are not padding.
inline std::vector<element> elements_of(const problem &p, std::size_t rank, std::size_t array) {
    const std::size_t b = array / p.bytes.size();
    const std::size_t v = array % p.bytes.size();
    const halo::box &own = p.boxes[rank][b];
    const full_layout &layout = p.whole_layouts[rank][array];
    const halo::layers depth = p.exchanged();
    std::vector<element> all;
    const auto end = [&](std::size_t d) { return own.cells.at(d) + (p.staggered[v].at(d) ? 1 : 0); };
    cell i{};
    for (i[2] = -layout.low[2]; i[2] < end(2) + layout.high[2]; ++i[2]) {
        for (i[1] = -layout.low[1]; i[1] < end(1) + layout.high[1]; ++i[1]) {
            for (i[0] = -layout.low[0]; i[0] < end(0) + layout.high[0]; ++i[0]) {
                int crossed = 0;
                bool within = true;
                element e{};
                e.at = {own.first[0] + i[0], own.first[1] + i[1], own.first[2] + i[2]};
                e.index = static_cast<std::size_t>((i[2] + layout.low[2]) * layout.plane +
                                                   (i[1] + layout.low[1]) * layout.row + i[0] + layout.low[0]);
                for (std::size_t d = 0; d < 3; ++d) {
                    crossed += i.at(d) < 0 || i.at(d) >= end(d) ? 1 : 0;
                    within = within && i.at(d) >= -depth.low.at(d) && i.at(d) < end(d) + depth.high.at(d);
                }
                const std::optional<box_number> of = owner(p, v, e.at);
                e.own = crossed == 0 && of && of->rank == rank && of->box == b && !of->is_image;
                e.received = !e.own && of && within && crossed <= static_cast<int>(p.whole.reach);
                e.from = of ? of->rank : 0;
                all.push_back(e);
            }
        }
    }
    return all;
}

/// Returns true if each rank receives elements from every rank to which it sends some, and from at most 27 ranks.
inline bool can_be_pushed(const problem &p) {
    const std::size_t ranks = p.boxes.size();
    std::vector<bool> sends(ranks * ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        for (std::size_t i = 0; i < p.whole_layouts[rank].size(); ++i) {
            for (const element &e : elements_of(p, rank, i)) {
                if (e.received) {
                    sends[e.from * ranks + rank] = true;
                }
            }
        }
    }
    bool can = ranks <= 27;
    for (std::size_t pair = 0; pair < ranks * ranks; ++pair) {
        can = can && sends[pair] == sends[pair % ranks * ranks + pair / ranks];
    }
    return can;
}

/// Arrays of one rank on its device, and copies of them in host memory.
class part {
  public:
    part(const mpgpu::context &ctx, const problem &all, std::size_t rank)
        : problem_(&all), rank_(rank), where_(halo_test::device_of(ctx, static_cast<int>(rank))) {
        std::vector<mpgpu::transfer> up;
        std::vector<mpgpu::transfer> down;
        for (std::size_t i = 0; i < all.whole_layouts[rank].size(); ++i) {
            const std::size_t bytes = all.bytes[i % all.bytes.size()];
            const std::size_t elements = all.whole_layouts[rank][i].elements;
            mpgpu::memory &there = on_device_.emplace_back(ctx, where_, elements * bytes);
            mpgpu::memory &here = on_host_.emplace_back(ctx, mpgpu::device::host(), elements * bytes);
            arrays_.push_back({there.data(), where_, bytes, elements, all.given_layouts[rank][i]});
            up.push_back(mpgpu::make_transfer(there, here));
            down.push_back(mpgpu::make_transfer(here, there));
            elements_.push_back(elements_of(all, rank, i));
        }
        upload_.emplace(ctx, up);
        download_.emplace(ctx, down);
    }

    [[nodiscard]] mpgpu::device where() const noexcept { return where_; }
    [[nodiscard]] const halo::rank_arrays &arrays() const noexcept { return arrays_; }

    void upload(mpgpu::stream_view stream) const { upload_->enqueue(stream); }
    void download(mpgpu::stream_view stream) const { download_->enqueue(stream); }

    /// Sets the elements that the rank owns to the values of a cycle, and all other memory to `untouched`.
    void fill(std::uint64_t cycle) {
        for (std::size_t i = 0; i < on_host_.size(); ++i) {
            expect(i, cycle, false);
            std::memcpy(on_host_[i].data(), expected_.data(), expected_.size());
        }
    }

    /// Returns a description of the first byte that is wrong after an exchange. Padding is compared too. The text is
    /// empty if all bytes are right.
    [[nodiscard]] std::string first_difference(std::uint64_t cycle) const {
        for (std::size_t i = 0; i < on_host_.size(); ++i) {
            expect(i, cycle, true);
            if (std::memcmp(on_host_[i].data(), expected_.data(), expected_.size()) == 0) {
                continue;
            }
            const std::size_t bytes = arrays_[i].element_bytes;
            const std::string what =
                "cycle " + std::to_string(cycle) + ", rank " + std::to_string(rank_) + ", array " + std::to_string(i);
            for (const element &e : elements_[i]) {
                if (std::memcmp(on_host_[i].data() + e.index * bytes, expected_.data() + e.index * bytes, bytes) != 0) {
                    return what + ": wrong at (" + std::to_string(e.at[0]) + ", " + std::to_string(e.at[1]) + ", " +
                           std::to_string(e.at[2]) + "), " +
                           (e.own        ? "an own element"
                            : e.received ? "an element that is received"
                                         : "an element that must not change");
                }
            }
            return what + ": padding is overwritten";
        }
        return {};
    }

    /// Returns the number of bytes that this rank receives in an exchange.
    [[nodiscard]] std::uint64_t received_bytes() const {
        std::uint64_t bytes = 0;
        for (std::size_t i = 0; i < elements_.size(); ++i) {
            for (const element &e : elements_[i]) {
                bytes += e.received ? arrays_[i].element_bytes : 0;
            }
        }
        return bytes;
    }

  private:
    /// Sets `expected_` to the contents of an array before or after an exchange.
    void expect(std::size_t array, std::uint64_t cycle, bool exchanged) const {
        const std::size_t bytes = arrays_[array].element_bytes;
        expected_.assign(arrays_[array].size * bytes, halo_reference::untouched);
        for (const element &e : elements_[array]) {
            if (!e.own && !(e.received && exchanged)) {
                continue;
            }
            const cell at = wrapped(*problem_, e.at);
            std::uint64_t number = cycle;
            for (std::size_t d = 0; d < 3; ++d) {
                number = number * 64 + static_cast<std::uint64_t>(at.at(d) - problem_->whole.cells.first.at(d));
            }
            number = (number * 64 + array % problem_->bytes.size() + 1) * 0x9E3779B97F4A7C15U;
            for (std::size_t b = 0; b < bytes; ++b) {
                expected_[e.index * bytes + b] = static_cast<unsigned char>(number >> (8 * (b % 8)));
            }
        }
    }

    const problem *problem_;
    std::size_t rank_;
    mpgpu::device where_;
    std::vector<mpgpu::memory> on_device_;
    std::vector<mpgpu::memory> on_host_;
    halo::rank_arrays arrays_;
    std::vector<std::vector<element>> elements_; ///< for each array
    std::optional<mpgpu::plan> upload_;
    std::optional<mpgpu::plan> download_;
    mutable std::vector<unsigned char> expected_;
};

/// Returns random options for a problem, without `options::pushed`.
inline halo::options random_options(const mpgpu::context &ctx, const problem &p, random_engine &random) {
    constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();
    halo::options how = halo_test::options_for(ctx);
    how.depth = p.depth;
    how.direct_pieces = std::array<std::optional<std::uint64_t>, 5>{0, 1, 5, never_pack, std::nullopt}.at(random() % 5);
    return how;
}

/// Executes random exchanges of a random problem, whose ranks are all in this process. Returns a description of the
/// first difference from the reference, or an empty text.
inline std::string difference_in_one_process(const mpgpu::context &ctx, std::uint64_t seed) {
    random_engine random(seed);
    const problem p = random_problem(random, static_cast<int>(any(random, 1, 8)));
    halo::options how = random_options(ctx, p, random);
    how.pushed = how.direct_pieces || any(random, 0, 2) != 0 ? std::nullopt : std::optional<bool>(true);
    const problem other = with_other_arrays(p, random);
    std::vector<std::vector<part>> sets(static_cast<std::size_t>(any(random, 1, 3))); // arrays that are swapped
    std::vector<std::vector<halo::rank_arrays>> arrays(sets.size());
    for (std::size_t set = 0; set < sets.size(); ++set) {
        for (std::size_t rank = 0; rank < p.boxes.size(); ++rank) {
            arrays[set].push_back(sets[set].emplace_back(ctx, set == 1 ? other : p, rank).arrays());
        }
    }
    halo::plan plan =
        p.grid ? halo::plan(ctx, *p.grid, arrays[0], how) : halo::plan(ctx, p.whole, p.boxes, arrays[0], how);
    for (std::size_t set = 1; set < sets.size(); ++set) {
        static_cast<void>(plan.add(ctx, arrays[set]));
    }
    std::uint64_t bytes = 0;
    for (const part &one : sets[0]) {
        bytes += one.received_bytes();
    }
    const std::string name = "seed " + std::to_string(seed) + ": ";
    if (plan.sets() != sets.size() || plan.direct_bytes() + plan.packed_bytes() != bytes) {
        return name + std::to_string(plan.direct_bytes() + plan.packed_bytes()) + " bytes instead of " +
               std::to_string(bytes);
    }
    const mpgpu::stream stream(ctx, sets[0].back().where());
    for (std::uint64_t cycle = 1; cycle <= 4; ++cycle) {
        const std::size_t set = random() % sets.size();
        for (part &one : sets[set]) {
            one.fill(cycle);
            one.upload(stream);
        }
        if (any(random, 0, 1) == 0) {
            plan.exchange(stream, set);
        } else {
            plan.start(stream, set);
            plan.finish(stream);
        }
        for (const part &one : sets[set]) {
            one.download(stream);
        }
        stream.synchronize();
        for (const part &one : sets[set]) {
            const std::string difference = one.first_difference(cycle);
            if (!difference.empty()) {
                return name + difference;
            }
        }
    }
    return {};
}

} // namespace boxes_reference

#endif // MPGPU_TESTS_BOXES_REFERENCE_HPP
