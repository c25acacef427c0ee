// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NOTIFY_CUH
#define MPGPU_NOTIFY_CUH

/// @file
/// Notifications between a running kernel and CPU threads: the kernel argument `notifier` and its functions. The header
/// needs nothing else from the library. mpgpu/notify.hpp contains the functions for CPU threads and creates notifiers.
///
/// @code
/// __global__ void work(mpgpu::notifier tell) {
///     const auto block = mpgpu::notify_block::current();
///     ...                                     // this block's work
///     tell.raise_by_all(block, 0, step);      // the last block sets it: the CPU may read all data
///     tell.wait(block, 1, step);              // all blocks wait until the CPU has set notification 1
///     ...
/// }
/// @endcode
///
/// A notification is a 64-bit counter in pinned host memory, in a cache line of its own. One side sets it to increasing
/// values, and the other side waits for them. Only `wait` blocks. Neither side calls the driver.
///
/// Blocks that wait for a CPU thread must all fit on the GPU simultaneously, together with all work for which the CPU
/// thread waits on that GPU. Launch at most `cudaOccupancyMaxActiveBlocksPerMultiprocessor` blocks per multiprocessor,
/// divided by the number of processes that share the GPU. Otherwise the blocks that set a notification may never start.
///
/// One thread of one block polls host memory; all others poll a copy in device memory. On H200, a whole grid that
/// polled host memory slowed a concurrent copy from 396 to 0.8 GB/s.
///
/// In host code, and with compilers other than nvcc, the functions run on CPU threads. Each thread counts as a block of
/// one thread. Tests and mpgpu's host backend use this. On GPUs compute capability 7.0 or later is required.

#include <cstddef>
#include <cstdint>
#include <thread>

#ifdef __CUDACC__
/// Qualifiers of functions that a kernel and a CPU thread can call.
#define MPGPU_NOTIFY_BOTH __host__ __device__
#else
/// Qualifiers of functions that a kernel and a CPU thread can call.
#define MPGPU_NOTIFY_BOTH
#endif

namespace mpgpu {

/// Counter in a cache line of its own. It has 128 bytes: the longest cache line of current CPUs and the unit of GPU
/// memory accesses.
struct alignas(128) notification_counter {
    std::uint64_t value; ///< value of the notification; only increases
};

/// State of a notification in device memory, which the blocks of the kernel share. Initially 0.
struct notification_mirror {
    std::uint64_t value;   ///< value that the polling block has read last
    std::uint32_t arrived; ///< number of blocks that have called `raise_by_all`
    std::uint32_t unused;  ///< padding; always 0
};

/// Description of the calling thread: its block's index in the grid, and its index in the block.
struct notify_block {
    std::uint32_t index;   ///< index of the block in the grid
    std::uint32_t blocks;  ///< number of blocks in the grid
    std::uint32_t thread;  ///< index of the thread in the block
    std::uint32_t threads; ///< number of threads in the block

#ifdef __CUDACC__
    /// Returns the description of the calling thread in a kernel. The grid and the blocks may have any dimensions.
    [[nodiscard]] static __device__ notify_block current() {
        return {blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), gridDim.x * gridDim.y * gridDim.z,
                threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z),
                blockDim.x * blockDim.y * blockDim.z};
    }
#endif

    /// Barrier for all threads of the block. They then see each other's earlier writes. Does nothing on a CPU thread,
    /// which is a block of one thread.
    MPGPU_NOTIFY_BOTH void synchronize() const {
#ifdef __CUDA_ARCH__
        __syncthreads();
#endif
    }
};

namespace detail {

/// Scope of a memory operation: the threads between which it synchronises.
enum class reach {
    device, ///< threads of this GPU
    system  ///< threads of the CPU and of all GPUs
};

/// Reads a counter with acquire semantics: all earlier writes of the thread that set it are then visible.
template <reach Who> [[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint64_t load(const std::uint64_t *counter) {
#ifdef __CUDA_ARCH__
    unsigned long long value = 0;
    if (Who == reach::system) {
        asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    } else {
        asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    }
    return value;
#else
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
#endif
}

/// Writes a counter with release semantics: after all writes of the calling thread, and after all writes that it has
/// seen, for example those of its block before a barrier. No other fence is needed.
template <reach Who> MPGPU_NOTIFY_BOTH inline void store(std::uint64_t *counter, std::uint64_t value) {
#ifdef __CUDA_ARCH__
    const unsigned long long word = value;
    if (Who == reach::system) {
        asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(counter), "l"(word) : "memory");
    } else {
        asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(counter), "l"(word) : "memory");
    }
#else
    __atomic_store_n(counter, value, __ATOMIC_RELEASE);
#endif
}

/// Counts the callers, and returns true for the last of `of` callers. That caller sees the earlier writes of all
/// others, and resets the count to 0.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool is_last(std::uint32_t *arrived, std::uint32_t of) {
#ifdef __CUDA_ARCH__
    unsigned before = 0;
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(of - 1) : "memory");
    return before == of - 1;
#else
    const bool last = __atomic_add_fetch(arrived, 1U, __ATOMIC_ACQ_REL) == of;
    if (last) {
        __atomic_store_n(arrived, 0U, __ATOMIC_RELAXED); // no block increments it again before this notification is set
    }
    return last;
#endif
}

/// Polls until a counter is at least `value`, and returns the value of the counter.
template <reach Who> MPGPU_NOTIFY_BOTH inline std::uint64_t poll(const std::uint64_t *counter, std::uint64_t value) {
    std::uint64_t now = load<Who>(counter);
    while (now < value) {
#ifndef __CUDA_ARCH__
        std::this_thread::yield(); // there may be more threads than cores
#endif
        now = load<Who>(counter);
    }
    return now;
}

} // namespace detail

/// Kernel argument that refers to a set of notifications (counters). A plain value. Copies refer to the same counters.
///
/// The value of a notification only increases. Either the kernel or the CPU sets it; only one thread or one kernel at a
/// time may set it. A thread that sees the new value also sees all writes that precede it.
class notifier {
  public:
    notifier() = default;
    /// Constructs an argument that refers to `size` counters in memory that CPU and GPU can access, and to the same
    /// number of copies of their state in GPU memory. All of them must be 0.
    MPGPU_NOTIFY_BOTH notifier(notification_counter *counters, notification_mirror *mirrors, std::size_t size)
        : counters_(counters), mirrors_(mirrors), size_(size) {}

    /// Returns the number of notifications.
    [[nodiscard]] MPGPU_NOTIFY_BOTH std::size_t size() const { return size_; }

    /// Sets notification `index` to `value`, after all writes of the calling thread and all writes that it has seen.
    /// One thread calls it. Never blocks.
    MPGPU_NOTIFY_BOTH void raise(std::size_t index, std::uint64_t value) const {
        detail::store<detail::reach::system>(&counters_[index].value, value);
    }

    /// Sets a notification after the writes of all threads of the block. All threads of the block call it.
    MPGPU_NOTIFY_BOTH void raise(const notify_block &block, std::size_t index, std::uint64_t value) const {
        block.synchronize();
        if (block.thread == 0) {
            raise(index, value);
        }
    }

    /// Sets a notification after the writes of all blocks of the grid. All threads of all blocks call it. If there are
    /// several notifications, all blocks set them in the same order. The last block sets the notification; the other
    /// blocks continue without waiting. Before it is called again for the same notification, the CPU must have waited
    /// for that notification, or the kernel must have been launched again.
    MPGPU_NOTIFY_BOTH void raise_by_all(const notify_block &block, std::size_t index, std::uint64_t value) const {
        block.synchronize();
        if (block.thread == 0 && detail::is_last(&mirrors_[index].arrived, block.blocks)) {
            raise(index, value);
        }
    }

    /// Returns the value of notification `index`. It reads host memory, so only one thread of the grid should call it.
    /// Never blocks.
    [[nodiscard]] MPGPU_NOTIFY_BOTH std::uint64_t value(std::size_t index) const {
        return detail::load<detail::reach::system>(&counters_[index].value);
    }
    /// Returns true if the value of notification `index` is at least `least`. Only one thread of the grid should call
    /// it. Never blocks.
    [[nodiscard]] MPGPU_NOTIFY_BOTH bool is_raised(std::size_t index, std::uint64_t least) const {
        return value(index) >= least;
    }

    /// Blocks until a CPU thread has set notification `index` to at least `least`, and returns the value of the
    /// notification. All threads of all blocks call it. One thread of block 0 polls host memory and writes the value to
    /// device memory for the other blocks. All blocks get the same value, unless the notification is set again during
    /// the wait.
    MPGPU_NOTIFY_BOTH std::uint64_t wait(const notify_block &block, std::size_t index, std::uint64_t least) const {
        if (block.index == 0 && block.thread == 0) {
            pass_on(index, least);
        }
        return wait_passed_on(block, index, least);
    }

    /// Performs the first part of `wait`, for grids in which one block only polls: one thread of that block polls host
    /// memory and writes the value to device memory for the other blocks.
    MPGPU_NOTIFY_BOTH void pass_on(std::size_t index, std::uint64_t least) const {
        const std::uint64_t found = detail::poll<detail::reach::system>(&counters_[index].value, least);
        detail::store<detail::reach::device>(&mirrors_[index].value, found);
    }

    /// Performs the second part of `wait`: all threads of a block wait until the polling block has written the value to
    /// device memory.
    MPGPU_NOTIFY_BOTH std::uint64_t wait_passed_on(const notify_block &block, std::size_t index,
                                                   std::uint64_t least) const {
#ifdef __CUDA_ARCH__
        __shared__ std::uint64_t found;
        if (block.thread == 0) {
            found = detail::poll<detail::reach::device>(&mirrors_[index].value, least);
        }
        block.synchronize();
        const std::uint64_t now = found;
        block.synchronize(); // before the next wait overwrites the value
        return now;
#else
        static_cast<void>(block);
        return detail::poll<detail::reach::device>(&mirrors_[index].value, least);
#endif
    }

  private:
    notification_counter *counters_ = nullptr;
    notification_mirror *mirrors_ = nullptr;
    std::size_t size_ = 0;
};

} // namespace mpgpu

#endif // MPGPU_NOTIFY_CUH
