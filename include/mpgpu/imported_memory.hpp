// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_IMPORTED_MEMORY_HPP
#define MPGPU_IMPORTED_MEMORY_HPP

/// @file
/// Memory of other processes of the node.

#include <mpgpu/buffer.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// A range of memory for another process of the node: 128 bytes that may travel over MPI or anything else. The C
/// struct, trivially copyable; it owns nothing.
using memory_handle = mp_memory_handle_t;

/// Describes memory for other processes of the node, which map it as `imported_memory`. It stays its owner's: it can be
/// mapped until it is freed or the context is destroyed. Throws `argument_error`, `not_supported` for memory that
/// cannot be shared, `driver_error`.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, device_span<T> range, on_error failed = {}) {
    memory_handle handle{};
    failed.report(mp_memory_export(ctx.get(), range.data(), range.size_bytes(), &handle));
    return handle;
}
/// All elements of a buffer.
template <class T>
[[nodiscard]] memory_handle export_memory(const context &ctx, const buffer<T> &whole, on_error failed = {}) {
    return export_memory(ctx, device_span<const T>(whole), failed);
}

/// Memory of another process, mapped here: `size()` elements of `T`, as an end of transfers.
///
/// Owns the mapping, and is move-only. Its destructor, with the last import of an allocation, waits until everything
/// enqueued so far has finished, and unmaps it.
template <class T> class imported_memory : public detail::memory_owner<T, detail::released_in<mp_memory_close>> {
  public:
    /// Owns nothing.
    imported_memory() noexcept = default;
    /// Maps what a handle of `export_memory` describes; bytes at its end that make no whole `T` are left out. A handle
    /// of this process gives the memory's own address. Waits at most five seconds for the exporter's answer. Throws
    /// `argument_error` for bytes that are no handle, `not_supported` for one from another node, container or user,
    /// `configuration_error` for one of another version, `peer_gone`, `timeout`, `driver_error`.
    imported_memory(const context &ctx, const memory_handle &handle, on_error failed = {})
        : imported_memory(ctx.get(), handle, device::automatic(), failed) {}
    /// The same for a context's C handle. For kernels of `kernels`, which have it at `in_kernels()`, it is also mapped
    /// where it is on a GPU that this process does not see: `mp_memory_import` says more. Throws as above.
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

    /// The first element, for kernels of the device that it was mapped for; null where it was mapped for none.
    [[nodiscard]] T *in_kernels() const noexcept { return in_kernels_; }

  private:
    T *in_kernels_ = nullptr; ///< good for as long as this owns the mapping
};

} // namespace mpgpu

#endif // MPGPU_IMPORTED_MEMORY_HPP
