// SPDX-License-Identifier: MIT OR Apache-2.0
// Code that must not compile. Each compilation selects one case by a macro. The error message of the compiler must
// contain the remedy (CMakeLists.txt).
#include <mpgpu/mpgpu.hpp>
#include <mpgpu/node.hpp>

#include <cstddef>
#include <list>
#include <string>
#include <utility>
#include <vector>

/// Memory whose `data()` returns `void *`, as that of `rmm::device_buffer`.
struct bytes_without_type {
    [[nodiscard]] void *data() const { return nullptr; }
    [[nodiscard]] std::size_t size() const { return 0; }
};

void refused(std::vector<double> &values, double *pointer, mpgpu::buffer<double> &memory,
             const mpgpu::buffer<double> &constant);

void refused([[maybe_unused]] std::vector<double> &values, [[maybe_unused]] double *pointer,
             [[maybe_unused]] mpgpu::buffer<double> &memory, [[maybe_unused]] const mpgpu::buffer<double> &constant) {
#if defined(TRANSFER_OF_A_VECTOR)
    static_cast<void>(mpgpu::make_transfer(memory, values));
#elif defined(TRANSFER_OF_A_POINTER)
    static_cast<void>(mpgpu::make_transfer(pointer, memory));
#elif defined(SEND_OF_A_VECTOR)
    static_cast<void>(mpgpu::send_to(1, 7, values));
#elif defined(RECEIVE_INTO_A_VECTOR)
    static_cast<void>(mpgpu::receive_from(1, 7, values));
#elif defined(RECEIVE_INTO_A_CONSTANT)
    static_cast<void>(mpgpu::receive_from(1, 7, constant));
#elif defined(SPAN_OF_A_LIST)
    std::list<double> list(3);
    static_cast<void>(mpgpu::span_of(list, mpgpu::device::host()));
#elif defined(SPAN_OF_BITS)
    std::vector<bool> bits(3);
    static_cast<void>(mpgpu::span_of(bits, mpgpu::device::host()));
#elif defined(SPAN_OF_A_POINTER)
    static_cast<void>(mpgpu::span_of(pointer, mpgpu::device::host()));
#elif defined(SPAN_OF_BYTES_WITHOUT_TYPE)
    bytes_without_type bytes;
    static_cast<void>(mpgpu::span_of(bytes, mpgpu::device::host()));
#elif defined(SPAN_OF_STRINGS)
    std::vector<std::string> strings(3);
    static_cast<void>(mpgpu::span_of(strings, mpgpu::device::host()));
#elif defined(SPAN_OF_A_TEMPORARY)
    static_cast<void>(mpgpu::span_of(std::vector<double>(3), mpgpu::device::host()));
#elif defined(SPAN_OF_A_CONST_TEMPORARY)
    static_cast<void>(mpgpu::span_of(std::move(std::as_const(values)), mpgpu::device::host()));
#elif defined(TRANSFER_INTO_A_CONSTANT)
    static_cast<void>(mpgpu::make_transfer(mpgpu::span_of(std::as_const(values), mpgpu::device::host()), memory));
#elif defined(TRANSFER_OF_OTHER_ELEMENTS)
    std::vector<float> singles(3);
    static_cast<void>(mpgpu::make_transfer(memory, mpgpu::span_of(singles, mpgpu::device::host())));
#else
    static_cast<void>(mpgpu::make_transfer(mpgpu::span_of(values, mpgpu::device::host()), memory));
    static_cast<void>(mpgpu::make_transfer(memory, mpgpu::span_of(std::as_const(values), mpgpu::device::host())));
    static_cast<void>(mpgpu::make_transfer(memory, constant));
    static_cast<void>(mpgpu::send_to(1, 7, constant));
    static_cast<void>(mpgpu::send_to(1, 7, memory.subspan(0, 1)));
    static_cast<void>(mpgpu::receive_from(1, 7, memory));
    static_cast<void>(mpgpu::receive_from(1, 7, memory.subspan(0, 1)));
    const mpgpu::device_span<double> whole = memory;
    static_cast<void>(mpgpu::receive_from(1, 7, whole));
    static_cast<void>(mpgpu::send_to(1, 7, whole));
#endif
}
