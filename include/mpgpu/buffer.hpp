// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_BUFFER_HPP
#define MPGPU_BUFFER_HPP

/// @file
/// Memory of a device.

#include <mpgpu/context.hpp>
#include <mpgpu/detail/memory_owner.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace mpgpu {

/// Memory of one device for `size()` elements of `T`, uninitialised, aligned to 256 bytes or more, host memory pinned.
///
/// Owns it, and is move-only. Its destructor waits until everything enqueued in the context so far has finished, as
/// `cudaFree` does, because a copy may still use the memory; then it frees it. After `set_stream` it does not wait.
template <class T> class buffer : public detail::memory_owner<T, detail::freed_in> {
  public:
    /// Owns nothing.
    buffer() noexcept = default;
    /// Allocates `size` elements on `where`; none at all when `size` is 0. Throws `out_of_memory`, `argument_error`,
    /// `driver_error`.
    buffer(const context &ctx, device where, std::size_t size, on_error failed = {})
        : buffer(mp_alloc, ctx, where, size, failed) {}

    /// The same in memory that other processes can map: `mp_alloc_shared` says more. Throws
    /// `not_supported` too.
    [[nodiscard]] static buffer shared(const context &ctx, device where, std::size_t size, on_error failed = {}) {
        return buffer(mp_alloc_shared, ctx, where, size, failed);
    }

    /// From now on the destructor frees the memory after the work that is then enqueued in `stream`, and does not wait;
    /// `mp_free_async` says when its bytes are there for others. Work of other streams that uses the memory must come
    /// before that, by events say. `stream` must outlive this. While it is being captured the destructor waits after
    /// all.
    void set_stream(stream_view stream) noexcept {
        this->owner().stream = stream.get();
        this->owner().has_stream = true;
    }

  private:
    using allocator = mp_status_t(mp_context_t, std::int32_t, std::uint64_t, void **);

    buffer(allocator *allocate, const context &ctx, device where, std::size_t size, on_error failed) {
        // More bytes than can be counted are asked for as the most that can: the library then says what it was asked
        // for.
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

/// Untyped memory, its size in bytes.
using memory = buffer<std::byte>;

} // namespace mpgpu

#endif // MPGPU_BUFFER_HPP
