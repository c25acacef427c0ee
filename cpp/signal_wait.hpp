// What the kernel takes that lets a stream wait for signals, where the program asks for it (MPGPU_SIGNAL_WAIT=kernel).
#pragma once

#include <stdint.h>

namespace mpgpu {

// Counters of one launch: a warp, each lane of which looks at its own.
constexpr uint32_t kSignalsPerWait = 32;

// A kernel that waits for flags in memory of its GPU looks at a word in host memory, which ends the wait, after so many
// looks that found nothing: about every 50 us.
constexpr uint32_t kLooksPerStop = 64;
// After so many it says that it has waited for long: about 100 us.
constexpr uint32_t kLateLooks = 2 * kLooksPerStop;

// The argument of one launch: counters in pinned memory, by address, and the value that each is waited for to reach.
struct SignalList {
    uint64_t counters[kSignalsPerWait];
    uint64_t values[kSignalsPerWait];
    uint64_t count;
};
static_assert(sizeof(SignalList) == 520, "the Rust side declares the same fields");

} // namespace mpgpu
