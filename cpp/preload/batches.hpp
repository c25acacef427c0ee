// Accelerates batched copies of unmodified programs (`cuMemcpyBatchAsync`).
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// Attributes of consecutive copies of a batch, `CUmemcpyAttributes`.
struct batch_attributes {
    /// Order in which the driver may read the sources, `CUmemcpySrcAccessOrder`.
    int source_access;
    /// Locations of source and destination, two `CUmemLocation`. Hints for managed memory.
    std::array<int, 4> locations;
    unsigned flags;
};
static_assert(sizeof(batch_attributes) == 24, "the driver's struct");

/// Batch of copies: arguments of `cuMemcpyBatchAsync_v2`.
struct batch {
    const device_pointer *dst;
    const device_pointer *src;
    const std::size_t *bytes;
    std::size_t count;
    const batch_attributes *attributes;
    std::size_t attribute_count;
};

/// Enqueues a batch as one kernel in the caller's stream, and returns true on success. The batch is then counted as one
/// copy. If the result is false, no work remains enqueued and the caller must pass the batch to the driver. Such a
/// batch is also counted as one copy if a report is requested.
bool take_batch(const batch &copies, stream in) noexcept;

} // namespace mpgpu_preload
