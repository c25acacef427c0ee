// Macros that allow the same source to be compiled as a GPU kernel and as a CPU function.
#pragma once

#if defined(__CUDACC__)
#define MPGPU_HD __host__ __device__
#else
#define MPGPU_HD
#endif

// Prevents unrolling of a loop. A GPU fetches the code of a kernel again at each launch, and a small kernel ends before
// unrolling pays off. Only the device compiler accepts the pragma.
#if defined(__CUDA_ARCH__)
#define MPGPU_ROLLED _Pragma("unroll 1")
#else
#define MPGPU_ROLLED
#endif

// The words in which a copy moves data may alias any object, because a program may pass doubles, structs or any other
// type.
#if defined(__GNUC__) || defined(__clang__) || defined(__CUDACC_RTC__)
#define MPGPU_MAY_ALIAS __attribute__((may_alias))
#else
#error "mpgpu is built with GCC, Clang, nvcc or NVRTC"
#endif
