// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP

#include "domain.hpp"

#include <mpgpu/mpgpu.hpp>

/// Addresses of the cells of each face; null if there is no neighbour. A plain value that serves as a kernel argument.
struct packed_faces {
    double *at[faces];
};

/// Device operations that this example implements without mpgpu. This is the only part that depends on the kind of
/// device. All work is enqueued in a stream of the device, and all pointers refer to its memory.
struct device_code {
    /// Sets all elements to their values before the first iteration.
    void (*set)(const mpgpu::stream &stream, int device, const block &b, double *values);
    /// Copies the outermost cells of each face to the place from which they are sent.
    void (*pack)(const mpgpu::stream &stream, int device, const block &b, const double *values,
                 const packed_faces &out);
    /// Copies the cells received for each face into its ghost cells.
    void (*unpack)(const mpgpu::stream &stream, int device, const block &b, double *values, const packed_faces &in);
    /// Computes the new values of all cells from the old ones, for one iteration.
    void (*sweep)(const mpgpu::stream &stream, int device, const block &b, const double *before, double *after);
};

/// CPU code for the virtual devices of the host backend, in device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI3D_CUDA
/// Code for GPUs, in device_code_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. Memory of a virtual device is memory of the process.
bool is_on_gpu(const void *memory);
#endif

/// Returns the code for the devices of the context to which `memory` belongs.
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
