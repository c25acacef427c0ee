// Memory of other processes that this one has opened by CUDA IPC.
#pragma once

#include "driver.hpp"

#include <mpgpu/mpgpu.h>

#include <optional>

namespace mpgpu_preload {

/// What of it a copy is about.
struct opened {
    device_pointer base;
    std::uint64_t bytes;
    /// On which it lies; -1 where nobody has told, or where mpgpu would not take it.
    int gpu;
};

/// Notes what `cuIpcOpenMemHandle` has given for a handle.
void note_opened(device_pointer base, const ipc_handle &handle) noexcept;

/// Forgets what is about to be closed; mpgpu lets go of it.
void forget_opened(device_pointer base) noexcept;

/// The opened memory that an address lies in. mpgpu's context knows it then, if there is one yet.
std::optional<opened> find_opened(device_pointer address, mp_context_t known_by);

} // namespace mpgpu_preload
