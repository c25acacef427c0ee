// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PUSHED_HPP
#define MPGPU_HALO_PUSHED_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: one kernel for all messages of a rank to and from ranks of its node.
/// It packs each message straight into the inbox of the rank that receives it, raises that rank's flag for it, and
/// unpacks what the others have packed into its own inbox, each message when its flag is up. No copy and no operation
/// of a stream is between.
///
/// **Numbers.** Exchanges of a rank are numbered by the kernel itself, in memory of the device, so that a captured
/// kernel has no argument that changes. A flag is raised to the number of the exchange.
///
/// **Two halves.** An inbox has two halves, and exchange n uses half n % 2. Nobody says that a half is free again,
/// because ranks send to each other both ways (`sends_both_ways`). Let rank i write message n to rank j. The kernel of
/// i's exchange n - 1 has ended: kernels of a rank run one after the other. So it has found j's flag at n - 1 or more.
/// That flag was raised by the kernel of j's exchange n - 1, which has begun after that of j's exchange n - 2 had
/// ended, and this has unpacked i's message n - 2, the last one in that half. So j can be one exchange ahead of i,
/// never two, and a flag that i waits for at n stands at n + 1 at most: `>=` is the comparison.
///
/// The proof asks that the kernels of one plan follow each other on each rank, and that all ranks launch as many. How
/// they are launched, by calls or by graphs, does not matter.
///
/// **Memory order.** The threads of a block write their part of a message, meet, and one counts the block in
/// (`is_last`, acquire and release on the device). The last one has so seen all parts written, and its release for the
/// whole system, of the flag, hands them on to whoever acquires the flag: one thread of each waiting block, whose other
/// threads see it after the next barrier. The flag lies in the receiver's memory, so that blocks may poll.
///
/// **The end of a rank.** Blocks that have waited long look at a word in host memory, which the library raises when a
/// process that had mapped it has ended, or has left before this exchange (`mp_memory_leave`). They then end without
/// unpacking, and later launches neither pack nor wait: what a rank that still runs has not received yet is not
/// overwritten.

#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/schedule.hpp>
#include <mpgpu/notify.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace mpgpu::halo::detail {

/// A message as its sender or its receiver sees it.
struct pushed_message {
    std::vector<piece> pieces;     ///< with the message in the first half of the receiver's inbox
    std::uint64_t half = 0;        ///< bytes from there to the same in the second half
    std::uint64_t *flag = nullptr; ///< at the receiver; null where streams order the ranks
};

/// All messages of a rank.
struct pushed_messages {
    std::vector<pushed_message> sent;
    std::vector<pushed_message> received;
    const std::uint64_t *gone = nullptr; ///< in host memory: not 0 where nothing will arrive any more; or null
};

constexpr std::uint32_t most_pushed = 27; // messages each way: 26 neighbours, and the rank itself

/// What the kernel keeps between exchanges, in memory of the device. 0 at first.
struct pushed_state {
    std::uint64_t exchange;            ///< number of the last that has ended
    std::uint64_t abandoned;           ///< not 0 once a message will not arrive any more
    std::uint32_t ended;               ///< blocks
    std::uint32_t packed[most_pushed]; ///< blocks that have packed their part of a message
};

/// What one launch does: a plain value that the kernel takes, the same in all launches, of lists in memory that it
/// reaches. What all threads look at first is here, and not in a list.
struct pushed_work {
    const piece *pieces = nullptr;
    const tile *tiles = nullptr;
    pushed_state *state = nullptr;
    const std::uint64_t *gone = nullptr;
    std::uint32_t sent = 0;                         ///< messages, which come first
    std::uint32_t received = 0;                     ///< messages
    std::uint32_t starts[2 * most_pushed + 1] = {}; ///< tiles of message m are those from `starts[m]` to the next
    std::uint32_t packers[most_pushed] = {};        ///< blocks that pack a part of message m
    std::uint64_t halves[2 * most_pushed] = {};     ///< as in `pushed_message`
    std::uint64_t *flags[2 * most_pushed] = {};     ///< as in `pushed_message`
};

/// Some of the tiles.
struct tile_range {
    std::uint32_t first;
    std::uint32_t end;
};

/// The tiles of a block, of those that all blocks share out evenly.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range share_of(tile_range all, std::uint32_t block, std::uint32_t blocks) {
    const std::uint64_t count = all.end - all.first;
    return {all.first + static_cast<std::uint32_t>(quotient(count * block, blocks)),
            all.first + static_cast<std::uint32_t>(quotient(count * (block + 1), blocks))};
}

/// What is in both.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range common(tile_range a, tile_range b) {
    return {a.first > b.first ? a.first : b.first, a.end < b.end ? a.end : b.end};
}

/// The tiles of a message.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range tiles_of(const pushed_work &work, std::uint32_t message) {
    return {work.starts[message], work.starts[message + 1]};
}

/// Copies tiles of one message, by the threads of one block.
MPGPU_NOTIFY_BOTH inline void copy_tiles(const notify_block &block, const pushed_work &work, tile_range some,
                                         direction way, std::uint64_t half) {
    constexpr std::uint32_t warp = 32;
    const std::uint32_t lanes = block.threads < warp ? block.threads : warp;
    for (std::uint32_t i = some.first + block.thread / lanes; i < some.end; i += block.threads / lanes) {
        const tile t = work.tiles[i];
        piece p = work.pieces[t.piece];
        p.message += half;
        copy_piece<tile_lane_words>(p, way, t.first + block.thread % lanes, lanes, t.first + tile_words);
    }
}

constexpr std::uint32_t none_arrives = ~std::uint32_t{0};

/// Polls for any of the messages that `left` has a bit for, among those that are received; `none_arrives` when the wait
/// is in vain. By one thread of a block.
MPGPU_NOTIFY_BOTH inline std::uint32_t poll_for_any(const pushed_work &work, std::uint32_t left,
                                                    std::uint64_t exchange) {
    constexpr std::uint32_t look = 4096; // some milliseconds: all blocks look at host memory, so rarely
    for (std::uint32_t polls = 1;; ++polls) {
        for (std::uint32_t m = 0; m < work.received; ++m) {
            const std::uint64_t *const flag = work.flags[work.sent + m];
            if ((left >> m & 1U) != 0 &&
                (flag == nullptr || mpgpu::detail::load<mpgpu::detail::reach::system>(flag) >= exchange)) {
                return m;
            }
        }
        if (polls % look == 0 && work.gone != nullptr &&
            mpgpu::detail::load<mpgpu::detail::reach::system>(work.gone) != 0) {
            return none_arrives;
        }
#ifdef __CUDA_ARCH__
        __nanosleep(32); // each look empties the first-level cache of those that still pack
#else
        std::this_thread::yield(); // ranks and blocks that are threads may be more than there are cores
#endif
    }
}

/// The same by all threads of a block, which may then read the message.
MPGPU_NOTIFY_BOTH inline std::uint32_t wait_for_any(const notify_block &block, const pushed_work &work,
                                                    std::uint32_t left, std::uint64_t exchange) {
#ifdef __CUDA_ARCH__
    __shared__ std::uint32_t found;
    if (block.thread == 0) {
        found = poll_for_any(work, left, exchange);
    }
    block.synchronize();
    const std::uint32_t now = found;
    block.synchronize(); // the next wait may write it
    return now;
#else
    static_cast<void>(block);
    return poll_for_any(work, left, exchange);
#endif
}

/// What each block of the kernel does in an exchange. Blocks wait for other ranks, whose blocks wait for all of this
/// rank's: so all must run at once.
MPGPU_NOTIFY_BOTH inline void push_messages(const notify_block &block, const pushed_work &work) {
    const std::uint64_t exchange = work.state->exchange + 1; // written when all blocks have come to their end
    const std::uint64_t half = exchange % 2;
    const std::uint32_t all = work.sent + work.received;
    if (work.state->abandoned != 0) { // by an earlier launch
        return;
    }
    const tile_range packs = share_of({0, work.starts[work.sent]}, block.index, block.blocks);
    for (std::uint32_t m = 0; m < work.sent; ++m) {
        const tile_range part = common(packs, tiles_of(work, m));
        if (part.first >= part.end) {
            continue;
        }
        copy_tiles(block, work, part, direction::pack, half * work.halves[m]);
        if (work.flags[m] != nullptr) {
            block.synchronize();
            if (block.thread == 0 && mpgpu::detail::is_last(&work.state->packed[m], work.packers[m])) {
                mpgpu::detail::store<mpgpu::detail::reach::system>(work.flags[m], exchange);
            }
        }
    }

    const tile_range unpacks = share_of({work.starts[work.sent], work.starts[all]}, block.index, block.blocks);
    std::uint32_t left = 0;
    for (std::uint32_t m = 0; m < work.received; ++m) {
        const tile_range part = common(unpacks, tiles_of(work, work.sent + m));
        left |= part.first < part.end ? 1U << m : 0;
    }
    while (left != 0) {
        const std::uint32_t m = wait_for_any(block, work, left, exchange);
        if (m == none_arrives) {
            if (block.thread == 0) {
                mpgpu::detail::store<mpgpu::detail::reach::device>(&work.state->abandoned, 1);
            }
            break;
        }
        copy_tiles(block, work, common(unpacks, tiles_of(work, work.sent + m)), direction::unpack,
                   half * work.halves[work.sent + m]);
        left &= ~(1U << m);
    }
    block.synchronize();
    if (block.thread == 0 && mpgpu::detail::is_last(&work.state->ended, block.blocks)) {
        work.state->exchange = exchange;
    }
}

/// The lists of a `pushed_work`, on the host.
struct pushed_lists : persistent_lists {
    explicit pushed_lists(const pushed_messages &messages) {
        if (std::max(messages.sent.size(), messages.received.size()) > most_pushed) {
            fail(refusal(status::internal, "grid", "a rank has more neighbours than a grid has"));
        }
        for (const pushed_message &m : messages.sent) {
            add(m.pieces);
        }
        for (const pushed_message &m : messages.received) {
            add(m.pieces);
        }
    }

    /// Of the way that has more.
    [[nodiscard]] std::uint32_t most_tiles(const pushed_messages &messages) const noexcept {
        const std::uint32_t sent = starts[messages.sent.size()];
        return std::max(sent, starts.back() - sent);
    }
};

/// The value for a kernel of `blocks` blocks, with lists and state in memory that it reaches.
[[nodiscard]] inline pushed_work work_of(const pushed_messages &messages, const pushed_lists &lists,
                                         std::uint32_t blocks, const piece *pieces, const tile *tiles,
                                         pushed_state *state) {
    pushed_work work;
    work.pieces = pieces;
    work.tiles = tiles;
    work.state = state;
    work.gone = messages.gone;
    work.sent = static_cast<std::uint32_t>(messages.sent.size());
    work.received = static_cast<std::uint32_t>(messages.received.size());
    std::copy(lists.starts.begin(), lists.starts.end(), work.starts);
    for (std::uint32_t m = 0; m < work.sent + work.received; ++m) {
        const pushed_message &of = m < work.sent ? messages.sent[m] : messages.received[m - work.sent];
        work.halves[m] = of.half;
        work.flags[m] = of.flag;
    }
    for (std::uint32_t block = 0; block < blocks; ++block) {
        const tile_range packs = share_of({0, work.starts[work.sent]}, block, blocks);
        for (std::uint32_t m = 0; m < work.sent; ++m) {
            const tile_range part = common(packs, tiles_of(work, m));
            work.packers[m] += part.first < part.end ? 1 : 0;
        }
    }
    return work;
}

/// The kernel as a function of a stream that starts threads for blocks; for what the CPU reaches.
[[nodiscard]] inline pushing_copier cpu_pushed() {
    constexpr static std::uint32_t worth_a_thread = 32; // tiles: one takes as long to start as it takes to copy these
    struct kernel {
        explicit kernel(const pushed_messages &messages)
            : lists(messages), blocks(lists.most_tiles(messages) < worth_a_thread ? 1 : 2),
              work(work_of(messages, lists, blocks, lists.pieces.data(), lists.tiles.data(), &state)) {}
        kernel(const kernel &) = delete;
        kernel(kernel &&) = delete;
        kernel &operator=(const kernel &) = delete;
        kernel &operator=(kernel &&) = delete;
        ~kernel() = default;

        void run() const {
            std::vector<std::thread> others;
            for (std::uint32_t index = 1; index < blocks; ++index) {
                others.emplace_back([this, index] { push_messages({index, blocks, 0, 1}, work); });
            }
            push_messages({0, blocks, 0, 1}, work);
            for (std::thread &block : others) {
                block.join();
            }
        }

        pushed_lists lists;
        std::uint32_t blocks;
        pushed_state state{};
        pushed_work work;
    };
    return [](const context &ctx, device, const pushed_messages &messages, int) -> launch_function {
        // Shared with what is enqueued, which may outlive the plan.
        const auto kept = std::make_shared<const kernel>(messages);
        return [context = ctx.get(), kept](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept] { kept->run(); }));
        };
    };
}

/// Where messages lie in the inboxes of ranks that push: an inbox has two halves of all messages to the rank, those to
/// itself included, and then a flag for each. Where streams order the ranks, the first half is all.
struct pushed_inboxes {
    explicit pushed_inboxes(const schedule &all) : half(all.inbox_bytes.size()), messages(all.inbox_bytes.size()) {
        for (const rank_pair &p : all.pairs) {
            const auto to = static_cast<std::size_t>(p.to);
            offsets.push_back(half[to]);
            numbers.push_back(messages[to]++);
            half[to] += aligned(p.bytes, message_alignment);
        }
    }

    /// Of message `pair` of the schedule, in the first half.
    [[nodiscard]] std::uint64_t offset(std::size_t pair) const noexcept { return offsets[pair]; }
    /// Of its flag, in the inbox of rank `to`.
    [[nodiscard]] std::uint64_t flag_offset(std::size_t pair, std::size_t to) const noexcept {
        return 2 * half[to] + numbers[pair] * sizeof(notification_counter);
    }
    /// Of all flags of a rank.
    [[nodiscard]] std::uint64_t flag_bytes(std::size_t rank) const noexcept {
        return messages[rank] * sizeof(notification_counter);
    }

    std::vector<std::uint64_t> half;     ///< bytes of one, of each rank's inbox
    std::vector<std::uint64_t> messages; ///< to each rank
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> numbers;
};

/// The messages of a rank between its arrays and inboxes: `inbox(to)` is that of a rank that it sends to, or its own.
/// Without flags only the first half is used.
template <class Inbox>
[[nodiscard]] pushed_messages messages_of(const schedule &all, const pushed_inboxes &at, const grid &g, int rank,
                                          const rank_arrays &arrays, const Inbox &inbox, bool has_flags) {
    pushed_messages made;
    for (std::size_t i = 0; i < all.pairs.size(); ++i) {
        const rank_pair &p = all.pairs[i];
        const auto to = static_cast<std::size_t>(p.to);
        const auto add = [&](std::vector<pushed_message> &list, direction way) {
            std::byte *const whole = inbox(p.to);
            pushed_message &m = list.emplace_back();
            add_pieces(m.pieces, p, g, arrays, whole + at.offset(i), way);
            if (has_flags) {
                m.half = at.half[to];
                m.flag = reinterpret_cast<std::uint64_t *>(whole + at.flag_offset(i, to));
            }
        };
        if (p.from == rank) {
            add(made.sent, direction::pack);
        }
        if (p.to == rank) {
            add(made.received, direction::unpack);
        }
    }
    return made;
}

/// Whether there is something that makes kernels that push.
[[nodiscard]] inline bool can_push(const context &ctx, const options &how) {
    return how.pushed_copy || ctx.backend() == backend::host;
}

/// What makes them.
[[nodiscard]] inline pushing_copier pusher(const context &ctx, const options &how) {
    if (!can_push(ctx, how)) {
        fail(refusal(status::not_supported, "how",
                     "options::pushed takes a kernel on the CUDA backend: set options::pushed_copy to "
                     "mpgpu::halo::cuda_pushed() of mpgpu/halo.cuh, in a source that nvcc compiles"));
    }
    return how.pushed_copy ? how.pushed_copy : cpu_pushed();
}

/// Whether each rank gets a message from all that it sends one to: what the two halves of an inbox rely on. It holds on
/// every grid.
[[nodiscard]] inline bool sends_both_ways(const schedule &all) {
    return std::all_of(all.pairs.begin(), all.pairs.end(), [&](const rank_pair &p) {
        return std::any_of(all.pairs.begin(), all.pairs.end(),
                           [&](const rank_pair &q) { return q.from == p.to && q.to == p.from; });
    });
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_PUSHED_HPP
