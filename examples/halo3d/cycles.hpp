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

/// Returns the grids that the command line requests, in order. If -divide is missing, the mesh is divided among the
/// `ranks` ranks along z.
std::vector<mpgpu::halo::grid> grids_of(const options &opt, int ranks);

/// Creates a context. It uses this machine's GPUs if the example was built for GPUs, otherwise virtual devices.
mpgpu::context open_machine(const options &opt);

/// Part of the mesh that one rank computes, with its variables.
struct part {
    part(const mpgpu::context &ctx, const mpgpu::halo::grid &g, int rank, int device, int vars,
         space in = space::device);

    int rank;
    mpgpu::device where;
    space in;
    const device_code *code = nullptr;
    const device_code *cells_by = nullptr; ///< device operations that set and compare the cells
    mesh cells;
    std::vector<std::shared_ptr<double>> vars;
    /// Index of the first wrong element of each variable, in device memory and then in host memory.
    mpgpu::buffer<unsigned long long> wrong;
    mpgpu::buffer<unsigned long long> wrong_on_host;
    mpgpu::plan reset; ///< resets the indices of wrong elements
    mpgpu::plan fetch; ///< copies the indices of wrong elements to host memory

    [[nodiscard]] mpgpu::halo::rank_arrays arrays() const;
};

/// Exchange method, with the parts of all ranks of this process.
struct contender {
    exchange *by;
    std::vector<part> *parts;
};

/// Measured times in seconds: each phase of each cycle, and the mean time of exchanges that are enqueued back to back
/// without waits of the host. Of that mean time, `enqueue` is the part in which the host enqueues.
struct timings {
    static constexpr std::array<const char *, 6> names = {"pre-comm", "start", "finish", "wait", "comm", "post-comm"};
    static constexpr std::size_t comm = 4;
    std::array<std::vector<double>, names.size()> seconds;
    double in_a_row = 0.0;
    double enqueue = 0.0;
};

/// Runs all cycles, alternating between the exchange methods. A cycle sets the computed cells, exchanges, and compares
/// every cell with the expected value. Then runs -cycles exchanges back to back with each method. `align` is a barrier
/// over all ranks. Throws `std::runtime_error` with the first wrong cell.
std::vector<timings> run_cycles(const options &opt, const mpgpu::context &ctx,
                                const std::vector<mpgpu::stream> &streams, const std::vector<contender> &contenders,
                                const std::function<void()> &align);

/// Prints the problem in the terms of LLNL's Comb.
void print_problem(const options &opt, const mpgpu::halo::grid &g, const part &first, int devices);

/// Prints the number of cycles, and the average, minimum, maximum and median time of each phase.
void print_phases(const std::string &name, const timings &measured);

/// Prints how each message of the exchange is sent, and the plan of the transfers.
void print_plan(const mpgpu::halo::plan &plan);

/// Returns the median of some values.
double median(std::vector<double> values);

#endif // MPGPU_EXAMPLES_HALO3D_CYCLES_HPP
