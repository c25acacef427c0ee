// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MAPPED_FILE_HPP
#define MPGPU_MAPPED_FILE_HPP

/// @file
/// Files as sources of transfers.

#include <mpgpu/context.hpp>
#include <mpgpu/detail/handle.hpp>
#include <mpgpu/span.hpp>

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mpgpu {

/// File whose bytes can be the source of transfers. The library maps the whole file read-only, and several threads read
/// the file when it is copied.
///
/// @code
/// const int descriptor = ::open("restart.bin", O_RDONLY);
/// mpgpu::mapped_file file(ctx, descriptor); // duplicates the descriptor
/// ::close(descriptor);
/// mpgpu::plan load(ctx, {mpgpu::make_transfer(on_gpu, file.elements<double>(header_bytes, on_gpu.size()))});
/// @endcode
///
/// Owns the mapping and is move-only. The destructor blocks until all work that is enqueued in the context so far has
/// finished, and then removes the mapping. If the file is truncated, executions that need the missing bytes fail with
/// `driver_error`.
class mapped_file {
  public:
    /// Constructs an object that maps no file.
    mapped_file() noexcept = default;
    /// Maps a regular file that is open for reading. If `bypass_cache` is true, bytes that the page cache of the system
    /// does not contain are read by direct I/O, and the page cache stays unchanged; see `mp_file_map`. The descriptor
    /// is duplicated, so the caller may close it.
    ///
    /// Throws `not_supported` if the file is empty, is not a regular file, is not open for reading, or is on a file
    /// system that cannot map files. Throws `argument_error` if the descriptor is negative. Throws `driver_error` if
    /// the descriptor is not open, or if the system cannot map the file for another reason.
    mapped_file(const context &ctx, int descriptor, bool bypass_cache = false, on_error failed = {}) {
        const void *data = nullptr;
        std::uint64_t bytes = 0;
        const mp_status_t outcome = mp_file_map(ctx.get(), descriptor, bypass_cache ? 1 : 0, &data, &bytes);
        if (outcome == MP_SUCCESS) {
            handle_ = handle(data, {ctx.get(), static_cast<std::size_t>(bytes), MP_DEVICE_HOST});
        }
        failed.report(outcome);
    }

    /// Returns the address of the first byte of the file. If the program itself reads bytes beyond the end of a file
    /// that was truncated, it receives `SIGBUS`.
    [[nodiscard]] const std::byte *data() const noexcept { return static_cast<const std::byte *>(handle_.get()); }
    /// Returns the size of the mapping in bytes. It is 0 if the object is empty.
    [[nodiscard]] std::size_t size() const noexcept { return handle_.owner().size; }
    /// Returns true if this object maps a file.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

    /// Returns a view of `count` elements of type `T`, for use as the source of a transfer. The first element is at
    /// byte `offset` of the file, which must be a multiple of the alignment of `T`. All elements must be inside the
    /// file.
    template <class T> [[nodiscard]] device_span<const T> elements(std::size_t offset, std::size_t count) const {
        static_assert(std::is_trivially_copyable_v<T>,
                      "mpgpu: elements must be trivially copyable, because they are copied as bytes");
        assert(offset % alignof(T) == 0 && offset <= size() && count <= (size() - offset) / sizeof(T));
        const void *first = data() + offset;
        return {array_view<const T>(static_cast<const T *>(first), count), device::from_id(MP_DEVICE_HOST)};
    }

  private:
    using handle = detail::handle<const void *, detail::released_in<mp_file_unmap>>;
    handle handle_;
};

} // namespace mpgpu

#endif // MPGPU_MAPPED_FILE_HPP
