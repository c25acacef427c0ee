// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_MESSAGES_HPP
#define MPGPU_EXAMPLES_HALO3D_MESSAGES_HPP

#include <mpgpu/halo.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

/// Message in a code that exchanges ghost cells without mpgpu, like LLNL's Comb. There is one message for each of up to
/// 26 neighbours, with cells of all variables. Two messages to the same rank are not merged.
struct message {
    int tag = 0;          ///< number of the direction in which the message is sent, 0 to 26
    int rank = 0;         ///< rank that receives or sends the message
    mpgpu::halo::box box; ///< cells in the message, as indices of the rank's arrays
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0; ///< offset in the rank's outbox or inbox, in bytes
};

struct messages {
    std::vector<message> sent;
    std::vector<message> received;
    std::uint64_t outbox_bytes = 0;
    std::uint64_t inbox_bytes = 0;
};

/// Returns the messages of a rank in one exchange of `vars` variables with 8-byte elements. On every pair of ranks,
/// sent and received messages match.
messages messages_of(const mpgpu::halo::grid &g, int rank, std::size_t vars);

/// Returns the pieces that are copied to pack or unpack a message, between its cells and its bytes at address `at`.
std::vector<mpgpu::halo::piece> pieces_of(const mpgpu::halo::grid &g, int rank, const message &m,
                                          const mpgpu::halo::rank_arrays &arrays, std::byte *at);

/// Returns one launch for each message, which packs the message if it is sent, or unpacks it if it is received.
std::vector<mpgpu::halo::launch_function> launches_of(const mpgpu::context &ctx, const mpgpu::halo::copier &copier,
                                                      const mpgpu::halo::grid &g, int rank,
                                                      const std::vector<message> &all,
                                                      const mpgpu::halo::rank_arrays &arrays, std::byte *buffer,
                                                      mpgpu::halo::direction way);

#endif // MPGPU_EXAMPLES_HALO3D_MESSAGES_HPP
