// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests `span_of`: containers as sources and destinations of copies on virtual devices. Types of this file have the
// members of containers of Kokkos and Thrust, and of std::mdspan. refused.cpp tests what must not compile.
#include <mpgpu/mpgpu.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if __cplusplus > 201703L
#include <span>
#endif

namespace {

using mpgpu::device;
using mpgpu::device_span;

/// Pointer to elements in device memory, with the members of `thrust::device_ptr`.
template <class T> class fancy_pointer {
  public:
    explicit fancy_pointer(T *address) : address_(address) {}
    [[nodiscard]] T *get() const { return address_; }

  private:
    T *address_;
};

/// Container with the members of `thrust::device_vector`.
template <class T> class thrust_like_vector {
  public:
    explicit thrust_like_vector(std::size_t size) : elements_(size) {}
    [[nodiscard]] fancy_pointer<T> data() { return fancy_pointer<T>(elements_.data()); }
    [[nodiscard]] fancy_pointer<const T> data() const { return fancy_pointer<const T>(elements_.data()); }
    [[nodiscard]] std::size_t size() const { return elements_.size(); }

  private:
    std::vector<T> elements_;
};

/// Two-dimensional view with the members of `Kokkos::View`. Newer versions of Kokkos also have those of `std::mdspan`.
template <class T> struct kokkos_like_view {
    T *address;
    std::array<std::size_t, 2> extents;
    std::array<std::size_t, 2> strides;

    [[nodiscard]] T *data() const { return address; }
    [[nodiscard]] T *data_handle() const { return address; }
    [[nodiscard]] std::size_t size() const { return extents[0] * extents[1]; }
    [[nodiscard]] std::size_t stride(std::size_t dimension) const { return strides.at(dimension); }
    [[nodiscard]] bool span_is_contiguous() const { return strides[1] == 1 && strides[0] == extents[1]; }
};

/// Two-dimensional view with the members of `std::mdspan`. Sizes are signed, as with `std::extents<int, 2, 3>`.
template <class T> struct mdspan_like {
    T *address;
    std::array<std::int32_t, 2> extents;
    std::array<std::int32_t, 2> strides;

    [[nodiscard]] T *data_handle() const { return address; }
    [[nodiscard]] std::int32_t size() const { return extents[0] * extents[1]; }
    [[nodiscard]] std::int32_t stride(std::size_t dimension) const { return strides.at(dimension); }
    [[nodiscard]] bool is_exhaustive() const { return strides[1] == 1 && strides[0] == extents[1]; }
};

/// Copies 0, 1, 2 and so on through GPU 1 into a container, and checks the addresses and the size of its span.
template <class C> void arrives_in(C &&container, const int *first, std::size_t size) {
    const device_span<int> whole = mpgpu::span_of(container, device::host());
    CHECK(whole.data() == first);
    CHECK(whole.size() == size);
    CHECK(whole.location() == device::host());

    std::vector<int> numbers(size);
    std::iota(numbers.begin(), numbers.end(), 0);
    const mpgpu::context ctx;
    const mpgpu::stream stream(ctx, device::gpu(1));
    mpgpu::buffer<int> between(ctx, device::gpu(1), size);
    const auto copy = [&](const mpgpu::transfer &one) { mpgpu::plan(ctx, {one}).execute(stream).synchronize(); };
    copy(mpgpu::make_transfer(between, mpgpu::span_of(std::as_const(numbers), device::host())));
    copy(mpgpu::make_transfer(mpgpu::span_of(container, device::host()), between));
    CHECK(std::vector<int>(first, first + size) == numbers);
}

// Const containers can only be sources.
template <class C> using span_in = decltype(mpgpu::span_of(std::declval<C>(), device::host()));
static_assert(std::is_same_v<span_in<std::vector<int> &>, device_span<int>>);
static_assert(std::is_same_v<span_in<const std::vector<int> &>, device_span<const int>>);
static_assert(std::is_same_v<span_in<const int (&)[3]>, device_span<const int>>);
static_assert(std::is_same_v<span_in<const thrust_like_vector<int> &>, device_span<const int>>);
static_assert(std::is_same_v<span_in<const std::string &>, device_span<const char>>);

// Const applies to a view and not to its elements. Temporary views are accepted.
static_assert(std::is_same_v<span_in<const kokkos_like_view<int> &>, device_span<int>>);
static_assert(std::is_same_v<span_in<kokkos_like_view<int>>, device_span<int>>);
static_assert(std::is_same_v<span_in<mdspan_like<const int>>, device_span<const int>>);
static_assert(std::is_same_v<span_in<mpgpu::array_view<int>>, device_span<int>>);
#if __cplusplus > 201703L
static_assert(std::is_same_v<span_in<std::span<int>>, device_span<int>>);
static_assert(std::is_same_v<span_in<std::span<const int, 4>>, device_span<const int>>);
#endif

} // namespace

TEST_CASE("containers with data() and size() are ends of a copy") {
    std::vector<int> values(6);
    arrives_in(values, values.data(), 6);
    std::array<int, 5> fixed{};
    arrives_in(fixed, fixed.data(), 5);
    int plain[4] = {};
    arrives_in(plain, plain, 4);
    arrives_in(mpgpu::array_view<int>(plain), plain, 4);
#if __cplusplus > 201703L
    arrives_in(std::span(values).subspan(1, 3), values.data() + 1, 3);
#endif
}

TEST_CASE("a pointer class is resolved to the address in it") {
    thrust_like_vector<int> values(7);
    arrives_in(values, values.data().get(), 7);
}

TEST_CASE("contiguous views in two dimensions are ends of a copy") {
    std::vector<int> memory(12);
    arrives_in(kokkos_like_view<int>{memory.data(), {3, 4}, {4, 1}}, memory.data(), 12);
    arrives_in(mdspan_like<int>{memory.data() + 2, {2, 5}, {5, 1}}, memory.data() + 2, 10);
}

TEST_CASE("a view of separate rows is refused, with its size and the remedy") {
    std::vector<int> memory(12);
    const auto refused = [](const auto &view) {
        try {
            static_cast<void>(mpgpu::span_of(view, device::host()));
            FAIL("no exception");
        } catch (const mpgpu::argument_error &e) {
            CHECK(e.argument() == "container");
            const std::string what = e.what();
            CHECK(what.find("a view of 6 elements that are not contiguous in memory") != std::string::npos);
            CHECK(what.find("one by one") != std::string::npos);
        }
        std::error_code ec;
        CHECK(mpgpu::span_of(view, device::host(), ec).size() == 0);
        CHECK(ec == mpgpu::status::invalid_argument);
    };
    refused(kokkos_like_view<int>{memory.data(), {3, 2}, {4, 1}});
    refused(mdspan_like<int>{memory.data(), {3, 2}, {4, 1}});
    refused(mdspan_like<const int>{memory.data(), {2, 3}, {1, 4}});

    std::error_code ec = mpgpu::make_error_code(mpgpu::status::timeout);
    CHECK(mpgpu::span_of(memory, device::host(), ec).size() == 12);
    CHECK_FALSE(ec);
}

TEST_CASE("containers of different sizes are refused, with both sizes in bytes") {
    std::vector<double> five(5);
    std::array<double, 7> seven{};
    try {
        static_cast<void>(
            mpgpu::make_transfer(mpgpu::span_of(seven, device::host()), mpgpu::span_of(five, device::host())));
        FAIL("no exception");
    } catch (const mpgpu::argument_error &e) {
        const std::string what = e.what();
        CHECK(what.find("5 elements (40 bytes)") != std::string::npos);
        CHECK(what.find("destination of 7 (56 bytes)") != std::string::npos);
    }
}

TEST_CASE("an empty container has no elements") {
    std::vector<int> none;
    CHECK(mpgpu::span_of(none, device::gpu(1)).size() == 0);
    CHECK(mpgpu::span_of(none, device::gpu(1)).location() == device::gpu(1));
}
