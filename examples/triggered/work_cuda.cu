// SPDX-License-Identifier: MIT OR Apache-2.0
#include "blocks.hpp"
#include "work.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace {

// Number of blocks for each multiprocessor: as many as it has threads for (2048 on data-centre GPUs), whether or not
// the kernel has transfers.
#if defined(__CUDA_ARCH__) &&                                                                                          \
    (__CUDA_ARCH__ == 700 || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr unsigned resident = 8;
#else
constexpr unsigned resident = 4;
#endif

#define TRIGGERED_KERNEL __global__ void __launch_bounds__(threads_per_block, resident)

using blocks::receivers;

TRIGGERED_KERNEL make_kernel(const __grid_constant__ making task, const __grid_constant__ receivers out) {
    blocks::make(task, out, blockIdx.x);
}

/// Runs the second kernel of the pipeline. All blocks must run at the same time, because they wait for arrivals. So
/// there are few blocks, and each processes several shares one after the other. The first block only polls the arrival
/// flags.
TRIGGERED_KERNEL consume_kernel(const __grid_constant__ consuming task, const __grid_constant__ blocks::incoming in,
                                const __grid_constant__ receivers out) {
    if (blockIdx.x == 0) {
        if (task.early) {
            blocks::watch(in);
        }
        return;
    }
    for (unsigned share = blockIdx.x - 1; share < making_blocks; share += gridDim.x - 1) {
        blocks::consume(task, in, out, share);
    }
}

TRIGGERED_KERNEL sweep_kernel(const __grid_constant__ sweeping task, const __grid_constant__ receivers out) {
    blocks::sweep(task, out, blockIdx.x);
}

TRIGGERED_KERNEL rank_kernel(const __grid_constant__ ranking task, const __grid_constant__ receivers out) {
    blocks::step(blocks::rank_rule{task}, task.part.rows, task.x_new + task.part.first, out, blockIdx.x);
}

TRIGGERED_KERNEL shorten_kernel(const __grid_constant__ shortening task, const __grid_constant__ receivers out) {
    blocks::step(blocks::distance_rule{task}, task.part.rows, task.x_new + task.part.first, out, blockIdx.x);
}

TRIGGERED_KERNEL relax_kernel(const __grid_constant__ relaxing task, const __grid_constant__ receivers out) {
    blocks::step(blocks::relax_rule{task}, task.rows, task.x_new + task.first, out, blockIdx.x);
}

/// The launch bounds allow each thread to keep the equations of its vertex in registers.
__global__ void __launch_bounds__(threads_per_block, 2)
    fit_kernel(const __grid_constant__ fitting task, const __grid_constant__ receivers out) {
    blocks::fit(task, out, blockIdx.x);
}

TRIGGERED_KERNEL scatter_kernel(const __grid_constant__ scattering task) {
    blocks::scatter(task, blockIdx.x);
}

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

void enter(int gpu) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
}

void make(const mpgpu::stream &stream, int gpu, const making &task, const outputs &out) {
    enter(gpu);
    make_kernel<<<making_blocks, threads_per_block, 0, stream.get()>>>(task, receivers(out));
    check(cudaGetLastError(), "the kernel that makes a result");
}

void consume(const mpgpu::stream &stream, int gpu, const consuming &task, const outputs &out) {
    enter(gpu);
    int multiprocessors = 0;
    int at_once = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu), "cudaDeviceGetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, consume_kernel, threads_per_block, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    // Some capacity is left for the polling block, and for the kernel that produces the input if it runs on the same
    // GPU.
    const int each = std::max(1, task.shares ? at_once / 4 : at_once - 1);
    const unsigned workers = std::min(static_cast<unsigned>(multiprocessors * each), making_blocks);
    consume_kernel<<<workers + 1, threads_per_block, 0, stream.get()>>>(task, blocks::incoming(task), receivers(out));
    check(cudaGetLastError(), "the kernel that works on a result");
}

void sweep(const mpgpu::stream &stream, int gpu, const sweeping &task, const outputs &out) {
    enter(gpu);
    const std::size_t inner = (task.rows - 2 + inner_rows - 1) / inner_rows * inner_columns(task.nx);
    sweep_kernel<<<static_cast<unsigned>(2 * edge_pieces(task.nx) + inner), threads_per_block, 0, stream.get()>>>(
        task, receivers(out));
    check(cudaGetLastError(), "the sweep");
}

unsigned blocks_of(std::size_t rows) {
    return static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block);
}

void rank(const mpgpu::stream &stream, int gpu, const ranking &task, const outputs &out) {
    enter(gpu);
    rank_kernel<<<blocks_of(task.part.rows), threads_per_block, 0, stream.get()>>>(task, receivers(out));
    check(cudaGetLastError(), "the step of PageRank");
}

void shorten(const mpgpu::stream &stream, int gpu, const shortening &task, const outputs &out) {
    enter(gpu);
    shorten_kernel<<<blocks_of(task.part.rows), threads_per_block, 0, stream.get()>>>(task, receivers(out));
    check(cudaGetLastError(), "the step of shortest paths");
}

void fit(const mpgpu::stream &stream, int gpu, const fitting &task, const outputs &out) {
    enter(gpu);
    fit_kernel<<<blocks_of(task.part.rows), threads_per_block, 0, stream.get()>>>(task, receivers(out));
    check(cudaGetLastError(), "the step of alternating least squares");
}

void relax(const mpgpu::stream &stream, int gpu, const relaxing &task, const outputs &out) {
    enter(gpu);
    relax_kernel<<<blocks_of(task.rows), threads_per_block, 0, stream.get()>>>(task, receivers(out));
    check(cudaGetLastError(), "the step of Jacobi's method");
}

void scatter(const mpgpu::stream &stream, int gpu, const scattering &task) {
    enter(gpu);
    const auto regions = static_cast<unsigned>(task.words / (line_words * region_lines));
    scatter_kernel<<<regions, threads_per_block, 0, stream.get()>>>(task);
    check(cudaGetLastError(), "the kernel that stores");
}

void copy(const mpgpu::stream &stream, int gpu, const mpgpu::transfer &copied) {
    enter(gpu);
    const auto raw = static_cast<cudaStream_t>(stream.get());
    check(cudaMemcpyAsync(copied.dst, copied.src, copied.bytes, cudaMemcpyDefault, raw), "cudaMemcpyAsync");
}

void connect(int gpus) {
    for (int gpu = 0; gpu < gpus; ++gpu) {
        enter(gpu);
        for (int peer = 0; peer < gpus; ++peer) {
            int can = 0;
            if (peer != gpu) {
                check(cudaDeviceCanAccessPeer(&can, gpu, peer), "cudaDeviceCanAccessPeer");
            }
            if (can == 0) {
                continue;
            }
            const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
            if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
                cudaGetLastError(); // clears the last error, which is expected here
            } else {
                check(enabled, "cudaDeviceEnablePeerAccess");
            }
        }
    }
}

void *share(std::size_t bytes) {
    int at_once = 0;
    check(cudaDeviceGetAttribute(&at_once, cudaDevAttrConcurrentManagedAccess, 0), "cudaDeviceGetAttribute");
    void *shared = nullptr;
    if (at_once != 0) {
        check(cudaMallocManaged(&shared, bytes), "cudaMallocManaged");
    }
    return shared;
}

void release(void *shared) {
    cudaFree(shared);
}

/// Returns a GPU as a memory location, in the form that the calls for hints accept.
auto location(int gpu) {
#if CUDART_VERSION >= 13000
    return cudaMemLocation{cudaMemLocationTypeDevice, gpu};
#else
    return gpu;
#endif
}

void place(void *first, std::size_t bytes, int gpu, int gpus) {
    enter(gpu);
    check(cudaMemAdvise(first, bytes, cudaMemAdviseSetPreferredLocation, location(gpu)), "cudaMemAdvise");
#if CUDART_VERSION >= 13000
    check(cudaMemPrefetchAsync(first, bytes, location(gpu), 0, nullptr), "cudaMemPrefetchAsync");
#else
    check(cudaMemPrefetchAsync(first, bytes, location(gpu), nullptr), "cudaMemPrefetchAsync");
#endif
    // Wait until the memory has moved, then grant access to the GPUs, so that no access causes a page fault.
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int other = 0; other < gpus; ++other) {
        check(cudaMemAdvise(first, bytes, cudaMemAdviseSetAccessedBy, location(other)), "cudaMemAdvise");
    }
}

} // namespace

const device_code on_gpus = {make,    consume, sweep,   rank,  shorten, fit,  relax,
                             scatter, copy,    connect, share, release, place};
