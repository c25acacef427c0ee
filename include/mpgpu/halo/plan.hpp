// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PLAN_HPP
#define MPGPU_HALO_PLAN_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: the exchange itself.

#include <mpgpu/halo/measure.hpp>
#include <mpgpu/halo/pushed.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::halo {

namespace detail {

/// Messages between this process's rank and ranks of other nodes, moved by whatever reaches them.
class off_node {
  public:
    off_node() = default;
    off_node(const off_node &) = delete;
    off_node(off_node &&) = delete;
    off_node &operator=(const off_node &) = delete;
    off_node &operator=(off_node &&) = delete;
    virtual ~off_node() = default;

    /// Enqueues, after the packs, what has to be done before the messages can be sent.
    virtual void packed(stream_view order) = 0;
    /// Begins to send and to receive.
    virtual void start() = 0;
    /// Does what can be done now; never blocks.
    virtual exchange_progress progress() = 0;
    /// Enqueues, when all is done, what has to be done before messages can be unpacked.
    virtual void arrived(stream_view order) = 0;
};

/// What a plan of one process for each rank has mapped of the others.
class imports {
  public:
    imports() = default;
    imports(const imports &) = delete;
    imports(imports &&) = delete;
    imports &operator=(const imports &) = delete;
    imports &operator=(imports &&) = delete;
    virtual ~imports() = default;

    /// Returns when all ranks of this node have called it.
    virtual void barrier() = 0;
    /// Unmaps everything.
    virtual void unmap() noexcept = 0;
};

/// Tells ranks whose kernels wait for this one's messages, when it goes, in how many exchanges this one takes part:
/// whoever waits for more gets `peer_gone`. Captured exchanges count as any number, unless an exception ends them.
/// None counts once another rank is lost, because this rank's kernels then send nothing more.
class departure {
  public:
    /// `gone` is raised when a rank is lost that this one waits for.
    departure(mp_context_t context, const std::uint64_t *gone, std::vector<std::uint64_t *> there)
        : context_(context), gone_(gone), there_(std::move(there)) {}
    departure(const departure &) = delete;
    departure(departure &&) = delete;
    departure &operator=(const departure &) = delete;
    departure &operator=(departure &&) = delete;
    ~departure() {
        const bool has_thrown = std::uncaught_exceptions() > exceptions_;
        const std::uint64_t last = !has_captured ? exchanges : has_thrown ? 0 : any_exchange;
        for (std::uint64_t *const counter : there_) { // who has gone needs no word
            static_cast<void>(mp_memory_leave(context_, counter, is_abandoned() ? 0 : last));
        }
    }

    /// True if kernels of this rank wait for messages no longer, because another rank has ended, left or given up.
    [[nodiscard]] bool is_abandoned() const noexcept {
        std::uint64_t stands = 0;
        static_cast<void>(mp_signal_read(context_, gone_, &stands));
        return stands != 0;
    }

    /// Ends the waits of the other ranks' kernels for this rank's messages. It is no loss to them: nobody is told.
    void give_up() const noexcept {
        for (std::uint64_t *const counter : there_) {
            static_cast<void>(mp_signal_raise(context_, counter, any_exchange));
        }
    }

    static constexpr std::uint64_t any_exchange = std::uint64_t{1} << 62U;

    std::uint64_t exchanges = 0; ///< that were enqueued outside of captures
    bool has_captured = false;

  private:
    mp_context_t context_;
    const std::uint64_t *gone_;
    std::vector<std::uint64_t *> there_;
    int exceptions_ = std::uncaught_exceptions();
};

/// Makes plans of one process for each rank; defined for `mpi::node` in halo/processes.hpp.
template <class Node> struct processes;

} // namespace detail

/// A halo exchange: made once, run every time step.
///
/// It refers to the context and to the arrays, which must outlive its last exchange, and owns messages, streams and
/// events. Move-only. Its destructor waits until everything enqueued so far has finished, because it frees the
/// messages. Not for use by several threads at once. Exchanges of one plan happen one after the other, in whatever
/// streams they are asked for.
class plan {
  public:
    /// No plan: `exchange`, `start`, `finish` and `destroy` throw `argument_error`.
    plan() noexcept = default;

    /// All ranks of the grid in this process, `arrays[rank]` on the device of each; several ranks may share a device.
    /// Exchanges a few times where `options::direct_pieces` is empty. Throws `argument_error` for a grid or arrays
    /// that do not go together, `not_supported` when cells must be packed on the CUDA backend and there is no `copier`,
    /// and what `mpgpu::plan` throws.
    plan(const context &ctx, const grid &g, array_view<const rank_arrays> arrays, const options &how = {})
        : plan(fastest(ctx, g, arrays, how, checked(g, arrays, how))) {}

    /// One process for each rank, which gives the arrays of its own; `node` is an `mpi::node`, and this takes
    /// mpgpu/halo_mpi.hpp. Ranks have the numbers in the node's communicator that they have in the grid. Collective
    /// over them. In the time loop, ranks of one node are ordered by their streams: no call into MPI, and no host
    /// waits. With ranks on other nodes messages are exchanged by MPI: `start` waits for the packs and calls MPI, and
    /// so does `finish`, which waits for the messages. MPI must then allow calls from the thread that calls these.
    ///
    /// Where `options::direct_pieces` is empty, it exchanges a few times, and all ranks take the form that is the
    /// fastest on the slowest of them. A form that one of them is refused is out on all. Memory that cannot be mapped
    /// by its neighbours (docs/reference/sharing.md) is exchanged by messages, `direct_pieces` or not. When a rank
    /// cannot make its part, all throw: `argument_error` for arguments that do not go together or are not the same on
    /// all ranks, `not_supported` as above, and what mpi.hpp throws. When a rank ends in the middle of an exchange, the
    /// streams of its neighbours go on without its cells: whoever synchronizes with such a stream by mpgpu (`stream`,
    /// `event`, `request`) gets `peer_gone`, and so does every later `start`.
    ///
    /// In a stream that is being captured, `exchange` becomes part of the graph, which may be launched again and again:
    /// on all ranks the same exchanges are captured, and launched in the same order. `not_supported` with ranks on
    /// other nodes. The plan outlives the graph's last launch.
    ///
    /// Such a plan is given to `destroy` before the arrays are freed.
    template <class Node, std::enable_if_t<!std::is_same_v<Node, grid>, int> = 0>
    plan(const context &ctx, const Node &node, const grid &g, const rank_arrays &arrays, const options &how = {})
        : plan(detail::processes<Node>::make(ctx, node, g, arrays, how)) {}

    /// Gives back what the plan holds, after its exchanges have finished: blocks. With one process for each rank it
    /// frees no memory that another rank has mapped; it is then collective over the node's ranks, and is called before
    /// the arrays are freed and before MPI_Finalize. In one process the destructor does the same. The plan is empty
    /// afterwards, as one that was moved from: it may be destroyed or assigned to. Throws `driver_error`, `peer_gone`.
    void destroy() {
        check_made();
        plan whole = std::move(*this); // everything goes with it
        whole.complete();
        detail::check(mp_stream_synchronize(whole.context_, whole.lanes_.front().order.get()));
        if (whole.push_) { // also in streams of the caller's
            whole.finished_.synchronize();
        }
        if (whole.imports_) {
            whole.leaving_.reset();
            whole.imports_->barrier(); // nobody writes to anybody any more
            whole.transfers_.reset();
            whole.imports_->unmap();
            whole.imports_->barrier(); // nobody has anybody's memory mapped any more
        }
    }

    /// Enqueues an exchange: after all earlier work in `stream`, before all later work in it. Never blocks, but with
    /// ranks on other nodes: see `start` and `finish`. Throws `argument_error`, `peer_gone`, `driver_error`.
    void exchange(stream_view stream) {
        check_made();
        if (push_) {
            std::int32_t of = MP_DEVICE_HOST;
            look_at(stream, &of);
            if (!is_captured_ && of == lanes_.front().inbox.location().id()) {
                push(stream); // where nothing has to join it
                return;
            }
        }
        start(stream);
        finish(stream);
    }

    /// Enqueues an exchange after all earlier work in `stream`, which later work in `stream` does not wait for. Until
    /// `finish`, that work may use all cells but these: it may only read the computed cells that are a ghost width or
    /// less from the edge of the array's computed cells, and must not touch ghost cells. Blocks, with ranks on other
    /// nodes, until their messages are packed, because MPI knows nothing of streams, unless `options::progress` says
    /// otherwise; else never. Throws as `exchange` does.
    void start(stream_view stream) {
        check_made();
        complete();
        look_at(stream);
        const mpgpu::stream &order = lanes_.front().order;
        begun_.record(stream);
        order.wait(begun_);
        if (push_) {
            push(order);
            return;
        }
        if (packs_) {
            fork([](const lane &l) -> const launch_function & { return l.pack; });
        }
        if (off_node_) {
            off_node_->packed(order);
        }
        if (transfers_) {
            ++transferred_;
            transfers_->enqueue(order);
        }
        if (packs_) {
            fork([](const lane &l) -> const launch_function & { return l.unpack; });
        }
        finished_.record(order);
        if (off_node_) { // last, so that what is enqueued for ranks of this node runs while the host waits
            off_node_->start();
            under_way_ = true;
            if (waits_) {
                go_on_until([](const exchange_progress &now) { return now.packed == now.to_send; });
            }
        }
    }

    /// Goes on with the exchange that was started, as far as messages to and from other nodes are packed or have
    /// arrived, and says how far it is; nothing is left, where there are no such ranks. Never blocks. Throws as
    /// `exchange` does.
    exchange_progress progress() {
        check_made();
        if (!under_way_) {
            return {};
        }
        const exchange_progress now = step();
        if (now.is_done()) {
            end();
        }
        return now;
    }

    /// Work enqueued in `stream` from now on starts after the last exchange that was started, on this process's ranks.
    /// May be called for several streams. Blocks, with ranks on other nodes, until their messages are here; else never.
    /// Throws `argument_error`, `driver_error`.
    void finish(stream_view stream) {
        check_made();
        complete();
        detail::check(mp_stream_wait_event(context_, stream.get(), end_of_last().get()));
    }

    /// Whether it can exchange.
    explicit operator bool() const noexcept { return !lanes_.empty(); }
    /// Bytes that this process's ranks send in one exchange, to themselves included: straight into ghost cells.
    [[nodiscard]] std::uint64_t direct_bytes() const noexcept { return direct_bytes_; }
    /// The same: packed.
    [[nodiscard]] std::uint64_t packed_bytes() const noexcept { return packed_bytes_; }

    /// `options::direct_pieces` as it is in force: given, or chosen by measurement. 0 where memory of other processes
    /// could not be written to directly.
    [[nodiscard]] std::uint64_t direct_pieces() const noexcept { return direct_pieces_; }
    /// `options::pushed` as it is in force.
    [[nodiscard]] bool pushed() const noexcept { return pushed_; }
    /// The forms that were measured to choose it, with the same times on all ranks; empty where there was no choice.
    [[nodiscard]] const std::vector<measured_form> &measured() const noexcept { return measured_; }
    /// What is exchanged in which form, what was measured, and which forms were refused, for people.
    [[nodiscard]] std::string describe() const {
        return "halo exchange: " + std::to_string(packed_bytes_) + " bytes packed, " + std::to_string(direct_bytes_) +
               " bytes straight into ghost cells, where they lie in up to " + std::to_string(direct_pieces_) +
               (direct_pieces_ == 1 ? " piece" : " pieces") +
               (pushed_ ? ", pushed into the memory of their receivers by the kernel that packs" : ", planned") +
               detail::text_of(measured_, refused_) + "\n";
    }

    /// The plan of the transfers, for `describe` and `info`; `nullptr` where nothing is transferred.
    [[nodiscard]] const mpgpu::plan *transfers() const noexcept { return transfers_ ? &*transfers_ : nullptr; }

  private:
    template <class Node> friend struct detail::processes;

    /// A rank of this process.
    struct lane {
        int rank;
        rank_arrays arrays;
        stream order; ///< its packs and unpacks; that of the first lane also orders everything else
        event done;
        memory outbox;
        memory inbox;
        launch_function pack;
        launch_function unpack;
        launch_function unpack_off_node;
    };

    /// That the arguments have been looked at, before anything is made.
    struct valid {};

    plan(const context &ctx, valid) : context_(ctx.get()), begun_(ctx), finished_(ctx) {}

    static valid checked(const grid &g, array_view<const rank_arrays> arrays, const options &how) {
        std::optional<error_details> wrong = detail::wrong(g);
        wrong = wrong ? wrong : detail::wrong(how);
        if (!wrong && arrays.size() != static_cast<std::size_t>(rank_count(g))) {
            wrong = detail::invalid("arrays", "arrays of " + std::to_string(arrays.size()) + " ranks: the grid has " +
                                                  std::to_string(rank_count(g)));
        }
        for (int rank = 0; !wrong && rank < rank_count(g); ++rank) {
            const rank_arrays &own = arrays[static_cast<std::size_t>(rank)];
            wrong = detail::wrong(g, rank, own);
            if (!wrong && detail::element_sizes(own) != detail::element_sizes(arrays[0])) {
                wrong = detail::invalid("arrays", "rank " + std::to_string(rank) +
                                                      " has other variables than rank 0: number and element sizes "
                                                      "must be the same on all ranks, in the same order");
            }
        }
        if (wrong) {
            detail::fail(std::move(*wrong));
        }
        return {};
    }

    /// One that has `direct_pieces` as given.
    static plan with_limit(const context &ctx, const grid &g, array_view<const rank_arrays> arrays, const options &how,
                           std::uint64_t direct_pieces) {
        const detail::schedule all =
            detail::schedule_of(g, detail::element_sizes(arrays[0]), direct_pieces, [](int) { return true; });
        plan made(ctx, valid{});
        made.direct_pieces_ = direct_pieces;
        for (int rank = 0; rank < rank_count(g); ++rank) {
            made.add_lane(ctx, all, rank, arrays[static_cast<std::size_t>(rank)], false);
        }
        made.add_copies(ctx, g, all, how);
        std::vector<transfer> transfers;
        for (const detail::rank_pair &p : all.pairs) {
            lane &from = made.lanes_[static_cast<std::size_t>(p.from)];
            lane &to = made.lanes_[static_cast<std::size_t>(p.to)];
            detail::add_direct(transfers, p, g, from.arrays, to.arrays);
            if (p.from != p.to && p.bytes > 0) {
                transfers.push_back(make_transfer(to.inbox.subspan(p.inbox_offset, p.bytes),
                                                  from.outbox.subspan(p.outbox_offset, p.bytes)));
            }
        }
        if (!transfers.empty()) {
            made.transfers_.emplace(ctx, transfers, how.transfers);
        }
        return made;
    }

    /// One in which messages are pushed, ordered by streams as the others are.
    static plan with_pushed(const context &ctx, const grid &g, array_view<const rank_arrays> arrays,
                            const options &how) {
        detail::schedule all = detail::schedule_of(g, detail::element_sizes(arrays[0]), 0, [](int) { return true; });
        const detail::pushed_inboxes at(all);
        all.inbox_bytes = at.half;
        all.outbox_bytes.assign(all.inbox_bytes.size(), 0);
        const pushing_copier make = detail::pusher(ctx, how);
        plan made(ctx, valid{});
        made.pushed_ = true;
        for (int rank = 0; rank < rank_count(g); ++rank) {
            made.add_lane(ctx, all, rank, arrays[static_cast<std::size_t>(rank)], false);
        }
        const auto inbox = [&made](int rank) { return made.lanes_[static_cast<std::size_t>(rank)].inbox.data(); };
        for (lane &l : made.lanes_) {
            detail::pushed_messages sent = detail::messages_of(all, at, g, l.rank, l.arrays, inbox, false);
            detail::pushed_messages received;
            received.received.swap(sent.received);
            made.count_sent(all, l);
            if (!sent.sent.empty()) {
                l.pack = make(ctx, l.arrays[0].location, sent, 1);
                l.unpack = make(ctx, l.arrays[0].location, received, 1);
                made.packs_ = true;
            }
        }
        return made;
    }

    static plan fastest(const context &ctx, const grid &g, array_view<const rank_arrays> arrays, const options &how,
                        valid) {
        std::vector<plan> made;
        std::vector<detail::refused_form> out;
        const auto attempt = [&out](detail::form which, const auto &step) {
            std::optional<detail::refused_form> refusal = detail::refused(which, step);
            if (refusal) {
                out.push_back(std::move(*refusal));
            }
        };
        if (!how.pushed.value_or(false)) {
            for (const std::uint64_t limit :
                 detail::limits_to_try(g, detail::element_sizes(arrays[0]), how, can_pack(ctx, how), rank_count(g))) {
                attempt({limit}, [&] { made.push_back(with_limit(ctx, g, arrays, how, limit)); });
            }
        }
        if (detail::tries_pushed(g, how, detail::can_push(ctx, how))) {
            attempt({0, true}, [&] { made.push_back(with_pushed(ctx, g, arrays, how)); });
        }
        std::vector<double> seconds;
        if (made.size() > 1) {
            const stream order(ctx, arrays[0][0].location);
            seconds = detail::least_seconds(made.size(), [&](std::size_t form, int exchanges) {
                double all = std::numeric_limits<double>::infinity();
                attempt(made[form].which(),
                        [&] { all = detail::seconds_of([&] { made[form].run(order, exchanges); }); });
                return all;
            });
        }
        const std::size_t best = choose(made, seconds, out);
        if (best == made.size()) {
            detail::fail_as_first(out);
        }
        return std::move(made[best]);
    }

    static bool can_pack(const context &ctx, const options &how) { return how.copy || ctx.backend() == backend::host; }

    [[nodiscard]] detail::form which() const noexcept { return {direct_pieces_, pushed_}; }

    /// Exchanges `exchanges` times to measure this form, and waits. If that fails on one rank, no rank waits for ever:
    /// the rank still enqueues all transfers, which other ranks wait for, and ends the waits of pushing kernels. These
    /// send nothing more, so each rank whose waits were ended does the same for its own neighbours.
    void run(const stream &order, int exchanges) {
#if MPGPU_EXCEPTIONS
        const std::uint64_t last = transferred_ + static_cast<std::uint64_t>(exchanges);
        try {
#endif
            for (int i = 0; i < exchanges; ++i) {
                exchange(order);
            }
            order.synchronize();
            if (leaving_ && leaving_->is_abandoned()) {
                detail::fail({status::rank_failed, 0, "", "refused on another rank; its own message says why"});
            }
#if MPGPU_EXCEPTIONS
        } catch (...) {
            take_part(last);
            if (leaving_) {
                leaving_->give_up();
            }
            throw;
        }
#endif
    }

#if MPGPU_EXCEPTIONS
    /// Enqueues transfers alone, where all ranks make them together, or leaves the plan, which others then learn.
    void take_part(std::uint64_t until) noexcept {
        try {
            while (imports_ && transfers_ && transferred_ < until) {
                ++transferred_;
                transfers_->enqueue(lanes_.front().order);
            }
        } catch (const error &) {
            transfers_.reset();
        }
    }
#endif

    /// Which of several forms is taken: it gets all readings and refusals. Their number where none is left. `seconds`
    /// is empty where there are no two to compare.
    static std::size_t choose(std::vector<plan> &forms, const std::vector<double> &seconds,
                              const std::vector<detail::refused_form> &out) {
        constexpr double never = std::numeric_limits<double>::infinity();
        const std::size_t best = detail::fastest_of(seconds);
        if (forms.empty() || (!seconds.empty() && seconds[best] == never)) {
            return forms.size();
        }
        for (std::size_t form = 0; form < seconds.size(); ++form) {
            if (seconds[form] != never) {
                const detail::form is = forms[form].which();
                forms[best].measured_.push_back({is.direct_pieces, seconds[form], is.pushed});
            }
        }
        forms[best].refused_ = out;
        return best;
    }

    /// With `maps`, other processes map the messages' memory and MPI is given none of it: it is then memory that they
    /// can map whatever MPI has open in the same process.
    void add_lane(const context &ctx, const detail::schedule &all, int rank, const rank_arrays &arrays, bool maps) {
        const device where = arrays[0].location;
        const auto index = static_cast<std::size_t>(rank);
        const auto make = [&](std::size_t bytes) {
            return maps || where.is_host() ? memory::shared(ctx, where, bytes) : memory(ctx, where, bytes);
        };
        lanes_.push_back({rank, arrays, stream(ctx, where), event(ctx), make(all.outbox_bytes[index]),
                          make(all.inbox_bytes[index]), launch_function(), launch_function(), launch_function()});
    }

    /// Packs and unpacks.
    void add_copies(const context &ctx, const grid &g, const detail::schedule &all, const options &how) {
        const copier copy = how.copy ? how.copy : ctx.backend() == backend::host ? detail::cpu_copier() : copier();
        for (lane &l : lanes_) {
            std::vector<piece> pack;
            std::vector<piece> unpack;
            std::vector<piece> unpack_off_node;
            count_sent(all, l);
            for (const detail::rank_pair &p : all.pairs) {
                std::byte *sent = l.outbox.data() + p.outbox_offset;
                const bool copied = p.on_node || how.persistent == persistent_form::none; // here, not by off_node_
                if (copied && p.from == l.rank) {
                    detail::add_pieces(pack, p, g, l.arrays, sent, direction::pack);
                }
                if (copied && p.to == l.rank) {
                    std::byte *got = p.from == p.to ? sent : l.inbox.data() + p.inbox_offset;
                    detail::add_pieces(p.on_node ? unpack : unpack_off_node, p, g, l.arrays, got, direction::unpack);
                }
            }
            if ((!pack.empty() || !unpack.empty() || !unpack_off_node.empty()) && !copy) {
                detail::fail(detail::refusal(status::not_supported, "how",
                                             "rank " + std::to_string(l.rank) +
                                                 " has cells to pack, and on the CUDA backend that takes a "
                                                 "kernel: give options::copy one, or set options::direct_pieces "
                                                 "to the largest value to copy each row by itself"));
            }
            if (!pack.empty()) {
                l.pack = copy(ctx, l.arrays[0].location, pack, direction::pack);
            }
            if (!unpack.empty()) {
                l.unpack = copy(ctx, l.arrays[0].location, unpack, direction::unpack);
            }
            if (!unpack_off_node.empty()) {
                l.unpack_off_node = copy(ctx, l.arrays[0].location, unpack_off_node, direction::unpack);
            }
            packs_ = packs_ || l.pack || l.unpack;
        }
    }

    void count_sent(const detail::schedule &all, const lane &own) noexcept {
        const auto bytes = [&own](const std::vector<detail::region> &regions) {
            std::uint64_t sum = 0;
            for (const detail::region &r : regions) {
                for (const rank_array &one : own.arrays) {
                    sum += detail::cells_of(r) * one.element_bytes;
                }
            }
            return sum;
        };
        for (const detail::rank_pair &p : all.pairs) {
            direct_bytes_ += p.from == own.rank ? bytes(p.direct) : 0;
            packed_bytes_ += p.from == own.rank ? bytes(p.packed) : 0;
        }
    }

    /// Launches the kernel that is the whole of an exchange, after the last exchange, in a stream of its device.
    void push(stream_view stream) {
        if (leaving_) {
            leaving_->has_captured = leaving_->has_captured || is_captured_;
            gone_.value = is_captured_ ? detail::departure::any_exchange : leaving_->exchanges + 1;
            detail::check(mp_kernel_wait_signals(context_, &gone_, 1));
        }
        event &end = end_of_last();
        if (!is_captured_) {
            detail::check(mp_stream_wait_event(context_, stream.get(), end.get()));
        }
        push_(stream);
        if (leaving_ && !is_captured_) {
            ++leaving_->exchanges;
        }
        end.record(stream);
    }

    /// What stands for the end of the last exchange. Of a kernel that pushes, another event in a capture: exchanges
    /// that are not captured come after each other, in whatever streams, and those of a capture are in one.
    [[nodiscard]] event &end_of_last() noexcept {
        return push_ && is_captured_ ? lanes_.front().done : finished_;
    }

    void check_made() const {
        if (!*this) {
            mpgpu::detail::fail_empty("plan");
        }
    }

    /// Brings an exchange with other nodes to its end, on the host; the rest is enqueued.
    void complete() {
        if (under_way_) {
            go_on_until([](const exchange_progress &now) { return now.is_done(); });
            end();
        }
    }

    template <class Holds> void go_on_until(const Holds &holds) {
        while (!holds(step())) {
            std::this_thread::yield();
        }
    }

    exchange_progress step() {
#if MPGPU_EXCEPTIONS
        try {
            return off_node_->progress();
        } catch (...) {
            under_way_ = false; // it does not go on
            throw;
        }
#else
        return off_node_->progress();
#endif
    }

    void end() {
        under_way_ = false;
        const lane &own = lanes_.front();
        off_node_->arrived(own.order);
        if (own.unpack_off_node) {
            own.unpack_off_node(own.order);
        }
        finished_.record(own.order);
    }

    /// Lets every lane launch at the same time, between what came before and what follows in the first lane's stream.
    template <class Which> void fork(Which &&which) {
        lane &first = lanes_.front();
        first.done.record(first.order);
        for (lane &l : lanes_) {
            const launch_function &copies = which(l);
            if (&l == &first || !copies) {
                continue;
            }
            l.order.wait(first.done);
            copies(l.order);
            l.done.record(l.order);
        }
        if (which(first)) {
            which(first)(first.order);
        }
        for (lane &l : lanes_) {
            if (&l != &first && which(l)) {
                first.order.wait(l.done);
            }
        }
    }

    /// Whether the exchange is captured, which MPI's messages cannot be; and of which device the stream is.
    void look_at(stream_view stream, std::int32_t *of = nullptr) {
        if (!push_ && !off_node_) {
            return;
        }
        std::int32_t capturing = 0;
        detail::check(mp_stream_get_info(context_, stream.get(), of, &capturing));
        is_captured_ = capturing != 0;
        if (is_captured_ && off_node_) {
            detail::fail(detail::refusal(status::not_supported, "stream",
                                         "an exchange with ranks on other nodes is not captured: MPI sends its "
                                         "messages, and MPI knows nothing of graphs"));
        }
    }

    mp_context_t context_ = nullptr;
    std::shared_ptr<detail::imports> imports_; ///< of other processes' memory
    event begun_;
    event finished_;
    std::vector<lane> lanes_;
    std::optional<mpgpu::plan> transfers_;
    std::shared_ptr<detail::off_node> off_node_; ///< where there are ranks on other nodes
    bool under_way_ = false;                     ///< an exchange with them
    bool waits_ = true;                          ///< `start`, until their messages are packed
    bool packs_ = false;
    std::uint64_t transferred_ = 0; ///< how often the transfers were enqueued
    bool is_captured_ = false;      ///< the exchange that is being enqueued
    std::uint64_t direct_pieces_ = 0;
    bool pushed_ = false;
    launch_function push_;          ///< between processes, where messages are pushed
    signal_value gone_{nullptr, 1}; ///< raised when a rank has ended: `push_` waits no longer
    std::vector<measured_form> measured_;
    std::vector<detail::refused_form> refused_; ///< forms that were refused
    std::uint64_t direct_bytes_ = 0;
    std::uint64_t packed_bytes_ = 0;
    std::unique_ptr<detail::departure> leaving_; ///< where messages are pushed; it goes first
};

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PLAN_HPP
