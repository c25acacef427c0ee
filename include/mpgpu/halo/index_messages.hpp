// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_MESSAGES_HPP
#define MPGPU_HALO_INDEX_MESSAGES_HPP

/// @file
/// MPI messages of exchanges by index lists to and from ranks on other nodes. Part of mpgpu/halo_indexed.hpp; include
/// that header.

#include <mpgpu/halo/index_kernel.hpp>
#include <mpgpu/halo/index_pairs.hpp>
#include <mpgpu/halo/messages.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// MPI messages between this rank and its neighbours on other nodes. The kernel gathers them into an outbox in host
/// memory and scatters them from an inbox in host memory. There is room for one exchange.
class index_messages {
  public:
    /// Allocates the outbox and the inbox. `own` is a duplicate of the node's communicator of all ranks.
    index_messages(const context &ctx, const mpi::node &node, const index_pairs &pairs, const index_options &how,
                   mpi::detail::communicator own)
        : time_limit_(how.time_limit), communicator_(std::move(own)) {
        std::vector<std::uint64_t> offsets;
        std::uint64_t bytes = 0;
        for (const index_neighbour &n : pairs.neighbours) {
            if (!node.contains(n.rank)) {
                offsets.push_back(bytes);
                peers_.push_back({n.rank, n.send.size(), n.receive.size(), nullptr, nullptr});
                bytes += room_for(n, pairs.entry_bytes);
            }
        }
        outbox_ = std::make_unique<memory>(ctx, device::host(), static_cast<std::size_t>(bytes));
        inbox_ = std::make_unique<memory>(ctx, device::host(), static_cast<std::size_t>(bytes));
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            peers_[i].out = outbox_->data() + offsets[i];
            peers_[i].in = inbox_->data() + offsets[i];
        }
    }
    index_messages(const index_messages &) = delete;
    index_messages(index_messages &&) = delete;
    index_messages &operator=(const index_messages &) = delete;
    index_messages &operator=(index_messages &&) = delete;
    ~index_messages() {
        int finalised = 0;
        if (MPI_Finalized(&finalised) == MPI_SUCCESS && finalised == 0) {
            for (MPI_Request &request : requests_) {
                is_left_ = !has_ended(request) || is_left_;
            }
        }
        if (is_left_) { // MPI may access the memory if the other rank makes progress later
            static_cast<void>(outbox_.release());
            static_cast<void>(inbox_.release());
        }
        if (!may_free_) {
            communicator_.keep();
        }
    }

    /// Allows the destructor to free the MPI communicator. Called when all exchanges of all ranks have ended.
    void close() noexcept { may_free_ = !failed_ && requests_.empty(); }

    /// Returns true if this rank has neighbours on other nodes.
    [[nodiscard]] bool has_peers() const noexcept { return !peers_.empty(); }

    /// Sets the addresses of the messages to and from rank `rank`.
    void place(index_message &message, int rank) const {
        for (const peer &p : peers_) {
            if (p.rank == rank) {
                message.there = p.out;
                message.here = p.in;
            }
        }
    }

    /// Throws if an earlier exchange has failed, because its messages may still be in flight.
    void check_usable() const {
        if (failed_) {
            fail(refusal(status::rank_failed, "stream",
                         "an earlier exchange with ranks on other nodes has failed; this halo::indexed object can no "
                         "longer be used"));
        }
    }

    /// Starts to send and to receive the messages of an exchange. The kernel has already gathered the messages to send.
    void start(const index_call &call) {
        or_fail([&] {
            requests_.clear();
            ranks_.clear();
            for (const bool receives : {true, false}) {
                for (const peer &p : peers_) {
                    const bool is_receive_list = (call.operation == index_operation::reverse_add) != receives;
                    const std::uint64_t bytes = offset_of(call, call.count, is_receive_list ? p.receives : p.sends);
                    post(receives, p, bytes);
                }
                received_ = receives ? requests_.size() : received_;
            }
            clock_.restart();
        });
    }

    /// Blocks until the messages of the exchange have been sent and received. Throws `timeout` if this exceeds
    /// `index_options::time_limit`.
    void wait() {
        or_fail([this] {
            int done = requests_.empty() ? 1 : 0; // MPI may refuse an empty list
            while (done == 0) {
                mpi::detail::check(
                    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
                    "MPI_Testall");
                if (done == 0) {
                    check_time();
                    std::this_thread::yield();
                }
            }
            requests_.clear();
        });
    }

  private:
    /// Neighbour on another node, and the places of the messages to and from it.
    struct peer {
        int rank;
        std::uint64_t sends;    ///< number of entries of the send list
        std::uint64_t receives; ///< number of entries of the receive list
        std::byte *out;
        std::byte *in;
    };

    /// Starts to send or to receive one message. Does nothing if it has no bytes.
    void post(bool receives, const peer &p, std::uint64_t bytes) {
        const std::uint64_t units = bytes / piece_alignment; // MPI counts are ints, and messages may exceed 2 GiB
        if (units > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
            fail(refusal(status::not_supported, "fields",
                         "a message to or from rank " + std::to_string(p.rank) + " has " + std::to_string(bytes) +
                             " bytes: the maximum is 32 GiB; exchange fewer fields at once"));
        }
        if (units == 0) {
            return;
        }
        MPI_Datatype unit = MPI_DATATYPE_NULL;
        mpi::detail::check(MPI_Type_contiguous(static_cast<int>(piece_alignment), MPI_BYTE, &unit),
                           "MPI_Type_contiguous");
        mpi::detail::check(MPI_Type_commit(&unit), "MPI_Type_commit");
        const int count = static_cast<int>(units);
        MPI_Request request = MPI_REQUEST_NULL;
        mpi::detail::check(receives ? MPI_Irecv(p.in, count, unit, p.rank, 0, communicator_.get(), &request)
                                    : MPI_Isend(p.out, count, unit, p.rank, 0, communicator_.get(), &request),
                           receives ? "MPI_Irecv" : "MPI_Isend");
        mpi::detail::check(MPI_Type_free(&unit), "MPI_Type_free"); // the request keeps the type alive
        requests_.push_back(request);
        ranks_.push_back(p.rank);
    }

    /// Throws `timeout` if the exchange exceeds the time limit. The error names the ranks that this rank waits for.
    void check_time() {
        if (!time_limit_ || !clock_.has_reached(*time_limit_)) {
            return;
        }
        std::vector<int> silent[2];
        for (std::size_t i = 0; i < requests_.size(); ++i) {
            int done = 0;
            static_cast<void>(MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE));
            if (done == 0) {
                silent[i < received_ ? 0 : 1].push_back(ranks_[i]);
            }
        }
        std::string why = silent[0].empty() ? "" : "messages have not arrived from " + text_of_ranks(silent[0]);
        if (!silent[1].empty()) {
            why += (why.empty() ? "" : "; ") + ("messages were not accepted by " + text_of_ranks(silent[1]));
        }
        fail(refusal(status::timeout, "time_limit",
                     "the exchange has not ended within index_options::time_limit, " + text_of_time(*time_limit_) +
                         ": " + why + "; end the lifetime of the halo::indexed object without calling destroy()"));
    }

    /// Returns true if a request has ended or could be cancelled. Never blocks.
    [[nodiscard]] static bool has_ended(MPI_Request &request) noexcept {
        int done = 0;
        if (request == MPI_REQUEST_NULL || (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0)) {
            return true;
        }
        static_cast<void>(MPI_Cancel(&request));
        return MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
    }

    /// Calls `step()`. If it throws, later exchanges are refused.
    template <class Step> void or_fail(const Step &step) {
        may_free_ = false;
        set_if_thrown(failed_, step);
    }

    std::optional<wait_clock::duration> time_limit_;
    wait_clock clock_;
    /// Separate communicator, so that MPI does not match its messages with those of the program.
    mpi::detail::communicator communicator_;
    std::vector<peer> peers_; ///< by ascending rank
    std::unique_ptr<memory> outbox_;
    std::unique_ptr<memory> inbox_;
    std::vector<MPI_Request> requests_; ///< requests of the receives, then of the sends
    std::vector<int> ranks_;            ///< for each request: the other rank
    std::size_t received_ = 0;          ///< number of receives in `requests_`
    bool failed_ = false;               ///< true if an exchange has failed
    bool is_left_ = false;              ///< true if MPI may still access the memory
    /// False while messages may still arrive. MPI could deliver them to a later communicator with the same context id.
    bool may_free_ = true;
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_INDEX_MESSAGES_HPP
