// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges between boxes with one process per rank: other depths, ghost widths, padding and staggered
// variables. Every byte of every array is compared with a reference. Errors on one rank must be errors on all ranks.
//
// Run by mpirun with any number of ranks, on the host backend, or on GPUs if nvcc has compiled this file. Environment:
// TEST_CASES is the number of random cases, TEST_SEED the seed, which is printed. An argument states that the ranks are
// on several nodes, which tests/cpp/nodes emulates. Without an argument, groups of 1, 2 or 3 ranks are treated as
// nodes.
#include "boxes_reference.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace reference = boxes_reference;
using ranks_test::require;
using ranks_test::world_rank;
using reference::any;
using reference::random_engine;

halo::plan plan_of(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const reference::problem &p,
                   const halo::rank_arrays &arrays, const halo::options &how) {
    return p.grid ? halo::plan(ctx, node, *p.grid, arrays, how)
                  : halo::plan(ctx, node, p.whole, p.boxes[static_cast<std::size_t>(world_rank)], arrays, how);
}

/// Returns random options. Pushed messages are requested only where they are possible.
halo::options random_options(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const reference::problem &p,
                             random_engine &random) {
    halo::options how = reference::random_options(ctx, p, random);
    how.persistent =
        std::array<halo::persistent_form, 3>{halo::persistent_form::none, halo::persistent_form::block_each,
                                             halo::persistent_form::all_blocks}
            .at(random() % 3);
    how.progress =
        std::array<halo::progress_by, 3>{halo::progress_by::start, halo::progress_by::caller, halo::progress_by::thread}
            .at(random() % 3);
    if (node.size() == node.communicator_size() && any(random, 0, 1) == 0 && reference::can_be_pushed(p)) {
        how.direct_pieces = std::nullopt;
        how.pushed = true;
    }
    if (!halo_test::can_pack(ctx)) {
        how.direct_pieces = std::numeric_limits<std::uint64_t>::max();
        how.pushed = std::nullopt;
    }
    return how;
}

/// Tests one random exchange. All ranks pass equal seeds.
void run_case(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::uint64_t seed) {
    random_engine random(seed);
    const reference::problem p = reference::random_problem(random, node.communicator_size());
    const halo::options how = random_options(ctx, node, p, random);
    const reference::problem drawn = reference::with_other_arrays(p, random);
    // The method of the first set must be possible for the others.
    const reference::problem &other = reference::can_be_pushed(p) && !reference::can_be_pushed(drawn) ? p : drawn;
    std::vector<reference::part> sets; // arrays that are swapped
    for (std::int64_t i = any(random, 1, 3); i > 0; --i) {
        sets.emplace_back(ctx, sets.size() == 1 ? other : p, static_cast<std::size_t>(world_rank));
    }
    const mpgpu::stream stream(ctx, sets[0].where());
    halo::plan plan = plan_of(ctx, node, p, sets[0].arrays(), how);
    for (std::size_t i = 1; i < sets.size(); ++i) {
        require(plan.add(ctx, node, sets[i].arrays()) == i, "sets are numbered");
    }
    std::array<std::uint64_t, 2> bytes = {plan.direct_bytes() + plan.packed_bytes(), sets[0].received_bytes()};
    MPI_Allreduce(MPI_IN_PLACE, bytes.data(), 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    const std::string name = "seed " + std::to_string(seed) + ": ";
    require(bytes[0] == bytes[1], name + "the ranks send as many bytes as they receive");
    std::string difference;
    constexpr std::uint64_t cycles = 12;
    for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
        const std::size_t set = random() % sets.size();
        reference::part &now = sets[set];
        stream.launch_host([&now, cycle] { now.fill(cycle); });
        now.upload(stream);
        if (any(random, 0, 1) == 0) {
            plan.exchange(stream, set);
        } else {
            plan.start(stream, set);
            while (cycle % 2 == 0 && !plan.progress().is_done()) {
                std::this_thread::yield();
            }
            plan.finish(stream);
        }
        now.download(stream);
        stream.launch_host(
            [&now, &difference, cycle] { difference = difference.empty() ? now.first_difference(cycle) : difference; });
    }
    stream.synchronize();
    require(difference.empty(), name + difference);
    plan.destroy();
}

/// Returns the error that creating a plan throws on this rank. Ends all ranks if their errors differ.
std::string common_error(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::domain &whole,
                         const halo::rank_boxes &boxes, const halo::rank_arrays &arrays) {
    std::string text;
    try {
        const halo::plan made(ctx, node, whole, boxes, arrays);
    } catch (const mpgpu::argument_error &e) {
        text = e.what();
    }
    std::array<char, 1024> first{};
    text.resize(std::min(text.size(), first.size() - 1));
    text.copy(first.data(), text.size());
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    require(text == first.data(), "the errors differ: '" + text + "' and '" + first.data() + "'");
    return text;
}

/// Tests that errors on one rank are thrown on all ranks, with the values.
void refuse_on_all_ranks(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const std::int64_t ranks = node.communicator_size();
    halo::domain whole;
    whole.cells = {{0, 0, 0}, {8, 4 * ranks, 1}};
    whole.ghost = halo::both_sides({1, 1, 0});
    const halo::rank_boxes own = {{{0, 4 * std::int64_t{world_rank}, 0}, {8, 4, 1}}};
    mpgpu::memory cells(ctx, halo_test::device_of(ctx, world_rank), std::size_t{640});
    const auto elements = [](std::int64_t rows) { return static_cast<std::size_t>(10 * (rows + 2)); };
    const auto arrays = [&](std::size_t size) { return halo::rank_arrays{{cells.data(), cells.location(), 8, size}}; };
    const auto expect = [&](const halo::rank_boxes &boxes, std::size_t size, const std::string &words) {
        const std::string text = common_error(ctx, node, whole, boxes, arrays(size));
        require(text.find(words) != std::string::npos,
                ("expected '" + words + "', and got '").append(text).append("'"));
    };
    const bool last = world_rank + 1 == ranks;
    const std::string name = "rank " + std::to_string(ranks - 1);
    expect(own, elements(4) - (last ? 1 : 0), name + ", variable 0: 59 elements: must be 10 x 6 x 1");
    halo::rank_boxes other = own;
    other[0].first[1] += last ? 1 : 0;
    expect(other, elements(4), name + ", box 0: cells (0, " + std::to_string(4 * ranks - 3));
    if (ranks > 1) {
        other = own;
        if (last) {
            other[0].first[1] -= 1;
        }
        const std::string row = std::to_string(4 * ranks - 5);
        const std::string cells_of_both = "the cells (0, " + row + ", 0) to (7, " + row + ", 0) are in both boxes";
        expect(other, elements(4), cells_of_both);
        expect(other, elements(4), "rank " + std::to_string(ranks - 2) + " computes the cells (0, ");
        expect(other, elements(4), " and " + name + " the cells (0, " + row + ", 0)");
        halo::domain different = whole;
        different.periodic[0] = last;
        const std::string text = common_error(ctx, node, different, own, arrays(elements(4)));
        require(text.find("passed different arguments: the grid or domain") != std::string::npos, text);
    }
    expect({}, elements(4), "rank 0 has 0 boxes and 1 arrays");
    halo::plan(ctx, node, whole, own, arrays(elements(4)), halo_test::options_for(ctx)).destroy();
}

/// Tests random exchanges on virtual nodes of `ranks` ranks each.
void run_on_nodes(const mpgpu::context &ctx, int ranks, std::uint64_t seed, std::uint64_t cases) {
    MPI_Comm local = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank / ranks, world_rank, &local);
    {
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, local);
        for (std::uint64_t number = 0; number < cases; ++number) {
            run_case(ctx, node, seed + number);
        }
    }
    MPI_Comm_free(&local);
}

void run(bool on_nodes) {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
    refuse_on_all_ranks(ctx, node);
    const std::uint64_t seed = reference::number_from("TEST_SEED", 20261130);
    const std::uint64_t cases = reference::number_from("TEST_CASES", 12);
    if (world_rank == 0) {
        std::printf("TEST_SEED=%llu TEST_CASES=%llu\n", static_cast<unsigned long long>(seed),
                    static_cast<unsigned long long>(cases));
    }
    for (std::uint64_t number = 0; number < cases; ++number) {
        run_case(ctx, node, seed + number);
    }
    for (int ranks = 1; !on_nodes && halo_test::can_pack(ctx) && ranks < 4 && ranks < node.communicator_size();
         ++ranks) {
        run_on_nodes(ctx, ranks, seed + static_cast<std::uint64_t>(ranks) * cases, cases);
    }
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "every byte right", [&] { run(argc > 1); });
}
