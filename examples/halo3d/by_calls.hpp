// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_BY_CALLS_HPP
#define MPGPU_EXAMPLES_HALO3D_BY_CALLS_HPP

#include "cycles.hpp"
#include "exchange.hpp"
#include "messages.hpp"

#include <mpgpu/halo_mpi.hpp>
#include <mpgpu/message.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Exchange by a node plan of send and receive descriptors, which replace the persistent MPI requests of a code with
/// its own messages and kernels, like LLNL's Comb (docs/guide/comb.md). An exchange packs, executes the plan and
/// unpacks. The host does not wait.
///
/// Several messages to one rank, and messages of a rank to itself, need no special treatment.
class by_half_transfers final : public exchange {
  public:
    /// Collective. Throws `std::invalid_argument` if a neighbour is on another node.
    by_half_transfers(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const mpgpu::halo::grid &g,
                      const part &mine);

    [[nodiscard]] std::string name() const override { return "mpgpu, half-transfers"; }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;

  private:
    messages all_;
    mpgpu::memory outbox_;
    mpgpu::memory inbox_;
    mpgpu::halo::launch_function pack_;
    mpgpu::halo::launch_function unpack_;
    mpgpu::plan step_;
};

/// Exchange by messages in streams, which replace MPI_Irecv, MPI_Isend and MPI_Waitany. Each received message has its
/// own stream, which waits for the message and then unpacks it.
class by_messages final : public exchange {
  public:
    /// Collective. Throws `std::invalid_argument` if a neighbour is on another node.
    by_messages(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const mpgpu::halo::grid &g, const part &mine);

    [[nodiscard]] std::string name() const override { return "mpgpu, messages"; }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;

  private:
    messages all_;
    std::vector<std::int32_t> senders_;   ///< node rank of the sender of each received message
    std::vector<std::int32_t> receivers_; ///< node rank of the receiver of each sent message
    mpgpu::memory outbox_;
    mpgpu::memory inbox_;
    mpgpu::halo::launch_function pack_;
    std::vector<mpgpu::halo::launch_function> unpack_;
    mpgpu::messenger messenger_;
    std::vector<mpgpu::stream> streams_; ///< stream in which each received message is unpacked
    std::vector<mpgpu::event> unpacked_;
    mpgpu::event packed_;
    /// Requests of the current and of the previous exchange, receives first. Each exchange first waits for the requests
    /// of the exchange before the previous one, and thereby reports their errors. If the host never waited, it would
    /// exceed the thousand operations that a messenger can hold.
    std::array<std::vector<mpgpu::message_request>, 2> under_way_;
    std::size_t now_ = 0;
};

#endif // MPGPU_EXAMPLES_HALO3D_BY_CALLS_HPP
