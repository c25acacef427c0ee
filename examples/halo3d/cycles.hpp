// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
#define MPGPU_EXAMPLES_HALO3D_CYCLES_HPP

#include "device_code.hpp"
#include "exchange.hpp"
#include "options.hpp"
#include "spaces.hpp"

#include <mpgpu/halo.hpp>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// The grids that a command line asks for, one after the other; without -divide, `ranks` in z.
std::vector<mpgpu::halo::grid> grids_of(const options &opt, int ranks);

/// A context on this machine's GPUs where the example has code for them, else on virtual devices.
mpgpu::context open_machine(const options &opt);

/// One rank's part of the mesh.
struct part {
    part(const mpgpu::context &ctx, const mpgpu::halo::grid &g, int rank, int device, int vars,
         space in = space::device);

    int rank;
    mpgpu::device where;
    space in;
    const device_code *code = nullptr;
    const device_code *cells_by = nullptr; ///< sets and compares cells
    mesh cells;
    std::vector<std::shared_ptr<double>> vars;
    /// For each variable, the first element that is wrong: on the device, and in host memory.
    mpgpu::buffer<unsigned long long> wrong;
    mpgpu::buffer<unsigned long long> wrong_on_host;
    mpgpu::plan reset; ///< no element is wrong
    mpgpu::plan fetch; ///< which ones are

    [[nodiscard]] mpgpu::halo::rank_arrays arrays() const;
};

/// An exchange, and the cells that it exchanges: those of all ranks of this process.
struct contender {
    exchange *by;
    std::vector<part> *parts;
};

/// Seconds of each cycle in each phase, and of one exchange among many that no host waits for: in all, and what the
/// host takes to enqueue it.
struct timings {
    static constexpr std::array<const char *, 6> names = {"pre-comm", "start", "finish", "wait", "comm", "post-comm"};
    static constexpr std::size_t comm = 4;
    std::array<std::vector<double>, names.size()> seconds;
    double in_a_row = 0.0;
    double enqueue = 0.0;
};

/// Runs all cycles with each of the exchanges by turns: sets its computed cells, exchanges, and compares every cell
/// with what it must be. Then -cycles exchanges with each, in a row. `align` returns when all ranks have called it.
/// Throws `std::runtime_error` that names the first cell that is wrong.
std::vector<timings> run_cycles(const options &opt, const mpgpu::context &ctx,
                                const std::vector<mpgpu::stream> &streams, const std::vector<contender> &contenders,
                                const std::function<void()> &align);

/// Prints the problem, in Comb's words.
void print_problem(const options &opt, const mpgpu::halo::grid &g, const part &first, int devices);

/// Prints number, average, least and greatest time of each phase, and the median.
void print_phases(const std::string &name, const timings &measured);

/// Prints what goes in which form, and what came of its transfers.
void print_plan(const mpgpu::halo::plan &plan);

/// The middle one.
double median(std::vector<double> values);

#endif // MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
