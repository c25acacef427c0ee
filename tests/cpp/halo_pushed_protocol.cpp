// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the protocol of halo/pushed.hpp. Threads represent the blocks of several ranks, and the library is not used, so
// the test also runs under ThreadSanitizer. Messages are written and read without atomics.
#include "halo_reference.hpp"

#include <mpgpu/halo.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace detail = mpgpu::halo::detail;

std::uint64_t rounds() {
    constexpr std::uint64_t few = 150;
    constexpr std::uint64_t many = 20000;
    return std::getenv("LONG_TESTS") != nullptr ? many : few;
}

/// Yields for a random time.
void dawdle(std::mt19937 &random) {
    for (auto turns = random() % 6; turns > 0; --turns) {
        std::this_thread::yield();
    }
}

/// Returns word `at` of the message from rank `from` to rank `to` in round `round`.
std::uint64_t word(std::uint64_t round, std::size_t from, std::size_t to, std::uint64_t at) {
    return ((round * 64 + from) * 64 + to) * 4096 + at;
}

/// Returns the number of words in the message from rank `from` to rank `to`. A message has two pieces; the second is
/// one row.
std::uint64_t words_of(std::size_t from, std::size_t to) {
    return 150 + 97 * ((from + to) % 5);
}

struct rank_memory {
    std::vector<std::uint64_t> cells;               ///< to each rank in turn, separated by an unused word
    std::vector<std::uint64_t> ghosts;              ///< from each rank
    std::vector<mpgpu::notification_counter> inbox; ///< of this type for its alignment
    std::unique_ptr<detail::pushed_lists> lists;
    detail::pushed_state state{};
    detail::pushed_work work;
    std::uint64_t gone = 0;
};

/// Ranks with separate memory. Ranks that are neighbours according to `neighbours` send to each other in both
/// directions.
struct world {
    world(std::size_t count, std::uint32_t blocks_of_each, std::vector<std::vector<bool>> neighbours)
        : ranks(count), blocks(blocks_of_each), sends(std::move(neighbours)) {
        const auto place = [count](std::size_t other) { return other * 1000 + count; };
        for (rank_memory &r : ranks) {
            r.cells.assign(1000 * count + 1000, 0);
            r.ghosts.assign(1000 * count + 1000, 0);
            half = 1024 * count * sizeof(std::uint64_t);
            r.inbox.assign(2 * half / sizeof(mpgpu::notification_counter) + count, {});
        }
        for (std::size_t from = 0; from < count; ++from) {
            detail::pushed_messages all;
            for (std::size_t to = 0; to < count; ++to) {
                if (sends[from][to]) {
                    all.sent.push_back(message(from, to, ranks[from].cells.data() + place(to)));
                    all.received.push_back(message(to, from, ranks[from].ghosts.data() + place(to)));
                }
            }
            rank_memory &r = ranks[from];
            all.gone = &r.gone;
            r.lists = std::make_unique<detail::pushed_lists>(all);
            r.work = detail::work_of(all, *r.lists, blocks, r.lists->pieces.data(), r.lists->tiles.data(), &r.state);
        }
    }

    /// Returns the message from rank `from` to rank `to` in the receiver's inbox. `cells` are the cells of the sender
    /// or of the receiver.
    detail::pushed_message message(std::size_t from, std::size_t to, std::uint64_t *cells) {
        auto *const inbox = reinterpret_cast<std::byte *>(ranks[to].inbox.data());
        std::byte *const at = inbox + from * 1000 * sizeof(std::uint64_t);
        const std::uint64_t words = words_of(from, to);
        const std::uint64_t rows = (words - 40) / 2;
        detail::pushed_message m;
        m.half = half;
        m.flag = reinterpret_cast<std::uint64_t *>(inbox + 2 * half) + from * 16;
        auto *const bytes = reinterpret_cast<std::byte *>(cells);
        m.pieces.push_back({bytes, at, 8, {2, rows, 1}, 16, 16 * rows});
        m.pieces.push_back({bytes + 16 * rows, at + 16 * rows, 8, {words - 2 * rows, 1, 1}, 8, 8});
        return m;
    }

    void fill(std::size_t rank, std::uint64_t round) {
        for (std::size_t to = 0; to < ranks.size(); ++to) {
            for (std::uint64_t at = 0; sends[rank][to] && at < words_of(rank, to); ++at) {
                ranks[rank].cells[to * 1000 + ranks.size() + at] = word(round, rank, to, at);
            }
        }
    }

    /// Returns the number of words in all ghost cells of rank `rank` whose value is not that of round `round`.
    [[nodiscard]] int wrong(std::size_t rank, std::uint64_t round) const {
        std::vector<std::uint64_t> expected(ranks[rank].ghosts.size(), 0);
        for (std::size_t from = 0; from < ranks.size(); ++from) {
            for (std::uint64_t at = 0; sends[from][rank] && at < words_of(from, rank); ++at) {
                expected[from * 1000 + ranks.size() + at] = word(round, from, rank, at);
            }
        }
        return ranks[rank].ghosts == expected ? 0 : 1;
    }

    /// Runs the kernel of one exchange of rank `rank`: starts its blocks in random order, and returns when all of them
    /// have ended.
    void launch(std::size_t rank, std::mt19937 &random) {
        std::vector<std::uint32_t> order(blocks);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::thread> grid;
        grid.reserve(blocks);
        for (const std::uint32_t index : order) {
            const auto seed = static_cast<unsigned>(random());
            grid.emplace_back([this, rank, index, seed] {
                std::mt19937 own(seed);
                dawdle(own);
                detail::push_messages({index, blocks, 0, 1}, ranks[rank].work);
            });
        }
        for (std::thread &block : grid) {
            block.join();
        }
    }

    std::vector<rank_memory> ranks;
    std::uint32_t blocks;
    std::vector<std::vector<bool>> sends;
    std::uint64_t half = 0;
};

std::vector<std::vector<bool>> random_neighbours(std::size_t count, std::mt19937 &random) {
    std::vector<std::vector<bool>> sends(count, std::vector<bool>(count));
    for (std::size_t a = 0; a < count; ++a) {
        for (std::size_t b = 0; b <= a; ++b) {
            sends[a][b] = sends[b][a] = random() % 3 != 0; // including the rank itself
        }
    }
    return sends;
}

/// Runs `count` ranks, each in a separate thread, from its first round to its last.
template <class Run> void run_ranks(std::size_t count, const Run &run) {
    std::vector<std::thread> all;
    for (std::size_t rank = 0; rank < count; ++rank) {
        all.emplace_back([&run, rank] { run(rank); });
    }
    for (std::thread &one : all) {
        one.join();
    }
}

} // namespace

TEST_CASE("every word arrives in every exchange, however ranks and blocks are delayed") {
    std::mt19937 random(20261124);
    for (const std::size_t count : {1U, 2U, 3U, 5U}) {
        for (const std::uint32_t blocks : {1U, 3U, 7U}) {
            world w(count, blocks, random_neighbours(count, random));
            std::atomic<int> wrong{0};
            run_ranks(count, [&](std::size_t rank) {
                std::mt19937 own(static_cast<unsigned>(100 * count + std::size_t{10} * blocks + rank));
                for (std::uint64_t round = 1; round <= rounds() / count / blocks + 10; ++round) {
                    w.fill(rank, round);
                    dawdle(own);
                    w.launch(rank, own);
                    wrong += w.wrong(rank, round);
                    dawdle(own);
                }
            });
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE(
    "a rank is at most one exchange ahead of those that it sends to, which is all that two halves of an inbox take") {
    world w(3, 2, {{false, true, true}, {true, false, false}, {true, false, false}});
    std::array<std::atomic<std::uint64_t>, 3> ended{};
    std::atomic<int> far{0};
    run_ranks(3, [&](std::size_t rank) {
        std::mt19937 own(static_cast<unsigned>(rank));
        for (std::uint64_t round = 1; round <= rounds(); ++round) {
            if (rank == 0) {
                dawdle(own);
            }
            w.fill(rank, round);
            w.launch(rank, own);
            ended.at(rank) = round;
            // If a neighbour of rank 0 has completed the round, it has received rank 0's message of the round. So rank
            // 0 has completed the previous round.
            far += rank != 0 && ended[0] + 1 < round ? 1 : 0;
            far += rank == 0 && (ended[1] + 1 < round || ended[2] + 1 < round) ? 1 : 0;
        }
    });
    CHECK(far == 0);
}

TEST_CASE("ranks that wait for one that has ended are told by the word in host memory, and end") {
    world w(3, 3, {{false, true, true}, {true, false, true}, {true, true, false}});
    std::atomic<int> ended{0};
    std::atomic<bool> told{false};
    std::thread others([&] {
        run_ranks(2, [&](std::size_t rank) {
            std::mt19937 own(static_cast<unsigned>(rank));
            for (std::uint64_t round = 1; round <= 3; ++round) {
                w.fill(rank, round);
                w.launch(rank, own);
                ended += told ? 1 : 0;
            }
        });
    });
    std::mt19937 own(2);
    w.fill(2, 1);
    w.launch(2, own); // and no further launch
    std::this_thread::yield();
    told = true;
    for (const std::size_t rank : {0U, 1U}) {
        __atomic_store_n(&w.ranks[rank].gone, 1, __ATOMIC_RELEASE);
    }
    others.join();
    // No exchange follows an abandoned exchange: later launches end immediately.
    CHECK(w.ranks[0].state.abandoned != 0);
    CHECK(w.ranks[1].state.abandoned != 0);
    CHECK(ended >= 2);
}

TEST_CASE("the threads of a block, and all blocks, copy each word of a message once, of any elements") {
    std::mt19937 random(7);
    for (const std::uint64_t bytes : {1U, 2U, 4U, 8U, 12U, 16U, 24U}) {
        for (int turn = 0; turn < 8; ++turn) {
            const std::array<std::uint64_t, 3> count = {1 + random() % 9, 1 + random() % 40, 1 + random() % 9};
            const std::uint64_t row = (count[0] + random() % 3) * bytes;
            const std::uint64_t plane = row * (count[1] + random() % 3);
            constexpr std::uint64_t half = 81920; // more than the largest message
            for (const halo::direction way : {halo::direction::pack, halo::direction::unpack}) {
                std::array<std::vector<std::uint64_t>, 2> cells;
                std::array<std::vector<std::uint64_t>, 2> messages;
                detail::pushed_messages all;
                for (const std::size_t which : {0U, 1U}) {
                    cells.at(which).resize(plane * count[2] / 8 + 8);
                    messages.at(which).resize(2 * half / 8);
                    std::mt19937 same(static_cast<unsigned>(turn));
                    for (auto *memory : {&cells.at(which), &messages.at(which)}) {
                        std::generate(memory->begin(), memory->end(),
                                      [&] { return std::uint64_t{same()} << 20 ^ same(); });
                    }
                    halo::piece p{reinterpret_cast<std::byte *>(cells.at(which).data()),
                                  reinterpret_cast<std::byte *>(messages.at(which).data()),
                                  bytes,
                                  {count[0], count[1], count[2]},
                                  row,
                                  plane};
                    if (which == 0) {
                        auto &list = way == halo::direction::pack ? all.sent : all.received;
                        list.push_back({{p}, half, nullptr});
                    } else {
                        p.message += half;
                        halo::copy_on_cpu({&p, 1}, way);
                    }
                }
                const detail::pushed_lists lists(all);
                detail::pushed_state state{};
                const auto blocks = static_cast<std::uint32_t>(1 + random() % 5);
                const std::uint32_t threads = 32U << random() % 3;
                const detail::pushed_work work =
                    detail::work_of(all, lists, blocks, lists.pieces.data(), lists.tiles.data(), &state);
                for (std::uint32_t block = 0; block < blocks; ++block) {
                    const detail::tile_range some = detail::share_of(detail::tiles_of(work, 0), block, blocks);
                    for (std::uint32_t thread = 0; thread < threads; ++thread) {
                        detail::copy_tiles({block, blocks, thread, threads}, work, some, way, half);
                    }
                }
                CHECK(cells[0] == cells[1]);
                CHECK(messages[0] == messages[1]);
            }
        }
    }
}

TEST_CASE("tiles are shared out without a gap, and each message has as many packers as blocks with a part of it") {
    std::mt19937 random(11);
    for (int turn = 0; turn < 60; ++turn) {
        detail::pushed_messages all;
        std::vector<std::uint64_t> memory(8);
        const std::size_t messages = 1 + random() % 27;
        for (std::size_t m = 0; m < messages; ++m) {
            auto *const at = reinterpret_cast<std::byte *>(memory.data()); // never accessed
            all.sent.push_back({{{at, at, 8, {1 + random() % 400, 1, 1}, 8, 8}}, 0, nullptr});
        }
        all.received = all.sent;
        const detail::pushed_lists lists(all);
        const auto blocks = static_cast<std::uint32_t>(1 + random() % 40);
        const detail::pushed_work work = detail::work_of(all, lists, blocks, nullptr, nullptr, nullptr);
        std::vector<int> copied(lists.tiles.size());
        std::vector<std::uint32_t> packers(messages);
        for (std::uint32_t block = 0; block < blocks; ++block) {
            const detail::tile_range part = detail::share_of({0, work.starts[messages]}, block, blocks);
            for (std::uint32_t m = 0; m < messages; ++m) {
                const detail::tile_range own = detail::common(part, detail::tiles_of(work, m));
                packers[m] += own.first < own.end ? 1 : 0;
                for (std::uint32_t tile = own.first; tile < own.end; ++tile) {
                    ++copied[tile];
                }
            }
        }
        CHECK(std::count(copied.begin(), copied.begin() + work.starts[messages], 1) == work.starts[messages]);
        CHECK(std::equal(packers.begin(), packers.end(), work.packers));
    }
}

TEST_CASE("on every grid ranks send to each other both ways, and inboxes hold each message once") {
    std::mt19937 random(5);
    for (int turn = 0; turn < 60; ++turn) {
        halo::grid g;
        for (std::size_t d = 0; d < 3; ++d) {
            g.ranks.at(d) = 1 + static_cast<int>(random() % 4);
            g.ghost.at(d) = static_cast<std::int64_t>(random() % 3);
            g.cells.at(d) = g.ranks.at(d) * (g.ghost.at(d) + 1 + static_cast<std::int64_t>(random() % 3));
            g.periodic.at(d) = random() % 2 == 0;
        }
        g.reach = static_cast<halo::neighbours>(1 + random() % 3);
        const detail::connections between = halo_reference::connections_of(g, {8, 4});
        CHECK(detail::sends_both_ways(between));
        const detail::schedule all = detail::schedule_of(between, 0, [](int) { return true; });
        const detail::pushed_inboxes at(all);
        std::vector<std::vector<bool>> used(at.half.size());
        for (std::size_t i = 0; i < all.pairs.size(); ++i) {
            const detail::rank_pair &p = all.pairs[i];
            const auto to = static_cast<std::size_t>(p.to);
            CHECK(p.bytes > 0);
            CHECK(at.offset(i) + p.bytes <= at.half[to]);
            CHECK(at.flag_offset(i, to) >= 2 * at.half[to]);
            CHECK(at.flag_offset(i, to) + 8 <= 2 * at.half[to] + at.flag_bytes(to));
            std::vector<bool> &bytes = used[to];
            bytes.resize(2 * at.half[to] + at.flag_bytes(to));
            bool twice = false;
            for (std::uint64_t b = at.offset(i); b < at.offset(i) + p.bytes; ++b) {
                twice = twice || bytes[b];
                bytes[b] = true;
            }
            twice = twice || bytes[at.flag_offset(i, to)];
            bytes[at.flag_offset(i, to)] = true;
            CHECK_FALSE(twice);
        }
    }
}
