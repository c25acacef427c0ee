// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_BUFFER_HPP
#define MPGPU_BUFFER_HPP

/// @file
/// Buffers: memory allocated on a device.

#include <mpgpu/context.hpp>
#include <mpgpu/detail/memory_owner.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace mpgpu {

/// Memory on one device for `size()` elements of type `T`. It is uninitialised and aligned to at least 256 bytes. Host
/// memory is pinned.
///
/// Owns the memory and is move-only. Like `cudaFree`, the destructor blocks until all work that is enqueued in the
/// context so far has finished, because a copy may still use the memory, and then frees the memory. After `set_stream`
/// it does not block.
template <class T> class buffer : public detail::memory_owner<T, detail::freed_in> {
  public:
    /// Constructs an empty buffer.
    buffer() noexcept = default;
    /// Allocates `size` elements on the device `where`. Allocates nothing if `size` is 0. Throws `out_of_memory`,
    /// `argument_error`, `driver_error`.
    buffer(const context &ctx, device where, std::size_t size, on_error failed = {})
        : buffer(mp_alloc, ctx, where, size, failed) {}

    /// Allocates `size` elements on the device `where` that other processes can map; see `mp_alloc_shared`. Throws the
    /// exceptions of the constructor, and `not_supported`.
    [[nodiscard]] static buffer shared(const context &ctx, device where, std::size_t size, on_error failed = {}) {
        return buffer(mp_alloc_shared, ctx, where, size, failed);
    }

    /// Makes the destructor free the memory in stream order, like `cudaFreeAsync`, without blocking: the memory is
    /// freed after all work that is enqueued in `stream` when the destructor runs. While `stream` is being captured,
    /// the destructor blocks instead.
    ///
    /// Work in other streams that uses the memory must be ordered before that point, for example by events. `stream`
    /// must outlive this buffer. `mp_free_async` describes when the memory becomes available again.
    void set_stream(stream_view stream) noexcept {
        this->owner().stream = stream.get();
        this->owner().has_stream = true;
    }

  private:
    using allocator = mp_status_t(mp_context_t, std::int32_t, std::uint64_t, void **);

    buffer(allocator *allocate, const context &ctx, device where, std::size_t size, on_error failed) {
        // If the size in bytes overflows, the largest number is passed. The library then reports that there is not
        // enough memory.
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        const std::uint64_t bytes = size <= most / sizeof(T) ? size * sizeof(T) : most;
        void *memory = nullptr;
        const mp_status_t outcome = size == 0 ? MP_SUCCESS : allocate(ctx.get(), where.id(), bytes, &memory);
        if (outcome == MP_SUCCESS) {
            this->own(memory, {ctx.get(), size, where.id(), false, nullptr});
        }
        failed.report(outcome);
    }
};

/// Untyped memory on one device. Its size is in bytes.
using memory = buffer<std::byte>;

} // namespace mpgpu

#endif // MPGPU_BUFFER_HPP
