// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_SPAN_HPP
#define MPGPU_SPAN_HPP

/// @file
/// Non-owning views of memory: `array_view`, and `device_span`, which also contains the device.

#include <mpgpu/device.hpp>

#include <cassert>
#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace mpgpu {

/// Non-owning view of a contiguous sequence of elements; a replacement for `std::span`, which C++17 lacks. It can be
/// constructed from an array and from any type with `data()` and `size()`, including `std::span`. It converts to
/// `std::span`. Sizes are in elements. A plain value.
template <class T> class array_view {
    template <class C>
    using element_of = std::remove_pointer_t<decltype(std::declval<C &>().data(), std::declval<C &>().size(),
                                                      std::declval<C &>().data())>;
    template <class C>
    static constexpr bool is_other = !std::is_array_v<std::remove_reference_t<C>> &&
                                     !std::is_same_v<std::remove_cv_t<std::remove_reference_t<C>>, array_view>;

  public:
    /// Element type `T`.
    using element_type = T;
    /// Element type `T` without const.
    using value_type = std::remove_cv_t<T>;

    /// Constructs an empty view.
    constexpr array_view() noexcept = default;
    /// Constructs a view of the `size` elements that begin at `data`.
    constexpr array_view(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// Constructs a view of the elements of an array.
    template <std::size_t N> constexpr array_view(T (&array)[N]) noexcept : data_(array), size_(N) {}

    /// Constructs a view of the elements of a container. The container must outlive the view. A temporary container is
    /// accepted only if the elements are const, for example for a view that is a function argument.
    template <class C, std::enable_if_t<is_other<C> && (std::is_lvalue_reference_v<C> || std::is_const_v<T>), int> = 0,
              std::enable_if_t<std::is_convertible_v<element_of<std::remove_reference_t<C>> (*)[], T (*)[]>, int> = 0>
    constexpr array_view(C &&container) noexcept(noexcept(container.data()))
        : data_(container.data()), size_(container.size()) {}

    /// Constructs a view of the elements of a braced list that is passed as a function argument. The elements are valid
    /// until the call returns.
    template <class U = T, std::enable_if_t<std::is_const_v<U>, int> = 0>
    constexpr array_view(std::initializer_list<value_type> list) noexcept : array_view(list.begin(), list.size()) {}

    /// Returns the address of the first element.
    [[nodiscard]] constexpr T *data() const noexcept { return data_; }
    /// Returns the number of elements.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// Returns the size of the viewed memory in bytes.
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
    /// Returns true if the view has no elements.
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
    /// Returns an iterator to the first element.
    [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
    /// Returns an iterator past the last element.
    [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }

    /// Returns the element at `index`, which must be less than `size()`.
    [[nodiscard]] constexpr T &operator[](std::size_t index) const {
        assert(index < size_);
        return data_[index];
    }

    /// Returns a view of the `count` elements that begin at index `offset`. They must be inside this view.
    [[nodiscard]] constexpr array_view subspan(std::size_t offset, std::size_t count) const {
        assert(offset <= size_ && count <= size_ - offset);
        return array_view(data_ + offset, count);
    }

  private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

/// Non-owning view of elements in the memory of a device, together with that device. It can be the source or
/// destination of a transfer. A plain value.
template <class T> class device_span {
    static_assert(std::is_trivially_copyable_v<T>,
                  "mpgpu: a transfer copies bytes, so the elements must be trivially copyable");

  public:
    /// Element type `T`.
    using element_type = T;

    /// Constructs a view of elements whose memory belongs to the device `location`.
    constexpr device_span(array_view<T> elements, device location) noexcept
        : elements_(elements), location_(location) {}

    /// Constructs a read-only span of the elements of another span.
    template <class U, std::enable_if_t<std::is_same_v<const U, T>, int> = 0>
    constexpr device_span(device_span<U> other) noexcept
        : elements_(other.data(), other.size()), location_(other.location()) {}

    /// Returns the address of the first element.
    [[nodiscard]] constexpr T *data() const noexcept { return elements_.data(); }
    /// Returns the number of elements.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return elements_.size(); }
    /// Returns the size of the viewed memory in bytes.
    [[nodiscard]] constexpr std::size_t size_bytes() const noexcept { return elements_.size_bytes(); }
    /// Returns the device that owns the memory.
    [[nodiscard]] constexpr device location() const noexcept { return location_; }

    /// Returns a span of the `count` elements that begin at index `offset`. They must be inside this span.
    [[nodiscard]] constexpr device_span subspan(std::size_t offset, std::size_t count) const {
        return device_span(elements_.subspan(offset, count), location_);
    }

  private:
    array_view<T> elements_;
    device location_;
};

} // namespace mpgpu

#endif // MPGPU_SPAN_HPP
