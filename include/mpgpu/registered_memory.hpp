// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_REGISTERED_MEMORY_HPP
#define MPGPU_REGISTERED_MEMORY_HPP

/// @file
/// Host memory of the program's own that copies reach where it lies.

#include <mpgpu/context.hpp>
#include <mpgpu/detail/memory_owner.hpp>

#include <cstddef>
#include <cstdint>

namespace mpgpu {

/// Host memory of the program's own, pinned for as long as this lives: `size()` elements of `T`, as an end of
/// transfers.
///
/// @code
/// std::vector<double> cells(n);
/// mpgpu::registered_memory<double> pinned(ctx, cells);
/// mpgpu::plan load(ctx, {mpgpu::make_transfer(on_gpu, pinned)});
/// @endcode
///
/// Owns the registration, not the memory, which must stay mapped meanwhile, and is move-only. Its destructor waits
/// until everything enqueued so far has finished, and unpins it.
template <class T> class registered_memory : public detail::memory_owner<T, detail::released_in<mp_memory_unregister>> {
  public:
    /// Has registered nothing.
    registered_memory() noexcept = default;
    /// Pins `own`; in huge pages where `huge_pages` and the system has them. Blocks while threads bring its pages
    /// in: `mp_memory_register` says more. Throws `argument_error` for memory of a device, for what is pinned already
    /// and for what is no memory, `not_supported`, `out_of_memory`, `driver_error`.
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
