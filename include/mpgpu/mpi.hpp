// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MPI_HPP
#define MPGPU_MPI_HPP

/// @file
/// Nodes that are created from an MPI communicator: the MPI ranks on one machine share memory and plan their transfers
/// together. Needs only mpgpu.hpp and MPI.
///
/// @code
/// mpgpu::context ctx;
/// const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);                  // the ranks on this node, and their GPUs
/// const mpgpu::device gpu = node.device();                           // the GPU that this rank uses
/// mpgpu::buffer<double> ghost(ctx, gpu, n);
/// mpgpu::plan halo = node.plan_exchange(                             // all transfers of a step; collective
///     {mpgpu::send_to(right, tag, edge), mpgpu::receive_from(left, tag, ghost)});
///
/// auto ghosts = node.exchange(mpgpu::device_span<double>(ghost));    // memory of all ranks, mapped here; collective
/// for (int rank : neighbours) {
///     if (auto *there = ghosts.of(rank)) {
///         transfers.push_back(mpgpu::make_transfer(*there, edge));   // on this node: a copy into its memory
///     } else {
///         by_mpi.push_back(rank);                                    // elsewhere: MPI; see ghosts.why(rank)
///     }
/// }
/// @endcode
///
/// Collective functions: all ranks of the communicator from which the node was created call them, in the same order. If
/// ranks of one node are in different collective calls, they get `rank_failed` with the names of both calls instead of
/// a deadlock. Ranks on other nodes wait in MPI, as in any collective MPI call. A rank that cannot export its memory
/// does not block the other ranks; they get the reason.
///
/// MPI errors: the error handler of the communicator is called. If it returns, the error is thrown as
/// `mpgpu::driver_error` with MPI's error code, or as `rank_failed` in communication between ranks of a node.

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::mpi {

namespace detail {

inline void check(int code, const char *what) {
    if (code != MPI_SUCCESS) {
        std::array<char, MPI_MAX_ERROR_STRING> text{};
        int length = 0;
        static_cast<void>(MPI_Error_string(code, text.data(), &length));
        error_details details;
        details.status = status::driver;
        details.driver_code = code;
        details.message = std::string(what) + ": " + text.data();
        mpgpu::detail::fail(std::move(details));
    }
}

/// Owner of an MPI communicator. Frees it in the destructor, unless MPI has been finalised.
class communicator {
  public:
    communicator() noexcept = default;
    communicator(communicator &&other) noexcept : value_(std::exchange(other.value_, MPI_COMM_NULL)) {}
    communicator(const communicator &) = delete;
    communicator &operator=(const communicator &) = delete;
    communicator &operator=(communicator &&other) noexcept {
        communicator moved(std::move(other));
        std::swap(value_, moved.value_);
        return *this;
    }
    ~communicator() {
        int finalised = 0;
        if (value_ != MPI_COMM_NULL && MPI_Finalized(&finalised) == MPI_SUCCESS && finalised == 0) {
            static_cast<void>(MPI_Comm_free(&value_));
        }
    }

    [[nodiscard]] MPI_Comm get() const noexcept { return value_; }
    [[nodiscard]] MPI_Comm *address() noexcept { return &value_; }
    /// Leaves the communicator to MPI, which frees it in `MPI_Finalize`.
    void keep() noexcept { value_ = MPI_COMM_NULL; }

    [[nodiscard]] int rank() const {
        int value = 0;
        check(MPI_Comm_rank(value_, &value), "MPI_Comm_rank");
        return value;
    }
    [[nodiscard]] int size() const {
        int value = 0;
        check(MPI_Comm_size(value_, &value), "MPI_Comm_size");
        return value;
    }

  private:
    MPI_Comm value_ = MPI_COMM_NULL;
};

/// Data that each rank sends to the other ranks in `exchange`. Trivially copyable.
struct offer {
    memory_handle handle;
    std::int32_t status; ///< status of the export; `MP_SUCCESS` if the handle is valid
    std::uint32_t empty; ///< 1 if the rank exports nothing
};
static_assert(std::is_trivially_copyable_v<offer> && sizeof(offer) == sizeof(memory_handle) + 8);

} // namespace detail

/// UUID of a GPU or a NUMA domain of host memory. It is equal in all processes on one machine.
using device_uuid = std::array<unsigned char, 16>;

namespace detail {

[[nodiscard]] inline device_uuid uuid_of(mp_context_t context, device which) {
    device_uuid uuid{};
    on_error().report(mp_device_uuid(context, which.id(), uuid.data()));
    return uuid;
}

} // namespace detail

/// Returns the UUID of a device in a context. Two processes on one machine get equal UUIDs if and only if their devices
/// are the same GPU or the same NUMA domain. Throws `argument_error`, `driver_error`.
[[nodiscard]] inline device_uuid uuid_of(const context &ctx, device which) {
    return detail::uuid_of(ctx.get(), which);
}

/// Result of `node::exchange`: the memory of the other ranks, mapped into this process. Owns the mappings and is
/// move-only. Before a rank frees its memory, all copies from and to it must have finished.
template <class T> class shared_memory {
  public:
    /// Returns the number of ranks of the communicator from which the node was created.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(peers_.size()); }

    /// Returns the memory of a rank, as mapped into this process. `rank` is a rank of the communicator from which the
    /// node was created. `range` is the index, from 0, in the list of ranges that the rank passed to `exchange`. For
    /// the calling rank, the result is the memory that the rank itself passed.
    ///
    /// Returns `nullptr` for a range that the rank did not pass, for a rank on another node, and for memory that cannot
    /// be mapped. `why` then returns the reason.
    [[nodiscard]] imported_memory<T> *of(int rank, std::size_t range = 0) noexcept {
        mapped *const found = contains(rank, range) ? &peers_[static_cast<std::size_t>(rank)].ranges[range] : nullptr;
        return found != nullptr && found->memory ? &found->memory : nullptr;
    }
    /// Returns the memory of a rank as read-only memory, for use as the source of transfers. The parameters, and the
    /// cases in which the result is `nullptr`, are the same as for the other overload.
    [[nodiscard]] const imported_memory<T> *of(int rank, std::size_t range = 0) const noexcept {
        const mapped &found = find(rank, range);
        return found.memory ? &found.memory : nullptr;
    }

    /// Returns the reason why `of(rank, range)` returns `nullptr`, as a status. Returns `status::success` if `of` does
    /// not return `nullptr`, or if the rank did not pass the range to `exchange`.
    [[nodiscard]] mpgpu::status status(int rank, std::size_t range = 0) const noexcept {
        return find(rank, range).status;
    }

    /// Returns the reason why `of(rank, range)` returns `nullptr`, as text. The text is empty if `of` does not return
    /// `nullptr`, or if the rank did not pass the range to `exchange`.
    [[nodiscard]] const std::string &why(int rank, std::size_t range = 0) const noexcept {
        return find(rank, range).why;
    }

  private:
    friend class node;
    struct mapped {
        imported_memory<T> memory;
        mpgpu::status status = mpgpu::status::success;
        std::string why;
    };
    struct peer {
        std::vector<mapped> ranges; ///< memory ranges of the rank; empty for a rank on another node
        mapped elsewhere;           ///< result of `of` for ranges that are not in `ranges`
    };

    [[nodiscard]] bool contains(int rank, std::size_t range) const noexcept {
        return rank >= 0 && rank < size() && range < peers_[static_cast<std::size_t>(rank)].ranges.size();
    }
    [[nodiscard]] const mapped &find(int rank, std::size_t range) const noexcept {
        static const mapped no_rank{
            {}, mpgpu::status::invalid_argument, "it is not a rank of the communicator that numbers these ranks"};
        if (contains(rank, range)) {
            return peers_[static_cast<std::size_t>(rank)].ranges[range];
        }
        return rank >= 0 && rank < size() ? peers_[static_cast<std::size_t>(rank)].elsewhere : no_rank;
    }
    std::vector<peer> peers_;
};

/// Node that is created from an MPI communicator: the ranks of the communicator that run on this machine. They map each
/// other's memory (`exchange`) and plan their transfers together, as in any `mpgpu::node`. The context must outlive the
/// node; it may be moved. Destroy the node before `MPI_Finalize` (docs/guide/concepts.md, "Ending").
///
/// There are two numberings of the ranks, which are equal if all ranks are on one machine:
/// - Ranks of the node: `rank()`, `size()`, and the ranks in plans and messages.
/// - Ranks of the communicator `all` from which the node was created: `communicator_rank()`, `communicator_size()`,
///   `exchange`, `halo::plan` and `contains`. `rank_on_node` converts them to ranks of the node.
class node : public mpgpu::node {
  public:
    /// Constructs an empty node. Collective functions called on it throw `argument_error`.
    node() noexcept = default;

    /// Creates one node on each machine, from the ranks of `all` on that machine. Collective over `all`. The caller
    /// keeps ownership of `all`. The node duplicates it, so that its messages do not match messages of the caller.
    /// `gpus` are the GPUs that this rank uses; see the constructor of `mpgpu::node`. Throws the exceptions of that
    /// constructor, and `driver_error` for an MPI error.
    node(const context &ctx, MPI_Comm all, array_view<const mpgpu::device> gpus = {})
        : node(ctx, communicators(all, MPI_COMM_NULL), gpus) {}
    /// Creates one node on each machine, for a rank that uses one GPU. In all other respects it is the same as the
    /// constructor with a list of GPUs. `std::optional::emplace` and `std::make_unique` need this overload, because
    /// they cannot forward a braced list.
    node(const context &ctx, MPI_Comm all, mpgpu::device gpu)
        : node(ctx, all, array_view<const mpgpu::device>(&gpu, 1)) {}

    /// Creates the node from an existing communicator `local`, which contains all or some of the ranks on this machine.
    /// Only these ranks share memory and plan together. The caller keeps ownership of both communicators. If `local` is
    /// `MPI_COMM_NULL`, the node itself finds the ranks on this machine. In all other respects it is the same as the
    /// constructor without `local`.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, array_view<const mpgpu::device> gpus = {})
        : node(ctx, communicators(all, local), gpus) {}
    /// Creates the node from an existing communicator `local`, for a rank that uses one GPU. In all other respects it
    /// is the same as the constructor with `local` and a list of GPUs.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, mpgpu::device gpu)
        : node(ctx, all, local, array_view<const mpgpu::device>(&gpu, 1)) {}

    /// Returns the rank of this process in the communicator `all`. -1 if the node is empty.
    [[nodiscard]] int communicator_rank() const noexcept {
        return on_node_.empty() ? -1 : on_node_[static_cast<std::size_t>(rank())];
    }
    /// Returns the number of ranks of the communicator `all`, on all nodes. 0 if the node is empty.
    [[nodiscard]] int communicator_size() const noexcept { return static_cast<int>(index_.size()); }
    /// Returns the communicator of the ranks of this node. The node owns it.
    [[nodiscard]] MPI_Comm communicator() const noexcept { return of_.local ? of_.local->get() : MPI_COMM_NULL; }
    /// Returns the node's duplicate of the communicator `all`, which contains the ranks on all machines. The node owns
    /// it.
    [[nodiscard]] MPI_Comm everyone() const noexcept { return of_.all.get(); }
    /// Returns the ranks of the communicator `all` that are on this node, including this rank, in ascending order.
    [[nodiscard]] const std::vector<int> &ranks() const noexcept { return on_node_; }
    /// Converts a rank of the communicator `all` to the rank in this node, for use in plans and messages.
    ///
    /// For a rank on another node the result is negative. Every function that takes a rank of the node rejects it, with
    /// an error that names the rank; check with `contains` first. A negative argument, such as `MPI_PROC_NULL`, is
    /// returned unchanged; descriptors with such a rank copy nothing. Throws `argument_error` for a number that is not
    /// a rank of the communicator.
    [[nodiscard]] int rank_on_node(int rank) const {
        if (rank >= communicator_size()) {
            mpgpu::detail::fail({status::invalid_argument, 0, "rank",
                                 "rank=" + std::to_string(rank) + ": the communicator has " +
                                     std::to_string(communicator_size()) + " ranks, numbered from 0"});
        }
        if (rank < 0) {
            return rank;
        }
        return contains(rank) ? index_[static_cast<std::size_t>(rank)] : MP_RANK_ELSEWHERE(rank);
    }
    /// Returns true if the rank `rank` of the communicator `all` is on this node. Use MPI to communicate with other
    /// ranks.
    [[nodiscard]] bool contains(int rank) const noexcept {
        return rank >= 0 && rank < communicator_size() && index_[static_cast<std::size_t>(rank)] >= 0;
    }

    /// Gathers the device that each rank on this node passes, and returns the devices in the order of `ranks()`.
    /// Collective over the ranks on this node.
    ///
    /// The devices in the result have the numbers that they have in this process. They are identified by UUID, so the
    /// ranks may have different values of `CUDA_VISIBLE_DEVICES`. The element of a rank is empty if its GPU is not
    /// visible to this process.
    ///
    /// Throws `argument_error` on a rank that passes a device that does not exist there. The other ranks continue, and
    /// the element of that rank is empty. Throws `rank_failed` if ranks are in different calls.
    [[nodiscard]] std::vector<std::optional<mpgpu::device>> device_of_each(mpgpu::device mine) const {
        check_made();
        device_uuid uuid{};
        const mp_status_t outcome = mp_device_uuid(context_, mine.id(), uuid.data());
        error_details refused = outcome == MP_SUCCESS ? error_details() : last_error();
        const std::vector<device_uuid> all = of_all("mpi::node::device_of_each", &uuid, 1);
        if (outcome != MP_SUCCESS) {
            mpgpu::detail::fail(std::move(refused));
        }
        std::vector<std::optional<mpgpu::device>> found(all.size());
        for (int id = -devices_.host_domains; id < devices_.gpus; ++id) {
            const device_uuid here = detail::uuid_of(context_, mpgpu::device::from_id(id));
            for (std::size_t i = 0; i < all.size(); ++i) {
                if (all[i] == here) {
                    found[i] = mpgpu::device::from_id(id);
                }
            }
        }
        return found;
    }

    /// Exports the memory `mine` to the other ranks of this node, and maps the memory that they export. Collective over
    /// the ranks of this node. If `mine` is empty, this rank exports nothing.
    ///
    /// If an export or a mapping fails, nothing is thrown and no rank is blocked: `shared_memory::why` returns the
    /// reason. Throws `rank_failed` if ranks are in different calls.
    template <class T> [[nodiscard]] shared_memory<T> exchange(device_span<T> mine) const {
        return exchange(std::vector<device_span<T>>{mine});
    }
    /// Exports several memory ranges of each rank together, and maps the ranges of the other ranks.
    /// `shared_memory::of(rank, i)` returns range `i` of a rank. Ranges may be empty, and ranks may pass different
    /// numbers of ranges. If `kernels` is a device, the memory is mapped for kernels of that device
    /// (`imported_memory::in_kernels`). This also works for memory of GPUs that are not visible to this process. In all
    /// other respects it is the same as the overload with one range.
    template <class T>
    [[nodiscard]] shared_memory<T> exchange(const std::vector<device_span<T>> &mine,
                                            mpgpu::device kernels = mpgpu::device::automatic()) const {
        check_made();
        constexpr const char *call = "mpi::node::exchange";
        const std::size_t offered = mine.size();
        const std::vector<std::size_t> numbers = of_all(call, &offered, 1);
        const std::size_t ranges = *std::max_element(numbers.begin(), numbers.end());
        std::vector<detail::offer> own(ranges, detail::offer{{}, MP_SUCCESS, 1});
        std::vector<std::string> failures(mine.size());
        for (std::size_t i = 0; i < mine.size(); ++i) {
            if (mine[i].size() > 0) {
                own[i].empty = 0;
                own[i].status = mp_memory_export(context_, mine[i].data(), mine[i].size_bytes(), &own[i].handle);
                failures[i] = own[i].status == MP_SUCCESS ? std::string() : last_error().message;
            }
        }
        const std::vector<detail::offer> offers = of_all(call, own.data(), ranges);

        shared_memory<T> shared;
        shared.peers_.resize(index_.size());
        for (std::size_t rank = 0; rank < index_.size(); ++rank) {
            auto &peer = shared.peers_[rank];
            if (index_[rank] < 0) {
                peer.elsewhere.status = status::not_supported;
                peer.elsewhere.why = "rank " + std::to_string(rank) + " is on another node: move these bytes with MPI";
                continue;
            }
            const auto place = static_cast<std::size_t>(index_[rank]);
            const bool ours = index_[rank] == mpgpu::node::rank();
            peer.ranges.resize(ranges);
            for (std::size_t i = 0; i < ranges; ++i) {
                const detail::offer &offer = offers[place * ranges + i];
                auto &mapped = peer.ranges[i];
                if (offer.empty != 0) {
                    continue;
                }
                if (offer.status != MP_SUCCESS) {
                    mapped.status = static_cast<mpgpu::status>(offer.status);
                    mapped.why = ours ? failures[i]
                                      : "rank " + std::to_string(rank) + " could not export its memory (" +
                                            mp_status_string(static_cast<mp_status_t>(offer.status)) +
                                            "); its own error gives the reason";
                    continue;
                }
                std::error_code ec;
                mapped.memory = imported_memory<T>(context_, offer.handle, kernels, ec);
                if (ec) {
                    mapped.status = static_cast<mpgpu::status>(ec.value());
                    mapped.why = last_error().message;
                }
            }
        }
        // After this barrier all ranks have mapped the memory of the others. Without the barrier, a rank could free its
        // memory after only some of the other ranks have mapped it.
        mpgpu::detail::meet_all_ranks(get(), call);
        return shared;
    }
    /// Exports all elements of a buffer, and maps the memory of the other ranks. An empty buffer exports nothing.
    /// Collective. In all other respects it is the same as `exchange` with a span.
    template <class T> [[nodiscard]] shared_memory<T> exchange(buffer<T> &whole) const {
        return exchange(device_span<T>(whole));
    }

  private:
    /// Communicators that the node owns.
    struct communicators {
        detail::communicator all;
        std::shared_ptr<detail::communicator> local; ///< ranks on this node; shared with the allgather function

        /// Duplicates the communicators. Splits `of_all` by node if `of_local` is `MPI_COMM_NULL`.
        communicators(MPI_Comm of_all, MPI_Comm of_local) : local(std::make_shared<detail::communicator>()) {
            detail::check(MPI_Comm_dup(of_all, all.address()), "MPI_Comm_dup");
            if (of_local != MPI_COMM_NULL) {
                detail::check(MPI_Comm_dup(of_local, local->address()), "MPI_Comm_dup");
            } else {
                detail::check(
                    MPI_Comm_split_type(all.get(), MPI_COMM_TYPE_SHARED, all.rank(), MPI_INFO_NULL, local->address()),
                    "MPI_Comm_split_type");
            }
        }
        communicators() noexcept = default;

        [[nodiscard]] allgather gather() const {
            return [own = local](const void *send, void *receive, std::size_t bytes) {
                const int count = static_cast<int>(bytes); // fits, because the library gathers a few MiB at a time
                return MPI_Allgather(send, count, MPI_BYTE, receive, count, MPI_BYTE, own->get());
            };
        }
    };

    node(const context &ctx, communicators of, array_view<const mpgpu::device> gpus)
        : mpgpu::node(ctx, static_cast<std::uint32_t>(of.local->rank()), static_cast<std::uint32_t>(of.local->size()),
                      of.gather(), gpus),
          context_(ctx.get()), devices_(ctx.devices()), of_(std::move(of)),
          on_node_(static_cast<std::size_t>(of_.local->size())), index_(static_cast<std::size_t>(of_.all.size()), -1) {
        const int rank = of_.all.rank();
        on_node_ = of_all("mpi::node", &rank, 1);
        for (std::size_t i = 0; i < on_node_.size(); ++i) {
            index_[static_cast<std::size_t>(on_node_[i])] = static_cast<int>(i);
        }
    }

    /// Gathers `count` values from every rank on this node, in rank order. All ranks of the node call it together with
    /// the same `call`, a name for error texts.
    template <class T> [[nodiscard]] std::vector<T> of_all(const char *call, const T *mine, std::size_t count) const {
        return mpgpu::detail::of_all_ranks(get(), on_node_.size(), call, mine, count);
    }

    /// Throws if the node is empty, because MPI would abort the program.
    void check_made() const {
        if (!*this) {
            mpgpu::detail::fail_empty("node");
        }
    }

    mp_context_t context_ = nullptr;
    device_count devices_;
    communicators of_;
    std::vector<int> on_node_; ///< for each rank of this node: its rank in the communicator `all`
    std::vector<int> index_;   ///< for each rank of `all`: its index in `on_node_`; -1 on another node
};

} // namespace mpgpu::mpi

#endif // MPGPU_MPI_HPP
