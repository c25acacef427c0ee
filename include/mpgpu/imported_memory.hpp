// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_IMPORTED_MEMORY_HPP
#define MPGPU_IMPORTED_MEMORY_HPP

/// @file
/// Memory of other processes on the same machine, mapped into this process.

#include <mpgpu/buffer.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Handle of a memory range that other processes on the machine can map: 128 bytes that can be sent over MPI or any
/// other channel. A plain value that owns nothing; an alias of the C struct.
using memory_handle = mp_memory_handle_t;

/// Exports memory to other processes on the machine, which map it as `imported_memory`. The caller keeps ownership.
/// Other processes can map the memory until it is freed or the context is destroyed. Throws `argument_error`,
/// `driver_error`. Throws `not_supported` for memory that cannot be shared.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, device_span<T> range, on_error failed = {}) {
    memory_handle handle{};
    failed.report(mp_memory_export(ctx.get(), range.data(), range.size_bytes(), &handle));
    return handle;
}
/// Exports all elements of a buffer to other processes on the machine. Throws the exceptions of `export_memory` with a
/// span.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, const buffer<T> &whole, on_error failed = {}) {
    return export_memory(ctx, device_span<const T>(whole), failed);
}

/// Memory of another process that is mapped into this process. It consists of `size()` elements of type `T` and can be
/// the source or destination of transfers.
///
/// Owns the mapping and is move-only. Objects for the same allocation share a mapping. The destructor of the last of
/// these objects blocks until all work that is enqueued in the context so far has finished, and then unmaps the
/// allocation.
template <class T> class imported_memory : public detail::memory_owner<T, detail::released_in<mp_memory_close>> {
  public:
    /// Constructs an object without memory.
    imported_memory() noexcept = default;
    /// Maps the memory that another process has exported with `export_memory`. Blocks at most five seconds, until the
    /// exporting process answers. Bytes at the end that are not a whole `T` are left out. If the handle was exported by
    /// this process, the object refers to the original address.
    ///
    /// Throws `argument_error` for an invalid handle, `not_supported` for a handle from another machine, container or
    /// user, and `configuration_error` for a handle from another version of the library. Throws `peer_gone`,
    /// `timeout`, `driver_error`.
    imported_memory(const context &ctx, const memory_handle &handle, on_error failed = {})
        : imported_memory(ctx.get(), handle, device::automatic(), failed) {}
    /// Maps exported memory with the C handle of a context. Kernels of the device `kernels` access the memory at the
    /// address `in_kernels()`, even if it is on a GPU that is not visible to this process; see `mp_memory_import`.
    /// Throws the exceptions of the constructor above.
    imported_memory(mp_context_t ctx, const memory_handle &handle, device kernels = device::automatic(),
                    on_error failed = {}) {
        void *mapped = nullptr;
        void *address = nullptr;
        std::int32_t where = 0;
        std::uint64_t bytes = 0;
        const mp_status_t outcome = mp_memory_import(ctx, &handle, kernels.id(), &mapped, &where, &address, &bytes);
        if (outcome == MP_SUCCESS) {
            this->own(mapped, {ctx, static_cast<std::size_t>(bytes / sizeof(T)), where});
            in_kernels_ = static_cast<T *>(address);
        }
        failed.report(outcome);
    }

    /// Returns the address of the first element for kernels of the device that was passed as `kernels`. Null if no
    /// device was passed.
    [[nodiscard]] T *in_kernels() const noexcept { return in_kernels_; }

  private:
    T *in_kernels_ = nullptr; ///< address for kernels; valid as long as this object owns the mapping
};

} // namespace mpgpu

#endif // MPGPU_IMPORTED_MEMORY_HPP
