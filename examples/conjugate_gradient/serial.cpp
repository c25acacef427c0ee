// SPDX-License-Identifier: MIT OR Apache-2.0
#include "solver.hpp"

std::vector<double> solve_serially(const part &whole, int most, double tolerance) {
    const std::size_t count = whole.right_side.size();
    const auto product = [](const std::vector<double> &a, const std::vector<double> &b) {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    std::vector<double> x(count);
    std::vector<double> q(count);
    std::vector<double> r = whole.right_side;
    std::vector<double> p = r;
    double square = product(r, r);
    const double least = tolerance * tolerance * square;
    for (int iteration = 0; iteration < most && square > least; ++iteration) {
        for (std::size_t row = 0; row < count; ++row) {
            q[row] = 0.0;
            for (auto i = static_cast<std::size_t>(whole.starts[row]);
                 i < static_cast<std::size_t>(whole.starts[row + 1]); ++i) {
                q[row] += whole.values[i] * p[static_cast<std::size_t>(whole.columns[i])];
            }
        }
        const double length = square / product(p, q);
        const double before = square;
        for (std::size_t i = 0; i < count; ++i) {
            x[i] += length * p[i];
            r[i] -= length * q[i];
        }
        square = product(r, r);
        for (std::size_t i = 0; i < count; ++i) {
            p[i] = r[i] + square / before * p[i];
        }
    }
    return x;
}
