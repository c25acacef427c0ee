// Determines the GPU of the memory that a CUDA IPC handle refers to. The driver reports only the GPU through which it
// was opened. A user's processes under the interposer therefore publish this information in a table in shared memory.
#pragma once

#include "driver.hpp"

#include <optional>

namespace mpgpu_preload {

/// Information published by the process that created a handle.
struct owner {
    uuid gpu;
    std::uint64_t bytes;
};

/// Publishes the owner of a handle's memory. Does nothing if the table is not available; the owner then stays unknown.
void publish(const ipc_handle &handle, const owner &memory) noexcept;

/// Returns the information that the creator of a handle has published, if it is still running.
std::optional<owner> find_owner(const ipc_handle &handle) noexcept;

} // namespace mpgpu_preload
