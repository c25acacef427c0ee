// SPDX-License-Identifier: MIT OR Apache-2.0
// Work of one thread block of each kernel. The same source is compiled for GPUs, on which a block has many threads, and
// for virtual devices, on which a block is one thread.
#ifndef MPGPU_EXAMPLES_TRIGGERED_BLOCKS_HPP
#define MPGPU_EXAMPLES_TRIGGERED_BLOCKS_HPP

#include "fit.hpp"
#include "outputs.hpp"
#include "work.hpp"

#include <mpgpu/trigger.cuh>

#include <cstddef>
#include <cstdint>
#include <utility>
#ifndef __CUDACC__
#include <array>
#endif

#ifdef __CUDACC__
#define TRIGGERED_FUNCTION __device__ __forceinline__
#else
#define TRIGGERED_FUNCTION inline
#endif

namespace blocks {

#ifdef __CUDACC__
TRIGGERED_FUNCTION unsigned thread() {
    return threadIdx.x;
}
TRIGGERED_FUNCTION constexpr unsigned threads() {
    return threads_per_block;
}
#else
constexpr unsigned thread() {
    return 0;
}
constexpr unsigned threads() {
    return 1;
}
#endif

/// Transfers of a kernel's output (`outputs`) in the form that kernels use.
class receivers {
  public:
    explicit receivers(const outputs &made) : receivers(made, std::make_index_sequence<most_receivers>()) {}

    /// Returns the address to which this kernel must store the data of transfer `i` itself. `source` is the address
    /// from which the transfer would otherwise copy the data. Returns null if the transfer copies the data.
    template <class T> [[nodiscard]] TRIGGERED_FUNCTION T *destination(unsigned i, const T *source) const {
        T *const there = i < count_ ? static_cast<T *>(to_[i].destination()) : nullptr;
        return there != source ? there : nullptr;
    }

    /// Stores an element of `source` at all destinations if this kernel must store its output itself. Returns true if
    /// it did.
    template <class T> TRIGGERED_FUNCTION bool store(const T *source, std::size_t index, T value) const {
        if (destination(0, source) == nullptr) {
            return false;
        }
        for (unsigned i = 0; i < count_; ++i) {
            static_cast<T *>(to_[i].destination())[index] = value;
        }
        return true;
    }

    /// Reports to all transfers that the whole block has written `count` elements, starting with element `first`.
    template <class T> TRIGGERED_FUNCTION void ready(std::size_t first, std::size_t count) const {
        if (count_ > 0) {
            mpgpu::trigger::ready_range(to_, count_, first * sizeof(T), count * sizeof(T));
        }
    }

    /// Reports to transfer `i` only that the whole block has written `count` elements, starting with element `first`.
    template <class T> TRIGGERED_FUNCTION void ready_at(unsigned i, std::size_t first, std::size_t count) const {
        if (i < count_) {
            to_[i].ready_range(first * sizeof(T), count * sizeof(T));
        }
    }

  private:
    template <std::size_t... I>
    receivers(const outputs &made, std::index_sequence<I...>)
        : to_{mpgpu::trigger(made.to[I])...}, count_(made.count) {}

    mpgpu::trigger to_[most_receivers];
    unsigned count_;
};

struct range {
    std::size_t first;
    std::size_t end;
};

/// Returns the range of elements that one block computes. Blocks with low numbers, which start first, compute the first
/// elements.
TRIGGERED_FUNCTION range share_of(std::size_t elements, unsigned block, unsigned of) {
    const std::size_t each = (elements + of - 1) / of;
    const std::size_t first = block * each;
    return {first < elements ? first : elements, first + each < elements ? first + each : elements};
}

TRIGGERED_FUNCTION word compute(word value, unsigned work) {
    for (unsigned k = 0; k < work; ++k) {
        value = value * factor + addend;
    }
    return value;
}

/// Computes the result of the microbenchmark, and of the first GPU of the pipeline.
TRIGGERED_FUNCTION void make(const making &task, const receivers &out, unsigned block) {
    const range mine = share_of(task.words, block, making_blocks);
    for (std::size_t i = mine.first + thread(); i < mine.end; i += threads()) {
        const word value = compute(i ^ task.step, task.work);
        if (!out.store(task.out, i, value)) {
            task.out[i] = value;
        }
    }
    out.ready<word>(mine.first, mine.end - mine.first);
}

/// Input of a kernel that arrives in partitions. The kernel processes each partition when it has arrived.
struct incoming {
    explicit incoming(const consuming &task) : from(task.in_trigger), arrived(task.arrived), before(task.before) {}
    mpgpu::trigger from;
    std::uint64_t *arrived;
    std::uint64_t before;
};

#ifdef __CUDACC__
/// Polls the arrival flags, in one block of the kernel. The flags are in host memory. This block notifies the other
/// blocks through memory of the GPU, because polling of host memory by many blocks would slow down copies on the same
/// link.
TRIGGERED_FUNCTION void watch(const incoming &in) {
    for (std::uint32_t partition = 0; partition < in.from.partitions(); ++partition) {
        in.from.wait(partition);
        if (threadIdx.x == 0) {
            asm volatile("st.release.gpu.u64 [%0], %1;" : : "l"(in.arrived), "l"(in.before + partition + 1) : "memory");
        }
    }
}
TRIGGERED_FUNCTION void wait_for(const incoming &in, std::size_t last_byte) {
    if (threadIdx.x == 0) {
        const std::uint64_t until = in.before + last_byte / in.from.partition_bytes() + 1;
        std::uint64_t arrived = 0;
        for (;;) {
            asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(arrived) : "l"(in.arrived) : "memory");
            if (arrived >= until) {
                break;
            }
            __nanosleep(200);
        }
    }
    __syncthreads();
}
#else
inline void wait_for(const incoming &in, std::size_t last_byte) {
    const auto last = static_cast<std::uint32_t>(last_byte / in.from.partition_bytes());
    for (std::uint32_t partition = 0; partition <= last; ++partition) {
        in.from.wait(partition);
    }
}
#endif

/// Computes one share of the result of the second GPU of the pipeline, from the same share of its input.
TRIGGERED_FUNCTION void consume(const consuming &task, const incoming &in, const receivers &out, unsigned share) {
    const range mine = share_of(task.words, share, making_blocks);
    if (task.early && mine.end > mine.first) {
        wait_for(in, mine.end * sizeof(word) - 1);
    }
    for (std::size_t i = mine.first + thread(); i < mine.end; i += threads()) {
        const word value = compute(task.in[i], task.work);
        if (!out.store(task.out, i, value)) {
            task.out[i] = value;
        }
    }
    out.ready<word>(mine.first, mine.end - mine.first);
}

/// Returns the new value of a point from those of its neighbours. The operands are always added in the same order, so
/// the result does not depend on how the rows are divided.
TRIGGERED_FUNCTION float relaxed(float left, float right, float above, float below) {
    return 0.25F * ((right + left) + (below + above));
}

/// Computes a Jacobi sweep. The first blocks compute the rows that must be sent, each block a part of one row. These
/// rows are copied while the other blocks compute.
TRIGGERED_FUNCTION void sweep(const sweeping &task, const receivers &out, unsigned block) {
    const std::size_t nx = task.nx;
    const auto pieces = static_cast<unsigned>(edge_pieces(nx));
    if (block < 2 * pieces) {
        const std::size_t row = block < pieces ? 1 : task.rows;
        const std::size_t first = std::size_t{block < pieces ? block : block - pieces} * edge_columns;
        const std::size_t end = first + edge_columns < nx ? first + edge_columns : nx;
        const unsigned to = block < pieces ? task.up : task.down;
        const float *here = task.a + row * nx;
        auto *const there = out.destination<float>(to, task.a_new + row * nx);
        for (std::size_t x = first + thread(); x < end; x += threads()) {
            if (x > 0 && x + 1 < nx) {
                const float value = relaxed(here[x - 1], here[x + 1], *(here + x - nx), here[x + nx]);
                task.a_new[row * nx + x] = value;
                if (there != nullptr) {
                    there[x] = value;
                }
            }
        }
        out.ready_at<float>(to, first, end - first);
        return;
    }
    const auto columns = static_cast<unsigned>(inner_columns(nx));
    const unsigned inner = block - 2 * pieces;
    const std::size_t first_row = 2 + std::size_t{inner / columns} * inner_rows;
    const std::size_t end_row = first_row + inner_rows < task.rows ? first_row + inner_rows : task.rows;
    const std::size_t first = std::size_t{inner % columns} * threads_per_block;
    for (std::size_t x = first + thread(); x < first + threads_per_block; x += threads()) {
        if (x == 0 || x + 1 >= nx) {
            continue;
        }
        const float *here = task.a + first_row * nx + x;
        float above = *(here - nx);
        float middle = *here;
        for (std::size_t row = first_row; row < end_row; ++row) {
            const float below = here[nx];
            task.a_new[row * nx + x] = relaxed(*(here - 1), here[1], above, below);
            above = middle;
            middle = below;
            here += nx;
        }
    }
}

TRIGGERED_FUNCTION range edges_of(const graph_part &part, std::size_t row) {
    return {part.offsets[row], part.offsets[row + 1]};
}

/// PageRank. The vector holds the rank of each vertex divided by the vertex's number of outgoing edges, because this is
/// the value that neighbours add up.
struct rank_rule {
    using value = float;
    const ranking &task;
    [[nodiscard]] TRIGGERED_FUNCTION range terms(std::size_t row) const { return edges_of(task.part, row); }
    [[nodiscard]] TRIGGERED_FUNCTION value none() const { return 0; }
    [[nodiscard]] TRIGGERED_FUNCTION value with(value sum, std::size_t edge, std::size_t) const {
        return sum + task.x[task.part.sources[edge]];
    }
    [[nodiscard]] TRIGGERED_FUNCTION value both(value a, value b) const { return a + b; }
    [[nodiscard]] TRIGGERED_FUNCTION value made(value sum, std::size_t row) const {
        return fused(task.damping, sum, task.base) * task.weight[row];
    }
};

/// Jacobi's method for a band matrix. All rows have the same number of terms. Some terms are outside the matrix and are
/// skipped.
struct relax_rule {
    using value = float;
    const relaxing &task;
    [[nodiscard]] TRIGGERED_FUNCTION range terms(std::size_t) const { return {0, task.width}; }
    [[nodiscard]] TRIGGERED_FUNCTION value none() const { return 0; }
    [[nodiscard]] TRIGGERED_FUNCTION value with(value sum, std::size_t at, std::size_t row) const {
        const std::size_t column = task.first + row + at; // offset by half of the width
        const std::size_t half = task.width / 2;
        return column >= half && column < task.all + half
                   ? fused(task.beside[row * task.width + at], task.x[column - half], sum)
                   : sum;
    }
    [[nodiscard]] TRIGGERED_FUNCTION value both(value a, value b) const { return a + b; }
    [[nodiscard]] TRIGGERED_FUNCTION value made(value sum, std::size_t row) const {
        return (task.right[row] - sum) * task.inverse[row];
    }
};

/// Shortest paths by sweeps of the Bellman-Ford algorithm. The vector holds the distance of each vertex.
struct distance_rule {
    using value = std::uint32_t;
    const shortening &task;
    [[nodiscard]] TRIGGERED_FUNCTION range terms(std::size_t row) const { return edges_of(task.part, row); }
    [[nodiscard]] TRIGGERED_FUNCTION value none() const { return unreached; }
    [[nodiscard]] TRIGGERED_FUNCTION value with(value least, std::size_t edge, std::size_t row) const {
        const std::uint32_t from = task.part.sources[edge];
        const value of = task.x[from];
        const auto to = static_cast<std::uint32_t>(task.part.first + row);
        return of == unreached ? least : both(least, of + edge_length(from, to));
    }
    [[nodiscard]] TRIGGERED_FUNCTION value both(value a, value b) const { return a < b ? a : b; }
    [[nodiscard]] TRIGGERED_FUNCTION value made(value least, std::size_t row) const {
        const value old = task.x[task.part.first + row];
        if (least < old) {
            *task.changed = task.step; // concurrent writers store the same value
            return least;
        }
        return old;
    }
};

/// Adds up the terms of a row as 32 partial sums, which are then added in a tree of pairs. The order is the same on CPU
/// and GPU, so results are bitwise equal.
template <class Rule> TRIGGERED_FUNCTION typename Rule::value sum_of(const Rule &rule, std::size_t row) {
    using Value = typename Rule::value;
    const range terms = rule.terms(row);
#ifdef __CUDACC__
    Value mine = rule.none();
    for (std::size_t term = terms.first + threadIdx.x % lanes; term < terms.end; term += lanes) {
        mine = rule.with(mine, term, row);
    }
    for (unsigned apart = lanes / 2; apart > 0; apart /= 2) {
        mine = rule.both(mine, __shfl_xor_sync(~0U, mine, apart));
    }
    return mine;
#else
    std::array<Value, lanes> parts{};
    parts.fill(rule.none());
    for (std::size_t term = terms.first; term < terms.end; ++term) {
        Value &mine = parts[(term - terms.first) % lanes];
        mine = rule.with(mine, term, row);
    }
    for (unsigned apart = lanes / 2; apart > 0; apart /= 2) {
        for (unsigned lane = 0; lane < apart; ++lane) {
            parts[lane] = rule.both(parts[lane], parts[lane + apart]);
        }
    }
    return parts[0];
#endif
}

/// Computes one time step. Each warp computes the values of 32 rows and stores them together. `made` holds the values
/// of all `rows` rows.
template <class Rule, class Value>
TRIGGERED_FUNCTION void step(const Rule &rule, std::size_t rows, Value *made, const receivers &out, unsigned block) {
    const std::size_t first = std::size_t{block} * rows_per_block;
    const std::size_t end = first + rows_per_block < rows ? first + rows_per_block : rows;
#ifdef __CUDACC__
    const std::size_t first_of_warp = first + threadIdx.x / lanes * lanes;
    const unsigned lane = threadIdx.x % lanes;
    Value mine = rule.none();
    for (unsigned i = 0; i < lanes && first_of_warp + i < end; ++i) {
        const Value all = sum_of(rule, first_of_warp + i);
        mine = lane == i ? all : mine;
    }
    const std::size_t row = first_of_warp + lane;
    if (row < end) {
        const Value value = rule.made(mine, row);
        made[row] = value;
        out.store(made, row, value);
    }
#else
    for (std::size_t row = first; row < end; ++row) {
        const Value value = rule.made(sum_of(rule, row), row);
        made[row] = value;
        out.store(made, row, value);
    }
#endif
    out.ready<Value>(first, end - first);
}

/// Computes one time step of alternating least squares. Each thread computes the factors of one vertex.
TRIGGERED_FUNCTION void fit(const fitting &task, const receivers &out, unsigned block) {
    const std::size_t first = std::size_t{block} * rows_per_block;
    const std::size_t end = first + rows_per_block < task.part.rows ? first + rows_per_block : task.part.rows;
    latent *const made = task.x_new + task.part.first;
    for (std::size_t row = first + thread(); row < end; row += threads()) {
        const auto here = static_cast<std::uint32_t>(task.part.first + row);
        normal_equations sum;
        const range edges = edges_of(task.part, row);
        for (std::size_t edge = edges.first; edge < edges.end; ++edge) {
            const std::uint32_t other = task.part.sources[edge];
            sum.add(task.x[other], task.is_rated ? rating(other, here) : rating(here, other));
        }
        const latent value = sum.solved();
        made[row] = value;
        out.store(made, row, value);
    }
    out.ready<latent>(first, end - first);
}

/// Stores words in groups of `each` contiguous words. The stores that a warp makes at the same time go to different
/// lines of memory, so that each region of 32 lines is filled group by group.
TRIGGERED_FUNCTION void scatter(const scattering &task, unsigned block) {
    constexpr std::size_t region = std::size_t{line_words} * region_lines;
    const std::size_t base = block * region;
    for (std::size_t i = thread(); i < region && base + i < task.words; i += threads()) {
        const std::size_t piece = i / task.each;
        const std::size_t at =
            base + piece % region_lines * line_words + piece / region_lines * task.each + i % task.each;
        task.out[at] = scattered(static_cast<std::uint32_t>(at), task.step);
    }
}

} // namespace blocks

#endif // MPGPU_EXAMPLES_TRIGGERED_BLOCKS_HPP
