// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_TRIGGERED_WORK_HPP
#define MPGPU_EXAMPLES_TRIGGERED_WORK_HPP

#include "outputs.hpp"

#include <mpgpu/mpgpu.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define TRIGGERED_BOTH __host__ __device__ inline
#else
#define TRIGGERED_BOTH inline
#endif

using word = unsigned long long;

constexpr unsigned threads_per_block = 256;

/// @name Microbenchmark and pipeline: a result that takes `work` operations per word.
/// @{
constexpr word factor = 6364136223846793005ULL;
constexpr word addend = 1442695040888963407ULL;
constexpr unsigned making_blocks = 8192;

struct making {
    word *out;
    std::size_t words;
    word step; ///< number of the time step, on which the result depends
    unsigned work;
};

struct consuming {
    const word *in;
    word *out;
    std::size_t words;
    unsigned work;
    bool early;              ///< true to process partitions as they arrive, false if all have arrived before
    bool shares;             ///< true if the kernel that produces the input runs on the same GPU
    mp_trigger_t in_trigger; ///< trigger of the transfer that writes `in`
    std::uint64_t *arrived;  ///< number of partitions that have arrived in all time steps, in GPU memory
    std::uint64_t before;    ///< number of partitions in earlier time steps
};
/// @}

/// @name Jacobi: rows 1 to `rows` of `rows + 2`, of which the first and the last are halo rows.
/// @{
constexpr std::size_t edge_columns = 1024; ///< columns that one block computes in a row that is sent
constexpr std::size_t inner_rows = 8;      ///< rows that a thread computes from top to bottom

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
    std::size_t rows; ///< number of rows of this GPU, 2 or more
    unsigned up;      ///< number of the transfer that sends row 1; `most_receivers`: none
    unsigned down;    ///< number of the transfer that sends the last row
};
/// @}

/// @name Graphs
/// @{
constexpr unsigned lanes = 32;           ///< threads of a warp, which adds up a row
constexpr unsigned rows_per_block = 256; ///< vertices (rows) that one thread block computes

/// Vertices that one GPU computes, with their incoming edges.
struct graph_part {
    const std::uint64_t *offsets; ///< index in `sources` of each vertex's first edge, and the number of edges
    const std::uint32_t *sources;
    std::size_t first; ///< number of the first vertex of this GPU
    std::size_t rows;  ///< number of vertices of this GPU
};

struct ranking {
    graph_part part;
    const float *x;
    float *x_new;
    const float *weight; ///< reciprocal of each vertex's number of outgoing edges, 0 if it has none
    float damping;
    float base;
};

constexpr std::uint32_t unreached = ~std::uint32_t{0};

struct shortening {
    graph_part part;
    const std::uint32_t *x;
    std::uint32_t *x_new;
    std::uint32_t *changed; ///< number of the last time step in which a distance decreased, in GPU memory
    std::uint32_t step;
};

constexpr unsigned factor_size = 8;

/// Factors that alternating least squares computes for a vertex.
struct alignas(16) latent {
    float v[factor_size];
    friend bool operator==(const latent &a, const latent &b) { return std::equal(a.v, a.v + factor_size, b.v); }
};

struct fitting {
    graph_part part;
    const latent *x;
    latent *x_new;
    bool is_rated; ///< true if the vertices are rated items, false if they are raters
};

/// Rows of a band matrix that one GPU computes.
struct relaxing {
    const float *x;
    float *x_new;
    const float *beside;  ///< off-diagonal coefficients, row by row
    const float *right;   ///< right-hand side of each equation
    const float *inverse; ///< reciprocal of the diagonal element of each row
    std::size_t first;    ///< number of the first row of this GPU
    std::size_t rows;
    std::size_t all; ///< number of rows of all GPUs together
    std::size_t width;
};

/// Returns a pseudo-random edge length from 1 to 64.
TRIGGERED_BOTH std::uint32_t edge_length(std::uint32_t from, std::uint32_t to) {
    std::uint32_t mixed = from * 0x9e3779b1U ^ to * 0x85ebca77U;
    mixed ^= mixed >> 15;
    mixed *= 0x2c1b3c6dU;
    return 1 + (mixed >> 26);
}
/// Returns a pseudo-random rating of item `of` by rater `by`, from 1 to 5.
TRIGGERED_BOTH float rating(std::uint32_t by, std::uint32_t of) {
    return static_cast<float>(1 + edge_length(by, of) % 5);
}
/// @}

/// @name Stores of a few contiguous bytes
/// @{
constexpr unsigned line_words = 32; ///< words of 4 bytes per line of memory
constexpr unsigned region_lines = 32;

struct scattering {
    std::uint32_t *out;
    std::size_t words; ///< number of words, a multiple of those of a region
    unsigned each;     ///< words that a warp stores together: 1 to 32, a power of two
    std::uint32_t step;
};

TRIGGERED_BOTH std::uint32_t scattered(std::uint32_t index, std::uint32_t step) {
    return index * 0x9e3779b1U ^ step * 0x85ebca77U;
}
/// @}

/// Device operations that this example implements without mpgpu. This is the only part that depends on the kind of
/// device. All work is enqueued in a stream of the GPU `gpu`.
struct device_code {
    void (*make)(const mpgpu::stream &stream, int gpu, const making &task, const outputs &out);
    void (*consume)(const mpgpu::stream &stream, int gpu, const consuming &task, const outputs &out);
    void (*sweep)(const mpgpu::stream &stream, int gpu, const sweeping &task, const outputs &out);
    void (*rank)(const mpgpu::stream &stream, int gpu, const ranking &task, const outputs &out);
    void (*shorten)(const mpgpu::stream &stream, int gpu, const shortening &task, const outputs &out);
    void (*fit)(const mpgpu::stream &stream, int gpu, const fitting &task, const outputs &out);
    void (*relax)(const mpgpu::stream &stream, int gpu, const relaxing &task, const outputs &out);
    void (*scatter)(const mpgpu::stream &stream, int gpu, const scattering &task);
    /// Makes a plain copy, as a program without mpgpu does.
    void (*copy)(const mpgpu::stream &stream, int gpu, const mpgpu::transfer &copied);
    /// Enables peer access between each two of the first `gpus` GPUs.
    void (*connect)(int gpus);
    /// Allocates unified memory, which the CPU and all GPUs can access. Returns null if they cannot access it at the
    /// same time.
    void *(*share)(std::size_t bytes);
    void (*release)(void *shared);
    /// Moves a part of unified memory to a GPU, and allows the first `gpus` GPUs to access it there.
    void (*place)(void *first, std::size_t bytes, int gpu, int gpus);
};

/// CPU code for the virtual devices of the host backend, in work_host.cpp.
extern const device_code on_virtual_devices;
#ifdef TRIGGERED_CUDA
/// Code for GPUs, in work_cuda.cu.
extern const device_code on_gpus;
#endif

#endif // MPGPU_EXAMPLES_TRIGGERED_WORK_HPP
