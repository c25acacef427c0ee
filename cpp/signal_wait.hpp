// What the kernel takes that lets a stream wait for signals, where the program asks for it (MPGPU_SIGNAL_WAIT=kernel).
#pragma once

#include <stdint.h>

namespace mpgpu {

// Counters of one launch: a warp, each lane of which looks at its own.
constexpr uint32_t kSignalsPerWait = 32;

// The argument of one launch: counters in pinned memory, by address, and the value that each is waited for to reach.
struct SignalList {
    uint64_t counters[kSignalsPerWait];
    uint64_t values[kSignalsPerWait];
    uint64_t count;
};
static_assert(sizeof(SignalList) == 520, "the Rust side declares the same fields");

} // namespace mpgpu
