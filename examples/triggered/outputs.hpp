// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP

#include <mpgpu/mpgpu.h>

#include <array>

/// The other GPUs of a node of eight.
constexpr unsigned most_receivers = 7;

/// What a kernel is told of the transfers of what it makes. With `count` 0 it just writes its own memory: the kernel is
/// the same in all forms, because another one has other registers, and another schedule of the same arithmetic.
struct outputs {
    unsigned count = 0; ///< transfers that move in partitions
    std::array<mp_trigger_t, most_receivers> to{};
};

#endif // MPGPU_EXAMPLES_TRIGGERED_OUTPUTS_HPP
