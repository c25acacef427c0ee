// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
#define MPGPU_EXAMPLES_JACOBI_SWEEP_HPP

#include "exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <memory>

/// One Jacobi sweep over the rows of one device. All pointers refer to memory of that device.
struct sweep {
    /// Old values: `rows + 2` rows of `nx`, of which the first and the last are halo rows.
    const float *a;
    /// New values, of the same shape. Halo rows and the first and last column are not written.
    float *a_new;
    /// For each of the `rows` rows, the sum of the squared changes; null if it is not needed.
    double *row_norm;
    int nx;
    int rows;
    /// Index of the device.
    int device;
};

/// Device operations that this example implements without mpgpu. This is the only part that depends on the kind of
/// device.
struct device_code {
    /// Enqueues a sweep in a stream of its device.
    void (*launch)(const mpgpu::stream &stream, const sweep &work);
    /// Creates the halo exchange by plain copies and events (`-plain`).
    std::unique_ptr<exchange> (*plain_exchange)(const mpgpu::context &ctx, const halo_exchange &halos);
};

/// CPU code for the virtual devices of the host backend, in sweep_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI_CUDA
/// Code for GPUs, in sweep_cuda.cu and exchange_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. Memory of a virtual device is memory of the process.
bool is_on_gpu(const void *memory);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
