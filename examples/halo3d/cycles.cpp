// SPDX-License-Identifier: MIT OR Apache-2.0
#include "cycles.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>

namespace halo = mpgpu::halo;

namespace {

constexpr double untouched = -1.0; // in ghost cells before an exchange, and after it outside a mesh that is no ring

/// The value of a cell of the mesh in a cycle; whole numbers below 2^53, so that no two are equal by rounding.
double value(const halo::grid &g, const std::array<std::int64_t, 3> &cell, std::size_t variable, int cycle) {
    const std::int64_t index = cell[0] + g.cells[0] * (cell[1] + g.cells[1] * cell[2]);
    return static_cast<double>(index * 4096 + std::int64_t{cycle % 512} * 8 + static_cast<std::int64_t>(variable) % 8);
}

/// Calls `visit(element, cell, computed, exists)` for each cell of a rank's arrays.
template <class Visit> void for_each_cell(const halo::grid &g, int rank, const Visit &visit) {
    const halo::box own = halo::box_of(g, rank);
    const std::array<std::int64_t, 3> e = halo::extents(g, rank);
    std::size_t element = 0;
    std::array<std::int64_t, 3> i{};
    for (i[2] = 0; i[2] < e[2]; ++i[2]) {
        for (i[1] = 0; i[1] < e[1]; ++i[1]) {
            for (i[0] = 0; i[0] < e[0]; ++i[0], ++element) {
                std::array<std::int64_t, 3> cell{};
                bool computed = true;
                bool exists = true;
                for (std::size_t d = 0; d < 3; ++d) {
                    const std::int64_t at = own.first.at(d) + i.at(d) - g.ghost.at(d);
                    computed = computed && i.at(d) >= g.ghost.at(d) && i.at(d) < g.ghost.at(d) + own.cells.at(d);
                    exists = exists && (g.periodic.at(d) || (at >= 0 && at < g.cells.at(d)));
                    cell.at(d) = (at + g.cells.at(d)) % g.cells.at(d);
                }
                visit(element, cell, computed, exists);
            }
        }
    }
}

} // namespace

halo::grid grid_of(const options &opt, int ranks) {
    halo::grid g;
    for (std::size_t d = 0; d < 3; ++d) {
        g.cells.at(d) = opt.mesh.at(d);
        g.periodic.at(d) = opt.periodic.at(d) != 0;
        g.ghost.at(d) = opt.ghost.at(d);
    }
    g.ranks = opt.divide[0] != 0 ? opt.divide : std::array<int, 3>{1, 1, ranks};
    return g;
}

mpgpu::context open_machine(const options &opt) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
    machine.backend = mpgpu::backend::host;
    return mpgpu::context(machine);
}

part::part(const mpgpu::context &ctx, const halo::grid &g, int number, int count)
    : rank(number), where(mpgpu::device::gpu(number % ctx.devices().gpus)) {
    const std::array<std::int64_t, 3> e = halo::extents(g, number);
    for (int v = 0; v < count; ++v) {
        vars.emplace_back(ctx, where, static_cast<std::size_t>(e[0] * e[1] * e[2]));
    }
}

halo::rank_arrays part::arrays() {
    halo::rank_arrays all;
    for (mpgpu::buffer<double> &var : vars) {
        all.push_back(halo::array_of(var));
    }
    return all;
}

timings run_cycles(const options &opt, const halo::grid &g, const mpgpu::stream &stream, halo::plan &halo,
                   std::vector<part> &parts) {
    using clock = std::chrono::steady_clock;
    timings measured;
    // On a GPU these two would be kernels in the same stream.
    const auto set = [&](int cycle) {
        for (part &p : parts) {
            for_each_cell(g, p.rank, [&](std::size_t element, const auto &cell, bool computed, bool) {
                for (std::size_t v = 0; v < p.vars.size(); ++v) {
                    p.vars[v].data()[element] = computed ? value(g, cell, v, cycle) : untouched;
                }
            });
        }
    };
    std::string wrong;
    const auto compare = [&](int cycle) {
        for (const part &p : parts) {
            for_each_cell(g, p.rank, [&](std::size_t element, const auto &cell, bool, bool exists) {
                for (std::size_t v = 0; v < p.vars.size() && wrong.empty(); ++v) {
                    const double is = p.vars[v].data()[element];
                    const double must = exists ? value(g, cell, v, cycle) : untouched;
                    if (is != must) {
                        wrong = "cycle " + std::to_string(cycle) + ", rank " + std::to_string(p.rank) + ", variable " +
                                std::to_string(v) + ", cell " + std::to_string(cell[0]) + "_" +
                                std::to_string(cell[1]) + "_" + std::to_string(cell[2]) + ": " + std::to_string(is) +
                                " must be " + std::to_string(must);
                    }
                }
            });
        }
    };
    for (int cycle = 0; cycle < opt.cycles; ++cycle) {
        // The host waits between phases only to time them.
        std::array<clock::time_point, 6> at{};
        at[0] = clock::now();
        stream.launch_host([&, cycle] { set(cycle); });
        stream.synchronize();
        at[1] = clock::now();
        halo.start(stream);
        at[2] = clock::now();
        halo.finish(stream);
        at[3] = clock::now();
        stream.synchronize();
        at[4] = clock::now();
        stream.launch_host([&, cycle] { compare(cycle); });
        stream.synchronize();
        at[5] = clock::now();
        if (!wrong.empty()) {
            throw std::runtime_error(wrong);
        }
        const auto seconds = [&](std::size_t from, std::size_t to) {
            return std::chrono::duration<double>(at.at(to) - at.at(from)).count();
        };
        const std::array<double, 6> phases = {seconds(0, 1), seconds(1, 2), seconds(2, 3),
                                              seconds(3, 4), seconds(1, 4), seconds(4, 5)};
        for (std::size_t i = 0; i < phases.size(); ++i) {
            measured.seconds.at(i).push_back(phases.at(i));
        }
    }
    return measured;
}

void print_problem(const options &opt, const halo::grid &g, int devices) {
    std::printf("Num vars %d, cycles %d\n", opt.vars, opt.cycles);
    std::printf("Num cells %lld %lld %lld\n", static_cast<long long>(g.cells[0]), static_cast<long long>(g.cells[1]),
                static_cast<long long>(g.cells[2]));
    std::printf("Divisions %d %d %d, periodic %d %d %d, ghost widths %lld %lld %lld\n", g.ranks[0], g.ranks[1],
                g.ranks[2], g.periodic[0] ? 1 : 0, g.periodic[1] ? 1 : 0, g.periodic[2] ? 1 : 0,
                static_cast<long long>(g.ghost[0]), static_cast<long long>(g.ghost[1]),
                static_cast<long long>(g.ghost[2]));
    std::printf("%d ranks on %d virtual devices: times are of CPU threads, not of GPUs\n", halo::rank_count(g),
                devices);
}

void print_results(const timings &measured, double direct_bytes, double packed_bytes) {
    std::printf("Each cycle: %.0f bytes packed, %.0f bytes straight into ghost cells\n", packed_bytes, direct_bytes);
    for (std::size_t i = 0; i < timings::names.size(); ++i) {
        const std::vector<double> &all = measured.seconds.at(i);
        const auto [least, greatest] = std::minmax_element(all.begin(), all.end());
        std::printf("%-10s num %zu avg %.9f s min %.9f s max %.9f s\n", timings::names.at(i), all.size(),
                    std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size()), *least, *greatest);
    }
    std::printf("Every cell is right.\n");
}
