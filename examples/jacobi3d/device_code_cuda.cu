// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

constexpr unsigned threads = 256;
constexpr std::int64_t most_blocks = 4096; // a few per multiprocessor of the largest GPU; threads loop in strides
/// Number of columns that a thread block of the sweep computes. A thread computes several layers one after the other,
/// and keeps the values of the layer below and of the current layer in registers.
constexpr unsigned sweep_x = 64;
constexpr unsigned sweep_y = 4;
constexpr std::int64_t layers_per_thread = 16;

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

unsigned blocks_of(std::int64_t elements) {
    return static_cast<unsigned>(std::max<std::int64_t>(1, std::min((elements + threads - 1) / threads, most_blocks)));
}

__global__ void set_kernel(block b, double *values) {
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < element_count(b); i += stride) {
        values[i] = initial_value(b, i);
    }
}

/// Packs all faces in one launch. `blockIdx.y` is the number of the face.
__global__ void pack_kernel(block b, const double *values, packed_faces out) {
    const int face = static_cast<int>(blockIdx.y);
    double *to = out.at[face];
    if (to == nullptr) {
        return;
    }
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    const std::int64_t cells = face_cells(b, face);
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < cells; i += stride) {
        to[i] = values[face_element(b, face, i, false)];
    }
}

__global__ void unpack_kernel(block b, double *values, packed_faces in) {
    const int face = static_cast<int>(blockIdx.y);
    const double *from = in.at[face];
    if (from == nullptr) {
        return;
    }
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    const std::int64_t cells = face_cells(b, face);
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < cells; i += stride) {
        values[face_element(b, face, i, true)] = from[i];
    }
}

__global__ void __launch_bounds__(sweep_x *sweep_y)
    sweep_kernel(block b, const double *__restrict__ before, double *__restrict__ after) {
    const std::int64_t x = std::int64_t{blockIdx.x} * sweep_x + threadIdx.x;
    if (x >= b.cells[0]) {
        return;
    }
    const std::int64_t row = b.cells[0] + 2;
    const std::int64_t layer = row * (b.cells[1] + 2);
    for (std::int64_t y = std::int64_t{blockIdx.y} * sweep_y + threadIdx.y; y < b.cells[1];
         y += std::int64_t{gridDim.y} * sweep_y) {
        for (std::int64_t first = blockIdx.z * layers_per_thread; first < b.cells[2];
             first += gridDim.z * layers_per_thread) {
            const std::int64_t end = first + layers_per_thread < b.cells[2] ? first + layers_per_thread : b.cells[2];
            std::int64_t i = element_of(b, x, y, first);
            double below = before[i - layer];
            double here = before[i];
            for (std::int64_t z = first; z < end; ++z) {
                const double above = before[i + layer];
                after[i] = relaxed(before[i - 1], before[i + 1], before[i - row], before[i + row], below, above);
                below = here;
                here = above;
                i += layer;
            }
        }
    }
}

void set(const mpgpu::stream &stream, int device, const block &b, double *values) {
    check(cudaSetDevice(device), "cudaSetDevice");
    set_kernel<<<blocks_of(element_count(b)), threads, 0, stream.get()>>>(b, values);
    check(cudaGetLastError(), "the kernel that sets cells");
}

dim3 grid_of_faces(const block &b) {
    return {blocks_of(std::max({face_cells(b, 0), face_cells(b, 2), face_cells(b, 4)})), faces};
}

void pack(const mpgpu::stream &stream, int device, const block &b, const double *values, const packed_faces &out) {
    check(cudaSetDevice(device), "cudaSetDevice");
    pack_kernel<<<grid_of_faces(b), threads, 0, stream.get()>>>(b, values, out);
    check(cudaGetLastError(), "the kernel that packs faces");
}

void unpack(const mpgpu::stream &stream, int device, const block &b, double *values, const packed_faces &in) {
    check(cudaSetDevice(device), "cudaSetDevice");
    unpack_kernel<<<grid_of_faces(b), threads, 0, stream.get()>>>(b, values, in);
    check(cudaGetLastError(), "the kernel that unpacks faces");
}

void sweep(const mpgpu::stream &stream, int device, const block &b, const double *before, double *after) {
    check(cudaSetDevice(device), "cudaSetDevice");
    const auto tiles = [](std::int64_t cells, std::int64_t each, std::int64_t most) {
        return static_cast<unsigned>(std::min((cells + each - 1) / each, most));
    };
    const dim3 grid(tiles(b.cells[0], sweep_x, 0x7fffffff), tiles(b.cells[1], sweep_y, 65535),
                    tiles(b.cells[2], layers_per_thread, 65535));
    sweep_kernel<<<grid, dim3(sweep_x, sweep_y), 0, stream.get()>>>(b, before, after);
    check(cudaGetLastError(), "the sweep");
}

} // namespace

const device_code on_gpus = {set, pack, unpack, sweep};

bool is_on_gpu(const void *memory) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); // no driver or no GPU: clears the last error
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
}
