// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PROCESSES_HPP
#define MPGPU_HALO_PROCESSES_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: one process for each rank.

#include <mpgpu/halo/plan.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h> // says whether it is GPU-aware
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo {

namespace detail {

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
        const bool staged = how.between_nodes == mpi_memory::staged ||
                            (how.between_nodes == mpi_memory::automatic && !on_host_backend(ctx) && !gpu_aware());
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
            for (const pair &p : all.pairs) {
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
            fail(refusal(MP_ERROR_NOT_SUPPORTED, "arrays",
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

struct processes {
    /// What a plan maps of other ranks, and the counters that they raise here.
    struct imports {
        buffer<std::uint64_t> counters; ///< `[r]`: exchanges that r has sent here; `[ranks + r]`: r has taken or awaits
        mpi::shared_memory<std::uint64_t> all_counters;
        mpi::shared_memory<std::byte> inboxes;
        std::vector<mpi::shared_memory<std::byte>> variables; ///< only where something is written to directly

        void unmap() noexcept {
            all_counters = {};
            inboxes = {};
            variables.clear();
        }
    };

    static int rank_of(const mpi::node &node) {
        int index = 0;
        mpi::detail::check(MPI_Comm_rank(node.communicator(), &index), "MPI_Comm_rank");
        return node.ranks()[static_cast<std::size_t>(index)];
    }

    static void barrier(const mpi::node &node) { mpi::detail::check(MPI_Barrier(node.communicator()), "MPI_Barrier"); }

    /// Whether something holds on all ranks of a communicator.
    static bool everywhere(MPI_Comm all, bool here) {
        const int mine = here ? 1 : 0;
        int least = 0;
        mpi::detail::check(MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, all), "MPI_Allreduce");
        return least != 0;
    }

    /// Calls `step()`. When it throws on one rank, all throw: a rank that went on alone would wait for ever.
    template <class Step> static void together(const mpi::node &node, const Step &step) {
#if MPGPU_EXCEPTIONS
        try {
            step();
        } catch (...) {
            static_cast<void>(everywhere(node.everyone(), false));
            throw;
        }
#else
        step(); // ends the process, and with it the job, where it fails
#endif
        if (!everywhere(node.everyone(), true)) {
            fail(invalid("arrays",
                         "another rank could not make its part of the halo exchange; its own message says why"));
        }
    }

    /// Whether `step()`, part of a form, goes through on all ranks. Where it is refused on one, the form is out on all.
    template <class Step>
    static bool attempt(const mpi::node &node, std::uint64_t direct_pieces, std::vector<refused_form> &out,
                        const Step &step) {
        std::optional<refused_form> own;
        together(node, [&] { own = refused(direct_pieces, step); });
        const bool done = everywhere(node.everyone(), !own);
        if (!done) {
            out.push_back(own ? std::move(*own)
                              : refused_form{direct_pieces, "refused on another rank; its own message says why", {}});
        }
        return done;
    }

    static void check_arguments(const mpi::node &node, const grid &g, int rank, const rank_arrays &arrays) {
        std::optional<error_details> found = wrong(g);
        if (!found && rank_count(g) != node.size()) {
            found = invalid("grid", "a rank grid of " + std::to_string(rank_count(g)) +
                                        " ranks: the communicator has " + std::to_string(node.size()));
        }
        found = found ? found : wrong(g, rank, arrays);
        if (found) {
            fail(std::move(*found));
        }
    }

    /// That all ranks have passed the same: a schedule that differs would put bytes in the wrong place.
    static void check_agreement(const mpi::node &node, const grid &g, const rank_arrays &arrays, const options &how) {
        std::uint64_t print = 14695981039346656037U; // FNV-1a, a word at a time
        const auto add = [&print](auto word) { print = (print ^ static_cast<std::uint64_t>(word)) * 1099511628211U; };
        for (std::size_t d = 0; d < 3; ++d) {
            add(g.cells[d]);
            add(g.ranks[d]);
            add(g.periodic[d]);
            add(g.ghost[d]);
        }
        add(g.reach);
        add(how.direct_pieces.has_value());
        add(how.direct_pieces.value_or(0));
        for (const array &one : arrays) {
            add(one.element_bytes);
        }
        const std::array<std::uint64_t, 2> mine = {print, ~print};
        std::array<std::uint64_t, 2> least{};
        mpi::detail::check(MPI_Allreduce(mine.data(), least.data(), 2, MPI_UINT64_T, MPI_MIN, node.everyone()),
                           "MPI_Allreduce");
        if (least[0] != ~least[1]) { // the least and the greatest print
            fail(invalid("grid", "the ranks have passed different grids, variables or values of direct_pieces"));
        }
    }

    /// The memory of a rank that must be there, `bytes` long.
    template <class T> static imported_memory<T> &mapped(mpi::shared_memory<T> &memory, int rank, std::uint64_t bytes) {
        imported_memory<T> *found = memory.of(rank);
        if (found == nullptr || found->size_bytes() < bytes) {
            const mp_status_t status =
                found == nullptr ? static_cast<mp_status_t>(memory.status(rank)) : MP_ERROR_INVALID_ARGUMENT;
            fail(refusal(status != MP_SUCCESS ? status : MP_ERROR_INTERNAL, "arrays",
                         "the memory of rank " + std::to_string(rank) + " cannot be written to: " + memory.why(rank)));
        }
        return *found;
    }

    /// Whether this rank can write to the arrays of every rank that it sends to directly.
    static bool map_variables(const mpi::node &node, const schedule &all, int rank, const rank_arrays &arrays,
                              imports &kept) {
        bool mapped = true;
        for (const array &one : arrays) {
            const auto bytes = static_cast<std::size_t>(one.size * one.element_bytes);
            kept.variables.push_back(node.exchange(
                device_span<std::byte>(span<std::byte>(static_cast<std::byte *>(one.data), bytes), one.location)));
            for (const pair &p : all.pairs) {
                mapped = mapped && (p.from != rank || p.direct.empty() || kept.variables.back().of(p.to) != nullptr);
            }
        }
        return everywhere(node.communicator(), mapped);
    }

    static bool writes_directly(const mpi::node &node, const schedule &all) noexcept {
        return std::any_of(all.pairs.begin(), all.pairs.end(),
                           [&](const pair &p) { return p.from != p.to && !p.direct.empty() && node.contains(p.from); });
    }

    static plan make(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                     const options &how) {
        const int rank = rank_of(node);
        together(node, [&] { check_arguments(node, g, rank, arrays); });
        check_agreement(node, g, arrays, how);
        const bool can_pack = everywhere(node.everyone(), plan::can_pack(ctx, how));
        std::vector<plan> forms;
        std::vector<refused_form> out; // the same forms on all ranks
        for (const std::uint64_t limit : limits_to_try(g, element_sizes(arrays), how, can_pack, false)) {
            std::optional<plan> form = make_with_limit(ctx, node, g, rank, arrays, how, limit, out);
            if (form) {
                forms.push_back(std::move(*form));
            }
        }
        // All by messages where memory cannot be mapped, whatever was to go straight.
        const bool alike = everywhere(node.everyone(), std::all_of(forms.begin(), forms.end(), [&](const plan &form) {
                                          return form.direct_pieces_ == forms[0].direct_pieces_;
                                      }));
        std::vector<double> seconds;
        if (!alike) {
            const stream order(ctx, arrays[0].location);
            seconds = least_seconds(forms.size(), [&](std::size_t form, int exchanges) {
                double own = 0;
                const auto measured = [&] { own = seconds_of([&] { forms[form].run(order, exchanges); }); };
                return attempt(node, forms[form].direct_pieces_, out, measured)
                           ? slowest(node, own)
                           : std::numeric_limits<double>::infinity();
            });
        }
        const std::size_t best = plan::choose(forms, seconds, out);
        for (std::size_t form = 0; form < forms.size(); ++form) {
            if (form != best) {
                close(node, forms[form]);
            }
        }
        if (best == forms.size()) {
            fail_as_first(out);
        }
        return std::move(forms[best]);
    }

    /// The greatest of all ranks' values.
    static double slowest(const mpi::node &node, double seconds) {
        double most = 0;
        mpi::detail::check(MPI_Allreduce(&seconds, &most, 1, MPI_DOUBLE, MPI_MAX, node.everyone()), "MPI_Allreduce");
        return most;
    }

    /// Empty on all ranks where it is refused on one.
    static std::optional<plan> make_with_limit(const context &ctx, const mpi::node &node, const grid &g, int rank,
                                               const rank_arrays &arrays, const options &how, const std::uint64_t limit,
                                               std::vector<refused_form> &out) {
        const auto kept = std::make_shared<imports>();
        const auto here = [&node](int other) { return node.contains(other); };
        std::uint64_t direct_pieces = limit;
        schedule all = schedule_of(g, element_sizes(arrays), direct_pieces, here);
        if (writes_directly(node, all) && !map_variables(node, all, rank, arrays, *kept)) {
            kept->variables.clear();
            direct_pieces = 0; // memory that cannot be shared: by messages, which can
            all = schedule_of(g, element_sizes(arrays), direct_pieces, here);
        }

        const auto ranks = static_cast<std::size_t>(rank_count(g));
        std::optional<plan> made;
        const auto allocate = [&] {
            made.emplace(plan(ctx, plan::valid{}));
            made->direct_pieces_ = direct_pieces;
            made->add_lane(ctx, all, rank, arrays[0].location);
            kept->counters = buffer<std::uint64_t>(ctx, device::host(), 2 * ranks);
            std::fill_n(kept->counters.data(), kept->counters.size(), 0);
        };
        const auto connect = [&] {
            add_counters(all, rank, *kept, *made);
            std::vector<plan::peer> peers = peers_of(g, all, rank, arrays, *kept, *made);
            made->imports_ = kept;
            made->build(ctx, g, all, peers, how);
        };
        const auto reach_other_nodes = [&] {
            if (node.ranks().size() != static_cast<std::size_t>(node.size())) {
                plan::lane &own = made->lanes_[0];
                made->off_node_ = std::make_shared<mpi_messages>(ctx, node, all, rank, own.outbox, own.inbox, how);
            }
        };
        bool done = attempt(node, limit, out, allocate);
        if (done) {
            kept->all_counters = node.exchange(kept->counters);
            kept->inboxes = node.exchange(made->lanes_[0].inbox);
            done = attempt(node, limit, out, connect) && attempt(node, limit, out, reach_other_nodes);
        }
        if (!done) {
            if (made) {
                made->transfers_.reset();
            }
            kept->unmap();
            barrier(node); // nobody has anybody's memory mapped any more
            return std::nullopt;
        }
        return made;
    }

    /// A pair has one counter at the receiver, raised by the sender to n when the bytes of exchange n are there, and
    /// one at the sender, raised by the receiver. Where ghost cells are written to directly, the sender waits until the
    /// receiver has started exchange n: only then has it done with the ghost cells of the last one. Where there are
    /// only messages, it waits until the one of exchange n - 1 has been unpacked.
    static void add_counters(const schedule &all, int rank, imports &kept, plan &made) {
        const auto ranks = kept.counters.size() / 2;
        const auto there = [&](int peer) { return mapped(kept.all_counters, peer, kept.counters.size_bytes()).data(); };
        for (const pair &p : all.pairs) {
            const auto from = static_cast<std::size_t>(p.from);
            const auto to = static_cast<std::size_t>(p.to);
            if (p.from == p.to || !p.on_node) {
                continue;
            }
            if (p.from == rank) {
                made.room_.push_back({kept.counters.data() + ranks + to, p.direct.empty() ? 1U : 0U});
                made.sent_.push_back({there(p.to) + from, 0});
            }
            if (p.to == rank) {
                made.arrived_.push_back({kept.counters.data() + from, 0});
                (p.direct.empty() ? made.taken_ : made.ghosts_free_).push_back({there(p.from) + ranks + to, 0});
            }
        }
    }

    static std::vector<plan::peer> peers_of(const grid &g, const schedule &all, int rank, const rank_arrays &arrays,
                                            imports &kept, plan &made) {
        const auto ranks = static_cast<std::size_t>(rank_count(g));
        std::vector<plan::peer> peers(ranks, {{}, {{}, device::host()}});
        peers[static_cast<std::size_t>(rank)] = {arrays, made.lanes_[0].inbox};
        for (const pair &p : all.pairs) {
            if (p.from != rank || p.to == rank || !p.on_node) {
                continue;
            }
            const auto to = static_cast<std::size_t>(p.to);
            if (p.bytes > 0) {
                peers[to].inbox = mapped(kept.inboxes, p.to, all.inbox_bytes[to]);
            }
            if (!p.direct.empty()) {
                const std::array<std::int64_t, 3> e = extents(g, p.to);
                const auto elements = static_cast<std::size_t>(e[0] * e[1] * e[2]);
                for (std::size_t v = 0; v < arrays.size(); ++v) {
                    const std::size_t bytes = arrays[v].element_bytes;
                    imported_memory<std::byte> &memory = mapped(kept.variables[v], p.to, elements * bytes);
                    peers[to].arrays.push_back({memory.data(), memory.location(), bytes, elements});
                }
            }
        }
        return peers;
    }

    static void close(const mpi::node &node, plan &whole) {
        whole.complete();
        mpgpu::detail::check(mp_stream_synchronize(whole.context_, whole.lanes_.front().order.get()));
        barrier(node); // nobody writes to anybody any more
        whole.transfers_.reset();
        static_cast<imports *>(whole.imports_.get())->unmap();
        barrier(node); // nobody has anybody's memory mapped any more
    }
};

} // namespace detail

/// One process for each rank, which gives the arrays of its own; ranks have the numbers in `node`'s communicator that
/// they have in the grid. Collective over them. In the time loop, ranks of one node are ordered by their streams and by
/// signals: no call into MPI, and no host waits. With ranks on other nodes messages are exchanged by MPI: `start` waits
/// for the packs and calls MPI, and so does `finish`, which waits for the messages. MPI must then allow calls from the
/// thread that calls these.
///
/// Where `options::direct_pieces` is empty, it exchanges a few times, and all ranks take the form that is the fastest
/// on the slowest of them. A form that one of them is refused is out on all. Memory that cannot be mapped by its
/// neighbours (see share.md) is exchanged by messages, `direct_pieces` or not. When a rank cannot make its part, all
/// throw: `invalid_argument` for arguments that do not go together or are not the same on all ranks, `not_supported` as
/// the constructor does, and what mpi.hpp throws. When a rank ends in the middle of an exchange, the streams of its
/// neighbours go on without its cells: whoever waits for such a stream by mpgpu (`stream::synchronize`,
/// `event::synchronize`, `request::wait`) gets `peer_gone`, and so does every later `start`.
[[nodiscard]] inline plan make_plan(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                                    const options &how = {}) {
    return detail::processes::make(ctx, node, g, arrays, how);
}

/// Ends a plan of `make_plan`: waits for its exchanges on all ranks, and frees no memory that another rank has mapped.
/// Collective; call it before the arrays are freed and before MPI_Finalize.
inline void close(const mpi::node &node, plan whole) {
    detail::processes::close(node, whole);
}

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PROCESSES_HPP
