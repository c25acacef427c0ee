// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SIGNAL_COUNTERS_HPP
#define MPGPU_SIGNAL_COUNTERS_HPP

/// @file
/// Memory for the counters of signals.

#include <mpgpu/buffer.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Counters of signals, initially 0. A buffer in host memory that other processes can map.
class signal_counters : public buffer<std::uint64_t> {
  public:
    /// Constructs an empty object.
    signal_counters() noexcept = default;
    /// Allocates `size` counters, or nothing if `size` is 0. Throws `argument_error`, `out_of_memory`, `not_supported`,
    /// `driver_error`.
    signal_counters(const context &ctx, std::size_t size, on_error failed = {})
        : buffer(buffer::shared(ctx, device::host(), size, failed)) {}
};

} // namespace mpgpu

#endif // MPGPU_SIGNAL_COUNTERS_HPP
