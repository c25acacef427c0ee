// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
#define MPGPU_EXAMPLES_JACOBI_SWEEP_HPP

#include "exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <memory>

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
    /// The index of the device.
    int device;
};

/// What this example does on devices without mpgpu: the only part that knows what kind of devices they are.
struct device_code {
    /// Enqueues a sweep in a stream of its device.
    void (*launch)(const mpgpu::stream &stream, const sweep &work);
    /// The halo exchange by plain copies and events (`-plain`).
    std::unique_ptr<exchange> (*plain_exchange)(const mpgpu::context &ctx, const halo_exchange &halos);
};

/// For the virtual devices of the host backend: CPU code. In sweep_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI_CUDA
/// For GPUs. In sweep_cuda.cu and exchange_cuda.cu.
extern const device_code on_gpus;
/// Whether memory of a device is a GPU's; that of a virtual device is the process's own.
bool is_on_gpu(const void *memory);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_SWEEP_HPP
