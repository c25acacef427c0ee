// Makes random copies of every kind between memory of all GPUs and of the host, without using mpgpu. The copies are in
// random streams and are ordered only by events. At the end the program prints a digest of all memory, which does not
// depend on how the copies were made. tests/gpu/unchanged compares runs with and without libmpgpu_preload.so.
//   copies COUNT [SEED]
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "copies: %s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

constexpr std::size_t slot_bytes = std::size_t{16} << 20;
constexpr int host = -1;

enum class kind { device, pooled, managed, pinned, registered, pageable };

struct slot {
    kind of;
    int gpu;
    char *memory;
    /// Events of the memory, one for each GPU, because each GPU records its own event. The event that was recorded last
    /// marks the end of the last work that used the memory.
    std::vector<cudaEvent_t> events;
    std::size_t last;
};

/// Makes the GPU current that makes the copies of a slot. For memory of a pool this is the GPU of the pool, because no
/// other GPU has access.
void enter(const slot &one) {
    CHECK(cudaSetDevice(one.gpu == host ? 0 : one.gpu));
}

struct stream {
    int gpu;
    cudaStream_t handle;
};

slot make(kind of, int gpu) {
    slot made{of, gpu, nullptr, {}, 0};
    CHECK(cudaSetDevice(gpu == host ? 0 : gpu));
    void *memory = nullptr;
    switch (of) {
    case kind::device:
        CHECK(cudaMalloc(&memory, slot_bytes));
        break;
    case kind::pooled:
        CHECK(cudaMallocAsync(&memory, slot_bytes, nullptr));
        break;
    case kind::managed:
        CHECK(cudaMallocManaged(&memory, slot_bytes));
        break;
    case kind::pinned:
        CHECK(cudaHostAlloc(&memory, slot_bytes, cudaHostAllocPortable));
        break;
    case kind::registered:
    case kind::pageable:
        memory = std::aligned_alloc(4096, slot_bytes);
        break;
    }
    if (of == kind::registered) {
        CHECK(cudaHostRegister(memory, slot_bytes, cudaHostRegisterPortable));
    }
    made.memory = static_cast<char *>(memory);
    int gpus = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    for (int one = 0; one < gpus; ++one) {
        CHECK(cudaSetDevice(one));
        CHECK(cudaEventCreateWithFlags(&made.events.emplace_back(), cudaEventDisableTiming));
    }
    return made;
}

std::uint64_t hash(std::uint64_t seed, const std::vector<char> &bytes) {
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + i, 8);
        seed = (seed ^ word) * 0x9e3779b97f4a7c15ULL;
        seed ^= seed >> 32U;
    }
    return seed;
}

} // namespace

int main(int count, char **arguments) {
    const unsigned long long copies = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    std::mt19937_64 random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    const auto below = [&](std::uint64_t bound) { return random() % bound; };
    int gpus = 0;
    CHECK(cudaGetDeviceCount(&gpus));
    std::vector<slot> slots;
    std::vector<stream> streams;
    for (int gpu = 0; gpu < gpus; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        for (int peer = 0; peer < gpus; ++peer) {
            if (peer != gpu) {
                CHECK(cudaDeviceEnablePeerAccess(peer, 0));
            }
        }
        slots.insert(slots.end(), {make(kind::device, gpu), make(kind::device, gpu), make(kind::device, gpu),
                                   make(kind::pooled, gpu)});
        CHECK(cudaSetDevice(gpu)); // `make` leaves another device current
        streams.push_back({gpu, nullptr});
        streams.push_back({gpu, cudaStreamPerThread});
        for (int i = 0; i < 3; ++i) {
            cudaStream_t made = nullptr;
            CHECK(cudaStreamCreateWithFlags(&made, i == 0 ? cudaStreamDefault : cudaStreamNonBlocking));
            streams.push_back({gpu, made});
        }
    }
    slots.insert(slots.end(), {make(kind::managed, 0), make(kind::pinned, host), make(kind::pinned, host),
                               make(kind::registered, host), make(kind::pageable, host)});
    for (const slot &one : slots) {
        std::vector<char> content(slot_bytes);
        for (std::size_t i = 0; i < slot_bytes; i += 8) {
            const std::uint64_t word = random();
            std::memcpy(content.data() + i, &word, 8);
        }
        enter(one);
        CHECK(cudaMemcpy(one.memory, content.data(), slot_bytes, cudaMemcpyDefault));
        CHECK(cudaDeviceSynchronize());
    }

    for (unsigned long long i = 0; i < copies; ++i) {
        slot &dst = slots[below(slots.size())];
        slot &src = slots[below(slots.size())];
        const stream &in = streams[below(streams.size())];
        if (&dst == &src) {
            continue;
        }
        // One in 16 is large; the rest have any size below 64 KiB.
        const std::size_t bytes = below(16) == 0 ? 1 + below(slot_bytes) : 1 + below(std::size_t{1} << (1 + below(16)));
        const std::size_t to = below(slot_bytes - bytes + 1);
        const std::size_t from = below(slot_bytes - bytes + 1);
        // Only the GPU that owns a pool can access the pool, so that GPU makes the copy.
        const slot &pooled = dst.of == kind::pooled ? dst : src;
        const bool is_pooled = pooled.of == kind::pooled;
        if (dst.of == kind::pooled && src.of == kind::pooled && dst.gpu != src.gpu) {
            continue;
        }
        const stream &on = is_pooled ? streams[static_cast<std::size_t>(pooled.gpu) * 5 + below(5)] : in;
        CHECK(cudaSetDevice(on.gpu));
        for (const slot *end : {&dst, &src}) {
            CHECK(cudaStreamWaitEvent(on.handle, end->events[end->last], 0));
            if (end->of == kind::pageable || end->of == kind::managed) {
                // The CPU takes part in such copies, outside the order of the stream.
                CHECK(cudaEventSynchronize(end->events[end->last]));
            }
        }
        if (dst.of == kind::pageable || src.of == kind::pageable) {
            CHECK(cudaStreamSynchronize(on.handle));
        }
        char *const target = dst.memory + to;
        const char *const source = src.memory + from;
        const auto what = below(20);
        if (what == 0 && dst.of != kind::pageable) {
            CHECK(cudaMemsetAsync(target, static_cast<int>(below(256)), bytes, on.handle));
        } else if (what == 1 && bytes >= 4) {
            CHECK(cudaMemcpy2DAsync(target, bytes / 2, source, bytes / 2, bytes / 4, 2, cudaMemcpyDefault, on.handle));
        } else if (what < 6 && dst.of == kind::device && src.of == kind::device) {
            CHECK(cudaMemcpyPeerAsync(target, dst.gpu, source, src.gpu, bytes, on.handle));
        } else {
            CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, on.handle));
        }
        for (slot *end : {&dst, &src}) {
            end->last = static_cast<std::size_t>(on.gpu);
            CHECK(cudaEventRecord(end->events[end->last], on.handle));
        }
    }
    for (int gpu = 0; gpu < gpus; ++gpu) {
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaDeviceSynchronize());
    }
    std::uint64_t all = 1;
    std::vector<char> content(slot_bytes);
    for (const slot &one : slots) {
        enter(one);
        CHECK(cudaMemcpy(content.data(), one.memory, slot_bytes, cudaMemcpyDefault));
        all = hash(all, content);
    }
    std::printf("%llu copies: %016llx\n", copies, static_cast<unsigned long long>(all));
}
