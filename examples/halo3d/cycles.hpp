// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
#define MPGPU_EXAMPLES_HALO3D_CYCLES_HPP

#include "options.hpp"

#include <mpgpu/halo.hpp>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

/// The grid that a command line asks for; without -divide, `ranks` in z.
mpgpu::halo::grid grid_of(const options &opt, int ranks);

/// A context on virtual devices: the cells are set and checked by CPU code, which they alone allow.
mpgpu::context open_machine(const options &opt);

/// One rank's part of the mesh.
struct part {
    part(const mpgpu::context &ctx, const mpgpu::halo::grid &g, int rank, int vars);

    int rank;
    mpgpu::device where; ///< GPU `rank` modulo the number of GPUs
    std::vector<mpgpu::buffer<double>> vars;

    [[nodiscard]] mpgpu::halo::rank_arrays arrays();
};

/// Seconds of each cycle in each phase.
struct timings {
    static constexpr std::array<const char *, 6> names = {"pre-comm", "start", "finish", "wait", "comm", "post-comm"};
    std::array<std::vector<double>, names.size()> seconds;
};

/// Runs all cycles: sets the computed cells of `parts`, exchanges, and compares every cell with what it must be. Throws
/// `std::runtime_error` that names the first cell that is wrong.
timings run_cycles(const options &opt, const mpgpu::halo::grid &g, const mpgpu::stream &stream, mpgpu::halo::plan &halo,
                   std::vector<part> &parts);

/// Prints the problem, in Comb's words.
void print_problem(const options &opt, const mpgpu::halo::grid &g, int devices);

/// Prints what the exchange moves, and number, average, least and greatest time of each phase.
void print_results(const timings &measured, double direct_bytes, double packed_bytes);

#endif // MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
