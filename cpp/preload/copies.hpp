// Decides which copies of the program are accelerated, and executes them.
#pragma once

#include "driver.hpp"

#include <functional>

struct mp_context;

namespace mpgpu_preload {

/// True if a copy must be passed to the driver, as far as this can be determined without a query of the driver. In this
/// case the copy is also counted.
bool passes(device_pointer dst, device_pointer src, std::size_t bytes) noexcept;

/// Enqueues a copy through an mpgpu plan in the caller's stream, and returns true on success. If the result is false,
/// no work remains enqueued and the caller must pass the copy to the driver. The copy is counted in both cases.
bool take(device_pointer dst, device_pointer src, std::size_t bytes, stream in) noexcept;

/// Starts to create mpgpu's context in a separate thread. Called when the program has a CUDA context. A program that
/// copies large pageable memory holds locks of the driver for most of the time, and would delay the creation for
/// seconds.
void prepare_early() noexcept;

/// Calls `work` with mpgpu's context and the mask of the GPUs that may forward data, and returns its result. If there
/// is no context yet, it returns false, and a separate thread creates the context for later calls. The interposer does
/// not accelerate copies that `work` makes.
bool with_context(const std::function<bool(mp_context *, std::uint64_t)> &work);

/// True while this thread executes code of mpgpu, whose copies are neither accelerated nor counted.
bool is_inside_mpgpu() noexcept;

/// True if `in` is being captured into a graph.
bool is_being_captured(stream in);

/// True if mpgpu has created its context and uses the program's GPUs.
bool is_in_use() noexcept;

/// Attributes of an address as reported by the driver.
struct memory {
    context owner = nullptr;
    /// Kind of the memory (`CUmemorytype`). 0 for memory that is unknown to the driver.
    unsigned type = 0;
    unsigned managed = 0;
    int gpu = 0;
    /// Nonzero for memory of `cuMemAlloc`. 0 for memory of a pool or of a mapping (`cuMemMap`).
    unsigned plain = 0;
    device_pointer base = 0;
    std::size_t bytes = 0;
};

/// Returns the driver's attributes of an address. All fields are 0 if the driver does not know the memory.
memory find_memory(device_pointer address) noexcept;

/// True if the memory belongs to the context `owner`. Memory of a pool or of a mapping belongs to no context; for such
/// memory the result is true if `owner` is the primary context of its GPU.
bool is_owned_by(const memory &known, context owner) noexcept;

} // namespace mpgpu_preload
