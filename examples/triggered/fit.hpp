// SPDX-License-Identifier: MIT OR Apache-2.0
// Least-squares fit of one vertex. CPU and GPU do the same operations in the same order, so that results are bitwise
// equal.
#ifndef MPGPU_EXAMPLES_TRIGGERED_FIT_HPP
#define MPGPU_EXAMPLES_TRIGGERED_FIT_HPP

#include "work.hpp"

#include <cmath>

#ifdef __CUDA_ARCH__
#define TRIGGERED_UNROLLED _Pragma("unroll")
#else
#define TRIGGERED_UNROLLED
#endif

/// Returns a * b + c as an explicit fused multiply-add, so that all compilers round only once.
TRIGGERED_BOTH float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}

TRIGGERED_BOTH float divided(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

/// Normal equations for the factors of one vertex, from the factors of its neighbours and the ratings.
class normal_equations {
  public:
    TRIGGERED_BOTH normal_equations() {
        TRIGGERED_UNROLLED
        for (unsigned i = 0; i < factor_size; ++i) {
            a_[i][i] = 0.5F; // regularized
        }
    }

    TRIGGERED_BOTH void add(const latent &with, float rating) {
        TRIGGERED_UNROLLED
        for (unsigned i = 0; i < factor_size; ++i) {
            b_[i] = fused(rating, with.v[i], b_[i]);
            TRIGGERED_UNROLLED
            for (unsigned j = 0; j <= i; ++j) {
                a_[i][j] = fused(with.v[i], with.v[j], a_[i][j]);
            }
        }
    }

    /// Solves the equations by the Cholesky method without square roots, and returns the factors.
    TRIGGERED_BOTH latent solved() {
        TRIGGERED_UNROLLED
        for (unsigned j = 0; j < factor_size; ++j) {
            TRIGGERED_UNROLLED
            for (unsigned k = 0; k < j; ++k) {
                const float scaled = a_[j][k] * a_[k][k];
                TRIGGERED_UNROLLED
                for (unsigned i = j; i < factor_size; ++i) {
                    a_[i][j] = fused(-a_[i][k], scaled, a_[i][j]);
                }
            }
            TRIGGERED_UNROLLED
            for (unsigned i = j + 1; i < factor_size; ++i) {
                a_[i][j] = divided(a_[i][j], a_[j][j]);
            }
        }
        TRIGGERED_UNROLLED
        for (unsigned i = 0; i < factor_size; ++i) {
            TRIGGERED_UNROLLED
            for (unsigned k = 0; k < i; ++k) {
                b_[i] = fused(-a_[i][k], b_[k], b_[i]);
            }
        }
        latent x{};
        TRIGGERED_UNROLLED
        for (unsigned back = 0; back < factor_size; ++back) {
            const unsigned i = factor_size - 1 - back;
            x.v[i] = divided(b_[i], a_[i][i]);
            TRIGGERED_UNROLLED
            for (unsigned k = i + 1; k < factor_size; ++k) {
                x.v[i] = fused(-a_[k][i], x.v[k], x.v[i]);
            }
        }
        return x;
    }

  private:
    float a_[factor_size][factor_size]{}; ///< matrix; only the diagonal and the elements below are used
    float b_[factor_size]{};
};

#endif // MPGPU_EXAMPLES_TRIGGERED_FIT_HPP
