// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_CONTAINER_HPP
#define MPGPU_CONTAINER_HPP

/// @file
/// Contiguous containers as sources and destinations of transfers: `span_of`.

#include <mpgpu/error.hpp>
#include <mpgpu/span.hpp>

#include <cstddef>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

namespace mpgpu {
namespace detail {

/// Returns the pointer itself.
template <class T> constexpr T *raw_pointer(T *pointer) noexcept {
    return pointer;
}
/// Returns the address in an object of a pointer class, such as `thrust::device_ptr`.
template <class P, std::enable_if_t<std::is_pointer_v<decltype(std::declval<const P &>().get())>, int> = 0>
constexpr auto raw_pointer(const P &pointer) noexcept(noexcept(pointer.get())) {
    return pointer.get();
}

/// Returns the address of the first element of a container. The last parameter is a priority tag: for the argument 0,
/// this overload is preferred to that for `data_handle()`.
template <class C>
constexpr auto first_of(C &container, int /*preferred*/) -> decltype(raw_pointer(std::data(container))) {
    return raw_pointer(std::data(container));
}
/// Returns the address of the first element of a container with `data_handle()`, such as `std::mdspan`.
template <class C>
constexpr auto first_of(C &container, long /*otherwise*/) -> decltype(raw_pointer(container.data_handle())) {
    return raw_pointer(container.data_handle());
}

/// Returns true if the elements of a container with `span_is_contiguous()`, such as `Kokkos::View`, are contiguous. The
/// last parameter is a priority tag: for the argument 0, this overload is preferred to that for `is_exhaustive()`.
template <class C>
constexpr auto is_contiguous(const C &c, int /*preferred*/) -> decltype(bool(c.span_is_contiguous())) {
    return c.span_is_contiguous();
}
/// Returns true if the elements of a container with `is_exhaustive()`, such as `std::mdspan`, are contiguous.
template <class C> constexpr auto is_contiguous(const C &c, long /*otherwise*/) -> decltype(bool(c.is_exhaustive())) {
    return c.is_exhaustive();
}
/// Returns true. The elements of a container with neither function are contiguous.
template <class C> constexpr bool is_contiguous(const C & /*c*/, ...) noexcept {
    return true;
}

/// Element type of a type without `size()`, which is not a container.
template <class C, class = void> struct element_in {
    /// No element type.
    using type = void;
};
/// Element type of a type with `size()`.
template <class C> struct element_in<C, std::void_t<decltype(std::size(std::declval<C &>()))>> {
  private:
    template <class D> static auto address(D &c) -> decltype(first_of(c, 0));
    static void *address(...);

  public:
    /// Element type, or `void` if neither `data()` nor `data_handle()` returns the address of elements.
    using type = std::remove_pointer_t<decltype(address(std::declval<C &>()))>;
};
/// Element type of a contiguous container, const if the elements cannot be modified. `void` for other types.
template <class C> using element_in_t = typename element_in<C>::type;

/// True for views such as `std::span`: a const view does not make its elements const. False for containers that own
/// their elements.
template <class C>
inline constexpr bool is_view = std::is_same_v<element_in_t<std::remove_const_t<C>>, element_in_t<const C>>;

} // namespace detail

/// Returns the elements of a contiguous container in memory of the device `location`. The result can be the source or
/// destination of a transfer, or a field of a halo exchange. If the elements are const, it can only be a source.
///
/// The container must have `size()`, and `data()` or `data_handle()`. This function returns a pointer, or an object
/// whose `get()` returns a pointer. The `size()` elements begin at this address. Examples are arrays, `std::vector`,
/// `std::span`, `std::mdspan`, `Kokkos::View` and `thrust::device_vector`. The container must outlive the transfers.
///
/// Throws `argument_error` if `span_is_contiguous()` (Kokkos) or `is_exhaustive()` (`std::mdspan`) of the container
/// returns false. The error is not recorded for `last_error()`. If a `std::error_code` is passed as the last argument,
/// the function stores the error there and returns an empty span.
template <class C> [[nodiscard]] auto span_of(C &&container, device location, on_error failed = {}) {
    using type = std::remove_reference_t<C>;
    using element = detail::element_in_t<type>;
    static_assert(
        !std::is_void_v<element>,
        "mpgpu: span_of needs a contiguous container with size(), and with a data() that returns a pointer to "
        "elements of a type other than void; copy the elements to such a container, for example a "
        "std::vector (not std::vector<bool>)");
    if constexpr (!std::is_void_v<element>) {
        static_assert(std::is_lvalue_reference_v<C> || detail::is_view<type>,
                      "mpgpu: a temporary container is destroyed before a transfer runs; store it in a variable");
        const auto size = static_cast<std::size_t>(std::size(container));
        if (detail::is_contiguous(container, 0)) {
            failed.report(MP_SUCCESS);
            return device_span<element>({detail::first_of(container, 0), size}, location);
        }
        failed.report({status::invalid_argument, 0, "container",
                       "a view of " + std::to_string(size) +
                           " elements that are not contiguous in memory: pass its contiguous parts one by one, such as "
                           "rows or columns, or copy the elements to a contiguous container"});
        return device_span<element>({nullptr, 0}, location);
    } else {
        return device_span<std::byte>({nullptr, 0}, location);
    }
}

} // namespace mpgpu

#endif // MPGPU_CONTAINER_HPP
