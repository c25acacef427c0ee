// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_WORK_HPP
#define MPGPU_EXAMPLES_TRIGGERED_WORK_HPP

#include "outputs.hpp"

#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define TRIGGERED_BOTH __host__ __device__ inline
#else
#define TRIGGERED_BOTH inline
#endif

using word = unsigned long long;

constexpr unsigned threads_per_block = 256;

/// @name The microbenchmark and the pipeline: a result that takes `work` operations for each word.
/// @{
constexpr word factor = 6364136223846793005ULL;
constexpr word addend = 1442695040888963407ULL;
constexpr unsigned making_blocks = 8192;

struct making {
    word *out;
    std::size_t words;
    word step; ///< differs from step to step
    unsigned work;
};

struct consuming {
    const word *in;
    word *out;
    std::size_t words;
    unsigned work;
    bool early;              ///< works on what has arrived; else all has arrived before
    bool shares;             ///< whether what it waits for needs this GPU too
    mp_trigger_t in_trigger; ///< of `in`
    std::uint64_t *arrived;  ///< on the GPU: partitions that have arrived in all steps together
    std::uint64_t before;    ///< in earlier steps
};
/// @}

/// @name Jacobi: rows 1 to `rows` of `rows + 2`, the first and the last being halo rows.
/// @{
constexpr std::size_t edge_columns = 1024; ///< of a row that is sent, for each block
constexpr std::size_t inner_rows = 8;      ///< that a thread goes down

TRIGGERED_BOTH std::size_t edge_pieces(std::size_t nx) {
    return (nx + edge_columns - 1) / edge_columns;
}
TRIGGERED_BOTH std::size_t inner_columns(std::size_t nx) {
    return (nx + threads_per_block - 1) / threads_per_block;
}

struct sweeping {
    const float *a;
    float *a_new;
    std::size_t nx;
    std::size_t rows; ///< 2 or more
    unsigned up;      ///< which transfer sends row 1; `most_receivers`: none
    unsigned down;    ///< which sends the last row
};
/// @}

/// @name Graphs
/// @{
constexpr unsigned lanes = 32;           ///< of a warp, which sums up a row
constexpr unsigned rows_per_block = 256; ///< vertices for each block

/// Vertices of one GPU: for each those that have an edge to it.
struct graph_part {
    const std::uint64_t *offsets; ///< of its first edge, in `sources`; one more than vertices
    const std::uint32_t *sources;
    std::size_t first; ///< vertex
    std::size_t rows;  ///< vertices
};

struct ranking {
    graph_part part;
    const float *x;
    float *x_new;
    const float *weight; ///< for each row one over its edges, 0 where it has none
    float damping;
    float base;
};

constexpr std::uint32_t unreached = ~std::uint32_t{0};

struct shortening {
    graph_part part;
    const std::uint32_t *x;
    std::uint32_t *x_new;
    std::uint32_t *changed; ///< on the GPU: the last step in which a distance became smaller
    std::uint32_t step;
};

/// 1 to 64.
TRIGGERED_BOTH std::uint32_t edge_length(std::uint32_t from, std::uint32_t to) {
    std::uint32_t mixed = from * 0x9e3779b1U ^ to * 0x85ebca77U;
    mixed ^= mixed >> 15;
    mixed *= 0x2c1b3c6dU;
    return 1 + (mixed >> 26);
}
/// @}

/// What this example does on devices without mpgpu: the only part that knows what kind of devices they are. Everything
/// is enqueued in a stream of the GPU `gpu`.
struct device_code {
    void (*make)(const mpgpu::stream &stream, int gpu, const making &task, const outputs &out);
    void (*consume)(const mpgpu::stream &stream, int gpu, const consuming &task, const outputs &out);
    void (*sweep)(const mpgpu::stream &stream, int gpu, const sweeping &task, const outputs &out);
    void (*rank)(const mpgpu::stream &stream, int gpu, const ranking &task, const outputs &out);
    void (*shorten)(const mpgpu::stream &stream, int gpu, const shortening &task, const outputs &out);
    /// A plain copy, as a program without mpgpu makes it.
    void (*copy)(const mpgpu::stream &stream, int gpu, const mpgpu::transfer &copied);
    /// Lets kernels and copies of each of the first `gpus` GPUs reach the others.
    void (*connect)(int gpus);
};

/// For the virtual devices of the host backend: CPU code. In work_host.cpp.
extern const device_code on_virtual_devices;
#ifdef TRIGGERED_CUDA
/// For GPUs. In work_cuda.cu.
extern const device_code on_gpus;
#endif

#endif // MPGPU_EXAMPLES_TRIGGERED_WORK_HPP
