// What became of the program's copies, counted by reason and told when it ends.
#pragma once

#include <cstddef>

namespace mpgpu_preload {

/// Taken, from where to where, or why a copy went on to the driver. In the order of `report.cpp`.
enum class outcome : std::size_t {
    device_to_device,
    host_to_device,
    device_to_host,
    small,
    no_gain,
    preparing,
    captured,
    no_gpu,
    managed,
    pooled,
    opened,
    unused_gpu,
    other_context,
    no_context,
    refused,
    count
};

/// Counts a copy, and of one that was taken the seconds that the model says it saves.
void count(outcome what, std::size_t bytes, double saved_seconds = 0);

/// Counts what comparing the bytes of a taken copy has found.
void count_compared(bool equal);

/// Nothing is counted in a child of fork that its parent has counted.
void forget_counts();

/// Writes the report where `MPGPU_PRELOAD_REPORT` asks for one and the program has copied.
void write_report();

} // namespace mpgpu_preload
