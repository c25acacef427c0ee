// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_STREAM_VIEW_HPP
#define MPGPU_STREAM_VIEW_HPP

/// @file
/// Streams that someone else owns.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstddef>

namespace mpgpu {

/// A stream that someone else owns: a `cudaStream_t`, or the view of an `mpgpu::stream`. An integer or `nullptr` is
/// refused at compile time; the default stream is asked for by name. A plain value.
class stream_view {
  public:
    stream_view() = delete;
    stream_view(int) = delete;
    stream_view(std::nullptr_t) = delete;
    /// This stream, which must outlive the view.
    constexpr stream_view(mp_stream_t stream) noexcept : stream_(stream) {}

    /// The default stream of the backend in use: CUDA's legacy default stream.
    [[nodiscard]] static constexpr stream_view default_stream() noexcept { return {static_cast<mp_stream_t>(nullptr)}; }

    /// The C handle: on the CUDA backend a `cudaStream_t`.
    [[nodiscard]] constexpr mp_stream_t get() const noexcept { return stream_; }

    /// Whether both are the same stream.
    friend constexpr bool operator==(stream_view a, stream_view b) noexcept { return a.stream_ == b.stream_; }
    /// Whether they are different streams.
    friend constexpr bool operator!=(stream_view a, stream_view b) noexcept { return a.stream_ != b.stream_; }

  private:
    mp_stream_t stream_;
};

} // namespace mpgpu

#endif // MPGPU_STREAM_VIEW_HPP
