// What lets one source be a GPU kernel and a CPU function.
#pragma once

#if defined(__CUDACC__)
#define MPGPU_HD __host__ __device__
// A loop as it stands. A GPU fetches the code of a kernel anew at each launch, and a small one is over before that
// pays.
#define MPGPU_ROLLED _Pragma("unroll 1")
#else
#define MPGPU_HD
#define MPGPU_ROLLED
#endif

// Words of a copy may alias any object: the bytes that a simulation hands over are doubles, structs, whatever it has.
#if defined(__GNUC__) || defined(__clang__) || defined(__CUDACC_RTC__)
#define MPGPU_MAY_ALIAS __attribute__((may_alias))
#else
#error "mpgpu is built with GCC, Clang, nvcc or NVRTC"
#endif
