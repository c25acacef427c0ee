// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

#include <mpgpu/halo.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

constexpr unsigned threads = 256;
constexpr std::int64_t most_blocks = 4096; // a few for each multiprocessor of the largest GPU; threads go on in strides

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

unsigned blocks_of(const variable &v) {
    return static_cast<unsigned>(std::min((element_count(v.where) + threads - 1) / threads, most_blocks));
}

__global__ void set_kernel(variable v) {
    const std::int64_t elements = element_count(v.where);
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
        v.data[i] = value_before(v.where, i, v.number, v.cycle);
    }
}

__global__ void compare_kernel(variable v, unsigned long long *first_wrong) {
    const std::int64_t elements = element_count(v.where);
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
        if (v.data[i] != value_after(v.where, i, v.number, v.cycle)) {
            atomicMin(first_wrong, static_cast<unsigned long long>(i));
        }
    }
}

void set(const mpgpu::stream &stream, const variable &v) {
    check(cudaSetDevice(v.device), "cudaSetDevice");
    set_kernel<<<blocks_of(v), threads, 0, stream.get()>>>(v);
    check(cudaGetLastError(), "the kernel that sets cells");
}

void compare(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong) {
    check(cudaSetDevice(v.device), "cudaSetDevice");
    compare_kernel<<<blocks_of(v), threads, 0, stream.get()>>>(v, first_wrong);
    check(cudaGetLastError(), "the kernel that compares cells");
}

} // namespace

const device_code on_gpus = {set, compare, mpgpu::halo::cuda_copier, mpgpu::halo::cuda_persistent,
                             mpgpu::halo::cuda_pushed};

bool is_on_gpu(const void *memory) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); // no driver or no GPU: it is remembered as the last error
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
}
