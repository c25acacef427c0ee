// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
#define MPGPU_EXAMPLES_JACOBI_SWEEP_HPP

#include "exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <memory>

/// Arguments of one Jacobi sweep over the rows of one device. All pointers refer to memory of that device.
struct sweep {
    /// Old values: `rows + 2` rows of `nx`, of which the first and the last are halo rows.
    const float *a;
    /// New values, in the same layout as `a`. Halo rows and the first and last column are not written.
    float *a_new;
    /// Sum of the squared changes of each of the `rows` rows; null if the sums are not needed.
    double *row_norm;
    int nx;
    int rows;
    /// Index of the device.
    int device;
};

/// Device operations that this example implements itself, without mpgpu. Only this code depends on the kind of device
/// (GPU or virtual device).
struct device_code {
    /// Enqueues a sweep in a stream of the device whose rows it computes.
    void (*launch)(const mpgpu::stream &stream, const sweep &work);
    /// Creates the halo exchange by plain copies and events, for `-plain`.
    std::unique_ptr<exchange> (*plain_exchange)(const mpgpu::context &ctx, const halo_exchange &halos);
};

/// CPU code for the virtual devices of the host backend, in sweep_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI_CUDA
/// Code for GPUs, in sweep_cuda.cu and exchange_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. False if it belongs to a virtual device, which uses memory of the
/// process.
bool is_on_gpu(const void *memory);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
