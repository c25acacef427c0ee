// SPDX-License-Identifier: MIT OR Apache-2.0
#include "spaces.hpp"

#include "device_code.hpp"

#include <cstdlib>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

void check_reach(space mesh, space messages, packing how, const device_code &code, mpgpu::device where) {
    for (const auto &[flag, in] : {std::pair{"-mesh-space ", mesh}, std::pair{"-message-space ", messages}}) {
        const std::string both = std::string(flag) + name_of(in) + " with -pack " + name_of(how) + ": ";
        if (is_by_cpu(how) && in == space::device) {
            throw std::invalid_argument(both + "the CPU cannot access memory of a GPU; use pinned, pageable or "
                                               "managed, or -pack each, fused or graph");
        }
        if (!is_by_cpu(how) && in == space::pageable && !code.reaches_pageable(where.id())) {
            throw std::invalid_argument(both + "kernels of this GPU cannot access pageable memory; use device, pinned "
                                               "or managed, or -pack serial or threads");
        }
    }
}

std::shared_ptr<std::byte> allocate(const mpgpu::context &ctx, space in, const device_code &code, mpgpu::device where,
                                    std::size_t bytes) {
    switch (in) {
    case space::pageable:
        return allocate_pageable(bytes);
    case space::managed:
        return code.allocate_managed(where.id(), bytes);
    default:
        const auto owner =
            std::make_shared<mpgpu::memory>(ctx, in == space::device ? where : mpgpu::device::host(), bytes);
        return {owner, owner->data()};
    }
}

std::shared_ptr<std::byte> allocate_pageable(std::size_t bytes) {
    constexpr std::size_t page = 4096;
    void *const memory = std::aligned_alloc(page, (bytes / page + 1) * page);
    if (memory == nullptr) {
        throw std::bad_alloc();
    }
    return {static_cast<std::byte *>(memory), std::free};
}
