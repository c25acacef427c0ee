// Decides which copies are accelerated, and executes them.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// True if a copy must be passed through, as far as this can be determined without a call of the driver. Counts the
/// copy if so.
bool passes(device_pointer dst, device_pointer src, std::size_t bytes) noexcept;

/// Enqueues a copy through a plan in the caller's stream and returns true if it did. Otherwise no enqueued work
/// remains, and the copy must be passed to the driver. Counts the copy in either case.
bool take(device_pointer dst, device_pointer src, std::size_t bytes, stream in) noexcept;

/// True if mpgpu has begun to use the program's GPUs.
bool is_in_use() noexcept;

/// Attributes of an address as reported by the driver.
struct memory {
    context owner = nullptr;
    /// `CUmemorytype`; 0 for memory that is unknown to the driver.
    unsigned type = 0;
    unsigned managed = 0;
    int gpu = 0;
    /// Nonzero for memory of `cuMemAlloc`; 0 for memory of a pool or a mapping.
    unsigned plain = 0;
    device_pointer base = 0;
    std::size_t bytes = 0;
};

/// Returns the attributes of an address, all zeros for memory that is unknown to the driver.
memory find_memory(device_pointer address) noexcept;

/// True if memory belongs to a context. Memory of a pool or a mapping belongs to no context; it counts as owned by the
/// primary context of its GPU.
bool is_owned_by(const memory &known, context owner) noexcept;

} // namespace mpgpu_preload
