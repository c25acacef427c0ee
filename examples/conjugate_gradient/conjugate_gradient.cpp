// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Conjugate gradients on an unstructured mesh with one process for each device. The equations are those of linear
// finite elements on tetrahedra. Each rank owns a part of the vertices, and needs the values of its neighbours'
// vertices (ghost entries) to multiply its rows of the sparse matrix with a vector:
//
//     exchange.start(p)              begins to send the entries of p to the neighbours
//     q = A p in interior rows       runs meanwhile; these rows need no ghost entries
//     exchange.finish                waits until the ghost entries of p have arrived
//     q = A p in all other rows
//
// by_lists.hpp exchanges the entries by index lists of mpgpu, and by_mpi.hpp by MPI. solver.hpp contains the
// iterations.
#include "../gpu_aware.hpp"
#include "by_lists.hpp"
#include "by_mpi.hpp"
#include "mesh.hpp"
#include "options.hpp"
#include "part.hpp"
#include "solver.hpp"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int measured_exchanges = 200;
constexpr double largest_difference = 1e-6; // from the serial solution, relative to its largest value

/// Result of one form of exchange.
struct outcome {
    const char *form;
    solution found;
    double exchange_seconds; ///< mean duration of consecutive exchanges on the slowest rank
    std::vector<double> x;   ///< solution at the vertices of this rank
};

/// Equations and options of a run, and the objects that solve them.
struct problem {
    const mpgpu::context &ctx;
    const mpgpu::mpi::node &node;
    const device_code &code;
    const part &own;
    equations &vectors;
    const options &opt;
    int rank;
    int ranks;
};

template <class Exchange> double measure_exchange(const problem &p, Exchange &exchange) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < measured_exchanges; ++i) {
        exchange.start(p.vectors.stream, p.vectors.p);
        exchange.finish(p.vectors.stream);
    }
    p.vectors.stream.synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    double slowest = 0.0;
    MPI_Allreduce(&elapsed, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest / measured_exchanges;
}

/// Solves the problem with one form of exchange.
template <class Exchange> outcome run_form(const char *name, const problem &p) {
    Exchange exchange(p.ctx, p.node, p.own, p.code);
    const double tolerance = std::pow(10.0, -p.opt.digits);
    const auto solve_in = [&](int iterations) {
        return solve(p.code, p.vectors, p.own, exchange, MPI_COMM_WORLD, iterations, tolerance);
    };
    solve_in(2); // the first kernels and messages create resources
    outcome result{name, solve_in(p.opt.iterations), 0.0, std::vector<double>(p.vectors.x.size())};
    mpgpu::plan(p.ctx, {mpgpu::make_transfer(mpgpu::span_of(result.x, mpgpu::device::host()), p.vectors.x)})
        .execute(p.vectors.stream)
        .synchronize();
    result.exchange_seconds = measure_exchange(p, exchange);
    exchange.destroy();
    return result;
}

/// Returns true if all residuals of both forms are bitwise equal. The result is the same on all ranks, because they
/// have the same residuals. If `print` is true, prints the first difference.
bool same_residuals(const outcome &a, const outcome &b, bool print) {
    const std::vector<double> &x = a.found.residuals;
    const std::vector<double> &y = b.found.residuals;
    const auto differ = std::mismatch(x.begin(), x.end(), y.begin(), y.end());
    if (differ.first == x.end() && differ.second == y.end()) {
        return true;
    }
    if (!print) {
        return false;
    }
    const auto iteration = differ.first - x.begin();
    std::fprintf(stderr, "ERROR: iteration %td: the residuals of %s and %s differ: %.17g and %.17g\n", iteration,
                 a.form, b.form, differ.first == x.end() ? 0.0 : *differ.first,
                 differ.second == y.end() ? 0.0 : *differ.second);
    return false;
}

/// Returns the largest difference between the solution of all ranks and the serial solution, relative to the largest
/// value of the serial solution.
double difference_from(const std::vector<double> &serial, const outcome &result, const problem &p) {
    double difference = 0.0;
    for (std::size_t i = 0; i < result.x.size(); ++i) {
        const double at_vertex = serial[static_cast<std::size_t>(p.own.vertices[i])];
        difference = std::max(difference, std::abs(result.x[i] - at_vertex));
    }
    MPI_Allreduce(MPI_IN_PLACE, &difference, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return difference / *std::max_element(serial.begin(), serial.end());
}

/// Computes the solution serially on rank 0, and returns its values at all unknowns on all ranks.
std::vector<double> serial_solution(const mesh &m, const problem &p) {
    std::vector<double> x(static_cast<std::size_t>(m.unknowns));
    if (p.rank == 0) {
        const part whole = make_part(m, std::vector<int>(x.size()), 0);
        x = solve_serially(whole, p.opt.iterations, std::pow(10.0, -p.opt.digits));
    }
    MPI_Bcast(x.data(), m.unknowns, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return x;
}

/// Prints the sizes of the mesh and of its parts.
void print_mesh(const mesh &m, const problem &p) {
    std::vector<long> counts = {static_cast<long>(p.own.neighbours.size()), 0, p.own.owned - p.own.interior};
    for (const neighbour &n : p.own.neighbours) {
        counts[1] += n.ghosts;
    }
    MPI_Allreduce(MPI_IN_PLACE, counts.data(), static_cast<int>(counts.size()), MPI_LONG, MPI_MAX, MPI_COMM_WORLD);
    if (p.rank == 0) {
        std::printf(
            "%d unknowns, %zu tetrahedra, %d ranks; of the ranks at most: %ld neighbours, %ld ghost entries, %ld "
            "rows that need them\n",
            m.unknowns, m.elements.size(), p.ranks, counts[0], counts[1], counts[2]);
    }
}

/// Prints the results and checks them if `-check` is set. Returns the exit code, which is 1 if results are wrong.
int report(const std::vector<outcome> &results, const mesh &m, const problem &p) {
    const bool print = p.rank == 0;
    if (print) {
        std::printf("%-6s %10s %12s %17s %16s\n", "form", "iterations", "residual", "us per iteration",
                    "us per exchange");
        for (const outcome &o : results) {
            const std::vector<double> &residuals = o.found.residuals;
            const std::size_t iterations = residuals.size() - 1;
            std::printf("%-6s %10zu %12.3e %17.2f %16.2f\n", o.form, iterations, residuals.back() / residuals.front(),
                        o.found.seconds * 1e6 / static_cast<double>(std::max<std::size_t>(iterations, 1)),
                        o.exchange_seconds * 1e6);
        }
    }
    if (!p.opt.check) {
        return 0;
    }
    const std::vector<double> serial = serial_solution(m, p);
    bool is_right = true;
    for (const outcome &o : results) {
        const double difference = difference_from(serial, o, p);
        if (print) {
            std::printf("%s: largest difference from the serial solution: %.2e of its largest value\n", o.form,
                        difference);
        }
        is_right = is_right && difference <= largest_difference;
    }
    if (!is_right && print) {
        std::fprintf(stderr, "ERROR: the largest difference must be at most %.0e\n", largest_difference);
    }
    if (results.size() == 2) {
        const bool same = same_residuals(results[0], results[1], print);
        is_right = is_right && same;
        if (print && same) {
            std::printf("all residuals of %s and %s are bitwise equal\n", results[0].form, results[1].form);
        }
    }
    return is_right ? 0 : 1;
}

/// Returns the device operations for the backend of a context.
const device_code &code_for([[maybe_unused]] const mpgpu::context &ctx) {
#ifdef CONJUGATE_GRADIENT_CUDA
    if (ctx.backend() == mpgpu::backend::cuda) {
        return on_gpus;
    }
#endif
    return on_virtual_devices;
}

int run(const options &opt, int rank, int ranks) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
#ifndef CONJUGATE_GRADIENT_CUDA
    // This build contains only CPU code, which can access only memory of virtual devices.
    machine.backend = mpgpu::backend::host;
#endif
    const mpgpu::context ctx(machine);
    const device_code &code = code_for(ctx);
    const mpgpu::device gpu = mpgpu::device::gpu(rank % ctx.devices().gpus);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    code.select(gpu.id());

    const mesh m = make_mesh(opt.cells);
    if (m.unknowns < ranks) {
        throw std::invalid_argument("-cells " + std::to_string(opt.cells) + ": " + std::to_string(m.unknowns) +
                                    " unknowns for " + std::to_string(ranks) +
                                    " ranks; use more cells, so that each rank has an unknown");
    }
    const part own = make_part(m, divide(m, ranks), rank);
    equations vectors(ctx, gpu, own);
    const problem p{ctx, node, code, own, vectors, opt, rank, ranks};
    print_mesh(m, p);

    std::vector<outcome> results;
    if (opt.lists) {
        results.push_back(run_form<by_lists>("lists", p));
    }
    const bool is_on_gpu = ctx.backend() == mpgpu::backend::cuda;
    const auto reason = opt.mpi && is_on_gpu && !opt.gpu_aware ? why_not_gpu_aware() : std::nullopt;
    if (reason && !opt.lists) {
        throw std::runtime_error("-by mpi: " + *reason + "; -gpu-aware measures it anyway");
    }
    if (reason && rank == 0) {
        std::fprintf(stderr, "conjugate_gradient: MPI left out: %s; -gpu-aware measures it anyway\n", reason->c_str());
    }
    if (opt.mpi && !reason) {
        results.push_back(run_form<by_mpi>("MPI", p));
    }
    return report(results, m, p);
}

} // namespace

int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int code = 0;
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(rank == 0 ? usage : "", stdout);
        } else {
            code = run(opt, rank, ranks);
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "conjugate_gradient: rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Finalize();
    return code;
}
