// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP
#define MPGPU_EXAMPLES_HALO3D_DEVICE_CODE_HPP

#include "mesh.hpp"

#include <mpgpu/halo.hpp>

#include <cstddef>
#include <memory>
#include <vector>

/// One variable of one rank in one cycle.
struct variable {
    mesh where;
    double *data; ///< on `device`
    int device;
    int number;
    int cycle;
};

/// An element that is right is none; `first_wrong` starts with this.
constexpr unsigned long long none_wrong = ~0ULL;

/// What this example does on devices without mpgpu: the only part that knows what kind of devices they are.
struct device_code {
    /// Enqueues the setting of all elements in a stream of the device.
    void (*set)(const mpgpu::stream &stream, const variable &v);
    /// Enqueues the comparison of all elements with what they must be; lowers `*first_wrong`, in memory of the device,
    /// to the first that is wrong.
    void (*compare)(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong);
    /// Pack and unpack.
    mpgpu::halo::copier (*copier)();
    /// The kernel between nodes that `halo::options::persistent` asks for; empty: the library's, of CPU threads.
    mpgpu::halo::persistent_copier (*persistent)();
    /// The kernel that pushes messages; empty: the library's, of CPU threads.
    mpgpu::halo::pushing_copier (*pushing)();
    /// A launch that does all of these, in any order, as one graph.
    mpgpu::halo::launch_function (*graph)(mpgpu::device where, const std::vector<mpgpu::halo::launch_function> &all);
    /// Memory that moves between the CPU and a device as either uses it.
    std::shared_ptr<std::byte> (*allocate_managed)(int device, std::size_t bytes);
    /// Whether kernels of a device reach ordinary memory of the process.
    bool (*reaches_pageable)(int device);
};

/// For the virtual devices of the host backend: CPU code. In device_code_host.cpp.
extern const device_code on_virtual_devices;

#ifdef HALO3D_CUDA
/// For GPUs. In device_code_cuda.cu.
extern const device_code on_gpus;
/// Whether memory of a device is a GPU's; that of a virtual device is the process's own.
bool is_on_gpu(const void *memory);
#endif

/// The code for the devices of the context, of which `memory` is some.
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
