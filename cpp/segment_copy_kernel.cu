// The fused copy kernel under a name that the driver finds, for loading at run time.
//
// tests/gpu/ptx compiles this file to segment_copy_kernel.ptx, which is part of the source: so a build needs no CUDA
// toolkit, and the driver translates the kernel for whatever GPU it meets.

#include "segment_copy.hpp"

// __grid_constant__ keeps the list in the constant bank, see segment_copy.cu.
extern "C" __global__ void __launch_bounds__(mpgpu::kLanes)
    mpgpu_copy_segments(const __grid_constant__ mpgpu::SegmentList list) {
    mpgpu::copy_segments(list, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

// The same for a list of few segments, whose argument is a quarter as long.
extern "C" __global__ void __launch_bounds__(mpgpu::kLanes)
    mpgpu_copy_few_segments(const __grid_constant__ mpgpu::SegmentListOf<mpgpu::kFewSegments> list) {
    mpgpu::copy_segments(list, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}
