// Stress test of the interposer. Each of 16 threads copies data through a chain of buffers, from one buffer to the
// next, and compares the bytes in the last buffer. The kinds of memory, the sizes, the functions and the streams are
// random. The environment variable STRESS_SECONDS sets the duration. The default is 3 seconds, or 600 seconds if the
// environment variable LONG_TESTS is set. If a thread hangs, the test exceeds its time limit.
#include "driver.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr unsigned thread_count = 16;
constexpr CUdevice gpus = 3;
constexpr std::size_t most_bytes = std::size_t{6} << 20;
/// Number of rounds after which a thread frees one of its buffers and allocates it again.
constexpr unsigned rounds_of_a_buffer = 8;

void check(bool holds, const char *what, unsigned thread) {
    if (!holds) {
        std::printf("stress: failed: %s (thread %u)\n", what, thread);
        std::fflush(stdout);
        std::_Exit(1);
    }
}

char *bytes_at(CUdeviceptr address) {
    return reinterpret_cast<char *>(address); // NOLINT(performance-no-int-to-ptr): host memory in the test double
}

CUcontext primary(CUdevice gpu) {
    CUcontext context = nullptr;
    return cuDevicePrimaryCtxRetain(&context, gpu) == 0 ? context : nullptr;
}

enum class kind { gpu, pool, pinned, pageable };

/// Buffer of a thread.
struct buffer {
    kind of;
    CUdevice gpu;
    CUdeviceptr address;
};

CUdeviceptr allocate(kind of, CUdevice gpu, unsigned thread) {
    CUdeviceptr address = 0;
    void *host = nullptr;
    CUresult code = cuCtxSetCurrent(primary(gpu));
    switch (of) {
    case kind::gpu:
        code += cuMemAlloc_v2(&address, most_bytes);
        break;
    case kind::pool:
        code += cuMemAllocAsync(&address, most_bytes, nullptr);
        break;
    case kind::pinned:
        code += cuMemHostAlloc(&host, most_bytes, 1);
        break;
    case kind::pageable:
        host = std::malloc(most_bytes); // NOLINT(cppcoreguidelines-no-malloc): freed by `replace`
        break;
    }
    address = host != nullptr ? reinterpret_cast<CUdeviceptr>(host) : address;
    check(code == 0 && address != 0 && cuCtxSetCurrent(primary(0)) == 0, "allocating memory", thread);
    return address;
}

void replace(buffer &what, unsigned thread) {
    if (what.of == kind::pageable) {
        std::free(bytes_at(what.address)); // NOLINT(cppcoreguidelines-no-malloc): from `allocate`
    } else {
        check(cuMemFree_v2(what.address) == 0, "freeing memory", thread);
    }
    what.address = allocate(what.of, what.gpu, thread);
}

/// Enqueues a copy. `by` selects a function: one that accepts all kinds of memory, or one for the direction of the
/// copy.
CUresult copy(const buffer &dst, const buffer &src, std::size_t offset, std::size_t bytes, CUstream in, unsigned by) {
    const CUdeviceptr to = dst.address + offset;
    const CUdeviceptr from = src.address + offset;
    const bool is_from_host = src.of >= kind::pinned;
    const bool is_to_host = dst.of >= kind::pinned;
    if (by % 3 == 0 || (is_from_host && is_to_host)) {
        return cuMemcpyAsync(to, from, bytes, in);
    }
    if (by % 3 == 1) {
        return cuMemcpyAsync_ptsz(to, from, bytes, in);
    }
    if (is_from_host) {
        return cuMemcpyHtoDAsync_v2(to, bytes_at(from), bytes, in);
    }
    return is_to_host ? cuMemcpyDtoHAsync_v2(bytes_at(to), from, bytes, in) : cuMemcpyDtoDAsync_v2(to, from, bytes, in);
}

/// Copies data and compares it until the time `end`. Some rounds use `shared`, a stream that all threads use. Returns
/// the number of copies.
std::size_t work(unsigned thread, CUstream shared, std::chrono::steady_clock::time_point end) {
    std::minstd_rand random(thread + 1);
    std::vector<buffer> buffers;
    for (const kind of : {kind::gpu, kind::pool, kind::pinned, kind::pageable}) {
        for (CUdevice gpu = 0; gpu < (of == kind::gpu ? gpus : 1); ++gpu) {
            buffers.push_back({of, gpu, allocate(of, gpu, thread)});
        }
    }
    CUstream own = nullptr;
    check(cuStreamCreate(&own, 1) == 0, "creating a stream", thread);
    std::vector<char> expected(most_bytes);
    std::size_t copies = 0;
    for (unsigned round = 1; std::chrono::steady_clock::now() < end; ++round) {
        std::shuffle(buffers.begin(), buffers.end(), random);
        const std::size_t length = 2 + random() % (buffers.size() - 1);
        const std::size_t offset = random() % 4 == 0 ? random() % (most_bytes / 2) : 0;
        const std::size_t bytes = 1 + random() % (most_bytes - offset);
        const CUstream in = random() % 4 == 0 ? shared : own;
        for (std::size_t at = 0; at < bytes; at += 64) {
            expected[at] = static_cast<char>(random());
        }
        std::memcpy(bytes_at(buffers[0].address + offset), expected.data(), bytes);
        for (std::size_t at = 1; at < length; ++at, ++copies) {
            check(copy(buffers[at], buffers[at - 1], offset, bytes, in, static_cast<unsigned>(random())) == 0,
                  "enqueueing a copy", thread);
        }
        check(cuStreamSynchronize(in) == 0, "synchronising a stream", thread);
        check(std::memcmp(bytes_at(buffers[length - 1].address + offset), expected.data(), bytes) == 0,
              "comparing the bytes", thread);
        if (round % rounds_of_a_buffer == 0) {
            replace(buffers[random() % buffers.size()], thread);
            fake_forget_copies(0); // Otherwise, the test double's list of copies would grow without limit.
        }
    }
    return copies;
}

std::chrono::seconds duration() {
    if (const char *seconds = std::getenv("STRESS_SECONDS")) {
        return std::chrono::seconds(std::atol(seconds));
    }
    return std::chrono::seconds(std::getenv("LONG_TESTS") != nullptr ? 600 : 3);
}

} // namespace

int main() {
    check(cuInit(0) == 0, "cuInit", thread_count);
    for (CUdevice gpu = 0; gpu < gpus; ++gpu) {
        check(primary(gpu) != nullptr, "retaining a context", thread_count);
    }
    CUstream shared = nullptr;
    check(cuCtxSetCurrent(primary(0)) == 0 && cuStreamCreate(&shared, 1) == 0, "creating a stream", thread_count);
    const auto end = std::chrono::steady_clock::now() + duration();
    std::atomic<std::size_t> copies = 0;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < thread_count; ++thread) {
        running.emplace_back([&copies, shared, end, thread] { copies += work(thread, shared, end); });
    }
    for (std::thread &one : running) {
        one.join();
    }
    std::printf("stress: %zu copies by %u threads\n", copies.load(), thread_count);
}
