// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SIGNAL_COUNTERS_HPP
#define MPGPU_SIGNAL_COUNTERS_HPP

/// @file
/// Memory for the counters of signals.

#include <mpgpu/buffer.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Array of 64-bit counters for signals, initially 0. It is a buffer in host memory that other processes can map.
class signal_counters : public buffer<std::uint64_t> {
  public:
    /// Constructs an object without counters.
    signal_counters() noexcept = default;
    /// Allocates `size` counters. Allocates nothing if `size` is 0. Throws `argument_error`, `out_of_memory`,
    /// `not_supported`, `driver_error`.
    signal_counters(const context &ctx, std::size_t size, on_error failed = {})
        : buffer(buffer::shared(ctx, device::host(), size, failed)) {}
};

} // namespace mpgpu

#endif // MPGPU_SIGNAL_COUNTERS_HPP
