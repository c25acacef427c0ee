// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Halo exchange of several variables on a divided mesh, in the manner of LLNL's Comb: one process for each rank.
#include "cycles.hpp"
#include "options.hpp"

#include <mpgpu/mpi.hpp>

#include <mpgpu/halo.hpp> // again, after mpi.hpp: adds make_plan

#include <mpi.h>

#include <array>
#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

void run(const options &opt, int rank) {
    const mpgpu::context ctx = open_machine(opt);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
    const halo::grid g = grid_of(opt, node.size());
    std::vector<part> parts;
    parts.emplace_back(ctx, g, rank, opt.vars);
    halo::options how;
    how.direct_pieces = opt.direct;
    halo::plan exchange = halo::make_plan(ctx, node, g, parts.front().arrays(), how);
    const mpgpu::stream stream(ctx, parts.front().where);
    if (rank == 0) {
        print_problem(opt, g, ctx.devices().gpus);
    }
    timings measured = run_cycles(opt, g, stream, exchange, parts);

    // Of each cycle, the slowest rank.
    for (std::vector<double> &phase : measured.seconds) {
        MPI_Allreduce(MPI_IN_PLACE, phase.data(), static_cast<int>(phase.size()), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    }
    std::array<double, 2> bytes = {static_cast<double>(exchange.direct_bytes()),
                                   static_cast<double>(exchange.packed_bytes())};
    MPI_Allreduce(MPI_IN_PLACE, bytes.data(), 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        print_results(measured, bytes[0], bytes[1]);
    }
    halo::close(node, std::move(exchange));
}

} // namespace

int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(rank == 0 ? usage : "", stdout);
        } else {
            run(opt, rank);
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "halo3d: rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
