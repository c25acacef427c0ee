// Determines on which GPU the memory of a CUDA IPC handle is. The driver reports only the GPU through which the handle
// was opened. All processes of a user that run with the interposer therefore publish the GPU of their memory in a table
// in shared memory.
#pragma once

#include "driver.hpp"

#include <optional>

namespace mpgpu_preload {

/// GPU and size of the memory of an IPC handle, as published by the process that created the handle.
struct owner {
    uuid gpu;
    std::uint64_t bytes;
};

/// Publishes the GPU and size of a handle's memory. Does nothing if the table is not available, so the GPU remains
/// unknown to other processes.
void publish(const ipc_handle &handle, const owner &memory) noexcept;

/// Returns the GPU and size that the creator of a handle has published. Returns nothing if there is no such entry or
/// the creator has exited.
std::optional<owner> find_owner(const ipc_handle &handle) noexcept;

} // namespace mpgpu_preload
