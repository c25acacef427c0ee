// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_HANDLE_HPP
#define MPGPU_DETAIL_HANDLE_HPP

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace mpgpu::detail {

/// Move-only owner of one C handle. Every class that owns a handle has one of these as a member, and therefore needs no
/// destructor or move operations of its own. `Owner` is a function object that releases the handle and contains the
/// values that this requires. The function object is moved together with the handle, so that a moved-from object is
/// completely empty.
template <class T, class Owner> class handle : private Owner {
  public:
    handle() noexcept = default;
    explicit handle(T value, Owner owner = {}) noexcept : Owner(owner), value_(value) {}
    handle(handle &&other) noexcept
        : Owner(std::exchange(static_cast<Owner &>(other), Owner{})), value_(std::exchange(other.value_, nullptr)) {}
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;

    handle &operator=(handle &&other) noexcept {
        handle moved(std::move(other)); // `other` is emptied first, so that a self-move changes nothing
        std::swap(static_cast<Owner &>(*this), static_cast<Owner &>(moved));
        std::swap(value_, moved.value_);
        return *this;
    }

    ~handle() {
        if (value_ != nullptr) {
            static_cast<Owner &> (*this)(value_);
        }
    }

    [[nodiscard]] T get() const noexcept { return value_; }
    [[nodiscard]] const Owner &owner() const noexcept { return *this; }
    [[nodiscard]] Owner &owner() noexcept { return *this; }

    /// Returns the address of the handle, for C functions that write or clear it.
    [[nodiscard]] T *address() noexcept { return &value_; }

    explicit operator bool() const noexcept { return value_ != nullptr; }

  private:
    T value_ = nullptr;
};

/// Function object that destroys a handle with a function whose only argument is the handle.
template <auto Destroy> struct destroyed_by {
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(value)); }
};

/// Function object that destroys a handle with a function whose arguments are the context and the handle.
template <auto Destroy> struct destroyed_in {
    mp_context_t context = nullptr;
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(context, value)); }
};

/// Function object that frees memory from `mp_alloc` and contains the properties of that memory. If a stream is set, it
/// frees the memory in stream order.
struct freed_in {
    mp_context_t context = nullptr;
    std::size_t size = 0;
    std::int32_t device = 0;
    bool has_stream = false;
    mp_stream_t stream = nullptr;
    void operator()(void *memory) const noexcept {
        if (!has_stream || mp_free_async(context, memory, stream) != MP_SUCCESS) {
            static_cast<void>(mp_free(context, memory));
        }
    }
};

/// Function object that closes a mapping of another process's memory or of a file, or removes a registration. It stores
/// the properties of that memory.
template <auto Release> struct released_in {
    mp_context_t context = nullptr;
    std::size_t size = 0;
    std::int32_t device = 0;
    template <class T> void operator()(T memory) const noexcept { static_cast<void>(Release(context, memory)); }
};

} // namespace mpgpu::detail

#endif // MPGPU_DETAIL_HANDLE_HPP
