// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Halo exchange of several variables on a divided mesh, like LLNL's Comb, with all ranks in one process.
#include "cycles.hpp"
#include "options.hpp"

#include <mpgpu/halo.hpp>

#include <cstddef>
#include <cstdio>
#include <deque>
#include <exception>
#include <optional>
#include <stdexcept>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

void run(const options &opt, const mpgpu::context &ctx, const halo::grid &g) {
    const int devices = ctx.devices().gpus;
    std::vector<part> parts;
    std::vector<mpgpu::stream> streams;
    std::vector<halo::rank_arrays> arrays;
    for (int rank = 0; rank < halo::rank_count(g); ++rank) {
        parts.emplace_back(ctx, g, rank, rank % devices, opt.vars);
        streams.emplace_back(ctx, parts.back().where);
        arrays.push_back(parts.back().arrays());
    }
    halo::options how;
    how.direct_pieces = opt.direct;
    how.copy = parts.front().code->copier();
    how.pushed_copy = parts.front().code->pushing();
    std::deque<halo::plan> plans;
    std::deque<by_plan> exchanges;
    const auto add = [&](std::optional<bool> pushed, const char *name) {
        how.pushed = pushed;
        exchanges.emplace_back(plans.emplace_back(ctx, g, arrays, how), name);
    };
    add(opt.pushed, "mpgpu");
    if (opt.both) {
        add(true, "mpgpu, pushed");
        add(false, "mpgpu, not pushed");
    }
    std::vector<contender> all;
    all.reserve(exchanges.size());
    for (by_plan &one : exchanges) {
        all.push_back({&one, &parts});
    }
    print_problem(opt, g, parts.front(), devices);
    const std::vector<timings> measured = run_cycles(opt, ctx, streams, all, [] {});
    for (std::size_t i = 0; i < all.size(); ++i) {
        print_plan(plans[i]);
        print_phases(exchanges[i].name(), measured[i]);
    }
    std::printf("Every cell is right.\n");
}

} // namespace

int main(int argc, char *argv[]) {
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(usage, stdout);
            return 0;
        }
        if (opt.nodes != 0 || opt.persistent || opt.half_transfers || opt.messages) {
            throw std::invalid_argument(
                "-nodes, -persistent, -half-transfers, -messages: these need several processes; run halo3d_mpi");
        }
        if (opt.plain || opt.mpi) {
            throw std::invalid_argument(
                "-plain, -mpi, -mesh-space, -message-space, -pack: these need several processes; run halo3d_mpi");
        }
        const mpgpu::context ctx = open_machine(opt);
        for (const halo::grid &g : grids_of(opt, ctx.devices().gpus)) {
            run(opt, ctx, g);
        }
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
