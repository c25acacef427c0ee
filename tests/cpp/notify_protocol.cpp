// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the protocol of notify.cuh. Threads represent the blocks of a kernel, and the library is not used, so the test
// also runs under ThreadSanitizer. The data is written and read without atomics.
#include <mpgpu/notify.cuh>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

using mpgpu::notifier;
using mpgpu::notify_block;

/// Counters as allocated by mp_alloc.
struct counters {
    explicit counters(std::size_t count) : host(count), device(count) {}

    notifier view() { return {host.data(), device.data(), host.size()}; }

    std::vector<mpgpu::notification_counter> host;
    std::vector<mpgpu::notification_mirror> device;
};

std::uint64_t rounds() {
    constexpr std::uint64_t few = 200;
    constexpr std::uint64_t many = 10000;
    return std::getenv("LONG_TESTS") != nullptr ? many : few;
}

/// Yields for a random time.
void dawdle(std::mt19937 &random) {
    for (unsigned turns = random() % 4; turns > 0; --turns) {
        std::this_thread::yield();
    }
}

/// Runs a grid of `blocks` threads: starts the blocks in random order, and returns when all of them have ended.
template <class Kernel> std::vector<std::thread> launch(std::uint32_t blocks, unsigned seed, const Kernel &kernel) {
    std::vector<std::uint32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    std::vector<std::thread> grid;
    grid.reserve(blocks);
    for (const std::uint32_t index : order) {
        grid.emplace_back([kernel, index, blocks] { kernel(notify_block{index, blocks, 0, 1}); });
    }
    return grid;
}

void join(std::vector<std::thread> &grid) {
    for (std::thread &block : grid) {
        block.join();
    }
}

std::uint64_t word(std::uint64_t round, std::size_t which) {
    return (round << 8U) + which;
}

} // namespace

TEST_CASE("what each block wrote is there when its notification is, and the other way round, in any order") {
    constexpr std::uint32_t blocks = 5;
    counters all(std::size_t{2} * blocks);
    const notifier tell = all.view();
    std::vector<std::uint64_t> up(blocks);   // written by blocks
    std::vector<std::uint64_t> down(blocks); // written by the thread
    std::atomic<int> wrong{0};
    auto grid = launch(blocks, 1, [&](const notify_block &block) {
        std::mt19937 random(block.index);
        for (std::uint64_t round = 1; round <= rounds(); ++round) {
            dawdle(random);
            up[block.index] = word(round, block.index);
            tell.raise(block, block.index, round);
            if (block.index == 0) { // polls for all blocks, in turn
                for (std::size_t i = 0; i < blocks; ++i) {
                    tell.pass_on(blocks + i, round);
                }
            }
            tell.wait_passed_on(block, blocks + block.index, round);
            wrong += down[block.index] == word(~round, block.index) ? 0 : 1;
        }
    });
    std::mt19937 random(7);
    for (std::uint64_t round = 1; round <= rounds(); ++round) {
        std::vector<std::size_t> order(blocks);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        for (const std::size_t i : order) {
            while (!tell.is_raised(i, round)) {
                std::this_thread::yield();
            }
            wrong += up[i] == word(round, i) && tell.value(i) == round ? 0 : 1;
            down[i] = word(~round, i);
            dawdle(random);
            tell.raise(blocks + i, round);
        }
    }
    join(grid);
    CHECK(wrong == 0);
}

TEST_CASE("the last of all blocks raises, once all parts are written, and a thread's answer reaches all") {
    constexpr std::uint32_t blocks = 6;
    constexpr std::size_t messages = 3;
    counters all(2 * messages);
    const notifier tell = all.view();
    std::vector<std::vector<std::uint64_t>> parts(messages, std::vector<std::uint64_t>(blocks));
    std::vector<std::uint64_t> answers(messages);
    std::atomic<int> wrong{0};
    auto grid = launch(blocks, 2, [&](const notify_block &block) {
        std::mt19937 random(block.index);
        for (std::uint64_t round = 1; round <= rounds(); ++round) {
            for (std::size_t m = 0; m < messages; ++m) {
                parts[m][block.index] = word(round, block.index);
                dawdle(random);
                tell.raise_by_all(block, m, round);
            }
            for (std::size_t k = 0; k < messages; ++k) { // in order of arrival, given by the value
                const std::uint64_t found = tell.wait(block, messages + k, round << 32U);
                const auto m = static_cast<std::size_t>(found & 0xFFFFFFFFU);
                wrong += m < messages && answers[m] == word(~round, m) ? 0 : 1;
            }
        }
    });
    std::mt19937 random(8);
    for (std::uint64_t round = 1; round <= rounds(); ++round) {
        std::vector<std::size_t> order(messages);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        for (std::size_t k = 0; k < messages; ++k) {
            const std::size_t m = order[k];
            while (!tell.is_raised(m, round)) {
                std::this_thread::yield();
            }
            for (std::size_t b = 0; b < blocks; ++b) {
                wrong += parts[m][b] == word(round, b) ? 0 : 1;
            }
            answers[m] = word(~round, m);
            dawdle(random);
            tell.raise(messages + k, (round << 32U) | m);
        }
    }
    join(grid);
    CHECK(wrong == 0);
    for (std::size_t m = 0; m < messages; ++m) {
        CHECK(tell.value(m) == rounds());
        CHECK(all.device[m].arrived == 0);
    }
}

TEST_CASE("a block reads its copy in device memory, which holds nothing until the polling block has passed it on") {
    counters all(2);
    const notifier tell = all.view();
    CHECK_FALSE(tell.is_raised(1, 1));
    tell.raise(1, 3);
    CHECK(tell.is_raised(1, 3));
    CHECK_FALSE(tell.is_raised(1, 4));
    CHECK(all.device[1].value == 0);
    CHECK(tell.wait({0, 2, 0, 1}, 1, 2) == 3); // block 0 polls
    CHECK(all.device[1].value == 3);
    CHECK(tell.wait({1, 2, 0, 1}, 1, 3) == 3); // other blocks read the value that it has forwarded
    CHECK(all.host[0].value == 0);
}

TEST_CASE("notifications do not share cache lines") {
    CHECK(sizeof(mpgpu::notification_counter) == 128);
    CHECK(alignof(mpgpu::notification_counter) == 128);
}
