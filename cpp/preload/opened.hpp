// Tracks memory of other processes that this process has opened by CUDA IPC.
#pragma once

#include "driver.hpp"

#include <mpgpu/mpgpu.h>

#include <optional>

namespace mpgpu_preload {

/// Range and GPU of opened memory.
struct opened {
    device_pointer base;
    std::uint64_t bytes;
    /// GPU of the memory; -1 if no process has published it, or if mpgpu did not accept the memory.
    int gpu;
};

/// Records memory that `cuIpcOpenMemHandle` has opened for a handle.
void note_opened(device_pointer base, const ipc_handle &handle) noexcept;

/// Removes memory that is about to be closed, also from mpgpu.
void forget_opened(device_pointer base) noexcept;

/// Returns the opened memory that contains an address, after mpgpu's context, if there is one, has adopted it.
std::optional<opened> find_opened(device_pointer address, mp_context_t known_by);

} // namespace mpgpu_preload
