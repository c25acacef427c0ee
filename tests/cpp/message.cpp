// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests message.hpp on the host backend with one rank that sends to itself.
#include <mpgpu/mpgpu.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

namespace {

static_assert(std::is_nothrow_move_constructible_v<mpgpu::messenger> &&
              !std::is_copy_constructible_v<mpgpu::messenger>);
static_assert(std::is_nothrow_move_constructible_v<mpgpu::message_request> &&
              !std::is_copy_constructible_v<mpgpu::message_request>);
static_assert(std::is_trivially_copyable_v<mpgpu::message_info> &&
              std::is_trivially_copyable_v<mpgpu::message_descriptor>);
// Memory that is read-only cannot receive a message.
static_assert(std::is_constructible_v<mpgpu::message_memory<const void>, const std::vector<int> &> &&
              !std::is_constructible_v<mpgpu::message_memory<void>, const std::vector<int> &>);

constexpr std::uint64_t tag = 7;

/// Node group with a single rank.
struct alone {
    mpgpu::context ctx;
    mpgpu::node node{ctx};
    mpgpu::messenger messages{node, {32, 16}};
    mpgpu::stream stream{ctx, mpgpu::device::gpu(0)};
};

struct header {
    std::int32_t kind;
    double time;
};

} // namespace

TEST_CASE("a message brings its bytes and metadata, in the order of both streams") {
    const alone rank;
    mpgpu::buffer<int> from(rank.ctx, mpgpu::device::gpu(0), 5000);
    mpgpu::buffer<int> to(rank.ctx, mpgpu::device::gpu(1), 6000);
    std::fill(to.data(), to.data() + to.size(), -1);
    rank.stream.launch_host([data = from.data()] { std::fill(data, data + 5000, 42); });
    const header sent{3, 0.5};
    const auto metadata = mpgpu::array_view<const std::byte>(reinterpret_cast<const std::byte *>(&sent), sizeof(sent));
    mpgpu::message_request sending = rank.messages.send(from, 0, tag, rank.stream, metadata);

    const std::optional<mpgpu::message_info> found = rank.messages.probe(mpgpu::any_rank, mpgpu::message_tag::any());
    REQUIRE(found);
    CHECK(found->bytes() == 5000 * sizeof(int));
    CHECK(found->tag() == tag);
    CHECK_FALSE(rank.messages.probe(0, 8));

    mpgpu::message_request receiving = rank.messages.receive(to, mpgpu::any_rank, {6, 6}, rank.stream);
    receiving.wait(rank.stream);
    int first = 0;
    rank.stream.launch_host([&first, data = to.data()] { first = data[0]; });
    rank.stream.synchronize();
    CHECK(first == 42);
    const mpgpu::message_info got = receiving.synchronize();
    CHECK_FALSE(receiving);
    CHECK(got.rank() == 0);
    REQUIRE(got.metadata_as<header>());
    CHECK(got.metadata_as<header>()->kind == 3);
    CHECK_FALSE(got.metadata_as<int>());
    CHECK(std::count(to.data(), to.data() + 5000, 42) == 5000);
    CHECK(std::count(to.data() + 5000, to.data() + 6000, -1) == 1000);
    sending.synchronize();
}

TEST_CASE("a message that is too long stays, and what was cancelled says so") {
    const alone rank;
    const std::vector<int> from(100, 5);
    std::vector<int> to(100, 0);
    mpgpu::message_request sending = rank.messages.send(from, 0, tag, rank.stream);
    std::error_code ec;
    mpgpu::message_request small =
        rank.messages.receive(mpgpu::message_memory<void>(to.data(), 12), 0, tag, rank.stream);
    const mpgpu::message_info longer = small.synchronize(ec);
    CHECK(ec == mpgpu::status::message_truncated);
    CHECK(longer.bytes() == 400);
    CHECK_THROWS_AS(
        rank.messages.receive(mpgpu::message_memory<void>(to.data(), 12), 0, tag, rank.stream).synchronize(),
        mpgpu::message_error);
    mpgpu::message_request receiving = rank.messages.receive(to, 0, tag, rank.stream);
    receiving.synchronize();
    CHECK(to == from);
    sending.synchronize();

    mpgpu::message_request never = rank.messages.receive(to, 0, tag, rank.stream);
    CHECK_FALSE(never.info());
    CHECK(never.cancel());
    CHECK_FALSE(never.cancel());
    never.synchronize(ec);
    CHECK(ec == mpgpu::status::cancelled);
    CHECK_THROWS_AS(static_cast<void>(rank.messages.send(from, 1, tag, rank.stream)), mpgpu::argument_error);
    mpgpu::messenger nothing;
    static_cast<void>(nothing.send(from, 0, tag, rank.stream, {}, ec));
    CHECK(ec == mpgpu::status::invalid_handle);
}

TEST_CASE("asking tells of the message once it has ended, whatever its end") {
    const alone rank;
    const std::vector<int> from(100, 5);
    std::vector<int> to(100, 0);
    std::error_code ec;
    const auto until_it_ends = [&ec](mpgpu::message_request &request) {
        std::optional<mpgpu::message_info> message;
        while (!message) {
            message = request.test(ec);
            CHECK(static_cast<bool>(message) != static_cast<bool>(request));
        }
        return *message;
    };
    const std::array<std::byte, 3> metadata{std::byte{1}, std::byte{2}, std::byte{3}};
    mpgpu::message_request receiving = rank.messages.receive(to, 0, tag, rank.stream);
    CHECK_FALSE(receiving.test());
    CHECK(receiving);
    mpgpu::message_request sending = rank.messages.send(from, 0, tag, rank.stream, metadata);
    const mpgpu::message_info got = until_it_ends(receiving);
    CHECK_FALSE(ec);
    CHECK(to == from);
    CHECK(got.tag() == tag);
    CHECK(got.bytes() == 400);
    REQUIRE(got.metadata().size() == 3);
    CHECK(got.metadata()[2] == std::byte{3});
    CHECK(until_it_ends(sending).bytes() == 400);

    sending = rank.messages.send(from, 0, tag, rank.stream);
    mpgpu::message_request small =
        rank.messages.receive(mpgpu::message_memory<void>(to.data(), 12), 0, tag, rank.stream);
    CHECK(until_it_ends(small).bytes() == 400);
    CHECK(ec == mpgpu::status::message_truncated);
    rank.messages.receive(to, 0, tag, rank.stream).synchronize();
    static_cast<void>(until_it_ends(sending));

    mpgpu::message_request never = rank.messages.receive(to, 0, tag, rank.stream);
    CHECK(never.cancel());
    static_cast<void>(until_it_ends(never));
    CHECK(ec == mpgpu::status::cancelled);
    CHECK_THROWS_AS(static_cast<void>(never.test()), mpgpu::argument_error);
    CHECK_FALSE(never.test(ec));
}

TEST_CASE("a described buffer is fetched, and callbacks are told of both ends") {
    const alone rank;
    mpgpu::buffer<double> from(rank.ctx, mpgpu::device::gpu(0), 3000);
    mpgpu::buffer<double> to(rank.ctx, mpgpu::device::gpu(1), 3000);
    std::fill(from.data(), from.data() + 3000, 1.5);
    const mpgpu::described_buffer described = rank.messages.describe(from, rank.stream);
    std::promise<std::error_code> released;
    described.released.then([&released](std::error_code outcome) { released.set_value(outcome); });
    // A descriptor can be sent like any other bytes.
    mpgpu::message_descriptor travelled;
    mpgpu::message_request sending = rank.messages.send(
        mpgpu::message_memory<const void>(&described.descriptor, sizeof(described.descriptor)), 0, 1, rank.stream);
    rank.messages.receive(mpgpu::message_memory<void>(&travelled, sizeof(travelled)), 0, 1, rank.stream).synchronize();
    std::promise<std::error_code> fetched;
    {
        const mpgpu::message_request fetching = rank.messages.fetch(travelled, to, rank.stream);
        fetching.then([&fetched](std::error_code outcome) { fetched.set_value(outcome); });
    }
    CHECK_FALSE(fetched.get_future().get());
    CHECK_FALSE(released.get_future().get());
    CHECK(std::count(to.data(), to.data() + 3000, 1.5) == 3000);
    sending.synchronize();
    std::error_code ec;
    static_cast<void>(rank.messages.fetch(travelled, to, rank.stream, ec));
    CHECK(ec == mpgpu::status::invalid_argument);
}
