// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PUSHED_HPP
#define MPGPU_HALO_PUSHED_HPP

/// @file
/// Exchange between ranks of one node by pushed messages: one kernel per rank performs the whole exchange. It packs
/// each message directly into the inbox (buffer of received messages) of the receiving rank and sets a flag in the
/// memory of that rank. It unpacks each message in its own rank's inbox when the flag of that message is set. No
/// separate copy and no stream operation is needed. Part of mpgpu/halo.hpp; include that header.
///
/// **Numbers.** The kernel itself counts the exchanges of a rank, in device memory. Therefore the kernel arguments are
/// equal in all launches, and the kernel can be captured. To set a flag, the kernel writes the number of the exchange
/// to it.
///
/// **Two halves.** An inbox has two halves, and exchange n uses half n % 2. No rank needs to announce that a half is
/// free again, because ranks send to each other in both directions (`sends_both_ways`). Proof, in which flag(j -> i) is
/// the flag in rank i's memory that rank j sets:
/// - Let rank i write message n to rank j. The kernel of i's exchange n - 1 has ended, because the kernels of a
///   rank run one after the other.
/// - That kernel has waited until flag(j -> i) was at least n - 1. The kernel of j's exchange n - 1 sets flag(j -> i)
///   to n - 1.
/// - The kernel of j's exchange n - 1 began after the kernel of j's exchange n - 2 had ended. The kernel of j's
///   exchange n - 2 has unpacked i's message n - 2. This was the previous message in the half that message n uses, so
///   the half is free.
/// - It follows that j can be one exchange ahead of i, but not two. While i waits in exchange n, flag(j -> i) is at
///   most n + 1. The kernel therefore compares flags by `>=`.
///
/// The proof requires that the kernels of one plan run one after the other on each rank, and that all ranks launch the
/// same number of kernels. The kernels may be launched by calls or by graphs.
///
/// **Memory order.** The threads of a block write their part of a message and synchronise. Then one thread increments a
/// counter of finished blocks (`is_last`, acquire and release in device scope). The block that increments it last has
/// seen all parts. It sets the flag with release semantics in system scope, so every thread that reads the flag with
/// acquire semantics sees the whole message. In each waiting block, one thread reads the flag. The other threads of the
/// block see the message after the next barrier. The flag is in the receiver's memory, so that polling it is cheap.
///
/// **Exit of a rank.** Blocks that have waited for a long time check a word in host memory. The library sets this word
/// if a process that had mapped it has exited, or has left before this exchange (`mp_memory_leave`). The blocks then
/// end without unpacking. Later launches neither pack nor wait, so that they do not overwrite messages that a running
/// rank has not received yet.

#include <mpgpu/halo/arrivals.hpp>
#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/schedule.hpp>
#include <mpgpu/notify.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Message of a rank, sent or received by pushing.
struct pushed_message {
    std::vector<piece> pieces;     ///< boxes of cells, with addresses in the first half of the inbox
    std::uint64_t half = 0;        ///< offset of the second half of the inbox from the first, bytes
    std::uint64_t *flag = nullptr; ///< flag in the receiver's memory; null if streams order the ranks
};

/// All messages that a rank sends and receives by pushing.
struct pushed_messages {
    std::vector<pushed_message> sent;
    std::vector<pushed_message> received;
    const std::uint64_t *gone = nullptr; ///< word in host memory that is not 0 if no more messages will arrive; or null
};

constexpr std::uint32_t most_pushed = 27; // messages in each direction: 26 neighbours and the rank itself

/// State that the kernel keeps between exchanges, in device memory. Initially 0.
struct pushed_state {
    std::uint64_t exchange;            ///< number of the last exchange that has ended
    std::uint64_t abandoned;           ///< number of the exchange that was abandoned because a rank exited; 0 if none
    std::uint32_t ended;               ///< number of blocks that have ended in the current exchange
    std::uint32_t packed[most_pushed]; ///< for each message: number of blocks that have packed their part
};

/// Kernel argument that describes all messages of a rank. A plain value that is equal in all launches. Its lists are in
/// memory that the kernel can access. Values that all threads read first are stored in the argument itself.
struct pushed_work {
    const piece *pieces = nullptr;
    const tile *tiles = nullptr;
    pushed_state *state = nullptr;
    const std::uint64_t *gone = nullptr;
    std::uint32_t sent = 0;                         ///< number of sent messages; they precede the received ones
    std::uint32_t received = 0;                     ///< number of received messages
    std::uint32_t starts[2 * most_pushed + 1] = {}; ///< message m consists of tiles `starts[m]` to `starts[m + 1] - 1`
    std::uint32_t packers[most_pushed] = {};        ///< for each message: number of blocks that pack a part of it
    std::uint64_t halves[2 * most_pushed] = {};     ///< `pushed_message::half` of each message
    std::uint64_t *flags[2 * most_pushed] = {};     ///< `pushed_message::flag` of each message
};

/// Returns the range of tiles that form a message.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range tiles_of(const pushed_work &work, std::uint32_t message) {
    return {work.starts[message], work.starts[message + 1]};
}

/// Copies some tiles of one message with the threads of one block.
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

/// Performs the calling block's work in an exchange with pushed messages. Blocks wait for other ranks, whose blocks
/// wait for all blocks of this rank. Therefore all blocks must run simultaneously.
MPGPU_NOTIFY_BOTH inline void push_messages(const notify_block &block, const pushed_work &work) {
    const std::uint64_t exchange = work.state->exchange + 1; // the last block to end increments it
    const std::uint64_t half = exchange % 2;
    const std::uint32_t all = work.sent + work.received;
    // In the exchange that is abandoned because a rank has exited, all blocks still pack. If a block returned early,
    // another rank would get a message with a missing part. Later exchanges do nothing.
    const std::uint64_t abandoned = mpgpu::detail::load<mpgpu::detail::reach::device>(&work.state->abandoned);
    if (abandoned != 0 && abandoned < exchange) {
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
    const auto flag_of = [&work](std::uint32_t m) -> const std::uint64_t * { return work.flags[work.sent + m]; };
    while (left != 0) {
        const std::uint32_t m = wait_for_any(block, flag_of, work.received, work.gone, left, exchange);
        if (m == none_arrives) {
            if (block.thread == 0) {
                mpgpu::detail::store<mpgpu::detail::reach::device>(&work.state->abandoned, exchange);
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

/// Lists of pieces and tiles to which a `pushed_work` (kernel argument) refers, in host memory.
struct pushed_lists : persistent_lists {
    explicit pushed_lists(const pushed_messages &messages) {
        if (std::max(messages.sent.size(), messages.received.size()) > most_pushed) {
            fail(refusal(status::not_supported, "how",
                         "a rank sends " + std::to_string(messages.sent.size()) + " messages and receives " +
                             std::to_string(messages.received.size()) + ": with options::pushed, at most " +
                             std::to_string(most_pushed) + " of each are possible; do not set it"));
        }
        for (const pushed_message &m : messages.sent) {
            add(m.pieces);
        }
        for (const pushed_message &m : messages.received) {
            add(m.pieces);
        }
    }

    /// Returns the number of tiles to send or to receive, whichever is greater.
    [[nodiscard]] std::uint32_t most_tiles(const pushed_messages &messages) const noexcept {
        const std::uint32_t sent = starts[messages.sent.size()];
        return std::max(sent, starts.back() - sent);
    }
};

/// Returns the argument for a kernel with `blocks` blocks. Its lists and state are in memory that the kernel can
/// access.
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

/// Returns a function that performs the work of the kernel on CPU threads, each of which acts as a block. The CPU must
/// be able to access the arrays and messages.
[[nodiscard]] inline pushing_copier cpu_pushed() {
    constexpr static std::uint32_t worth_a_thread = 32; // number of tiles whose copy takes as long as starting a thread
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
            run_blocks(blocks, [this](const notify_block &block) { push_messages(block, work); });
        }

        pushed_lists lists;
        std::uint32_t blocks;
        pushed_state state{};
        pushed_work work;
    };
    return [](const context &ctx, device, const pushed_messages &messages, int) -> launch_function {
        // Shared ownership, because enqueued work may outlive the plan.
        const auto kept = std::make_shared<const kernel>(messages);
        return [context = ctx.get(), kept](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept] { kept->run(); }));
        };
    };
}

/// Layout of the inboxes (buffers of received messages) of all ranks. An inbox consists of two halves and one flag per
/// message. Each half has room for all messages to the rank, including those to itself. If streams order the ranks, an
/// inbox consists only of the first half.
struct pushed_inboxes {
    explicit pushed_inboxes(const schedule &all) : half(all.inbox_bytes.size()), messages(all.inbox_bytes.size()) {
        for (const rank_pair &p : all.pairs) {
            const auto to = static_cast<std::size_t>(p.to);
            offsets.push_back(half[to]);
            numbers.push_back(messages[to]++);
            half[to] += aligned(p.bytes, message_alignment);
        }
    }

    /// Returns the offset in bytes, in the first half of the inbox, of the message with the index `pair` in the
    /// schedule.
    [[nodiscard]] std::uint64_t offset(std::size_t pair) const noexcept { return offsets[pair]; }
    /// Returns the offset in bytes, in the inbox of rank `to`, of the flag of the message with the index `pair`.
    [[nodiscard]] std::uint64_t flag_offset(std::size_t pair, std::size_t to) const noexcept {
        return 2 * half[to] + numbers[pair] * sizeof(notification_counter);
    }
    /// Returns the total size of the flags in a rank's inbox, bytes.
    [[nodiscard]] std::uint64_t flag_bytes(std::size_t rank) const noexcept {
        return messages[rank] * sizeof(notification_counter);
    }

    std::vector<std::uint64_t> half;     ///< for each rank: size of one half of its inbox, bytes
    std::vector<std::uint64_t> messages; ///< for each rank: number of messages that it receives
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> numbers;
};

/// Returns all messages that the rank `rank` sends and receives. `inbox(to)` returns the inbox (buffer of received
/// messages) of rank `to`: a rank to which `rank` sends, or `rank` itself. If `has_flags` is false, the messages have
/// no flags and use only the first half of the inboxes.
template <class Inbox>
[[nodiscard]] pushed_messages messages_of(const schedule &all, const pushed_inboxes &at, int rank,
                                          const rank_arrays &arrays, const Inbox &inbox, bool has_flags) {
    pushed_messages made;
    for (std::size_t i = 0; i < all.pairs.size(); ++i) {
        const rank_pair &p = all.pairs[i];
        const auto to = static_cast<std::size_t>(p.to);
        const auto add = [&](std::vector<pushed_message> &list, direction way) {
            std::byte *const whole = inbox(p.to);
            pushed_message &m = list.emplace_back();
            add_pieces(m.pieces, p, arrays, whole + at.offset(i), way);
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

/// Returns true if a kernel that pushes messages is available.
[[nodiscard]] inline bool can_push(const context &ctx, const options &how) {
    return how.pushed_copy || ctx.backend() == backend::host;
}

/// Returns the function that creates the kernels which push messages.
[[nodiscard]] inline pushing_copier pusher(const context &ctx, const options &how) {
    if (!can_push(ctx, how)) {
        fail(refusal(status::not_supported, "how",
                     "options::pushed needs a kernel on the CUDA backend: set options::pushed_copy to "
                     "mpgpu::halo::cuda_pushed() of mpgpu/halo.cuh, in a source that nvcc compiles"));
    }
    return how.pushed_copy ? how.pushed_copy : cpu_pushed();
}

/// Returns true if each rank receives a message from every rank to which it sends one. The proof for the two halves of
/// an inbox requires this. The result may be false in two cases: if the numbers of layers at two opposite sides differ,
/// and if a variable is staggered, because only the owner of an element sends it.
[[nodiscard]] inline bool sends_both_ways(const connections &all) {
    const auto ranks = [](const connection &one) { return std::pair(one.from, one.to); };
    return std::all_of(all.pairs.begin(), all.pairs.end(), [&](const connection &one) {
        return std::binary_search(all.pairs.begin(), all.pairs.end(), connection{one.to, one.from, {}},
                                  [&](const connection &a, const connection &b) { return ranks(a) < ranks(b); });
    });
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_PUSHED_HPP
