// SPDX-License-Identifier: MIT OR Apache-2.0
// Copies in several streams at the same time, without using mpgpu. Copies are between two GPUs in one or both
// directions, and between one or two GPUs and pinned host memory. Prints the total bandwidth of all streams in GB/s.
// tests/gpu/unchanged runs the program with and without libmpgpu_preload.so.
//   streams [MIB [SECONDS]]        each case for SECONDS, of which the second half is measured (256, 4)
//   streams both|host|back MIB SECONDS  one case, with a line for each half second
//   streams disturb SECONDS memory threads that copy in host memory as fast as they can
//   streams disturb SECONDS link   copies from pinned host memory to GPU 0, over its PCIe link
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "streams: %s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point begin) {
    return std::chrono::duration<double>(clock_type::now() - begin).count();
}

constexpr int host = -1;
/// Number of copies that each stream has enqueued at any time, so that the GPU never waits for the program.
constexpr int in_flight = 4;

/// Copies in one stream. When the oldest copy has ended, a new one is enqueued.
struct flow {
    int dst;
    int src;
    std::size_t bytes;
    void *to = nullptr;
    void *from = nullptr;
    cudaStream_t stream = nullptr;
    std::vector<cudaEvent_t> ends;
    std::size_t next = 0;

    flow(int dst_, int src_, std::size_t bytes_) : dst(dst_), src(src_), bytes(bytes_) {
        to = make(dst);
        from = make(src);
        CHECK(cudaSetDevice(gpu()));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        ends.resize(in_flight);
        for (cudaEvent_t &end : ends) {
            CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
        }
    }

    [[nodiscard]] int gpu() const { return src == host ? dst : src; }

    [[nodiscard]] void *make(int device) const {
        void *memory = nullptr;
        if (device == host) {
            CHECK(cudaMallocHost(&memory, bytes));
            std::memset(memory, 1, bytes);
        } else {
            CHECK(cudaSetDevice(device));
            CHECK(cudaMalloc(&memory, bytes));
            CHECK(cudaMemset(memory, 1, bytes));
        }
        return memory;
    }

    /// Enqueues copies until the maximum number is in flight. Returns the number of copies that were enqueued.
    std::size_t feed() {
        std::size_t fed = 0;
        CHECK(cudaSetDevice(gpu()));
        for (cudaError_t code; (code = cudaEventQuery(ends[next])) != cudaErrorNotReady;
             next = (next + 1) % ends.size()) {
            CHECK(code);
            if (dst != host && src != host) {
                CHECK(cudaMemcpyPeerAsync(to, dst, from, src, bytes, stream));
            } else {
                CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
            }
            CHECK(cudaEventRecord(ends[next], stream));
            if (++fed == ends.size()) {
                break;
            }
        }
        return fed;
    }

    void finish() const {
        CHECK(cudaStreamSynchronize(stream));
        for (const cudaEvent_t &end : ends) {
            CHECK(cudaEventDestroy(end));
        }
        CHECK(cudaStreamDestroy(stream));
        for (const auto &[device, memory] : {std::pair{dst, to}, std::pair{src, from}}) {
            CHECK(device == host ? cudaFreeHost(memory) : cudaFree(memory));
        }
    }
};

/// Measures one case and returns the bandwidth of its second half in GB/s. Prints a line every `each` seconds.
double run(const std::vector<std::pair<int, int>> &ways, std::size_t bytes, double seconds, double each) {
    std::vector<flow> flows;
    for (const auto &[dst, src] : ways) {
        flows.emplace_back(dst, src, bytes);
    }
    const auto begin = clock_type::now();
    double moved = 0;
    double counted = 0;
    double lines = 0;
    double line = 0;
    double at = 0;
    while ((at = seconds_since(begin)) < seconds) {
        std::size_t fed = 0;
        for (flow &one : flows) {
            fed += one.feed();
        }
        const double now = static_cast<double>(fed) * static_cast<double>(bytes);
        moved += at >= seconds / 2 ? now : 0;
        counted = at;
        line += now;
        if (each > 0 && at - lines >= each) {
            std::printf("%6.2f s  %7.1f GB/s\n", at, line / (at - lines) * 1e-9);
            std::fflush(stdout);
            lines = at;
            line = 0;
        }
    }
    for (const flow &one : flows) {
        one.finish();
    }
    return moved / (counted - seconds / 2) * 1e-9;
}

void disturb_memory(double seconds) {
    constexpr std::size_t bytes = std::size_t{64} << 20;
    const auto begin = clock_type::now();
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < std::thread::hardware_concurrency() / 2; ++i) {
        threads.emplace_back([seconds, begin] {
            std::vector<char> a(bytes, 1);
            std::vector<char> b(bytes, 2);
            while (seconds_since(begin) < seconds) {
                std::memcpy(a.data(), b.data(), bytes);
                std::memcpy(b.data(), a.data(), bytes);
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "256";
    if (what == "disturb") {
        const double seconds = argc > 2 ? std::atof(argv[2]) : 4;
        if (argc > 3 && std::string(argv[3]) == "link") {
            run({{0, host}}, std::size_t{64} << 20, seconds, 0);
        } else {
            disturb_memory(seconds);
        }
        return 0;
    }
    int gpus = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    for (int gpu = 0; gpus > 1 && gpu < 2; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
    }
    const std::vector<std::pair<int, int>> both{{1, 0}, {0, 1}};
    const std::vector<std::pair<int, int>> from_host{{0, host}, {1, host}};
    const std::vector<std::pair<int, int>> back{{0, host}, {host, 0}};
    for (const auto &[name, ways] : {std::pair{"both", both}, std::pair{"host", from_host}, std::pair{"back", back}}) {
        if (what == name) {
            run(ways, static_cast<std::size_t>(std::atof(argv[2]) * 1048576), std::atof(argv[3]), 0.5);
            return 0;
        }
    }
    const auto bytes = static_cast<std::size_t>(std::atof(what.c_str()) * 1048576);
    const double seconds = argc > 2 ? std::atof(argv[2]) : 4;
    const std::vector<std::pair<const char *, std::vector<std::pair<int, int>>>> cases{
        {"GPU to GPU", {{1, 0}}},        {"GPU to GPU, both ways", both}, {"host to GPU", {{0, host}}},
        {"host to two GPUs", from_host}, {"GPU to host", {{host, 0}}},    {"two GPUs to host", {{host, 0}, {host, 1}}},
        {"host to GPU and back", back},
    };
    for (const auto &[name, ways] : cases) {
        bool fits = true;
        for (const auto &[dst, src] : ways) {
            fits = fits && dst < gpus && src < gpus;
        }
        if (fits) {
            std::printf("%-24s %7.1f GB/s\n", name, run(ways, bytes, seconds, 0));
            std::fflush(stdout);
        }
    }
    return 0;
}
