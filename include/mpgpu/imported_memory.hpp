// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_IMPORTED_MEMORY_HPP
#define MPGPU_IMPORTED_MEMORY_HPP

/// @file
/// Memory of other processes on the same machine, mapped into this process.

#include <mpgpu/buffer.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Handle with which another process on the machine can map a memory range: 128 bytes that can travel over MPI or any
/// other channel. Trivially copyable; owns nothing. The C struct.
using memory_handle = mp_memory_handle_t;

/// Exports memory to other processes on the machine, which map it as `imported_memory`. The owner keeps the memory;
/// others can map it until it is freed or the context is destroyed. Throws `argument_error`, `not_supported` for memory
/// that cannot be shared, `driver_error`.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, device_span<T> range, on_error failed = {}) {
    memory_handle handle{};
    failed.report(mp_memory_export(ctx.get(), range.data(), range.size_bytes(), &handle));
    return handle;
}
/// Exports all elements of a buffer.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, const buffer<T> &whole, on_error failed = {}) {
    return export_memory(ctx, device_span<const T>(whole), failed);
}

/// Memory of another process, mapped into this one. It consists of `size()` elements of type `T` and can be the source
/// or destination of transfers.
///
/// Owns the mapping and is move-only. The destructor of the last import of an allocation waits until all work enqueued
/// so far has finished, and unmaps the allocation.
template <class T> class imported_memory : public detail::memory_owner<T, detail::released_in<mp_memory_close>> {
  public:
    /// Constructs an empty mapping.
    imported_memory() noexcept = default;
    /// Maps the memory that another process has exported with `export_memory`. Bytes at its end that do not form a
    /// whole `T` are left out. If the handle was exported by this process, the object refers to the original address.
    /// Waits at most five seconds for the exporter's answer. Throws `argument_error` for an invalid handle,
    /// `not_supported` for a handle from another node, container or user, `configuration_error` for a handle of another
    /// version, `peer_gone`, `timeout`, `driver_error`.
    imported_memory(const context &ctx, const memory_handle &handle, on_error failed = {})
        : imported_memory(ctx.get(), handle, device::automatic(), failed) {}
    /// Maps exported memory, for code that has the context's C handle only. Kernels of the device `kernels` access it
    /// at `in_kernels()`, even if it is on a GPU that is not visible to this process; see `mp_memory_import`. Throws
    /// the exceptions of the constructor above.
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
    T *in_kernels_ = nullptr; ///< valid for as long as this object owns the mapping
};

} // namespace mpgpu

#endif // MPGPU_IMPORTED_MEMORY_HPP
