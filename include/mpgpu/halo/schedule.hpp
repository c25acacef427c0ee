// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_SCHEDULE_HPP
#define MPGPU_HALO_SCHEDULE_HPP

/// @file
/// Schedules of halo exchanges: the cells that each rank sends to each other rank, directly or in packed messages. Part
/// of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/pieces.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Region: box of computed cells of a sender that is copied to ghost cells of a receiver.
struct region {
    std::array<std::int64_t, 3> source; ///< index of the first cell to send, in the sender's array
    std::array<std::int64_t, 3> ghost;  ///< index of the first ghost cell, in the receiver's array
    std::array<std::int64_t, 3> cells;
};

/// Division of a region into pieces that are contiguous in both arrays: `rows` x `planes` pieces of `length` cells
/// each.
struct pieces_of {
    std::int64_t length;
    std::int64_t rows;
    std::int64_t planes;
};

[[nodiscard]] inline pieces_of split(const region &r, const std::array<std::int64_t, 3> &from,
                                     const std::array<std::int64_t, 3> &to) noexcept {
    const auto whole = [&](std::size_t d) { return r.cells[d] == from[d] && r.cells[d] == to[d]; };
    if (!whole(0)) {
        return {r.cells[0], r.cells[1], r.cells[2]};
    }
    if (!whole(1)) {
        return {r.cells[0] * r.cells[1], 1, r.cells[2]};
    }
    return {r.cells[0] * r.cells[1] * r.cells[2], 1, 1};
}

/// Pair of a sending and a receiving rank, with all regions that are copied from one to the other. Both may be the same
/// rank.
struct rank_pair {
    int from;
    int to;
    std::vector<region> direct;
    std::vector<region> packed;
    bool on_node = true;             ///< true if both ranks are on this node, or neither is
    std::uint64_t bytes = 0;         ///< size of the packed message in bytes
    std::uint64_t outbox_offset = 0; ///< offset in the sender's outbox (buffer of sent messages), bytes
    std::uint64_t inbox_offset = 0;  ///< offset in the receiver's inbox, bytes; unused if both ranks are the same
};

/// Schedule: all pairs of ranks of a grid that exchange cells, ordered by sender, then by receiver. Equal on all ranks.
struct schedule {
    std::vector<rank_pair> pairs;
    std::vector<std::uint64_t> outbox_bytes; ///< for each rank: size of its buffer of sent messages, bytes
    std::vector<std::uint64_t> inbox_bytes;  ///< for each rank: size of its buffer of received messages, bytes
};

constexpr std::uint64_t piece_alignment = 16;
constexpr std::uint64_t message_alignment =
    256; // alignment of mp_alloc, so that messages are copied as fast as whole allocations

[[nodiscard]] constexpr std::uint64_t aligned(std::uint64_t bytes, std::uint64_t to) noexcept {
    return (bytes + to - 1) / to * to;
}

[[nodiscard]] inline std::uint64_t cells_of(const region &r) noexcept {
    return static_cast<std::uint64_t>(r.cells[0] * r.cells[1] * r.cells[2]);
}

/// Returns the rank at the relative position `step` in the grid of ranks. Returns nothing if there is none.
[[nodiscard]] inline std::optional<int> neighbour(const grid &g, int rank, const std::array<int, 3> &step) noexcept {
    const std::array<int, 3> ranks = mesh_ranks(g);
    std::array<int, 3> place = place_of(g, rank);
    for (std::size_t d = 0; d < 3; ++d) {
        place[d] += step[d];
        if (place[d] < 0 || place[d] >= ranks[d]) {
            if (!g.periodic[d]) {
                return std::nullopt;
            }
            place[d] = (place[d] + ranks[d]) % ranks[d];
        }
    }
    return place[0] + ranks[0] * (place[1] + ranks[1] * place[2]);
}

/// Returns the region that rank `to` receives from rank `from`. `from` is the neighbour of `to` in the direction
/// `step`.
[[nodiscard]] inline region region_of(const grid &g, int from, int to, const std::array<int, 3> &step) noexcept {
    const box source = box_of(g, from);
    const box own = box_of(g, to);
    region r{};
    for (std::size_t d = 0; d < 3; ++d) {
        // The first computed cell has the array index ghost[d]. In dimensions in which `step` is 0, both ranks have the
        // same cells.
        r.cells[d] = step[d] == 0 ? own.cells[d] : g.ghost[d];
        r.source[d] = step[d] < 0 ? source.cells[d] : g.ghost[d];
        r.ghost[d] = step[d] < 0 ? 0 : (step[d] == 0 ? g.ghost[d] : g.ghost[d] + own.cells[d]);
    }
    return r;
}

/// Returns all directions in which ranks of a grid exchange cells with neighbours.
[[nodiscard]] inline std::vector<std::array<int, 3>> steps_of(const grid &g) {
    std::vector<std::array<int, 3>> steps;
    for (int z = -1; z <= 1; ++z) {
        for (int y = -1; y <= 1; ++y) {
            for (int x = -1; x <= 1; ++x) {
                const std::array<int, 3> step = {x, y, z};
                int crossed = 0;
                bool ghosts = true;
                for (std::size_t d = 0; d < 3; ++d) {
                    crossed += step[d] != 0 ? 1 : 0;
                    ghosts = ghosts && (step[d] == 0 || g.ghost[d] > 0);
                }
                if (crossed > 0 && crossed <= static_cast<int>(g.reach) && ghosts) {
                    steps.push_back(step);
                }
            }
        }
    }
    return steps;
}

/// Returns the schedule of a grid. `here(rank)` returns true if a rank is on this node. Between nodes all regions are
/// packed. All ranks of a node get equal entries for all pairs that contain one of these ranks.
template <class Here>
[[nodiscard]] schedule schedule_of(const grid &g, const std::vector<std::size_t> &element_bytes,
                                   std::uint64_t direct_pieces, const Here &here) {
    const auto ranks = static_cast<std::size_t>(rank_count(g));
    const std::vector<std::array<int, 3>> steps = steps_of(g);
    schedule all;
    all.outbox_bytes.assign(ranks, 0);
    all.inbox_bytes.assign(ranks, 0);
    for (int from = 0; from < static_cast<int>(ranks); ++from) {
        const std::size_t first = all.pairs.size();
        for (const std::array<int, 3> &step : steps) {
            const std::optional<int> to = neighbour(g, from, {-step[0], -step[1], -step[2]});
            if (!to) {
                continue;
            }
            auto found = std::find_if(all.pairs.begin() + static_cast<std::ptrdiff_t>(first), all.pairs.end(),
                                      [&](const rank_pair &p) { return p.to == *to; });
            if (found == all.pairs.end()) {
                rank_pair made{};
                made.from = from;
                made.to = *to;
                made.on_node = here(from) == here(*to);
                found = all.pairs.insert(found, std::move(made));
            }
            const region r = region_of(g, from, *to, step);
            const pieces_of pieces = split(r, array_extents(g, from), array_extents(g, *to));
            const bool direct =
                found->on_node && static_cast<std::uint64_t>(pieces.rows * pieces.planes) <= direct_pieces;
            (direct ? found->direct : found->packed).push_back(r);
        }
        std::sort(all.pairs.begin() + static_cast<std::ptrdiff_t>(first), all.pairs.end(),
                  [](const rank_pair &a, const rank_pair &b) { return a.to < b.to; });
    }
    for (rank_pair &p : all.pairs) {
        for (const region &r : p.packed) {
            for (const std::size_t bytes : element_bytes) {
                p.bytes += aligned(cells_of(r) * bytes, piece_alignment);
            }
        }
        std::uint64_t &outbox = all.outbox_bytes[static_cast<std::size_t>(p.from)];
        std::uint64_t &inbox = all.inbox_bytes[static_cast<std::size_t>(p.to)];
        p.outbox_offset = outbox;
        outbox += aligned(p.bytes, message_alignment);
        if (p.from != p.to) {
            p.inbox_offset = inbox;
            inbox += aligned(p.bytes, message_alignment);
        }
    }
    return all;
}

/// Returns the values of `options::direct_pieces` that are worth measuring. Each of them leads to a different schedule:
/// 0 (no direct copies), 1 (direct copies of regions that are contiguous), and the largest value that leads to at most
/// 16384 transfers in a plan of `ranks_in_a_plan` ranks. The result is equal on all ranks, even if they are on
/// different nodes.
[[nodiscard]] inline std::vector<std::uint64_t> limits_of(const grid &g, const std::vector<std::size_t> &element_bytes,
                                                          int ranks_in_a_plan) {
    constexpr std::uint64_t most_transfers = 16384; // planning them takes about 40 ms
    constexpr std::uint64_t any = std::numeric_limits<std::uint64_t>::max();
    const schedule all = schedule_of(g, element_bytes, any, [](int) { return true; });
    std::map<std::uint64_t, std::uint64_t> transfers; // number of transfers, by number of pieces of the region
    for (const rank_pair &p : all.pairs) {
        for (const region &r : p.direct) {
            const pieces_of pieces = split(r, array_extents(g, p.from), array_extents(g, p.to));
            const auto count = static_cast<std::uint64_t>(pieces.rows * pieces.planes);
            transfers[count] += count * element_bytes.size();
        }
    }
    std::uint64_t rows = 1;
    std::uint64_t made = 0;
    for (const auto &[count, number] : transfers) {
        made += number;
        if (made * static_cast<std::uint64_t>(ranks_in_a_plan) / all.outbox_bytes.size() > most_transfers) {
            break;
        }
        rows = count;
    }
    std::vector<std::uint64_t> limits = {0};
    if (transfers.count(1) != 0) {
        limits.push_back(1);
    }
    if (rows > 1) {
        limits.push_back(rows);
    }
    return limits;
}

/// Returns true if a schedule with this value of `options::direct_pieces` packs at least one region. Assumes that all
/// ranks are on one node.
[[nodiscard]] inline bool packs(const grid &g, std::uint64_t direct_pieces) {
    const schedule all = schedule_of(g, {1}, direct_pieces, [](int) { return true; });
    return std::any_of(all.pairs.begin(), all.pairs.end(), [](const rank_pair &p) { return !p.packed.empty(); });
}

/// Adds the packed regions of a message to `pieces`, as copies between `message` and the arrays of the sender or
/// receiver.
inline void add_pieces(std::vector<piece> &pieces, const rank_pair &p, const grid &g, const rank_arrays &arrays,
                       std::byte *message, direction way) {
    const std::array<std::int64_t, 3> e = array_extents(g, way == direction::pack ? p.from : p.to);
    for (const region &r : p.packed) {
        const std::array<std::int64_t, 3> &at = way == direction::pack ? r.source : r.ghost;
        for (const rank_array &one : arrays) {
            const auto row = static_cast<std::uint64_t>(e[0]) * one.element_bytes;
            const auto plane = static_cast<std::uint64_t>(e[1]) * row;
            std::byte *cells = static_cast<std::byte *>(one.data) +
                               static_cast<std::uint64_t>(at[0]) * one.element_bytes +
                               static_cast<std::uint64_t>(at[1]) * row + static_cast<std::uint64_t>(at[2]) * plane;
            pieces.push_back({cells,
                              message,
                              one.element_bytes,
                              {static_cast<std::uint64_t>(r.cells[0]), static_cast<std::uint64_t>(r.cells[1]),
                               static_cast<std::uint64_t>(r.cells[2])},
                              row,
                              plane});
            message += aligned(cells_of(r) * one.element_bytes, piece_alignment);
        }
    }
}

/// Calls `copy(v, to, from, bytes)` for each piece that is copied directly into ghost cells. `v` is the index of the
/// variable. `to` and `from` are offsets in bytes in the arrays of the receiver and of the sender.
template <class Copy>
void for_each_direct(const rank_pair &p, const grid &g, const std::vector<std::size_t> &element_bytes,
                     const Copy &copy) {
    const std::array<std::int64_t, 3> source = array_extents(g, p.from);
    const std::array<std::int64_t, 3> ghost = array_extents(g, p.to);
    const auto offset = [](const std::array<std::int64_t, 3> &at, const std::array<std::int64_t, 3> &e, std::int64_t y,
                           std::int64_t z) { return at[0] + e[0] * (at[1] + y + e[1] * (at[2] + z)); };
    for (const region &r : p.direct) {
        const pieces_of pieces = split(r, source, ghost);
        for (std::size_t v = 0; v < element_bytes.size(); ++v) {
            const auto bytes = static_cast<std::int64_t>(element_bytes[v]);
            for (std::int64_t z = 0; z < pieces.planes; ++z) {
                for (std::int64_t y = 0; y < pieces.rows; ++y) {
                    copy(v, static_cast<std::uint64_t>(offset(r.ghost, ghost, y, z) * bytes),
                         static_cast<std::uint64_t>(offset(r.source, source, y, z) * bytes),
                         static_cast<std::uint64_t>(pieces.length * bytes));
                }
            }
        }
    }
}

/// Adds to `transfers` the transfers of all regions that are copied directly into ghost cells.
inline void add_direct(std::vector<transfer> &transfers, const rank_pair &p, const grid &g, const rank_arrays &from,
                       const rank_arrays &to) {
    for_each_direct(p, g, element_sizes(from),
                    [&](std::size_t v, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) {
                        transfer copy{};
                        copy.dst = static_cast<std::byte *>(to[v].data) + dst;
                        copy.dst_device = to[v].location.id();
                        copy.src = static_cast<const std::byte *>(from[v].data) + src;
                        copy.src_device = from[v].location.id();
                        copy.bytes = bytes;
                        transfers.push_back(copy);
                    });
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_SCHEDULE_HPP
