// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the kernel of halo.cuh: its indexing on the CPU, on any machine, and on GPUs complete exchanges, where every
// cell is compared with an undivided mesh. Compile with an installed or built mpgpu and nvcc of CUDA 12 or 13:
//
//   nvcc -std=c++17 -arch=native -Iinclude tests/cpp/halo_cuda.cu libmpgpu.a -lpthread -ldl -lrt -lutil -lm -o
//   halo_cuda
//
// Prints a summary and exits with 0, with 77 if there is no GPU, or otherwise with 1.
#include "boxes_reference.hpp"
#include "halo_part.hpp"

#include <mpgpu/halo.cuh>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace reference = halo_reference;

constexpr int no_gpu = 77;

/// Calls the kernel's function for each word, as the threads of a kernel would, and compares the result with
/// copy_on_cpu.
void check_indexing() {
    for (const std::uint64_t bytes : {1U, 2U, 4U, 6U, 8U, 12U, 16U, 24U}) {
        for (const halo::direction way : {halo::direction::pack, halo::direction::unpack}) {
            std::array<std::vector<std::uint64_t>, 2> cells;
            std::array<std::vector<std::uint64_t>, 2> messages;
            for (std::size_t which : {0U, 1U}) {
                for (std::uint64_t i = 0; i < 1000; ++i) {
                    cells.at(which).push_back(i * 0x9E3779B97F4A7C15U);
                    messages.at(which).push_back(~i * 0x9E3779B97F4A7C15U);
                }
                const halo::piece p{reinterpret_cast<std::byte *>(cells.at(which).data()) + 3 * bytes,
                                    reinterpret_cast<std::byte *>(messages.at(which).data()),
                                    bytes,
                                    {5, 4, 3},
                                    9 * bytes,
                                    9 * 7 * bytes};
                constexpr std::uint64_t threads = 7;
                for (std::uint64_t thread = 0; which == 0 && thread < threads; ++thread) {
                    halo::detail::copy_piece(p, way, thread, threads);
                }
                if (which == 1) {
                    halo::copy_on_cpu({&p, 1}, way);
                }
            }
            if (cells[0] != cells[1] || messages[0] != messages[1]) {
                throw std::runtime_error("the kernel's indexing is wrong for elements of " + std::to_string(bytes) +
                                         " bytes");
            }
        }
    }
}

void check_exchanges(const mpgpu::context &ctx, std::optional<std::uint64_t> direct_pieces, std::optional<bool> pushed,
                     unsigned seed) {
    std::mt19937 random(seed);
    const int gpus = ctx.devices().gpus;
    constexpr int problems = 20;
    constexpr std::uint64_t cycles = 10;
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random);
        std::vector<halo_test::part> parts;
        std::vector<halo::rank_arrays> arrays;
        for (int rank = 0; rank < halo::rank_count(g); ++rank) {
            arrays.push_back(parts.emplace_back(ctx, g, rank, sizes).arrays());
        }
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = direct_pieces;
        how.pushed = pushed;
        halo::plan exchange(ctx, g, arrays, how);
        if (problem == 0 && !direct_pieces) {
            std::printf("%s", exchange.describe().c_str());
        }
        const mpgpu::stream stream(ctx, mpgpu::device::gpu(problem % gpus));
        for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
            for (const halo_test::part &each : parts) {
                each.fill(cycle);
                each.upload(stream);
            }
            exchange.exchange(stream);
            for (const halo_test::part &each : parts) {
                each.download(stream);
            }
            stream.synchronize();
            for (const halo_test::part &each : parts) {
                const std::string difference = each.first_difference(cycle);
                if (!difference.empty()) {
                    throw std::runtime_error("problem " + std::to_string(problem) + ", direct_pieces " +
                                             std::to_string(exchange.direct_pieces()) +
                                             (exchange.pushed() ? ", pushed" : "") +
                                             (direct_pieces ? "" : ", measured") + ": " + difference);
                }
            }
        }
    }
}

/// Tests exchanges between random boxes with padded arrays and staggered variables.
void check_boxes(const mpgpu::context &ctx) {
    constexpr std::uint64_t seed = 20261130;
    const std::uint64_t cases = boxes_reference::number_from("TEST_CASES", 60);
    for (std::uint64_t number = 0; number < cases; ++number) {
        const std::string difference = boxes_reference::difference_in_one_process(ctx, seed + number);
        if (!difference.empty()) {
            throw std::runtime_error("boxes, " + difference);
        }
    }
}

/// Tests that an exchange is refused with a message if cells must be packed and there is no kernel for it.
void check_refusal(const mpgpu::context &ctx) {
    halo::grid g;
    g.cells = {8, 8, 8};
    g.periodic = {true, false, false};
    g.ghost = {1, 1, 1};
    mpgpu::buffer<double> cells(ctx, mpgpu::device::gpu(0), std::size_t{1000});
    const std::vector<halo::rank_arrays> arrays = {{halo::array_of(cells)}};
    try {
        halo::options how;
        how.direct_pieces = 1;
        const halo::plan made(ctx, g, arrays, how);
    } catch (const mpgpu::not_supported &) {
        return;
    }
    throw std::runtime_error("a plan that must pack without a kernel was not refused");
}

int run() {
    check_indexing();
    std::printf("the kernel's indexing: right\n");
    mpgpu::context_options machine;
    machine.backend = mpgpu::backend::cuda;
    std::error_code ec;
    const mpgpu::context ctx(machine, ec);
    if (ec || ctx.devices().gpus == 0) {
        std::printf("no GPU: exchanges not tried (%s)\n", ec.message().c_str());
        return no_gpu;
    }
    check_refusal(ctx);
    constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();
    for (const std::optional<std::uint64_t> direct_pieces :
         {std::optional<std::uint64_t>(0), {1}, {5}, {never_pack}, {std::nullopt}}) {
        check_exchanges(ctx, direct_pieces, std::nullopt, 20261121);
    }
    check_exchanges(ctx, 0, true, 20261124);
    check_boxes(ctx);
    std::printf("exchanges on %d GPUs: every cell right\n", ctx.devices().gpus);
    return 0;
}

} // namespace

int main() {
    try {
        return run();
    } catch (const std::exception &e) {
        std::fprintf(stderr, "halo_cuda: %s\n", e.what());
        return 1;
    }
}
