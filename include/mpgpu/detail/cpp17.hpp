// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_CPP17_HPP
#define MPGPU_DETAIL_CPP17_HPP

#if __cplusplus < 201703L
#error "mpgpu: the C++ headers need C++17: -std=c++17, in CMake target_compile_features(app PRIVATE cxx_std_17)"
#endif

#endif // MPGPU_DETAIL_CPP17_HPP
