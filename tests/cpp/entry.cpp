// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests entry.hpp on the host backend with one rank that sends to itself.
#include <mpgpu/entry.hpp>
#include <mpgpu/mpgpu.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::uint64_t bar = 0x700;
constexpr std::uint64_t method_bits = 0xff00;

struct alone {
    mpgpu::context ctx;
    mpgpu::node node{ctx};
    mpgpu::messenger messages{node};
    mpgpu::stream stream{ctx, mpgpu::device::gpu(0)};
    mpgpu::entries entries{ctx, messages};

    /// Makes progress until `calls` functions have been called.
    void progress(std::size_t calls) {
        for (std::size_t called = 0; called < calls; std::this_thread::yield()) {
            called += entries.progress();
            REQUIRE(called <= calls);
        }
    }
};

struct call {
    std::int32_t steps;
    double time;
};

} // namespace

TEST_CASE("an entry method gets its arguments and several buffers of device and host where post has placed them") {
    alone rank;
    const mpgpu::device gpu1 = mpgpu::device::gpu(1);
    mpgpu::buffer<int> grid(rank.ctx, mpgpu::device::gpu(0), 5000);
    mpgpu::buffer<int> got(rank.ctx, gpu1, 5000);
    std::vector<double> list(300, 0.25);
    std::vector<double> got_list;
    const mpgpu::stream there(rank.ctx, gpu1);
    int entered = 0;
    rank.entries.on_message(
        {bar, method_bits},
        [&](mpgpu::arrival &m) {
            CHECK(m.rank() == 0);
            CHECK(m.tag() == bar + 5);
            REQUIRE(m.parts() == 2);
            got_list.resize(static_cast<std::size_t>(m.bytes(1)) / sizeof(double));
            m.into(0, got, there).into(1, got_list, there);
        },
        [&](mpgpu::arrival &m) {
            ++entered;
            REQUIRE(m.arguments_as<call>());
            CHECK(m.arguments_as<call>()->steps == 3);
            CHECK(std::count(got.data(), got.data() + 5000, 42) == 5000);
            CHECK(got_list == list);
        });
    for (int round = 1; round <= 3; ++round) { // with one tag, in progress at the same time
        rank.stream.launch_host([data = grid.data()] { std::fill(data, data + 5000, 42); });
        const call arguments{3, 0.5};
        mpgpu::entry_request sent =
            rank.entries.send(0, bar + 5, mpgpu::entry_arguments(arguments), {grid, list}, rank.stream);
        rank.progress(2);
        CHECK(entered == round);
        sent.synchronize();
        CHECK(sent.test());
    }
}

TEST_CASE("many messages of many sizes are under way at once, each with its own buffers") {
    alone rank;
    constexpr std::size_t count = 100;
    mpgpu::buffer<std::uint32_t> from(rank.ctx, mpgpu::device::gpu(0), count * count);
    mpgpu::buffer<std::uint32_t> to(rank.ctx, mpgpu::device::gpu(2), count * count);
    for (std::uint32_t i = 0; i < count * count; ++i) {
        from.data()[i] = i;
    }
    std::size_t ended = 0;
    rank.entries.on_message(
        mpgpu::message_tag::any(),
        [&](mpgpu::arrival &m) {
            std::size_t at = m.tag() * count;
            for (std::size_t part = 0; part < m.parts(); ++part) {
                const auto elements = static_cast<std::size_t>(m.bytes(part)) / sizeof(std::uint32_t);
                m.into(part, to.subspan(at, elements), rank.stream);
                at += elements;
            }
        },
        [&](mpgpu::arrival &m) {
            ++ended;
            // Arguments may have any size, even one that exceeds the metadata.
            CHECK(m.arguments().size() == m.tag() * 31);
        });
    std::vector<mpgpu::entry_request> sent;
    for (std::size_t m = 0; m < count; ++m) {
        const std::vector<std::byte> arguments(m * 31, std::byte{1});
        std::vector<mpgpu::message_memory<const void>> parts; // 0 to 4
        for (std::size_t part = 0; part < m % 5; ++part) {
            parts.emplace_back(from.subspan(m * count + part * 20, 20));
        }
        sent.push_back(rank.entries.send(0, m, arguments, parts, rank.stream));
    }
    rank.progress(2 * count);
    CHECK(ended == count);
    for (mpgpu::entry_request &one : sent) {
        one.synchronize();
    }
    for (std::size_t m = 0; m < count; ++m) {
        const std::size_t at = m * count;
        const std::size_t elements = m % 5 * 20;
        CHECK(std::equal(from.data() + at, from.data() + at + elements, to.data() + at));
    }
    CHECK(rank.entries.progress() == 0);
}

TEST_CASE("a message of send calls functions too, and one that post does not place is refused and stays") {
    alone rank;
    std::array<int, 4> from = {1, 2, 3, 4};
    std::array<int, 4> to = {};
    bool places = false;
    std::string got;
    rank.entries.on_message(
        bar,
        [&](mpgpu::arrival &m) {
            if (places) {
                m.into(0, to, rank.stream);
            }
        },
        [&](mpgpu::arrival &m) {
            got.assign(reinterpret_cast<const char *>(m.arguments().data()), m.arguments().size());
        });
    const std::string text = "four";
    mpgpu::message_request sent =
        rank.messages.send(from, 0, bar, rank.stream, {reinterpret_cast<const std::byte *>(text.data()), text.size()});
    CHECK_THROWS_WITH_AS(rank.entries.progress(),
                         "a message of rank 0, tag 1792: post has not placed all of its 1 parts",
                         mpgpu::argument_error);
    places = true;
    rank.progress(2);
    CHECK(got == text);
    CHECK(to == from);
    sent.synchronize();
}

TEST_CASE("a part goes to one place that is large enough, and what a message ended with is thrown") {
    alone rank;
    std::vector<int> from(100, 1);
    std::vector<int> to(100);
    rank.entries.on_message(
        bar,
        [&](mpgpu::arrival &m) {
            CHECK_THROWS_AS(m.into(2, to, rank.stream), mpgpu::argument_error);
            CHECK_THROWS_AS(m.into(0, mpgpu::message_memory<void>(to.data(), 399), rank.stream), mpgpu::argument_error);
            m.into(0, to, rank.stream);
            CHECK_THROWS_AS(m.into(0, to, rank.stream), mpgpu::argument_error);
            m.into(1, to, rank.stream);
        },
        [](mpgpu::arrival &) {});
    mpgpu::entry_request sent = rank.entries.send(0, bar, {}, {from, from}, rank.stream);
    rank.progress(2);
    sent.synchronize();
    // This message header is not written by the library. The buffer of the descriptor in it was already fetched.
    mpgpu::described_buffer of = rank.messages.describe(from, rank.stream);
    rank.messages.fetch(of.descriptor, to, rank.stream).synchronize();
    of.released.synchronize();
    mpgpu::detail::entry_head head;
    head.parts = 2;
    std::vector<mpgpu::detail::entry_part> parts(2, {of.descriptor, 400});
    mpgpu::message_request by_hand = rank.messages.send(parts, 0, bar, rank.stream, mpgpu::entry_arguments(head));
    CHECK_THROWS_AS(rank.progress(2), mpgpu::error);
    CHECK(rank.entries.progress() == 0);
    by_hand.synchronize();
}

TEST_CASE("where there is no room nothing is sent, and nothing stays described") {
    const mpgpu::context ctx;
    const mpgpu::node node(ctx);
    const mpgpu::messenger messages(node, {8, 4});
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    mpgpu::entries entries(ctx, messages);
    std::vector<int> from(100, 1);
    for (int turn = 0; turn < 5; ++turn) {
        const std::vector<mpgpu::message_memory<const void>> parts(20, from);
        CHECK_THROWS_AS(static_cast<void>(entries.send(0, bar, {}, parts, stream)), mpgpu::message_error);
    }
    CHECK_FALSE(messages.probe(mpgpu::any_rank, mpgpu::message_tag::any()));
    std::vector<int> to(100);
    entries.on_message(
        bar, [&](mpgpu::arrival &m) { m.into(0, to, stream).into(1, to, stream); }, [](mpgpu::arrival &) {});
    mpgpu::entry_request sent = entries.send(0, bar, {}, {from, from}, stream);
    for (std::size_t calls = 0; calls < 2; std::this_thread::yield()) {
        calls += entries.progress();
    }
    sent.synchronize();
    CHECK(to == from);
}
