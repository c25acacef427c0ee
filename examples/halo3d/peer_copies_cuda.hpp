// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
#define MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP

#include "messages.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

/// CUDA part of an exchange by plain copies between processes: memory and events of CUDA IPC, and one
/// cudaMemcpyPeerAsync for each message. The notification that a copy has been enqueued is not part of it.
///
/// Successive exchanges alternate between two halves of all buffers and events. No notification is needed that a buffer
/// is free again: a rank's messages of exchange n follow its unpacking of exchange n - 1, so a rank that has waited for
/// them may write into the sender's half of n - 1.
class peer_copies {
  public:
    static constexpr std::size_t tags = 27;

    /// Handles that a rank sends to the others, as plain bytes.
    struct offer {
        std::array<unsigned char, 64> inbox; ///< cudaIpcMemHandle_t
        /// cudaIpcEventHandle_t by half and tag, recorded after the copy of the message.
        std::array<std::array<std::array<unsigned char, 64>, tags>, 2> arrived;
    };

    /// Streams of the copies: one for all, or one for each.
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

    /// Opens the other ranks' memory and events. `devices` and `theirs` contain the device and the messages of each
    /// rank.
    void connect(const std::vector<offer> &offers, const std::vector<int> &devices,
                 const std::vector<messages> &theirs);
    /// Closes the memory and events. Must be called after the last copy of all ranks, and before any rank frees memory.
    void disconnect();

    /// Packs and copies. `pack` has a launch for each sent message.
    void send(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &pack);
    /// Waits in `stream` for the messages, whose senders have enqueued the copies, and unpacks them.
    void receive(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &unpack);

  private:
    struct state;
    std::unique_ptr<state> state_;
};

#endif // MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
