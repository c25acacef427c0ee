// Counts the program's copies by outcome and writes a report when the program ends.
#pragma once

#include <cstddef>

namespace mpgpu_preload {

/// Kind of an accelerated copy, or the reason why a copy was passed to the driver. The order is that of the texts in
/// `report.cpp`.
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
    batched,
    count
};

/// Counts a copy of `bytes` bytes. For an accelerated copy, `saved_seconds` is the time saved in seconds, measured or
/// predicted.
void count(outcome what, std::size_t bytes, double saved_seconds = 0);

/// Counts an accelerated copy whose data was compared with the source. `equal` is true if the data is correct.
void count_compared(bool equal);

/// Sets all counts of this process to 0. Called in a child of fork, because the parent counts the copies made before
/// the fork.
void forget_counts();

/// Writes the report at the end of the program. Does nothing unless `MPGPU_PRELOAD_REPORT` requests a report and the
/// program has copied.
void write_report();

} // namespace mpgpu_preload
