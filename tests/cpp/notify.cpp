// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests notify.hpp on the host backend, on which a kernel is a host function in a stream.
#include <mpgpu/notify.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

namespace {

using namespace std::chrono_literals;
using mpgpu::notifications;

static_assert(std::is_nothrow_move_constructible_v<notifications> && !std::is_copy_constructible_v<notifications>);
static_assert(std::is_trivially_copyable_v<mpgpu::notifier>);

const mpgpu::device gpu = mpgpu::device::gpu(0);

} // namespace

TEST_CASE("a running kernel and a thread tell each other, round after round") {
    const mpgpu::context ctx;
    notifications told(ctx, gpu, 2);
    CHECK(told.size() == 2);
    const mpgpu::stream stream(ctx, gpu);
    mpgpu::buffer<std::uint64_t> words(ctx, mpgpu::device::host(), 2);
    constexpr std::uint64_t rounds = 1000;
    std::uint64_t wrong = 0;
    stream.launch_host([tell = told.in_kernel(), data = words.data(), &wrong] {
        const mpgpu::notify_block block{0, 1, 0, 1};
        for (std::uint64_t round = 1; round <= rounds; ++round) {
            data[0] = round;
            tell.raise(block, 0, round);
            tell.wait(block, 1, round);
            wrong += data[1] == 2 * round ? 0 : 1;
        }
    });
    std::uint64_t wrong_here = 0;
    for (std::uint64_t round = 1; round <= rounds; ++round) {
        told.synchronize(0, round, 100s, "the kernel's word");
        wrong_here += words.data()[0] == round ? 0 : 1;
        words.data()[1] = 2 * round;
        told.raise(1, round);
    }
    stream.synchronize();
    CHECK(wrong == 0);
    CHECK(wrong_here == 0);
    CHECK(told.value(0) == rounds);
}

TEST_CASE("one that never comes is named in time, and the kernel, told, ends") {
    const mpgpu::context ctx;
    notifications told(ctx, gpu, 3);
    const mpgpu::stream stream(ctx, gpu);
    stream.launch_host([tell = told.in_kernel()] {
        tell.raise(2, 6); // never 7
        tell.wait({0, 1, 0, 1}, 0, 1);
    });
    told.synchronize(2, 6, 100s);
    std::string text;
    try {
        told.synchronize(2, 7, 5ms, "message to rank 4");
    } catch (const mpgpu::timeout &e) {
        text = e.what();
        CHECK(e.argument() == "index");
    }
    CHECK(text.find("notification 2 (message to rank 4) was not set within 0.005") == 0);
    CHECK(text.find("its value is 6, and 7 is waited for") != std::string::npos);
    std::error_code ec;
    told.synchronize(2, 7, 0ns, {}, ec);
    CHECK(ec == mpgpu::status::timeout);
    told.synchronize(2, 6, 0ns, {}, ec);
    CHECK_FALSE(ec);
    told.raise(0, 1);
    stream.synchronize();
}

TEST_CASE("none, and moved ones") {
    const mpgpu::context ctx;
    notifications none(ctx, gpu, 0);
    CHECK(none.size() == 0);
    CHECK(none.in_kernel().size() == 0);
    notifications first(ctx, gpu, 1);
    first.raise(0, 5);
    const notifications second = std::move(first);
    CHECK(second.test(0, 5));
    CHECK_FALSE(second.test(0, 6));
}
