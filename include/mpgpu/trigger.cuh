// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TRIGGER_CUH
#define MPGPU_TRIGGER_CUH

/// @file
/// Triggers: kernel arguments with which kernels mark partitions of a transfer ready, or detect that partitions have
/// arrived. The header needs nothing else from the library. A compiler without CUDA gets the same functions for CPU
/// threads; each thread counts as a block of one thread.
///
/// @code
/// __global__ void produce(mpgpu::trigger out) {
///     double *cells = static_cast<double *>(out.destination());
///     const auto [first, end] = my_cells(blockIdx.x, gridDim.x);
///     for (auto i = first + threadIdx.x; i < end; i += blockDim.x) { cells[i] = compute(i); }
///     out.ready_range(first * sizeof(double), (end - first) * sizeof(double));   // called by the whole block
/// }
///
/// plan.arm(stream);   // plan of mpgpu::node::plan with partitions
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
// Adds `amount` to a counter with release semantics, and returns the new value. A block that increments the counter
// later and then calls `see` sees the earlier writes of this block.
//
// The addition has no acquire semantics, because that would invalidate the multiprocessor's L1 cache after each block.
// It uses no separate fences: on H200 fences made a computing kernel take 2.4 % longer, and an ordered addition 1.2 %.
// The address is converted to the global address space, because the compiler otherwise adds a branch for shared memory.
MPGPU_TRIGGER_FUNCTION std::uint64_t count(std::uint64_t *counter, std::uint64_t amount) {
    std::uint64_t before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(counter)), "l"(amount)
                 : "memory");
    return before + amount;
}
// Acquire fence: makes visible to this thread the writes of all blocks that have incremented the counter earlier.
MPGPU_TRIGGER_FUNCTION void see() {
    asm volatile("fence.acq_rel.gpu;" : : : "memory");
}
MPGPU_TRIGGER_FUNCTION void set_back(std::uint64_t *counter) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(counter)), "l"(std::uint64_t{0})
                 : "memory");
}
// Sets a flag with release semantics: copy engines, other GPUs and the CPU that see the flag also see the data.
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
// Pauses between two polls. A read of host memory takes about a microsecond, and more frequent reads slow down copies.
MPGPU_TRIGGER_FUNCTION void rest() {
    __nanosleep(1000);
}
#else
inline void meet() {}
inline bool is_first_thread() {
    return true;
}
// The functions for CPU threads use compiler builtins, because std::atomic_ref requires C++20.
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

/// Trigger: kernel argument for a transfer that is copied in partitions. Kernels of the sender mark partitions ready
/// with it. Kernels of the receiver detect with it that partitions have arrived. It is a small plain value that is
/// equal in all steps (executions of the plan). It is valid until the plan is destroyed.
///
/// All threads of a block call `ready`, `ready_range` and similar functions, `wait` and `arrived`, with equal
/// arguments, after their own writes. The functions contain the required barrier and fence. (The `ready` functions omit
/// both in steps in which ready partitions are not counted.) Within one step, use only one of the `ready` functions for
/// a transfer, and use it for each partition.
class trigger {
  public:
    /// Constructs a trigger from the result of `mp_plan_get_trigger` (`mpgpu::plan::trigger`).
    template <class Made>
    explicit trigger(const Made &made) noexcept
        : step_(made.step), ready_(made.ready), arrived_(made.arrived), counters_(made.counters), bytes_(made.bytes),
          partition_bytes_(made.partition_bytes),
          reciprocal_(made.partition_bytes > 0 ? ~std::uint64_t{0} / made.partition_bytes : 0),
          partitions_(made.partitions), arrived_flags_(made.arrived_flags) {}

    /// Returns the address to which producers write in this step: the source of the transfer, or its destination. It is
    /// the destination with `MP_AGENT_PRODUCER`, and in steps in which `MP_AGENT_AUTO` has the producers store directly
    /// (`partitioning::stores`). Null if this rank does not send the transfer. Each call reads memory, so keep the
    /// result in a variable.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION void *destination() const {
        return step_ != nullptr ? reinterpret_cast<void *>(step_[0]) : nullptr;
    }
    /// Returns the size of the transfer in bytes.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t bytes() const { return bytes_; }
    /// Returns the number of partitions.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint32_t partitions() const { return partitions_; }
    /// Returns the size in bytes of each partition except the last, which may be smaller.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t partition_bytes() const { return partition_bytes_; }
    /// Returns the offset in bytes of the start of a partition.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t begin(std::uint32_t partition) const {
        return partition * partition_bytes_;
    }
    /// Returns the offset in bytes of the end of a partition (one past its last byte).
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint64_t end(std::uint32_t partition) const {
        return partition + 1 < partitions_ ? (partition + 1) * partition_bytes_ : bytes_;
    }

    /// Reports that the calling block has written its part of a partition. `producers` blocks call it for this
    /// partition, each once per step. When the last of them has called it, the partition is ready and is copied.
    MPGPU_TRIGGER_FUNCTION void ready(std::uint32_t partition, std::uint64_t producers = 1) const {
        if (!is_counted()) {
            return;
        }
        trigger_detail::meet();
        if (trigger_detail::is_first_thread()) {
            add(this, 1, partition, 1, producers);
        }
    }

    /// Reports that the calling block has written the `bytes` bytes of the transfer that start at offset `first`. The
    /// range may span several partitions. Each byte must be reported once per step. When all bytes of a partition are
    /// reported, it is ready and is copied. A block that writes several ranges, for example rows of a face, makes one
    /// call for each range.
    MPGPU_TRIGGER_FUNCTION void ready_range(std::uint64_t first, std::uint64_t bytes) const {
        ready_rows(first, bytes, 1, 0);
    }

    /// Reports that the calling block has written `rows` ranges of `bytes` bytes each, whose starts are `stride` bytes
    /// apart. An example is the part of a face that a block of a stencil kernel writes. In all other respects it is the
    /// same as `ready_range`.
    MPGPU_TRIGGER_FUNCTION void ready_rows(std::uint64_t first, std::uint64_t bytes, std::uint64_t rows,
                                           std::uint64_t stride) const {
        ready_rows(this, 1, first, bytes, rows, stride);
    }

    /// Reports a written range for several transfers at once, which send the same data to several destinations and have
    /// equal partitions. The bytes are counted only once for all of them. Within a step, use no other `ready` function
    /// for these transfers.
    MPGPU_TRIGGER_FUNCTION static void ready_range(const trigger *all, unsigned transfers, std::uint64_t first,
                                                   std::uint64_t bytes) {
        ready_rows(all, transfers, first, bytes, 1, 0);
    }

    /// Returns true if a partition has arrived in this step, so that it may be read. Call it only on a rank that
    /// receives the transfer, after `mp_plan_arm`. Always returns false if receivers are not notified
    /// (`partitioning::arrivals`). One thread of the block checks, and all threads get the same result. If the sender
    /// has exited or left the step, all partitions count as arrived, and the stream reports `MP_ERROR_PEER_GONE`.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool arrived(std::uint32_t partition) const {
#ifdef __CUDACC__
        return __syncthreads_and(!trigger_detail::is_first_thread() || is_up(partition)) != 0;
#else
        return is_up(partition);
#endif
    }

    /// Blocks until a partition has arrived. One thread of the block checks once per microsecond. Waiting blocks occupy
    /// the GPU, so launch only as many as can run together with the work for which they wait.
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
        // If ready partitions are not counted in this step, this read is the only cost of a trigger. It is usually a
        // cache hit, because earlier blocks have read the same word.
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
        // Rows of the same partition are added up first, because each update of the counter accesses memory.
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

    /// Returns true if ready partitions are counted in this step.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION bool is_counted() const {
        return step_[1] != 0;
    }

    /// Returns the index of the partition that contains a byte. Multiplies by a reciprocal, because a division would
    /// take hundreds of instructions.
    [[nodiscard]] MPGPU_TRIGGER_FUNCTION std::uint32_t partition_of(std::uint64_t at) const {
        auto partition = static_cast<std::uint32_t>(trigger_detail::multiply_high(at, reciprocal_));
        // Because of rounding the result may be too small by one.
        return partition + (end(partition) <= at ? 1 : 0);
    }

    /// Adds `amount`, in ready bytes or in blocks, to the counter of a partition. The partition is ready when the
    /// counter reaches `whole`. The call that reaches this value resets the counter and sets the ready flags of the
    /// partition in all transfers, which share the counter of the first transfer.
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

    const std::uint64_t *step_; ///< word 0: address to which producers write; word 1: 1 if partitions are counted
    std::uint64_t *ready_;
    const std::uint64_t *arrived_;
    std::uint64_t *counters_;
    std::uint64_t bytes_;
    std::uint64_t partition_bytes_;
    std::uint64_t reciprocal_; ///< reciprocal of `partition_bytes_`, in units of 2^-64
    std::uint32_t partitions_;
    std::uint32_t arrived_flags_;
};

} // namespace mpgpu

#endif // MPGPU_TRIGGER_CUH
