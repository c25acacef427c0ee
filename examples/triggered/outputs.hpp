// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP

#include <mpgpu/mpgpu.h>

#include <array>

/// Maximum number of receivers: the other GPUs of a node of eight.
constexpr unsigned most_receivers = 7;

/// Transfers of a kernel's output, as a kernel argument. With `count` 0 the kernel only writes its own memory. All
/// forms use the same kernel, because another one would have other registers and another schedule of the same
/// arithmetic.
struct outputs {
    unsigned count = 0; ///< transfers that move in partitions
    std::array<mp_trigger_t, most_receivers> to{};
};

#endif // MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
