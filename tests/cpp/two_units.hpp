// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_TWO_UNITS_HPP
#define MPGPU_TESTS_TWO_UNITS_HPP

#include <mpgpu/mpgpu.hpp>

/// Plans transfers. This function is defined in a translation unit that is compiled as C++20, and is called from one
/// that is compiled as C++17.
mpgpu::plan plan_elsewhere(const mpgpu::context &ctx, mpgpu::array_view<const mpgpu::transfer> transfers);
const std::error_category &category_elsewhere();

#endif // MPGPU_TESTS_TWO_UNITS_HPP
