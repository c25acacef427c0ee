// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests how an exchange chooses between its forms. A test double of the library refuses some plans, and executions take
// given times.
#include "counting_library.hpp"

#include <mpgpu/halo.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
using counting::kind;

constexpr std::size_t all = std::numeric_limits<std::size_t>::max();

/// Two ranks. Each sends one message if all cells are packed, and otherwise one row of each of three variables.
struct world {
    world() {
        g.cells = {8, 8, 1};
        g.ranks = {1, 2, 1};
        g.ghost = {1, 1, 0};
        for (int rank = 0; rank < 2; ++rank) {
            arrays.emplace_back();
            for (int v = 0; v < 3; ++v) {
                variables.emplace_back(ctx, mpgpu::device::gpu(rank), std::size_t{60});
                arrays.back().push_back(halo::array_of(variables.back()));
            }
        }
    }
    world(const world &) = delete;
    world(world &&) = delete;
    world &operator=(const world &) = delete;
    world &operator=(world &&) = delete;
    ~world() {
        counting::refuse_plans(all, MP_SUCCESS);
        counting::refuse_executions(all, MP_SUCCESS);
        counting::executions_take(all, {}, {});
    }

    [[nodiscard]] halo::plan plan(std::optional<std::uint64_t> direct_pieces = std::nullopt,
                                  std::optional<bool> pushed = false) const {
        halo::options how;
        how.direct_pieces = direct_pieces;
        how.pushed = pushed;
        return {ctx, g, arrays, how};
    }

    mpgpu::context ctx;
    halo::grid g;
    std::vector<mpgpu::buffer<double>> variables;
    std::vector<halo::rank_arrays> arrays;
};

constexpr std::size_t messages = 2; // transfers of the form that packs all cells; the other has six

} // namespace

TEST_CASE("a form that is slow in a row is not taken for being fast alone, and the other way round") {
    const world w;
    counting::executions_take(messages, {0.5e-3, 6e-3}, {2e-3, 2e-3});
    CHECK(w.plan().direct_pieces() == 0);
    counting::executions_take(messages, {6e-3, 0.5e-3}, {2e-3, 2e-3});
    const halo::plan row = w.plan();
    CHECK(row.direct_pieces() == 1);
    REQUIRE(row.measured().size() == 2);
    CHECK(row.measured()[0].seconds >= 2e-3);
    CHECK(row.describe().find("chosen by measurement, back to back") != std::string::npos);
}

TEST_CASE("messages are pushed where that is faster or asked for, without a transfer") {
    const world w;
    counting::executions_take(messages, {30e-3, 30e-3}, {30e-3, 30e-3}); // for transfers, which this form does not use
    const halo::plan measured = w.plan(std::nullopt, std::nullopt);
    CHECK(measured.pushed());
    CHECK(measured.direct_pieces() == 0);
    REQUIRE(measured.measured().size() == 3);
    CHECK(measured.measured()[2].pushed);
    CHECK(measured.transfers() == nullptr);
    CHECK(w.plan(std::nullopt, true).measured().empty());
    CHECK_FALSE(w.plan(0, std::nullopt).pushed());
    CHECK_FALSE(w.plan(std::nullopt, false).pushed());
    // If a kernel of the caller fails, its form of the exchange is excluded as long as other forms remain.
    halo::options how;
    how.pushed_copy = [](const mpgpu::context &, mpgpu::device, const halo::detail::pushed_messages &,
                         int) -> halo::launch_function {
        mpgpu::detail::fail({mpgpu::status::not_supported, 0, "", "no peer access"});
    };
    const halo::plan others(w.ctx, w.g, w.arrays, how);
    CHECK_FALSE(others.pushed());
    CHECK(others.measured().size() == 2);
    CHECK(others.describe().find("not possible here: pushed: no peer access") != std::string::npos);
    how.pushed = true;
    CHECK_THROWS_AS(halo::plan(w.ctx, w.g, w.arrays, how), mpgpu::not_supported);
}

TEST_CASE("a form that is refused is out, and the others are there") {
    const world w;
    for (const mp_status_t status : {MP_ERROR_NOT_SUPPORTED, MP_ERROR_INVALID_ARGUMENT, MP_ERROR_OUT_OF_MEMORY}) {
        const int plans = counting::live(kind::plan);
        const int memory = counting::live(kind::memory);
        {
            counting::refuse_plans(messages, status);
            const halo::plan packed = w.plan();
            CHECK(packed.direct_pieces() == 0);
            CHECK(packed.measured().empty());
            CHECK(packed.describe().find("not possible here: planned, up to 1: more transfers than the double takes") !=
                  std::string::npos);
            counting::refuse_plans(all, status);

            counting::refuse_executions(messages, status); // as if the first could not allocate staging memory
            const halo::plan first = w.plan();
            CHECK(first.direct_pieces() == 0);
            CHECK(first.measured().size() == 1);
            CHECK(first.describe().find("not possible here: planned, up to 1") != std::string::npos);
            counting::refuse_executions(all, status);
        }
        CHECK(counting::live(kind::plan) == plans);
        CHECK(counting::live(kind::memory) == memory);
    }
}

TEST_CASE("where all forms are refused the error is that of the first, and errors of another kind are thrown at once") {
    const world w;
    counting::refuse_plans(0, MP_ERROR_OUT_OF_MEMORY);
    CHECK_THROWS_AS(static_cast<void>(w.plan()), mpgpu::out_of_memory);
    counting::refuse_plans(all, MP_SUCCESS);
    counting::refuse_executions(0, MP_ERROR_NOT_SUPPORTED);
    CHECK_THROWS_AS(static_cast<void>(w.plan()), mpgpu::not_supported);
    counting::refuse_executions(all, MP_SUCCESS);

    counting::refuse_plans(messages, MP_ERROR_NOT_SUPPORTED);
    CHECK_THROWS_AS(static_cast<void>(w.plan(1)), mpgpu::not_supported); // explicitly requested
    counting::refuse_plans(messages, MP_ERROR_DRIVER);
    CHECK_THROWS_AS(static_cast<void>(w.plan()), mpgpu::driver_error);
    // A packing copier of the caller fails, before the test double refuses the other form.
    counting::refuse_plans(messages, MP_ERROR_OUT_OF_MEMORY);
    halo::options how;
    how.pushed = false;
    how.copy = [](const mpgpu::context &, mpgpu::device, mpgpu::array_view<const halo::piece>,
                  halo::direction) -> halo::launch_function {
        mpgpu::detail::fail({mpgpu::status::not_supported, 0, "", "the first"});
    };
    try {
        const halo::plan made(w.ctx, w.g, w.arrays, how);
        FAIL("accepted");
    } catch (const mpgpu::not_supported &e) {
        CHECK(std::string(e.what()) == "the first");
    }
}
