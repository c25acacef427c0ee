// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TRANSFER_HPP
#define MPGPU_TRANSFER_HPP

/// @file
/// Transfers: the copies that a plan executes.

#include <mpgpu/detail/memory_owner.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/span.hpp>

#include <string>
#include <type_traits>

namespace mpgpu {

/// Copy from one memory range to another. A plain value; an alias of the C struct. `make_transfer` creates it from two
/// spans.
using transfer = mp_transfer_t;

/// Returns the transfer that copies all elements of `src` to `dst`. Each of the two is a `buffer`, a
/// `registered_memory`, an `imported_memory` or a `device_span`. `span_of` returns a `device_span` for a container.
/// They must have the same element type and the same number of elements.
///
/// Throws `argument_error` if the numbers differ; `last_error()` does not return this error. If a `std::error_code` is
/// passed instead, the returned transfer has 0 bytes.
template <class Dst, class Src> [[nodiscard]] transfer make_transfer(Dst &&dst, Src &&src, on_error failed = {}) {
    constexpr bool are_ends = detail::is_end<Dst> && detail::is_end<Src>;
    static_assert(
        are_ends,
        "mpgpu: the source and destination of a transfer must be a buffer, an imported_memory or a device_span, which "
        "know their device; for other memory use span_of(container, device::host()), or "
        "device_span<T>({pointer, size}, device::host())");
    if constexpr (are_ends) {
        const auto to = detail::as_device_span(dst);
        const auto from = detail::as_device_span(src);
        using element = typename decltype(to)::element_type;
        static_assert(!std::is_const_v<element>, "mpgpu: the destination of a transfer must not be const");
        static_assert(std::is_same_v<element, std::remove_const_t<typename decltype(from)::element_type>>,
                      "mpgpu: source and destination of a transfer must have the same element type");
        if (to.size() == from.size()) {
            failed.report(MP_SUCCESS);
            return {to.data(), to.location().id(), from.data(), from.location().id(), from.size_bytes()};
        }
        failed.report({status::invalid_argument, 0, "dst",
                       "a transfer of " + std::to_string(from.size()) + " elements (" +
                           std::to_string(from.size_bytes()) + " bytes) into a destination of " +
                           std::to_string(to.size()) + " (" + std::to_string(to.size_bytes()) +
                           " bytes): take a subspan, so that both have the same size"});
    }
    return {};
}

} // namespace mpgpu

#endif // MPGPU_TRANSFER_HPP
