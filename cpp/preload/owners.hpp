// On which GPU the memory lies that a CUDA IPC handle stands for. The driver names the GPU that has opened it, so
// processes of a user that run under the interposer tell each other in a table in shared memory.
#pragma once

#include "driver.hpp"

#include <optional>

namespace mpgpu_preload {

/// What the process has told that made a handle.
struct owner {
    uuid gpu;
    std::uint64_t bytes;
};

/// Tells the other processes. Does nothing where the table cannot be had: then nobody knows.
void publish(const ipc_handle &handle, const owner &memory) noexcept;

/// What the maker of the handle has told, if it still runs.
std::optional<owner> find_owner(const ipc_handle &handle) noexcept;

} // namespace mpgpu_preload
