// SPDX-License-Identifier: MIT OR Apache-2.0
#include "sweep.hpp"

#include <array>
#include <cstddef>

namespace {

/// The new value of a point does not depend on how the rows are divided among devices: the same operands are added in
/// the same order everywhere. So the result of N devices equals the result of one, bit by bit.
void sweep_row(const float *above, const float *here, const float *below, float *out, std::size_t nx) {
    for (std::size_t x = 1; x + 1 < nx; ++x) {
        out[x] = 0.25F * ((here[x + 1] + here[x - 1]) + (below[x] + above[x]));
    }
}

/// Eight partial sums, so that the loop has no chain of dependent additions; always the same eight, so that a row's sum
/// is the same on whichever device it lies.
double squared_change(const float *before, const float *after, std::size_t nx) {
    constexpr std::size_t lanes = 8;
    std::array<double, lanes> sums{};
    std::size_t x = 1;
    for (; x + lanes < nx; x += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const double change = double{after[x + lane]} - double{before[x + lane]};
            sums[lane] += change * change;
        }
    }
    for (; x + 1 < nx; ++x) {
        const double change = double{after[x]} - double{before[x]};
        sums[0] += change * change;
    }
    double sum = 0.0;
    for (const double part : sums) {
        sum += part;
    }
    return sum;
}

} // namespace

void launch(const mpgpu::stream &stream, const sweep &work) {
    stream.launch_host([work] {
        const auto nx = static_cast<std::size_t>(work.nx);
        const auto rows = static_cast<std::size_t>(work.rows);
        for (std::size_t row = 0; row < rows; ++row) {
            const float *above = work.a + row * nx;
            const float *here = above + nx;
            float *out = work.a_new + (row + 1) * nx;
            sweep_row(above, here, here + nx, out, nx);
            if (work.row_norm != nullptr) {
                work.row_norm[row] = squared_change(here, out, nx);
            }
        }
    });
}
