// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_SOLVER_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_SOLVER_HPP

#include "device_code.hpp"
#include "part.hpp"

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

/// Equations and vectors of one rank in memory of its device.
struct equations {
    equations(const mpgpu::context &ctx, mpgpu::device where, const part &own)
        : context(ctx), stream(ctx, where), starts(ctx, where, own.starts.size()),
          columns(ctx, where, own.columns.size()), values(ctx, where, own.values.size()),
          x(ctx, where, own.right_side.size()), r(ctx, where, x.size()), q(ctx, where, x.size()),
          p(ctx, where, own.size()), sums(ctx, mpgpu::device::host(), partial_sums) {
        load(starts, own.starts);
        load(columns, own.columns);
        load(values, own.values);
    }

    /// Copies a container from host memory to device memory. Blocks.
    template <class Elements, class Container> void load(Elements &&to, const Container &from) {
        mpgpu::plan(context, {mpgpu::make_transfer(to, mpgpu::span_of(from, mpgpu::device::host()))})
            .execute(stream)
            .synchronize();
    }
    [[nodiscard]] matrix rows() const { return {starts.data(), columns.data(), values.data()}; }

    const mpgpu::context &context;
    mpgpu::stream stream;
    mpgpu::buffer<std::int32_t> starts;
    mpgpu::buffer<std::int32_t> columns;
    mpgpu::buffer<double> values;
    mpgpu::buffer<double> x;    ///< solution
    mpgpu::buffer<double> r;    ///< residual
    mpgpu::buffer<double> q;    ///< product of the matrix and `p`
    mpgpu::buffer<double> p;    ///< search direction, with ghost entries
    mpgpu::buffer<double> sums; ///< partial sums of a dot product, in host memory
};

/// Result of a solver.
struct solution {
    std::vector<double> residuals; ///< norm of the residual before the first iteration, and after each iteration
    double seconds = 0.0;          ///< duration of all iterations on the slowest rank
};

/// Returns the dot product of two vectors over all ranks. All sums are added in a fixed order. The result is therefore
/// bitwise equal on all ranks and in every run with this number of ranks, unlike that of MPI_Allreduce.
inline double dot(const device_code &code, equations &own, const mpgpu::buffer<double> &a,
                  const mpgpu::buffer<double> &b, MPI_Comm all) {
    code.dot(own.stream, static_cast<std::int32_t>(own.x.size()), a.data(), b.data(), own.sums.data());
    own.stream.synchronize();
    const double sum = std::accumulate(own.sums.data(), own.sums.data() + own.sums.size(), 0.0);
    int ranks = 0;
    MPI_Comm_size(all, &ranks);
    std::vector<double> of_ranks(static_cast<std::size_t>(ranks));
    MPI_Allgather(&sum, 1, MPI_DOUBLE, of_ranks.data(), 1, MPI_DOUBLE, all);
    return std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
}

/// Solves the equations of all ranks by the method of conjugate gradients. Stops after `most` iterations, or when
/// the norm of the residual is at most `tolerance` times the norm of the right-hand side. `Exchange` is `by_lists` or
/// `by_mpi`.
template <class Exchange>
solution solve(const device_code &code, equations &own, const part &from, Exchange &exchange, MPI_Comm all, int most,
               double tolerance) {
    const auto count = static_cast<std::int32_t>(own.x.size());
    own.load(own.x, std::vector<double>(own.x.size()));
    own.load(own.r, from.right_side);
    own.load(own.p.subspan(0, own.x.size()), from.right_side);
    MPI_Barrier(all);

    const auto begin = std::chrono::steady_clock::now();
    double square = dot(code, own, own.r, own.r, all);
    solution result{{std::sqrt(square)}};
    for (int i = 0; i < most && result.residuals.back() > tolerance * result.residuals.front(); ++i) {
        exchange.start(own.stream, own.p);
        code.multiply(own.stream, own.rows(), 0, from.interior, own.p.data(), own.q.data());
        exchange.finish(own.stream);
        code.multiply(own.stream, own.rows(), from.interior, from.owned, own.p.data(), own.q.data());
        const double length = square / dot(code, own, own.p, own.q, all);
        code.step(own.stream, count, length, own.p.data(), own.q.data(), own.x.data(), own.r.data());
        const double before = square;
        square = dot(code, own, own.r, own.r, all);
        code.turn(own.stream, count, square / before, own.r.data(), own.p.data());
        result.residuals.push_back(std::sqrt(square));
    }
    own.stream.synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    MPI_Allreduce(&elapsed, &result.seconds, 1, MPI_DOUBLE, MPI_MAX, all);
    return result;
}

/// Computes the solution of all equations by one CPU thread, without mpgpu, for comparison.
std::vector<double> solve_serially(const part &whole, int most, double tolerance);

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_SOLVER_HPP
