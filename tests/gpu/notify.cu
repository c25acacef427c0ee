// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Measures notifications between a kernel and a CPU thread on a GPU: 100,000 rounds in which the data is checked, the
// time of a notification in each direction and on each side, and the effect of waiting for one on concurrent copies.
// Run by tests/gpu/notifications; exits with 0, with 1 if a word was wrong, with 77 if there is no GPU.
#include <mpgpu/notify.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using mpgpu::notifier;
using mpgpu::notify_block;
using steady = std::chrono::steady_clock;

constexpr unsigned threads = 256;
constexpr std::uint64_t words = threads; // transferred in a round by each block
constexpr std::uint64_t rounds = 100000;
constexpr auto patience = std::chrono::seconds(20);

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}
#define CHECK(call) check(call, #call)

double seconds_since(steady::time_point begin) {
    return std::chrono::duration<double>(steady::now() - begin).count();
}

/// Kernel that exchanges notifications and checked data with a CPU thread. The kernel writes `up`, and the thread
/// writes `down`, both in host memory.
__global__ void hand_over(notifier tell, std::uint64_t *up, const std::uint64_t *down, std::uint64_t count,
                          unsigned long long *wrong) {
    const notify_block block = notify_block::current();
    const std::uint64_t mine = std::uint64_t{block.index} * block.threads + block.thread;
    for (std::uint64_t round = 1; round <= count; ++round) {
        up[mine] = round * 3 + mine;
        tell.raise_by_all(block, 0, round);
        tell.wait(block, 1, round);
        if (down[mine] != round * 5 + mine) {
            atomicAdd(wrong, 1ULL);
        }
    }
}

/// Returns the GPU's clock in nanoseconds.
__device__ std::uint64_t clock_of_gpu() {
    unsigned long long now = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
}

/// Kernel that only exchanges notifications with a CPU thread. `nanoseconds[round]` is the time from the notification
/// to the answer, by the GPU's clock.
__global__ void ping_pong(notifier tell, std::uint64_t count, std::uint64_t *nanoseconds) {
    const notify_block block = notify_block::current();
    for (std::uint64_t round = 1; round <= count; ++round) {
        const std::uint64_t begin = clock_of_gpu();
        tell.raise_by_all(block, 0, round);
        tell.wait(block, 1, round);
        const std::uint64_t end = clock_of_gpu();
        if (block.index == 0 && block.thread == 0) {
            nanoseconds[round - 1] = end - begin;
        }
    }
}

/// Kernel that waits for a CPU thread as notify.cuh does: only one thread polls host memory.
__global__ void wait_for_one(notifier tell, std::uint64_t value) {
    const notify_block block = notify_block::current();
    if (block.index == 0 && block.thread == 0) {
        tell.raise(0, value); // the kernel is running
    }
    tell.wait(block, 1, value);
}

/// Kernel that waits in an inefficient way: all threads poll.
__global__ void wait_all_polling(notifier tell, std::uint64_t value) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        tell.raise(0, value);
    }
    while (!tell.is_raised(1, value)) {
    }
}

/// Kernel that measures, by the GPU's clock, reads that find no notification, notifications, and pairs of a read and a
/// notification by one thread.
__global__ void read_and_raise(notifier tell, std::uint64_t count, std::uint64_t *nanoseconds) {
    for (int kind = 0; kind < 3; ++kind) {
        const std::uint64_t begin = clock_of_gpu();
        for (std::uint64_t turn = 1; turn <= count; ++turn) {
            if (kind != 1 && tell.is_raised(1, turn)) {
                nanoseconds[kind] = 0;
                return;
            }
            if (kind != 0) {
                tell.raise(0, count * kind + turn);
            }
        }
        nanoseconds[kind] = clock_of_gpu() - begin;
    }
}

template <class Kernel> unsigned most_blocks(const Kernel &kernel, const cudaDeviceProp &gpu) {
    int each = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0));
    return static_cast<unsigned>(each * gpu.multiProcessorCount);
}

void check_words(const mpgpu::context &ctx, mpgpu::device where, cudaStream_t stream, unsigned blocks) {
    const std::uint64_t all = std::uint64_t{blocks} * words;
    mpgpu::notifications told(ctx, where, 2);
    mpgpu::buffer<std::uint64_t> up(ctx, mpgpu::device::host(), all);
    mpgpu::buffer<std::uint64_t> down(ctx, mpgpu::device::host(), all);
    mpgpu::buffer<unsigned long long> wrong(ctx, mpgpu::device::host(), 1);
    *wrong.data() = 0;
    // Large grids move more words per round, so they make fewer rounds.
    const std::uint64_t count = blocks == 1 ? rounds : rounds / 10;
    hand_over<<<blocks, threads, 0, stream>>>(told.in_kernel(), up.data(), down.data(), count, wrong.data());
    CHECK(cudaGetLastError());
    std::uint64_t wrong_here = 0;
    for (std::uint64_t round = 1; round <= count; ++round) {
        told.synchronize(0, round, patience, "the kernel's words");
        for (std::uint64_t i = 0; i < all; ++i) {
            wrong_here += up.data()[i] == round * 3 + i ? 0 : 1;
            down.data()[i] = round * 5 + i;
        }
        told.raise(1, round);
    }
    CHECK(cudaStreamSynchronize(stream));
    std::printf("%6llu rounds, %4u blocks, %6llu words each way: %llu wrong in the thread, %llu in the kernel\n",
                static_cast<unsigned long long>(count), blocks, static_cast<unsigned long long>(all),
                static_cast<unsigned long long>(wrong_here), *wrong.data());
    if (wrong_here + *wrong.data() != 0) {
        throw std::runtime_error("words were wrong");
    }
}

/// Measures the cost of one notification on each side when no partner is active. Table 1 of the paper lists a read and
/// a write.
void time_each_side(const mpgpu::context &ctx, mpgpu::device where, cudaStream_t stream) {
    constexpr std::uint64_t count = 20000;
    mpgpu::notifications told(ctx, where, 2);
    mpgpu::buffer<std::uint64_t> by_kernel(ctx, mpgpu::device::host(), 3);
    read_and_raise<<<1, 1, 0, stream>>>(told.in_kernel(), count, by_kernel.data());
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(stream));
    mpgpu::notifications others(ctx, where, 2);
    double by_thread[3];
    bool found = false;
    for (std::uint64_t kind = 0; kind < 3; ++kind) {
        const auto begin = steady::now();
        for (std::uint64_t turn = 1; turn <= count; ++turn) {
            found = found || (kind != 1 && others.test(0, turn));
            if (kind != 0) {
                others.raise(1, count * kind + turn);
            }
        }
        by_thread[kind] = seconds_since(begin) * 1e9;
    }
    if (found || by_kernel.data()[0] == 0) {
        throw std::runtime_error("a notification was found that nobody has raised");
    }
    std::printf("\n%-44s %9s %9s %15s\n", "nanoseconds, alone", "read", "write", "read and write");
    std::printf("%-44s %9.1f %9.1f %15.1f\n", "thread", by_thread[0] / count, by_thread[1] / count,
                by_thread[2] / count);
    std::printf("%-44s %9.1f %9.1f %15.1f\n", "thread of a kernel", static_cast<double>(by_kernel.data()[0]) / count,
                static_cast<double>(by_kernel.data()[1]) / count, static_cast<double>(by_kernel.data()[2]) / count);
}

void print_halves(const char *what, unsigned blocks, std::vector<double> microseconds) {
    std::sort(microseconds.begin(), microseconds.end());
    std::printf("%-44s %6u %9.2f %9.2f %9.2f\n", what, blocks, microseconds.front() / 2,
                microseconds[microseconds.size() / 2] / 2, microseconds[microseconds.size() * 99 / 100] / 2);
}

void time_both_ways(const mpgpu::context &ctx, mpgpu::device where, cudaStream_t stream, unsigned blocks) {
    constexpr std::uint64_t count = 20000;
    constexpr std::uint64_t warm_up = 1000;
    mpgpu::notifications told(ctx, where, 2);
    mpgpu::buffer<std::uint64_t> nanoseconds(ctx, mpgpu::device::host(), count);
    std::vector<double> by_thread;
    std::vector<double> by_kernel;
    ping_pong<<<blocks, threads, 0, stream>>>(told.in_kernel(), count, nanoseconds.data());
    CHECK(cudaGetLastError());
    const auto give_up = steady::now() + patience;
    steady::time_point begin{};
    for (std::uint64_t round = 1; round <= count; ++round) {
        while (!told.test(0, round)) { // not `synchronize`, which reads the clock and yields
            if (round == 1 && steady::now() > give_up) {
                throw std::runtime_error("the kernel does not start");
            }
        }
        const auto now = steady::now();
        if (round > warm_up) { // from this thread's last answer to the kernel's next notification
            by_thread.push_back(std::chrono::duration<double, std::micro>(now - begin).count());
        }
        begin = steady::now();
        told.raise(1, round);
    }
    CHECK(cudaStreamSynchronize(stream));
    for (std::uint64_t round = warm_up; round < count; ++round) {
        by_kernel.push_back(static_cast<double>(nanoseconds.data()[round]) / 1e3);
    }
    print_halves("thread to kernel and back, half", blocks, by_thread);
    print_halves("kernel to thread and back, half (GPU's clock)", blocks, by_kernel);
}

/// Returns the bandwidth of successive copies in GB/s.
template <class Copy> double rate_of(cudaStream_t stream, std::size_t bytes, const Copy &copy) {
    constexpr int copies = 8;
    copy();
    CHECK(cudaStreamSynchronize(stream));
    const auto begin = steady::now();
    for (int i = 0; i < copies; ++i) {
        copy();
    }
    CHECK(cudaStreamSynchronize(stream));
    return static_cast<double>(bytes) * copies / seconds_since(begin) / 1e9;
}

/// Measures the bandwidth of copies while a kernel waits, for each kind of waiting alternately. Returns medians.
template <class Copy>
void time_beside(const mpgpu::context &ctx, mpgpu::device where, const cudaDeviceProp &gpu, cudaStream_t waiting,
                 cudaStream_t copying, std::size_t bytes, const char *what, const Copy &copy) {
    struct kind {
        const char *name;
        unsigned blocks; // 0: no kernel
        bool all_poll;
    };
    const unsigned whole = static_cast<unsigned>(gpu.multiProcessorCount);
    const std::vector<kind> kinds = {{"no kernel", 0, false},
                                     {"a block that waits", 1, false},
                                     {"all multiprocessors wait, one thread polls", whole, false},
                                     {"all threads of one block poll host memory", 1, true},
                                     {"all threads of the GPU poll host memory", whole, true}};
    constexpr int turns = 5;
    std::vector<std::vector<double>> rates(kinds.size());
    mpgpu::notifications told(ctx, where, 2);
    std::uint64_t value = 0;
    for (int turn = 0; turn < turns; ++turn) {
        for (std::size_t k = 0; k < kinds.size(); ++k) {
            const kind &one = kinds[k];
            if (one.blocks > 0) {
                auto *const kernel = one.all_poll ? &wait_all_polling : &wait_for_one;
                kernel<<<one.blocks, threads, 0, waiting>>>(told.in_kernel(), ++value);
                CHECK(cudaGetLastError());
                told.synchronize(0, value, patience, "a kernel that waits");
            }
            rates[k].push_back(rate_of(copying, bytes, copy));
            told.raise(1, value);
            CHECK(cudaStreamSynchronize(waiting));
        }
    }
    double alone = 0;
    for (std::size_t k = 0; k < kinds.size(); ++k) {
        std::sort(rates[k].begin(), rates[k].end());
        const double median = rates[k][turns / 2];
        alone = k == 0 ? median : alone;
        std::printf("%-20s %-46s %8.1f %8.3f   (%.1f to %.1f)\n", what, kinds[k].name, median, median / alone,
                    rates[k].front(), rates[k].back());
        std::fflush(stdout);
    }
}

void time_copies(const mpgpu::context &ctx, mpgpu::device where, const cudaDeviceProp &gpu, cudaStream_t waiting,
                 cudaStream_t copying) {
    constexpr std::size_t bytes = std::size_t{64} << 20U;
    mpgpu::buffer<std::byte> host(ctx, mpgpu::device::host(), bytes);
    mpgpu::buffer<std::byte> here(ctx, where, bytes);
    std::printf("\n%-20s %-46s %8s %8s\n", "copies of 64 MiB", "beside", "GB/s", "of alone");
    time_beside(ctx, where, gpu, waiting, copying, bytes, "host to GPU",
                [&] { CHECK(cudaMemcpyAsync(here.data(), host.data(), bytes, cudaMemcpyHostToDevice, copying)); });
    time_beside(ctx, where, gpu, waiting, copying, bytes, "GPU to host",
                [&] { CHECK(cudaMemcpyAsync(host.data(), here.data(), bytes, cudaMemcpyDeviceToHost, copying)); });
    const bool has_peer = ctx.devices().gpus > 1;
    const mpgpu::device other = mpgpu::device::gpu(has_peer ? 1 : 0);
    if (has_peer && cudaDeviceEnablePeerAccess(other.id(), 0) != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // already enabled; otherwise copies go through host memory and are slow
    }
    mpgpu::buffer<std::byte> there(ctx, other, bytes);
    time_beside(ctx, where, gpu, waiting, copying, bytes, has_peer ? "GPU to GPU" : "within the GPU",
                [&] { CHECK(cudaMemcpyPeerAsync(there.data(), other.id(), here.data(), where.id(), bytes, copying)); });
}

int run() {
    mpgpu::context_options machine;
    machine.backend = mpgpu::backend::cuda;
    std::error_code ec;
    const mpgpu::context ctx(machine, ec);
    if (ec || ctx.devices().gpus == 0) {
        std::printf("no GPU: nothing was tried (%s)\n", ec.message().c_str());
        return 77;
    }
    const mpgpu::device where = mpgpu::device::gpu(0);
    CHECK(cudaSetDevice(where.id()));
    cudaDeviceProp gpu{};
    CHECK(cudaGetDeviceProperties(&gpu, where.id()));
    cudaStream_t waiting = nullptr;
    cudaStream_t copying = nullptr;
    CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
    // The kernels are loaded here. A kernel that is loaded at its launch might wait for running kernels.
    const unsigned whole =
        std::min({most_blocks(hand_over, gpu), most_blocks(ping_pong, gpu), most_blocks(wait_for_one, gpu),
                  most_blocks(wait_all_polling, gpu), static_cast<unsigned>(gpu.multiProcessorCount)});
    std::printf("%s, %d multiprocessors\n", gpu.name, gpu.multiProcessorCount);
    for (const unsigned blocks : {1U, 8U, whole}) {
        check_words(ctx, where, waiting, blocks);
    }
    time_each_side(ctx, where, waiting);
    std::printf("\n%-44s %6s %9s %9s %9s\n", "microseconds, one way", "blocks", "least", "median", "99th %");
    for (const unsigned blocks : {1U, 8U, whole}) {
        time_both_ways(ctx, where, waiting, blocks);
    }
    time_copies(ctx, where, gpu, waiting, copying);
    CHECK(cudaStreamDestroy(copying));
    CHECK(cudaStreamDestroy(waiting));
    return 0;
}

} // namespace

int main() {
    try {
        return run();
    } catch (const std::exception &e) {
        // A kernel may still wait for the thread that has failed. Destructors would then never return.
        std::printf("notify: %s\n", e.what());
        std::fflush(stdout);
        std::_Exit(1);
    }
}
