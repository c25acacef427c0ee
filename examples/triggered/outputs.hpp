// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP

#include <mpgpu/mpgpu.h>

#include <array>

/// Maximum number of receivers of a kernel's output: the other GPUs of a node of eight.
constexpr unsigned most_receivers = 7;

/// Transfers of a kernel's output, as an argument of the kernel. If `count` is 0, the kernel only writes its own
/// memory. All forms use the same kernel, because the compiler would allocate registers and schedule the arithmetic
/// differently in another kernel.
struct outputs {
    unsigned count = 0; ///< number of transfers in partitions
    std::array<mp_trigger_t, most_receivers> to{};
};

#endif // MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
