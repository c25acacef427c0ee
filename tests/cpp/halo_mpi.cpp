// SPDX-License-Identifier: MIT OR Apache-2.0
// Halo exchanges between processes: every cell of every rank's arrays is compared with a mesh that is held in one
// piece. Run by mpirun with any number of ranks, on the host backend or on GPUs; ends all of them with a message at the
// first thing that is wrong. On GPUs it packs where nvcc has compiled it.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;
namespace reference = halo_reference;

constexpr int problems = 12;
constexpr std::uint64_t few_cycles = 40;
constexpr std::uint64_t many_cycles = 400;

bool shown = false; // one description, for the log

/// A value of `direct_pieces` by chance. Where nothing can be packed, the one that packs nothing.
std::optional<std::uint64_t> random_form(std::mt19937 &random, const mpgpu::context &ctx) {
    constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();
    constexpr std::array<std::optional<std::uint64_t>, 5> forms{0, 1, 5, never_pack, std::nullopt};
    const std::optional<std::uint64_t> drawn = forms.at(random() % forms.size());
    return halo_test::can_pack(ctx) ? drawn : never_pack;
}

/// A value of `joint` by chance.
std::optional<bool> random_joint(std::mt19937 &random) {
    constexpr std::array<std::optional<bool>, 3> values{false, true, std::nullopt};
    return values.at(random() % values.size());
}

/// Cycle after cycle without a host that waits: each fills the arrays anew, exchanges and compares, in stream order.
void run_cycles(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g,
                const std::vector<std::size_t> &sizes, std::optional<std::uint64_t> direct_pieces,
                std::optional<bool> joint, std::uint64_t cycles, bool in_two,
                halo::mpi_memory between_nodes = halo::mpi_memory::automatic,
                halo::persistent_form persistent = halo::persistent_form::none) {
    const halo_test::part mine(ctx, g, world_rank, sizes);
    const mpgpu::stream stream(ctx, mine.where());
    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = direct_pieces;
    how.joint = joint;
    how.between_nodes = between_nodes;
    how.persistent = persistent;
    halo::plan halo(ctx, node, g, mine.arrays(), how);
    require(!direct_pieces || !joint || halo.measured().empty(), "nothing is measured where the form is given");
    require(halo.joint() == joint.value_or(halo.joint()), "the form that was asked for is taken");
    for (const halo::measured_form &form : halo.measured()) {
        std::array<double, 2> readings = {form.seconds, -form.seconds};
        MPI_Allreduce(MPI_IN_PLACE, readings.data(), 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        require(readings[0] == -readings[1] && form.seconds > 0, "all ranks choose by the same readings");
    }
    if (world_rank == 0 && !halo.measured().empty() && !std::exchange(shown, true)) {
        std::printf("%s", halo.describe().c_str());
    }
    std::uint64_t sent = halo.direct_bytes() + halo.packed_bytes();
    MPI_Allreduce(MPI_IN_PLACE, &sent, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    require(sent == reference::exchanged_bytes(g, sizes), "the ranks send as many bytes as there are ghost cells");

    std::string difference;
    for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
        stream.launch_host([&mine, cycle] { mine.fill(cycle); });
        mine.upload(stream);
        if (in_two) {
            halo.start(stream);
            if (cycle % 3 == 0) {
                halo.start(stream); // the first one is brought to its end
            }
            halo.finish(stream);
        } else {
            halo.exchange(stream);
        }
        mine.download(stream);
        stream.launch_host([&mine, &difference, cycle] {
            if (difference.empty()) {
                difference = mine.first_difference(cycle);
            }
        });
    }
    stream.synchronize();
    require(difference.empty(), difference);
    halo.destroy();
}

/// What one rank gets wrong is thrown on all of them, and nobody waits for anybody.
void refuse_on_all_ranks(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.size()}, 1};
    g.ranks = {1, node.size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8, 4});
    const halo::options how = halo_test::options_for(ctx);
    const auto refused = [&](const halo::grid &with, const halo::rank_arrays &arrays) {
        try {
            const halo::plan made(ctx, node, with, arrays, how);
            return false;
        } catch (const mpgpu::argument_error &) {
            return true;
        }
    };
    const bool last = world_rank + 1 == node.size();
    halo::rank_arrays arrays = mine.arrays();
    arrays[1].size -= last ? 1 : 0;
    require(refused(g, arrays), "an array of the wrong size on one rank is refused on all");
    halo::grid other = g;
    other.ranks[1] += 1;
    require(refused(other, mine.arrays()), "a grid of more ranks than the communicator has is refused");
    if (node.size() > 1) {
        other = g;
        other.periodic[1] = last;
        require(refused(other, mine.arrays()), "grids that differ are refused on all ranks");
    }
    halo::plan(ctx, node, g, mine.arrays(), how).destroy(); // nothing of that has left a trace
}

/// A form that one rank refuses is out on all of them, whether it is refused when it is made or by the first exchange,
/// and nobody waits; where none is left, all throw.
void leave_out_what_one_rank_refuses(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    if (node.size() < 2 || !halo_test::on_host_backend(ctx)) {
        return; // copies are packed by the CPU below
    }
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.size()}, 1};
    g.ranks = {1, node.size(), 1};
    g.ghost = {1, 1, 0};
    const std::vector<std::size_t> sizes = {8, 4};
    const halo_test::part mine(ctx, g, world_rank, sizes);
    const bool last = world_rank + 1 == node.size();
    const auto refuse = [] {
        mpgpu::detail::fail({mpgpu::status::not_supported, 0, "", "no packing on the last rank"});
    };
    for (const int turn : {0, 1, 2, 3}) {
        const bool when_made = turn % 2 == 0;
        const bool joint = turn >= 2;
        int launched = 0;
        halo::options how;
        how.joint = joint;
        how.copy = [&](const mpgpu::context &context, mpgpu::device where, mpgpu::array_view<const halo::piece> pieces,
                       halo::direction way) -> halo::launch_function {
            if (last && when_made) {
                refuse();
            }
            return [&, copy = halo::detail::cpu_copier()(context, where, pieces, way)](mpgpu::stream_view stream) {
                if (last && ++launched > 2) { // in the second exchange that is measured
                    refuse();
                }
                copy(stream);
            };
        };
        const mpgpu::stream stream(ctx, mine.where());
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        require(plan.direct_pieces() == 1 && plan.packed_bytes() == 0, "the form that nobody refuses is taken");
        const std::string why = std::string(joint ? "up to 0 jointly: " : "up to 0: ") +
                                (last ? "no packing on the last rank" : "refused on another rank");
        require(plan.describe().find(why) != std::string::npos, plan.describe());
        mine.fill(1);
        mine.upload(stream);
        plan.exchange(stream);
        mine.download(stream);
        stream.synchronize();
        const std::string difference = mine.first_difference(1);
        require(difference.empty(), difference);
        plan.destroy();

        how.direct_pieces = 0;
        bool thrown = !when_made; // with one form nothing is measured
        if (when_made) {
            try {
                const halo::plan made(ctx, node, g, mine.arrays(), how);
            } catch (const mpgpu::not_supported &) {
                thrown = last;
            } catch (const mpgpu::argument_error &) {
                thrown = !last;
            }
        }
        require(thrown, "where every form is refused, all ranks throw, and the one that refused says why");
    }
}

/// Many exchanges by each persistent kernel, all neighbours of all ranks on one mesh.
void run_in_a_row(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const std::uint64_t cycles = std::getenv("LONG_TESTS") != nullptr ? 10000 : few_cycles;
    halo::grid g;
    g.ranks = {1, 1, node.size()};
    if (node.size() % 4 == 0) {
        g.ranks = {2, 2, node.size() / 4};
    }
    g.periodic = {true, true, true};
    g.ghost = {1, 2, 1};
    for (std::size_t d = 0; d < 3; ++d) {
        g.cells.at(d) = 5 * std::int64_t{g.ranks.at(d)} + 1;
    }
    halo::grid large = g; // of messages that are sent in several parts
    large.ranks = {1, 1, node.size()};
    large.cells = {80, 90, 3 * std::int64_t{node.size()}};
    for (const halo::persistent_form form : {halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
        run_cycles(ctx, node, g, {8, 4, 1}, 0, false, cycles, false, halo::mpi_memory::automatic, form);
        run_cycles(ctx, node, large, {8, 4, 8}, 0, false, 4, false, halo::mpi_memory::automatic, form);
    }
}

/// A plan that ends between `start` and `finish` lets its kernel end, which waits for messages to unpack. Last, because
/// messages that nobody takes any more may still be under way.
void give_up_in_the_middle(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.size()}, 1};
    g.ranks = {1, node.size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8});
    for (const halo::persistent_form form : {halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = 0;
        how.joint = false;
        how.persistent = form;
        const mpgpu::stream stream(ctx, mine.where());
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        plan.exchange(stream);
        plan.start(stream);
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

/// Ranks of one machine taken for nodes: some of a rank's neighbours are reached by signals, the others by MPI.
void run_on_nodes(const mpgpu::context &ctx, std::mt19937 &random, int nodes) {
    MPI_Comm local = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % nodes, world_rank, &local);
    {
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, local);
        refuse_on_all_ranks(ctx, node);
        for (int problem = 0; problem < problems; ++problem) {
            const auto [g, sizes] = reference::random_problem(random, node.size());
            const std::optional<std::uint64_t> form = random_form(random, ctx);
            constexpr std::array<halo::persistent_form, 3> kernels = {
                halo::persistent_form::none, halo::persistent_form::block_each, halo::persistent_form::all_blocks};
            const auto which = static_cast<std::size_t>(problem) % kernels.size();
            run_cycles(ctx, node, g, sizes, form, random_joint(random), few_cycles, problem % 2 == 1,
                       problem % 4 < 2 ? halo::mpi_memory::automatic : halo::mpi_memory::staged, kernels.at(which));
        }
        run_in_a_row(ctx, node);
        if (nodes == node.size()) {
            give_up_in_the_middle(ctx, node);
        }
    }
    MPI_Comm_free(&local);
}

void run() {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
    refuse_on_all_ranks(ctx, node);
    leave_out_what_one_rank_refuses(ctx, node);
    std::mt19937 random(20261121); // the same problems on all ranks
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random, node.size());
        const std::optional<std::uint64_t> form = random_form(random, ctx);
        const halo::persistent_form kernel = // which does not matter within a node
            problem % 3 == 0 ? halo::persistent_form::block_each : halo::persistent_form::none;
        run_cycles(ctx, node, g, sizes, form, random_joint(random), problem < 4 ? many_cycles : few_cycles,
                   problem % 2 == 1, halo::mpi_memory::automatic, kernel);
    }
    if (!halo_test::can_pack(ctx)) {
        if (world_rank == 0) {
            std::printf("no kernel that packs, which all that goes to another node takes: several nodes not tried\n");
        }
        return;
    }
    for (int nodes = 2; nodes <= node.size();
         nodes = nodes < node.size() && 2 * nodes > node.size() ? node.size() : 2 * nodes) {
        run_on_nodes(ctx, random, nodes);
    }
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "every cell right", run);
}
