// Makes few copies of one size, one after the other, without using mpgpu. Prints the rate over all copies and the rate
// of each copy, and compares the bytes after the last copy. tests/gpu/few runs the program with and without
// libmpgpu_preload.so, to measure the speed-up of programs that make few copies.
//   few KIND COPIES BYTES
// KIND: up, down: between pinned host memory and GPU 0; pageable-up, pageable-down: the same with pageable memory;
// fresh-up, fresh-down: the same with pageable memory that is allocated anew for each copy; peer: from GPU 0 to GPU 1.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "few: %s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void fill(char *memory, std::size_t bytes, std::uint64_t seed) {
    for (std::size_t at = 0; at + sizeof(std::uint64_t) <= bytes; at += sizeof(std::uint64_t)) {
        const std::uint64_t value = (at + seed) * 0x9E3779B97F4A7C15U;
        std::memcpy(memory + at, &value, sizeof(value));
    }
}

/// Makes the copies. Returns true if the bytes are right after the last copy.
bool run(const std::string &kind, int copies, std::size_t bytes) {
    const bool is_up = kind.find("up") != std::string::npos;
    const bool is_peer = kind == "peer";
    const bool is_pinned = kind == "up" || kind == "down" || is_peer;
    const bool is_fresh = kind.rfind("fresh", 0) == 0;
    CHECK(cudaSetDevice(0));
    cudaStream_t order = nullptr;
    CHECK(cudaStreamCreate(&order));
    char *on_gpu = nullptr;
    CHECK(cudaMalloc(&on_gpu, bytes));
    char *other = nullptr;
    if (is_peer) {
        CHECK(cudaSetDevice(1));
        CHECK(cudaMalloc(&other, bytes));
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceEnablePeerAccess(1, 0));
    }
    char *on_host = nullptr;
    if (is_pinned) {
        CHECK(cudaMallocHost(&on_host, bytes));
    } else {
        on_host = static_cast<char *>(std::malloc(bytes));
    }
    fill(on_host, bytes, 0);
    CHECK(cudaMemcpy(on_gpu, on_host, bytes, cudaMemcpyHostToDevice));

    std::vector<double> seconds;
    for (int copy = 0; copy < copies; ++copy) {
        if (is_fresh) {
            std::free(on_host);
            on_host = static_cast<char *>(std::malloc(bytes));
            if (is_up) {
                fill(on_host, bytes, static_cast<std::uint64_t>(copy));
            }
        }
        const double begin = now();
        char *const to = is_peer ? other : is_up ? on_gpu : on_host;
        const char *const from = is_peer || !is_up ? on_gpu : on_host;
        CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, order));
        CHECK(cudaStreamSynchronize(order));
        seconds.push_back(now() - begin);
    }

    std::vector<char> found(bytes);
    std::vector<char> expected(bytes);
    fill(expected.data(), bytes, is_fresh && is_up ? static_cast<std::uint64_t>(copies - 1) : 0);
    if (is_up || is_peer) {
        CHECK(cudaMemcpy(found.data(), is_peer ? other : on_gpu, bytes, cudaMemcpyDeviceToHost));
    } else {
        std::copy_n(on_host, bytes, found.begin());
    }
    const bool is_right = found == expected;

    double all = 0;
    for (const double one : seconds) {
        all += one;
    }
    constexpr double giga = 1e9;
    std::printf("%-13s %10zu B %7.2f GB/s, bytes %s; each:", kind.c_str(), bytes,
                static_cast<double>(bytes) * copies / all / giga, is_right ? "right" : "WRONG");
    for (const double one : seconds) {
        std::printf(" %.1f", static_cast<double>(bytes) / one / giga);
    }
    std::printf("\n");
    return is_right;
}

} // namespace

int main(int argc, char *argv[]) {
    if (argc != 4 || std::atoi(argv[2]) < 1) {
        std::fprintf(stderr, "few: usage: few KIND COPIES BYTES\n");
        return 2;
    }
    return run(argv[1], std::atoi(argv[2]), std::strtoull(argv[3], nullptr, 10)) ? 0 : 1;
}
