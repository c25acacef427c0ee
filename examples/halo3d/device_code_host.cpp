// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

#include "spaces.hpp"

#include <algorithm>
#include <memory>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

void set(const mpgpu::stream &stream, const variable &v) {
    stream.launch_host([v] {
        for (std::int64_t element = 0; element < element_count(v.where); ++element) {
            v.data[element] = value_before(v.where, element, v.number, v.cycle);
        }
    });
}

void compare(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong) {
    stream.launch_host([v, first_wrong] {
        for (std::int64_t element = 0; element < element_count(v.where); ++element) {
            if (v.data[element] != value_after(v.where, element, v.number, v.cycle)) {
                *first_wrong = std::min(*first_wrong, static_cast<unsigned long long>(element));
                return;
            }
        }
    });
}

halo::copier copier() {
    return [](const mpgpu::context &ctx, mpgpu::device, mpgpu::array_view<const halo::piece> pieces,
              halo::direction way) -> halo::launch_function {
        // The enqueued work shares ownership of the pieces, because it may outlive the exchange.
        const auto kept = std::make_shared<const std::vector<halo::piece>>(pieces.begin(), pieces.end());
        return [&ctx, kept, way](mpgpu::stream_view stream) {
            ctx.launch_host(stream, [kept, way] { halo::copy_on_cpu(*kept, way); });
        };
    };
}

halo::persistent_copier persistent() {
    return {};
}

halo::pushing_copier pushing() {
    return {};
}

halo::launch_function graph(mpgpu::device /*where*/, const std::vector<halo::launch_function> &all) {
    return [all](mpgpu::stream_view stream) {
        for (const halo::launch_function &one : all) {
            one(stream);
        }
    };
}

std::shared_ptr<std::byte> allocate_managed(int /*device*/, std::size_t bytes) {
    return allocate_pageable(bytes);
}

// Virtual devices could access pageable memory. This returns false so that programs behave as on most GPUs.
bool reaches_pageable(int /*device*/) {
    return false;
}

} // namespace

const device_code on_virtual_devices = {set,     compare, copier,           persistent,
                                        pushing, graph,   allocate_managed, reaches_pageable};
