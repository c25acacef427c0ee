// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PROCESSES_HPP
#define MPGPU_HALO_PROCESSES_HPP

/// @file
/// Creation of halo plans with one process per rank. Part of mpgpu/halo_mpi.hpp; include that header.

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
    /// Memory of the other ranks of the node that a plan has mapped.
    struct of_others final : imports {
        /// `name` is the function that errors of `barrier` mention.
        explicit of_others(const mpi::node &ranks, const char *name = "halo::plan::destroy")
            : node(ranks.get()), call(name) {}

        mp_node_t node; ///< node to which these ranks belong
        const char *call;
        // Used only if messages are pushed:
        signal_counters gone; ///< one counter, which is set when a rank has exited
        mpi::shared_memory<std::uint64_t> gone_there;
        mpi::shared_memory<std::byte> inboxes;

        void barrier() override { mpgpu::detail::meet_all_ranks(node, call); }
        void unmap() noexcept override {
            gone_there = {};
            inboxes = {};
        }
    };

    static bool is_one_node(const mpi::node &node) noexcept { return node.size() == node.communicator_size(); }

    /// Returns true if `here` is true on all ranks of a communicator. Collective.
    static bool everywhere(MPI_Comm all, bool here) {
        const int mine = here ? 1 : 0;
        int least = 0;
        mpi::detail::check(MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, all), "MPI_Allreduce");
        return least != 0;
    }

    /// Calls `step()` on all ranks. If it throws on one rank, all ranks throw, because a rank that continued would wait
    /// forever for the failed rank. `argument` is the argument that the error on the other ranks names.
    /// Collective.
    template <class Step>
    static void together(const mpi::node &node, const Step &step, const char *argument = "arrays") {
        together(node.everyone(), step, argument);
    }
    /// Calls `step()` on all ranks of a communicator. In all other respects it is the same as the overload with a node.
    template <class Step> static void together(MPI_Comm all, const Step &step, const char *argument) {
#if MPGPU_EXCEPTIONS
        try {
            step();
        } catch (...) {
            static_cast<void>(everywhere(all, false));
            throw;
        }
#else
        step(); // without exceptions, a failure ends the process and the job
#endif
        if (!everywhere(all, true)) {
            fail(invalid(argument,
                         "another rank could not make its part of the halo exchange; its own error gives the reason"));
        }
    }

    /// Returns true if `step()`, which is a part of the setup of an exchange method, succeeds on all ranks. If it fails
    /// on one rank, the method is excluded on all ranks. Collective.
    template <class Step>
    static bool attempt(const mpi::node &node, form which, std::vector<refused_form> &out, const Step &step) {
        std::optional<refused_form> own;
        together(node, [&] { own = refused(which, step); });
        const bool done = everywhere(node.everyone(), !own);
        if (!done) {
            out.push_back(own ? std::move(*own)
                              : refused_form{which, "refused on another rank; its own error gives the reason", {}});
        }
        return done;
    }

    /// Throws the same error on all ranks if one rank or more has found an error. If several ranks have found errors,
    /// throws the error of the rank with the lowest number. Collective.
    static void agree(const mpi::node &node, const std::optional<error_details> &found) {
        constexpr int none = std::numeric_limits<int>::max();
        int first = found ? node.communicator_rank() : none;
        mpi::detail::check(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, node.everyone()), "MPI_Allreduce");
        if (first == none) {
            return;
        }
        const auto share = [&](void *data, std::size_t bytes) {
            mpi::detail::check(MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, first, node.everyone()), "MPI_Bcast");
        };
        error_details whole = found ? *found : invalid("", "");
        std::array<std::size_t, 2> sizes = {whole.argument.size(), whole.message.size()};
        share(&whole.status, sizeof whole.status);
        share(sizes.data(), sizeof sizes);
        whole.argument.resize(sizes[0]);
        whole.message.resize(sizes[1]);
        share(whole.argument.data(), sizes[0]);
        share(whole.message.data(), sizes[1]);
        fail(std::move(whole));
    }

    /// Throws if the ranks have passed different arguments. Different schedules would write data to wrong addresses.
    static void check_agreement(const mpi::node &node, const division &all, const grid &g, const options &how) {
        std::uint64_t print = 14695981039346656037U; // hash of the arguments: FNV-1a, a word at a time
        const auto add = [&print](auto word) { print = (print ^ static_cast<std::uint64_t>(word)) * 1099511628211U; };
        for (std::size_t d = 0; d < 3; ++d) {
            add(all.whole.cells.first[d]);
            add(all.whole.cells.cells[d]);
            add(all.whole.periodic[d]);
            add(all.whole.ghost.low[d]);
            add(all.whole.ghost.high[d]);
            add(all.depth.low[d]);
            add(all.depth.high[d]);
            add(mesh_ranks(g)[d]);
        }
        add(g.order);
        add(all.whole.reach);
        add(how.direct_pieces.has_value());
        add(how.direct_pieces.value_or(0));
        add(how.persistent);
        add(how.pushed.has_value());
        add(how.pushed.value_or(false));
        for (const variable &v : all.variables) {
            add(v.element_bytes);
            for (const bool staggered : v.staggered) {
                add(staggered);
            }
        }
        const std::array<std::uint64_t, 2> mine = {print, ~print};
        std::array<std::uint64_t, 2> least{};
        mpi::detail::check(MPI_Allreduce(mine.data(), least.data(), 2, MPI_UINT64_T, MPI_MIN, node.everyone()),
                           "MPI_Allreduce");
        if (least[0] != ~least[1]) { // compares the smallest and the largest hash
            fail(invalid("grid",
                         "the ranks have passed different arguments: the grid or domain, the variables, and the "
                         "options depth, direct_pieces, persistent and pushed must be equal on all ranks"));
        }
    }

    /// Adds the boxes and the array layouts of all ranks to a division. Collective.
    static void gather(const mpi::node &node, division &all, const rank_boxes &boxes, const rank_arrays &arrays) {
        const auto ranks = static_cast<std::size_t>(all.ranks);
        const std::size_t words = 6 + 3 * all.variables.size(); // of each box: 6 for its cells, 3 for each array
        division mine = all;
        add_boxes(mine, node.communicator_rank(), boxes, arrays);
        std::vector<std::int64_t> sent;
        for (const rank_box &b : mine.boxes) {
            sent.insert(sent.end(), b.cells.first.begin(), b.cells.first.end());
            sent.insert(sent.end(), b.cells.cells.begin(), b.cells.cells.end());
            for (const array_place &at : b.places) {
                sent.insert(sent.end(), {at.first, at.row, at.plane});
            }
        }
        std::vector<int> counts(ranks);
        const auto count = static_cast<int>(sent.size());
        mpi::detail::check(MPI_Allgather(&count, 1, MPI_INT, counts.data(), 1, MPI_INT, node.everyone()),
                           "MPI_Allgather");
        std::vector<int> starts;
        int total = 0;
        for (const int of : counts) {
            starts.push_back(total);
            total += of;
        }
        std::vector<std::int64_t> received(static_cast<std::size_t>(total));
        mpi::detail::check(MPI_Allgatherv(sent.data(), count, MPI_INT64_T, received.data(), counts.data(),
                                          starts.data(), MPI_INT64_T, node.everyone()),
                           "MPI_Allgatherv");
        const std::int64_t *next = received.data();
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            for (std::size_t b = 0; b < static_cast<std::size_t>(counts[rank]) / words; ++b) {
                rank_box made{{{next[0], next[1], next[2]}, {next[3], next[4], next[5]}},
                              static_cast<int>(rank),
                              b * all.variables.size(),
                              {}};
                next += 6;
                for (std::size_t v = 0; v < all.variables.size(); ++v, next += 3) {
                    made.places.push_back({next[0], next[1], next[2]});
                }
                all.boxes.push_back(std::move(made));
            }
        }
    }

    /// Returns the mapped memory of a rank. Throws if it is not mapped or is smaller than `bytes`.
    template <class T> static imported_memory<T> &mapped(mpi::shared_memory<T> &memory, int rank, std::uint64_t bytes) {
        imported_memory<T> *found = memory.of(rank);
        if (found == nullptr || found->size_bytes() < bytes) {
            const status why = found == nullptr ? memory.status(rank) : status::invalid_argument;
            fail(refusal(why != status::success ? why : status::internal, "arrays",
                         "the memory of rank " + std::to_string(rank) + " cannot be written to: " + memory.why(rank)));
        }
        return *found;
    }

    /// Returns true if the schedule contains a transfer between two ranks of this node, or from a rank of this node to
    /// its own ghost cells.
    static bool has_transfers(const mpi::node &node, const schedule &all) noexcept {
        return std::any_of(all.pairs.begin(), all.pairs.end(), [&](const rank_pair &p) {
            return p.on_node && node.contains(p.from) && (!p.direct.empty() || (p.from != p.to && p.bytes > 0));
        });
    }

    /// Blocks until all ranks have called it. Throws if the node is empty, and on all ranks if the ranks have called
    /// different functions.
    static void meet(const mpi::node &node) {
        if (!node) {
            mpgpu::detail::fail_empty("node"); // MPI would abort the program
        }
        mpgpu::detail::meet_all_ranks(node.get(), "halo::plan"); // ranks in another call get an error; MPI would wait
    }

    static plan make(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                     const options &how) {
        meet(node);
        std::optional<error_details> found = wrong(g);
        if (!found && rank_count(g) != node.communicator_size()) {
            found = invalid("grid", "a rank grid of " + std::to_string(rank_count(g)) +
                                        " ranks: the communicator has " + std::to_string(node.communicator_size()));
        }
        agree(node, found);
        const rank_boxes own = {box_of(g, node.communicator_rank())};
        return make(ctx, node, g, domain_of(g), own, arrays, how);
    }

    static plan make(const context &ctx, const mpi::node &node, const domain &whole, const rank_boxes &boxes,
                     const rank_arrays &arrays, const options &how) {
        meet(node);
        return make(ctx, node, {}, whole, boxes, arrays, how);
    }

    /// Creates a plan. `g` is the grid from which the domain and the boxes were computed. If the caller has passed
    /// boxes, it is a default `grid`. Collective.
    static plan make(const context &ctx, const mpi::node &node, const grid &g, const domain &whole,
                     const rank_boxes &boxes, const rank_arrays &arrays, const options &how) {
        plan made = fastest(ctx, node, connected(node, g, whole, boxes, arrays, how), arrays, how);
        made.recipe_ = std::make_shared<plan::recipe>(plan::recipe{whole, {boxes}, how});
        return made;
    }

    /// Checks the arguments of all ranks. Returns the regions to exchange. `g` is as for `make` above. Collective.
    static connections connected(const mpi::node &node, const grid &g, const domain &whole, const rank_boxes &boxes,
                                 const rank_arrays &arrays, const options &how) {
        const int rank = node.communicator_rank();
        division all;
        all.whole = whole;
        all.depth = how.depth.value_or(whole.ghost);
        all.ranks = node.communicator_size();
        std::optional<error_details> found = wrong(how);
        found = found ? found : wrong(whole, all.depth, {});
        found = found ? found : wrong(whole, all.depth, rank, boxes, arrays);
        if (!found) {
            all.variables = variables_of(arrays, boxes.size());
            found = wrong(whole, all.depth, all.variables);
        }
        agree(node, found);
        check_agreement(node, all, g, how);
        gather(node, all, boxes, arrays);
        found = overlapping(all); // the same error on all ranks: `all` is equal
        if (found) {
            fail(std::move(*found));
        }
        return connect(all);
    }

    /// Creates a plan by each possible exchange method. Returns the fastest. Collective.
    static plan fastest(const context &ctx, const mpi::node &node, const connections &between,
                        const rank_arrays &arrays, const options &how) {
        const int rank = node.communicator_rank();
        const bool can_pack = everywhere(node.everyone(), plan::can_pack(ctx, how));
        std::vector<plan> forms;
        std::vector<refused_form> out; // equal on all ranks
        const auto keep = [&forms](std::optional<plan> made) {
            if (made) {
                forms.push_back(std::move(*made));
            }
        };
        if (!how.pushed.value_or(false)) {
            const auto planned = [&](std::uint64_t limit) {
                keep(make_planned(ctx, node, between, rank, arrays, how, limit, out));
            };
            const auto most = static_cast<int>(greatest(node, static_cast<double>(node.ranks().size())));
            for (const std::uint64_t limit : limits_to_try(between, how, can_pack, most)) {
                planned(limit);
            }
            if (forms.empty() && how.direct_pieces.value_or(0) > 0 && can_pack) {
                planned(0); // arrays that cannot be mapped are exchanged by messages
            }
        }
        if (tries_pushed(between, how,
                         everywhere(node.everyone(), is_one_node(node) && can_push(ctx, how)) &&
                             sends_both_ways(between))) {
            keep(make_pushed(ctx, node, between, rank, arrays, how, out));
        }
        std::vector<double> seconds;
        if (forms.size() > 1) {
            const stream order(ctx, arrays[0].location);
            seconds = least_seconds(forms.size(), [&](std::size_t form, int exchanges) {
                double own = 0;
                const auto measured = [&] { own = seconds_of([&] { forms[form].run(order, exchanges); }); };
                return attempt(node, forms[form].which(), out, measured) ? greatest(node, own)
                                                                         : std::numeric_limits<double>::infinity();
            });
        }
        const std::size_t best = plan::choose(forms, seconds, out);
        for (std::size_t form = 0; form < forms.size(); ++form) {
            if (form != best) {
                if (forms[form].leaving_) { // one rank may have failed after others sent everything
                    forms[form].leaving_->give_up();
                }
                forms[form].destroy();
            }
        }
        if (best == forms.size()) {
            fail_as_first(out);
        }
        return std::move(forms[best]);
    }

    /// Returns the largest of the values that the ranks pass. Collective.
    static double greatest(const mpi::node &node, double value) {
        double most = 0;
        mpi::detail::check(MPI_Allreduce(&value, &most, 1, MPI_DOUBLE, MPI_MAX, node.everyone()), "MPI_Allreduce");
        return most;
    }

    /// Adds the messages to and from ranks on other nodes to a plan, if there are any.
    static void add_messages(const context &ctx, const mpi::node &node, const schedule &all, int rank,
                             const rank_arrays &arrays, const options &how, plan &made) {
        if (is_one_node(node)) {
            return;
        }
        plan::lane &own = made.lanes_[0];
        made.waits_ = how.progress == progress_by::start;
        if (how.persistent == persistent_form::none) {
            made.off_node_ = std::make_shared<mpi_messages>(ctx, node, all, rank, own.outbox, own.inbox, how);
        } else {
            made.off_node_ =
                std::make_shared<persistent_messages>(ctx, node, all, rank, arrays, own.outbox, own.inbox, how);
        }
        if (how.progress == progress_by::thread) {
            made.off_node_ = std::make_shared<messages_by_thread>(std::move(made.off_node_));
        }
    }

    /// Creates a halo plan that uses one `mpgpu::plan` for all ranks of the node. That plan also orders the work of the
    /// ranks. If the creation fails on one rank, the result is empty on all ranks.
    static std::optional<plan> make_planned(const context &ctx, const mpi::node &node, const connections &between,
                                            int rank, const rank_arrays &arrays, const options &how,
                                            std::uint64_t limit, std::vector<refused_form> &out) {
        const schedule all = schedule_of(between, limit, [&node](int other) { return node.contains(other); });
        const auto kept = std::make_shared<of_others>(node);
        std::optional<plan> made;
        const auto allocate = [&] {
            made.emplace(plan(ctx));
            made->direct_pieces_ = limit;
            made->imports_ = kept;
            made->add_lane(ctx, all, rank, arrays, is_one_node(node));
            made->add_copies(ctx, all, how);
        };
        const auto connect = [&] {
            const std::vector<node_transfer> transfers = transfers_of(node, all, rank);
            const plan::lane &own = made->lanes_[0];
            std::vector<window> windows = {make_window(*own.outbox), make_window(*own.inbox)};
            for (const rank_array &one : arrays) {
                windows.push_back({one.data, one.size * one.element_bytes});
            }
            if (has_transfers(node, all)) {
                made->transfers_.emplace(node.plan(windows, transfers, how.transfers));
            }
        };
        const auto reach_other_nodes = [&] { add_messages(ctx, node, all, rank, arrays, how, *made); };
        const form which{limit};
        if (attempt(node, which, out, allocate) && attempt(node, which, out, connect) &&
            attempt(node, which, out, reach_other_nodes)) {
            return made;
        }
        if (made) {
            made->transfers_.reset();
        }
        kept->barrier(); // after this, no rank has mapped memory of another rank
        return std::nullopt;
    }

    /// Creates a halo plan that uses one kernel per rank. The kernel writes directly into the inboxes (buffers of
    /// received messages) of other ranks. If the creation fails on one rank, the result is empty on all ranks.
    static std::optional<plan> make_pushed(const context &ctx, const mpi::node &node, const connections &between,
                                           int rank, const rank_arrays &arrays, const options &how,
                                           std::vector<refused_form> &out) {
        const auto kept = std::make_shared<of_others>(node);
        const device where = arrays[0].location;
        const auto own = static_cast<std::size_t>(rank);
        const auto here = [&node](int other) { return node.contains(other); };
        schedule all = schedule_of(between, 0, here);
        const pushed_inboxes at(all);
        const int sharing = ranks_sharing(ctx, where, node.communicator());
        std::optional<plan> made;
        const auto allocate = [&] {
            if (!is_one_node(node)) {
                fail(refusal(status::not_supported, "how",
                             "options::pushed requires all ranks on one node: do not set it otherwise"));
            }
            if (!sends_both_ways(between)) {
                fail(refusal(status::not_supported, "how",
                             "options::pushed requires messages in both directions between two neighbours, and some "
                             "are in one direction only: use equal numbers of layers at both sides and no staggered "
                             "variables, or do not set it"));
            }
            static_cast<void>(pusher(ctx, how));
            all.outbox_bytes[own] = 0;
            all.inbox_bytes[own] = 2 * at.half[own] + at.flag_bytes(own);
            made.emplace(plan(ctx));
            made->pushed_ = true;
            made->imports_ = kept;
            made->add_lane(ctx, all, rank, arrays, true);
            clear(ctx, *made->lanes_[0].inbox, 2 * at.half[own], made->lanes_[0].order);
            kept->gone = signal_counters(ctx, 1);
        };
        const auto connect = [&] {
            const auto inbox = [&](int to) {
                const auto of = static_cast<std::size_t>(to);
                return to == rank ? made->lanes_[0].inbox->data()
                                  : mapped(kept->inboxes, to, 2 * at.half[of] + at.flag_bytes(of)).in_kernels();
            };
            pushed_messages messages = messages_of(all, at, rank, arrays, inbox, true);
            messages.gone = kept->gone.data();
            made->count_sent(all, made->lanes_[0]);
            std::vector<std::uint64_t *> there;
            for (const rank_pair &p : all.pairs) {
                if (p.from == rank && p.to != rank) {
                    there.push_back(mapped(kept->gone_there, p.to, sizeof(std::uint64_t)).data());
                }
            }
            made->leaving_ = std::make_unique<departure>(ctx.get(), kept->gone.data(), std::move(there));
            made->push_ = pusher(ctx, how)(ctx, where, messages, sharing);
        };
        const form which{0, true};
        bool done = attempt(node, which, out, allocate);
        if (done) {
            kept->gone_there = node.exchange(kept->gone);
            kept->inboxes = node.exchange<std::byte>({device_span<std::byte>(*made->lanes_[0].inbox)}, where);
            done = attempt(node, which, out, connect);
        }
        if (!done) {
            kept->unmap();
            kept->barrier(); // after this, no rank has mapped memory of another rank
            return std::nullopt;
        }
        return made;
    }

    /// Sets all bytes of a buffer from `offset` to its end to 0. Blocks until they are set.
    static void clear(const context &ctx, memory &of, std::uint64_t offset, const stream &order) {
        const std::size_t bytes = of.size() - static_cast<std::size_t>(offset);
        if (bytes > 0) {
            memory zeros(ctx, device::host(), bytes);
            std::fill_n(zeros.data(), bytes, std::byte{0});
            mpgpu::plan(ctx, {make_transfer(of.subspan(offset, bytes), zeros)}).execute(order).synchronize();
        }
    }

    /// Returns the transfers that a rank sends to the ranks of its node, including itself. The windows (memory ranges)
    /// of a rank are its outbox and its inbox (buffers of sent and received messages), followed by its arrays.
    static std::vector<node_transfer> transfers_of(const mpi::node &node, const schedule &all, int rank) {
        constexpr std::uint32_t outbox = 0;
        constexpr std::uint32_t inbox = 1;
        const auto window_of = [](std::size_t array) { return static_cast<std::uint32_t>(2 + array); };
        const auto number = [&node](int of) { return static_cast<std::uint32_t>(node.rank_on_node(of)); };
        std::vector<node_transfer> transfers;
        for (const rank_pair &p : all.pairs) {
            if (p.from != rank) {
                continue;
            }
            for_each_direct(p, [&](const region &r, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
                transfers.push_back({{number(p.to), window_of(r.ghost_array), to},
                                     {number(rank), window_of(r.source_array), from},
                                     bytes});
            });
            if (p.to != rank && p.bytes > 0 && p.on_node) {
                transfers.push_back(
                    {{number(p.to), inbox, p.inbox_offset}, {number(rank), outbox, p.outbox_offset}, p.bytes});
            }
        }
        return transfers;
    }
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_PROCESSES_HPP
