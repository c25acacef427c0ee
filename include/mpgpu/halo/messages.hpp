// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MESSAGES_HPP
#define MPGPU_HALO_MESSAGES_HPP

/// @file
/// Part of mpgpu/halo_mpi.hpp, which programs include: messages to ranks of other nodes.

#include <mpgpu/halo/plan.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h> // says whether it is GPU-aware
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace mpgpu::halo::detail {

/// Whether MPI says that it takes device memory.
[[nodiscard]] inline bool gpu_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
}

/// Messages to and from ranks of other nodes by MPI: persistent requests, on a communicator of their own.
class mpi_messages final : public off_node {
  public:
    /// `outbox`, `inbox`: of this rank, on its device. Collective over all ranks of the node's communicator.
    mpi_messages(const context &ctx, const mpi::node &node, const schedule &all, int rank, memory &outbox,
                 memory &inbox, const options &how)
        : packed_(ctx) {
        mpi::detail::check(MPI_Comm_dup(node.everyone(), messages_.address()), "MPI_Comm_dup");
        const bool staged = how.between_nodes == mpi_memory::staged || (how.between_nodes == mpi_memory::automatic &&
                                                                        ctx.backend() != backend::host && !gpu_aware());
        if (staged) {
            staging_out_ = memory(ctx, device::host(), outbox.size());
            staging_in_ = memory(ctx, device::host(), inbox.size());
        }
        MPI_Datatype unit = MPI_DATATYPE_NULL; // counts are ints, and messages may have more bytes than those count
        mpi::detail::check(MPI_Type_contiguous(static_cast<int>(piece_alignment), MPI_BYTE, &unit),
                           "MPI_Type_contiguous");
        mpi::detail::check(MPI_Type_commit(&unit), "MPI_Type_commit");
        std::vector<transfer> down;
        std::vector<transfer> up;
        for (const bool receives : {true, false}) {
            for (const rank_pair &p : all.pairs) {
                if (p.on_node || p.bytes == 0 || (receives ? p.to : p.from) != rank) {
                    continue;
                }
                memory &box = receives ? inbox : outbox;
                memory &staging = receives ? staging_in_ : staging_out_;
                const std::uint64_t offset = receives ? p.inbox_offset : p.outbox_offset;
                if (staged && receives) {
                    up.push_back(make_transfer(box.subspan(offset, p.bytes), staging.subspan(offset, p.bytes)));
                } else if (staged) {
                    down.push_back(make_transfer(staging.subspan(offset, p.bytes), box.subspan(offset, p.bytes)));
                }
                add(receives, (staged ? staging : box).data() + offset, p.bytes, receives ? p.from : p.to, unit);
            }
        }
        mpi::detail::check(MPI_Type_free(&unit), "MPI_Type_free"); // the requests still have it
        if (!down.empty()) {
            down_.emplace(ctx, down, how.transfers);
        }
        if (!up.empty()) {
            up_.emplace(ctx, up, how.transfers);
        }
    }
    mpi_messages(const mpi_messages &) = delete;
    mpi_messages(mpi_messages &&) = delete;
    mpi_messages &operator=(const mpi_messages &) = delete;
    mpi_messages &operator=(mpi_messages &&) = delete;
    ~mpi_messages() override {
        int finalised = 0;
        if (MPI_Finalized(&finalised) == MPI_SUCCESS && finalised == 0) {
            for (MPI_Request &request : requests_) {
                static_cast<void>(MPI_Request_free(&request));
            }
        }
    }

    void packed(stream_view order) override {
        if (down_) {
            down_->enqueue(order);
        }
        packed_.record(order);
    }

    void start() override {
        // The last messages have been unpacked too: that is earlier in the same stream.
        packed_.synchronize();
        mpi::detail::check(MPI_Startall(static_cast<int>(requests_.size()), requests_.data()), "MPI_Startall");
    }

    void arrived(stream_view order) override {
        mpi::detail::check(MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE),
                           "MPI_Waitall");
        if (up_) {
            up_->enqueue(order);
        }
    }

  private:
    void add(bool receives, std::byte *data, std::uint64_t bytes, int peer, MPI_Datatype unit) {
        const std::uint64_t units = bytes / piece_alignment;
        if (units > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
            fail(refusal(status::not_supported, "arrays",
                         "a message of " + std::to_string(bytes) +
                             " bytes to another node: 32 GiB are possible; exchange fewer variables in a plan"));
        }
        const auto count = static_cast<int>(units);
        MPI_Request &made = requests_.emplace_back(MPI_REQUEST_NULL);
        mpi::detail::check(receives ? MPI_Recv_init(data, count, unit, peer, 0, messages_.get(), &made)
                                    : MPI_Send_init(data, count, unit, peer, 0, messages_.get(), &made),
                           receives ? "MPI_Recv_init" : "MPI_Send_init");
    }

    mpi::detail::communicator messages_; ///< so that no message of another plan or of the caller's is taken for one
    event packed_;
    memory staging_out_;
    memory staging_in_;
    std::optional<mpgpu::plan> down_;
    std::optional<mpgpu::plan> up_;
    std::vector<MPI_Request> requests_; ///< receives, then sends
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_MESSAGES_HPP
