// Memory of other processes that this one has opened by CUDA IPC.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// Notes what `cuIpcOpenMemHandle` has given: so many bytes.
void note_opened(device_pointer base, std::uint64_t bytes);

/// Forgets what was closed.
void forget_opened(device_pointer base);

/// Whether an address lies in memory that was opened.
bool is_opened(device_pointer address);

} // namespace mpgpu_preload
