// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Halo exchange of several variables on a divided mesh, like LLNL's Comb, with one process for each rank. With -plain
// and -mpi the exchange is also made without mpgpu, alternating with mpgpu, for comparison.
#include "../gpu_aware.hpp"
#include "by_calls.hpp"
#include "by_mpi.hpp"
#include "cycles.hpp"
#include "lower_bound.hpp"
#include "options.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#ifdef HALO3D_CUDA
#include "by_peer_copies.hpp"
#endif

#include <array>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

/// Results of all exchange methods for one problem, for the table at the end.
struct result {
    halo::grid g;
    std::array<double, 2> bytes{}; // bytes of all ranks in one exchange: packed, and sent directly
    std::vector<std::string> names;
    std::vector<timings> measured;
    lower_bound least; // lower bound for messages to other nodes; its size is 0 if there are none
};

/// Creates the node of the ranks that share this rank's machine. With -nodes, the ranks of a machine are divided into
/// several nodes.
mpgpu::mpi::node node_of(const options &opt, const mpgpu::context &ctx, int rank) {
    const std::array<mpgpu::device, 1> gpu = {mpgpu::device::gpu(rank % ctx.devices().gpus)};
    if (opt.nodes == 0) {
        return {ctx, MPI_COMM_WORLD, gpu};
    }
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm local = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, static_cast<int>(std::int64_t{rank} * opt.nodes / ranks), rank, &local);
    mpgpu::mpi::node made(ctx, MPI_COMM_WORLD, local, gpu);
    MPI_Comm_free(&local);
    return made;
}

/// Returns the reason why messages in this kind of memory cannot be passed to MPI. Returns nothing if they can.
std::optional<std::string> why_left_out(const options &opt, const part &mine, space in) {
    const bool on_cpu = mine.code == &on_virtual_devices || in == space::pinned || in == space::pageable;
    return on_cpu || opt.gpu_aware ? std::nullopt : why_not_gpu_aware();
}

/// Creates the exchanges by plain copies between GPUs, if -plain requests them.
std::vector<std::unique_ptr<exchange>> by_copies(const options &opt, const mpgpu::context &ctx,
                                                 const mpgpu::mpi::node &node, const halo::grid &g, part &mine) {
    std::vector<std::unique_ptr<exchange>> made;
    if (!opt.plain) {
        return made;
    }
    if (mine.code == &on_virtual_devices) {
        throw std::invalid_argument("-plain: peer copies need GPUs and a build with nvcc");
    }
#ifdef HALO3D_CUDA
    std::vector<int> devices;
    for (const std::optional<mpgpu::device> &device : node.device_of_each(mine.where)) {
        if (!device) {
            throw std::invalid_argument("-plain: the GPUs of all ranks are not visible to this rank; list them in "
                                        "CUDA_VISIBLE_DEVICES of every rank");
        }
        devices.push_back(device->id());
    }
    for (const peer_copies::lanes how : {peer_copies::lanes::one, peer_copies::lanes::each}) {
        made.push_back(std::make_unique<by_peer_copies>(ctx, g, mine, devices, how));
    }
#else
    static_cast<void>(ctx);
    static_cast<void>(node);
    static_cast<void>(g);
#endif
    return made;
}

result run(const options &opt, const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g, int rank) {
    const int devices = ctx.devices().gpus;
    std::vector<part> parts;
    parts.emplace_back(ctx, g, rank, rank % devices, opt.vars);
    part &mine = parts.front();
    std::vector<mpgpu::stream> streams;
    streams.emplace_back(ctx, mine.where);
    halo::options how;
    how.direct_pieces = opt.direct;
    how.copy = mine.code->copier();
    how.persistent_copy = mine.code->persistent();
    how.pushed_copy = mine.code->pushing();
    std::deque<halo::plan> plans;
    std::vector<std::unique_ptr<exchange>> exchanges;
    std::vector<contender> all;
    const auto enter = [&](std::unique_ptr<exchange> one, std::vector<part> &cells) {
        all.push_back({exchanges.emplace_back(std::move(one)).get(), &cells});
    };
    const auto add = [&](halo::persistent_form persistent, std::optional<bool> pushed, const char *name) {
        how.persistent = persistent;
        how.pushed = pushed;
        enter(std::make_unique<by_plan>(plans.emplace_back(ctx, node, g, mine.arrays(), how), name), parts);
    };
    add(halo::persistent_form::none, opt.pushed, "mpgpu");
    if (opt.both) {
        add(halo::persistent_form::none, true, "mpgpu, pushed");
        add(halo::persistent_form::none, false, "mpgpu, not pushed");
    }
    if (opt.persistent) {
        add(halo::persistent_form::block_each, false, "mpgpu, one block per message");
        add(halo::persistent_form::all_blocks, false, "mpgpu, all blocks per message");
    }
    const halo::plan &plan = plans.front();
    if (opt.half_transfers) {
        enter(std::make_unique<by_half_transfers>(ctx, node, g, mine), parts);
    }
    if (opt.messages) {
        enter(std::make_unique<by_messages>(ctx, node, g, mine), parts);
    }
    for (std::unique_ptr<exchange> &one : by_copies(opt, ctx, node, g, mine)) {
        enter(std::move(one), parts);
    }
    std::vector<part> in_space;
    if (opt.mpi && opt.mesh_space != space::device) {
        in_space.emplace_back(ctx, g, rank, rank % devices, opt.vars, opt.mesh_space);
    }
    std::vector<part> &of_mpi = in_space.empty() ? parts : in_space;
    std::string left_out;
    for (const space in : opt.mpi ? opt.message_spaces : std::vector<space>()) {
        if (const std::optional<std::string> why = why_left_out(opt, mine, in)) {
            left_out += std::string("-mpi with ") + name_of(in) + " messages is left out: " + *why + "\n";
            continue;
        }
        for (const packing packs : opt.packings) {
            enter(std::make_unique<by_mpi>(ctx, g, of_mpi.front(), in, packs, opt.threads), of_mpi);
        }
    }
    if (rank == 0) {
        print_problem(opt, g, mine, devices);
        std::fputs(left_out.c_str(), stdout);
    }
    result found{g, {}, {}, run_cycles(opt, ctx, streams, all, [] { MPI_Barrier(MPI_COMM_WORLD); }), {}};
    found.least = measure_lower_bound(ctx, node, g, mine,
                                      mine.code == &on_virtual_devices || opt.gpu_aware || !why_not_gpu_aware());

    // In each cycle, only the time of the slowest rank counts.
    for (timings &measured : found.measured) {
        for (std::vector<double> &phase : measured.seconds) {
            MPI_Allreduce(MPI_IN_PLACE, phase.data(), static_cast<int>(phase.size()), MPI_DOUBLE, MPI_MAX,
                          MPI_COMM_WORLD);
        }
        MPI_Allreduce(MPI_IN_PLACE, &measured.in_a_row, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        MPI_Allreduce(MPI_IN_PLACE, &measured.enqueue, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    }
    found.bytes = {static_cast<double>(plan.packed_bytes()), static_cast<double>(plan.direct_bytes())};
    MPI_Allreduce(MPI_IN_PLACE, found.bytes.data(), 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf("On rank 0: ");
        print_plan(plan);
        if (opt.both) {
            std::printf("Not pushed: %s", plans[2].describe().c_str());
        }
        std::printf("Each cycle: %.0f bytes packed, %.0f bytes directly into ghost cells\n", found.bytes[0],
                    found.bytes[1]);
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
        found.names.push_back(exchanges[i]->name());
        if (rank == 0) {
            print_phases(found.names[i], found.measured[i]);
        }
        exchanges[i]->close();
    }
    for (halo::plan &one : plans) {
        one.destroy();
    }
    if (rank == 0) {
        if (found.least.bytes > 0) {
            print(found.least);
        }
        std::printf("Every cell is right.\n\n");
        std::fflush(stdout); // an interrupted run shows the results so far
    }
    return found;
}

void print_table(const std::vector<result> &results) {
    std::printf("Microseconds for one exchange. isolated: median if the host waits for each exchange; back to back: "
                "mean of consecutive exchanges. A ratio above 1: mpgpu is faster.\n");
    std::printf("%-16s %14s  %-30s %10s %7s %12s %7s\n", "cells per rank", "total bytes", "exchange by", "isolated",
                "ratio", "back to back", "ratio");
    for (const result &r : results) {
        const halo::box own = halo::box_of(r.g, 0);
        const std::string cells =
            std::to_string(own.cells[0]) + "_" + std::to_string(own.cells[1]) + "_" + std::to_string(own.cells[2]);
        const double one = median(r.measured[0].seconds[timings::comm]);
        for (std::size_t i = 0; i < r.names.size(); ++i) {
            const double other = median(r.measured[i].seconds[timings::comm]);
            std::printf("%-16s %14.0f  %-30s %10.1f %7.2f %12.1f %7.2f\n", cells.c_str(), r.bytes[0] + r.bytes[1],
                        r.names[i].c_str(), other * 1e6, other / one, r.measured[i].in_a_row * 1e6,
                        r.measured[i].in_a_row / r.measured[0].in_a_row);
        }
        if (r.least.bytes > 0) {
            std::printf("%-16s %14.0f  %-30s %10.1f %7.2f\n", cells.c_str(), r.bytes[0] + r.bytes[1], "lower bound",
                        r.least.seconds() * 1e6, r.least.seconds() / one);
        }
    }
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
            const mpgpu::context ctx = open_machine(opt);
            const mpgpu::mpi::node node = node_of(opt, ctx, rank);
            std::vector<result> results;
            for (const halo::grid &g : grids_of(opt, node.communicator_size())) {
                results.push_back(run(opt, ctx, node, g, rank));
            }
            if (rank == 0 && (results.size() > 1 || results.front().names.size() > 1)) {
                print_table(results);
            }
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "halo3d: rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
