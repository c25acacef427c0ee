// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP

#include "mesh.hpp"

#include <mpgpu/halo.hpp>

#include <cstddef>
#include <memory>
#include <vector>

/// Variable of one rank in one cycle.
struct variable {
    mesh where;
    double *data; ///< in memory of `device`
    int device;
    int number;
    int cycle;
};

/// Initial value of `first_wrong`, which means that all elements are correct.
constexpr unsigned long long none_wrong = ~0ULL;

/// Device operations that this example implements without mpgpu. This is the only part that depends on the kind of
/// device.
struct device_code {
    /// Enqueues setting of all elements in a stream of the device.
    void (*set)(const mpgpu::stream &stream, const variable &v);
    /// Enqueues a comparison of all elements with their expected values. Lowers `*first_wrong`, in memory of the
    /// device, to the first wrong element.
    void (*compare)(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong);
    /// Returns the pack and unpack function.
    mpgpu::halo::copier (*copier)();
    /// Returns the kernel between nodes for `halo::options::persistent`. If empty, the library's kernel of CPU threads
    /// is used.
    mpgpu::halo::persistent_copier (*persistent)();
    /// Returns the kernel that pushes messages. If empty, the library's kernel of CPU threads is used.
    mpgpu::halo::pushing_copier (*pushing)();
    /// Returns a launch of one graph that runs all these launches in any order.
    mpgpu::halo::launch_function (*graph)(mpgpu::device where, const std::vector<mpgpu::halo::launch_function> &all);
    /// Allocates memory that migrates between the CPU and a device.
    std::shared_ptr<std::byte> (*allocate_managed)(int device, std::size_t bytes);
    /// True if kernels of a device can access pageable memory.
    bool (*reaches_pageable)(int device);
};

/// CPU code for the virtual devices of the host backend, in device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef HALO3D_CUDA
/// Code for GPUs, in device_code_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. Memory of a virtual device is memory of the process.
bool is_on_gpu(const void *memory);
#endif

/// Returns the code for the devices of the context to which `memory` belongs.
inline const device_code &code_for(const void *memory) {
#ifdef HALO3D_CUDA
    if (is_on_gpu(memory)) {
        return on_gpus;
    }
#endif
    static_cast<void>(memory);
    return on_virtual_devices;
}

#endif // MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP
