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
///     double *cells = static_cast<double *>(out.destination());
///     const auto [first, end] = my_cells(blockIdx.x, gridDim.x);
///     for (auto i = first + threadIdx.x; i < end; i += blockDim.x) { cells[i] = compute(i); }
///     out.ready_range(first * sizeof(double), (end - first) * sizeof(double));   // the whole block
/// }
///
/// plan.arm(stream);   // of mpgpu::node::plan, with partitions
/// produce<<<blocks, threads, 0, stream>>>(mpgpu::trigger(plan.trigger(rank, 0)));
/// plan.enqueue(stream);
/// @endcode

#include <cstdint>
#ifndef __CUDACC__
#include <thread>
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "mpgpu/trigger.cuh needs compute capability 7.0: compile for sm_70 or newer"
#endif

#ifdef __CUDACC__
#define MPGPU_TRIGGER_FUNCTION __device__ __forceinline__
#else
#define MPGPU_TRIGGER_FUNCTION inline
#endif

namespace mpgpu {

namespace trigger_detail {

#ifdef __CUDACC__
MPGPU_TRIGGER_FUNCTION void meet() {
    __syncthreads();
}
MPGPU_TRIGGER_FUNCTION bool is_first_thread() {
    return threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0;
}
// The whole of `amount` counted so far. What this block has written is visible to those that count later and `see`. It
// does not acquire by itself, because that empties the multiprocessor's L1 cache behind each block. Nor fences around
// an addition: on H200 they took a kernel that computes 2.4 % longer, an addition that orders 1.2 %. Addresses are
// global, or the compiler adds a branch for shared memory.
MPGPU_TRIGGER_FUNCTION std::uint64_t count(std::uint64_t *counter, std::uint64_t amount) {
    std::uint64_t before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(counter)), "l"(amount)
                 : "memory");
    return before + amount;
}
// What those have written that have counted before is visible afterwards.
MPGPU_TRIGGER_FUNCTION void see() {
    asm volatile("fence.acq_rel.gpu;" : : : "memory");
}
MPGPU_TRIGGER_FUNCTION void set_back(std::uint64_t *counter) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(counter)), "l"(std::uint64_t{0})
                 : "memory");
}
// Copy engines, other GPUs and the CPU see the bytes when they see the flag.
MPGPU_TRIGGER_FUNCTION void raise(std::uint64_t *flag) {
    asm volatile("st.release.sys.global.u64 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(flag)), "l"(std::uint64_t{1})
                 : "memory");
}
MPGPU_TRIGGER_FUNCTION std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
    return __umul64hi(a, b);
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
inline std::uint64_t count(std::uint64_t *counter, std::uint64_t amount) {
    return __atomic_add_fetch(counter, amount, __ATOMIC_RELEASE);
}
inline void see() {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
    __extension__ using wide = unsigned __int128;
    return static_cast<std::uint64_t>(static_cast<wide>(a) * b >> 64);
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

} // namespace trigger_detail

/// One end of a transfer that moves in partitions, as a kernel gets it: a value of a few words, the same in every step,
/// good until its plan is destroyed.
///
/// `ready…`, `wait` and `arrived` are called by whole thread blocks, all threads of the block alike, after the threads'
/// own writes: they contain the barrier and the fence that are needed, and none in steps in which nobody looks at
/// partitions. Of one transfer a step uses one of the `ready` functions, on each partition.
class trigger {
  public:
    /// Of what `mp_plan_get_trigger` gives (`mpgpu::plan::trigger`).
    template <class Made>
    explicit trigger(const Made &made) noexcept
        : step_(made.step), ready_(made.ready), arrived_(made.arrived), counters_(made.counters), bytes_(made.bytes),
          partition_bytes_(made.partition_bytes),
          reciprocal_(made.partition_bytes > 0 ? ~std::uint64_t{0} / made.partition_bytes : 0),
          partitions_(made.partitions), arrived_flags_(made.arrived_flags) {}

    /// Where producers write in this step: the source, or the destination itself, with `MP_AGENT_PRODUCER` and where
    /// steps have chosen it (`stores`). A look at memory of the GPU, so a thread keeps it in a variable. Null where
    /// this rank does not send the transfer.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION void *destination() const {
        return step_ != nullptr ? reinterpret_cast<void *>(step_[0]) : nullptr;
    }
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
        if (!is_counted()) {
            return;
        }
        trigger_detail::meet();
        if (trigger_detail::is_first_thread()) {
            add(this, 1, partition, 1, producers);
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
        ready_rows(this, 1, first, bytes, rows, stride);
    }

    /// `ready_range` for each of `transfers` transfers of the same bytes to several destinations, which are divided
    /// alike: a block counts once for all of them. A step uses no other `ready` function of these.
    MPGPU_TRIGGER_FUNCTION static void ready_range(const trigger *all, unsigned transfers, std::uint64_t first,
                                                   std::uint64_t bytes) {
        ready_rows(all, transfers, first, bytes, 1, 0);
    }

    /// Whether a partition has arrived in this step: then its bytes may be read. For a rank that receives the transfer,
    /// after `mp_plan_arm`; never, where its plan does not tell of arrivals. One thread of the block looks, and each
    /// gets the same answer. Where the sender has died or left the step, all arrive, and the stream gets
    /// `MP_ERROR_PEER_GONE`.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool arrived(std::uint32_t partition) const {
#ifdef __CUDACC__
        return __syncthreads_and(!trigger_detail::is_first_thread() || is_up(partition)) != 0;
#else
        return is_up(partition);
#endif
    }

    /// Waits until a partition has arrived. One thread of the block looks, once in a microsecond; blocks that wait keep
    /// others from running, so launch no more of them than fit beside what they wait for.
    MPGPU_TRIGGER_FUNCTION void wait(std::uint32_t partition) const {
        if (trigger_detail::is_first_thread()) {
            while (!is_up(partition)) {
                trigger_detail::rest();
            }
        }
        trigger_detail::meet();
    }

  private:
    MPGPU_TRIGGER_FUNCTION static void ready_rows(const trigger *all, unsigned transfers, std::uint64_t first,
                                                  std::uint64_t bytes, std::uint64_t rows, std::uint64_t stride) {
        // Where nobody looks this is all that a trigger costs: what a block before has brought into the cache.
        bool counts = false;
        for (unsigned i = 0; i < transfers; ++i) {
            counts = counts || all[i].is_counted();
        }
        if (!counts) {
            return;
        }
        trigger_detail::meet();
        if (!trigger_detail::is_first_thread() || bytes == 0 || rows == 0) {
            return;
        }
        const trigger &one = *all;
        // Rows of one partition are counted together, because each count is a trip to memory.
        std::uint64_t counted = 0;
        std::uint32_t partition = one.partition_of(first);
        for (std::uint64_t row = 0; row < rows; ++row) {
            std::uint64_t at = first + row * stride;
            for (const std::uint64_t end_of_row = at + bytes; at < end_of_row;) {
                if (at < one.begin(partition) || at >= one.end(partition)) {
                    if (counted > 0) {
                        add(all, transfers, partition, counted, one.end(partition) - one.begin(partition));
                        counted = 0;
                    }
                    partition = one.partition_of(at);
                }
                const std::uint64_t until = one.end(partition) < end_of_row ? one.end(partition) : end_of_row;
                counted += until - at;
                at = until;
            }
        }
        add(all, transfers, partition, counted, one.end(partition) - one.begin(partition));
    }

    /// Whether anybody looks at partitions in this step.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool is_counted() const {
        return step_[1] != 0;
    }

    /// The partition that a byte lies in. Without a division, which takes a thread hundreds of instructions while all
    /// others of its block have finished.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint32_t partition_of(std::uint64_t at) const {
        auto partition = static_cast<std::uint32_t>(trigger_detail::multiply_high(at, reciprocal_));
        // Rounded down twice, it may be one too small.
        return partition + (end(partition) <= at ? 1 : 0);
    }

    /// Counts what is ready of a partition, in the counter of the first transfer. The last of it sets the counter back
    /// and raises the flags of all.
    MPGPU_TRIGGER_FUNCTION static void add(const trigger *all, unsigned transfers, std::uint32_t partition,
                                           std::uint64_t amount, std::uint64_t whole) {
        if (amount < whole) {
            std::uint64_t *const counter = all->counters_ + partition;
            if (trigger_detail::count(counter, amount) != whole) {
                return;
            }
            trigger_detail::see();
            trigger_detail::set_back(counter);
        }
        for (unsigned i = 0; i < transfers; ++i) {
            trigger_detail::raise(all[i].ready_ + partition);
        }
    }

    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool is_up(std::uint32_t partition) const {
        std::uint32_t up = 0;
        while (up < arrived_flags_ &&
               trigger_detail::look(arrived_ + std::uint64_t{partition} * arrived_flags_ + up) != 0) {
            ++up;
        }
        return up > 0 && up == arrived_flags_;
    }

    const std::uint64_t *step_; ///< where producers write, and whether they count
    std::uint64_t *ready_;
    const std::uint64_t *arrived_;
    std::uint64_t *counters_;
    std::uint64_t bytes_;
    std::uint64_t partition_bytes_;
    std::uint64_t reciprocal_; ///< of `partition_bytes_`, in units of 2^-64
    std::uint32_t partitions_;
    std::uint32_t arrived_flags_;
};

} // namespace mpgpu

#endif // MPGPU_TRIGGER_CUH
