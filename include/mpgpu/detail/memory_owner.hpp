// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_MEMORY_OWNER_HPP
#define MPGPU_DETAIL_MEMORY_OWNER_HPP

#include <mpgpu/detail/handle.hpp>
#include <mpgpu/span.hpp>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace mpgpu::detail {

/// Base class of `buffer`, `imported_memory` and `registered_memory`. It owns `size()` elements of type `T` in the
/// memory of one device, which `Owner` releases. It can be moved, but not copied. A moved-from object is empty.
template <class T, class Owner> class memory_owner {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_const_v<T>,
                  "mpgpu: elements must be trivially copyable, because they are copied as bytes");

  public:
    /// Element type `T`.
    using element_type = T;

    /// Returns the address of the first element. The CPU cannot access GPU memory of the CUDA backend.
    [[nodiscard]] T *data() noexcept { return handle_.get(); }
    /// Returns the address of the first element. The CPU cannot access GPU memory of the CUDA backend.
    [[nodiscard]] const T *data() const noexcept { return handle_.get(); }
    /// Returns the number of elements. It is 0 if the object is empty.
    [[nodiscard]] std::size_t size() const noexcept { return handle_.owner().size; }
    /// Returns the size of the memory in bytes.
    [[nodiscard]] std::size_t size_bytes() const noexcept { return size() * sizeof(T); }
    /// Returns the device that owns the memory, in the numbering of this process. The object must not be empty.
    [[nodiscard]] device location() const noexcept { return device::from_id(handle_.owner().device); }
    /// Returns true if this object owns memory.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

    /// Returns a view of all elements, for use as the source or destination of a transfer.
    operator device_span<T>() noexcept { return {{data(), size()}, location()}; }
    /// Returns a read-only view of all elements, for use as the source of a transfer.
    operator device_span<const T>() const noexcept { return {array_view<const T>(data(), size()), location()}; }

    /// Returns a view of the `count` elements that begin at index `offset`, for use as the source or destination of a
    /// transfer. They must be inside the memory.
    [[nodiscard]] device_span<T> subspan(std::size_t offset, std::size_t count) {
        return device_span<T>(*this).subspan(offset, count);
    }
    /// Returns a read-only view of the `count` elements that begin at index `offset`, for use as the source of a
    /// transfer. They must be inside the memory.
    [[nodiscard]] device_span<const T> subspan(std::size_t offset, std::size_t count) const {
        return device_span<const T>(*this).subspan(offset, count);
    }

  protected:
    /// Takes ownership of memory, and releases the memory that this object owned before.
    void own(void *data, Owner owner) noexcept { handle_ = handle<T *, Owner>(static_cast<T *>(data), owner); }

    /// Returns the object that releases the memory.
    [[nodiscard]] Owner &owner() noexcept { return handle_.owner(); }

  private:
    handle<T *, Owner> handle_;
};

template <class T> device_span<T> as_device_span(device_span<T> whole) noexcept {
    return whole;
}
template <class T, class Owner> device_span<T> as_device_span(memory_owner<T, Owner> &whole) noexcept {
    return whole;
}
template <class T, class Owner> device_span<const T> as_device_span(const memory_owner<T, Owner> &whole) noexcept {
    return whole;
}

/// True if an lvalue of the type can be passed to `as_device_span`, so that it can be a source or destination.
template <class End, class = void> inline constexpr bool is_end = false;
template <class End>
inline constexpr bool
    is_end<End, std::void_t<decltype(as_device_span(std::declval<std::remove_reference_t<End> &>()))>> = true;

} // namespace mpgpu::detail

#endif // MPGPU_DETAIL_MEMORY_OWNER_HPP
