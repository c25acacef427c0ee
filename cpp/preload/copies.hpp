// Which copies are taken, and how.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// Whether a copy is for the driver, as far as that is known without a call of it. Counts the copy if so.
bool passes(device_pointer dst, device_pointer src, std::size_t bytes) noexcept;

/// Enqueues a copy that does not pass at once through a plan in the caller's stream, and says whether it has. If not,
/// nothing was enqueued that is still at work, and the copy is for the driver. Counts the copy either way.
bool take(device_pointer dst, device_pointer src, std::size_t bytes, stream in) noexcept;

/// Whether mpgpu has begun to use the program's GPUs.
bool is_in_use() noexcept;

/// What the driver knows of an address.
struct memory {
    context owner = nullptr;
    /// A `CUmemorytype`; 0 for memory that the driver does not know.
    unsigned type = 0;
    unsigned managed = 0;
    int gpu = 0;
    /// Memory of `cuMemAlloc`, not of a pool or a mapping.
    unsigned plain = 0;
    device_pointer base = 0;
    std::size_t bytes = 0;
};

/// All zeros for memory that the driver does not know.
memory find_memory(device_pointer address) noexcept;

/// Whether memory is a context's, or, as of a pool or a mapping, of no context but the GPU's of which it is the primary
/// one.
bool is_owned_by(const memory &known, context owner) noexcept;

} // namespace mpgpu_preload
