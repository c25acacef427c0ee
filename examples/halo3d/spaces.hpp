// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_SPACES_HPP
#define MPGPU_EXAMPLES_HALO3D_SPACES_HPP

#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <memory>

struct device_code;

/// Where cells and messages lie, as in LLNL's Comb: its Device, HostPinned, Host and Managed.
enum class space { device, pinned, pageable, managed };
constexpr std::array<const char *, 4> space_names = {"device", "pinned", "pageable", "managed"};

/// Who packs and unpacks: its seq, omp, cuda, cuda with message_group_pack_fusing, and cuda_graph.
enum class packing {
    serial,  ///< the calling thread, message by message
    threads, ///< CPU threads, message by message
    each,    ///< a kernel for each message
    fused,   ///< one kernel for all messages
    graph    ///< one launch of a CUDA graph, in which each message has a kernel
};
constexpr std::array<const char *, 5> packing_names = {"serial", "threads", "each", "fused", "graph"};

constexpr bool is_by_cpu(packing how) {
    return how == packing::serial || how == packing::threads;
}

constexpr const char *name_of(space where) {
    return space_names.at(static_cast<std::size_t>(where));
}
constexpr const char *name_of(packing how) {
    return packing_names.at(static_cast<std::size_t>(how));
}

/// Throws `std::invalid_argument` where whoever packs does not reach the cells or the messages, with the reason and
/// what to take instead.
void check_reach(space mesh, space messages, packing how, const device_code &code, mpgpu::device where);

/// Memory of a space, which kernels of `where` use; freed with the last copy of the pointer.
std::shared_ptr<std::byte> allocate(const mpgpu::context &ctx, space in, const device_code &code, mpgpu::device where,
                                    std::size_t bytes);

/// Ordinary memory, in whole pages.
std::shared_ptr<std::byte> allocate_pageable(std::size_t bytes);

#endif // MPGPU_EXAMPLES_HALO3D_SPACES_HPP
