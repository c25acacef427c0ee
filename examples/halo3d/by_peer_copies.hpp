// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_BY_PEER_COPIES_HPP
#define MPGPU_EXAMPLES_HALO3D_BY_PEER_COPIES_HPP

#include "cycles.hpp"
#include "exchange.hpp"
#include "peer_copies_cuda.hpp"

#include <mpi.h>

#include <array>
#include <string>
#include <vector>

/// Exchange by plain copies between processes, as a careful CUDA program without a library makes it. Each message needs
/// a pack kernel, a cudaMemcpyPeerAsync into the neighbour's memory, an event, and an unpack kernel that waits for the
/// event. A stream can wait for another process's event only after that event has been recorded, so each rank notifies
/// its neighbours by an empty MPI message.
class by_peer_copies final : public exchange {
  public:
    /// Connects to all neighbours. `devices` contains the device number of each rank, as numbered in this process.
    by_peer_copies(const mpgpu::context &ctx, const mpgpu::halo::grid &g, part &mine, const std::vector<int> &devices,
                   peer_copies::lanes how);
    by_peer_copies(const by_peer_copies &) = delete;
    by_peer_copies(by_peer_copies &&) = delete;
    by_peer_copies &operator=(const by_peer_copies &) = delete;
    by_peer_copies &operator=(by_peer_copies &&) = delete;
    ~by_peer_copies() override;

    [[nodiscard]] std::string name() const override {
        return how_ == peer_copies::lanes::one ? "peer copies in one stream" : "peer copies, one stream for each";
    }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;
    void close() override;

  private:
    peer_copies::lanes how_;
    messages all_;
    peer_copies copies_;
    std::array<std::vector<mpgpu::halo::launch_function>, 2> pack_;
    std::array<std::vector<mpgpu::halo::launch_function>, 2> unpack_;
    std::vector<MPI_Request> tell_;   ///< one for each neighbour
    std::vector<MPI_Request> listen_; ///< one for each neighbour
    std::size_t half_ = 0;
};

#endif // MPGPU_EXAMPLES_HALO3D_BY_PEER_COPIES_HPP
