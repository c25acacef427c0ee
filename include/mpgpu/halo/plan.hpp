// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PLAN_HPP
#define MPGPU_HALO_PLAN_HPP

/// @file
/// Plans of halo exchanges. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/departure.hpp>
#include <mpgpu/halo/measure.hpp>
#include <mpgpu/halo/pushed.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::halo {

namespace detail {

/// Interface of the classes that exchange messages between this process's rank and ranks on other nodes.
class off_node {
  public:
    off_node() = default;
    off_node(const off_node &) = delete;
    off_node(off_node &&) = delete;
    off_node &operator=(const off_node &) = delete;
    off_node &operator=(off_node &&) = delete;
    virtual ~off_node() = default;

    /// Enqueues the work that must finish before messages are sent. Called after packing is enqueued.
    virtual void packed(stream_view order) = 0;
    /// Starts to send and to receive messages.
    virtual void start() = 0;
    /// Makes progress without blocking.
    virtual exchange_progress progress() = 0;
    /// Enqueues the work that must finish before messages are unpacked. Called after all messages have arrived.
    virtual void arrived(stream_view order) = 0;
    /// Allows the destructor to free the MPI communicator. Called when all exchanges of all ranks have ended.
    virtual void close() noexcept = 0;
};

/// Memory of other ranks that a plan has mapped, if each rank is a process.
class imports {
  public:
    imports() = default;
    imports(const imports &) = delete;
    imports(imports &&) = delete;
    imports &operator=(const imports &) = delete;
    imports &operator=(imports &&) = delete;
    virtual ~imports() = default;

    /// Blocks until all ranks of this node have called it.
    virtual void barrier() = 0;
    /// Unmaps the memory of the other ranks.
    virtual void unmap() noexcept = 0;
};

/// Functions that create plans with one process per rank. Defined for `mpi::node` in halo/processes.hpp.
template <class Node> struct processes;

} // namespace detail

/// Plan of a halo exchange: created once and executed in every time step.
///
/// The context and the arrays must outlive the last exchange. The plan owns message buffers, streams and events. It is
/// move-only. The destructor blocks until all enqueued work has finished, because it frees the message buffers. Several
/// threads must not use a plan at the same time. Exchanges of one plan run one after the other, even in different
/// streams.
class plan {
  public:
    /// Constructs an empty plan. Its functions `exchange`, `start`, `finish` and `destroy` throw `argument_error`.
    plan() noexcept = default;

    plan(const plan &) = delete;
    plan &operator=(const plan &) = delete;
    /// Takes over a plan. The other plan is then empty.
    plan(plan &&other) noexcept = default;
    /// Destroys the own plan and takes over the other. Memberwise assignment would unmap the memory of other ranks
    /// before it notifies them that this rank leaves.
    plan &operator=(plan &&other) noexcept {
        if (this != &other) {
            std::destroy_at(this);
            ::new (static_cast<void *>(this)) plan(std::move(other));
        }
        return *this;
    }
    /// Blocks until all enqueued work has finished, and frees the resources.
    ~plan() = default;

    /// Creates a plan in which this process contains all ranks of the grid. `arrays[rank]` are the arrays of each rank,
    /// on its device. Several ranks may share a device. If `options::direct_pieces` is empty, a few exchanges are
    /// executed to measure the exchange methods (docs/guide/halo.md).
    ///
    /// Throws `argument_error` if the grid and the arrays do not match. Throws `not_supported` if cells must be packed
    /// on the CUDA backend and `options::copy` is empty. Throws the exceptions of `mpgpu::plan`.
    plan(const context &ctx, const grid &g, array_view<const rank_arrays> arrays, const options &how = {})
        : plan(ctx, domain_of(g), detail::checked_boxes(g, arrays), arrays, how) {}

    /// Creates a plan in which this process contains all ranks. Rank `rank` computes the boxes `boxes[rank]`. Its
    /// arrays are `arrays[rank]`. The neighbours of a box are all boxes that intersect it when it is grown by the
    /// layers to exchange, and their periodic images. Ghost cells that are in no box are not changed.
    ///
    /// Throws `argument_error` if boxes overlap, and the exceptions of the constructor above.
    plan(const context &ctx, const domain &whole, array_view<const rank_boxes> boxes,
         array_view<const rank_arrays> arrays, const options &how = {})
        : plan(fastest(ctx, detail::connect(detail::checked(whole, boxes, arrays, how.depth)), arrays,
                       detail::checked(how))) {
        recipe_ = std::make_shared<recipe>(recipe{whole, {boxes.begin(), boxes.end()}, how});
    }

    /// Creates a plan with one process per rank. Collective. Each process passes the arrays of its own rank. `node` is
    /// an `mpi::node`; include mpgpu/halo_mpi.hpp. Rank numbers in the grid are those of the node's communicator. Call
    /// `destroy` before the arrays are freed.
    ///
    /// Ranks on one node: in the time loop, streams order the exchanges, without MPI calls and without waits of the
    /// host.
    ///
    /// Ranks on other nodes: messages are exchanged by MPI. `start` blocks until the messages are packed, and then
    /// calls MPI. `finish` calls MPI and blocks until the messages have arrived. MPI must allow calls from the threads
    /// that call these functions.
    ///
    /// Exchange method: if `options::direct_pieces` is empty, a few exchanges are executed. All ranks then use the
    /// method that is fastest on the slowest rank. If a method is not possible on one rank, no rank uses it. Arrays
    /// that the neighbours cannot map (docs/reference/sharing.md) are exchanged by messages, regardless of
    /// `direct_pieces`.
    ///
    /// Graphs: in a stream that is being captured, `exchange` becomes part of the graph, which may be launched
    /// repeatedly. All ranks must capture the same exchanges and launch them in the same order. With ranks on other
    /// nodes, `exchange` throws `not_supported` in such a stream. The plan must outlive the last launch of the graph.
    ///
    /// Errors: if one rank cannot create the plan, all ranks throw. They throw `argument_error` if arguments do not
    /// match or differ between ranks, the exceptions of the constructor above, and those of mpi.hpp. If a rank exits
    /// during an exchange, the streams of its neighbours continue without its cells. If such a stream is
    /// synchronised by mpgpu (`stream`, `event`, `request`), `peer_gone` is thrown. Every later `start` throws it too.
    /// Ranks on other nodes wait without limit, unless `options::time_limit` is set.
    template <class Node, std::enable_if_t<!std::is_same_v<Node, grid>, int> = 0>
    plan(const context &ctx, const Node &node, const grid &g, const rank_arrays &arrays, const options &how = {})
        : plan(detail::processes<Node>::make(ctx, node, g, arrays, how)) {}

    /// Creates a plan with one process per rank. Each process passes the boxes of its own rank. Collective. The call
    /// gathers the boxes of all ranks. Neighbours and ghost cells are defined as for the constructor that takes the
    /// boxes of all ranks. Everything else is as described at the constructor above.
    template <class Node, std::enable_if_t<!std::is_same_v<Node, domain>, int> = 0>
    plan(const context &ctx, const Node &node, const domain &whole, const rank_boxes &boxes, const rank_arrays &arrays,
         const options &how = {})
        : plan(detail::processes<Node>::make(ctx, node, whole, boxes, arrays, how)) {}

    /// Adds a set of arrays to the plan, for example the second of two sets between which a code alternates. Returns
    /// the number of the set. Pass it to `exchange` and `start`. The arrays of the constructor are set 0.
    ///
    /// All sets have the same boxes and depth. Variables and layouts may differ. Each set has its own message buffers.
    /// The new set uses the exchange method of set 0, and nothing is measured. If the call fails, the plan is not
    /// changed. Throws the exceptions of the constructor.
    std::size_t add(const context &ctx, array_view<const rank_arrays> arrays) {
        check_made();
        check_recipe(imports_ == nullptr);
        others_.emplace_back(ctx, recipe_->whole, recipe_->boxes, arrays, same_method());
        return others_.size();
    }

    /// Adds a set of arrays to a plan with one process per rank. Collective. `node` is the node that was passed to the
    /// constructor. Everything else is as described at the function above.
    template <class Node> std::size_t add(const context &ctx, const Node &node, const rank_arrays &arrays) {
        check_made();
        check_recipe(imports_ != nullptr);
        others_.emplace_back(ctx, node, recipe_->whole, recipe_->boxes.front(), arrays, same_method());
        return others_.size();
    }

    /// Blocks until the exchanges of the plan have finished, and frees its resources. The plan is then empty. It may be
    /// destroyed or assigned to.
    ///
    /// With one process per rank the call is collective over the node's ranks, so that no rank frees memory that
    /// another rank has mapped. Call it before the arrays are freed and before MPI_Finalize. If all ranks are in one
    /// process, this call is not required, because the destructor also waits and frees the resources. Throws
    /// `driver_error`, `peer_gone`.
    void destroy() {
        check_made();
        plan whole = std::move(*this); // is destroyed at the end of this function
        whole.complete();
        for (plan &other : whole.others_) {
            other.destroy();
        }
        if (whole.off_node_) {
            whole.off_node_->close();
        }
        detail::check(mp_stream_synchronize(whole.context_, whole.lanes_.front().order.get()));
        if (whole.push_) { // exchanges also run in streams of the caller
            whole.finished_.synchronize();
        }
        if (whole.imports_) {
            whole.leaving_.reset();
            whole.imports_->barrier(); // after this, no rank writes to memory of another rank
            whole.transfers_.reset();
            whole.imports_->unmap();
            whole.imports_->barrier(); // after this, no rank has mapped memory of another rank
        }
    }

    /// Enqueues an exchange of a set of arrays after all earlier work in `stream` and before all later work. Blocks
    /// only if there are ranks on other nodes; see `start` and `finish`. Throws `argument_error`, `peer_gone`,
    /// `driver_error`, and `timeout` if ranks on other nodes exceed `options::time_limit`.
    void exchange(stream_view stream, std::size_t set = 0) {
        plan &of_set = select(stream, set);
        if (&of_set != this) {
            of_set.exchange(stream);
            return;
        }
        if (push_) {
            std::int32_t of = MP_DEVICE_HOST;
            look_at(stream, &of);
            if (!is_captured_ && of == lanes_.front().inbox->location().id()) {
                push(stream); // uses only this stream
                return;
            }
        }
        start_own(stream);
        finish_own(stream);
    }

    /// Starts an exchange of a set of arrays after all earlier work in `stream`. Later work in `stream` does not wait
    /// for the exchange.
    ///
    /// Until `finish`, that later work must not access ghost cells. It may read, but not write, the computed cells that
    /// are sent: those within one ghost width of the boundary. It may read and write all other cells.
    ///
    /// With ranks on other nodes the call blocks until the messages to them are packed, because MPI is not ordered by
    /// streams. The call does not block if all ranks are on one node, or if `options::progress` is not
    /// `progress_by::start`. Throws the exceptions of `exchange`.
    ///
    /// Exchanges of different sets do not overlap. If the last exchange was of another set, the call first completes it
    /// as `finish(stream)` does. It does not do this if one of the two exchanges is captured. In a capture, call
    /// `finish` before you start another set.
    void start(stream_view stream, std::size_t set = 0) { select(stream, set).start_own(stream); }

    /// Makes progress on the messages of the started exchange to and from ranks on other nodes: sends packed messages
    /// and receives arrived ones. Returns the progress. Without ranks on other nodes it reports that the exchange is
    /// complete. Never blocks. Throws the exceptions of `exchange`.
    exchange_progress progress() {
        check_made();
        plan &last = set_of(last_);
        if (!last.under_way_) {
            return {};
        }
        const exchange_progress now = last.step();
        if (now.is_done()) {
            last.end();
        }
        return now;
    }

    /// Makes all work that is enqueued in `stream` from now on wait until the last started exchange has ended. May be
    /// called for several streams. With ranks on other nodes it blocks until their messages have arrived. Otherwise it
    /// never blocks. Throws `argument_error`, `driver_error`, `timeout`.
    void finish(stream_view stream) {
        check_made();
        set_of(last_).finish_own(stream);
    }

    /// Returns true if the plan is not empty.
    explicit operator bool() const noexcept { return !lanes_.empty(); }
    /// Returns the number of sets of arrays: 1, and one for each call of `add`.
    [[nodiscard]] std::size_t sets() const noexcept { return lanes_.empty() ? 0 : 1 + others_.size(); }
    /// Returns the number of bytes that the ranks of this process copy directly into ghost cells in one exchange of set
    /// 0, including their own ghost cells.
    [[nodiscard]] std::uint64_t direct_bytes() const noexcept { return direct_bytes_; }
    /// Returns the number of bytes that the ranks of this process pack and send in one exchange of set 0, including
    /// messages to themselves.
    [[nodiscard]] std::uint64_t packed_bytes() const noexcept { return packed_bytes_; }

    /// Returns the value of `options::direct_pieces` that the plan uses: the largest number of contiguous pieces of a
    /// region that is copied without packing. The caller passed this value, or it was chosen by measurement. It is 0 if
    /// memory of other processes could not be written directly.
    [[nodiscard]] std::uint64_t direct_pieces() const noexcept { return direct_pieces_; }
    /// Returns true if messages are pushed: the packing kernel writes them directly into the memory of the receiving
    /// rank (`options::pushed`).
    [[nodiscard]] bool pushed() const noexcept { return pushed_; }
    /// Returns the exchange methods that were measured to choose one, with their times. The times are equal on all
    /// ranks. The list is empty if there were fewer than two methods to compare.
    [[nodiscard]] const std::vector<measured_form> &measured() const noexcept { return measured_; }
    /// Returns a description of the exchange as text: its size, its method, the methods that were measured, and the
    /// methods that are not possible.
    [[nodiscard]] std::string describe() const {
        return "halo exchange: " + std::to_string(packed_bytes_) + " bytes packed, " + std::to_string(direct_bytes_) +
               " bytes directly into ghost cells, where they lie in up to " + std::to_string(direct_pieces_) +
               (direct_pieces_ == 1 ? " piece" : " pieces") +
               (pushed_ ? ", pushed into the memory of the receivers by the packing kernel" : ", planned") +
               detail::text_of(measured_, refused_) + "\n";
    }

    /// Returns the plan of the transfers, for its functions `describe` and `info`. Returns `nullptr` if there are no
    /// transfers.
    [[nodiscard]] const mpgpu::plan *transfers() const noexcept { return transfers_ ? &*transfers_ : nullptr; }

  private:
    template <class Node> friend struct detail::processes;

    /// Resources of one rank of this process.
    struct lane {
        int rank;
        rank_arrays arrays;
        stream order; ///< stream in which this rank packs and unpacks; the first rank's stream also orders the others
        event done;
        std::shared_ptr<memory> outbox; ///< shared with `off_node_`
        std::shared_ptr<memory> inbox;
        launch_function pack;
        launch_function unpack;
        launch_function unpack_off_node;
    };

    /// Arguments from which the plan was made. `add` uses them again.
    struct recipe {
        domain whole;
        std::vector<rank_boxes> boxes; ///< boxes of each rank of this process
        options how;
    };

    explicit plan(const context &ctx) : context_(ctx.get()), begun_(ctx), finished_(ctx) {}

    /// Creates a plan with the given value of `options::direct_pieces`.
    static plan with_limit(const context &ctx, const detail::connections &between, array_view<const rank_arrays> arrays,
                           const options &how, std::uint64_t direct_pieces) {
        const detail::schedule all = detail::schedule_of(between, direct_pieces, [](int) { return true; });
        plan made(ctx);
        made.direct_pieces_ = direct_pieces;
        for (std::size_t rank = 0; rank < arrays.size(); ++rank) {
            made.add_lane(ctx, all, static_cast<int>(rank), arrays[rank], false);
        }
        made.add_copies(ctx, all, how);
        std::vector<transfer> transfers;
        for (const detail::rank_pair &p : all.pairs) {
            lane &from = made.lanes_[static_cast<std::size_t>(p.from)];
            lane &to = made.lanes_[static_cast<std::size_t>(p.to)];
            detail::add_direct(transfers, p, from.arrays, to.arrays);
            if (p.from != p.to && p.bytes > 0) {
                transfers.push_back(make_transfer(to.inbox->subspan(p.inbox_offset, p.bytes),
                                                  from.outbox->subspan(p.outbox_offset, p.bytes)));
            }
        }
        if (!transfers.empty()) {
            made.transfers_.emplace(ctx, transfers, how.transfers);
        }
        return made;
    }

    /// Creates a plan in which messages are pushed: the packing kernel writes them directly into the receiver's memory.
    /// Exchanges are ordered by streams, as with the other methods.
    static plan with_pushed(const context &ctx, const detail::connections &between,
                            array_view<const rank_arrays> arrays, const options &how) {
        detail::schedule all = detail::schedule_of(between, 0, [](int) { return true; });
        const detail::pushed_inboxes at(all);
        all.inbox_bytes = at.half;
        all.outbox_bytes.assign(all.inbox_bytes.size(), 0);
        const pushing_copier make = detail::pusher(ctx, how);
        plan made(ctx);
        made.pushed_ = true;
        for (std::size_t rank = 0; rank < arrays.size(); ++rank) {
            made.add_lane(ctx, all, static_cast<int>(rank), arrays[rank], false);
        }
        const auto inbox = [&made](int rank) { return made.lanes_[static_cast<std::size_t>(rank)].inbox->data(); };
        for (lane &l : made.lanes_) {
            detail::pushed_messages sent = detail::messages_of(all, at, l.rank, l.arrays, inbox, false);
            detail::pushed_messages received;
            received.received.swap(sent.received);
            made.count_sent(all, l);
            if (!sent.sent.empty()) {
                l.pack = make(ctx, l.arrays[0].location, sent, 1);
            }
            if (!received.received.empty()) {
                l.unpack = make(ctx, l.arrays[0].location, received, 1);
            }
            made.packs_ = made.packs_ || l.pack || l.unpack;
        }
        return made;
    }

    static plan fastest(const context &ctx, const detail::connections &between, array_view<const rank_arrays> arrays,
                        const options &how) {
        std::vector<plan> made;
        std::vector<detail::refused_form> out;
        const auto attempt = [&out](detail::form which, const auto &step) {
            std::optional<detail::refused_form> refusal = detail::refused(which, step);
            if (refusal) {
                out.push_back(std::move(*refusal));
            }
        };
        if (!how.pushed.value_or(false)) {
            const auto ranks = static_cast<int>(between.ranks);
            for (const std::uint64_t limit : detail::limits_to_try(between, how, can_pack(ctx, how), ranks)) {
                attempt({limit}, [&] { made.push_back(with_limit(ctx, between, arrays, how, limit)); });
            }
        }
        if (detail::tries_pushed(between, how, detail::can_push(ctx, how))) {
            attempt({0, true}, [&] { made.push_back(with_pushed(ctx, between, arrays, how)); });
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

    /// Executes `exchanges` exchanges to measure this exchange method, and blocks until they have finished. If this
    /// rank fails, it still enqueues every transfer that other ranks wait for, and sets an abort flag of its
    /// neighbours. A kernel that sees the flag stops waiting and sends nothing more. The rank of that kernel then sets
    /// the flag of its own neighbours, so that no rank waits forever.
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
                detail::fail({status::rank_failed, 0, "", "refused on another rank, whose message gives the reason"});
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
    /// Enqueues only the transfers of the exchanges up to number `until`, because all ranks of the node must execute
    /// them. If enqueueing fails, destroys the plan of the transfers, which notifies the other ranks.
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

    /// Returns the index of the plan with the fastest exchange method. Stores all measurements, and the errors of
    /// methods that are not possible, in that plan. Returns the number of methods if none is possible. `seconds`
    /// contains the measured time of each plan. It is empty if there are fewer than two methods to compare.
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

    /// Adds a rank of this process and allocates its message buffers. If `maps` is true, other processes map these
    /// buffers, and they are never passed to MPI. They are then allocated so that they can be mapped even if MPI has
    /// opened other memory.
    void add_lane(const context &ctx, const detail::schedule &all, int rank, const rank_arrays &arrays, bool maps) {
        const device where = arrays[0].location;
        const auto index = static_cast<std::size_t>(rank);
        const auto make = [&](std::size_t bytes) {
            return std::make_shared<memory>(maps || where.is_host() ? memory::shared(ctx, where, bytes)
                                                                    : memory(ctx, where, bytes));
        };
        lanes_.push_back({rank, arrays, stream(ctx, where), event(ctx), make(all.outbox_bytes[index]),
                          make(all.inbox_bytes[index]), launch_function(), launch_function(), launch_function()});
    }

    /// Adds the operations that pack and unpack messages.
    void add_copies(const context &ctx, const detail::schedule &all, const options &how) {
        const copier copy = how.copy ? how.copy : ctx.backend() == backend::host ? detail::cpu_copier() : copier();
        for (lane &l : lanes_) {
            std::vector<piece> pack;
            std::vector<piece> unpack;
            std::vector<piece> unpack_off_node;
            count_sent(all, l);
            for (const detail::rank_pair &p : all.pairs) {
                std::byte *sent = l.outbox->data() + p.outbox_offset;
                const bool copied = p.on_node || how.persistent == persistent_form::none; // false if off_node_ packs
                if (copied && p.from == l.rank) {
                    detail::add_pieces(pack, p, l.arrays, sent, direction::pack);
                }
                if (copied && p.to == l.rank) {
                    std::byte *got = p.from == p.to ? sent : l.inbox->data() + p.inbox_offset;
                    detail::add_pieces(p.on_node ? unpack : unpack_off_node, p, l.arrays, got, direction::unpack);
                }
            }
            if ((!pack.empty() || !unpack.empty() || !unpack_off_node.empty()) && !copy) {
                detail::fail(detail::refusal(status::not_supported, "how",
                                             "rank " + std::to_string(l.rank) +
                                                 " has cells to pack, and on the CUDA backend that needs a "
                                                 "kernel: set options::copy, or set options::direct_pieces "
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
        const auto bytes = [](const std::vector<detail::region> &regions) {
            std::uint64_t sum = 0;
            for (const detail::region &r : regions) {
                sum += detail::bytes_of(r);
            }
            return sum;
        };
        for (const detail::rank_pair &p : all.pairs) {
            direct_bytes_ += p.from == own.rank ? bytes(p.direct) : 0;
            packed_bytes_ += p.from == own.rank ? bytes(p.packed) : 0;
        }
    }

    /// Launches the kernel that performs a whole exchange with pushed messages. `stream` is a stream of the kernel's
    /// device. The kernel starts after the previous exchange has ended.
    void push(stream_view stream) {
        if (leaving_) {
            leaving_->expect(is_captured_, leaving_->exchanges + 1);
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

    /// Returns the event that marks the end of the last exchange. Kernels that push messages use a separate event in a
    /// capture, because the exchanges of a capture are in one stream, and other exchanges may be in any streams.
    [[nodiscard]] event &end_of_last() noexcept {
        return push_ && is_captured_ ? lanes_.front().done : finished_;
    }

    void check_recipe(bool is_same_kind) const {
        if (!is_same_kind) {
            detail::fail(detail::invalid(
                "node", imports_ ? "the plan has one process per rank: pass the node with which it was made"
                                 : "this process contains all ranks: pass the arrays of each rank, and no node"));
        }
    }

    /// Returns the options of this plan, with the exchange method that it uses.
    [[nodiscard]] options same_method() const {
        options how = recipe_->how;
        how.direct_pieces = pushed_ ? std::nullopt : std::optional(direct_pieces_);
        how.pushed = pushed_ ? std::optional(true) : std::nullopt;
        return how;
    }

    [[nodiscard]] plan &set_of(std::size_t set) noexcept {
        return set == 0 ? *this : others_[set - 1];
    }

    /// Returns the plan of a set of arrays. If the last exchange was of another set, first completes it, and makes all
    /// work that is enqueued in `stream` from now on wait until it has ended.
    plan &select(stream_view stream, std::size_t set) {
        check_made();
        if (set >= sets()) {
            detail::fail(detail::invalid("set", "set " + std::to_string(set) + ": the plan has " +
                                                    std::to_string(sets()) + (sets() == 1 ? " set" : " sets") +
                                                    ", numbered from 0; plan::add adds a set"));
        }
        if (!others_.empty()) {
            std::int32_t capturing = 0;
            detail::check(mp_stream_get_info(context_, stream.get(), nullptr, &capturing));
            if (set != last_) {
                plan &before = set_of(last_);
                before.complete();
                // A stream cannot wait for an event across the boundary of a capture. Inside a capture, the exchanges
                // are in one stream. A captured exchange is ordered by the stream in which its graph is launched.
                if (capturing == 0 && !was_captured_) {
                    detail::check(mp_stream_wait_event(context_, stream.get(), before.end_of_last().get()));
                }
            }
            was_captured_ = capturing != 0;
            last_ = set;
        }
        return set_of(set);
    }

    /// Starts an exchange of the arrays of this set.
    void start_own(stream_view stream) {
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
        if (off_node_) { // the last step, because it may block: all other work is enqueued already
            off_node_->start();
            under_way_ = true;
            if (waits_) {
                go_on_until([](const exchange_progress &now) { return now.packed == now.to_send; });
            }
        }
    }

    /// Makes `stream` wait until the last exchange of this set has ended.
    void finish_own(stream_view stream) {
        complete();
        detail::check(mp_stream_wait_event(context_, stream.get(), end_of_last().get()));
    }

    void check_made() const {
        if (!*this) {
            mpgpu::detail::fail_empty("plan");
        }
    }

    /// Blocks until the messages to and from ranks on other nodes are sent and received, and then enqueues unpacking.
    /// Called after all other work of the exchange is enqueued.
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
            under_way_ = false; // an exchange that failed is not continued
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

    /// Enqueues one operation for each rank of this process, in the stream of that rank. `which(l)` returns the launch
    /// function of the operation for the rank with the resources `l`. An empty launch function enqueues nothing. Every
    /// operation starts after all earlier work in the first rank's stream. That stream then waits for all operations.
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

    /// Sets `is_captured_` to true if the stream is being captured, and writes the number of the stream's device to
    /// `of` unless it is null. Throws if the stream is being captured and there are ranks on other nodes, because MPI
    /// messages cannot be captured. Does nothing for plans without a pushing kernel and without ranks on other nodes.
    void look_at(stream_view stream, std::int32_t *of = nullptr) {
        if (!push_ && !off_node_) {
            return;
        }
        std::int32_t capturing = 0;
        detail::check(mp_stream_get_info(context_, stream.get(), of, &capturing));
        is_captured_ = capturing != 0;
        if (is_captured_ && off_node_) {
            detail::fail(detail::refusal(status::not_supported, "stream",
                                         "an exchange with ranks on other nodes cannot be captured: MPI sends its "
                                         "messages, and calls of MPI cannot be part of a graph"));
        }
    }

    mp_context_t context_ = nullptr;
    std::shared_ptr<detail::imports> imports_; ///< mapped memory of other processes
    event begun_;
    event finished_;
    std::vector<lane> lanes_;
    std::optional<mpgpu::plan> transfers_;
    std::shared_ptr<detail::off_node> off_node_; ///< messages to ranks on other nodes; null if there are none
    bool under_way_ = false;                     ///< true during an exchange with ranks on other nodes
    bool waits_ = true;                          ///< true if `start` blocks until messages to other nodes are packed
    bool packs_ = false;
    std::uint64_t transferred_ = 0; ///< number of times that the transfers were enqueued
    bool is_captured_ = false;      ///< true if the current exchange is captured
    std::uint64_t direct_pieces_ = 0;
    bool pushed_ = false;
    launch_function push_; ///< launches the kernel that pushes messages; set if each rank is a process
    std::vector<measured_form> measured_;
    std::vector<detail::refused_form> refused_; ///< exchange methods that are not possible
    std::uint64_t direct_bytes_ = 0;
    std::uint64_t packed_bytes_ = 0;
    std::unique_ptr<detail::departure> leaving_; ///< notifies other ranks at destruction; set if `push_` is set
    std::shared_ptr<const recipe> recipe_;
    std::vector<plan> others_;  ///< plans of the other sets of arrays
    std::size_t last_ = 0;      ///< set that was exchanged last
    bool was_captured_ = false; ///< true if that exchange was captured; updated only if there are several sets
};

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PLAN_HPP
