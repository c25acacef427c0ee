// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
#define MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP

#include "messages.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

/// The CUDA part of an exchange by plain copies between processes: memory and events of CUDA IPC, one
/// cudaMemcpyPeerAsync for each message. Who tells whom that a copy has been enqueued is not its business.
///
/// Every other exchange has the other half of all buffers and events. So nobody has to say that a buffer is free again:
/// a rank's messages of exchange n come after it has unpacked those of n - 1, and whoever has waited for them may write
/// into its half of n - 1.
class peer_copies {
  public:
    static constexpr std::size_t tags = 27;

    /// What a rank must tell the others. Plain bytes.
    struct offer {
        std::array<unsigned char, 64> inbox; ///< cudaIpcMemHandle_t
        /// cudaIpcEventHandle_t, by half and tag: recorded after the copy of the message.
        std::array<std::array<std::array<unsigned char, 64>, tags>, 2> arrived;
    };

    /// How the copies are enqueued.
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

    /// Opens what the others offer. `devices`, `theirs`: where each rank's memory is and what it receives, by rank.
    void connect(const std::vector<offer> &offers, const std::vector<int> &devices,
                 const std::vector<messages> &theirs);
    /// Closes it again: after everybody's last copy, before anybody frees memory.
    void disconnect();

    /// Packs and copies. `pack` has a launch for each message that is sent.
    void send(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &pack);
    /// Waits in `stream` for the messages, whose copies have been enqueued by their senders, and unpacks them.
    void receive(mpgpu::stream_view stream, std::size_t half, const std::vector<mpgpu::halo::launch_function> &unpack);

  private:
    struct state;
    std::unique_ptr<state> state_;
};

#endif // MPGPU_EXAMPLES_HALO3D_PEER_COPIES_CUDA_HPP
