// Memory of other processes that this one has opened by CUDA IPC.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

enum class opened_memory { none, known, unknown };

/// Notes what `cuIpcOpenMemHandle` has given: so many bytes, and whether somebody has told whose they are.
void note_opened(device_pointer base, std::uint64_t bytes, bool is_known);

/// Forgets what was closed.
void forget_opened(device_pointer base);

/// Whether an address lies in memory that was opened.
opened_memory find_opened(device_pointer address);

} // namespace mpgpu_preload
