// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MPI_HPP
#define MPGPU_MPI_HPP

/// @file
/// Nodes made from an MPI communicator: the MPI ranks on one machine, which share memory and plan transfers together.
/// Needs only mpgpu.hpp and MPI.
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
/// All ranks of the communicator from which the node was made call collective functions, in the same order. A function
/// returns, or throws, on all ranks if its comment states so: a rank that cannot export its memory is reported to the
/// others and does not make them wait.
///
/// If ranks of a node are in different collective calls, they get `rank_failed` with the names of both calls and do not
/// wait for each other. Ranks on other nodes wait in MPI, as in any collective MPI call.
///
/// The communicator's error handler handles MPI errors. If it returns, they are thrown as `mpgpu::driver_error` with
/// MPI's code, or as `rank_failed` in communication between ranks of a node.

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

/// Communicator that this header owns. Freed with the object unless MPI has been finalised.
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

/// Message that each rank sends to the others in `exchange`. Plain bytes.
struct offer {
    memory_handle handle;
    std::int32_t status; ///< status of the export; `MP_SUCCESS` if there is a handle
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

/// Returns the UUID of a device in a context. Two processes get equal UUIDs if and only if the device is the same GPU.
/// Throws `argument_error`, `driver_error`.
[[nodiscard]] inline device_uuid uuid_of(const context &ctx, device which) {
    return detail::uuid_of(ctx.get(), which);
}

/// Result of `node::exchange`: the memory of all ranks that this rank can map. Owns the mappings and is move-only.
/// Before a rank frees its memory, copies from and to it must have ended.
template <class T> class shared_memory {
  public:
    /// Returns the number of ranks of the communicator.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(peers_.size()); }

    /// Returns the memory of a rank, as mapped in this process. `rank` is a rank of the communicator from which the
    /// node was made. `range` is the index among the ranges that the rank passed to `exchange`. For this rank, the
    /// result is the memory that it passed. Returns `nullptr` for a range that the rank did not pass, for a rank on
    /// another node, and for memory that cannot be mapped; `why` returns the reason.
    [[nodiscard]] imported_memory<T> *of(int rank, std::size_t range = 0) noexcept {
        mapped *const found = contains(rank, range) ? &peers_[static_cast<std::size_t>(rank)].ranges[range] : nullptr;
        return found != nullptr && found->memory ? &found->memory : nullptr;
    }
    /// Returns the memory of a rank as read-only memory, which can be the source of transfers.
    [[nodiscard]] const imported_memory<T> *of(int rank, std::size_t range = 0) const noexcept {
        const mapped &found = find(rank, range);
        return found.memory ? &found.memory : nullptr;
    }

    /// Returns the reason why `of(rank, range)` is `nullptr`. The result is `status::success` if it is not `nullptr`,
    /// or if the rank did not pass the range to `exchange`.
    [[nodiscard]] mpgpu::status status(int rank, std::size_t range = 0) const noexcept {
        return find(rank, range).status;
    }

    /// Returns the reason why `of(rank, range)` is `nullptr`, as text. The text is empty if there is no reason.
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
        std::vector<mapped> ranges; ///< empty for a rank on another node
        mapped elsewhere;           ///< result of `of` for all other ranges
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

/// Ranks of a communicator that share this rank's node. They map each other's memory (`exchange`) and plan together as
/// the ranks of an `mpgpu::node`. Created once, collectively. Refers to resources of the context, which may be moved
/// and must outlive it. Destroy the node before `MPI_Finalize` (docs/guide/concepts.md, "Ending").
///
/// `rank()`, `size()`, and the ranks in plans and messages number the ranks of the node, as with any `mpgpu::node`.
/// `communicator_rank()` and `communicator_size()` refer to the communicator `all` from which the node was made, and
/// `exchange`, `halo::plan` and `contains` take its ranks. `rank_on_node` converts its ranks to those of the node. Both
/// numberings are equal if all ranks are on one node.
class node : public mpgpu::node {
  public:
    /// Constructs an empty node. Collective calls on it throw `argument_error`.
    node() noexcept = default;

    /// Splits `all` by node. Collective over `all`. The caller keeps `all`; the node duplicates it, so that its
    /// messages do not match the caller's messages. `gpus` lists the GPUs that this rank uses; see the constructor of
    /// `mpgpu::node`. Throws the exceptions of that constructor, and `driver_error` for an MPI error.
    node(const context &ctx, MPI_Comm all, array_view<const mpgpu::device> gpus = {})
        : node(ctx, communicators(all, MPI_COMM_NULL), gpus) {}
    /// Splits `all` by node, for a rank that uses one GPU. `std::optional::emplace` and `std::make_unique` need this
    /// overload, because they cannot forward a braced list.
    node(const context &ctx, MPI_Comm all, mpgpu::device gpu)
        : node(ctx, all, array_view<const mpgpu::device>(&gpu, 1)) {}

    /// Creates the node from `local`, an existing communicator that contains the ranks on this node, or some of them.
    /// Only these ranks share memory and plan together. The caller keeps both communicators. With `MPI_COMM_NULL` the
    /// node splits `all` itself.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, array_view<const mpgpu::device> gpus = {})
        : node(ctx, communicators(all, local), gpus) {}
    /// Creates the node from the communicator `local`, for a rank that uses one GPU.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, mpgpu::device gpu)
        : node(ctx, all, local, array_view<const mpgpu::device>(&gpu, 1)) {}

    /// Returns this rank in the communicator `all`. -1 if the node is empty.
    [[nodiscard]] int communicator_rank() const noexcept {
        return on_node_.empty() ? -1 : on_node_[static_cast<std::size_t>(rank())];
    }
    /// Returns the number of ranks of the communicator `all`, on all nodes. 0 if the node is empty.
    [[nodiscard]] int communicator_size() const noexcept { return static_cast<int>(index_.size()); }
    /// Returns the communicator of the ranks of this node. The node owns it.
    [[nodiscard]] MPI_Comm communicator() const noexcept { return of_.local ? of_.local->get() : MPI_COMM_NULL; }
    /// Returns a duplicate of the communicator `all`, with the ranks of all nodes. The node owns it.
    [[nodiscard]] MPI_Comm everyone() const noexcept { return of_.all.get(); }
    /// Returns the ranks on this node, including this rank, in ascending order. They are ranks of the communicator
    /// `all`.
    [[nodiscard]] const std::vector<int> &ranks() const noexcept { return on_node_; }
    /// Converts a rank of the communicator `all` to the rank in this node, which plans and messages use. For a rank on
    /// another node the result is below 0. Every call rejects such a result with an error that names the rank; check
    /// with `contains` first. A rank below 0, such as `MPI_PROC_NULL`, is returned unchanged, and descriptors with it
    /// move nothing. Throws `argument_error` for a number that is not a rank of the communicator.
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
    /// Returns true if a rank of the communicator `all` is on this node. Use MPI for the other ranks.
    [[nodiscard]] bool contains(int rank) const noexcept {
        return rank >= 0 && rank < communicator_size() && index_[static_cast<std::size_t>(rank)] >= 0;
    }

    /// Returns the devices that the ranks on this node pass, in the order of `ranks()`. The devices have the numbers
    /// that they have in this process. Devices are identified by UUID, so the ranks may have different
    /// `CUDA_VISIBLE_DEVICES`. A rank whose GPU is not visible to this process gets no device in the result. Collective
    /// over the ranks on this node. Throws `argument_error` on a rank that passes a device that does not exist there;
    /// the other ranks continue and get no device for this rank. Throws `rank_failed` if ranks are in different calls.
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

    /// Exports `mine` and imports the memory that the other ranks of this node export. If `mine` is empty, this rank
    /// exports nothing. Collective over the ranks of this node. If an export or a mapping fails, nothing is thrown and
    /// no rank waits; `shared_memory::why` returns the reason. Throws `rank_failed` if ranks are in different calls.
    template <class T> [[nodiscard]] shared_memory<T> exchange(device_span<T> mine) const {
        return exchange(std::vector<device_span<T>>{mine});
    }
    /// Exchanges several memory ranges of each rank together; `shared_memory::of(rank, i)` returns range `i` of a rank.
    /// Ranges may be empty, and ranks may pass different numbers of ranges. If `kernels` is a device, the memory is
    /// mapped for its kernels (`imported_memory::in_kernels`), including memory of GPUs that are not visible to this
    /// process.
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
        // A rank that frees its memory after this point was mapped by all ranks that can map it. Without this barrier,
        // some ranks could find it freed and others not.
        mpgpu::detail::meet_all_ranks(get(), call);
        return shared;
    }
    /// Exchanges all elements of a buffer, or nothing if it is empty.
    template <class T> [[nodiscard]] shared_memory<T> exchange(buffer<T> &whole) const {
        return exchange(device_span<T>(whole));
    }

  private:
    /// Communicators that this object owns.
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
                const int count = static_cast<int>(bytes); // the library sends a few MiB at a time
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

    /// Gathers `count` values from each rank on this node. All ranks on the node must be in the collective `call`.
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
