// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MPI_HPP
#define MPGPU_MPI_HPP

/// @file
/// The MPI ranks of a node, which share memory and plan together: a header over mpgpu.hpp and MPI, nothing else.
///
/// @code
/// mpgpu::context ctx;
/// const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);                  // the ranks of this node, and their GPUs
/// const mpgpu::device gpu = node.devices().front();                  // one that this rank works for
/// mpgpu::buffer<double> ghost(ctx, gpu, n);
/// mpgpu::plan halo = node.plan_exchange(                             // what all ranks move in a step; collective
///     {mpgpu::send_to(right, tag, edge), mpgpu::receive_from(left, tag, ghost)});
///
/// auto ghosts = node.exchange(mpgpu::device_span<double>(ghost));    // everybody's, mapped here; collective
/// for (int rank : neighbours) {
///     if (auto *there = ghosts.of(rank)) {
///         transfers.push_back(mpgpu::make_transfer(*there, edge));   // on this node: a copy into its memory
///     } else {
///         by_mpi.push_back(rank);                                    // elsewhere: MPI, and ghosts.why(rank) says why
///     }
/// }
/// @endcode
///
/// Collective functions are called by all ranks of the communicator that the node was made from, in the same order.
/// They return, or throw, on all ranks alike where they say so: a rank that cannot export is reported to the others and
/// keeps none of them waiting.
///
/// Ranks of a node that are in different collective calls get `rank_failed`, with the names of both calls. They do not
/// wait for each other. Ranks of other nodes wait in MPI, as in any of its collective calls.
///
/// MPI errors are the communicator's error handler's; where that returns, they are thrown as `mpgpu::driver_error` with
/// MPI's code, or as `rank_failed` where ranks of a node talk to each other.

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

/// A communicator of this header's own, freed with the object unless MPI was finalised before.
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

/// What each rank tells the others in `exchange`. Plain bytes.
struct offer {
    memory_handle handle;
    std::int32_t status; ///< of its export; `MP_SUCCESS` with a handle
    std::uint32_t empty; ///< 1 when it has nothing to offer
};
static_assert(std::is_trivially_copyable_v<offer> && sizeof(offer) == sizeof(memory_handle) + 8);

} // namespace detail

/// A GPU, or a host domain, in all processes of a node: its UUID.
using device_uuid = std::array<unsigned char, 16>;

namespace detail {

[[nodiscard]] inline device_uuid uuid_of(mp_context_t context, device which) {
    device_uuid uuid{};
    on_error().report(mp_device_uuid(context, which.id(), uuid.data()));
    return uuid;
}

} // namespace detail

/// The UUID of a device of a context, whatever its number: equal in all processes exactly where it is the same GPU.
/// Throws `argument_error`, `driver_error`.
[[nodiscard]] inline device_uuid uuid_of(const context &ctx, device which) {
    return detail::uuid_of(ctx.get(), which);
}

/// The memory of all ranks, as far as this one can map it: what `node::exchange` returns. Move-only. It keeps the
/// mappings; copies into memory of a rank must have ended before that rank frees it.
template <class T> class shared_memory {
  public:
    /// Ranks of the communicator.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(peers_.size()); }

    /// The memory of a rank of the communicator that the node was made from, of several ranges the one with this index;
    /// this rank's own under its own address. `nullptr` for what the rank did not offer, for a rank of another node,
    /// and for memory that cannot be mapped: `why` tells.
    [[nodiscard]] imported_memory<T> *of(int rank, std::size_t range = 0) noexcept {
        mapped *const found = contains(rank, range) ? &peers_[static_cast<std::size_t>(rank)].ranges[range] : nullptr;
        return found != nullptr && found->memory ? &found->memory : nullptr;
    }
    /// The same, as the source of transfers.
    [[nodiscard]] const imported_memory<T> *of(int rank, std::size_t range = 0) const noexcept {
        const mapped &found = find(rank, range);
        return found.memory ? &found.memory : nullptr;
    }

    /// Why `of(rank, range)` is `nullptr`: `success` when it is not, and when the rank did not offer it.
    [[nodiscard]] mpgpu::status status(int rank, std::size_t range = 0) const noexcept {
        return find(rank, range).status;
    }

    /// The same for people; empty when there is nothing to say.
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
        std::vector<mapped> ranges; ///< none on another node
        mapped elsewhere;           ///< what holds for all other ranges
    };

    [[nodiscard]] bool contains(int rank, std::size_t range) const noexcept {
        return rank >= 0 && rank < size() && range < peers_[static_cast<std::size_t>(rank)].ranges.size();
    }
    [[nodiscard]] const mapped &find(int rank, std::size_t range) const noexcept {
        static const mapped no_rank{
            {}, mpgpu::status::invalid_argument, "it is no rank of the communicator, which numbers these ranks"};
        if (contains(rank, range)) {
            return peers_[static_cast<std::size_t>(rank)].ranges[range];
        }
        return rank >= 0 && rank < size() ? peers_[static_cast<std::size_t>(rank)].elsewhere : no_rank;
    }
    std::vector<peer> peers_;
};

/// The ranks of a communicator that share this rank's node: they map each other's memory (`exchange`), and plan
/// together as those of an `mpgpu::node`. Made once, collectively; refers to what the context owns, which may be moved,
/// and must outlive it. To be destroyed before `MPI_Finalize`, and after its plans.
///
/// `rank()` and `size()` are of the node, as with any `mpgpu::node`, and so are the ranks in its plans and messages.
/// `communicator_rank()` and `communicator_size()` are of the communicator `all` that it was made from, and `exchange`,
/// `halo::plan` and `contains` take ranks of that. `rank_on_node` leads from there to the node. Both numbers are the
/// same if all ranks are on one node.
class node : public mpgpu::node {
  public:
    /// No rank: collective calls throw `argument_error`.
    node() noexcept = default;

    /// Splits `all` by node. Collective over `all`, which stays the caller's and is duplicated, so that messages of
    /// this object meet none of the caller's. `gpus` as for `mpgpu::node`. Throws as that does, and `driver_error` for
    /// an error of MPI.
    node(const context &ctx, MPI_Comm all, array_view<const device> gpus = {})
        : node(ctx, communicators(all, MPI_COMM_NULL), gpus) {}
    /// The same with one GPU, also where `std::optional::emplace` or `std::make_unique` passes the arguments on, which
    /// take no list in braces.
    node(const context &ctx, MPI_Comm all, device gpu) : node(ctx, all, array_view<const device>(&gpu, 1)) {}

    /// As above, for a code that has the communicator of its node's ranks already, `local`, or one of fewer ranks of
    /// this node: only these share memory and plan together. Both stay the caller's. `MPI_COMM_NULL`: as above.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, array_view<const device> gpus = {})
        : node(ctx, communicators(all, local), gpus) {}
    /// The same with one GPU.
    node(const context &ctx, MPI_Comm all, MPI_Comm local, device gpu)
        : node(ctx, all, local, array_view<const device>(&gpu, 1)) {}

    /// This rank in the communicator `all`; -1 of an empty object.
    [[nodiscard]] int communicator_rank() const noexcept {
        return on_node_.empty() ? -1 : on_node_[static_cast<std::size_t>(rank())];
    }
    /// Ranks of the communicator `all`, on all nodes; 0 of an empty object.
    [[nodiscard]] int communicator_size() const noexcept { return static_cast<int>(index_.size()); }
    /// The communicator of the ranks of this node; it belongs to this object.
    [[nodiscard]] MPI_Comm communicator() const noexcept { return of_.local ? of_.local->get() : MPI_COMM_NULL; }
    /// A duplicate of the communicator that this object was made from: all ranks, of all nodes. It belongs to this
    /// object.
    [[nodiscard]] MPI_Comm everyone() const noexcept { return of_.all.get(); }
    /// The ranks of this node, this one included, as the communicator `all` numbers them, ascending.
    [[nodiscard]] const std::vector<int> &ranks() const noexcept { return on_node_; }
    /// The rank of this node that a rank of the communicator `all` is, as plans and messages number them. For a rank of
    /// another node it is a number below 0 that every call refuses by name; ask `contains` first. A rank below 0, as
    /// `MPI_PROC_NULL`, is returned as it is: half-transfers with it move nothing. Throws `argument_error` for a rank
    /// that the communicator does not have.
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
    /// True if a rank of the communicator `all` is on this node. For the others the code goes on using MPI.
    [[nodiscard]] bool contains(int rank) const noexcept {
        return rank >= 0 && rank < communicator_size() && index_[static_cast<std::size_t>(rank)] >= 0;
    }

    /// The device that each rank of this node names, in the order of `ranks()`, as this process numbers devices: by
    /// UUID, whatever `CUDA_VISIBLE_DEVICES` each rank has. A rank whose GPU this process does not see has none.
    /// Collective over the ranks of this node. Throws `argument_error` on the rank that names a device that it does
    /// not have, after the others have gone on; they find it without one. Throws `rank_failed` if ranks are in
    /// different calls.
    [[nodiscard]] std::vector<std::optional<device>> device_of_each(device mine) const {
        check_made();
        device_uuid uuid{};
        const mp_status_t outcome = mp_device_uuid(context_, mine.id(), uuid.data());
        error_details refused = outcome == MP_SUCCESS ? error_details() : last_error();
        const std::vector<device_uuid> all = of_all("mpi::node::device_of_each", &uuid, 1);
        if (outcome != MP_SUCCESS) {
            mpgpu::detail::fail(std::move(refused));
        }
        std::vector<std::optional<device>> found(all.size());
        for (int id = -devices_.host_domains; id < devices_.gpus; ++id) {
            const device_uuid here = detail::uuid_of(context_, device::from_id(id));
            for (std::size_t i = 0; i < all.size(); ++i) {
                if (all[i] == here) {
                    found[i] = device::from_id(id);
                }
            }
        }
        return found;
    }

    /// Exports `mine` and imports what the other ranks of this node export: handles are gathered, then each rank maps
    /// what it can. An empty span offers nothing. Collective over the ranks of this node. A rank whose export or whose
    /// mapping fails is one of the ranks without memory, with the reason: nothing is thrown for it, and nobody waits
    /// for it. Throws `rank_failed` if ranks are in different calls.
    template <class T> [[nodiscard]] shared_memory<T> exchange(device_span<T> mine) const {
        return exchange(std::vector<device_span<T>>{mine});
    }
    /// The same for several ranges of each rank at once, found by rank and index: `of(rank, i)`. Some may be empty, and
    /// ranks may offer different numbers of them.
    /// With `kernels`, for kernels of that device (`imported_memory::in_kernels`), memory of GPUs out of sight
    /// included.
    template <class T>
    [[nodiscard]] shared_memory<T> exchange(const std::vector<device_span<T>> &mine,
                                            device kernels = device::automatic()) const {
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
                                            "); its own message says why";
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
        // A rank that frees its memory after this has been mapped by all who could; one that does so before would be
        // reported as gone by some and not by others.
        mpgpu::detail::meet_all_ranks(get(), call);
        return shared;
    }
    /// All elements of a buffer; none where it is empty.
    template <class T> [[nodiscard]] shared_memory<T> exchange(buffer<T> &whole) const {
        return exchange(device_span<T>(whole));
    }

  private:
    /// This object's own.
    struct communicators {
        detail::communicator all;
        std::shared_ptr<detail::communicator> local; ///< of this node; the allgather has it too

        /// Split by node where `local` is `MPI_COMM_NULL`.
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

    node(const context &ctx, communicators of, array_view<const device> gpus)
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

    /// What all ranks of this node pass to a call, `count` values of each.
    template <class T> [[nodiscard]] std::vector<T> of_all(const char *call, const T *mine, std::size_t count) const {
        return mpgpu::detail::of_all_ranks(get(), on_node_.size(), call, mine, count);
    }

    /// MPI would end the program.
    void check_made() const {
        if (!*this) {
            mpgpu::detail::fail_empty("node");
        }
    }

    mp_context_t context_ = nullptr;
    device_count devices_;
    communicators of_;
    std::vector<int> on_node_; ///< rank in `all` of each rank of this node
    std::vector<int> index_;   ///< place in `on_node_` of each rank of `all`; -1 on another node
};

} // namespace mpgpu::mpi

#endif // MPGPU_MPI_HPP
