// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges between boxes, with other depths, ghost widths, padding and staggered variables, between virtual
// devices of one process. Every byte of every array is compared with a reference. Environment: TEST_CASES is the number
// of random cases, TEST_SEED the seed, which is printed.
#include "boxes_reference.hpp"

#include <mpgpu/halo.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

using mpgpu::device;
namespace halo = mpgpu::halo;
namespace reference = boxes_reference;
using reference::any;

constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();

mpgpu::context virtual_devices() {
    mpgpu::context_options machine;
    machine.backend = mpgpu::backend::host;
    machine.topology = "beluga";
    return mpgpu::context(machine);
}

/// Arrays of all ranks of a problem.
struct mesh {
    mesh(const mpgpu::context &ctx, const reference::problem &p) {
        for (std::size_t rank = 0; rank < p.boxes.size(); ++rank) {
            parts.emplace_back(ctx, p, rank);
            arrays.push_back(parts.back().arrays());
        }
    }

    std::vector<reference::part> parts;
    std::vector<halo::rank_arrays> arrays;
};

halo::plan plan_of(const mpgpu::context &ctx, const reference::problem &p, const mesh &all, const halo::options &how) {
    return p.grid ? halo::plan(ctx, *p.grid, all.arrays, how) : halo::plan(ctx, p.whole, p.boxes, all.arrays, how);
}

} // namespace

TEST_CASE("every byte is right after exchanges between random boxes") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(1));
    const std::uint64_t seed = reference::number_from("TEST_SEED", 20261130);
    const std::uint64_t cases = reference::number_from("TEST_CASES", 60);
    std::printf("TEST_SEED=%llu TEST_CASES=%llu\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(cases));
    for (std::uint64_t number = 0; number < cases; ++number) {
        reference::random_engine random(seed + number);
        const reference::problem p = reference::random_problem(random, static_cast<int>(any(random, 1, 8)));
        mesh all(ctx, p);
        halo::options how;
        how.depth = p.depth;
        how.direct_pieces =
            std::array<std::optional<std::uint64_t>, 5>{0, 1, 5, never_pack, std::nullopt}.at(random() % 5);
        how.pushed = how.direct_pieces || any(random, 0, 2) != 0 ? std::nullopt : std::optional<bool>(true);
        INFO("case ", number, ", seed ", seed + number);
        halo::plan plan = plan_of(ctx, p, all, how);
        std::uint64_t bytes = 0;
        for (const reference::part &one : all.parts) {
            bytes += one.received_bytes();
        }
        CHECK(plan.direct_bytes() + plan.packed_bytes() == bytes);
        for (std::uint64_t cycle = 1; cycle <= 3; ++cycle) {
            for (reference::part &one : all.parts) {
                one.fill(cycle);
                one.upload(stream);
            }
            plan.exchange(stream);
            for (const reference::part &one : all.parts) {
                one.download(stream);
            }
            stream.synchronize();
            for (const reference::part &one : all.parts) {
                const std::string difference = one.first_difference(cycle);
                REQUIRE_MESSAGE(difference.empty(), difference);
            }
        }
    }
}
