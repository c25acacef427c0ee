// Batched copies of unmodified programs.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// `CUmemcpyAttributes`: what holds for a run of copies of a batch.
struct batch_attributes {
    /// A `CUmemcpySrcAccessOrder`.
    int source_access;
    /// `CUmemLocation` of both ends: hints for managed memory.
    std::array<int, 4> locations;
    unsigned flags;
};
static_assert(sizeof(batch_attributes) == 24, "the driver's struct");

/// The arguments of `cuMemcpyBatchAsync_v2`.
struct batch {
    const device_pointer *dst;
    const device_pointer *src;
    const std::size_t *bytes;
    std::size_t count;
    const batch_attributes *attributes;
    std::size_t attribute_count;
};

/// Enqueues a batch as one kernel in the caller's stream, and returns true if it has. If not, nothing was enqueued, and
/// the batch is for the driver. Counts the batch as one copy if it was enqueued.
bool take_batch(const batch &copies, stream in) noexcept;

} // namespace mpgpu_preload
