// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NOTIFY_CUH
#define MPGPU_NOTIFY_CUH

/// @file
/// Notifications between a running kernel and CPU threads, the kernel's side: a value that a kernel takes as argument.
/// Needs nothing of the library. mpgpu/notify.hpp makes it and is the threads' side.
///
/// @code
/// __global__ void work(mpgpu::notifier tell) {
///     const auto block = mpgpu::notify_block::current();
///     ...                                     // the block's part
///     tell.raise_by_all(block, 0, step);      // by the last block that comes here: a thread may read all parts
///     tell.wait(block, 1, step);              // all blocks, until a thread has raised notification 1
///     ...
/// }
/// @endcode
///
/// A notification is a counter of 64 bits in pinned host memory, alone in its cache line, that one side raises to ever
/// greater values and the other waits for. Nothing blocks but `wait`, and neither side makes a call of the driver.
///
/// Blocks that wait for a thread must all fit on the GPU at once, along with all that the thread needs from that GPU:
/// launch at most `cudaOccupancyMaxActiveBlocksPerMultiprocessor` times the multiprocessors, divided by the processes
/// that share the GPU, or the blocks that are to raise may never start.
///
/// One thread of one block polls host memory; all others poll a copy in device memory. A whole grid that polls host
/// memory slowed a concurrent copy from 396 to 0.8 GB/s on H200.
///
/// Compiled by anything but nvcc, or called in host code, the same functions run on CPU threads, of which each stands
/// for a block of one thread: for tests, and for mpgpu's host backend. Compute capability 7.0 or later.

#include <cstddef>
#include <cstdint>
#include <thread>

#ifdef __CUDACC__
/// Functions that a kernel and a CPU thread can call.
#define MPGPU_NOTIFY_BOTH __host__ __device__
#else
/// Functions that a kernel and a CPU thread can call.
#define MPGPU_NOTIFY_BOTH
#endif

namespace mpgpu {

/// A counter that has its cache line for itself: 128 bytes, the longest of today's CPUs and what GPUs fetch at once.
struct alignas(128) notification_counter {
    std::uint64_t value; ///< only grows
};

/// What blocks of the kernel tell each other of a notification, in device memory. 0 at first.
struct notification_mirror {
    std::uint64_t value;   ///< the counter as the polling block has last seen it
    std::uint32_t arrived; ///< blocks that have come to `raise_by_all`
    std::uint32_t unused;  ///< 0
};

/// The calling block: where it is in its grid, and the calling thread in it.
struct notify_block {
    std::uint32_t index;   ///< of the block
    std::uint32_t blocks;  ///< of the grid
    std::uint32_t thread;  ///< in the block
    std::uint32_t threads; ///< of the block

#ifdef __CUDACC__
    /// The block that calls it, of a grid and blocks of any dimensions. In kernels.
    [[nodiscard]] static __device__ notify_block current() {
        return {blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), gridDim.x * gridDim.y * gridDim.z,
                threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z),
                blockDim.x * blockDim.y * blockDim.z};
    }
#endif

    /// Waits for all threads of the block, which see each other's writes from then on. On the CPU there is one.
    MPGPU_NOTIFY_BOTH void synchronize() const {
#ifdef __CUDA_ARCH__
        __syncthreads();
#endif
    }
};

namespace detail {

/// Which threads a write is for and a read is from.
enum class reach {
    device, ///< of this GPU
    system  ///< of the CPU and of all GPUs
};

/// Reads a counter; what its writer had written before is seen by whatever follows.
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

/// Writes a counter, after all that the calling thread has written or has seen written, by its block before a barrier
/// say: no other fence is needed.
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

/// Counts the caller in; true for the last of `of`, which then sees what all others have written, and for which the
/// count starts anew.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline bool is_last(std::uint32_t *arrived, std::uint32_t of) {
#ifdef __CUDA_ARCH__
    unsigned before = 0;
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived), "r"(of - 1) : "memory");
    return before == of - 1;
#else
    const bool last = __atomic_add_fetch(arrived, 1U, __ATOMIC_ACQ_REL) == of;
    if (last) {
        __atomic_store_n(arrived, 0U, __ATOMIC_RELAXED); // nobody counts for the next time before this one is raised
    }
    return last;
#endif
}

/// Polls until a counter stands at `value` or more; what it stands at.
template <reach Who> MPGPU_NOTIFY_BOTH inline std::uint64_t poll(const std::uint64_t *counter, std::uint64_t value) {
    std::uint64_t now = load<Who>(counter);
    while (now < value) {
#ifndef __CUDA_ARCH__
        std::this_thread::yield(); // blocks that are threads may be more than there are cores
#endif
        now = load<Who>(counter);
    }
    return now;
}

} // namespace detail

/// The notifications of a kernel. A plain value, passed to the kernel by value. Copies stand for the same counters.
///
/// Of one notification, values only grow, and one side raises it: one thread at a time, or one kernel at a time. What
/// was written before it was raised is seen by whoever has found it raised.
class notifier {
  public:
    notifier() = default;
    /// Of `size` counters in memory that CPU and GPU reach, and as many mirrors in memory of the GPU; both 0 at first.
    MPGPU_NOTIFY_BOTH notifier(notification_counter *counters, notification_mirror *mirrors, std::size_t size)
        : counters_(counters), mirrors_(mirrors), size_(size) {}

    /// Notifications.
    [[nodiscard]] MPGPU_NOTIFY_BOTH std::size_t size() const { return size_; }

    /// Raises a notification, by one thread, after all that this thread has written or seen written. Never blocks.
    MPGPU_NOTIFY_BOTH void raise(std::size_t index, std::uint64_t value) const {
        detail::store<detail::reach::system>(&counters_[index].value, value);
    }

    /// The same after what all threads of the block have written; called by all of them.
    MPGPU_NOTIFY_BOTH void raise(const notify_block &block, std::size_t index, std::uint64_t value) const {
        block.synchronize();
        if (block.thread == 0) {
            raise(index, value);
        }
    }

    /// The same after what all blocks of the grid have written; called by all threads of all blocks, in the same order
    /// of notifications. The last block raises, and the others go on: no barrier between blocks. A notification that is
    /// raised this way again must have been waited for, or the kernel launched anew, in between.
    MPGPU_NOTIFY_BOTH void raise_by_all(const notify_block &block, std::size_t index, std::uint64_t value) const {
        block.synchronize();
        if (block.thread == 0 && detail::is_last(&mirrors_[index].arrived, block.blocks)) {
            raise(index, value);
        }
    }

    /// What a notification stands at. Reads host memory, so by one thread of the grid; never blocks.
    [[nodiscard]] MPGPU_NOTIFY_BOTH std::uint64_t value(std::size_t index) const {
        return detail::load<detail::reach::system>(&counters_[index].value);
    }
    /// Whether it stands at `value` or more; as `value`.
    [[nodiscard]] MPGPU_NOTIFY_BOTH bool is_raised(std::size_t index, std::uint64_t least) const {
        return value(index) >= least;
    }

    /// Waits until a CPU thread has raised a notification to `least` or more; called by all threads of all blocks. One
    /// thread of block 0 polls host memory and passes on what it finds. Returns what the notification stands at, the
    /// same in all blocks unless it is raised twice.
    MPGPU_NOTIFY_BOTH std::uint64_t wait(const notify_block &block, std::size_t index, std::uint64_t least) const {
        if (block.index == 0 && block.thread == 0) {
            pass_on(index, least);
        }
        return wait_passed_on(block, index, least);
    }

    /// One half of `wait`, for grids in which a block does nothing but poll: one thread waits, reading host memory, and
    /// passes on what it finds.
    MPGPU_NOTIFY_BOTH void pass_on(std::size_t index, std::uint64_t least) const {
        const std::uint64_t found = detail::poll<detail::reach::system>(&counters_[index].value, least);
        detail::store<detail::reach::device>(&mirrors_[index].value, found);
    }

    /// The other half, called by all threads of a block: waits for what is passed on.
    MPGPU_NOTIFY_BOTH std::uint64_t wait_passed_on(const notify_block &block, std::size_t index,
                                                   std::uint64_t least) const {
#ifdef __CUDA_ARCH__
        __shared__ std::uint64_t found;
        if (block.thread == 0) {
            found = detail::poll<detail::reach::device>(&mirrors_[index].value, least);
        }
        block.synchronize();
        const std::uint64_t now = found;
        block.synchronize(); // the next wait may write it
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
