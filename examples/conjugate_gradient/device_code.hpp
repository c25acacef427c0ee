// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_DEVICE_CODE_HPP

#include <mpgpu/halo/index_lists.hpp> // only the type index_kernel; halo_indexed.hpp needs MPI
#include <mpgpu/mpgpu.hpp>

#include <cstdint>

/// Sparse matrix (CSR) in device memory.
struct matrix {
    const std::int32_t *starts;
    const std::int32_t *columns;
    const double *values;
};

/// Number of partial sums of a dot product. The host adds them in order. Their number is fixed, so that the result is
/// bitwise equal in every run.
constexpr int partial_sums = 256;

/// Device operations that this example implements itself, without mpgpu. Only this code depends on the kind of device
/// (GPU or virtual device). All work is enqueued in a stream of the device, and all pointers refer to memory that the
/// device can access.
struct device_code {
    /// Makes a device current on this thread.
    void (*select)(int device);
    /// Computes the rows `first` to `end - 1` of y = A x.
    void (*multiply)(const mpgpu::stream &stream, matrix a, std::int32_t first, std::int32_t end, const double *x,
                     double *y);
    /// Computes the `partial_sums` partial sums of the dot product of `x` and `y`.
    void (*dot)(const mpgpu::stream &stream, std::int32_t count, const double *x, const double *y, double *sums);
    /// Computes x = x + factor p and r = r - factor q.
    void (*step)(const mpgpu::stream &stream, std::int32_t count, double factor, const double *p, const double *q,
                 double *x, double *r);
    /// Computes p = r + factor p.
    void (*turn)(const mpgpu::stream &stream, std::int32_t count, double factor, const double *r, double *p);
    /// Copies `x[list[i]]` to `packed[i]` for the `count` entries of an index list.
    void (*pack)(const mpgpu::stream &stream, std::int32_t count, const std::int32_t *list, const double *x,
                 double *packed);
    /// Returns the kernel that `mpgpu::halo::indexed` uses for packing and unpacking.
    mpgpu::halo::index_kernel (*index_kernel)();
};

/// CPU code for the virtual devices of the host backend, in device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef CONJUGATE_GRADIENT_CUDA
/// Code for GPUs, in device_code_cuda.cu.
extern const device_code on_gpus;
#endif

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_DEVICE_CODE_HPP
