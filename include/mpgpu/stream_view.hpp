// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_STREAM_VIEW_HPP
#define MPGPU_STREAM_VIEW_HPP

/// @file
/// Non-owning views that refer to streams.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstddef>

namespace mpgpu {

/// Non-owning view of a stream: of a `cudaStream_t` or an `mpgpu::stream`. Integers and `nullptr` are rejected at
/// compile time. Use `default_stream()` for the default stream. A plain value.
class stream_view {
  public:
    stream_view() = delete;
    stream_view(int) = delete;
    stream_view(std::nullptr_t) = delete;
    /// Constructs a view of a stream, which must outlive the view.
    constexpr stream_view(mp_stream_t stream) noexcept : stream_(stream) {}

    /// Returns a view of the default stream of the backend. On CUDA it is the legacy default stream.
    [[nodiscard]] static constexpr stream_view default_stream() noexcept { return {static_cast<mp_stream_t>(nullptr)}; }

    /// Returns the C handle. On the CUDA backend it is a `cudaStream_t`.
    [[nodiscard]] constexpr mp_stream_t get() const noexcept { return stream_; }

    /// Returns true if both views refer to the same stream.
    friend constexpr bool operator==(stream_view a, stream_view b) noexcept { return a.stream_ == b.stream_; }
    /// Returns true if the views refer to different streams.
    friend constexpr bool operator!=(stream_view a, stream_view b) noexcept { return a.stream_ != b.stream_; }

  private:
    mp_stream_t stream_;
};

} // namespace mpgpu

#endif // MPGPU_STREAM_VIEW_HPP
