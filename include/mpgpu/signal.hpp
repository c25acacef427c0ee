// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SIGNAL_HPP
#define MPGPU_SIGNAL_HPP

/// @file
/// Signals between processes on one machine: 64-bit counters in memory. Streams set and wait for them with
/// `context::raise` and `context::wait`. The calling thread uses `context::raise_from_host`, `context::is_reached` and
/// `context::synchronize`.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

namespace mpgpu {

/// Signal: the address of a 64-bit counter in memory of `signal_counters` or in imported memory, and the value to set
/// or to wait for. A plain value; an alias of the C struct.
using signal_value = mp_signal_t;

} // namespace mpgpu

#endif // MPGPU_SIGNAL_HPP
