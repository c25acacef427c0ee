// Records which memory of other processes this process has opened by CUDA IPC.
#pragma once

#include "driver.hpp"

#include <mpgpu/mpgpu.h>

#include <optional>

namespace mpgpu_preload {

/// Address range and GPU of memory of another process that this process has opened.
struct opened {
    device_pointer base;
    std::uint64_t bytes;
    /// GPU on which the memory is. -1 if no process has published it, or if mpgpu did not accept the memory.
    int gpu;
};

/// Records that `cuIpcOpenMemHandle` has opened the memory of `handle` at the address `base`.
void note_opened(device_pointer base, const ipc_handle &handle) noexcept;

/// Removes the record of memory that is about to be closed, also from the mpgpu context that has adopted it.
void forget_opened(device_pointer base) noexcept;

/// Returns the opened memory that contains an address, or nothing if there is none. If `known_by` is not null, that
/// mpgpu context first adopts the memory.
std::optional<opened> find_opened(device_pointer address, mp_context_t known_by);

} // namespace mpgpu_preload
