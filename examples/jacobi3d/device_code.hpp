// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP

#include "domain.hpp"

#include <mpgpu/mpgpu.hpp>

/// Address of the packed cells of each face; null for a face without a neighbour. It is a plain struct, because kernels
/// get it as an argument.
struct packed_faces {
    double *at[faces];
};

/// Device operations that this example implements itself, without mpgpu. Only this code depends on the kind of device
/// (GPU or virtual device). All work is enqueued in a stream of the device, and all pointers refer to memory of that
/// device.
struct device_code {
    /// Sets all elements of a block to their initial values.
    void (*set)(const mpgpu::stream &stream, int device, const block &b, double *values);
    /// Copies the outermost cells of each face to `out`, from which they are sent.
    void (*pack)(const mpgpu::stream &stream, int device, const block &b, const double *values,
                 const packed_faces &out);
    /// Copies the received cells of each face from `in` into the ghost cells of that face.
    void (*unpack)(const mpgpu::stream &stream, int device, const block &b, double *values, const packed_faces &in);
    /// Computes one iteration: the new values of all cells from the old values.
    void (*sweep)(const mpgpu::stream &stream, int device, const block &b, const double *before, double *after);
};

/// CPU code for the virtual devices of the host backend, in device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI3D_CUDA
/// Code for GPUs, in device_code_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. False if it belongs to a virtual device, which uses memory of the
/// process.
bool is_on_gpu(const void *memory);
#endif

/// Returns the device operations for the kind of device to which `memory` belongs.
inline const device_code &code_for(const void *memory) {
#ifdef JACOBI3D_CUDA
    if (is_on_gpu(memory)) {
        return on_gpus;
    }
#endif
    static_cast<void>(memory);
    return on_virtual_devices;
}

#endif // MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP
