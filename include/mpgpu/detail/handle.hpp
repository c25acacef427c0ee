// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_HANDLE_HPP
#define MPGPU_DETAIL_HANDLE_HPP

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace mpgpu::detail {

/// Move-only ownership of one C handle. Every owning type has one of these as its only member and no special member
/// functions of its own. `Owner` is called with the handle to release it and holds the values that this requires. It
/// moves with the handle, so that a moved-from object is completely empty.
template <class T, class Owner> class handle : private Owner {
  public:
    handle() noexcept = default;
    explicit handle(T value, Owner owner = {}) noexcept : Owner(owner), value_(value) {}
    handle(handle &&other) noexcept
        : Owner(std::exchange(static_cast<Owner &>(other), Owner{})), value_(std::exchange(other.value_, nullptr)) {}
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;

    handle &operator=(handle &&other) noexcept {
        handle moved(std::move(other)); // empties `other` first, so that moving an object into itself changes nothing
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

    /// Returns the address at which a C function writes or clears the handle.
    [[nodiscard]] T *address() noexcept { return &value_; }

    explicit operator bool() const noexcept { return value_ != nullptr; }

  private:
    T value_ = nullptr;
};

/// Owner of a handle whose destroy function takes only the handle.
template <auto Destroy> struct destroyed_by {
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(value)); }
};

/// Owner of a handle whose destroy function also takes the context.
template <auto Destroy> struct destroyed_in {
    mp_context_t context = nullptr;
    template <class T> void operator()(T value) const noexcept { static_cast<void>(Destroy(context, value)); }
};

/// Owner of memory from `mp_alloc`, with its properties. Frees it in stream order if a stream is set.
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

/// Owner of a mapping of another process's memory, or of a registration, with the properties of that memory.
template <auto Release> struct released_in {
    mp_context_t context = nullptr;
    std::size_t size = 0;
    std::int32_t device = 0;
    void operator()(void *memory) const noexcept { static_cast<void>(Release(context, memory)); }
};

} // namespace mpgpu::detail

#endif // MPGPU_DETAIL_HANDLE_HPP
