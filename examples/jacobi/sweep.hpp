// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
#define MPGPU_EXAMPLES_JACOBI_SWEEP_HPP

#include <mpgpu/mpgpu.hpp>

/// One Jacobi sweep over the rows of one device. All pointers are to memory of that device.
struct sweep {
    /// Values before; `rows + 2` rows of `nx`, the first and the last being halo rows.
    const float *a;
    /// Values after, of the same shape. Halo rows and the first and last column are left alone.
    float *a_new;
    /// For each of `rows` rows, the sum of squares of what changed; null: not wanted.
    double *row_norm;
    int nx;
    int rows;
};

/// Enqueues the sweep in a stream of its device. The only part of this example that knows what kind of device that is:
/// sweep_host.cpp runs it on a CPU thread for the virtual devices of the host backend.
void launch(const mpgpu::stream &stream, const sweep &work);

#endif // MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
