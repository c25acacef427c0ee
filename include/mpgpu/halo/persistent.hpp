// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PERSISTENT_HPP
#define MPGPU_HALO_PERSISTENT_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: one kernel for all messages of a rank to and from other nodes. It
/// packs, tells a thread of each message that is packed, is told of each that has arrived, and unpacks it.
///
/// After B. Elis et al., Non-Blocking GPU-CPU Notifications to Enable More GPU-CPU Parallelism, HPC Asia 2024, whose
/// two forms are `persistent_form::block_each` (there: stream approach) and `persistent_form::all_blocks` (stacked).

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

/// Words of a cell, which may be of any type.
struct __attribute__((may_alias)) word_of_8 {
    std::uint64_t bits;
};
struct __attribute__((may_alias)) word_of_4 {
    std::uint32_t bits;
};
struct __attribute__((may_alias)) word_of_1 {
    std::uint8_t bits;
};

/// a / b. Of 64 bits it takes a GPU five times as long, and is rarely needed.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint64_t quotient(std::uint64_t a, std::uint64_t b) {
    constexpr unsigned half = 32;
    return ((a | b) >> half) == 0 ? static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b) : a / b;
}

/// Every `stride`-th of a piece's words, among its cells, one after the other from word `first` on. Divisions are made
/// once, and not for each word.
template <class Word> class cell_walk {
  public:
    MPGPU_NOTIFY_BOTH cell_walk(const piece &p, std::uint64_t row_words, std::uint64_t first, std::uint64_t stride)
        : p_(p), row_words_(row_words) {
        place(first, x_, y_, z_);
        place(stride, dx_, dy_, dz_);
    }

    /// Where the word is; then it is the next one's turn.
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
    std::uint64_t x_ = 0; ///< of the next word: in its row; then its row and its plane
    std::uint64_t y_ = 0;
    std::uint64_t z_ = 0;
    std::uint64_t dx_ = 0; ///< the stride in these
    std::uint64_t dy_ = 0;
    std::uint64_t dz_ = 0;
};

/// Copies every `stride`-th word of a piece from word `first` on, as far as word `end`. A thread reads `AtOnce` of them
/// before it writes the first: several where few threads copy, and from host memory, a microsecond and more away.
template <class Word, unsigned AtOnce>
MPGPU_NOTIFY_BOTH inline void copy_words(const piece &p, direction way, std::uint64_t first, std::uint64_t stride,
                                         std::uint64_t end) {
    const std::uint64_t row_words = p.count[0] * p.element_bytes / sizeof(Word);
    const std::uint64_t words = row_words * p.count[1] * p.count[2];
    end = end < words ? end : words;
    Word *const message = reinterpret_cast<Word *>(p.message);
    cell_walk<Word> cells(p, row_words, first, stride);
    for (std::uint64_t i = first; i < end; i += AtOnce * stride) {
        Word read[AtOnce] = {}; // no std::array, which device code may not index
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

/// The widest word to which all rows of a piece are aligned, in bytes.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline unsigned word_bytes(const piece &p) {
    const std::uint64_t all =
        reinterpret_cast<std::uintptr_t>(p.cells) | p.element_bytes | p.row_bytes | p.plane_bytes; // low bits say it
    return all % sizeof(std::uint64_t) == 0 ? 8 : all % sizeof(std::uint32_t) == 0 ? 4 : 1;
}

/// Copies every `stride`-th of the words of a piece in [first, end).
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

/// As many words of a piece as a warp, or a CPU thread, copies in one go: so that warps share out small and large
/// pieces alike.
struct tile {
    std::uint64_t first; ///< word of the piece
    std::uint32_t piece;
    std::uint32_t unused;
};

constexpr unsigned tile_lane_words = 4; // of each thread of a warp: with more, 1024 threads run out of registers
constexpr std::uint64_t tile_words = std::uint64_t{32} * tile_lane_words;

/// What one launch copies; a plain value that the kernel takes, of lists in memory that it reaches.
struct persistent_work {
    const piece *pieces = nullptr;
    const tile *tiles = nullptr;
    const std::uint32_t *starts = nullptr; ///< tiles of message m are those from `starts[m]` to `starts[m + 1]`
    std::uint32_t sent = 0;                ///< messages, which come first
    std::uint32_t received = 0;            ///< messages
    notifier tell;
};

/// The lists of a `persistent_work`, on the host.
struct persistent_lists {
    std::vector<piece> pieces;
    std::vector<tile> tiles;
    std::vector<std::uint32_t> starts = {0};

    /// Adds a message; those that are sent first.
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

    /// The value for a kernel that reaches these lists.
    [[nodiscard]] persistent_work work(std::uint32_t sent, notifier tell) const noexcept {
        const auto received = static_cast<std::uint32_t>(starts.size() - 1) - sent;
        return {pieces.data(), tiles.data(), starts.data(), sent, received, tell};
    }

    /// Of the message that has the most.
    [[nodiscard]] std::uint32_t most_tiles() const noexcept {
        std::uint32_t most = 0;
        for (std::size_t m = 0; m + 1 < starts.size(); ++m) {
            most = std::max(most, starts[m + 1] - starts[m]);
        }
        return most;
    }
};

// The notifications of a launch. The value that a thread raises says which message has arrived: so the kernel waits for
// one notification at a time, and unpacks in the order of arrival.

/// Raised by the kernel to the exchange's number when it begins, so has ended before: its memory is free.
constexpr std::size_t begun = 0;
/// Raised by the kernel to the exchange's number when message `m` of those sent is packed.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t packed_at(std::size_t m) {
    return 1 + m;
}
/// Raised by the thread to `arrival(exchange, m)` when message m of those received is the k-th to arrive.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t arrived_at(std::uint32_t sent, std::size_t k) {
    return std::size_t{1} + sent + k;
}
constexpr unsigned message_bits = 32;
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::uint64_t arrival(std::uint64_t exchange, std::uint32_t message) {
    return (exchange << message_bits) | message;
}
/// Raised by the thread to the exchange's number when all that was sent is: a kernel that goes on may pack again.
[[nodiscard]] MPGPU_NOTIFY_BOTH constexpr std::size_t all_sent_at(std::uint32_t sent, std::uint32_t received) {
    return std::size_t{1} + sent + received;
}
/// In place of an arrival: nothing will arrive any more, and the kernel ends.
constexpr std::uint64_t given_up = ~std::uint64_t{0};

/// Copies a message, by the threads of one block or of all.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline void copy_message(const notify_block &block, const persistent_work &work,
                                           std::uint32_t message, direction way) {
    constexpr std::uint32_t warp = 32;
    const std::uint32_t lanes = block.threads < warp ? block.threads : warp;
    const std::uint32_t warps = block.threads / lanes; // of the block
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

/// The block that polls for all others, where each message has a block: the last.
template <persistent_form Form> [[nodiscard]] MPGPU_NOTIFY_BOTH inline bool polls(const notify_block &block) {
    return Form == persistent_form::block_each && block.index == block.blocks - 1;
}

/// Packs what is sent, and tells of each message.
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

/// Unpacks each message that arrives. False where nothing will arrive any more.
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

/// What each block of the kernel does in an exchange.
template <persistent_form Form>
MPGPU_NOTIFY_BOTH inline void exchange_messages(const notify_block &block, const persistent_work &work,
                                                std::uint64_t exchange) {
    pack_messages<Form>(block, work, exchange);
    unpack_messages<Form>(block, work, exchange);
}

/// The kernel as a function of a stream that starts a thread for each of a few blocks; for what the CPU reaches.
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
        // Shared with what is enqueued, which may outlive the plan.
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

/// What a kernel of the program's own takes that does exchanges beside its own work: a plain value. The functions below
/// are for all threads of all blocks of its grid, which must all run at once (docs/guide/halo.md).
using kernel_work = detail::persistent_work;

/// Begins an exchange: packs all messages to ranks of other nodes, and tells the thread of each. All blocks must have
/// come together since they wrote the cells, and since they unpacked the exchange before (`grid.sync()`).
MPGPU_NOTIFY_BOTH inline void pack_and_tell(const notify_block &block, const kernel_work &work,
                                            std::uint64_t exchange) {
    detail::pack_messages<persistent_form::all_blocks>(block, work, exchange);
}

/// Waits for each message of the exchange, and unpacks it. All blocks must come together before one reads ghost cells
/// that another has unpacked. False where the exchange has failed on the host: the kernel is to end.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool await_and_unpack(const notify_block &block, const kernel_work &work,
                                                             std::uint64_t exchange) {
    return detail::unpack_messages<persistent_form::all_blocks>(block, work, exchange);
}

/// Waits until what an exchange has packed is sent, in a kernel that begins another one afterwards. False as
/// `await_and_unpack`.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool await_sent(const notify_block &block, const kernel_work &work,
                                                       std::uint64_t exchange) {
    return work.tell.wait(block, detail::all_sent_at(work.sent, work.received), exchange) != detail::given_up;
}

/// Launches a kernel of the program's own for an exchange, in the stream. For an exchange that a kernel which is still
/// running does, it launches nothing.
using own_launch = std::function<void(stream_view, const kernel_work &, std::uint64_t exchange)>;

/// `options::persistent_copy` of the program's own, of what the CPU reaches; on CUDA `cuda_own_kernel` of
/// mpgpu/halo.cuh. `options::persistent` must be `persistent_form::all_blocks`.
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
