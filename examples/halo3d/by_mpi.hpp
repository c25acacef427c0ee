// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP
#define MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP

#include "cycles.hpp"
#include "exchange.hpp"
#include "messages.hpp"

#include <mpi.h>

#include <array>
#include <string>
#include <vector>

/// The exchange by MPI, which is given pointers of the devices: persistent requests, one kernel that packs all messages
/// and one that unpacks them. Messages to the rank itself pass MPI by. The host waits for the packing, because MPI
/// knows nothing of streams.
class by_mpi final : public exchange {
  public:
    by_mpi(const mpgpu::context &ctx, const mpgpu::halo::grid &g, part &mine);
    by_mpi(const by_mpi &) = delete;
    by_mpi(by_mpi &&) = delete;
    by_mpi &operator=(const by_mpi &) = delete;
    by_mpi &operator=(by_mpi &&) = delete;
    ~by_mpi() override;

    [[nodiscard]] std::string name() const override { return "MPI"; }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;

  private:
    /// Every other exchange has the other buffers, so that receives are posted while the last messages are unpacked.
    struct half {
        mpgpu::memory outbox;
        mpgpu::memory inbox;
        mpgpu::halo::launch_function pack;
        mpgpu::halo::launch_function unpack;
        std::vector<MPI_Request> sends;
        std::vector<MPI_Request> receives;
    };
    half make_half(const mpgpu::context &ctx, const mpgpu::halo::grid &g, part &mine) const;

    messages all_;
    std::array<half, 2> halves_;
    std::size_t now_ = 0;
};

#endif // MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP
