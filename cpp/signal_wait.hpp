// Declares the argument of the kernel that waits for signals in a stream, if requested by MPGPU_SIGNAL_WAIT=kernel.
#pragma once

#include <stdint.h>

namespace mpgpu {

// Number of counters per launch: a warp, in which each lane polls one counter.
constexpr uint32_t kSignalsPerWait = 32;

// Number of unsuccessful polls of flags in GPU memory after which a kernel polls the word in host memory that ends the
// wait: about every 50 us.
constexpr uint32_t kLooksPerStop = 64;
// Number of unsuccessful polls after which the kernel reports a long wait: about 100 us.
constexpr uint32_t kLateLooks = 2 * kLooksPerStop;

// Argument of one launch: addresses of counters in pinned memory, and the awaited value of each.
struct SignalList {
    uint64_t counters[kSignalsPerWait];
    uint64_t values[kSignalsPerWait];
    uint64_t count;
};
static_assert(sizeof(SignalList) == 520, "the Rust side declares the same fields");

} // namespace mpgpu
