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

/// A code with messages and kernels of its own, as LLNL's Comb, whose calls of MPI have become calls of mpgpu; see
/// docs/guide/comb.md. The host waits for nothing, and no message is a special case: neither one of several to a rank,
/// nor one to the rank itself.
///
/// Persistent requests have become a node plan of half-transfers: pack, one step, unpack.
class by_half_transfers final : public exchange {
  public:
    /// Collective. Throws `std::invalid_argument` where a neighbour is on another node.
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

/// MPI_Irecv, MPI_Isend and MPI_Waitany have become messages in streams: each is unpacked when it has arrived, in a
/// stream of its own that waits for it.
class by_messages final : public exchange {
  public:
    /// As above.
    by_messages(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const mpgpu::halo::grid &g, const part &mine);

    [[nodiscard]] std::string name() const override { return "mpgpu, messages"; }
    void start(const mpgpu::stream &stream) override;
    void finish(const mpgpu::stream &stream) override;

  private:
    messages all_;
    std::vector<std::int32_t> senders_;   ///< of each message that is received, as the node numbers ranks
    std::vector<std::int32_t> receivers_; ///< of each that is sent
    mpgpu::memory outbox_;
    mpgpu::memory inbox_;
    mpgpu::halo::launch_function pack_;
    std::vector<mpgpu::halo::launch_function> unpack_;
    mpgpu::messenger messenger_;
    std::vector<mpgpu::stream> streams_; ///< of each message that is received
    std::vector<mpgpu::event> unpacked_;
    mpgpu::event packed_;
    /// Of this exchange and the last one, receives first. An exchange waits for what the one before the last has left
    /// here, which tells of errors: a messenger has room for a thousand operations, and a host that never waits would
    /// fill it.
    std::array<std::vector<mpgpu::message_request>, 2> under_way_;
    std::size_t now_ = 0;
};

#endif // MPGPU_EXAMPLES_HALO3D_BY_CALLS_HPP
