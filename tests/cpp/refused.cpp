// SPDX-License-Identifier: MIT OR Apache-2.0
// Code that must not compile. Each compilation selects one case by a macro. The error message of the compiler must
// contain the remedy (CMakeLists.txt).
#include <mpgpu/mpgpu.hpp>
#include <mpgpu/node.hpp>

#include <vector>

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
#else
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
