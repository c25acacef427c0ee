// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests that a halo exchange within a node relies only on stream order between start and finish. It must not call MPI,
// whose calls are counted, and the host must not wait. To detect waits, every rank blocks its stream by a closed gate
// while all exchanges are enqueued. A call that waited for the stream, for an event in it or for the device would then
// never return. Run by mpirun, on the host backend or on GPUs. On GPUs the exchange packs only if this file is compiled
// by nvcc.
#include "counted_mpi.hpp"
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>
#include <utility>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;

constexpr int exchanges = 20;

void run(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::uint64_t direct_pieces, bool pushed = false) {
    halo::grid g;
    g.cells = {12, 10, 6 * std::int64_t{node.size()}};
    g.ranks = {1, 1, node.size()};
    g.periodic = {true, false, true};
    g.ghost = {1, 2, 1};
    const halo_test::part mine(ctx, g, world_rank, {8, 4});
    const mpgpu::stream stream(ctx, mine.where());
    const mpgpu::stream opener(ctx, mine.where());
    mpgpu::signal_counters gate(ctx, 1);
    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = direct_pieces;
    how.pushed = pushed;
    halo::plan plan(ctx, node, g, mine.arrays(), how);

    // These exchanges come before the gate is closed: the first launch of a kernel loads it, and loading may wait for
    // the device.
    for (int i = 0; i < exchanges; ++i) {
        plan.exchange(stream);
    }
    stream.synchronize();
    for (const std::uint64_t cycle : {1U, 2U}) {
        mine.fill(cycle);
        mine.upload(stream);
        stream.synchronize();
        std::atomic<bool> done{false};
        MPI_Barrier(MPI_COMM_WORLD);
        const long before = counted_mpi::calls;
        ctx.wait(stream, {{gate.data(), cycle}});
        for (int i = 0; i < exchanges; ++i) {
            plan.start(stream);
            plan.finish(stream);
        }
        stream.launch_host([&done] { done = true; });
        const long calls = counted_mpi::calls - before;
        require(!done, "the exchanges have run before the gate was opened");
        ctx.raise(opener, {{gate.data(), cycle}});
        stream.synchronize();
        require(done, "the stream is synchronised and has not finished");
        require(counted_mpi::calls - before == calls, "waiting for the stream calls MPI");
        require(calls == 0, std::to_string(calls) + " calls into MPI in " + std::to_string(exchanges) + " exchanges");
        mine.download(stream);
        stream.synchronize();
        const std::string difference = mine.first_difference(cycle);
        require(difference.empty(), difference);
    }
    plan.destroy();
    if (world_rank == 0) {
        std::printf(
            "direct_pieces %llu%s: %d exchanges enqueued behind a closed gate, 0 calls into MPI, every cell right\n",
            static_cast<unsigned long long>(direct_pieces), pushed ? ", pushed" : "", exchanges);
    }
}

} // namespace

int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    try {
        require(counted_mpi::calls == 2, "two calls into MPI were made, and counted are others");
        const mpgpu::context ctx;
        halo_test::select_device(ctx, world_rank);
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
        run(ctx, node, std::numeric_limits<std::uint64_t>::max());
        if (halo_test::can_pack(ctx)) {
            run(ctx, node, 0);
            run(ctx, node, 1);
            run(ctx, node, 0, true);
        }
    } catch (const std::exception &e) {
        require(false, e.what());
    }
    MPI_Finalize();
    return 0;
}
