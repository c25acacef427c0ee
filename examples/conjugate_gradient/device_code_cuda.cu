// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

#include <mpgpu/halo.cuh>

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

constexpr unsigned threads = 256;
constexpr unsigned row_threads = 8; // threads that compute a row of the matrix, which has about 15 entries
static_assert((threads & (threads - 1)) == 0, "sums are added in pairs");

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

unsigned blocks_for(std::int64_t all_threads) {
    return static_cast<unsigned>((all_threads + threads - 1) / threads);
}

__device__ std::int64_t thread_number() {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

__global__ void multiply_kernel(matrix a, std::int32_t first, std::int32_t end, const double *x, double *y) {
    const std::int64_t row = first + thread_number() / row_threads;
    double sum = 0.0;
    if (row < end) {
        for (std::int32_t i = a.starts[row] + static_cast<std::int32_t>(threadIdx.x % row_threads);
             i < a.starts[row + 1]; i += row_threads) {
            sum += a.values[i] * x[a.columns[i]];
        }
    }
    for (unsigned distance = row_threads / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(0xffffffff, sum, distance, row_threads);
    }
    if (row < end && threadIdx.x % row_threads == 0) {
        y[row] = sum;
    }
}

/// Computes one partial sum of a dot product per block. The order of the additions depends only on `count`.
__global__ void dot_kernel(std::int32_t count, const double *x, const double *y, double *sums) {
    __shared__ double of_thread[threads];
    double sum = 0.0;
    for (std::int64_t i = thread_number(); i < count; i += std::int64_t{gridDim.x} * blockDim.x) {
        sum += x[i] * y[i];
    }
    of_thread[threadIdx.x] = sum;
    for (unsigned distance = threads / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) {
            of_thread[threadIdx.x] += of_thread[threadIdx.x + distance];
        }
    }
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = of_thread[0];
    }
}

__global__ void step_kernel(std::int32_t count, double factor, const double *p, const double *q, double *x, double *r) {
    const std::int64_t i = thread_number();
    if (i < count) {
        x[i] += factor * p[i];
        r[i] -= factor * q[i];
    }
}

__global__ void turn_kernel(std::int32_t count, double factor, const double *r, double *p) {
    const std::int64_t i = thread_number();
    if (i < count) {
        p[i] = r[i] + factor * p[i];
    }
}

__global__ void pack_kernel(std::int32_t count, const std::int32_t *list, const double *x, double *packed) {
    const std::int64_t i = thread_number();
    if (i < count) {
        packed[i] = x[list[i]];
    }
}

void select(int device) {
    check(cudaSetDevice(device), "cudaSetDevice");
}

void multiply(const mpgpu::stream &stream, matrix a, std::int32_t first, std::int32_t end, const double *x, double *y) {
    if (first < end) { // a small part may have no interior rows
        const unsigned blocks = blocks_for(std::int64_t{end - first} * row_threads);
        multiply_kernel<<<blocks, threads, 0, stream.get()>>>(a, first, end, x, y);
        check(cudaGetLastError(), "the kernel that multiplies");
    }
}

void dot(const mpgpu::stream &stream, std::int32_t count, const double *x, const double *y, double *sums) {
    dot_kernel<<<partial_sums, threads, 0, stream.get()>>>(count, x, y, sums);
    check(cudaGetLastError(), "the kernel of dot products");
}

void step(const mpgpu::stream &stream, std::int32_t count, double factor, const double *p, const double *q, double *x,
          double *r) {
    step_kernel<<<blocks_for(count), threads, 0, stream.get()>>>(count, factor, p, q, x, r);
    check(cudaGetLastError(), "the kernel that updates the solution");
}

void turn(const mpgpu::stream &stream, std::int32_t count, double factor, const double *r, double *p) {
    turn_kernel<<<blocks_for(count), threads, 0, stream.get()>>>(count, factor, r, p);
    check(cudaGetLastError(), "the kernel that updates the direction");
}

void pack(const mpgpu::stream &stream, std::int32_t count, const std::int32_t *list, const double *x, double *packed) {
    pack_kernel<<<blocks_for(count), threads, 0, stream.get()>>>(count, list, x, packed);
    check(cudaGetLastError(), "the kernel that packs");
}

} // namespace

const device_code on_gpus = {select, multiply, dot, step, turn, pack, mpgpu::halo::cuda_indexed};
