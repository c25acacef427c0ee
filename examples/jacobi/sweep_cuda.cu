// SPDX-License-Identifier: MIT OR Apache-2.0
#include "exchange_cuda.hpp"
#include "sweep.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace {

constexpr unsigned columns_per_block = 256;
/// Number of rows that one thread computes from top to bottom. It keeps the values of the row above and of the current
/// row in registers.
constexpr unsigned rows_per_thread = 8;
constexpr unsigned norm_threads = 512;
constexpr unsigned most_blocks_y = 65535;

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

/// Computes the new values. Everywhere, as in sweep_host.cpp, the same operands are added in the same order, so the
/// value of a point does not depend on how the rows are divided among devices. The result of N devices is therefore
/// bitwise equal to the result of one device.
__global__ void __launch_bounds__(columns_per_block)
    sweep_kernel(const float *__restrict__ a, float *__restrict__ a_new, std::size_t nx, std::size_t rows) {
    const std::size_t x = std::size_t{blockIdx.x} * columns_per_block + threadIdx.x;
    if (x == 0 || x + 1 >= nx) {
        return;
    }
    for (std::size_t begin = std::size_t{blockIdx.y} * rows_per_thread; begin < rows;
         begin += std::size_t{gridDim.y} * rows_per_thread) {
        const std::size_t end = begin + rows_per_thread < rows ? begin + rows_per_thread : rows;
        // The first row of the array is the upper halo row, so row r of the device is row r + 1 of the array.
        const float *here = a + (begin + 1) * nx + x;
        float *out = a_new + (begin + 1) * nx + x;
        float above = *(here - nx);
        float middle = *here;
        for (std::size_t row = begin; row < end; ++row) {
            const float below = *(here + nx);
            *out = 0.25F * ((here[1] + here[-1]) + (below + above));
            above = middle;
            middle = below;
            here += nx;
            out += nx;
        }
    }
}

/// Computes the norm of each row by one thread block. The threads and the order of additions are always the same, so
/// the norm of a row does not depend on its device.
__global__ void __launch_bounds__(norm_threads)
    norm_kernel(const float *__restrict__ a, const float *__restrict__ a_new, double *__restrict__ row_norm,
                std::size_t nx) {
    __shared__ double sums[norm_threads];
    const std::size_t row = std::size_t{blockIdx.x} + 1;
    double sum = 0.0;
    for (std::size_t x = std::size_t{threadIdx.x} + 1; x + 1 < nx; x += norm_threads) {
        const double change = double{a_new[row * nx + x]} - double{a[row * nx + x]};
        sum += change * change;
    }
    sums[threadIdx.x] = sum;
    for (unsigned half = norm_threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        row_norm[blockIdx.x] = sums[0];
    }
}

void launch(const mpgpu::stream &stream, const sweep &work) {
    const auto nx = static_cast<std::size_t>(work.nx);
    const auto rows = static_cast<unsigned>(work.rows);
    check(cudaSetDevice(work.device), "cudaSetDevice");
    const dim3 blocks(static_cast<unsigned>((nx + columns_per_block - 1) / columns_per_block),
                      std::min((rows + rows_per_thread - 1) / rows_per_thread, most_blocks_y));
    sweep_kernel<<<blocks, columns_per_block, 0, stream.get()>>>(work.a, work.a_new, nx, rows);
    check(cudaGetLastError(), "the sweep");
    if (work.row_norm != nullptr) {
        norm_kernel<<<rows, norm_threads, 0, stream.get()>>>(work.a, work.a_new, work.row_norm, nx);
        check(cudaGetLastError(), "the norm");
    }
}

} // namespace

const device_code on_gpus = {launch, plain_exchange_on_gpus};

bool is_on_gpu(const void *memory) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); // without a driver or GPU, the memory belongs to the process
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
}
