// Simulates a CUDA driver with GPUs: libcuda.so.1 for the tests of the interposer. GPU memory is host memory that
// processes share by CUDA IPC handles. Each stream is a thread that executes its work in order. Events, host functions,
// captures and graphs of copies work; kernels are refused. The driver counts the requested copies and fails on request.
#include "driver.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

struct fake_context {
    CUdevice device;
    bool is_primary;
    std::uint64_t number;
};

struct fake_stream {
    fake_context *context;
    std::uint64_t number;
    std::deque<std::function<void()>> queue;
    std::uint64_t asked = 0;
    std::uint64_t done = 0;
    bool is_destroyed = false;
    fake_graph *captured = nullptr;
};

// An event may be recorded several times, in different streams, and these recordings may end in any order. A wait is
// for one of them.
struct fake_event {
    std::uint64_t asked = 0;
    std::set<std::uint64_t> pending;

    [[nodiscard]] bool has_ended(std::uint64_t recording) const { return pending.count(recording) == 0; }
};

struct one_copy {
    CUdeviceptr dst;
    CUdeviceptr src;
    std::size_t bytes;
};

struct fake_graph {
    std::deque<one_copy> copies;
};

namespace {

constexpr CUresult success = 0;
constexpr CUresult invalid_value = 1;
constexpr CUresult not_initialized = 3;
constexpr CUresult invalid_device = 101;
constexpr CUresult invalid_context = 201;
constexpr CUresult peer_access_already_enabled = 704;
constexpr CUresult peer_access_not_enabled = 705;
constexpr CUresult invalid_handle = 400;
constexpr CUresult symbol_not_found = 500;
constexpr CUresult not_ready = 600;
constexpr CUresult not_supported = 801;
constexpr CUresult capture_unsupported = 900;
constexpr CUresult unknown = 999;

struct allocation {
    std::size_t bytes = 0;
    /// GPU on which the memory is. -1 for host memory.
    CUdevice device = -1;
    fake_context *context = nullptr;
    std::uint64_t number = 0;
    bool is_managed = false;
    bool is_pooled = false;
    bool is_registered = false;
    int file = -1;
    int opened = 0;
    /// Size in bytes of a chunk if the memory is a mapping. 0 for all other memory.
    std::size_t chunk = 0;
    /// Bit mask of the GPUs that have access to all chunks of a mapping except the last.
    std::uint64_t let_in = 0;

    [[nodiscard]] bool is_plain() const { return device >= 0 && !is_managed && !is_pooled && chunk == 0; }
};

/// Copy that the program or mpgpu has requested.
struct logged {
    const char *function;
    one_copy what;
    CUstream stream;
};

struct node {
    std::mutex lock;
    std::condition_variable changed;
    int gpus = 4;
    std::uint64_t numbers = 1;
    std::map<CUdeviceptr, allocation> memory;
    std::map<CUdevice, fake_context *> primaries;
    std::map<CUdevice, int> retained;
    std::set<std::pair<fake_context *, fake_context *>> peers;
    std::set<fake_stream *> streams;
    std::map<std::pair<fake_context *, std::uint64_t>, fake_stream *> default_streams;
    std::map<std::string, void *> functions;
    std::vector<logged> copies;
    /// Number of calls that succeed before one fails. Negative if no call fails.
    long left = -1;
    const char *failed = nullptr;
    /// True if large copies into GPU memory lose their last byte.
    bool loses = false;
    /// Bit mask, for each GPU, of the GPUs that have access to its memory pool.
    std::array<std::uint64_t, 64> pools{};
    /// Number of copies made by GPUs that had no access to the memory.
    long trespasses = 0;
};

// The object is never destroyed, because threads of streams use it until the process ends.
node &all() {
    static auto &made = *new node;
    return made;
}

thread_local std::vector<fake_context *> contexts;
thread_local std::uint64_t thread_number;

fake_context *current() {
    return contexts.empty() ? nullptr : contexts.back();
}

/// Returns true if this call of a driver function must fail. A function that frees a resource frees it nevertheless.
bool fails(const char *function) {
    const std::lock_guard guard(all().lock);
    if (all().left < 0 || all().left-- > 0) {
        return false;
    }
    all().failed = function;
    return true;
}

bool gives_back(const std::string &function) {
    for (const char *word : {"Free", "Destroy", "Release", "Unload", "Unregister", "Close", "Pop", "Synchronize"}) {
        if (function.find(word) != std::string::npos) {
            return true;
        }
    }
    return false;
}

/// Process that has initialised the driver. In a child of fork the driver is not initialised.
std::atomic<pid_t> process;

template <class Work> CUresult enter(const char *function, const Work &work) {
    if (process != 0 && process != getpid()) {
        return not_initialized;
    }
    if (!fails(function)) {
        return work();
    }
    if (gives_back(function)) {
        work();
    }
    return unknown;
}

struct entry {
    entry(const char *name, void *function) { all().functions[name] = function; }
};

// Defines a function of the driver that can fail.
#define FAKE(name, parameters, ...)                                                                                    \
    extern "C" CUresult name parameters {                                                                              \
        return enter(#name, [&]() -> CUresult __VA_ARGS__);                                                            \
    }                                                                                                                  \
    const entry entry_of_##name(#name, reinterpret_cast<void *>(&name));

// Defines a function that can be looked up but returns not_supported.
#define REFUSED(name) FAKE(name, (), { return not_supported; })

void *at(CUdeviceptr address) {
    return reinterpret_cast<void *>(address); // NOLINT(performance-no-int-to-ptr)
}
CUdeviceptr number_of(const void *address) {
    return reinterpret_cast<CUdeviceptr>(address);
}

void run(fake_stream *stream) {
    std::unique_lock guard(all().lock);
    for (;;) {
        all().changed.wait(guard, [&] { return !stream->queue.empty() || stream->is_destroyed; });
        if (stream->queue.empty()) {
            return;
        }
        const auto task = std::move(stream->queue.front());
        stream->queue.pop_front();
        guard.unlock();
        task();
        guard.lock();
        ++stream->done;
        all().changed.notify_all();
    }
}

/// Creates a stream. The caller holds the lock.
fake_stream *make_stream(fake_context *context) {
    auto *stream = new fake_stream{context, all().numbers++, {}};
    all().streams.insert(stream);
    std::thread(run, stream).detach();
    return stream;
}

/// Returns the stream that a handle denotes. 0 and 1 are the default stream of the context, and 2 is the default stream
/// of the thread.
fake_stream *find_stream(CUstream handle) {
    const std::lock_guard guard(all().lock);
    const auto value = number_of(handle);
    if (value > 2) {
        return all().streams.count(handle) != 0 ? handle : nullptr;
    }
    if (current() == nullptr) {
        return nullptr;
    }
    if (thread_number == 0) {
        thread_number = all().numbers++;
    }
    auto &found = all().default_streams[{current(), value == 2 ? thread_number : 0}];
    if (found == nullptr) {
        found = make_stream(current());
    }
    return found;
}

CUresult enqueue(CUstream handle, std::function<void()> task) {
    fake_stream *stream = find_stream(handle);
    if (stream == nullptr) {
        return invalid_handle;
    }
    const std::lock_guard guard(all().lock);
    stream->queue.push_back(std::move(task));
    ++stream->asked;
    all().changed.notify_all();
    return success;
}

/// Returns the allocation that contains an address. The caller holds the lock.
std::map<CUdeviceptr, allocation>::iterator find_memory(CUdeviceptr address) {
    auto &memory = all().memory;
    const auto after = memory.upper_bound(address);
    if (after == memory.begin() || address - std::prev(after)->first >= std::prev(after)->second.bytes) {
        return memory.end();
    }
    return std::prev(after);
}

/// Returns true if GPU `device` has access to memory of another GPU's pool or mapping. The caller holds the lock.
bool is_let_in(CUdevice device, const allocation &known, CUdeviceptr base, CUdeviceptr last) {
    const auto bit = std::uint64_t{1} << static_cast<unsigned>(device);
    if (known.is_pooled) {
        return device == known.device || (all().pools.at(static_cast<std::size_t>(known.device)) & bit) != 0;
    }
    const bool is_in_last_chunk = known.chunk != 0 && (last - base) / known.chunk == (known.bytes - 1) / known.chunk;
    return known.chunk == 0 || device == known.device || (!is_in_last_chunk && (known.let_in & bit) != 0);
}

/// Returns true if the GPU of the context has no access to the source or the destination of a copy.
bool trespasses(const fake_context *by, const one_copy &what) {
    const std::lock_guard guard(all().lock);
    for (const CUdeviceptr end : {what.dst, what.src}) {
        const auto found = find_memory(end);
        if (found != all().memory.end() && !is_let_in(by->device, found->second, found->first, end + what.bytes - 1)) {
            ++all().trespasses;
            return true;
        }
    }
    return false;
}

void move(const one_copy &what) {
    // The copy takes as long as over a real link. Work that does not wait for it then runs too early, which the test
    // detects.
    std::this_thread::sleep_for(std::chrono::microseconds(500 + what.bytes / 16384));
    bool loses = false;
    {
        const std::lock_guard guard(all().lock);
        const auto found = find_memory(what.dst);
        loses = all().loses && what.bytes > 65536 && found != all().memory.end() && found->second.device >= 0;
    }
    std::memmove(at(what.dst), at(what.src), what.bytes - (loses ? 1 : 0));
}

CUresult copy(const char *function, const one_copy &what, CUstream handle, bool known_only) {
    fake_stream *stream = find_stream(handle);
    if (stream == nullptr) {
        return invalid_handle;
    }
    // The driver checks addresses in the current context, and the GPU of the stream copies the data.
    if (trespasses(current(), what) || trespasses(stream->context, what)) {
        return invalid_value;
    }
    {
        const std::lock_guard guard(all().lock);
        for (const CUdeviceptr end : {what.dst, what.src}) {
            const auto found = find_memory(end);
            const bool is_known = found != all().memory.end();
            if ((known_only && !is_known) || (is_known && what.bytes > found->second.bytes - (end - found->first))) {
                return invalid_value;
            }
        }
        all().copies.push_back({function, what, handle});
        if (stream->captured != nullptr) {
            stream->captured->copies.push_back(what);
            return success;
        }
    }
    return enqueue(handle, [what] { move(what); });
}

/// Returns the stream that handle 0 denotes in functions whose name ends in `_ptsz`.
CUstream per_thread(CUstream handle) {
    return handle == nullptr ? static_cast<CUstream>(at(2)) : handle;
}

/// Allocates pages of a file. Other processes can map the pages through the descriptors of this process.
CUresult allocate(CUdeviceptr *out, std::size_t bytes, allocation made) {
    const std::size_t length = (bytes + 4095) / 4096 * 4096;
    made.file = memfd_create("fake GPU memory", MFD_CLOEXEC);
    if (made.file < 0 || ftruncate(made.file, static_cast<off_t>(length)) != 0) {
        return unknown;
    }
    void *base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, made.file, 0);
    if (base == MAP_FAILED) { // NOLINT(performance-no-int-to-ptr): the system's own macro
        return unknown;
    }
    const std::lock_guard guard(all().lock);
    made.bytes = bytes;
    made.number = all().numbers++;
    all().memory[number_of(base)] = made;
    *out = number_of(base);
    return success;
}

CUresult release(CUdeviceptr base) {
    const std::lock_guard guard(all().lock);
    const auto found = all().memory.find(base);
    if (found == all().memory.end()) {
        return invalid_value;
    }
    if (!found->second.is_registered) {
        munmap(at(base), (found->second.bytes + 4095) / 4096 * 4096);
        close(found->second.file);
    }
    all().memory.erase(found);
    return success;
}

CUresult allocate_here(CUdeviceptr *out, std::size_t bytes, bool is_managed, bool is_pooled) {
    if (current() == nullptr) {
        return invalid_context;
    }
    return allocate(out, bytes, {bytes, current()->device, current(), 0, is_managed, is_pooled});
}

void wait_for(fake_stream *stream) {
    std::unique_lock guard(all().lock);
    const auto asked = stream->asked;
    all().changed.wait(guard, [&] { return stream->done >= asked; });
}

/// Contents of an IPC handle of the fake driver.
struct shared {
    std::uint64_t process;
    std::int64_t file;
    std::uint64_t bytes;
};

} // namespace

FAKE(cuInit, (unsigned), {
    process = getpid();
    return success;
})
FAKE(cuDriverGetVersion, (int *version), {
    *version = 12040;
    return success;
})
FAKE(cuGetErrorName, (CUresult code, const char **text), {
    *text = code == unknown ? "FAKE_ERROR" : "CUDA_ERROR";
    return success;
})
FAKE(cuGetErrorString, (CUresult, const char **text), {
    *text = "an error of the fake driver";
    return success;
})
FAKE(cuDeviceGetCount, (int *count), {
    *count = all().gpus;
    return success;
})
FAKE(cuDeviceGet, (CUdevice * device, int index), {
    *device = index;
    return index >= 0 && index < all().gpus ? success : invalid_device;
})
FAKE(cuDeviceGetName, (char *name, int bytes, CUdevice), {
    std::snprintf(name, static_cast<std::size_t>(bytes), "Fake GPU");
    return success;
})
FAKE(cuDeviceGetUuid, (std::array<std::uint8_t, 16> * uuid, CUdevice device), {
    uuid->fill(static_cast<std::uint8_t>(device + 1));
    return success;
})
FAKE(cuDeviceGetAttribute, (int *value, unsigned attribute, CUdevice), {
    // The GPU has compute capability 7.0 and unified addresses, and registered host memory has the same address on the
    // GPU.
    *value = attribute == 75 ? 7 : attribute == 41 || attribute == 91 ? 1 : 0;
    return success;
})
FAKE(cuDeviceCanAccessPeer, (int *can, CUdevice, CUdevice), {
    *can = 1;
    return success;
})
FAKE(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), {
    const std::lock_guard guard(all().lock);
    auto &primary = all().primaries[device];
    if (primary == nullptr) {
        primary = new fake_context{device, true, all().numbers++};
    }
    ++all().retained[device];
    *context = primary;
    return success;
})
FAKE(cuDevicePrimaryCtxRelease_v2, (CUdevice device), {
    const std::lock_guard guard(all().lock);
    --all().retained[device];
    return success;
})
FAKE(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), {
    const std::lock_guard guard(all().lock);
    *flags = 0;
    *active = all().retained[device] > 0 ? 1 : 0;
    return success;
})
FAKE(cuCtxCreate_v2, (CUcontext * context, unsigned, CUdevice device), {
    const std::lock_guard guard(all().lock);
    *context = new fake_context{device, false, all().numbers++};
    contexts.push_back(*context);
    return success;
})
FAKE(cuCtxGetId, (CUcontext context, std::uint64_t *number), {
    const fake_context *meant = context == nullptr ? current() : context;
    *number = meant == nullptr ? 0 : meant->number;
    return meant == nullptr ? invalid_context : success;
})
FAKE(cuCtxSetFlags, (unsigned), { return current() == nullptr ? invalid_context : success; })
FAKE(cuCtxSetCurrent, (CUcontext context), {
    contexts = {context};
    return success;
})
FAKE(cuCtxGetCurrent, (CUcontext * context), {
    *context = current();
    return success;
})
FAKE(cuCtxPushCurrent_v2, (CUcontext context), {
    contexts.push_back(context);
    return success;
})
FAKE(cuCtxPopCurrent_v2, (CUcontext * context), {
    if (contexts.empty()) {
        return invalid_context;
    }
    if (context != nullptr) {
        *context = contexts.back();
    }
    contexts.pop_back();
    return success;
})
FAKE(cuCtxGetDevice, (CUdevice * device), {
    if (current() == nullptr) {
        return invalid_context;
    }
    *device = current()->device;
    return success;
})
FAKE(cuCtxEnablePeerAccess, (CUcontext peer, unsigned), {
    const std::lock_guard guard(all().lock);
    return all().peers.insert({current(), peer}).second ? success : peer_access_already_enabled;
})
FAKE(cuCtxDisablePeerAccess, (CUcontext peer), {
    const std::lock_guard guard(all().lock);
    return all().peers.erase({current(), peer}) != 0 ? success : peer_access_not_enabled;
})
FAKE(cuCtxSynchronize, (), {
    std::vector<fake_stream *> streams;
    {
        const std::lock_guard guard(all().lock);
        streams.assign(all().streams.begin(), all().streams.end());
    }
    std::for_each(streams.begin(), streams.end(), wait_for);
    return success;
})

FAKE(cuMemAlloc_v2, (CUdeviceptr * out, std::size_t bytes), { return allocate_here(out, bytes, false, false); })
FAKE(cuMemAllocManaged, (CUdeviceptr * out, std::size_t bytes, unsigned),
     { return allocate_here(out, bytes, true, false); })
FAKE(cuMemAllocAsync, (CUdeviceptr * out, std::size_t bytes, CUstream),
     { return allocate_here(out, bytes, false, true); })
FAKE(cuMemFree_v2, (CUdeviceptr base), { return release(base); })
FAKE(cuMemHostAlloc, (void **out, std::size_t bytes, unsigned), {
    CUdeviceptr base = 0;
    const CUresult code = allocate(&base, bytes, {bytes, -1, current(), 0});
    *out = at(base);
    return code;
})
FAKE(cuMemFreeHost, (void *base), { return release(number_of(base)); })
FAKE(cuMemHostRegister_v2, (void *base, std::size_t bytes, unsigned), {
    const std::lock_guard guard(all().lock);
    all().memory[number_of(base)] = {bytes, -1, current(), all().numbers++, false, false, true};
    return success;
})
FAKE(cuMemHostUnregister, (void *base), { return release(number_of(base)); })
FAKE(cuPointerGetAttributes, (unsigned count, unsigned *names, void **values, CUdeviceptr address), {
    if (current() == nullptr) {
        return invalid_context;
    }
    const std::lock_guard guard(all().lock);
    const auto found = find_memory(address);
    const bool is_known = found != all().memory.end();
    const allocation known = is_known ? found->second : allocation{};
    for (unsigned i = 0; i < count; ++i) {
        const auto put = [&](auto value) { std::memcpy(values[i], &value, sizeof value); };
        switch (names[i]) {
        case 1: // CONTEXT
            put(number_of(known.is_pooled || known.chunk != 0 ? nullptr : known.context));
            break;
        case 2: // MEMORY_TYPE
            put(!is_known ? 0U : known.device < 0 ? 1U : 2U);
            break;
        case 7: // BUFFER_ID
            put(known.number);
            break;
        case 8: // IS_MANAGED
            put(static_cast<unsigned char>(known.is_managed));
            break;
        case 9: // DEVICE_ORDINAL
            put(known.device);
            break;
        case 10: // IS_LEGACY_CUDA_IPC_CAPABLE
            put(static_cast<unsigned char>(is_known && known.is_plain()));
            break;
        case 11: // RANGE_START_ADDR
            put(is_known && !known.is_registered ? found->first : 0);
            break;
        case 12:                                        // RANGE_SIZE
            put(known.is_registered ? 0 : known.bytes); // Not every driver reports it.
            break;
        case 16: // ACCESS_FLAGS
            put(is_known && is_let_in(current()->device, known, found->first, address) ? 3U : 0U);
            break;
        case 17: // MEMPOOL_HANDLE
            put(known.is_pooled ? number_of(&all().pools.at(static_cast<std::size_t>(known.device))) : 0);
            break;
        case 18: // MAPPING_SIZE
            put(known.chunk != 0 ? known.chunk : known.bytes);
            break;
        case 19: // MAPPING_BASE_ADDR
            put(!is_known
                    ? 0
                    : found->first + (known.chunk != 0 ? (address - found->first) / known.chunk * known.chunk : 0));
            break;
        default:
            break;
        }
    }
    return success;
})
FAKE(cuMemPoolGetAccess, (unsigned *flags, const std::uint64_t *pool, const std::array<int, 2> *location), {
    const std::lock_guard guard(all().lock);
    const auto owner = static_cast<int>(pool - all().pools.data());
    const int device = (*location)[1];
    *flags = device == owner || (*pool >> static_cast<unsigned>(device) & 1) != 0 ? 3U : 0U;
    return success;
})

#define FAKE_COPY(name, Dst, Src, known_only, stream_of)                                                               \
    FAKE(name, (Dst dst, Src src, std::size_t bytes, CUstream stream), {                                               \
        return copy(#name, {(CUdeviceptr)dst, (CUdeviceptr)src, bytes}, stream_of(stream), known_only);                \
    })
FAKE_COPY(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, false, )
FAKE_COPY(cuMemcpyAsync_ptsz, CUdeviceptr, CUdeviceptr, false, per_thread)
FAKE_COPY(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, true, )
FAKE_COPY(cuMemcpyDtoDAsync_v2_ptsz, CUdeviceptr, CUdeviceptr, true, per_thread)
FAKE_COPY(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, false, )
FAKE_COPY(cuMemcpyHtoDAsync_v2_ptsz, CUdeviceptr, const void *, false, per_thread)
FAKE_COPY(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, false, )
FAKE_COPY(cuMemcpyDtoHAsync_v2_ptsz, void *, CUdeviceptr, false, per_thread)
#define FAKE_COPY_NOW(name, Dst, Src, stream_of)                                                                       \
    FAKE(name, (Dst dst, Src src, std::size_t bytes), {                                                                \
        const CUresult code = copy(#name, {(CUdeviceptr)dst, (CUdeviceptr)src, bytes}, stream_of(nullptr), false);     \
        if (code == success) {                                                                                         \
            wait_for(find_stream(stream_of(nullptr)));                                                                 \
        }                                                                                                              \
        return code;                                                                                                   \
    })
FAKE_COPY_NOW(cuMemcpyHtoD_v2, CUdeviceptr, const void *, )
FAKE_COPY_NOW(cuMemcpyHtoD_v2_ptds, CUdeviceptr, const void *, per_thread)
FAKE_COPY_NOW(cuMemcpyDtoH_v2, void *, CUdeviceptr, )
FAKE_COPY_NOW(cuMemcpyDtoH_v2_ptds, void *, CUdeviceptr, per_thread)
#define FAKE_PEER_COPY(name, stream_of)                                                                                \
    FAKE(name, (CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, std::size_t bytes, CUstream stream), {         \
        return copy(#name, {dst, src, bytes}, stream_of(stream), true);                                                \
    })
FAKE_PEER_COPY(cuMemcpyPeerAsync, )
FAKE_PEER_COPY(cuMemcpyPeerAsync_ptsz, per_thread)

#define FAKE_BATCH(name, stream_of, ...)                                                                               \
    FAKE(name,                                                                                                         \
         (CUdeviceptr * dst, CUdeviceptr * src, std::size_t * bytes, std::size_t count, batch_attributes *,            \
          std::size_t *, std::size_t, __VA_ARGS__ CUstream stream),                                                    \
         {                                                                                                             \
             CUresult code = success;                                                                                  \
             for (std::size_t at = 0; at < count && code == success; ++at) {                                           \
                 code = copy(#name, {dst[at], src[at], bytes[at]}, stream_of(stream), true);                           \
             }                                                                                                         \
             return code;                                                                                              \
         })
#define FAKE_FAILED std::size_t *,
FAKE_BATCH(cuMemcpyBatchAsync, , FAKE_FAILED)
FAKE_BATCH(cuMemcpyBatchAsync_ptsz, per_thread, FAKE_FAILED)
FAKE_BATCH(cuMemcpyBatchAsync_v2, , )
FAKE_BATCH(cuMemcpyBatchAsync_v2_ptsz, per_thread, )

#define FAKE_STREAM_CREATE(name, ...)                                                                                  \
    FAKE(name, (CUstream * stream, __VA_ARGS__), {                                                                     \
        if (current() == nullptr) {                                                                                    \
            return invalid_context;                                                                                    \
        }                                                                                                              \
        const std::lock_guard guard(all().lock);                                                                       \
        *stream = make_stream(current());                                                                              \
        return success;                                                                                                \
    })
FAKE_STREAM_CREATE(cuStreamCreate, unsigned)
FAKE_STREAM_CREATE(cuStreamCreateWithPriority, unsigned, int)
FAKE(cuCtxGetStreamPriorityRange, (int *least, int *greatest), {
    *least = *greatest = 0;
    return success;
})
FAKE(cuStreamDestroy_v2, (CUstream stream), {
    // The thread ends when its work is done. The memory of the stream stays, because completed work is still counted.
    const std::lock_guard guard(all().lock);
    stream->is_destroyed = true;
    all().streams.erase(stream);
    all().changed.notify_all();
    return success;
})
FAKE(cuStreamGetCtx, (CUstream handle, CUcontext *context), {
    const fake_stream *stream = find_stream(handle);
    *context = stream == nullptr ? nullptr : stream->context;
    return stream == nullptr ? invalid_handle : success;
})
FAKE(cuStreamGetId, (CUstream handle, std::uint64_t *number), {
    const fake_stream *stream = find_stream(handle);
    *number = stream == nullptr ? 0 : stream->number;
    return stream == nullptr ? invalid_handle : success;
})
FAKE(cuStreamQuery, (CUstream handle), {
    const fake_stream *stream = find_stream(handle);
    if (stream == nullptr) {
        return invalid_handle;
    }
    const std::lock_guard guard(all().lock);
    return stream->done == stream->asked ? success : not_ready;
})
FAKE(cuStreamSynchronize, (CUstream handle), {
    fake_stream *stream = find_stream(handle);
    if (stream == nullptr) {
        return invalid_handle;
    }
    wait_for(stream);
    return success;
})
FAKE(cuStreamWaitEvent, (CUstream handle, CUevent event, unsigned), {
    std::uint64_t until = 0;
    {
        const std::lock_guard guard(all().lock);
        until = event->asked;
    }
    return enqueue(handle, [event, until] {
        std::unique_lock guard(all().lock);
        all().changed.wait(guard, [&] { return event->has_ended(until); });
    });
})
// Waits until words have given values, or writes values to words. Each operation consists of six words, which include
// its kind, address, value and flags.
FAKE(cuStreamBatchMemOp_v2, (CUstream handle, unsigned count, const std::uint64_t *operations, unsigned), {
    for (unsigned i = 0; i < count; ++i) {
        const std::uint64_t *one = operations + std::size_t{6} * i;
        auto *word = static_cast<std::uint64_t *>(at(one[1]));
        const std::uint64_t value = one[2];
        const bool waits = (one[0] & 0xffffffff) == 4;
        const CUresult code = enqueue(handle, [word, value, waits] {
            if (!waits) {
                __atomic_store_n(word, value, __ATOMIC_RELEASE);
            }
            while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value) {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        });
        if (code != success) {
            return code;
        }
    }
    return success;
})
FAKE(cuStreamIsCapturing, (CUstream handle, unsigned *status), {
    const fake_stream *stream = find_stream(handle);
    if (stream == nullptr) {
        return invalid_handle;
    }
    *status = stream->captured == nullptr ? 0 : 1;
    return success;
})
FAKE(cuThreadExchangeStreamCaptureMode, (unsigned *), { return success; })
FAKE(cuStreamBeginCapture_v2, (CUstream handle, int), {
    fake_stream *stream = find_stream(handle);
    if (stream == nullptr || stream->captured != nullptr) {
        return invalid_handle;
    }
    stream->captured = new fake_graph;
    return success;
})
FAKE(cuStreamEndCapture, (CUstream handle, CUgraph *graph), {
    fake_stream *stream = find_stream(handle);
    if (stream == nullptr || stream->captured == nullptr) {
        return capture_unsupported;
    }
    *graph = std::exchange(stream->captured, nullptr);
    return success;
})
FAKE(cuLaunchHostFunc, (CUstream handle, CUhostFn function, void *user),
     { return enqueue(handle, [function, user] { function(user); }); })

FAKE(cuEventCreate, (CUevent * event, unsigned), {
    *event = new fake_event;
    return success;
})
FAKE(cuEventDestroy_v2, (CUevent), { return success; }) // Streams may still wait for it.
FAKE(cuEventRecord, (CUevent event, CUstream handle), {
    std::uint64_t recording = 0;
    {
        const std::lock_guard guard(all().lock);
        recording = ++event->asked;
        event->pending.insert(recording);
    }
    return enqueue(handle, [event, recording] {
        const std::lock_guard guard(all().lock);
        event->pending.erase(recording);
        all().changed.notify_all();
    });
})
FAKE(cuEventQuery, (CUevent event), {
    const std::lock_guard guard(all().lock);
    return event->has_ended(event->asked) ? success : not_ready;
})
FAKE(cuEventSynchronize, (CUevent event), {
    std::unique_lock guard(all().lock);
    const auto until = event->asked;
    all().changed.wait(guard, [&] { return event->has_ended(until); });
    return success;
})

namespace {

/// Returns the fields of a `CUDA_MEMCPY3D` that a one-line copy uses.
one_copy line(const std::uint8_t *parameters) {
    one_copy what{};
    std::memcpy(&what.src, parameters + 48, sizeof(what.src));
    std::memcpy(&what.dst, parameters + 136, sizeof(what.dst));
    std::memcpy(&what.bytes, parameters + 176, sizeof(what.bytes));
    return what;
}

} // namespace

FAKE(cuGraphCreate, (CUgraph * graph, unsigned), {
    *graph = new fake_graph;
    return success;
})
FAKE(cuGraphDestroy, (CUgraph), { return success; })
// Nodes run in the order in which they are added. Each node is therefore after the nodes on which it depends.
FAKE(cuGraphAddMemcpyNode,
     (CUgraphNode * added, CUgraph graph, const CUgraphNode *, std::size_t, const std::uint8_t *parameters,
      CUcontext by),
     {
         if (trespasses(by, line(parameters))) {
             return invalid_value;
         }
         graph->copies.push_back(line(parameters));
         *added = new std::size_t(graph->copies.size() - 1);
         return success;
     })
FAKE(cuGraphInstantiateWithFlags, (CUgraphExec * made, CUgraph graph, std::uint64_t), {
    *made = new fake_graph(*graph);
    return success;
})
FAKE(cuGraphExecMemcpyNodeSetParams,
     (CUgraphExec graph, CUgraphNode changed, const std::uint8_t *parameters, CUcontext by), {
         if (trespasses(by, line(parameters))) {
             return invalid_value;
         }
         graph->copies.at(*changed) = line(parameters);
         return success;
     })
FAKE(cuGraphExecDestroy, (CUgraphExec), { return success; })
FAKE(cuGraphLaunch, (CUgraphExec graph, CUstream handle), {
    const auto copies = graph->copies;
    {
        const std::lock_guard guard(all().lock);
        for (const one_copy &what : copies) {
            all().copies.push_back({"cuGraphLaunch", what, handle});
        }
    }
    return enqueue(handle, [copies] { std::for_each(copies.begin(), copies.end(), move); });
})

FAKE(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address), {
    const std::lock_guard guard(all().lock);
    const auto found = find_memory(address);
    if (found == all().memory.end() || !found->second.is_plain()) {
        return invalid_value;
    }
    const shared what{static_cast<std::uint64_t>(getpid()), found->second.file, found->second.bytes};
    handle->bytes.fill(0);
    std::memcpy(handle->bytes.data(), &what, sizeof(what));
    return success;
})
FAKE(cuIpcOpenMemHandle_v2, (CUdeviceptr * out, CUipcMemHandle handle, unsigned), {
    shared what{};
    std::memcpy(&what, handle.bytes.data(), sizeof(what));
    const std::string path = "/proc/" + std::to_string(what.process) + "/fd/" + std::to_string(what.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void *base = file < 0 ? MAP_FAILED : mmap(nullptr, what.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED || current() == nullptr) { // NOLINT(performance-no-int-to-ptr): the system's own macro
        return invalid_value;
    }
    // The driver reports the GPU that opens the memory as its owner.
    const std::lock_guard guard(all().lock);
    allocation made{what.bytes, current()->device, current(), all().numbers++};
    made.file = file;
    all().memory[number_of(base)] = made;
    *out = number_of(base);
    return success;
})
// A driver may lack old functions. This one has no cuIpcOpenMemHandle without a version number.
FAKE(cuIpcCloseMemHandle, (CUdeviceptr base), { return release(base); })

// The fake driver has no kernels. The library works without them.
REFUSED(cuModuleLoadData)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleUnload)
REFUSED(cuFuncGetAttribute)
REFUSED(cuLaunchKernel)

namespace {

/// Finds a function by version number and flags, like the real driver: the newest version of the requested kind.
CUresult find(const std::string &name, void **function, std::uint64_t flags) {
    for (const char *version : {"_v2", ""}) {
        for (const char *form : {"_ptsz", "_ptds", ""}) {
            const auto found = all().functions.find(name + version + form);
            if ((*form == 0 || (flags & 2) != 0) && found != all().functions.end()) {
                *function = found->second;
                return success;
            }
        }
    }
    *function = nullptr;
    return symbol_not_found;
}

} // namespace

FAKE(cuGetProcAddress, (const char *name, void **function, int, std::uint64_t flags),
     { return find(name, function, flags); })
FAKE(cuGetProcAddress_v2, (const char *name, void **function, int, std::uint64_t flags, int *),
     { return find(name, function, flags); })

// --- queries of the tests
// ---------------------------------------------------------------------------------------------

extern "C" CUresult fake_copies_into(CUdeviceptr dst, std::size_t bytes, fake_copies *found) {
    const std::lock_guard guard(all().lock);
    *found = {};
    for (const logged &one : all().copies) {
        if (one.what.dst < dst + bytes && dst < one.what.dst + one.what.bytes) {
            ++found->count;
            const bool is_whole = one.what.dst == dst && one.what.bytes == bytes;
            found->whole = is_whole ? one.function : nullptr;
            found->src = one.what.src;
            found->stream = one.stream;
        }
    }
    return success;
}

extern "C" CUresult fake_forget_copies(int) {
    const std::lock_guard guard(all().lock);
    all().copies.clear();
    return success;
}

extern "C" CUresult fake_fail_after(long calls) {
    const std::lock_guard guard(all().lock);
    all().left = calls;
    all().failed = nullptr;
    return success;
}

/// Allocates memory of the current GPU as a mapping of several chunks.
extern "C" CUresult fake_map(CUdeviceptr *out, std::size_t bytes, std::size_t chunk, std::uint64_t let_in) {
    allocation made{bytes, current()->device, current(), 0};
    made.chunk = chunk;
    made.let_in = let_in;
    return allocate(out, bytes, made);
}

extern "C" CUresult fake_let_in(CUdevice gpu, std::uint64_t others) {
    const std::lock_guard guard(all().lock);
    all().pools.at(static_cast<std::size_t>(gpu)) = others;
    return success;
}

extern "C" CUresult fake_trespasses(long *count) {
    const std::lock_guard guard(all().lock);
    *count = all().trespasses;
    return success;
}

extern "C" CUresult fake_lose(int loses) {
    const std::lock_guard guard(all().lock);
    all().loses = loses != 0;
    return success;
}

extern "C" CUresult fake_failed(const char **function) {
    const std::lock_guard guard(all().lock);
    *function = all().failed;
    return success;
}
const entry entry_of_copies_into("fake_copies_into", reinterpret_cast<void *>(&fake_copies_into));
const entry entry_of_forget("fake_forget_copies", reinterpret_cast<void *>(&fake_forget_copies));
const entry entry_of_fail("fake_fail_after", reinterpret_cast<void *>(&fake_fail_after));
const entry entry_of_map("fake_map", reinterpret_cast<void *>(&fake_map));
const entry entry_of_let_in("fake_let_in", reinterpret_cast<void *>(&fake_let_in));
const entry entry_of_trespasses("fake_trespasses", reinterpret_cast<void *>(&fake_trespasses));
const entry entry_of_lose("fake_lose", reinterpret_cast<void *>(&fake_lose));
const entry entry_of_failed("fake_failed", reinterpret_cast<void *>(&fake_failed));
