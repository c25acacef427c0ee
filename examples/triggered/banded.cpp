// SPDX-License-Identifier: MIT OR Apache-2.0
// Jacobi's method for a system of linear equations whose matrix is a band around the diagonal, as in PROACT's paper.
// The rows of the matrix are divided among the GPUs, and each GPU has the whole vector of unknowns.
#include "replicated.hpp"

#include <cmath>
#include <cstdio>

namespace {

/// System of equations. The off-diagonal coefficients are stored row by row, with zeros for positions outside the
/// matrix.
struct equations {
    std::size_t rows;
    std::size_t width; ///< number of coefficients per row
    std::vector<float> beside;
    std::vector<float> right;   ///< right-hand side of each equation
    std::vector<float> inverse; ///< reciprocal of the diagonal element of each row
};

float small(std::size_t row, std::size_t at) { // returns a value in (-1, 1)
    const auto mixed = edge_length(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(at));
    return (static_cast<float>(mixed) - 32.5F) / 64.0F;
}

/// Generates a system with a dominant diagonal, so that Jacobi's method converges.
equations generated(std::size_t rows, std::size_t half) {
    equations made{rows, 2 * half + 1, std::vector<float>(rows * (2 * half + 1)), std::vector<float>(rows),
                   std::vector<float>(rows, 1.0F / static_cast<float>(2 * half + 1))};
    in_parallel(rows, [&](std::size_t first, std::size_t end) {
        for (std::size_t row = first; row < end; ++row) {
            for (std::size_t at = 0; at < made.width; ++at) {
                const std::size_t column = row + at; // offset by `half`
                const bool is_inside = column >= half && column < rows + half && at != half;
                made.beside[row * made.width + at] = is_inside ? small(row, at) : 0.0F;
            }
            made.right[row] = small(row, rows);
        }
    });
    return made;
}

/// Solves the system on the CPU. Sums are added in the same order as in the kernels: first by lanes of a warp, then in
/// pairs.
std::vector<float> solved(const equations &of, int steps) {
    const std::size_t half = of.width / 2;
    std::vector<float> x(of.rows, 0.0F);
    std::vector<float> x_new = x;
    for (int step = 0; step < steps; ++step) {
        in_parallel(of.rows, [&](std::size_t first, std::size_t end) {
            for (std::size_t row = first; row < end; ++row) {
                std::array<float, lanes> sums{};
                for (std::size_t at = 0; at < of.width; ++at) {
                    const std::size_t column = row + at;
                    if (column >= half && column < of.rows + half) {
                        float &sum = sums.at(at % lanes);
                        sum = std::fma(of.beside[row * of.width + at], x[column - half], sum);
                    }
                }
                for (std::size_t apart = lanes / 2; apart > 0; apart /= 2) {
                    for (std::size_t lane = 0; lane < apart; ++lane) {
                        sums.at(lane) += sums.at(lane + apart);
                    }
                }
                x_new[row] = (of.right[row] - sums[0]) * of.inverse[row];
            }
        });
        x.swap(x_new);
    }
    return x;
}

struct band_data {
    mpgpu::buffer<float> beside;
    mpgpu::buffer<float> right;
    mpgpu::buffer<float> inverse;
};

} // namespace

int banded(const machine &m, const options &opt) {
    const std::size_t count = opt.rows > 0 ? opt.rows : m.is_virtual() ? 4096 : std::size_t{1} << 23;
    if (count < static_cast<std::size_t>(m.gpus)) {
        throw std::invalid_argument("-rows " + std::to_string(count) + ": must be " + std::to_string(m.gpus) +
                                    " or more for as many GPUs");
    }
    const equations of = generated(count, opt.band);
    problem<float> task;
    task.steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 6 : 20;
    task.first.assign(count, 0.0F);
    task.after[0] = solved(of, task.steps);
    task.prepare = [&](const std::vector<share> &shares) {
        auto data = std::make_shared<std::vector<band_data>>();
        for (const share &rows : shares) {
            const mpgpu::device where = mpgpu::device::gpu(static_cast<int>(data->size()));
            data->push_back({on_gpu(m, where, of.beside.data() + rows.first * of.width, rows.count * of.width),
                             on_gpu(m, where, of.right.data() + rows.first, rows.count),
                             on_gpu(m, where, of.inverse.data() + rows.first, rows.count)});
        }
        on_devices<float> work;
        work.launch = [&m, &of, data, shares](const mpgpu::stream &stream, int gpu, const float *x, float *x_new, int,
                                              const outputs &out) {
            band_data &here = (*data)[static_cast<std::size_t>(gpu)];
            const share rows = shares[static_cast<std::size_t>(gpu)];
            m.code.relax(stream, gpu,
                         {x, x_new, here.beside.data(), here.right.data(), here.inverse.data(), rows.first, rows.count,
                          of.rows, of.width},
                         out);
        };
        return work;
    };
    std::printf("\nbanded, %zu equations, %zu coefficients each, over %d GPUs, %d consecutive steps, results of each "
                "GPU go to %s; bitwise equal to the results of a CPU\n",
                of.rows, of.width, m.gpus, task.steps,
                m.gpus > 1 ? "all others" : "host memory, because there is only one GPU");
    return compare_all(m, task, opt);
}
