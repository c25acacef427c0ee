// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP
#define MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP

#include "cycles.hpp"
#include "exchange.hpp"
#include "messages.hpp"
#include "spaces.hpp"
#include "thread_team.hpp"

#include <mpi.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

/// Exchange by MPI, as in programs without mpgpu: persistent requests, and messages in any memory that the packing code
/// can access. Messages of a rank to itself bypass MPI. The host waits for the packing, because MPI does not know
/// streams.
class by_mpi final : public exchange {
  public:
    /// Throws the exceptions of `check_reach` if MPI or the packing code cannot access the memory.
    by_mpi(const mpgpu::context &ctx, const mpgpu::halo::grid &g, const part &mine, space messages, packing how,
           int threads);
    by_mpi(const by_mpi &) = delete;
    by_mpi(by_mpi &&) = delete;
    by_mpi &operator=(const by_mpi &) = delete;
    by_mpi &operator=(by_mpi &&) = delete;
    ~by_mpi() override;

    [[nodiscard]] std::string name() const override { return name_; }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;

  private:
    /// One of two sets of buffers and requests. Successive exchanges alternate between the sets, so that receives of
    /// the next exchange can be posted while the last messages are unpacked.
    struct half {
        std::shared_ptr<std::byte> outbox;
        std::shared_ptr<std::byte> inbox;
        /// Launches that pack: one for each message, or one for all messages.
        std::vector<mpgpu::halo::launch_function> pack;
        std::vector<mpgpu::halo::launch_function> unpack;
        std::vector<MPI_Request> sends;    ///< one for each message; MPI_REQUEST_NULL for messages to the rank itself
        std::vector<MPI_Request> receives; ///< one for each message; MPI_REQUEST_NULL for messages from the rank itself
        std::vector<mpgpu::event> packed;  ///< end of packing each message; used if they are packed one by one
    };
    half make_half(const mpgpu::context &ctx, const mpgpu::halo::grid &g, const part &mine, space in);
    [[nodiscard]] mpgpu::halo::copier copier(const device_code &code);
    [[nodiscard]] bool is_one_by_one() const { return how_ != packing::fused && how_ != packing::graph; }

    messages all_;
    packing how_;
    std::string name_;
    thread_team team_;
    std::array<half, 2> halves_;
    std::size_t now_ = 0;
};

#endif // MPGPU_EXAMPLES_HALO3D_BY_MPI_HPP
