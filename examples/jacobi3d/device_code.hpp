// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_JACOBI3D_DEVICE_CODE_HPP

#include "domain.hpp"

#include <mpgpu/mpgpu.hpp>

/// Where the cells of each face lie, one face after the other; null where there is no neighbour. A plain value.
struct packed_faces {
    double *at[faces];
};

/// What this example does on devices without mpgpu: the only part that knows what kind of devices they are. Everything
/// is enqueued in a stream of the device; all pointers are to its memory.
struct device_code {
    /// Sets all elements to what they are before the first iteration.
    void (*set)(const mpgpu::stream &stream, int device, const block &b, double *values);
    /// Copies the outermost cells of each face to where they are sent from.
    void (*pack)(const mpgpu::stream &stream, int device, const block &b, const double *values,
                 const packed_faces &out);
    /// Copies what has been received for each face into its ghost cells.
    void (*unpack)(const mpgpu::stream &stream, int device, const block &b, double *values, const packed_faces &in);
    /// An iteration: new values of all cells, from those before.
    void (*sweep)(const mpgpu::stream &stream, int device, const block &b, const double *before, double *after);
};

/// For the virtual devices of the host backend: CPU code. In device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef JACOBI3D_CUDA
/// For GPUs. In device_code_cuda.cu.
extern const device_code on_gpus;
/// Whether memory of a device is a GPU's; that of a virtual device is the process's own.
bool is_on_gpu(const void *memory);
#endif

/// The code for the devices of the context, of which `memory` is some.
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
