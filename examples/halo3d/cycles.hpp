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

/// Returns the grids requested on the command line, in order. Without -divide, `ranks` are arranged in z.
std::vector<mpgpu::halo::grid> grids_of(const options &opt, int ranks);

/// Creates a context on this machine's GPUs if the example was built for them, otherwise on virtual devices.
mpgpu::context open_machine(const options &opt);

/// One rank's part of the mesh.
struct part {
    part(const mpgpu::context &ctx, const mpgpu::halo::grid &g, int rank, int device, int vars,
         space in = space::device);

    int rank;
    mpgpu::device where;
    space in;
    const device_code *code = nullptr;
    const device_code *cells_by = nullptr; ///< code that sets and compares cells
    mesh cells;
    std::vector<std::shared_ptr<double>> vars;
    /// For each variable, the first wrong element: on the device, and in host memory.
    mpgpu::buffer<unsigned long long> wrong;
    mpgpu::buffer<unsigned long long> wrong_on_host;
    mpgpu::plan reset; ///< clears the numbers of wrong elements
    mpgpu::plan fetch; ///< copies the numbers of wrong elements to host memory

    [[nodiscard]] mpgpu::halo::rank_arrays arrays() const;
};

/// Exchange method with the cells that it exchanges, those of all ranks of this process.
struct contender {
    exchange *by;
    std::vector<part> *parts;
};

/// Seconds of each cycle by phase. Also the time of one exchange among many without waits of the host, in total and for
/// enqueueing.
struct timings {
    static constexpr std::array<const char *, 6> names = {"pre-comm", "start", "finish", "wait", "comm", "post-comm"};
    static constexpr std::size_t comm = 4;
    std::array<std::vector<double>, names.size()> seconds;
    double in_a_row = 0.0;
    double enqueue = 0.0;
};

/// Runs all cycles with the exchange methods in turns: sets the computed cells, exchanges, and compares every cell with
/// the expected value. Then runs -cycles exchanges with each method back to back. `align` returns when all ranks have
/// called it. Throws `std::runtime_error` that names the first wrong cell.
std::vector<timings> run_cycles(const options &opt, const mpgpu::context &ctx,
                                const std::vector<mpgpu::stream> &streams, const std::vector<contender> &contenders,
                                const std::function<void()> &align);

/// Prints the problem in Comb's terms.
void print_problem(const options &opt, const mpgpu::halo::grid &g, const part &first, int devices);

/// Prints the number, average, minimum and maximum time of each phase, and the median.
void print_phases(const std::string &name, const timings &measured);

/// Prints the form in which each piece is sent, and the plan of the transfers.
void print_plan(const mpgpu::halo::plan &plan);

/// Returns the median.
double median(std::vector<double> values);

#endif // MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
