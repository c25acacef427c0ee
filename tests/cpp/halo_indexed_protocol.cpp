// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the protocol and the kernel of halo/index_kernel.hpp. Threads represent the blocks of several ranks.
// libmpgpu is not linked, so the test also runs under ThreadSanitizer. Messages are written and read without atomics.
#include "index_reference.hpp"

#include <mpgpu/halo/index_arrays.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace detail = mpgpu::halo::detail;
namespace reference = index_reference;
using reference::any;
using reference::random_engine;

std::uint64_t most_cases() {
    constexpr std::uint64_t few = 40;
    constexpr std::uint64_t many = 2000;
    return std::getenv("LONG_TESTS") != nullptr ? many : few;
}

constexpr std::size_t most_bytes = 40; // largest size of an entry, summed over all fields

/// Memory of a rank.
struct rank_memory {
    std::vector<mpgpu::notification_counter> inbox; ///< element type chosen for its alignment
    std::unique_ptr<detail::index_arrays> arrays;
    detail::index_state state{};
    std::uint64_t gone = 0;
    std::array<std::vector<std::uint64_t>, halo::most_fields> fields; ///< element type chosen for its alignment
    std::array<std::vector<std::uint64_t>, halo::most_fields> expected;
};

/// Ranks with separate memory, which exchange entries by index lists.
class world {
  public:
    world(reference::lists lists, std::uint32_t blocks) : all_(std::move(lists)), blocks_(blocks), ranks_(all_.ranks) {
        for (std::size_t rank = 0; rank < all_.ranks; ++rank) {
            std::vector<halo::index_neighbour> neighbours;
            for (std::size_t other = 0; other < all_.ranks; ++other) {
                const std::vector<std::int64_t> &send = all_.pair(rank, other).send;
                const std::vector<std::int64_t> &receive = all_.pair(other, rank).receive;
                if (!send.empty() || !receive.empty()) {
                    neighbours.push_back({static_cast<int>(other), send, receive});
                }
            }
            rank_memory &own = ranks_[rank];
            own.arrays = std::make_unique<detail::index_arrays>(neighbours, all_.entries[rank], most_bytes);
            own.arrays->gone = &own.gone;
            own.inbox.assign(all_.ranks * (2 * room / sizeof(mpgpu::notification_counter) + 1), {});
        }
        for (std::size_t rank = 0; rank < all_.ranks; ++rank) {
            std::size_t m = 0;
            for (std::size_t other = 0; other < all_.ranks; ++other) {
                if (all_.pair(rank, other).send.empty() && all_.pair(other, rank).receive.empty()) {
                    continue;
                }
                detail::index_message &message = ranks_[rank].arrays->messages[m++];
                message.there = place(other, rank);
                message.here = place(rank, other);
                message.there_half = message.here_half = room;
                message.there_flag = &ranks_[other].inbox[rank].value;
                message.here_flag = &ranks_[rank].inbox[other].value;
            }
        }
    }

    /// Sets the fields of a rank before an exchange, and computes the expected values.
    void fill(std::size_t rank, const reference::exchange &e) {
        rank_memory &own = ranks_[rank];
        for (std::size_t f = 0; f < e.fields.size(); ++f) {
            const std::size_t words = all_.entries[rank] * e.fields[f].bytes / sizeof(std::uint64_t) + 1;
            own.fields.at(f).assign(words, 0);
            const auto entry_in = [&](std::vector<std::uint64_t> &field) {
                return [&field, bytes = e.fields[f].bytes](std::size_t i) {
                    return reinterpret_cast<std::byte *>(field.data()) + i * bytes;
                };
            };
            for (std::size_t i = 0; i < all_.entries[rank]; ++i) {
                reference::write_value(entry_in(own.fields.at(f))(i), e, 0, rank, f, i);
            }
            own.expected.at(f) = own.fields.at(f);
            reference::apply(all_, e, rank, f, entry_in(own.expected.at(f)));
        }
    }

    /// Runs the kernels of one exchange of a rank, each with all its blocks.
    void exchange(std::size_t rank, const reference::exchange &e) {
        rank_memory &own = ranks_[rank];
        std::vector<halo::index_field> fields;
        for (std::size_t f = 0; f < e.fields.size(); ++f) {
            const std::size_t bytes = e.fields[f].bytes;
            fields.push_back(
                {own.fields.at(f).data(), mpgpu::device::gpu(0), bytes, bytes, all_.entries[rank], e.fields[f].values});
        }
        detail::index_work work = own.arrays->values();
        work.messages = own.arrays->messages.data();
        work.sends = own.arrays->sends.data();
        work.receives = own.arrays->receives.data();
        work.narrow = own.arrays->narrow.data();
        work.targets = own.arrays->targets.data();
        work.terms = own.arrays->terms.data();
        work.state = &own.state;
        work.call = detail::call_of(fields, e.operation);
        for (const bool gathers : {true, false}) {
            work.call.gathers = gathers;
            work.call.scatters = !e.is_split || !gathers;
            if (gathers || e.is_split) {
                detail::run_blocks(
                    blocks_, [&work](const mpgpu::notify_block &block) { detail::exchange_indexed(block, work); });
            }
        }
    }

    [[nodiscard]] bool is_right(std::size_t rank, std::size_t fields) const {
        const rank_memory &own = ranks_[rank];
        return std::equal(own.fields.begin(), own.fields.begin() + static_cast<std::ptrdiff_t>(fields),
                          own.expected.begin());
    }
    void set_gone(std::size_t rank) { __atomic_store_n(&ranks_[rank].gone, 1, __ATOMIC_RELEASE); }
    [[nodiscard]] const detail::index_state &state(std::size_t rank) const { return ranks_[rank].state; }

  private:
    /// Size of the room for a message, bytes.
    static constexpr std::size_t room = std::size_t{128} * 64;

    /// Returns the place of the message from rank `from` in the inbox of rank `to`. The flags precede all messages.
    [[nodiscard]] std::byte *place(std::size_t to, std::size_t from) {
        return reinterpret_cast<std::byte *>(ranks_[to].inbox.data() + all_.ranks) + from * 2 * room;
    }

    reference::lists all_;
    std::uint32_t blocks_;
    std::deque<rank_memory> ranks_;
};

TEST_CASE("ranks that exchange entries at different speeds receive the right entries") {
    for (std::uint64_t seed = 0; seed < most_cases(); ++seed) {
        random_engine random(seed);
        const std::size_t ranks = any(random, 1, 4);
        world w(reference::make_lists(random, ranks, 100), static_cast<std::uint32_t>(any(random, 1, 5)));
        std::vector<reference::exchange> exchanges;
        std::generate_n(std::back_inserter(exchanges), 12,
                        [&random] { return reference::make_exchange(random, most_bytes); });
        std::atomic<int> wrong{0};
        std::vector<std::thread> all;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            all.emplace_back([&, rank] {
                random_engine own(reference::mix(seed, rank));
                for (const reference::exchange &e : exchanges) {
                    w.fill(rank, e);
                    for (std::size_t turns = any(own, 0, 5); turns > 0; --turns) {
                        std::this_thread::yield();
                    }
                    w.exchange(rank, e);
                    wrong += w.is_right(rank, e.fields.size()) ? 0 : 1;
                }
            });
        }
        for (std::thread &one : all) {
            one.join();
        }
        CAPTURE(seed);
        CHECK(wrong == 0);
    }
}

TEST_CASE("a kernel ends if a rank has exited, and later kernels do nothing") {
    random_engine random(5);
    reference::lists lists{2, {4, 4}, std::vector<reference::pair_lists>(4)};
    lists.pairs[1] = {{0, 1}, {2, 3}}; // from rank 0 to rank 1 only
    world w(lists, 3);
    const reference::exchange e = reference::make_exchange(random, most_bytes);
    w.fill(0, e);
    w.set_gone(0);
    w.exchange(0, e);
    CHECK(w.state(0).abandoned == 1);
    CHECK(w.state(0).exchange == 1);
    w.exchange(0, e);
    CHECK(w.state(0).exchange == 1);
    w.set_gone(1);
    w.fill(1, e);
    w.exchange(1, e); // rank 0's message to rank 1 arrived before rank 0 exited
    CHECK(w.state(1).abandoned == 0);
}

TEST_CASE("several threads of a block copy all words") {
    random_engine random(7);
    reference::lists lists{1, {50}, std::vector<reference::pair_lists>(1)};
    for (std::int64_t i = 0; i < 20; ++i) {
        lists.pairs[0].send.push_back(19 - i / 2);
        lists.pairs[0].receive.push_back(49 - i);
    }
    const halo::index_neighbour self{0, lists.pairs[0].send, lists.pairs[0].receive};
    const detail::index_arrays arrays({&self, 1}, 50, 64);
    detail::index_work work = arrays.values();
    work.narrow = arrays.narrow.data();
    for (const std::size_t bytes : {1U, 3U, 4U, 8U, 12U, 16U, 48U, 64U}) {
        std::vector<std::uint64_t> words(50 * bytes / 8 + 2);
        std::generate(words.begin(), words.end(), [&random] { return random(); });
        std::vector<std::uint64_t> copied = words;
        std::vector<detail::word_of_16> message(20 * bytes / 16 + 1);
        auto *const at = reinterpret_cast<std::byte *>(message.data());
        const detail::index_words field =
            detail::words_of({copied.data(), mpgpu::device::gpu(0), bytes, bytes, 50, halo::number::none}, false);
        const detail::word_range some{0, 20 * field.words};
        constexpr std::uint32_t threads = 7;
        for (std::uint32_t thread = 0; thread < threads; ++thread) {
            detail::copy_field<detail::word_use::gather>({0, 1, thread, threads}, work, field, arrays.messages[0].send,
                                                         at, some);
        }
        for (std::uint32_t thread = 0; thread < threads; ++thread) {
            detail::copy_field<detail::word_use::scatter>({0, 1, thread, threads}, work, field,
                                                          arrays.messages[0].receive, at, some);
        }
        auto *const bytes_of = reinterpret_cast<std::byte *>(words.data());
        for (std::size_t i = 0; i < 20; ++i) {
            std::copy_n(bytes_of + static_cast<std::size_t>(lists.pairs[0].send[i]) * bytes, bytes,
                        bytes_of + static_cast<std::size_t>(lists.pairs[0].receive[i]) * bytes);
        }
        CAPTURE(bytes);
        CHECK(words == copied);
    }
}

} // namespace
