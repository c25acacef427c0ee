// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_SCHEDULE_HPP
#define MPGPU_HALO_SCHEDULE_HPP

/// @file
/// Schedules of halo exchanges. A schedule lists the cells that each rank sends to each other rank, and states which of
/// them are copied directly and which in packed messages. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/division.hpp>
#include <mpgpu/halo/pieces.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Division of a region into pieces that are contiguous in both arrays: `rows` x `planes` pieces of `length` cells
/// each.
struct pieces_of {
    std::int64_t length;
    std::int64_t rows;
    std::int64_t planes;
};

[[nodiscard]] inline pieces_of split(const region &r) noexcept {
    if (r.cells[0] != r.source.row || r.cells[0] != r.ghost.row) {
        return {r.cells[0], r.cells[1], r.cells[2]};
    }
    const std::int64_t plane = r.cells[0] * r.cells[1];
    if (plane != r.source.plane || plane != r.ghost.plane) {
        return {plane, 1, r.cells[2]};
    }
    return {plane * r.cells[2], 1, 1};
}

/// Returns the number of contiguous pieces of a region.
[[nodiscard]] inline std::uint64_t piece_count(const region &r) noexcept {
    const pieces_of pieces = split(r);
    return static_cast<std::uint64_t>(pieces.rows * pieces.planes);
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

/// Schedule: all pairs of ranks that exchange cells, ordered by sender, then by receiver. Equal on all ranks.
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

/// Returns the schedule of an exchange. `here(rank)` returns true if a rank is on this node. Between nodes all regions
/// are packed. All ranks of a node get equal entries for all pairs that contain one of these ranks.
template <class Here>
[[nodiscard]] schedule schedule_of(const connections &between, std::uint64_t direct_pieces, const Here &here) {
    schedule all;
    all.outbox_bytes.assign(between.ranks, 0);
    all.inbox_bytes.assign(between.ranks, 0);
    for (const connection &one : between.pairs) {
        rank_pair made{};
        made.from = one.from;
        made.to = one.to;
        made.on_node = here(one.from) == here(one.to);
        for (const region &r : one.regions) {
            (made.on_node && piece_count(r) <= direct_pieces ? made.direct : made.packed).push_back(r);
        }
        all.pairs.push_back(std::move(made));
    }
    for (rank_pair &p : all.pairs) {
        for (const region &r : p.packed) {
            p.bytes += aligned(bytes_of(r), piece_alignment);
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
[[nodiscard]] inline std::vector<std::uint64_t> limits_of(const connections &all, int ranks_in_a_plan) {
    constexpr std::uint64_t most_transfers = 16384;   // planning them takes about 40 ms
    std::map<std::uint64_t, std::uint64_t> transfers; // number of transfers, by number of pieces of the region
    for (const connection &one : all.pairs) {
        for (const region &r : one.regions) {
            transfers[piece_count(r)] += piece_count(r);
        }
    }
    std::uint64_t rows = 1;
    std::uint64_t made = 0;
    for (const auto &[count, number] : transfers) {
        made += number;
        if (made * static_cast<std::uint64_t>(ranks_in_a_plan) / all.ranks > most_transfers) {
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
[[nodiscard]] inline bool packs(const connections &all, std::uint64_t direct_pieces) {
    return std::any_of(all.pairs.begin(), all.pairs.end(), [direct_pieces](const connection &one) {
        return std::any_of(one.regions.begin(), one.regions.end(),
                           [direct_pieces](const region &r) { return piece_count(r) > direct_pieces; });
    });
}

/// Adds the packed regions of a message to `pieces`, as copies between `message` and the arrays of the sender or
/// receiver.
inline void add_pieces(std::vector<piece> &pieces, const rank_pair &p, const rank_arrays &arrays, std::byte *message,
                       direction way) {
    for (const region &r : p.packed) {
        const bool sends = way == direction::pack;
        const array_place &at = sends ? r.source : r.ghost;
        const rank_array &one = arrays[sends ? r.source_array : r.ghost_array];
        const auto bytes = [&r](std::int64_t elements) {
            return static_cast<std::uint64_t>(elements) * r.element_bytes;
        };
        pieces.push_back({static_cast<std::byte *>(one.data) + bytes(at.first),
                          message,
                          r.element_bytes,
                          {static_cast<std::uint64_t>(r.cells[0]), static_cast<std::uint64_t>(r.cells[1]),
                           static_cast<std::uint64_t>(r.cells[2])},
                          bytes(at.row),
                          bytes(at.plane)});
        message += aligned(bytes_of(r), piece_alignment);
    }
}

/// Calls `copy(r, to, from, bytes)` for each piece of a region `r` that is copied directly into ghost cells. `to` and
/// `from` are offsets in bytes in the arrays of the receiver and of the sender.
template <class Copy> void for_each_direct(const rank_pair &p, const Copy &copy) {
    for (const region &r : p.direct) {
        const pieces_of pieces = split(r);
        const auto bytes = [&r](std::int64_t elements) {
            return static_cast<std::uint64_t>(elements) * r.element_bytes;
        };
        const auto offset = [&bytes](const array_place &at, std::int64_t y, std::int64_t z) {
            return bytes(at.first + y * at.row + z * at.plane);
        };
        for (std::int64_t z = 0; z < pieces.planes; ++z) {
            for (std::int64_t y = 0; y < pieces.rows; ++y) {
                copy(r, offset(r.ghost, y, z), offset(r.source, y, z), bytes(pieces.length));
            }
        }
    }
}

/// Adds to `transfers` the transfers of all regions that are copied directly into ghost cells.
inline void add_direct(std::vector<transfer> &transfers, const rank_pair &p, const rank_arrays &from,
                       const rank_arrays &to) {
    for_each_direct(p, [&](const region &r, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes) {
        const rank_array &ghost = to[r.ghost_array];
        const rank_array &source = from[r.source_array];
        transfer copy{};
        copy.dst = static_cast<std::byte *>(ghost.data) + dst;
        copy.dst_device = ghost.location.id();
        copy.src = static_cast<const std::byte *>(source.data) + src;
        copy.src_device = source.location.id();
        copy.bytes = bytes;
        transfers.push_back(copy);
    });
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_SCHEDULE_HPP
