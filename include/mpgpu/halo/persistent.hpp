// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PERSISTENT_HPP
#define MPGPU_HALO_PERSISTENT_HPP

/// @file
/// Exchange with ranks on other nodes by one kernel per rank. The kernel packs the messages and notifies a CPU thread
/// of each packed message, which sends it by MPI. The CPU thread notifies the kernel of each message that has arrived,
/// and the kernel unpacks it. Part of mpgpu/halo.hpp; include that header.
///
/// The method is that of B. Elis et al., Non-Blocking GPU-CPU Notifications to Enable More GPU-CPU Parallelism, HPC
/// Asia 2024. `persistent_form::block_each` is the paper's stream approach, and `persistent_form::all_blocks` its
/// stacked approach.

#include <mpgpu/halo/arrivals.hpp>
#include <mpgpu/halo/pieces.hpp>
#include <mpgpu/notify.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Iterator over every `stride`-th word of the cells of a piece, starting at word `first`. It performs the division
/// only once, not for each word.
template <class Word> class cell_walk {
  public:
    MPGPU_NOTIFY_BOTH cell_walk(const piece &p, std::uint64_t row_words, std::uint64_t first, std::uint64_t stride)
        : p_(p), row_words_(row_words) {
        place(first, x_, y_, z_);
        place(stride, dx_, dy_, dz_);
    }

    /// Returns the address of the current word, and advances to the next word.
    [[nodiscard]] MPGPU_NOTIFY_BOTH Word *next() {
        Word *const here = reinterpret_cast<Word *>(p_.cells + z_ * p_.plane_bytes + y_ * p_.row_bytes) + x_;
        x_ += dx_;
        y_ += dy_;
        z_ += dz_;
        if (x_ >= row_words_) {
            x_ -= row_words_;
            ++y_;
        }
        if (y_ >= p_.count[1]) {
            y_ -= p_.count[1];
            ++z_;
        }
        return here;
    }

  private:
    MPGPU_NOTIFY_BOTH void place(std::uint64_t word, std::uint64_t &x, std::uint64_t &y, std::uint64_t &z) const {
        const std::uint64_t row = quotient(word, row_words_);
        z = quotient(row, p_.count[1]);
        y = row - z * p_.count[1];
        x = word - row * row_words_;
    }

    const piece &p_;
    std::uint64_t row_words_;
    std::uint64_t x_ = 0; ///< position of the next word: index in its row, row and plane
    std::uint64_t y_ = 0;
    std::uint64_t z_ = 0;
    std::uint64_t dx_ = 0; ///< stride, split into the same three indices
    std::uint64_t dy_ = 0;
    std::uint64_t dz_ = 0;
};

/// Copies every `stride`-th word of a piece, from word `first` up to, but not including, word `end`. A thread reads
/// `AtOnce` words before it writes the first. Several reads in flight are faster if few threads copy, or if the source
/// is host memory, whose latency is a microsecond or more.
template <class Word, unsigned AtOnce>
MPGPU_NOTIFY_BOTH inline void copy_words(const piece &p, direction way, std::uint64_t first, std::uint64_t stride,
                                         std::uint64_t end) {
    const std::uint64_t row_words = p.count[0] * p.element_bytes / sizeof(Word);
    const std::uint64_t words = row_words * p.count[1] * p.count[2];
    end = end < words ? end : words;
    Word *const message = reinterpret_cast<Word *>(p.message);
    cell_walk<Word> cells(p, row_words, first, stride);
    for (std::uint64_t i = first; i < end; i += AtOnce * stride) {
        Word read[AtOnce] = {}; // device code cannot index a std::array
        for (unsigned n = 0; n < AtOnce; ++n) {
            const std::uint64_t at = i + n * stride;
            if (at < end) {
                read[n] = way == direction::pack ? *cells.next() : message[at];
            }
        }
        for (unsigned n = 0; n < AtOnce; ++n) {
            const std::uint64_t at = i + n * stride;
            if (at < end) {
                *(way == direction::pack ? message + at : cells.next()) = read[n];
            }
        }
    }
}

/// Returns the size in bytes of the widest word to which all rows of a piece are aligned.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline unsigned word_bytes(const piece &p) {
    // The low bits of this value show the common alignment.
    const std::uint64_t all = reinterpret_cast<std::uintptr_t>(p.cells) | p.element_bytes | p.row_bytes | p.plane_bytes;
    return all % sizeof(std::uint64_t) == 0 ? 8 : all % sizeof(std::uint32_t) == 0 ? 4 : 1;
}

/// Copies every `stride`-th word of a piece in the range [first, end), with the widest possible word.
template <unsigned AtOnce = 1>
MPGPU_NOTIFY_BOTH inline void copy_piece(const piece &p, direction way, std::uint64_t first, std::uint64_t stride,
                                         std::uint64_t end = ~std::uint64_t{0}) {
    const unsigned bytes = word_bytes(p);
    if (bytes == sizeof(std::uint64_t)) {
        copy_words<word_of_8, AtOnce>(p, way, first, stride, end);
    } else if (bytes == sizeof(std::uint32_t)) {
        copy_words<word_of_4, AtOnce>(p, way, first, stride, end);
    } else {
        copy_words<word_of_1, AtOnce>(p, way, first, stride, end);
    }
}

/// Tile: unit of copying for a warp or a CPU thread. It is a part of a piece, so that work is divided evenly among
/// warps even if pieces have different sizes.
struct tile {
    std::uint64_t first; ///< index of the tile's first word in the piece
    std::uint32_t piece;
    std::uint32_t unused;
};

constexpr unsigned tile_lane_words = 4; // words per thread of a warp: with more, 1024 threads run out of registers
constexpr std::uint64_t tile_words = std::uint64_t{32} * tile_lane_words;

/// Kernel argument that describes the messages of one launch. A plain value. Its lists are in memory that the kernel
/// can access.
struct persistent_work {
    const piece *pieces = nullptr;
    const tile *tiles = nullptr;
    const std::uint32_t *starts = nullptr; ///< message m consists of tiles `starts[m]` to `starts[m + 1] - 1`
    std::uint32_t sent = 0;                ///< number of sent messages; they precede the received ones
    std::uint32_t received = 0;            ///< number of received messages
    notifier tell;
};

/// Lists of pieces and tiles to which a `persistent_work` (kernel argument) refers, in host memory.
struct persistent_lists {
    std::vector<piece> pieces;
    std::vector<tile> tiles;
    std::vector<std::uint32_t> starts = {0};

    /// Appends a message. Messages that are sent must be added before those that are received.
    void add(array_view<const piece> message) {
        for (const piece &p : message) {
            const std::uint64_t words = p.count[0] * p.element_bytes / word_bytes(p) * p.count[1] * p.count[2];
            for (std::uint64_t first = 0; first < words; first += tile_words) {
                tiles.push_back({first, static_cast<std::uint32_t>(pieces.size()), 0});
            }
            pieces.push_back(p);
        }
        starts.push_back(static_cast<std::uint32_t>(tiles.size()));
    }

    /// Returns the argument for a kernel that can access these lists.
    [[nodiscard]] persistent_work work(std::uint32_t sent, notifier tell) const noexcept {
        const auto received = static_cast<std::uint32_t>(starts.size() - 1) - sent;
        return {pieces.data(), tiles.data(), starts.data(), sent, received, tell};
    }

    /// Returns the largest number of tiles of a message.
    [[nodiscard]] std::uint32_t most_tiles() const noexcept {
        std::uint32_t most = 0;
        for (std::size_t m = 0; m + 1 < starts.size(); ++m) {
            most = std::max(most, starts[m + 1] - starts[m]);
        }
        return most;
    }
};

// Indices and values of the notifications. The value of an arrival notification contains the index of the message.
// Therefore the kernel waits for only one notification at a time, and unpacks messages in the order of their arrival.

/// Index of the notification that the kernel sets to the number of the exchange when it begins. The previous kernel has
/// then ended, so its message buffers may be reused.
constexpr std::size_t begun = 0;
/// Returns the index of the notification that the kernel sets to the number of the exchange when it has packed message
/// `m`.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t packed_at(std::size_t m) {
    return 1 + m;
}
/// Returns the index of the notification that the CPU thread sets to `arrival(exchange, m)` when message `m` is the
/// k-th message to arrive.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t arrived_at(std::uint32_t sent, std::size_t k) {
    return std::size_t{1} + sent + k;
}
constexpr unsigned message_bits = 32;
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::uint64_t arrival(std::uint64_t exchange, std::uint32_t message) {
    return (exchange << message_bits) | message;
}
/// Returns the index of the notification that the CPU thread sets to the number of the exchange when all messages are
/// sent. The message buffers may then be packed again.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t all_sent_at(std::uint32_t sent, std::uint32_t received) {
    return std::size_t{1} + sent + received;
}
/// Value to which the arrival notifications are set if no more messages will arrive. The kernel then ends.
constexpr std::uint64_t given_up = ~std::uint64_t{0};

/// Copies a message with the threads of the calling block, or with the threads of all blocks, depending on `Form`.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline void copy_message(const notify_block &block, const persistent_work &work,
                                           std::uint32_t message, direction way) {
    constexpr std::uint32_t warp = 32;
    const std::uint32_t lanes = block.threads < warp ? block.threads : warp;
    const std::uint32_t warps = block.threads / lanes; // number of warps in the block
    const std::uint32_t own = block.thread / lanes;
    const bool alone = Form == persistent_form::block_each;
    const std::uint32_t stride = alone ? warps : warps * block.blocks;
    for (std::uint32_t i = work.starts[message] + (alone ? own : own * block.blocks + block.index);
         i < work.starts[message + 1]; i += stride) {
        const tile &t = work.tiles[i];
        copy_piece<tile_lane_words>(work.pieces[t.piece], way, t.first + block.thread % lanes, lanes,
                                    t.first + tile_words);
    }
}

/// Returns true if the calling block does not copy but only polls for notifications on behalf of all other blocks. With
/// `block_each`, this is the last block. With `all_blocks`, there is no such block.
template <persistent_form Form> [[nodiscard]] MPGPU_NOTIFY_BOTH inline bool polls(const notify_block &block) {
    return Form == persistent_form::block_each && block.index == block.blocks - 1;
}

/// Packs all messages to send, and notifies the CPU thread of each packed message.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline void pack_messages(const notify_block &block, const persistent_work &work,
                                            std::uint64_t exchange) {
    const bool each = Form == persistent_form::block_each;
    if (block.index == 0 && block.thread == 0) {
        work.tell.raise(begun, exchange);
    }
    if (polls<Form>(block)) {
        return;
    }
    for (std::uint32_t m = each ? block.index : 0; m < work.sent; m += each ? block.blocks - 1 : 1) {
        copy_message<Form>(block, work, m, direction::pack);
        if (each) {
            work.tell.raise(block, packed_at(m), exchange);
        } else {
            work.tell.raise_by_all(block, packed_at(m), exchange);
        }
    }
}

/// Unpacks each message when it arrives. Returns false if no more messages will arrive.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline bool unpack_messages(const notify_block &block, const persistent_work &work,
                                              std::uint64_t exchange) {
    const bool each = Form == persistent_form::block_each;
    if (polls<Form>(block)) {
        for (std::uint32_t k = 0; block.thread == 0 && k < work.received; ++k) {
            work.tell.pass_on(arrived_at(work.sent, k), arrival(exchange, 0));
        }
        return true;
    }
    for (std::uint32_t k = each ? block.index : 0; k < work.received; k += each ? block.blocks - 1 : 1) {
        const std::size_t next = arrived_at(work.sent, k);
        const std::uint64_t found = each ? work.tell.wait_passed_on(block, next, arrival(exchange, 0))
                                         : work.tell.wait(block, next, arrival(exchange, 0));
        if (found == given_up) {
            return false;
        }
        copy_message<Form>(block, work, work.sent + static_cast<std::uint32_t>(found), direction::unpack);
    }
    return true;
}

/// Performs the calling block's work in an exchange with ranks on other nodes: packs its part, then unpacks its part.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline void exchange_messages(const notify_block &block, const persistent_work &work,
                                                std::uint64_t exchange) {
    pack_messages<Form>(block, work, exchange);
    unpack_messages<Form>(block, work, exchange);
}

/// Performs the work of the kernel on CPU threads, each of which acts as a block. The CPU must be able to access the
/// arrays and messages.
template <persistent_form Form>
void run_as_threads(const persistent_lists &lists, std::uint32_t sent, notifier tell, std::uint64_t exchange) {
    const persistent_work work = lists.work(sent, tell);
    constexpr std::uint32_t blocks = 3;
    std::vector<std::thread> grid;
    grid.reserve(blocks);
    for (std::uint32_t index = 0; index < blocks; ++index) {
        grid.emplace_back([&work, exchange, index] { exchange_messages<Form>({index, blocks, 0, 1}, work, exchange); });
    }
    for (std::thread &block : grid) {
        block.join();
    }
}

[[nodiscard]] inline persistent_copier cpu_persistent() {
    return [](const context &ctx, device, const persistent_lists &lists, std::uint32_t sent, notifier tell,
              persistent_form form, int) -> persistent_kernel {
        // Shared ownership, because enqueued work may outlive the plan.
        const auto kept = std::make_shared<const persistent_lists>(lists);
        auto *const run = form == persistent_form::block_each ? &run_as_threads<persistent_form::block_each>
                                                              : &run_as_threads<persistent_form::all_blocks>;
        return {[context = ctx.get(), kept, sent, tell, run](stream_view stream, std::uint64_t exchange) {
                    check(mpgpu::detail::launch_host(context, stream.get(), [kept, sent, tell, run, exchange] {
                        run(*kept, sent, tell, exchange);
                    }));
                },
                [](stream_view) {}};
    };
}

} // namespace mpgpu::halo::detail

namespace mpgpu::halo {

/// Argument for a kernel of the program that performs exchanges in addition to its computation. A plain value. The
/// kernel passes it to `pack_and_tell`, `await_and_unpack` and `await_sent`. All threads of all blocks of the grid call
/// these functions, and all blocks must run simultaneously (docs/guide/halo.md).
using kernel_work = detail::persistent_work;

/// Begins an exchange inside a kernel: packs all messages to ranks on other nodes, and notifies the CPU thread of each
/// packed message. Before that, all blocks must have synchronised (`grid.sync()`) after they wrote the cells and after
/// they unpacked the messages of the previous exchange.
MPGPU_NOTIFY_BOTH inline void pack_and_tell(const notify_block &block, const kernel_work &work,
                                            std::uint64_t exchange) {
    detail::pack_messages<persistent_form::all_blocks>(block, work, exchange);
}

/// Waits inside a kernel for each message of the exchange and unpacks it. Before a block reads ghost cells that another
/// block has unpacked, all blocks must synchronise. Returns false if the exchange has failed on the host; the kernel
/// must then end.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool await_and_unpack(const notify_block &block, const kernel_work &work,
                                                             std::uint64_t exchange) {
    return detail::unpack_messages<persistent_form::all_blocks>(block, work, exchange);
}

/// Waits inside a kernel until the packed messages of an exchange are sent. Required if the kernel begins another
/// exchange afterwards, because that exchange overwrites the message buffers. Returns false if the exchange has failed
/// on the host; the kernel must then end.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool await_sent(const notify_block &block, const kernel_work &work,
                                                       std::uint64_t exchange) {
    return work.tell.wait(block, detail::all_sent_at(work.sent, work.received), exchange) != detail::given_up;
}

/// Function that launches the program's own kernel in the given stream, for the exchange with the given number. For an
/// exchange that a running kernel already performs, it launches nothing.
using own_launch = std::function<void(stream_view, const kernel_work &, std::uint64_t exchange)>;

/// Returns a value for `options::persistent_copy` that launches the program's own kernel instead of a kernel of the
/// library. Use this function for memory that the CPU can access. On CUDA use `cuda_own_kernel` of mpgpu/halo.cuh.
/// `options::persistent` must be `persistent_form::all_blocks`.
[[nodiscard]] inline persistent_copier own_kernel(own_launch launch) {
    return [launch = std::move(launch)](const context &, device, const detail::persistent_lists &lists,
                                        std::uint32_t sent, notifier tell, persistent_form, int) -> persistent_kernel {
        const auto kept = std::make_shared<const detail::persistent_lists>(lists);
        return {[kept, sent, tell, launch](stream_view stream, std::uint64_t exchange) {
                    launch(stream, kept->work(sent, tell), exchange);
                },
                [](stream_view) {}};
    };
}

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PERSISTENT_HPP
