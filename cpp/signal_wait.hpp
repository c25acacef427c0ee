// Declares the argument of the kernel that waits for signals in a stream. MPGPU_SIGNAL_WAIT=kernel requests this
// kernel.
#pragma once

#include <stdint.h>

namespace mpgpu {

// Maximum number of counters per launch. A launch is one warp, in which each lane (thread) polls one counter.
constexpr uint32_t kSignalsPerWait = 32;

// Number of unsuccessful polls of flags in GPU memory after which a kernel polls the word in host memory that cancels
// its wait. This happens about every 50 us.
constexpr uint32_t kLooksPerStop = 64;
// Number of unsuccessful polls after which a kernel reports a long wait. They take about 100 us.
constexpr uint32_t kLateLooks = 2 * kLooksPerStop;

// Argument of one launch: addresses of counters in pinned memory, and the value that each counter must reach.
struct SignalList {
    uint64_t counters[kSignalsPerWait];
    uint64_t values[kSignalsPerWait];
    uint64_t count;
};
static_assert(sizeof(SignalList) == 520, "the Rust side declares the same fields");

} // namespace mpgpu
