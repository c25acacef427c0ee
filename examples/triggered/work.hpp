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

constexpr unsigned factor_size = 8;

/// What alternating least squares finds for a vertex.
struct alignas(16) latent {
    float v[factor_size];
    friend bool operator==(const latent &a, const latent &b) { return std::equal(a.v, a.v + factor_size, b.v); }
};

struct fitting {
    graph_part part;
    const latent *x;
    latent *x_new;
    bool is_rated; ///< the vertices are those that are rated; else those that rate
};

/// Rows of a band matrix.
struct relaxing {
    const float *x;
    float *x_new;
    const float *beside;  ///< coefficients, row by row
    const float *right;   ///< right-hand side
    const float *inverse; ///< one over the element on the diagonal
    std::size_t first;    ///< row
    std::size_t rows;
    std::size_t all; ///< rows of all GPUs
    std::size_t width;
};

/// 1 to 64.
TRIGGERED_BOTH std::uint32_t edge_length(std::uint32_t from, std::uint32_t to) {
    std::uint32_t mixed = from * 0x9e3779b1U ^ to * 0x85ebca77U;
    mixed ^= mixed >> 15;
    mixed *= 0x2c1b3c6dU;
    return 1 + (mixed >> 26);
}
/// 1 to 5, of whom and by whom.
TRIGGERED_BOTH float rating(std::uint32_t by, std::uint32_t of) {
    return static_cast<float>(1 + edge_length(by, of) % 5);
}
/// @}

/// @name Stores of a few bytes that lie together
/// @{
constexpr unsigned line_words = 32; ///< of 4 bytes, in a line of memory
constexpr unsigned region_lines = 32;

struct scattering {
    std::uint32_t *out;
    std::size_t words; ///< a multiple of those of a region
    unsigned each;     ///< words that a warp stores together: 1 to 32, a power of two
    std::uint32_t step;
};

TRIGGERED_BOTH std::uint32_t scattered(std::uint32_t index, std::uint32_t step) {
    return index * 0x9e3779b1U ^ step * 0x85ebca77U;
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
    void (*fit)(const mpgpu::stream &stream, int gpu, const fitting &task, const outputs &out);
    void (*relax)(const mpgpu::stream &stream, int gpu, const relaxing &task, const outputs &out);
    void (*scatter)(const mpgpu::stream &stream, int gpu, const scattering &task);
    /// A plain copy, as a program without mpgpu makes it.
    void (*copy)(const mpgpu::stream &stream, int gpu, const mpgpu::transfer &copied);
    /// Lets kernels and copies of each of the first `gpus` GPUs reach the others.
    void (*connect)(int gpus);
    /// Unified memory, which all GPUs and the CPU use; null where this machine has none that they use at once.
    void *(*share)(std::size_t bytes);
    void (*release)(void *shared);
    /// Brings a part of it to a GPU, and lets the first `gpus` reach it there.
    void (*place)(void *first, std::size_t bytes, int gpu, int gpus);
};

/// For the virtual devices of the host backend: CPU code. In work_host.cpp.
extern const device_code on_virtual_devices;
#ifdef TRIGGERED_CUDA
/// For GPUs. In work_cuda.cu.
extern const device_code on_gpus;
#endif

#endif // MPGPU_EXAMPLES_TRIGGERED_WORK_HPP
