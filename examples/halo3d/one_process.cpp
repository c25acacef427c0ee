// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Halo exchange of several variables on a divided mesh, in the manner of LLNL's Comb: all ranks in one process.
#include "cycles.hpp"
#include "options.hpp"

#include <mpgpu/halo.hpp>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

void run(const options &opt) {
    const mpgpu::context ctx = open_machine(opt);
    const halo::grid g = grid_of(opt, ctx.devices().gpus);
    std::vector<part> parts;
    std::vector<halo::rank_arrays> arrays;
    for (int rank = 0; rank < halo::rank_count(g); ++rank) {
        parts.emplace_back(ctx, g, rank, opt.vars);
        arrays.push_back(parts.back().arrays());
    }
    halo::options how;
    how.direct_pieces = opt.direct;
    halo::plan exchange(ctx, g, arrays, how);
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    print_problem(opt, g, ctx.devices().gpus);
    const timings measured = run_cycles(opt, g, stream, exchange, parts);
    print_results(measured, static_cast<double>(exchange.direct_bytes()), static_cast<double>(exchange.packed_bytes()));
}

} // namespace

int main(int argc, char *argv[]) {
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(usage, stdout);
            return 0;
        }
        run(opt);
        return 0;
    } catch (const std::invalid_argument &e) {
        std::fprintf(stderr, "halo3d: %s\n", e.what());
        return 2;
    } catch (const mpgpu::error &e) {
        std::fprintf(stderr, "halo3d: %s\n", e.what());
        return 2;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "halo3d: ERROR: %s\n", e.what());
        return 1;
    }
}
