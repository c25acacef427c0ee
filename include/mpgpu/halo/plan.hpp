// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PLAN_HPP
#define MPGPU_HALO_PLAN_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: the exchange itself.

#include <mpgpu/halo/measure.hpp>

#include <algorithm>
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

/// A signal whose value goes up with the exchanges: in exchange n it is n - `lag`.
struct counter {
    std::uint64_t *address;
    std::uint64_t lag;
};

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
    /// Waits for that, and starts to send and to receive.
    virtual void start() = 0;
    /// Waits until all messages are here, and enqueues what has to be done before they can be unpacked.
    virtual void arrived(stream_view order) = 0;
};

/// Makes plans that span processes; defined in halo/processes.hpp.
struct processes;

} // namespace detail

/// A halo exchange: made once, run every time step.
///
/// It refers to the context and to the arrays, which must outlive its last exchange, and owns messages, streams and
/// events. Move-only. Not for use by several threads at once. Exchanges of one plan happen one after the other, in
/// whatever streams they are asked for.
class plan {
  public:
    /// All ranks of the grid in this process, `arrays[rank]` on the device of each; several ranks may share a device.
    /// Exchanges a few times where `options::direct_pieces` is empty. Throws `invalid_argument` for a grid or arrays
    /// that do not go together, `not_supported` when cells must be packed on the CUDA backend and there is no `copier`,
    /// and what `mpgpu::plan` throws.
    plan(const context &ctx, const grid &g, span<const rank_arrays> arrays, const options &how = {})
        : plan(fastest(ctx, g, arrays, how, checked(g, arrays))) {}

    plan(plan &&) noexcept = default;
    plan &operator=(plan &&) noexcept = default;
    plan(const plan &) = delete;
    plan &operator=(const plan &) = delete;
    /// Waits until everything enqueued so far has finished, because it frees the messages. A plan of `make_plan` is
    /// given to `close` before.
    ~plan() = default;

    /// Enqueues an exchange: after all earlier work in `stream`, before all later work in it. Never blocks, but with
    /// ranks on other nodes: see `start` and `finish`. Throws `invalid_argument`, `peer_gone`, `driver_error`.
    void exchange(stream_view stream) {
        start(stream);
        finish(stream);
    }

    /// Enqueues an exchange after all earlier work in `stream`, which later work in `stream` does not wait for. Until
    /// `finish`, that work may use all cells but these: it may only read the computed cells that are a ghost width or
    /// less from the edge of the array's computed cells, and must not touch ghost cells. Blocks, with ranks on other
    /// nodes, until their messages are packed, because MPI knows nothing of streams; else never. Throws as `exchange`
    /// does.
    void start(stream_view stream) {
        complete();
        ++exchanges_;
        const mpgpu::stream &order = lanes_.front().order;
        begun_.record(stream);
        order.wait(begun_);
        raise(ghosts_free_);
        if (packs_) {
            fork([](const lane &l) -> const launch & { return l.pack; });
        }
        if (off_node_) {
            off_node_->packed(order);
        }
        wait(room_);
        if (transfers_) {
            transfers_->enqueue(order);
        }
        raise(sent_);
        wait(arrived_);
        if (packs_) {
            fork([](const lane &l) -> const launch & { return l.unpack; });
        }
        raise(taken_);
        finished_.record(order);
        if (off_node_) { // last, so that what is enqueued for ranks of this node runs while the host waits
            off_node_->start();
            under_way_ = true;
        }
    }

    /// Work enqueued in `stream` from now on starts after the last exchange that was started, on this process's ranks.
    /// May be called for several streams. Blocks, with ranks on other nodes, until their messages are here; else never.
    /// Throws `invalid_argument`, `driver_error`.
    void finish(stream_view stream) {
        complete();
        detail::check(mp_stream_wait_event(context_, stream.get(), finished_.get()));
    }

    /// Bytes that this process's ranks send in one exchange, to themselves included: straight into ghost cells.
    [[nodiscard]] std::uint64_t direct_bytes() const noexcept { return direct_bytes_; }
    /// The same: packed.
    [[nodiscard]] std::uint64_t packed_bytes() const noexcept { return packed_bytes_; }

    /// `options::direct_pieces` as it is in force: given, or chosen by measurement. 0 where memory of other processes
    /// could not be written to directly.
    [[nodiscard]] std::uint64_t direct_pieces() const noexcept { return direct_pieces_; }
    /// The forms that were measured to choose it, with the same times on all ranks; empty where there was no choice.
    [[nodiscard]] const std::vector<measured_form> &measured() const noexcept { return measured_; }
    /// What is exchanged in which form, what was measured, and which forms were refused, for people.
    [[nodiscard]] std::string describe() const {
        return "halo exchange: " + std::to_string(packed_bytes_) + " bytes packed, " + std::to_string(direct_bytes_) +
               " bytes straight into ghost cells, where they lie in up to " + std::to_string(direct_pieces_) +
               (direct_pieces_ == 1 ? " piece" : " pieces") + detail::text_of(measured_, refused_) + "\n";
    }

    /// The plan of the transfers, for `describe` and `info`; `nullptr` where nothing is transferred.
    [[nodiscard]] const mpgpu::plan *transfers() const noexcept { return transfers_ ? &*transfers_ : nullptr; }

  private:
    friend struct detail::processes;

    /// A rank of this process.
    struct lane {
        int rank;
        stream order; ///< its packs and unpacks; that of the first lane also orders everything else
        event done;
        memory outbox;
        memory inbox;
        launch pack;
        launch unpack;
        launch unpack_off_node;
    };

    /// Where a rank's ghost cells and messages are written. Ranks that this process does not send to have none.
    struct peer {
        rank_arrays arrays;
        device_span<std::byte> inbox;
    };

    /// That the arguments have been looked at, before anything is made.
    struct valid {};

    plan(const context &ctx, valid) : context_(ctx.get()), begun_(ctx), finished_(ctx) {}

    static valid checked(const grid &g, span<const rank_arrays> arrays) {
        std::optional<error_details> wrong = detail::wrong(g);
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
    static plan with_limit(const context &ctx, const grid &g, span<const rank_arrays> arrays, const options &how,
                           std::uint64_t direct_pieces) {
        const detail::schedule all =
            detail::schedule_of(g, detail::element_sizes(arrays[0]), direct_pieces, [](int) { return true; });
        plan made(ctx, valid{});
        made.direct_pieces_ = direct_pieces;
        std::vector<peer> peers;
        for (int rank = 0; rank < rank_count(g); ++rank) {
            const rank_arrays &own = arrays[static_cast<std::size_t>(rank)];
            made.add_lane(ctx, all, rank, own[0].location);
            peers.push_back({own, made.lanes_.back().inbox});
        }
        made.build(ctx, g, all, peers, how);
        return made;
    }

    static plan fastest(const context &ctx, const grid &g, span<const rank_arrays> arrays, const options &how, valid) {
        std::vector<plan> made;
        std::vector<detail::refused_form> out;
        const auto attempt = [&out](std::uint64_t limit, const auto &step) {
            std::optional<detail::refused_form> refusal = detail::refused(limit, step);
            if (refusal) {
                out.push_back(std::move(*refusal));
            }
        };
        for (const std::uint64_t limit :
             detail::limits_to_try(g, detail::element_sizes(arrays[0]), how, can_pack(ctx, how), true)) {
            attempt(limit, [&] { made.push_back(with_limit(ctx, g, arrays, how, limit)); });
        }
        std::vector<double> seconds;
        if (made.size() > 1) {
            const stream order(ctx, arrays[0][0].location);
            seconds = detail::least_seconds(made.size(), [&](std::size_t form, int exchanges) {
                double all = std::numeric_limits<double>::infinity();
                attempt(made[form].direct_pieces_,
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

    static bool can_pack(const context &ctx, const options &how) { return how.copy || detail::on_host_backend(ctx); }

    /// Exchanges so many times and waits. Where that fails, other processes are told that all have been made, so that
    /// they do not wait for this one.
    void run(const stream &order, int exchanges) {
        const std::uint64_t last = exchanges_ + static_cast<std::uint64_t>(exchanges);
#if MPGPU_EXCEPTIONS
        try {
#endif
            while (exchanges_ < last) {
                exchange(order);
            }
            order.synchronize();
#if MPGPU_EXCEPTIONS
        } catch (...) {
            exchanges_ = last;
            raise(ghosts_free_);
            raise(sent_);
            raise(taken_);
            throw;
        }
#endif
    }

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
                forms[best].measured_.push_back({forms[form].direct_pieces_, seconds[form]});
            }
        }
        forms[best].refused_ = out;
        return best;
    }

    void add_lane(const context &ctx, const detail::schedule &all, int rank, device where) {
        const auto index = static_cast<std::size_t>(rank);
        lanes_.push_back({rank, stream(ctx, where), event(ctx), memory(ctx, where, all.outbox_bytes[index]),
                          memory(ctx, where, all.inbox_bytes[index]), launch(), launch(), launch()});
    }

    /// `peers` by rank: those that this process's ranks send to, and all of its own.
    void build(const context &ctx, const grid &g, const detail::schedule &all, std::vector<peer> &peers,
               const options &how) {
        const copier copy = how.copy ? how.copy : detail::on_host_backend(ctx) ? detail::cpu_copier() : copier();
        std::vector<transfer> transfers;
        for (lane &l : lanes_) {
            std::vector<piece> pack;
            std::vector<piece> unpack;
            std::vector<piece> unpack_off_node;
            const rank_arrays &own = peers[static_cast<std::size_t>(l.rank)].arrays;
            for (const detail::pair &p : all.pairs) {
                peer &receiver = peers[static_cast<std::size_t>(p.to)];
                std::byte *sent = l.outbox.data() + p.outbox_offset;
                if (p.from == l.rank) {
                    detail::add_pieces(pack, p, g, own, sent, direction::pack);
                    detail::add_direct(transfers, p, g, own, receiver.arrays);
                    count(p, own);
                }
                if (p.to == l.rank) {
                    std::byte *got = p.from == p.to ? sent : l.inbox.data() + p.inbox_offset;
                    detail::add_pieces(p.on_node ? unpack : unpack_off_node, p, g, own, got, direction::unpack);
                }
                if (p.from == l.rank && p.to != l.rank && p.bytes > 0 && p.on_node) {
                    transfers.push_back(make_transfer(receiver.inbox.subspan(p.inbox_offset, p.bytes),
                                                      l.outbox.subspan(p.outbox_offset, p.bytes)));
                }
            }
            if ((!pack.empty() || !unpack.empty() || !unpack_off_node.empty()) && !copy) {
                detail::fail(detail::refusal(MP_ERROR_NOT_SUPPORTED, "how",
                                             "rank " + std::to_string(l.rank) +
                                                 " has cells to pack, and on the CUDA backend that takes a "
                                                 "kernel: give options::copy one, or set options::direct_pieces "
                                                 "to the largest value to copy each row by itself"));
            }
            if (!pack.empty()) {
                l.pack = copy(ctx, own[0].location, pack, direction::pack);
            }
            if (!unpack.empty()) {
                l.unpack = copy(ctx, own[0].location, unpack, direction::unpack);
            }
            if (!unpack_off_node.empty()) {
                l.unpack_off_node = copy(ctx, own[0].location, unpack_off_node, direction::unpack);
            }
            packs_ = packs_ || l.pack || l.unpack;
        }
        if (!transfers.empty()) {
            transfers_.emplace(ctx, transfers, how.transfers);
        }
    }

    void count(const detail::pair &p, const rank_arrays &own) noexcept {
        for (const array &one : own) {
            for (const detail::region &r : p.direct) {
                direct_bytes_ += detail::cells_of(r) * one.element_bytes;
            }
            for (const detail::region &r : p.packed) {
                packed_bytes_ += detail::cells_of(r) * one.element_bytes;
            }
        }
    }

    /// Brings an exchange with other nodes to its end, on the host; the rest is enqueued.
    void complete() {
        if (std::exchange(under_way_, false)) {
            const lane &own = lanes_.front();
            off_node_->arrived(own.order);
            if (own.unpack_off_node) {
                own.unpack_off_node(own.order);
            }
            finished_.record(own.order);
        }
    }

    /// Lets every lane launch at the same time, between what came before and what follows in the first lane's stream.
    template <class Which> void fork(Which &&which) {
        lane &first = lanes_.front();
        first.done.record(first.order);
        for (lane &l : lanes_) {
            const launch &copies = which(l);
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

    const std::vector<signal> &at_this_exchange(const std::vector<detail::counter> &counters) {
        signals_.clear();
        for (const detail::counter &c : counters) {
            signals_.push_back({c.address, exchanges_ - c.lag});
        }
        return signals_;
    }

    void raise(const std::vector<detail::counter> &counters) {
        if (!counters.empty()) {
            const std::vector<signal> &now = at_this_exchange(counters);
            detail::check(mp_stream_raise_signals(context_, lanes_.front().order.get(), now.data(), now.size()));
        }
    }

    void wait(const std::vector<detail::counter> &counters) {
        if (!counters.empty()) {
            const std::vector<signal> &now = at_this_exchange(counters);
            detail::check(mp_stream_wait_signals(context_, lanes_.front().order.get(), now.data(), now.size()));
        }
    }

    mp_context_t context_;
    std::shared_ptr<void> imports_; ///< mappings of other processes' memory
    event begun_;
    event finished_;
    std::vector<lane> lanes_;
    std::optional<mpgpu::plan> transfers_;
    std::shared_ptr<detail::off_node> off_node_; ///< where there are ranks on other nodes
    bool under_way_ = false;                     ///< an exchange with them
    bool packs_ = false;
    std::uint64_t exchanges_ = 0; ///< started so far
    std::uint64_t direct_pieces_ = 0;
    std::vector<measured_form> measured_;
    std::vector<detail::refused_form> refused_; ///< forms that were tried in vain
    std::uint64_t direct_bytes_ = 0;
    std::uint64_t packed_bytes_ = 0;

    // Between processes, in the order of an exchange. In one process, streams order everything, and these are empty.
    std::vector<detail::counter> ghosts_free_; ///< raised: ranks that write here directly may
    std::vector<detail::counter> room_;        ///< waited for: where this rank writes may be written
    std::vector<detail::counter> sent_;        ///< raised: what this rank sends has arrived
    std::vector<detail::counter> arrived_;     ///< waited for: what others send here
    std::vector<detail::counter> taken_;       ///< raised: messages are unpacked and may be overwritten
    std::vector<signal> signals_;              ///< of one call, kept for its capacity
};

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PLAN_HPP
