// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SPAN_HPP
#define MPGPU_SPAN_HPP

/// @file
/// Views of memory that someone else owns: `array_view`, and `device_span`, which knows the device.

#include <mpgpu/device.hpp>

#include <cassert>
#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace mpgpu {

/// A contiguous sequence of elements that someone else owns: the part of `std::span` that C++17 lacks. Made from an
/// array or from anything with `data()` and `size()`, `std::span` included, and convertible to `std::span`. Sizes count
/// elements. Owns nothing; a plain value.
template <class T> class array_view {
    template <class C>
    using element_of = std::remove_pointer_t<decltype(std::declval<C &>().data(), std::declval<C &>().size(),
                                                      std::declval<C &>().data())>;
    template <class C>
    static constexpr bool is_other = !std::is_array_v<std::remove_reference_t<C>> &&
                                     !std::is_same_v<std::remove_cv_t<std::remove_reference_t<C>>, array_view>;

  public:
    /// `T`.
    using element_type = T;
    /// `T` without const.
    using value_type = std::remove_cv_t<T>;

    /// No elements.
    constexpr array_view() noexcept = default;
    /// `size` elements from `data` on.
    constexpr array_view(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// The elements of an array.
    template <std::size_t N> constexpr array_view(T (&array)[N]) noexcept : data_(array), size_(N) {}

    /// The elements of a container. A temporary is accepted only where the elements are const, as a function's
    /// argument.
    template <class C, std::enable_if_t<is_other<C> && (std::is_lvalue_reference_v<C> || std::is_const_v<T>), int> = 0,
              std::enable_if_t<std::is_convertible_v<element_of<std::remove_reference_t<C>> (*)[], T (*)[]>, int> = 0>
    constexpr array_view(C &&container) noexcept(noexcept(container.data()))
        : data_(container.data()), size_(container.size()) {}

    /// The elements of a list in braces, as a function's argument: they live until the call returns.
    template <class U = T, std::enable_if_t<std::is_const_v<U>, int> = 0>
    constexpr array_view(std::initializer_list<value_type> list) noexcept : array_view(list.begin(), list.size()) {}

    /// The first element.
    [[nodiscard]] constexpr T *data() const noexcept { return data_; }
    /// Elements.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// Bytes.
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    /// Whether there are none.
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
    /// The first element.
    [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
    /// Behind the last element.
    [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }

    /// The element at `index`, which must be less than `size()`.
    [[nodiscard]] constexpr T &operator[](std::size_t index) const {
        assert(index < size_);
        return data_[index];
    }

    /// `count` elements from `offset` on, both inside the view.
    [[nodiscard]] constexpr array_view subspan(std::size_t offset, std::size_t count) const {
        assert(offset <= size_ && count <= size_ - offset);
        return array_view(data_ + offset, count);
    }

  private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/// A view and the device whose memory it lies in: one end of a transfer. Owns nothing; a plain value.
template <class T> class device_span {
    static_assert(std::is_trivially_copyable_v<T>, "mpgpu: a transfer copies bytes, so the elements must allow that");

  public:
    /// `T`.
    using element_type = T;

    /// These elements, in memory of this device.
    constexpr device_span(array_view<T> elements, device location) noexcept
        : elements_(elements), location_(location) {}

    /// A read-only view of the same elements.
    template <class U, std::enable_if_t<std::is_same_v<const U, T>, int> = 0>
    constexpr device_span(device_span<U> other) noexcept
        : elements_(other.data(), other.size()), location_(other.location()) {}

    /// The first element.
    [[nodiscard]] constexpr T *data() const noexcept { return elements_.data(); }
    /// Elements.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return elements_.size(); }
    /// Bytes.
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return elements_.size_bytes(); }
    /// The device.
    [[nodiscard]] constexpr device location() const noexcept { return location_; }

    /// `count` elements from `offset` on, both inside the span.
    [[nodiscard]] constexpr device_span subspan(std::size_t offset, std::size_t count) const {
        return device_span(elements_.subspan(offset, count), location_);
    }

  private:
    array_view<T> elements_;
    device location_;
};

} // namespace mpgpu

#endif // MPGPU_SPAN_HPP
