// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TRIGGER_CUH
#define MPGPU_TRIGGER_CUH

/// @file
/// For kernels that produce or consume a transfer that moves in partitions: `trigger`. Needs nothing of the library but
/// what a plan gives; a compiler without CUDA gets the same for threads of the CPU, of which each is a block of one
/// thread.
///
/// @code
/// __global__ void produce(mpgpu::trigger out) {
///     double *cells = static_cast<double *>(out.data());
///     const auto [first, end] = my_cells(blockIdx.x, gridDim.x);
///     for (auto i = first + threadIdx.x; i < end; i += blockDim.x) { cells[i] = compute(i); }
///     out.ready_range(first * sizeof(double), (end - first) * sizeof(double));   // the whole block
/// }
///
/// plan.arm(stream);                                                              // mpgpu::node::plan_partitioned made
/// it produce<<<blocks, threads, 0, stream>>>(mpgpu::trigger(plan.trigger(rank, 0))); plan.enqueue(stream);
/// @endcode

#include <cstdint>
#ifndef __CUDACC__
#include <thread>
#endif

#ifdef __CUDACC__
#define MPGPU_TRIGGER_FUNCTION __device__ __forceinline__
#else
#define MPGPU_TRIGGER_FUNCTION inline
#endif

namespace mpgpu {

namespace detail {

#ifdef __CUDACC__
MPGPU_TRIGGER_FUNCTION void meet() {
    __syncthreads();
}
MPGPU_TRIGGER_FUNCTION bool is_first_thread() {
    return threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
}
// The whole of `bytes` counted so far. What other blocks have written and counted is visible afterwards, and what this
// one has written to those that count later.
MPGPU_TRIGGER_FUNCTION std::uint64_t count(std::uint64_t *counter, std::uint64_t bytes) {
    __threadfence();
    const std::uint64_t before = atomicAdd(reinterpret_cast<unsigned long long *>(counter), bytes);
    __threadfence();
    return before + bytes;
}
MPGPU_TRIGGER_FUNCTION void set_back(std::uint64_t *counter) {
    *reinterpret_cast<volatile std::uint64_t *>(counter) = 0;
}
// One fence for all flags: copy engines, other GPUs and the CPU see the bytes when they see a flag.
MPGPU_TRIGGER_FUNCTION void release() {
    __threadfence_system();
}
MPGPU_TRIGGER_FUNCTION void raise(std::uint64_t *flag) {
    *reinterpret_cast<volatile std::uint64_t *>(flag) = 1;
}
MPGPU_TRIGGER_FUNCTION std::uint64_t look(const std::uint64_t *flag) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}
// A look at host memory takes about a microsecond. Blocks that look more often take the link from copies.
MPGPU_TRIGGER_FUNCTION void rest() {
    __nanosleep(1000);
}
#else
inline void meet() {}
inline bool is_first_thread() {
    return true;
}
// Builtins, because std::atomic_ref came with C++20.
inline std::uint64_t count(std::uint64_t *counter, std::uint64_t bytes) {
    return __atomic_add_fetch(counter, bytes, __ATOMIC_ACQ_REL);
}
inline void set_back(std::uint64_t *counter) {
    __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
}
inline void raise(std::uint64_t *flag) {
    __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
}
inline std::uint64_t look(const std::uint64_t *flag) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline void rest() {
    std::this_thread::yield();
}
#endif

} // namespace detail

/// One end of a transfer that moves in partitions, as a kernel gets it: a value of a few words, the same in every step,
/// good until its plan is destroyed.
///
/// `ready…`, `wait` and `arrived` are called by whole thread blocks, all threads of the block alike, after the threads'
/// own writes: they contain the barrier and the fence that are needed. Of one transfer a step uses one of the `ready`
/// functions, on each partition.
class trigger {
  public:
    /// Of what `mp_plan_get_trigger` gives (`mpgpu::plan::trigger`).
    template <class Made>
    explicit trigger(const Made &made) noexcept
        : data_(made.data), ready_(made.ready), arrived_(made.arrived), counters_(made.counters), bytes_(made.bytes),
          partition_bytes_(made.partition_bytes), partitions_(made.partitions), arrived_flags_(made.arrived_flags) {}

    /// Where producers write: the source, or with `MP_AGENT_PRODUCER` the destination itself. Null where this rank does
    /// not send the transfer.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION void *data() const { return data_; }
    /// Bytes of the transfer.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t bytes() const { return bytes_; }
    /// How many partitions there are.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint32_t partitions() const { return partitions_; }
    /// Bytes of each partition but the last.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t partition_bytes() const { return partition_bytes_; }
    /// First byte of a partition.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t begin(std::uint32_t partition) const {
        return partition * partition_bytes_;
    }
    /// The byte after a partition.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t end(std::uint32_t partition) const {
        return partition + 1 < partitions_ ? (partition + 1) * partition_bytes_ : bytes_;
    }

    /// The calling block has written its part of a partition. `producers` blocks say so, each once in a step; the last
    /// one starts the partition.
    MPGPU_TRIGGER_FUNCTION void ready(std::uint32_t partition, std::uint64_t producers = 1) const {
        detail::meet();
        if (detail::is_first_thread()) {
            add(partition, 1, producers);
        }
    }

    /// The calling block has written `bytes` bytes of the transfer from byte `first` on, in whichever partitions they
    /// lie. Each byte is named once in a step; who names the last one of a partition starts it. Rows of a face, or
    /// anything that a block writes in pieces: one call for each piece.
    MPGPU_TRIGGER_FUNCTION void ready_range(std::uint64_t first, std::uint64_t bytes) const {
        ready_rows(first, bytes, 1, 0);
    }

    /// The same for `rows` pieces of `bytes` bytes that begin `stride` bytes apart, as a block of a stencil writes a
    /// part of a face.
    MPGPU_TRIGGER_FUNCTION void ready_rows(std::uint64_t first, std::uint64_t bytes, std::uint64_t rows,
                                           std::uint64_t stride) const {
        detail::meet();
        if (!detail::is_first_thread() || bytes == 0) {
            return;
        }
        // Rows of one partition are counted together, because each count is a trip to memory.
        std::uint64_t counted = 0;
        std::uint32_t last = 0;
        for (std::uint64_t row = 0; row < rows; ++row) {
            const std::uint64_t begin_of_row = first + row * stride;
            const std::uint64_t end_of_row = begin_of_row + bytes;
            for (std::uint64_t at = begin_of_row; at < end_of_row;) {
                const auto partition = static_cast<std::uint32_t>(at / partition_bytes_);
                if (partition != last && counted > 0) {
                    add(last, counted, end(last) - begin(last));
                    counted = 0;
                }
                const std::uint64_t until = end(partition) < end_of_row ? end(partition) : end_of_row;
                counted += until - at;
                last = partition;
                at = until;
            }
        }
        if (counted > 0) {
            add(last, counted, end(last) - begin(last));
        }
    }

    /// Whether a partition has arrived in this step: then its bytes may be read. For a rank that receives the transfer,
    /// after `mp_plan_arm`. Each thread gets the same answer.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool arrived(std::uint32_t partition) const {
#ifdef __CUDACC__
        return __syncthreads_and(is_up(partition)) != 0;
#else
        return is_up(partition);
#endif
    }

    /// Waits until a partition has arrived. One thread of the block looks, once in a microsecond; blocks that wait keep
    /// others from running, so launch no more of them than fit beside what they wait for.
    MPGPU_TRIGGER_FUNCTION void wait(std::uint32_t partition) const {
        if (detail::is_first_thread()) {
            while (!is_up(partition)) {
                detail::rest();
            }
        }
        detail::meet();
    }

  private:
    /// Counts what is ready of a partition. The last of it sets the counter back and raises the flags.
    MPGPU_TRIGGER_FUNCTION void add(std::uint32_t partition, std::uint64_t amount, std::uint64_t all) const {
        if (amount < all) {
            if (detail::count(counters_ + partition, amount) != all) {
                return;
            }
            detail::set_back(counters_ + partition);
        }
        detail::raise(ready_ + partition);
    }

    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool is_up(std::uint32_t partition) const {
        for (std::uint32_t flag = 0; flag < arrived_flags_; ++flag) {
            if (detail::look(arrived_ + std::uint64_t{partition} * arrived_flags_ + flag) == 0) {
                return false;
            }
        }
        return true;
    }

    void *data_;
    std::uint64_t *ready_;
    const std::uint64_t *arrived_;
    std::uint64_t *counters_;
    std::uint64_t bytes_;
    std::uint64_t partition_bytes_;
    std::uint32_t partitions_;
    std::uint32_t arrived_flags_;
};

} // namespace mpgpu

#endif // MPGPU_TRIGGER_CUH
