// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_PAIRS_HPP
#define MPGPU_HALO_INDEX_PAIRS_HPP

/// @file
/// Agreement of all ranks on the messages of an exchange by index lists. Part of mpgpu/halo_indexed.hpp; include that
/// header.

#include <mpgpu/halo/index_lists.hpp>
#include <mpgpu/halo/processes.hpp>
#include <mpgpu/halo/schedule.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace mpgpu::halo::detail {

/// Values that a rank sends to another rank when the `indexed` object is created: the lengths of its lists for the
/// other rank and, if both ranks are on one node, where in the sender's own inbox the other rank must write its
/// message. Trivially copyable.
struct index_offer {
    std::uint64_t sends;       ///< number of entries that the rank sends to the other
    std::uint64_t receives;    ///< number of entries that the rank expects from the other
    std::uint64_t entry_bytes; ///< `index_options::entry_bytes`
    std::uint64_t offset;      ///< offset of the message in the first half of the inbox, bytes
    std::uint64_t flag_offset; ///< offset of the message's flag in the inbox, bytes
    std::uint64_t half;        ///< size of one half of the inbox, bytes
    std::uint64_t bytes;       ///< size of the inbox, bytes
};
static_assert(std::is_trivially_copyable_v<index_offer>);

/// Returns the size of the memory for a message to or from a neighbour, bytes. The operation of an exchange determines
/// which of the two lists is sent.
[[nodiscard]] inline std::uint64_t room_for(const index_neighbour &n, std::uint64_t entry_bytes) noexcept {
    // Each field of a message is aligned to 16 bytes.
    return aligned(std::max(n.send.size(), n.receive.size()) * entry_bytes + most_fields * piece_alignment,
                   message_alignment);
}

/// Neighbours of this rank with their messages, and the values that the ranks have offered to each other.
struct index_pairs {
    /// Exchanges the offers of all ranks. Neighbours with two empty lists are omitted. Collective.
    index_pairs(const mpi::node &node, array_view<const index_neighbour> all, std::size_t bytes)
        : neighbours(all.begin(), all.end()), entry_bytes(bytes) {
        neighbours.erase(std::remove_if(neighbours.begin(), neighbours.end(),
                                        [](const index_neighbour &n) { return n.send.empty() && n.receive.empty(); }),
                         neighbours.end());
        std::sort(neighbours.begin(), neighbours.end(),
                  [](const index_neighbour &a, const index_neighbour &b) { return a.rank < b.rank; });
        const auto ranks = static_cast<std::size_t>(node.communicator_size());
        own.assign(ranks, {0, 0, entry_bytes, 0, 0, 0, 0});
        std::uint64_t flags = 0; // number of neighbours on this node
        for (const index_neighbour &n : neighbours) {
            index_offer &offer = own[static_cast<std::size_t>(n.rank)];
            offer.sends = n.send.size();
            offer.receives = n.receive.size();
            if (node.contains(n.rank)) {
                offer.offset = half;
                half += room_for(n, entry_bytes);
                ++flags;
            }
        }
        inbox_bytes = 2 * half + flags * sizeof(notification_counter);
        std::uint64_t flag = 2 * half;
        for (const index_neighbour &n : neighbours) {
            if (node.contains(n.rank)) {
                index_offer &offer = own[static_cast<std::size_t>(n.rank)];
                offer.flag_offset = flag;
                offer.half = half;
                offer.bytes = inbox_bytes;
                flag += sizeof(notification_counter);
            }
        }
        offers.resize(ranks);
        const int size = sizeof(index_offer);
        mpi::detail::check(MPI_Alltoall(own.data(), size, MPI_BYTE, offers.data(), size, MPI_BYTE, node.everyone()),
                           "MPI_Alltoall");
    }

    /// Compares the offers of the other ranks with those of this rank, which is rank `rank`. Returns the error, or
    /// nothing if they match.
    [[nodiscard]] std::optional<error_details> wrong(int rank) const {
        const auto text = [](std::size_t from, std::uint64_t sent, std::size_t to, std::uint64_t expected) {
            return invalid("neighbours", "rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                                             " entries to rank " + std::to_string(to) + ", which expects " +
                                             std::to_string(expected) +
                                             ": the send list and the receive list must have the same length");
        };
        const auto me = static_cast<std::size_t>(rank);
        for (std::size_t other = 0; other < offers.size(); ++other) {
            if (offers[other].entry_bytes != entry_bytes) {
                return invalid("how", "index_options::entry_bytes is " + std::to_string(entry_bytes) + " on rank " +
                                          std::to_string(rank) + " and " + std::to_string(offers[other].entry_bytes) +
                                          " on rank " + std::to_string(other) + ": pass the same value on all ranks");
            }
            if (offers[other].sends != own[other].receives) {
                return text(other, offers[other].sends, me, own[other].receives);
            }
            if (own[other].sends != offers[other].receives) {
                return text(me, own[other].sends, other, offers[other].receives);
            }
        }
        return std::nullopt;
    }

    std::vector<index_neighbour> neighbours; ///< neighbours with a list that is not empty, by ascending rank
    std::uint64_t entry_bytes;
    std::uint64_t half = 0;          ///< size of one half of this rank's inbox, bytes
    std::uint64_t inbox_bytes = 0;   ///< size of this rank's inbox, bytes
    std::vector<index_offer> own;    ///< offers of this rank to each rank
    std::vector<index_offer> offers; ///< offers of each rank to this rank
};

/// Checks the arguments of this rank. Returns the error, or nothing if they are valid.
[[nodiscard]] inline std::optional<error_details> wrong(const mpi::node &node, device where, std::size_t entries,
                                                        array_view<const index_neighbour> neighbours,
                                                        const index_options &how) {
    std::optional<error_details> found = wrong(how);
    found = found ? found : wrong(neighbours, entries, node.communicator_size(), how.first_index);
    if (!found && where.is_host()) {
        found = invalid("where", "device " + std::to_string(where.id()) +
                                     " is host memory: the vectors must be on a GPU; on the host backend, use a "
                                     "virtual device");
    }
    return found;
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_INDEX_PAIRS_HPP
