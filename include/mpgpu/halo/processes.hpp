// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PROCESSES_HPP
#define MPGPU_HALO_PROCESSES_HPP

/// @file
/// Part of mpgpu/halo_mpi.hpp, which programs include: plans of one process for each rank.

#include <mpgpu/halo/messages.hpp>
#include <mpgpu/halo/plan.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>

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

namespace mpgpu::halo::detail {

template <> struct processes<mpi::node> {
    /// What other ranks map of a plan that they made jointly goes back with their part of it.
    struct joint_memory : imports {
        explicit joint_memory(const mpi::node &node) : communicator(node.communicator()) {}

        MPI_Comm communicator; ///< the node's

        void barrier() override { mpi::detail::check(MPI_Barrier(communicator), "MPI_Barrier"); }
        void unmap() noexcept override {}
    };

    /// What a plan maps of other ranks, and the counters that they raise here.
    struct mapped_memory final : joint_memory {
        using joint_memory::joint_memory;

        /// `[r]`: exchanges that r has sent here; `[ranks + r]`: that r has taken or awaits; then the same as flags.
        signal_counters counters;
        mpi::shared_memory<std::uint64_t> all_counters;
        mpi::shared_memory<std::byte> inboxes;
        std::vector<mpi::shared_memory<std::byte>> variables; ///< only where something is written to directly

        void unmap() noexcept override {
            all_counters = {};
            inboxes = {};
            variables.clear();
        }
    };

    /// What a plan maps of other ranks whose kernels push.
    struct pushed_memory final : joint_memory {
        using joint_memory::joint_memory;

        signal_counters gone; ///< one: raised when a rank has ended
        mpi::shared_memory<std::uint64_t> gone_there;
        mpi::shared_memory<std::byte> inboxes;

        void unmap() noexcept override {
            gone_there = {};
            inboxes = {};
        }
    };

    static int rank_of(const mpi::node &node) {
        int index = 0;
        mpi::detail::check(MPI_Comm_rank(node.communicator(), &index), "MPI_Comm_rank");
        return node.ranks()[static_cast<std::size_t>(index)];
    }

    static bool is_one_node(const mpi::node &node) noexcept {
        return node.ranks().size() == static_cast<std::size_t>(node.size());
    }

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
    static bool attempt(const mpi::node &node, form which, std::vector<refused_form> &out, const Step &step) {
        std::optional<refused_form> own;
        together(node, [&] { own = refused(which, step); });
        const bool done = everywhere(node.everyone(), !own);
        if (!done) {
            out.push_back(own ? std::move(*own)
                              : refused_form{which, "refused on another rank; its own message says why", {}});
        }
        return done;
    }

    static void check_arguments(const mpi::node &node, const grid &g, int rank, const rank_arrays &arrays,
                                const options &how) {
        std::optional<error_details> found = wrong(g);
        found = found ? found : wrong(how);
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
        add(how.joint.has_value());
        add(how.joint.value_or(false));
        add(how.persistent);
        add(how.pushed.has_value());
        add(how.pushed.value_or(false));
        for (const rank_array &one : arrays) {
            add(one.element_bytes);
        }
        const std::array<std::uint64_t, 2> mine = {print, ~print};
        std::array<std::uint64_t, 2> least{};
        mpi::detail::check(MPI_Allreduce(mine.data(), least.data(), 2, MPI_UINT64_T, MPI_MIN, node.everyone()),
                           "MPI_Allreduce");
        if (least[0] != ~least[1]) { // the least and the greatest print
            fail(invalid("grid", "the ranks have passed different grids, variables or values of direct_pieces, joint, "
                                 "persistent or pushed"));
        }
    }

    /// The memory of a rank that must be there, `bytes` long.
    template <class T> static imported_memory<T> &mapped(mpi::shared_memory<T> &memory, int rank, std::uint64_t bytes) {
        imported_memory<T> *found = memory.of(rank);
        if (found == nullptr || found->size_bytes() < bytes) {
            const status why = found == nullptr ? memory.status(rank) : status::invalid_argument;
            fail(refusal(why != status::success ? why : status::internal, "arrays",
                         "the memory of rank " + std::to_string(rank) + " cannot be written to: " + memory.why(rank)));
        }
        return *found;
    }

    /// Whether this rank can write to the arrays of every rank that it sends to directly.
    static bool map_variables(const mpi::node &node, const schedule &all, int rank, const rank_arrays &arrays,
                              mapped_memory &kept) {
        bool mapped = true;
        for (const rank_array &one : arrays) {
            const auto bytes = static_cast<std::size_t>(one.size * one.element_bytes);
            kept.variables.push_back(node.exchange(device_span<std::byte>(
                array_view<std::byte>(static_cast<std::byte *>(one.data), bytes), one.location)));
            for (const rank_pair &p : all.pairs) {
                mapped = mapped && (p.from != rank || p.direct.empty() || kept.variables.back().of(p.to) != nullptr);
            }
        }
        return everywhere(node.communicator(), mapped);
    }

    static bool writes_directly(const mpi::node &node, const schedule &all) noexcept {
        return std::any_of(all.pairs.begin(), all.pairs.end(), [&](const rank_pair &p) {
            return p.from != p.to && !p.direct.empty() && node.contains(p.from);
        });
    }

    static plan make(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                     const options &how) {
        if (!node) {
            mpgpu::detail::fail_empty("node"); // MPI would end the program
        }
        const int rank = rank_of(node);
        together(node, [&] { check_arguments(node, g, rank, arrays, how); });
        check_agreement(node, g, arrays, how);
        const bool can_pack = everywhere(node.everyone(), plan::can_pack(ctx, how));
        std::vector<plan> forms;
        std::vector<refused_form> out; // the same forms on all ranks
        const auto keep = [&forms](std::optional<plan> made) {
            if (made) {
                forms.push_back(std::move(*made));
            }
        };
        const bool only_pushed = how.pushed.value_or(false);
        if (!only_pushed && !how.joint.value_or(false)) {
            for (const std::uint64_t limit : limits_to_try(g, element_sizes(arrays), how, can_pack, false)) {
                keep(make_with_limit(ctx, node, g, rank, arrays, how, limit, out));
            }
        }
        // A rank that is alone on its node plans for itself.
        const bool is_alone = everywhere(node.everyone(), node.ranks().size() == 1);
        if (!only_pushed && how.joint.value_or(!is_alone)) {
            std::optional<mpgpu::node> planner;
            const auto meet = [&] {
                const device own = arrays[0].location;
                planner.emplace(mpi::make_node(ctx, node.communicator(),
                                               own.is_host() ? std::vector<device>{} : std::vector<device>{own}));
            };
            if (attempt(node, {how.direct_pieces.value_or(0), true}, out, meet)) {
                for (const std::uint64_t limit : limits_to_try(g, element_sizes(arrays), how, can_pack, true)) {
                    keep(make_joint(ctx, node, *planner, g, rank, arrays, how, limit, out));
                }
            }
        }
        if (tries_pushed(g, how, everywhere(node.everyone(), is_one_node(node) && can_push(ctx, how)))) {
            keep(make_pushed(ctx, node, g, rank, arrays, how, out));
        }
        // All by messages where memory cannot be mapped, whatever was to go straight.
        const bool alike = everywhere(node.everyone(), std::all_of(forms.begin(), forms.end(), [&](const plan &form) {
                                          return form.direct_pieces_ == forms[0].direct_pieces_ &&
                                                 form.joint_ == forms[0].joint_ && form.pushed_ == forms[0].pushed_;
                                      }));
        std::vector<double> seconds;
        if (!alike) {
            const stream order(ctx, arrays[0].location);
            seconds = least_seconds(forms.size(), [&](std::size_t form, int exchanges) {
                double own = 0;
                const auto measured = [&] { own = seconds_of([&] { forms[form].run(order, exchanges); }); };
                return attempt(node, forms[form].which(), out, measured) ? slowest(node, own)
                                                                         : std::numeric_limits<double>::infinity();
            });
        }
        const std::size_t best = plan::choose(forms, seconds, out);
        for (std::size_t form = 0; form < forms.size(); ++form) {
            if (form != best) {
                forms[form].destroy();
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
        const auto kept = std::make_shared<mapped_memory>(node);
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
            made->add_lane(ctx, all, rank, arrays[0].location, is_one_node(node));
            kept->counters = signal_counters(ctx, 4 * ranks);
        };
        const auto connect = [&] {
            add_counters(all, rank, *kept, *made);
            std::vector<plan::peer> peers = peers_of(g, all, rank, arrays, *kept, *made);
            made->imports_ = kept;
            made->build(ctx, g, all, peers, how);
        };
        const auto reach_other_nodes = [&] { add_messages(ctx, node, g, all, rank, arrays, how, *made); };
        const form which{limit, false};
        bool done = attempt(node, which, out, allocate);
        if (done) {
            kept->all_counters = node.exchange(kept->counters);
            kept->inboxes = node.exchange(made->lanes_[0].inbox);
            done = attempt(node, which, out, connect) && attempt(node, which, out, reach_other_nodes);
        }
        if (!done) {
            if (made) {
                made->transfers_.reset();
            }
            kept->unmap();
            kept->barrier(); // nobody has anybody's memory mapped any more
            return std::nullopt;
        }
        return made;
    }

    /// Messages to and from ranks of other nodes, where there are any.
    static void add_messages(const context &ctx, const mpi::node &node, const grid &g, const schedule &all, int rank,
                             const rank_arrays &arrays, const options &how, plan &made) {
        if (is_one_node(node)) {
            return;
        }
        plan::lane &own = made.lanes_[0];
        if (how.persistent == persistent_form::none) {
            made.off_node_ = std::make_shared<mpi_messages>(ctx, node, all, rank, own.outbox, own.inbox, how);
        } else {
            made.off_node_ =
                std::make_shared<persistent_messages>(ctx, node, g, all, rank, arrays, own.outbox, own.inbox, how);
        }
    }

    /// The same with one plan for all ranks of the node, which also orders them: no counters, and nothing mapped here.
    static std::optional<plan> make_joint(const context &ctx, const mpi::node &node, const mpgpu::node &planner,
                                          const grid &g, int rank, const rank_arrays &arrays, const options &how,
                                          std::uint64_t limit, std::vector<refused_form> &out) {
        const schedule all =
            schedule_of(g, element_sizes(arrays), limit, [&node](int other) { return node.contains(other); });
        const auto kept = std::make_shared<joint_memory>(node);
        std::optional<plan> made;
        const auto allocate = [&] {
            made.emplace(plan(ctx, plan::valid{}));
            made->direct_pieces_ = limit;
            made->joint_ = true;
            made->imports_ = kept;
            made->add_lane(ctx, all, rank, arrays[0].location, is_one_node(node));
            std::vector<plan::peer> peers(static_cast<std::size_t>(rank_count(g)), {{}, {{}, device::host()}});
            peers[static_cast<std::size_t>(rank)].arrays = arrays;
            made->add_copies(ctx, g, all, peers, how);
            add_messages(ctx, node, g, all, rank, arrays, how, *made);
        };
        const auto connect = [&] {
            const std::vector<node_transfer> transfers = transfers_of(node, g, all, rank, arrays);
            std::vector<window> windows;
            for (const rank_array &one : arrays) {
                windows.push_back({one.data, one.size * one.element_bytes});
            }
            plan::lane &own = made->lanes_[0];
            windows.push_back(make_window(own.outbox));
            windows.push_back(make_window(own.inbox));
            made->transfers_.emplace(planner.plan(windows, transfers, how.transfers));
        };
        const form which{limit, true};
        if (attempt(node, which, out, allocate) && attempt(node, which, out, connect)) {
            return made;
        }
        if (made) {
            made->transfers_.reset();
        }
        kept->barrier(); // nobody has anybody's memory mapped any more
        return std::nullopt;
    }

    /// The same by one kernel, which writes straight into the inboxes of other ranks.
    static std::optional<plan> make_pushed(const context &ctx, const mpi::node &node, const grid &g, int rank,
                                           const rank_arrays &arrays, const options &how,
                                           std::vector<refused_form> &out) {
        const auto kept = std::make_shared<pushed_memory>(node);
        const device where = arrays[0].location;
        const auto own = static_cast<std::size_t>(rank);
        const auto here = [&node](int other) { return node.contains(other); };
        schedule all = schedule_of(g, element_sizes(arrays), 0, here);
        const pushed_inboxes at(all);
        const int sharing = ranks_sharing(ctx, where, node.communicator());
        std::optional<plan> made;
        const auto allocate = [&] {
            if (!sends_both_ways(all) || !is_one_node(node)) {
                fail(refusal(status::not_supported, "how",
                             "options::pushed is for ranks of one node: leave it out where there are others"));
            }
            static_cast<void>(pusher(ctx, how));
            all.outbox_bytes[own] = 0;
            all.inbox_bytes[own] = 2 * at.half[own] + at.flag_bytes(own);
            made.emplace(plan(ctx, plan::valid{}));
            made->pushed_ = true;
            made->imports_ = kept;
            made->add_lane(ctx, all, rank, where, true);
            clear(ctx, made->lanes_[0].inbox, 2 * at.half[own], made->lanes_[0].order);
            kept->gone = signal_counters(ctx, 1);
        };
        const auto connect = [&] {
            const auto inbox = [&](int to) {
                const auto of = static_cast<std::size_t>(to);
                return to == rank ? made->lanes_[0].inbox.data()
                                  : mapped(kept->inboxes, to, 2 * at.half[of] + at.flag_bytes(of)).in_kernels();
            };
            pushed_messages messages = messages_of(all, at, g, rank, arrays, inbox, true);
            messages.gone = kept->gone.data();
            made->count_sent(all, rank, arrays);
            for (const rank_pair &p : all.pairs) {
                if (p.from == rank && p.to != rank) {
                    made->gone_there_.push_back(mapped(kept->gone_there, p.to, sizeof(std::uint64_t)).data());
                }
            }
            made->gone_ = {kept->gone.data(), 1};
            check(mp_kernel_wait_signals(ctx.get(), &made->gone_, 1));
            made->push_ = pusher(ctx, how)(ctx, where, messages, sharing);
        };
        const form which{0, false, true};
        bool done = attempt(node, which, out, allocate);
        if (done) {
            kept->gone_there = node.exchange(kept->gone);
            kept->inboxes = node.exchange<std::byte>({device_span<std::byte>(made->lanes_[0].inbox)}, where);
            done = attempt(node, which, out, connect);
        }
        if (!done) {
            kept->unmap();
            kept->barrier(); // nobody has anybody's memory mapped any more
            return std::nullopt;
        }
        return made;
    }

    /// Sets the bytes of a buffer from `offset` on to 0, and waits for it.
    static void clear(const context &ctx, memory &of, std::uint64_t offset, const stream &order) {
        const std::size_t bytes = of.size() - static_cast<std::size_t>(offset);
        if (bytes > 0) {
            memory zeros(ctx, device::host(), bytes);
            std::fill_n(zeros.data(), bytes, std::byte{0});
            mpgpu::plan(ctx, {make_transfer(of.subspan(offset, bytes), zeros)}).execute(order).synchronize();
        }
    }

    /// What a rank sends to ranks of its node, itself included. Windows of a rank are its arrays, its outbox and its
    /// inbox.
    static std::vector<node_transfer> transfers_of(const mpi::node &node, const grid &g, const schedule &all, int rank,
                                                   const rank_arrays &arrays) {
        const auto variables = static_cast<std::uint32_t>(arrays.size());
        const auto number = [&node](int of) {
            const std::vector<int> &here = node.ranks();
            return static_cast<std::uint32_t>(std::lower_bound(here.begin(), here.end(), of) - here.begin());
        };
        std::vector<node_transfer> transfers;
        for (const rank_pair &p : all.pairs) {
            if (p.from != rank) {
                continue;
            }
            for_each_direct(p, g, element_sizes(arrays),
                            [&](std::size_t v, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
                                const auto window = static_cast<std::uint32_t>(v);
                                transfers.push_back({{number(p.to), window, to}, {number(rank), window, from}, bytes});
                            });
            if (p.to != rank && p.bytes > 0 && p.on_node) {
                transfers.push_back({{number(p.to), variables + 1, p.inbox_offset},
                                     {number(rank), variables, p.outbox_offset},
                                     p.bytes});
            }
        }
        return transfers;
    }

    /// A pair of ranks has one counter at the receiver, raised by the sender to n when the bytes of exchange n are
    /// there, and one at the sender, raised by the receiver. Where ghost cells are written to directly, the sender
    /// waits until the receiver has started exchange n: only then has it done with the ghost cells of the last one.
    /// Where there are only messages, it waits until the one of exchange n - 1 has been unpacked. By flags, both wait
    /// until the receiver has started the exchange.
    static void add_counters(const schedule &all, int rank, mapped_memory &kept, plan &made) {
        const auto ranks = kept.counters.size() / 4;
        const auto there = [&](int peer) { return mapped(kept.all_counters, peer, kept.counters.size_bytes()).data(); };
        for (const rank_pair &p : all.pairs) {
            const auto from = static_cast<std::size_t>(p.from);
            const auto to = static_cast<std::size_t>(p.to);
            if (p.from == p.to || !p.on_node) {
                continue;
            }
            if (p.from == rank) {
                std::uint64_t *const room = kept.counters.data() + ranks + to;
                std::uint64_t *const sent = there(p.to) + from;
                made.room_.push_back({room, p.direct.empty() ? 1U : 0U, room + 2 * ranks});
                made.sent_.push_back({sent, 0, sent + 2 * ranks});
            }
            if (p.to == rank) {
                std::uint64_t *const arrived = kept.counters.data() + from;
                std::uint64_t *const taken = there(p.from) + ranks + to;
                made.arrived_.push_back({arrived, 0, arrived + 2 * ranks});
                (p.direct.empty() ? made.taken_ : made.ghosts_free_).push_back({taken, 0, taken + 2 * ranks});
            }
        }
    }

    static std::vector<plan::peer> peers_of(const grid &g, const schedule &all, int rank, const rank_arrays &arrays,
                                            mapped_memory &kept, plan &made) {
        const auto ranks = static_cast<std::size_t>(rank_count(g));
        std::vector<plan::peer> peers(ranks, {{}, {{}, device::host()}});
        peers[static_cast<std::size_t>(rank)] = {arrays, made.lanes_[0].inbox};
        for (const rank_pair &p : all.pairs) {
            if (p.from != rank || p.to == rank || !p.on_node) {
                continue;
            }
            const auto to = static_cast<std::size_t>(p.to);
            if (p.bytes > 0) {
                peers[to].inbox = mapped(kept.inboxes, p.to, all.inbox_bytes[to]);
            }
            if (!p.direct.empty()) {
                const std::array<std::int64_t, 3> e = array_extents(g, p.to);
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
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_PROCESSES_HPP
