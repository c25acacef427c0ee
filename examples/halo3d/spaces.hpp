// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_SPACES_HPP
#define MPGPU_EXAMPLES_HALO3D_SPACES_HPP

#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <memory>

struct device_code;

/// Kind of memory in which cells and messages are. LLNL's Comb calls these kinds Device, HostPinned, Host and Managed.
enum class space { device, pinned, pageable, managed };
constexpr std::array<const char *, 4> space_names = {"device", "pinned", "pageable", "managed"};

/// Method of packing and unpacking. Comb calls these methods seq, omp, cuda, cuda with message_group_pack_fusing, and
/// cuda_graph.
enum class packing {
    serial,  ///< the calling thread, one message after the other
    threads, ///< several CPU threads, one message after the other
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

/// Throws `std::invalid_argument` if the packing code cannot access the cells or the messages. The message gives the
/// reason and an alternative.
void check_reach(space mesh, space messages, packing how, const device_code &code, mpgpu::device where);

/// Allocates memory of the kind `in` that kernels of the device `where` use. It is freed when the last copy of the
/// returned pointer is destroyed.
std::shared_ptr<std::byte> allocate(const mpgpu::context &ctx, space in, const device_code &code, mpgpu::device where,
                                    std::size_t bytes);

/// Allocates whole pages of pageable memory.
std::shared_ptr<std::byte> allocate_pageable(std::size_t bytes);

#endif // MPGPU_EXAMPLES_HALO3D_SPACES_HPP
