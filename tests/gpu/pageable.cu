// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures copies between pageable host memory and GPU 0: the driver's own call, synchronous and in a stream, and plans
// whose threads copy through pinned memory, over the link of GPU 0 only and over those of all GPUs; and 4,096 pieces of
// 64 KiB in one plan and with a call for each. Then registers memory: the time of registration compared with one call
// of the driver, and copies over several pieces. Every byte is checked. Prints GB/s, medians of the rounds.
//
//   pageable [MOST BYTES [GIB TO REGISTER]]
//
// The defaults are 1 GiB and 16 GiB, the latter limited to half of the available memory.
//
// MPGPU_HOST_THREADS limits the number of threads.
#include <mpgpu/mpgpu.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <exception>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace {

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}

/// Pageable memory whose pages are resident.
struct ordinary {
    std::uint64_t *words;
    std::size_t bytes;

    explicit ordinary(std::size_t size, bool present = true, int pages = MADV_NORMAL)
        : words(static_cast<std::uint64_t *>(
              mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
          bytes(size) {
        if (static_cast<void *>(words) == MAP_FAILED) {
            throw std::runtime_error("no memory");
        }
        madvise(words, bytes, pages);
        if (present) {
            fill(0);
        }
    }
    ~ordinary() { munmap(words, bytes); }
    ordinary(const ordinary &) = delete;
    ordinary &operator=(const ordinary &) = delete;

    void fill(std::uint64_t round) {
        for (std::size_t i = 0; i < bytes / 8; ++i) {
            words[i] = (i + round) * 0x9E3779B97F4A7C15ULL;
        }
    }
    [[nodiscard]] std::size_t wrong(std::size_t size, std::uint64_t round, std::size_t first = 0) const {
        std::size_t different = 0;
        for (std::size_t i = first / 8; i < (first + size) / 8; ++i) {
            different += words[i] == (i + round) * 0x9E3779B97F4A7C15ULL ? 0 : 1;
        }
        return different;
    }
};

/// Returns a transfer between two addresses. The library determines the devices of the memory.
mpgpu::transfer copy(void *to, const void *from, std::size_t bytes) {
    return {to, MP_DEVICE_AUTO, from, MP_DEVICE_AUTO, bytes};
}

double seconds(const std::function<void()> &work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Returns the median time of each method in `ways`. The methods are used alternately.
std::vector<double> medians(const std::vector<std::function<void()>> &ways, int rounds) {
    std::vector<std::vector<double>> taken(ways.size());
    for (int round = -3; round < rounds; ++round) { // the first are for warm-up
        for (std::size_t way = 0; way < ways.size(); ++way) {
            const double one = seconds(ways[way]);
            if (round >= 0) {
                taken[way].push_back(one);
            }
        }
    }
    std::vector<double> result;
    for (std::vector<double> &one : taken) {
        std::sort(one.begin(), one.end());
        result.push_back(one[one.size() / 2]);
    }
    return result;
}

/// Returns the available memory of the system in bytes.
std::size_t available() {
    std::ifstream file("/proc/meminfo");
    std::string line;
    while (std::getline(file, line)) {
        if (line.rfind("MemAvailable:", 0) == 0) {
            return std::strtoull(line.c_str() + 13, nullptr, 10) << 10U;
        }
    }
    return 0;
}

/// Measures the registration of memory by one call of the driver and by the library, and copies that extend over
/// several registered pieces.
std::size_t registered(const mpgpu::context &ctx, const mpgpu::stream &stream, void *device, std::size_t most,
                       std::size_t gibibytes) {
    constexpr std::size_t gib = std::size_t{1} << 30U;
    const std::size_t size = std::max<std::size_t>(std::min(gibibytes, available() / 2 / gib), 1) * gib;
    const double gibs = static_cast<double>(size) / gib;
    std::printf("\nregistering %.0f GiB, ms a GiB %26s %10s %12s\n", gibs, "cudaHostRegister", "mpgpu", "unregister");
    for (const bool huge : {false, true}) {
        for (const bool present : {false, true}) {
            double taken[3];
            for (const int way : {0, 1}) {
                const ordinary memory(size, present, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
                const mpgpu::array_view<std::uint64_t> words(memory.words, size / 8);
                mpgpu::registered_memory<std::uint64_t> pinned;
                taken[way] = seconds([&] {
                    if (way == 0) {
                        check(cudaHostRegister(memory.words, size, cudaHostRegisterPortable), "cudaHostRegister");
                    } else {
                        pinned = mpgpu::registered_memory<std::uint64_t>(ctx, words, huge);
                    }
                });
                if (way == 0) {
                    check(cudaHostUnregister(memory.words), "cudaHostUnregister");
                } else {
                    taken[2] = seconds([&] { pinned = {}; });
                }
            }
            std::printf("%-11s %-20s %22.1f %10.1f %12.1f\n", huge ? "huge pages" : "small pages",
                        present ? "that are there" : "that are not", 1e3 * taken[0] / gibs, 1e3 * taken[1] / gibs,
                        1e3 * taken[2] / gibs);
            std::fflush(stdout);
        }
    }
    ordinary source(2 * most);
    const ordinary back(2 * most);
    // The copies have odd offsets and cross the end of a piece. The test does not know where pieces end.
    const std::size_t first = most / 2 - 4088;
    source.fill(11);
    mpgpu::registered_memory<std::uint64_t> from(ctx, mpgpu::array_view<std::uint64_t>(source.words, source.bytes / 8));
    mpgpu::registered_memory<std::uint64_t> to(ctx, mpgpu::array_view<std::uint64_t>(back.words, back.bytes / 8));
    const mpgpu::plan there(ctx, {copy(device, from.data() + first / 8, most)});
    const mpgpu::plan again(ctx, {copy(to.data() + first / 8, device, most)});
    const std::vector<double> taken =
        medians({[&] { there.execute(stream).synchronize(); }, [&] { again.execute(stream).synchronize(); }}, 9);
    std::printf("%zu bytes of registered memory: to the GPU %.2f GB/s, back %.2f GB/s\n%s", most,
                1e-9 * static_cast<double>(most) / taken[0], 1e-9 * static_cast<double>(most) / taken[1],
                there.describe().c_str());
    return back.wrong(most, 11, first);
}

std::size_t run(std::size_t most, std::size_t gibibytes) {
    const mpgpu::context ctx;
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    check(cudaSetDevice(0), "cudaSetDevice");
    auto *const raw = reinterpret_cast<cudaStream_t>(stream.get());
    void *device = nullptr;
    check(cudaMalloc(&device, most), "cudaMalloc");
    ordinary source(most);
    const ordinary back(most);
    std::size_t wrong = 0;
    std::printf("%-16s %12s %10s %10s %10s %10s\n", "GB/s", "bytes", "driver", "in stream", "one link", "all links");
    for (std::size_t bytes = 4096; bytes <= most; bytes *= 4) {
        for (const bool to_gpu : {true, false}) {
            void *const to = to_gpu ? device : back.words;
            void *const from = to_gpu ? static_cast<void *>(source.words) : device;
            const auto kind = to_gpu ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
            mpgpu::plan_options one;
            one.relay_gpus = MP_RELAY_NONE;
            const mpgpu::transfer transfer = copy(to, from, bytes);
            const mpgpu::plan alone(ctx, {transfer}, one);
            const mpgpu::plan all(ctx, {transfer});
            const auto executed = [&](const mpgpu::plan &plan) { return [&] { plan.execute(stream).synchronize(); }; };
            const int rounds = bytes < (std::size_t{64} << 20U) ? 41 : 15;
            const std::vector<double> taken =
                medians({[&] { check(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy"); },
                         [&] {
                             check(cudaMemcpyAsync(to, from, bytes, kind, raw), "cudaMemcpyAsync");
                             check(cudaStreamSynchronize(raw), "cudaStreamSynchronize");
                         },
                         executed(alone), executed(all)},
                        rounds);
            std::printf("%-16s %12zu", to_gpu ? "pageable to GPU" : "GPU to pageable", bytes);
            for (const double one_way : taken) {
                std::printf(" %10.2f", 1e-9 * static_cast<double>(bytes) / one_way);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
        // The copies are made in both directions, over one link and over all links.
        for (const std::uint64_t links : {1, 2}) {
            mpgpu::plan_options how;
            how.relay_gpus = links == 1 ? MP_RELAY_NONE : 0;
            source.fill(bytes + links);
            check(cudaMemset(device, 0xEE, bytes), "cudaMemset");
            check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
            mpgpu::plan(ctx, {copy(device, source.words, bytes)}, how).execute(stream).synchronize();
            mpgpu::plan(ctx, {copy(back.words, device, bytes)}, how).execute(stream).synchronize();
            wrong += back.wrong(bytes, bytes + links);
        }
    }
    constexpr std::size_t pieces = 4096;
    constexpr std::size_t piece = 64 << 10;
    if (pieces * piece * 2 <= most) {
        // Only every other piece is copied, so that no two pieces can be merged into one copy.
        std::vector<mpgpu::transfer> batch;
        const auto at = [](void *memory, std::size_t i) { return static_cast<char *>(memory) + 2 * i * piece; };
        for (std::size_t i = 0; i < pieces; ++i) {
            batch.push_back(copy(at(device, i), at(source.words, i), piece));
        }
        const mpgpu::plan plan(ctx, batch);
        const std::vector<double> taken = medians(
            {[&] {
                 for (std::size_t i = 0; i < pieces; ++i) {
                     check(cudaMemcpyAsync(at(device, i), at(source.words, i), piece, cudaMemcpyHostToDevice), "copy");
                 }
                 check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
             },
             [&] { plan.execute(stream).synchronize(); }},
            15);
        std::printf("4096 pieces of 64 KiB: one call each %.2f GB/s, one plan %.2f GB/s\n",
                    1e-9 * pieces * piece / taken[0], 1e-9 * pieces * piece / taken[1]);
        check(cudaMemset(device, 0xEE, most), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        plan.execute(stream).synchronize();
        check(cudaMemcpy(back.words, device, most, cudaMemcpyDeviceToHost), "cudaMemcpy");
        for (std::size_t i = 0; i < pieces; ++i) {
            const std::size_t word = 2 * i * piece / 8;
            wrong += std::equal(source.words + word, source.words + word + piece / 8, back.words + word) ? 0 : 1;
        }
    }
    const mpgpu::plan shown(ctx, {copy(device, source.words, most)});
    std::printf("\n%s", shown.describe().c_str());
    wrong += registered(ctx, stream, device, most, gibibytes);
    check(cudaFree(device), "cudaFree");
    return wrong;
}

} // namespace

int main(int argc, char **argv) {
    try {
        const std::size_t wrong = run(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::size_t{1} << 30U,
                                      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 16);
        std::printf("%zu words or pieces wrong\n", wrong);
        return wrong == 0 ? 0 : 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pageable: %s\n", error.what());
        return 1;
    }
}
