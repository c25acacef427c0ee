// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_REGISTERED_MEMORY_HPP
#define MPGPU_REGISTERED_MEMORY_HPP

/// @file
/// Host memory that the program has allocated, registered so that copies access it directly.

#include <mpgpu/context.hpp>
#include <mpgpu/detail/memory_owner.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Host memory that the program has allocated and that is pinned for as long as this object exists. It consists of
/// `size()` elements of type `T` and can be the source or destination of transfers.
///
/// @code
/// std::vector<double> cells(n);
/// mpgpu::registered_memory<double> pinned(ctx, cells);
/// mpgpu::plan load(ctx, {mpgpu::make_transfer(on_gpu, pinned)});
/// @endcode
///
/// Owns the registration and is move-only. Does not own the memory, which must stay mapped. The destructor blocks until
/// all work that is enqueued in the context so far has finished, and then unpins the memory.
template <class T> class registered_memory : public detail::memory_owner<T, detail::released_in<mp_memory_unregister>> {
  public:
    /// Constructs an object that pins no memory.
    registered_memory() noexcept = default;
    /// Pins the memory of the elements `own`. If `huge_pages` is true, huge pages are used if the system supports them.
    /// Blocks while threads of the library make the pages resident; see `mp_memory_register`.
    ///
    /// Throws `argument_error` for device memory, for memory that is already pinned, and for unmapped addresses. Throws
    /// `not_supported`, `out_of_memory`, `driver_error`.
    registered_memory(const context &ctx, array_view<T> own, bool huge_pages = false, on_error failed = {}) {
        const mp_status_t outcome =
            mp_memory_register(ctx.get(), own.data(), own.size() * sizeof(T), huge_pages ? 1 : 0);
        if (outcome == MP_SUCCESS) {
            this->own(own.data(), {ctx.get(), own.size(), MP_DEVICE_HOST});
        }
        failed.report(outcome);
    }
};

} // namespace mpgpu

#endif // MPGPU_REGISTERED_MEMORY_HPP
