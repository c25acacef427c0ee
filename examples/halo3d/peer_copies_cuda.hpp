// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
#define MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP

#include "messages.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

/// CUDA part of an exchange by plain copies between processes. It opens memory and events by CUDA IPC, and makes one
/// cudaMemcpyPeerAsync for each message. The caller must notify the receiver that a copy has been enqueued.
///
/// Successive exchanges alternate between two halves of all buffers and events. Receivers need not report that a half
/// is free again: a rank sends the messages of exchange n only after it has unpacked those of exchange n - 1. So
/// whoever has received its messages of exchange n may overwrite the half that it used in exchange n - 1.
class peer_copies {
  public:
    static constexpr std::size_t tags = 27;

    /// Handles by which other ranks open a rank's memory and events, as plain bytes.
    struct offer {
        std::array<unsigned char, 64> inbox; ///< handle of the inbox (cudaIpcMemHandle_t)
        /// Handles (cudaIpcEventHandle_t), by half and tag, of the events that are recorded after the copy of a
        /// message.
        std::array<std::array<std::array<unsigned char, 64>, tags>, 2> arrived;
    };

    /// Streams in which copies are made: one for all copies, or one for each copy.
    enum class lanes { one, each };

    peer_copies(int rank, int device, const messages &all, lanes how);
    peer_copies(const peer_copies &) = delete;
    peer_copies(peer_copies &&) = delete;
    peer_copies &operator=(const peer_copies &) = delete;
    peer_copies &operator=(peer_copies &&) = delete;
    ~peer_copies();

    [[nodiscard]] std::byte *outbox(std::size_t half) const;
    [[nodiscard]] std::byte *inbox(std::size_t half) const;
    [[nodiscard]] offer describe() const;

    /// Opens memory and events of the other ranks. `devices` contains the device of each rank, and `theirs` its
    /// messages.
    void connect(const std::vector<offer> &offers, const std::vector<int> &devices,
                 const std::vector<messages> &theirs);
    /// Closes memory and events of the other ranks. Must be called after the last copy of all ranks, and before any
    /// rank frees its memory.
    void disconnect();

    /// Packs all messages and copies them to the receivers, after earlier work in `stream`. `pack` has one launch for
    /// each sent message.
    void send(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &pack);
    /// Makes `stream` wait for the received messages, and unpacks them. All senders must have enqueued their copies.
    void receive(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &unpack);

  private:
    struct state;
    std::unique_ptr<state> state_;
};

#endif // MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
