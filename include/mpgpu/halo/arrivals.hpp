// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_ARRIVALS_HPP
#define MPGPU_HALO_ARRIVALS_HPP

/// @file
/// Functions that several kernels of halo exchanges use: the division of the work among blocks, and the wait for
/// messages of other ranks. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/notify.cuh>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace mpgpu::halo::detail {

/// Integer types through which cells of any type are copied.
struct __attribute__((may_alias)) word_of_8 {
    std::uint64_t bits;
};
struct __attribute__((may_alias)) word_of_4 {
    std::uint32_t bits;
};
struct __attribute__((may_alias)) word_of_1 {
    std::uint8_t bits;
};

/// Returns a / b. Uses a 32-bit division if possible, because a 64-bit division is five times slower on a GPU.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint64_t quotient(std::uint64_t a, std::uint64_t b) {
    constexpr unsigned half = 32;
    return ((a | b) >> half) == 0 ? static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b) : a / b;
}

/// Range of tiles (units of copying for one warp).
struct tile_range {
    std::uint32_t first;
    std::uint32_t end;
};

/// Returns the tiles that a block copies if the tiles are divided evenly among all blocks.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range share_of(tile_range all, std::uint32_t block, std::uint32_t blocks) {
    const std::uint64_t count = all.end - all.first;
    return {all.first + static_cast<std::uint32_t>(quotient(count * block, blocks)),
            all.first + static_cast<std::uint32_t>(quotient(count * (block + 1), blocks))};
}

/// Returns the intersection of two ranges of tiles.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline tile_range common(tile_range a, tile_range b) {
    return {a.first > b.first ? a.first : b.first, a.end < b.end ? a.end : b.end};
}

constexpr std::uint32_t none_arrives = ~std::uint32_t{0};

/// Polls until one of the messages whose bit is set in `left` has arrived, and returns its index. Returns
/// `none_arrives` if no more messages will arrive. A message has arrived if its flag is at least `exchange`.
/// `flag_of(m)` returns the address of the flag, or null if message `m` needs no flag. There are `count` messages, at
/// most 32. `gone` may be null; otherwise it points to a word in host memory that is not 0 if no more messages will
/// arrive. One thread of a block calls it.
template <class Flag>
MPGPU_NOTIFY_BOTH inline std::uint32_t poll_for_any(const Flag &flag_of, std::uint32_t count, const std::uint64_t *gone,
                                                    std::uint32_t left, std::uint64_t exchange) {
    // Number of polls between two reads of `gone`: a few milliseconds, because every block reads it from host memory.
    constexpr std::uint32_t look = 4096;
    for (std::uint32_t polls = 1;; ++polls) {
        for (std::uint32_t m = 0; m < count; ++m) {
            if ((left >> m & 1U) == 0) {
                continue;
            }
            const std::uint64_t *const flag = flag_of(m);
            if (flag == nullptr || mpgpu::detail::load<mpgpu::detail::reach::system>(flag) >= exchange) {
                return m;
            }
        }
        if (polls % look == 0 && gone != nullptr && mpgpu::detail::load<mpgpu::detail::reach::system>(gone) != 0) {
            return none_arrives;
        }
#ifdef __CUDA_ARCH__
        // Pause, because each read invalidates the L1 cache, and other blocks that pack data use this cache.
        __nanosleep(32);
#else
        std::this_thread::yield(); // there may be more threads than cores
#endif
    }
}

/// Waits until one of the messages whose bit is set in `left` has arrived. All threads of a block call it, and may then
/// read the message. The parameters are those of `poll_for_any`.
template <class Flag>
MPGPU_NOTIFY_BOTH inline std::uint32_t wait_for_any(const notify_block &block, const Flag &flag_of, std::uint32_t count,
                                                    const std::uint64_t *gone, std::uint32_t left,
                                                    std::uint64_t exchange) {
#ifdef __CUDA_ARCH__
    __shared__ std::uint32_t found;
    if (block.thread == 0) {
        found = poll_for_any(flag_of, count, gone, left, exchange);
    }
    block.synchronize();
    const std::uint32_t now = found;
    block.synchronize(); // before the next wait overwrites the result
    return now;
#else
    static_cast<void>(block);
    return poll_for_any(flag_of, count, gone, left, exchange);
#endif
}

/// Increments the number of blocks that have called this function. Returns true to all threads of the block that calls
/// it last. The threads of that block then see the earlier writes of all blocks. All threads of all blocks call it.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool is_last_block(const notify_block &block, std::uint32_t *counted) {
#ifdef __CUDA_ARCH__
    __shared__ bool last;
    block.synchronize();
    if (block.thread == 0) {
        last = mpgpu::detail::is_last(counted, block.blocks);
    }
    block.synchronize();
    const bool now = last;
    block.synchronize(); // before the next call overwrites the result
    return now;
#else
    return mpgpu::detail::is_last(counted, block.blocks);
#endif
}

/// Calls `work` on CPU threads, each of which acts as a block. Returns when all of them have ended.
template <class Work> void run_blocks(std::uint32_t blocks, const Work &work) {
    std::vector<std::thread> others;
    for (std::uint32_t index = 1; index < blocks; ++index) {
        others.emplace_back([&work, index, blocks] { work(notify_block{index, blocks, 0, 1}); });
    }
    work(notify_block{0, blocks, 0, 1});
    for (std::thread &block : others) {
        block.join();
    }
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_ARRIVALS_HPP
