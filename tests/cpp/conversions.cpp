// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests which code compiles and which does not. The compiler checks this, so building this file is the test.
#include <mpgpu/mpgpu.hpp>

#include <array>
#include <type_traits>
#include <vector>

namespace {

using mpgpu::array_view;
using mpgpu::buffer;
using mpgpu::device;
using mpgpu::device_span;
using mpgpu::stream;
using mpgpu::stream_view;

template <class T>
constexpr bool move_only =
    std::is_nothrow_move_constructible_v<T> &&std::is_nothrow_move_assignable_v<T>
        &&std::is_nothrow_destructible_v<T> && !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(move_only<mpgpu::context>);
static_assert(move_only<mpgpu::plan>);
static_assert(move_only<mpgpu::request>);
static_assert(move_only<mpgpu::stream>);
static_assert(move_only<mpgpu::event>);
static_assert(move_only<buffer<double>>);
static_assert(move_only<mpgpu::imported_memory<double>>);

// Objects of these classes can be members of a class, and are empty until a value is moved into them.
template <class... T> constexpr bool can_be_empty = (std::is_nothrow_default_constructible_v<T> && ...);
static_assert(
    can_be_empty<mpgpu::plan, mpgpu::request, stream, mpgpu::event, mpgpu::node, mpgpu::messenger,
                 mpgpu::message_request, mpgpu::signal_counters, buffer<double>, mpgpu::imported_memory<double>>);

// A stream view cannot be created from a number, a null pointer or a temporary.
static_assert(std::is_convertible_v<mp_stream_t, stream_view>);
static_assert(std::is_convertible_v<stream &, stream_view>);
static_assert(std::is_convertible_v<const stream &, stream_view>);
static_assert(!std::is_constructible_v<stream_view, int>);
static_assert(!std::is_constructible_v<stream_view, long>);
static_assert(!std::is_constructible_v<stream_view, bool>);
static_assert(!std::is_constructible_v<stream_view, std::nullptr_t>);
static_assert(!std::is_constructible_v<stream_view, void *>);
static_assert(!std::is_default_constructible_v<stream_view>);
static_assert(!std::is_convertible_v<stream &&, stream_view>);
static_assert(std::is_trivially_copyable_v<stream_view> && sizeof(stream_view) == sizeof(mp_stream_t));

// A device cannot be created from a number, so that a wrong index never becomes a device.
static_assert(!std::is_convertible_v<int, device>);
static_assert(!std::is_constructible_v<device, int>);
static_assert(device::gpu(3).id() == 3 && !device::gpu(3).is_host());
static_assert(device::host().id() == MP_DEVICE_HOST && device::host(2).id() == MP_DEVICE_HOST_NUMA(2));
static_assert(device::automatic().id() == MP_DEVICE_AUTO && device::automatic() != device::gpu(-1) &&
              device::automatic() != device::host(-1));
static_assert(!device::gpu(-1).is_host() && device::host(-1).is_host());
static_assert(device::gpu(-1) != device::gpu(0) && device::host(-1) != device::host(0));

// Spans can be created from containers and can be converted to const, but not from const to non-const. A writable span
// cannot be created from a temporary.
static_assert(std::is_constructible_v<array_view<float>, std::vector<float> &>);
static_assert(std::is_constructible_v<array_view<const float>, const std::vector<float> &>);
static_assert(std::is_constructible_v<array_view<const float>, std::vector<float>>);
static_assert(std::is_constructible_v<array_view<const float>, array_view<float>>);
static_assert(std::is_constructible_v<array_view<float>, std::array<float, 4> &>);
static_assert(std::is_constructible_v<array_view<float>, float (&)[4]>);
static_assert(!std::is_constructible_v<array_view<float>, const std::vector<float> &>);
static_assert(!std::is_constructible_v<array_view<float>, std::vector<float>>);
static_assert(!std::is_constructible_v<array_view<float>, array_view<const float>>);
static_assert(!std::is_constructible_v<array_view<float>, std::vector<double> &>);

static_assert(std::is_convertible_v<buffer<int> &, device_span<int>>);
static_assert(std::is_convertible_v<const buffer<int> &, device_span<const int>>);
static_assert(std::is_convertible_v<device_span<int>, device_span<const int>>);
static_assert(!std::is_convertible_v<const buffer<int> &, device_span<int>>);
static_assert(!std::is_convertible_v<device_span<const int>, device_span<int>>);

// Exceptions can be copied while another exception is in flight, and can be caught as their base class.
static_assert(std::is_base_of_v<std::runtime_error, mpgpu::error>);
static_assert(std::is_nothrow_copy_constructible_v<mpgpu::error>);
static_assert(std::is_base_of_v<mpgpu::error, mpgpu::out_of_memory>);
static_assert(std::is_error_code_enum_v<mpgpu::status>);

// A call reports errors only to a std::error_code that outlives the call.
static_assert(std::is_convertible_v<std::error_code &, mpgpu::on_error>);
static_assert(!std::is_convertible_v<std::error_code, mpgpu::on_error>);
static_assert(!std::is_convertible_v<const std::error_code &, mpgpu::on_error>);
static_assert(!std::is_convertible_v<std::nullptr_t, mpgpu::on_error> && !std::is_convertible_v<bool, mpgpu::on_error>);

// Spans of a braced list are read-only.
static_assert(std::is_constructible_v<array_view<const int>, std::initializer_list<int>>);
static_assert(!std::is_constructible_v<array_view<int>, std::initializer_list<int>>);

} // namespace
