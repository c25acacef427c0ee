// Program that does not use mpgpu and makes copies by the driver: `client WAY CASE`. WAY is the method by which the
// program finds the driver's functions: `linked`, `dlsym`, or `address` (cuGetProcAddress, like the CUDA runtime). With
// `runtime`, the CUDA runtime in the file CUDA_RUNTIME makes the copies. The fake driver reports which copies it was
// asked to make.
#include "driver.hpp"

#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t large = std::size_t{16} << 20;
constexpr std::size_t small = std::size_t{64} << 10;
constexpr CUresult fake_error = 999;

void check(bool holds, const char *what, const char *of = "") {
    if (!holds) {
        std::printf("client: not so: %s (%s)\n", what, of);
        std::fflush(stdout);
        std::_Exit(1);
    }
}

// --- functions of the driver, by each way
// -----------------------------------------------------------------------------

struct functions {
#define FUNCTION(name, ...) CUresult (*name)(__VA_ARGS__);
    CLIENT_FUNCTIONS(FUNCTION)
#undef FUNCTION
};
functions cu;

/// Handle of the CUDA runtime library. Null unless the CUDA runtime makes the copies.
void *runtime;

#ifndef CLIENT_LINKED
void *library;

void *by_dlsym(const char *name) {
    return dlsym(library, name);
}

void *by_address(const char *name) {
    static const auto get = reinterpret_cast<decltype(&cuGetProcAddress_v2)>(by_dlsym("cuGetProcAddress_v2"));
    std::string base = name;
    std::uint64_t flags = 1; // CU_GET_PROC_ADDRESS_LEGACY_STREAM
    const std::string form = base.size() > 5 ? base.substr(base.size() - 5) : "";
    if (form == "_ptsz" || form == "_ptds") {
        base.resize(base.size() - 5);
        flags = 2; // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
    }
    if (base.compare(base.size() - 3, 3, "_v2") == 0) {
        base.resize(base.size() - 3);
    }
    void *found = nullptr;
    int status = 0;
    return get(base.c_str(), &found, 12040, flags, &status) == 0 ? found : nullptr;
}
#endif

void find_driver(const std::string &way) {
#ifdef CLIENT_LINKED
    check(way == "linked", "this client is linked", way.c_str());
#ifdef CLIENT_IS_LIBRARY // The auditor redirects calls but not addresses.
#define FUNCTION(name, ...) cu.name = [](auto... arguments) { return ::name(arguments...); };
#else
#define FUNCTION(name, ...) cu.name = &name;
#endif
    CLIENT_FUNCTIONS(FUNCTION)
#undef FUNCTION
#else
    void *libc = dlopen("libc.so.6", RTLD_NOW);
    dlerror();
    check(dlsym(libc, "cuserid") != nullptr && dlerror() == nullptr, "what is found is no error, without a driver too");
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    check(library != nullptr, "libcuda.so.1 is there");
    void *(*find)(const char *) = way == "address" ? by_address : by_dlsym;
#define FUNCTION(name, ...)                                                                                            \
    cu.name = reinterpret_cast<CUresult (*)(__VA_ARGS__)>(find(#name));                                                \
    check(cu.name != nullptr && dlerror() == nullptr, "the driver has it", #name);
    CLIENT_FUNCTIONS(FUNCTION)
#undef FUNCTION
    if (way == "runtime") {
        runtime = dlopen(std::getenv("CUDA_RUNTIME"), RTLD_NOW | RTLD_LOCAL);
        if (runtime == nullptr) {
            std::printf("%s\n", dlerror());
            std::exit(77);
        }
    }
#endif
    check(cu.cuInit(0) == 0, "cuInit");
}

// --- memory and streams ----------------------------------------------------------------------------------------------

CUcontext primary(CUdevice gpu) {
    CUcontext context = nullptr;
    check(cu.cuDevicePrimaryCtxRetain(&context, gpu) == 0, "a primary context");
    return context;
}

void use(CUdevice gpu) {
    check(cu.cuCtxSetCurrent(primary(gpu)) == 0, "a current context");
}

CUdeviceptr on_gpu(CUdevice gpu, std::size_t bytes = large) {
    use(gpu);
    CUdeviceptr address = 0;
    check(cu.cuMemAlloc_v2(&address, bytes) == 0, "memory of a GPU");
    return address;
}

CUdeviceptr number_of(const void *address) {
    return reinterpret_cast<CUdeviceptr>(address);
}
// The memory of the fake GPU is host memory.
char *bytes_at(CUdeviceptr address) {
    return reinterpret_cast<char *>(address); // NOLINT(performance-no-int-to-ptr)
}

CUdeviceptr pinned(std::size_t bytes = large) {
    void *address = nullptr;
    check(cu.cuMemHostAlloc(&address, bytes, 1) == 0, "pinned memory");
    return number_of(address);
}

CUstream new_stream() {
    CUstream stream = nullptr;
    check(cu.cuStreamCreate(&stream, 1) == 0, "a stream");
    return stream;
}

void fill(CUdeviceptr address, std::size_t bytes, unsigned seed) {
    std::minstd_rand random(seed + 1);
    for (std::size_t i = 0; i < bytes; i += 4) {
        const auto word = static_cast<std::uint32_t>(random());
        std::memcpy(bytes_at(address + i), &word, 4);
    }
}

bool equal(CUdeviceptr one, CUdeviceptr other, std::size_t bytes) {
    return std::memcmp(bytes_at(one), bytes_at(other), bytes) == 0;
}

// --- copies ----------------------------------------------------------------------------------------------------------

using copy_call = std::function<CUresult(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream)>;

/// Copy function of the driver or of the CUDA runtime, with the kinds of its source and destination.
struct form {
    const char *name;
    copy_call copy;
    CUdeviceptr dst;
    CUdeviceptr src;
    /// True if stream 0 denotes the per-thread default stream in this function.
    bool is_per_thread;
};

/// Returns the copy functions of the CUDA runtime. Their order is that of `all_forms` for the indices that the cases
/// use.
std::vector<form> runtime_forms() {
    const auto find = [](auto *&function, const char *name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(runtime, name));
        check(function != nullptr, "the runtime has it", name);
    };
    int (*set_device)(int) = nullptr;
    int (*allocate)(CUdeviceptr *, std::size_t) = nullptr;
    int (*allocate_pinned)(CUdeviceptr *, std::size_t) = nullptr;
    int (*copy)(CUdeviceptr, CUdeviceptr, std::size_t, int, CUstream) = nullptr;
    int (*copy_peers)(CUdeviceptr, int, CUdeviceptr, int, std::size_t, CUstream) = nullptr;
    find(set_device, "cudaSetDevice");
    find(allocate, "cudaMalloc");
    find(allocate_pinned, "cudaMallocHost");
    find(copy, "cudaMemcpyAsync");
    find(copy_peers, "cudaMemcpyPeerAsync");
    CUdeviceptr a = 0;
    CUdeviceptr b = 0;
    CUdeviceptr h = 0;
    check(set_device(1) == 0 && allocate(&b, large) == 0 && set_device(0) == 0 && allocate(&a, large) == 0 &&
              allocate_pinned(&h, large) == 0,
          "memory by the runtime");
    const auto of_kind = [copy](int kind) {
        return [copy, kind](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
            return copy(dst, src, bytes, kind, stream);
        };
    };
    const auto peers = [copy_peers](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
        return copy_peers(dst, 1, src, 0, bytes, stream);
    };
    constexpr int to_gpu = 1;
    constexpr int to_host = 2;
    constexpr int between_gpus = 3;
    constexpr int by_addresses = 4;
    return {
        {"cuMemcpyDtoDAsync_v2", of_kind(between_gpus), b, a, false},
        {"cuMemcpyAsync", of_kind(by_addresses), b, a, false},
        {"cuMemcpyAsync", of_kind(by_addresses), h, a, false},
        {"cuMemcpyPeerAsync", peers, b, a, false},
        {"cuMemcpyHtoDAsync_v2", of_kind(to_gpu), a, h, false},
        {"cuMemcpyDtoHAsync_v2", of_kind(to_host), h, a, false},
    };
}

std::vector<form> all_forms() {
    if (runtime != nullptr) {
        return runtime_forms();
    }
    const CUdeviceptr a = on_gpu(0);
    const CUdeviceptr b = on_gpu(1);
    const CUdeviceptr h = pinned();
    const auto to_gpu = [](auto function) {
        return [function](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
            return function(dst, bytes_at(src), bytes, stream);
        };
    };
    const auto to_host = [](auto function) {
        return [function](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream stream) {
            return function(bytes_at(dst), src, bytes, stream);
        };
    };
    const auto peers = [](auto function) {
        return [function, to = primary(1), from = primary(0)](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes,
                                                              CUstream stream) {
            return function(dst, to, src, from, bytes, stream);
        };
    };
    use(0);
    return {
        {"cuMemcpyDtoDAsync_v2", cu.cuMemcpyDtoDAsync_v2, b, a, false},
        {"cuMemcpyDtoDAsync_v2_ptsz", cu.cuMemcpyDtoDAsync_v2_ptsz, b, a, true},
        {"cuMemcpyAsync", cu.cuMemcpyAsync, b, a, false},
        {"cuMemcpyAsync_ptsz", cu.cuMemcpyAsync_ptsz, b, a, true},
        {"cuMemcpyHtoDAsync_v2", to_gpu(cu.cuMemcpyHtoDAsync_v2), a, h, false},
        {"cuMemcpyHtoDAsync_v2_ptsz", to_gpu(cu.cuMemcpyHtoDAsync_v2_ptsz), a, h, true},
        {"cuMemcpyDtoHAsync_v2", to_host(cu.cuMemcpyDtoHAsync_v2), h, a, false},
        {"cuMemcpyDtoHAsync_v2_ptsz", to_host(cu.cuMemcpyDtoHAsync_v2_ptsz), h, a, true},
        {"cuMemcpyPeerAsync", peers(cu.cuMemcpyPeerAsync), b, a, false},
        {"cuMemcpyPeerAsync_ptsz", peers(cu.cuMemcpyPeerAsync_ptsz), b, a, true},
    };
}

/// Makes one copy and returns the calls of the driver that wrote to its destination.
fake_copies seen(const form &by, std::size_t bytes, CUstream stream) {
    cu.fake_forget_copies(0);
    check(by.copy(by.dst, by.src, bytes, stream) == 0, "a copy", by.name);
    fake_copies found{};
    cu.fake_copies_into(by.dst, bytes, &found);
    return found;
}

bool is_taken(const fake_copies &found) {
    return found.whole == nullptr && found.count > 1;
}

void synchronize(CUstream stream) {
    check(cu.cuStreamSynchronize(stream) == 0, "the stream ends well");
}

/// Returns the handle of the stream that 0 denotes in this function.
CUstream default_of(const form &by) {
    return by.is_per_thread ? reinterpret_cast<CUstream>(bytes_at(2)) : nullptr; // CU_STREAM_PER_THREAD
}

/// Makes copies by this function until they are accelerated. The first copies are passed to the driver while a thread
/// prepares mpgpu.
void warm_up(const form &by, CUstream stream, std::size_t bytes = large) {
    while (!is_taken(seen(by, bytes, stream))) {
        synchronize(stream);
    }
    synchronize(stream);
}

bool passes(const form &by, std::size_t bytes, CUstream stream) {
    const fake_copies found = seen(by, bytes, stream);
    return found.count == 1 && found.whole != nullptr && std::strcmp(found.whole, by.name) == 0 &&
           found.src == by.src && found.stream == stream;
}

/// Blocks a stream until the gate is opened.
class gate {
  public:
    void hold(CUstream stream) {
        check(cu.cuLaunchHostFunc(
                  stream,
                  [](void *self) {
                      auto &held = *static_cast<gate *>(self);
                      std::unique_lock guard(held.lock_);
                      held.changed_.wait(guard, [&] { return held.is_open_; });
                  },
                  this) == 0,
              "a host function");
    }
    void open() {
        const std::lock_guard guard(lock_);
        is_open_ = true;
        changed_.notify_all();
    }

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    bool is_open_ = false;
};

void launch(CUstream stream, std::function<void()> &work) {
    check(cu.cuLaunchHostFunc(
              stream, [](void *what) { (*static_cast<std::function<void()> *>(what))(); }, &work) == 0,
          "a host function");
}

/// Checks the order of a copy relative to other work in its stream. Work that writes the source comes before the copy.
/// Work that reads the destination or overwrites source and destination comes after the copy. Nothing may run before
/// everything is enqueued.
void check_order(const form &by, CUstream stream, unsigned seed) {
    std::vector<char> expected(large);
    std::vector<char> arrived(large);
    fill(number_of(expected.data()), large, seed);
    std::function<void()> before = [&] { std::memcpy(bytes_at(by.src), expected.data(), large); };
    std::function<void()> after = [&] {
        std::memcpy(arrived.data(), bytes_at(by.dst), large);
        std::memset(bytes_at(by.src), 0, large);
        std::memset(bytes_at(by.dst), 0, large);
    };
    gate closed;
    closed.hold(stream);
    launch(stream, before);
    const fake_copies found = seen(by, large, by.is_per_thread && stream == default_of(by) ? nullptr : stream);
    check(is_taken(found), "several copies in the place of one", by.name);
    launch(stream, after);
    closed.open();
    synchronize(stream);
    check(arrived == expected, "the bytes arrive after the work before and before the work behind", by.name);
}

// --- cases -----------------------------------------------------------------------------------------------------------

void copies() {
    std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    check(passes(forms[0], large, stream), "the first copy does not wait for mpgpu");
    synchronize(stream);
    // The program registers this memory with the driver.
    std::vector<char> registered(large);
    check(cu.cuMemHostRegister_v2(registered.data(), large, 1) == 0, "registered memory");
    forms.push_back(forms[4]);
    forms.back().src = number_of(registered.data());
    unsigned seed = 0;
    for (const form &by : forms) {
        warm_up(by, stream);
        check_order(by, stream, ++seed);
        check_order(by, default_of(by), ++seed);
    }
}

/// Tests a program that overwrites its initial environment with its process title.
void retitled() {
    char *const block = std::getenv("MPGPU_PRELOAD_REPORT");
    check(block != nullptr, "a report is asked for");
    std::memset(block, 'x', std::strlen(block));
    copies();
}

/// Tests that batched copies of every form arrive. The fake driver runs no kernels, so that mpgpu rejects the batches
/// and the interposer passes them to the driver.
void batches() {
    constexpr std::size_t count = 64;
    constexpr std::size_t bytes = 4096;
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    warm_up(forms[4], stream);
    const CUdeviceptr gpu = on_gpu(0);
    const CUdeviceptr host = pinned();
    const auto batch = [&](unsigned seed, auto call) {
        std::vector<CUdeviceptr> dst;
        std::vector<CUdeviceptr> src;
        std::vector<std::size_t> sizes(count, bytes);
        for (std::size_t at = 0; at < count; ++at) {
            dst.push_back(gpu + at * bytes);
            src.push_back(host + at * bytes);
        }
        fill(host, count * bytes, seed);
        batch_attributes how{1, {}, 0};
        std::size_t first = 0;
        check(call(dst.data(), src.data(), sizes.data(), count, &how, &first, std::size_t{1}) == 0, "a batch");
        synchronize(stream);
        check(equal(gpu, host, count * bytes), "the bytes of a batch arrive");
    };
    const auto old_form = [stream](auto function) {
        return [function, stream](auto... arguments) {
            std::size_t failed = 0;
            return function(arguments..., &failed, stream);
        };
    };
    const auto new_form = [stream](auto function) {
        return [function, stream](auto... arguments) { return function(arguments..., stream); };
    };
    batch(1, old_form(cu.cuMemcpyBatchAsync));
    batch(2, old_form(cu.cuMemcpyBatchAsync_ptsz));
    batch(3, new_form(cu.cuMemcpyBatchAsync_v2));
    batch(4, new_form(cu.cuMemcpyBatchAsync_v2_ptsz));
    // A batch of one copy is passed through, and counted. The fake driver has no kernels, so this applies to the others
    // too.
    CUdeviceptr dst = gpu;
    CUdeviceptr src = host;
    std::size_t size = bytes;
    batch_attributes how{1, {}, 0};
    std::size_t first = 0;
    check(cu.cuMemcpyBatchAsync_v2(&dst, &src, &size, 1, &how, &first, 1, stream) == 0, "a batch of one copy");
    synchronize(stream);
}

void left_alone() {
    const std::vector<form> forms = all_forms();
    CUstream stream = new_stream();
    for (const form &by : forms) {
        warm_up(by, stream);
        check(passes(by, small, stream), "a small copy passes", by.name);
    }
    const form &by = forms[0];
    form other = by;
    check(cu.cuMemAllocManaged(&other.src, large, 1) == 0 && passes(other, large, stream), "managed memory passes");
    std::vector<char> pageable(large);
    form from_host = forms[2];
    from_host.dst = forms[4].src;
    from_host.src = number_of(pageable.data());
    check(passes(from_host, large, stream), "pageable memory passes where no GPU has the other end");
    synchronize(stream);
    other.src = by.src + 4096;
    check(by.copy(by.dst, other.src, large, stream) == 1, "the driver's error for a range that leaves its allocation");

    check(cu.cuStreamBeginCapture_v2(stream, 0) == 0 && passes(by, large, stream), "a captured copy passes");
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    check(cu.cuStreamEndCapture(stream, &graph) == 0 && cu.cuGraphInstantiateWithFlags(&exec, graph, 0) == 0,
          "a graph");
    fill(by.src, large, 77);
    check(cu.cuGraphLaunch(exec, stream) == 0, "a launch");
    synchronize(stream);
    check(equal(by.dst, by.src, large), "the captured copy's bytes arrive");

    check(cu.cuMemcpyPeerAsync(by.dst, primary(2), by.src, primary(0), large, stream) == 0,
          "a copy with another's context");
    synchronize(stream);

    CUcontext own = nullptr;
    check(cu.cuCtxCreate_v2(&own, 0, 0) == 0, "a context");
    check(passes(by, large, new_stream()), "a stream of a context that is not primary passes");
    use(0);
}

/// Tests that a copy makes no query of the driver if it is known that it must be passed through. If other memory
/// replaces the memory at its address, this is soon detected.
void known() {
    form by = all_forms()[0];
    by.src = on_gpu(0);
    by.dst = on_gpu(0);
    const CUstream stream = new_stream();
    check(passes(by, large, stream), "a copy within a GPU passes");
    const char *failed = "";
    cu.fake_fail_after(0);
    const CUresult code = by.copy(by.dst, by.src, large, stream);
    cu.fake_failed(&failed);
    cu.fake_fail_after(-1);
    check(code == fake_error && std::strcmp(failed, by.name) == 0, "the driver gets the copy and no other call",
          failed);
    synchronize(stream);

    const CUdeviceptr before = by.dst;
    check(cu.cuMemFree_v2(before) == 0, "the memory is freed");
    by.dst = on_gpu(1);
    use(0);
    check(by.dst == before, "another GPU's memory is at its address");
    warm_up(by, stream);
    check_order(by, stream, 1);
}

/// Tests synchronous copies, which return after the data has arrived.
void synchronous() {
    const std::vector<form> forms = all_forms();
    const form &to_gpu = forms[4];
    const form &to_host = forms[6];
    for (const form *by : {&to_gpu, &to_host}) {
        warm_up(*by, new_stream());
    }
    unsigned seed = 0;
    for (const auto to : {cu.cuMemcpyHtoD_v2, cu.cuMemcpyHtoD_v2_ptds}) {
        for (const auto &[src, bytes, takes] :
             {std::tuple(to_gpu.src, large, true), std::tuple(to_gpu.src, small, false)}) {
            fill(src, bytes, ++seed);
            cu.fake_forget_copies(0);
            check(to(to_gpu.dst, bytes_at(src), bytes) == 0 && equal(to_gpu.dst, src, bytes), "the bytes are there");
            fake_copies found{};
            cu.fake_copies_into(to_gpu.dst, bytes, &found);
            check(is_taken(found) == takes, "large copies of pinned memory are taken");
        }
    }
    for (const auto from : {cu.cuMemcpyDtoH_v2, cu.cuMemcpyDtoH_v2_ptds}) {
        fill(to_host.src, large, ++seed);
        cu.fake_forget_copies(0);
        check(from(bytes_at(to_host.dst), to_host.src, large) == 0 && equal(to_host.dst, to_host.src, large),
              "the bytes are there");
        fake_copies found{};
        cu.fake_copies_into(to_host.dst, large, &found);
        check(is_taken(found), "large copies into pinned memory are taken");
    }
}

/// Tests copies of pageable memory. When such a call returns, the caller may write to the source or read the
/// destination.
void ordinary() {
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    std::vector<char> there(large);
    std::vector<char> back(large);
    std::vector<char> expected(large);
    const CUdeviceptr memory = on_gpu(0);
    unsigned seed = 0;
    const auto now_to = [](auto function) {
        return [function](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream) {
            return function(dst, bytes_at(src), bytes);
        };
    };
    const auto now_from = [](auto function) {
        return [function](CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream) {
            return function(bytes_at(dst), src, bytes);
        };
    };
    const std::vector<copy_call> to = {forms[4].copy, forms[5].copy, forms[2].copy, now_to(cu.cuMemcpyHtoD_v2),
                                       now_to(cu.cuMemcpyHtoD_v2_ptds)};
    const std::vector<copy_call> from = {forms[6].copy, forms[7].copy, forms[2].copy, now_from(cu.cuMemcpyDtoH_v2),
                                         now_from(cu.cuMemcpyDtoH_v2_ptds)};
    for (std::size_t kind = 0; kind < to.size(); ++kind) {
        const form up{"to a GPU", to[kind], memory, number_of(there.data()), false};
        const form down{"from a GPU", from[kind], number_of(back.data()), memory, false};
        for (const form *by : {&up, &down}) {
            // An accelerated copy reaches the GPU in several pieces, and no single call of the driver writes the whole
            // range.
            while (seen(*by, large, stream).whole != nullptr) {
                synchronize(stream);
            }
        }
        for (int round = 0; round < 3; ++round) {
            fill(number_of(expected.data()), large, ++seed);
            there = expected;
            check(is_taken(seen(up, large, stream)), "large copies of ordinary memory are taken");
            std::memset(there.data(), 0, large);
            synchronize(stream);
            check(equal(memory, number_of(expected.data()), large), "bytes as they were when the call was made");
            fill(memory, large, ++seed);
            std::memset(back.data(), 0, large);
            check(seen(down, large, stream).whole == nullptr, "and into it");
            check(equal(memory, number_of(back.data()), large), "the bytes are there when the call returns");
        }
    }
    // The copy runs after the earlier work in the stream.
    std::function<void()> before = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        std::memset(bytes_at(memory), 77, large);
    };
    launch(stream, before);
    check(forms[6].copy(number_of(back.data()), memory, large, stream) == 0 && back[0] == 77 && back[large - 1] == 77,
          "after the work before it");
}

/// Tests memory of pools and of mappings of several chunks. Only GPUs that have access may copy such memory.
void pools() {
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    const auto pooled = [](CUdevice gpu) {
        use(gpu);
        CUdeviceptr address = 0;
        check(cu.cuMemAllocAsync(&address, large, nullptr) == 0, "memory of a pool");
        return address;
    };
    const auto mapped = [](CUdevice gpu, std::uint64_t let_in) {
        use(gpu);
        CUdeviceptr address = 0;
        check(cu.fake_map(&address, large, large / 8, let_in) == 0, "memory of chunks");
        return address;
    };
    const form &between = forms[0];
    const form &to_gpu = forms[4];
    const form &to_host = forms[6];
    const form &by_contexts = forms[8];
    unsigned seed = 0;
    const auto taken = [&](const form &like, CUdevice gpu, CUdeviceptr dst, CUdeviceptr src) {
        use(gpu);
        form by = like;
        by.dst = dst;
        by.src = src;
        const CUstream in = new_stream();
        warm_up(by, in);
        check_order(by, in, ++seed);
        long trespasses = 0;
        check(cu.fake_trespasses(&trespasses) == 0 && trespasses == 0, "no GPU copies that is not let in", by.name);
    };
    // No other GPU may access this memory, or no other GPU may access its last chunk.
    for (const CUdeviceptr shut : {pooled(0), mapped(0, 0), mapped(0, 0xf)}) {
        taken(to_gpu, 0, shut, to_gpu.src);
        taken(to_host, 0, to_host.dst, shut);
        taken(between, 0, between.dst, shut);
        taken(by_contexts, 0, between.dst, shut);
    }
    for (const CUdeviceptr shut : {pooled(1), mapped(1, 0), mapped(1, 0xf)}) {
        taken(between, 1, shut, between.src);
    }
    check(cu.fake_let_in(0, 0xf) == 0 && cu.fake_let_in(1, 0xf) == 0, "pools let all GPUs in");
    taken(between, 0, pooled(1), pooled(0));
    taken(by_contexts, 1, pooled(1), mapped(0, 0xf));
    check(cu.fake_let_in(0, 0) == 0 && cu.fake_let_in(1, 0) == 0, "pools let nobody in");
    const CUdeviceptr dst = pooled(1);
    const CUdeviceptr src = pooled(0);
    use(0);
    check(between.copy(dst, src, large, stream) == 1, "the driver's error where no GPU may enter both ends");
}

/// Makes each driver call of an accelerated copy fail once.
void failing() {
    const std::vector<form> forms = all_forms();
    for (const std::size_t kind : {std::size_t{0}, std::size_t{4}, std::size_t{6}}) {
        const form &by = forms.at(kind);
        const CUstream stream = new_stream();
        warm_up(by, stream);
        long calls = 0;
        for (const char *failed = "";; ++calls) {
            fill(by.src, large, static_cast<unsigned>(calls));
            std::memset(bytes_at(by.dst), 0, large);
            cu.fake_fail_after(calls);
            const CUresult code = by.copy(by.dst, by.src, large, stream);
            cu.fake_failed(&failed);
            cu.fake_fail_after(-1);
            synchronize(stream);
            check(code == 0 || code == fake_error, "the driver's code", failed);
            check(code != 0 || equal(by.dst, by.src, large), "no wrong byte", failed);
            if (failed == nullptr) {
                break;
            }
        }
        check(calls > 10, "a taken copy makes calls", by.name);
    }
}

/// Tests that the program gets the usual results when it enables and disables peer access.
void peers() {
    const form by = all_forms()[0];
    const auto enable = [](CUdevice peer) { return cu.cuCtxEnablePeerAccess(primary(peer), 0); };
    const auto disable = [](CUdevice peer) { return cu.cuCtxDisablePeerAccess(primary(peer)); };
    check(disable(2) == 705 && enable(2) == 0 && enable(2) == 704 && disable(2) == 0 && disable(2) == 705 &&
              enable(3) == 0,
          "the driver's answers before mpgpu is at work");
    const CUstream stream = new_stream();
    warm_up(by, stream);
    check(disable(1) == 705 && enable(1) == 0 && enable(1) == 704 && enable(3) == 704,
          "what mpgpu has enabled, the program has not");
    check(disable(1) == 0 && disable(1) == 705 && disable(3) == 0, "what the program has enabled it disables");
    check_order(by, stream, 4);
}

template <class Work> int in_child(Work work) {
    const pid_t child = fork();
    if (child == 0) {
        work();
        std::exit(0);
    }
    int status = 0;
    check(child > 0 && waitpid(child, &status, 0) == child, "a child");
    return status;
}

/// Makes driver calls fail while mpgpu prepares its context, each in a separate process.
void failing_first(const std::string &way) {
    for (long calls = 0; calls < 400; calls += 11) {
        const int status = in_child([&] {
            find_driver(way);
            const form by = all_forms()[0];
            const CUstream stream = new_stream();
            cu.fake_fail_after(calls);
            for (unsigned i = 0; i < 10; ++i) {
                fill(by.src, large, i);
                const CUresult code = by.copy(by.dst, by.src, large, stream);
                check(code == 0 || code == fake_error, "the driver's code");
                while (cu.cuStreamSynchronize(stream) != 0) {
                }
                check(code != 0 || equal(by.dst, by.src, large), "no wrong byte");
            }
        });
        check(status == 0, "the process ends well");
    }
}

void forks(const std::string &way) {
    // A child that is forked before the driver is used behaves like any other program.
    check(in_child([&] {
              find_driver(way);
              copies();
          }) == 0,
          "a child of a process without a GPU");
    find_driver(way);
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    warm_up(forms[0], stream);
    check(in_child([&] {
              const form &by = forms[0];
              check(by.copy(by.dst, by.src, large, stream) == 3, "a child gets the driver's answer, that it has none");
          }) == 0,
          "a child of a process with GPUs ends");
    check_order(forms[0], stream, 5);
}

/// Tests a program that makes no copy, and exits while mpgpu prepares its context.
void no_copies() {
    use(0);
    use(1);
}

/// Tests a program that exits while mpgpu prepares its context.
void ends() {
    const form by = all_forms()[0];
    check(passes(by, large, new_stream()), "the first copy passes");
}

/// Tests a driver whose copies lose data.
void losing() {
    const form by = all_forms()[0];
    const CUstream stream = new_stream();
    warm_up(by, stream);
    fill(by.src, large, 1);
    std::memset(bytes_at(by.dst), 0, large);
    cu.fake_lose(1);
    check(by.copy(by.dst, by.src, large, stream) == 0, "a copy");
    synchronize(stream);
    check(!equal(by.dst, by.src, large), "a byte is lost");
    cu.fake_lose(0);
}

/// Tests copies that are larger than copies that are already accelerated. They must be accelerated from the first one
/// on.
void sizes() {
    form by = all_forms()[0];
    const CUstream stream = new_stream();
    warm_up(by, stream);
    by.src = on_gpu(0, 2 * large);
    by.dst = on_gpu(1, 2 * large);
    use(0);
    for (const std::size_t bytes : {large + large / 2, 2 * large, large + large / 4}) {
        fill(by.src, bytes, static_cast<unsigned>(bytes >> 20));
        check(is_taken(seen(by, bytes, stream)), "the first copy of a size is taken");
        synchronize(stream);
        check(equal(by.dst, by.src, bytes), "its bytes arrive");
    }
}

/// Tests that no copy is accelerated if the interposer is off.
void off() {
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    for (const form &by : forms) {
        for (unsigned round = 0; round < 4; ++round) {
            fill(by.src, large, round);
            check(passes(by, large, stream), "a copy passes", by.name);
            synchronize(stream);
            check(equal(by.dst, by.src, large), "its bytes arrive", by.name);
        }
    }
}

void threads() {
    std::vector<std::thread> running;
    for (unsigned number = 0; number < 4; ++number) {
        running.emplace_back([number] {
            const std::vector<form> forms = all_forms();
            const CUstream stream = new_stream();
            warm_up(forms[number], stream);
            std::minstd_rand random(number + 1);
            for (unsigned round = 0; round < 40; ++round) {
                const form &by = forms[random() % forms.size()];
                const std::size_t bytes = 1 + random() % large;
                fill(by.src, large, round);
                check(by.copy(by.dst, by.src, bytes, stream) == 0, "a copy", by.name);
                synchronize(stream);
                check(equal(by.dst, by.src, bytes), "the bytes of a copy of any size arrive", by.name);
            }
        });
    }
    for (std::thread &one : running) {
        one.join();
    }
}

// --- GPUs that the program does not use ------------------------------------------------------------------------------

bool has_context(CUdevice gpu) {
    unsigned flags = 0;
    int is_active = 0;
    check(cu.cuDevicePrimaryCtxGetState(gpu, &flags, &is_active) == 0, "the state of a GPU");
    return is_active != 0;
}

/// Tests that copies between GPUs 0 and 1 are accelerated. If `relays` is true, they must use GPU 2 as a relay;
/// otherwise they must not.
void between_two(bool relays) {
    const std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    warm_up(forms[0], stream);
    check(has_context(2) == relays, "mpgpu has a context on a GPU that the program does not use only where it may");
    if (!relays) {
        form into_third = forms[0];
        into_third.dst = on_gpu(2); // the program uses GPU 2 from now on
        use(0);
        warm_up(into_third, stream);
        check(!has_context(3), "and on no other");
    }
}

// --- memory of another process ---------------------------------------------------------------------------------------

/// Size of memory of another process that is large enough for copies through host memory.
constexpr std::size_t opened_bytes = std::size_t{128} << 20;

/// Runs the other process: prints the handle of `bytes` bytes of a GPU's memory, and exits on request.
void exporter_of(std::size_t bytes) {
    const CUdeviceptr memory = on_gpu(1, bytes);
    std::memset(bytes_at(memory), 3, bytes);
    CUipcMemHandle handle{};
    check(cu.cuIpcGetMemHandle(&handle, memory) == 0, "a handle");
    check(write(STDOUT_FILENO, &handle, sizeof(handle)) == static_cast<ssize_t>(sizeof(handle)), "the handle is told");
    char go = 0;
    while (read(STDIN_FILENO, &go, 1) > 0) {
    }
}

/// Process that runs the case `exporter` or `exporter_large`, with the IPC handle that it prints. If `is_told` is true,
/// that process also runs with the interposer, so this process learns on which GPU the memory is.
class other_process {
  public:
    other_process(const char *self, const std::string &way, bool is_told, const char *name = "exporter") {
        std::array<int, 2> to{};
        std::array<int, 2> from{};
        check(pipe(to.data()) == 0 && pipe(from.data()) == 0, "pipes");
        child_ = fork();
        if (child_ == 0) {
            dup2(to[0], STDIN_FILENO);
            dup2(from[1], STDOUT_FILENO);
            for (const int file : {to[0], to[1], from[0], from[1]}) {
                close(file);
            }
            if (!is_told) {
                unsetenv("LD_PRELOAD");
            }
            execl(self, self, way.c_str(), name, nullptr);
            std::_Exit(1);
        }
        close(to[0]);
        close(from[1]);
        stays_ = to[1];
        check(read(from[0], &handle, sizeof(handle)) == static_cast<ssize_t>(sizeof(handle)), "a handle comes");
        close(from[0]);
    }
    other_process(const other_process &) = delete;
    other_process(other_process &&) = delete;
    other_process &operator=(const other_process &) = delete;
    other_process &operator=(other_process &&) = delete;
    ~other_process() {
        close(stays_);
        int status = 0;
        check(waitpid(child_, &status, 0) == child_ && status == 0, "the exporter ends well");
    }

    CUipcMemHandle handle{};

  private:
    pid_t child_ = -1;
    int stays_ = -1;
};

void importer(const char *self, const std::string &way, bool is_told, bool is_first) {
    const other_process other(self, way, is_told);
    find_driver(way);
    std::vector<form> forms = all_forms();
    const CUstream stream = new_stream();
    if (!is_first) {
        warm_up(forms[0], stream);
    }
    // The driver reports that memory of another process belongs to the GPU that has opened it.
    for (const CUdevice through : {0, 1}) {
        form into = forms[0];
        use(through);
        check(cu.cuIpcOpenMemHandle_v2(&into.dst, other.handle, 1) == 0, "the memory opens");
        use(0);
        check(through != 0 || bytes_at(into.dst)[large - 1] == 3, "it is the other's memory");
        fill(into.src, large, 9 + static_cast<unsigned>(through));
        form inside = into;
        inside.dst += large / 2;
        for (const auto &[by, bytes] : {std::pair(into, large), std::pair(inside, large / 2)}) {
            check(is_told || passes(by, bytes, stream), "a copy passes into memory of which nothing is known");
            // GPU 1 writes its part of the data at another address. So it is sufficient to check that the original call
            // was not passed to the driver.
            while (is_told && seen(by, bytes, stream).whole != nullptr) {
                synchronize(stream);
            }
        }
        synchronize(stream);
        check(equal(into.dst + large / 2, into.src, large / 2), "its bytes arrive");
        check(cu.cuIpcCloseMemHandle(into.dst) == 0, "it closes");
    }
    check_order(forms[0], stream, 6);
}

/// Tests that copies from or to memory of another process send at most 6 % of their bytes through host memory, in
/// chunks of at least 4 MiB. The other process plans its own copies.
void importer_large(const char *self, const std::string &way) {
    constexpr std::size_t least_chunk = std::size_t{4} << 20;
    const other_process other(self, way, true, "exporter_large");
    find_driver(way);
    const CUdeviceptr there = on_gpu(1, opened_bytes);
    const CUdeviceptr here = on_gpu(0, opened_bytes);
    CUdeviceptr opened = 0;
    check(cu.cuIpcOpenMemHandle_v2(&opened, other.handle, 1) == 0, "the memory opens");
    const CUstream stream = new_stream();
    const form put{"cuMemcpyDtoDAsync_v2", cu.cuMemcpyDtoDAsync_v2, opened, here, false};
    fill(here, opened_bytes, 5);
    // GPU 1 writes the staged data at another address.
    while (seen(put, opened_bytes, stream).whole != nullptr) {
        synchronize(stream);
    }
    synchronize(stream);
    check(equal(opened, here, opened_bytes), "the bytes arrive in the other process");
    std::vector<std::size_t> calls;
    for (const CUdeviceptr src : {there, opened}) {
        const form get{"cuMemcpyDtoDAsync_v2", cu.cuMemcpyDtoDAsync_v2, here, src, false};
        fill(src, opened_bytes, 6 + static_cast<unsigned>(calls.size()));
        warm_up(get, stream, opened_bytes);
        calls.push_back(seen(get, opened_bytes, stream).count);
        synchronize(stream);
        check(equal(here, src, opened_bytes), "the bytes arrive here");
    }
    // One call copies directly. Each further call writes a chunk that has passed through host memory.
    check((calls[1] - 1) * least_chunk <= opened_bytes * 6 / 100 + least_chunk, "few large chunks");
    check(calls[0] > 2 * calls[1], "between buffers of this process there are more chunks");
    check(cu.cuIpcCloseMemHandle(opened) == 0, "it closes");
}

/// Tests a program that uses one GPU and whose copies all go to a GPU that it does not use.
void importer_of_unused(const char *self, const std::string &way) {
    const other_process other(self, way, true);
    find_driver(way);
    const CUdeviceptr src = on_gpu(0);
    CUdeviceptr dst = 0;
    check(cu.cuIpcOpenMemHandle_v2(&dst, other.handle, 1) == 0, "the memory opens");
    const CUstream stream = new_stream();
    for (unsigned round = 0; round < 4; ++round) {
        fill(src, large, round);
        check(cu.cuMemcpyDtoDAsync_v2(dst, src, large, stream) == 0, "a copy");
        synchronize(stream);
        check(equal(dst, src, large), "its bytes arrive");
    }
    check(!has_context(1), "mpgpu has no context on a GPU that the program does not use");
    check(cu.cuIpcCloseMemHandle(dst) == 0, "it closes");
}

// --- counts of several processes -------------------------------------------------------------------------------------

/// Data that `mpgpu run` reads, as words: magic number, accelerated kinds, outcomes, processes, saved nanoseconds, two
/// for the comparison, then copies and bytes of each outcome.
constexpr std::size_t sums_bytes = 4096;
using words = std::array<std::uint64_t, sums_bytes / 8>;

words read_words(int file) {
    words all{};
    check(pread(file, all.data(), sums_bytes, 0) == static_cast<ssize_t>(sums_bytes), "counts");
    return all;
}

/// Runs the program `self` with the arguments `way` and `name`. Its counts are stored in `file`. Returns the exit
/// status.
int run_counted(const char *self, const std::string &way, const char *name, int file) {
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    const pid_t child = fork();
    if (child == 0) {
        setenv("MPGPU_PRELOAD_SUMS", path.c_str(), 1);
        execl(self, self, way.c_str(), name, nullptr);
        std::_Exit(1);
    }
    int status = 0;
    check(waitpid(child, &status, 0) == child, "the other process ends");
    return status;
}

/// Tests that the counts of killed processes are not lost, and that a file that contains no counts is not changed.
void sums(const char *self, const std::string &way) {
    const int file = memfd_create("sums", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    check(ftruncate(file, sums_bytes) == 0 && pwrite(file, "mpgpusum", 8, 0) == 8, "memory for counts");
    const words before = read_words(file);
    check(WTERMSIG(run_counted(self, way, "killed", file)) == SIGKILL, "it is killed");
    check(read_words(file) == before, "memory that can shrink is not written");

    check(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "seals");
    check(WTERMSIG(run_counted(self, way, "killed", file)) == SIGKILL, "it is killed");
    const words one = read_words(file);
    check(one[1] == 3 && one[3] == 1 && one[4] > 0, "a process has counted");
    check(one[7] > 0 && one[8] == one[7] * large, "copies between GPUs");
    check(run_counted(self, way, "forks", file) == 0, "it ends well");
    const words all = read_words(file);
    check(all[3] == 4 && all[7] > one[7], "a process, and each of its children that has copied, counts once");
}

} // namespace

#ifdef CLIENT_IS_LIBRARY
extern "C" int run_client(int count, char **arguments);
extern "C" int run_client(int count, char **arguments) {
#else
int main(int count, char **arguments) {
#endif
    check(count == 3, "client WAY CASE");
    const std::string way = arguments[1];
    const std::string name = arguments[2];
    if (name == "forks") {
        forks(way);
    } else if (name == "failing_first") {
        failing_first(way);
    } else if (name == "sums") {
        sums(arguments[0], way);
    } else if (name == "opened_unused") {
        importer_of_unused(arguments[0], way);
    } else if (name == "opened_large") {
        importer_large(arguments[0], way);
    } else if (name == "opened" || name == "opened_first" || name == "opened_unknown") {
        importer(arguments[0], way, name != "opened_unknown", name == "opened_first");
    } else {
        find_driver(way);
        const std::vector<std::pair<const char *, void (*)()>> cases = {
            {"copies", copies},
            {"retitled", retitled},
            {"batches", batches},
            {"left_alone", left_alone},
            {"known", known},
            {"pools", pools},
            {"synchronous", synchronous},
            {"ordinary", ordinary},
            {"failing", failing},
            {"ends", ends},
            {"no_copies", no_copies},
            {"threads", threads},
            {"exporter", [] { exporter_of(large); }},
            {"exporter_large", [] { exporter_of(opened_bytes); }},
            {"peers", peers},
            {"off", off},
            {"sizes", sizes},
            {"losing", losing},
            {"used", [] { between_two(false); }},
            {"relayed", [] { between_two(true); }},
            {"killed",
             [] {
                 between_two(false);
                 raise(SIGKILL);
             }},
        };
        for (const auto &[known, run] : cases) {
            if (name == known) {
                run();
                return 0;
            }
        }
        check(false, "a case of that name", name.c_str());
    }
    return 0;
}
