// Counts the program's copies by outcome and writes a report when the program ends.
#pragma once

#include <cstddef>

namespace mpgpu_preload {

/// Kind of an accelerated copy, or the reason why a copy was passed through. In the order of `report.cpp`.
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

/// Counts a copy, and for an accelerated copy the seconds saved, measured or predicted.
void count(outcome what, std::size_t bytes, double saved_seconds = 0);

/// Counts the result of comparing the bytes of an accelerated copy.
void count_compared(bool equal);

/// Resets the counts in a child of fork, because its parent has counted them.
void forget_counts();

/// Writes the report if `MPGPU_PRELOAD_REPORT` requests one and the program has copied.
void write_report();

} // namespace mpgpu_preload
