// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP

#include "mesh.hpp"

#include <mpgpu/halo.hpp>

#include <cstddef>
#include <memory>
#include <vector>

/// Array of one variable on one rank, with the number of the cycle. Kernels get this as an argument.
struct variable {
    mesh where;
    double *data; ///< values, in memory of `device`
    int device;
    int number;
    int cycle;
};

/// Initial value of `first_wrong`, which means that all elements are correct.
constexpr unsigned long long none_wrong = ~0ULL;

/// Device operations that this example implements itself, without mpgpu. Only this code depends on the kind of device
/// (GPU or virtual device).
struct device_code {
    /// Enqueues a kernel that sets all elements of a variable.
    void (*set)(const mpgpu::stream &stream, const variable &v);
    /// Enqueues a kernel that compares all elements of a variable with the expected values. If some are wrong, the
    /// kernel lowers `*first_wrong` in device memory to the smallest index of a wrong element.
    void (*compare)(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong);
    /// Returns the function that packs and unpacks.
    mpgpu::halo::copier (*copier)();
    /// Returns the persistent kernel for exchanges with other nodes, for `halo::options::persistent`. If this pointer
    /// is null, the library's own kernel for CPU threads is used.
    mpgpu::halo::persistent_copier (*persistent)();
    /// Returns the kernel that packs messages and writes them into the receivers' memory. If this pointer is null, the
    /// library's own kernel for CPU threads is used.
    mpgpu::halo::pushing_copier (*pushing)();
    /// Combines several launches into one launch of a graph, in which they run in any order.
    mpgpu::halo::launch_function (*graph)(mpgpu::device where, const std::vector<mpgpu::halo::launch_function> &all);
    /// Allocates managed memory, which migrates between the CPU and a device.
    std::shared_ptr<std::byte> (*allocate_managed)(int device, std::size_t bytes);
    /// True if kernels of a device can access pageable host memory.
    bool (*reaches_pageable)(int device);
};

/// CPU code for the virtual devices of the host backend, in device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef HALO3D_CUDA
/// Code for GPUs, in device_code_cuda.cu.
extern const device_code on_gpus;
/// True if memory of a device belongs to a GPU. False if it belongs to a virtual device, which uses memory of the
/// process.
bool is_on_gpu(const void *memory);
#endif

/// Returns the device operations for the kind of device to which `memory` belongs.
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
