// Exports the kernels under unmangled names, by which they are loaded at run time through the driver.
//
// tests/gpu/ptx compiles this file to segment_copy_kernel.ptx, which is checked in. A build therefore needs no CUDA
// toolkit, and the driver compiles the kernels for the GPU of the machine.

#include "actions.hpp"
#include "block_copy.hpp"
#include "segment_copy.hpp"
#include "signal_wait.hpp"

// __grid_constant__ keeps the list in constant memory (see segment_copy.cu).
extern "C" __global__ void __launch_bounds__(mpgpu::kLanes)
    mpgpu_copy_segments(const __grid_constant__ mpgpu::SegmentList list) {
    mpgpu::copy_segments(list, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

// Copies a short list of segments. The argument has a quarter of the size of the long list.
extern "C" __global__ void __launch_bounds__(mpgpu::kLanes)
    mpgpu_copy_few_segments(const __grid_constant__ mpgpu::SegmentListOf<mpgpu::kFewSegments> list) {
    mpgpu::copy_segments(list, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

namespace {

// Loads a value with acquire ordering: writes that preceded the release of the value are visible to work after this
// load.
__device__ uint64_t acquire(uint64_t address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ void release(uint64_t address, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

} // namespace

// Waits until each counter has reached its awaited value. Counters may overflow, as for cuStreamWaitValue64.
extern "C" __global__ void __launch_bounds__(mpgpu::kSignalsPerWait)
    mpgpu_wait_signals(const __grid_constant__ mpgpu::SignalList list) {
    if (threadIdx.x < list.count) {
        const uint64_t value = list.values[threadIdx.x];
        while (static_cast<int64_t>(acquire(list.counters[threadIdx.x]) - value) < 0) {
            // The pause leaves the link and the multiprocessor to other work. It lasts a fraction of the time of a load
            // from host memory.
            __nanosleep(64);
        }
    }
}

namespace {

// Group of lanes that is a thread block. The flags for which it waits are in memory of this GPU, and the flags that it
// sets are in memory of other GPUs.
struct BlockGroup {
    __device__ uint32_t lane() const { return threadIdx.x; }
    __device__ uint32_t lanes() const { return blockDim.x; }
    __device__ uint32_t block() const { return blockIdx.x; }
    __device__ uint32_t blocks() const { return gridDim.x; }
    __device__ void barrier() const { __syncthreads(); }
    __device__ uint64_t load(uint64_t flag) const { return acquire(flag); }
    __device__ void raise(uint64_t flag, uint64_t value) const { release(flag, value); }
    __device__ void add(uint64_t flag) const {
        asm volatile("red.add.release.sys.u64 [%0], 1;" : : "l"(flag) : "memory");
    }
    // Resets a flag. A relaxed store suffices: before another rank may set this flag again, this rank sets a flag of
    // its own with release ordering.
    __device__ void lower(uint64_t flag) const { *reinterpret_cast<volatile uint64_t *>(flag) = 0; }
    __device__ bool tell(bool said) const { return __syncthreads_or(said ? 1 : 0) != 0; }
    // Counts a block that has finished. A relaxed operation suffices, because only work after the kernel uses the data
    // that the blocks write.
    __device__ uint64_t depart(uint64_t words, uint32_t word, uint64_t by) const {
        uint64_t before;
        asm volatile("atom.add.relaxed.gpu.u64 %0, [%1], %2;"
                     : "=l"(before)
                     : "l"(words + word * 8), "l"(by)
                     : "memory");
        return before;
    }
    __device__ void open(uint64_t gate, uint64_t number) const {
        asm volatile("st.release.gpu.u64 [%0], %1;" : : "l"(gate), "l"(number) : "memory");
    }
    __device__ uint64_t gate(uint64_t word) const {
        uint64_t value;
        asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
        return value;
    }
    __device__ uint64_t read(uint64_t word) const { return *reinterpret_cast<const volatile uint64_t *>(word); }
    __device__ void write(uint64_t word, uint64_t value) const { *reinterpret_cast<volatile uint64_t *>(word) = value; }
    __device__ void clear(uint64_t words, uint32_t word) const { lower(words + word * 8); }
    __device__ void let_next_begin() const {
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.launch_dependents;");
#endif
    }
};

// Waits until the preceding work in the stream has ended and its writes are visible. This must be the first call of a
// kernel whose launch may start before that (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
__device__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

} // namespace

extern "C" __global__ void __launch_bounds__(mpgpu::kWideLanes)
    mpgpu_run_actions(const __grid_constant__ mpgpu::ActionList list) {
    begin();
    mpgpu::run_actions(list, BlockGroup{});
}

// Runs a short list of actions. The argument has a fourteenth of the size of the long list.
extern "C" __global__ void __launch_bounds__(mpgpu::kWideLanes)
    mpgpu_run_few_actions(const __grid_constant__ mpgpu::ActionListOf<mpgpu::kFewActions> list) {
    begin();
    mpgpu::run_actions(list, BlockGroup{});
}

namespace {

// Division of the lanes of a launch into groups of equal size.
struct Groups {
    uint32_t lanes;

    __device__ uint32_t number() const { return (blockIdx.x * blockDim.x + threadIdx.x) / lanes; }
    __device__ uint32_t count() const { return gridDim.x * blockDim.x / lanes; }
    __device__ uint32_t lane() const { return threadIdx.x % lanes; }
};

// Function that waits until the stores of the calling lane have arrived in GPU memory or host memory. Does nothing if
// `is_on` is 0.
struct Settle {
    uint32_t is_on;

    __device__ void operator()() const {
        if (is_on != 0) {
            __threadfence_system();
        }
    }
};

// Function that stores both words of a report with one instruction. Does nothing if the address of the report is 0.
struct IndexReport {
    Groups groups;

    __device__ void operator()(uint64_t report, uint64_t position, uint64_t index) const {
        if (report != 0 && groups.lane() == 0) {
            asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};"
                         :
                         : "l"(report), "l"(position), "l"(index)
                         : "memory");
        }
    }
};

} // namespace

// Copies segments that have an end in host memory. A launch has few thread blocks.
extern "C" __global__ void __launch_bounds__(mpgpu::kPieceLanes)
    mpgpu_copy_pieces(const __grid_constant__ mpgpu::SegmentList list, uint32_t lanes, uint32_t is_paced) {
    const Groups groups{lanes};
    mpgpu::copy_segments_by_groups(list, groups.number(), groups.count(), groups.lane(), lanes, Settle{is_paced});
}

// Copies blocks of arrays by index lists, or pieces from a list in memory.
extern "C" __global__ void __launch_bounds__(mpgpu::kPieceLanes)
    mpgpu_copy_blocks(const __grid_constant__ mpgpu::BlockList list) {
    const Groups groups{list.lanes};
    mpgpu::copy_blocks(list, groups.number(), groups.count(), groups.lane(), list.lanes, Settle{list.is_paced},
                       IndexReport{groups});
}
