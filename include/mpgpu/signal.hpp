// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SIGNAL_HPP
#define MPGPU_SIGNAL_HPP

/// @file
/// Signals between the processes of a node: counters in memory. Streams raise them and wait for them by
/// `context::raise` and `context::wait`, the calling thread by `context::raise_from_host`, `context::is_reached` and
/// `context::synchronize`.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

namespace mpgpu {

/// A counter of 64 bits in memory of `signal_counters`, or in imported memory, and the value that it is raised to or
/// waited for. The C struct, a plain value.
using signal_value = mp_signal_t;

} // namespace mpgpu

#endif // MPGPU_SIGNAL_HPP
