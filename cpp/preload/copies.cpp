#include "copies.hpp"

#include "opened.hpp"
#include "report.hpp"
#include "settings.hpp"

#include <mpgpu/mpgpu.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <utility>
#include <vector>

namespace mpgpu_preload {
namespace {

constexpr int most_gpus = 16;
/// Device numbers that stand for pinned and for pageable host memory.
constexpr int host = most_gpus;
constexpr int pageable = most_gpus + 1;
constexpr int most_devices = most_gpus + 2;

/// State of mpgpu's context. Once the state is `ready`, the context exists unchanged until the process ends.
enum class stage { idle, preparing, ready, off };
std::atomic<stage> state{stage::idle};
mp_context_t mpgpu_context;

/// True while this thread executes code of mpgpu. The library's own copies are passed to the driver.
thread_local bool is_inside;

class inside {
  public:
    inside() { is_inside = true; }
    ~inside() { is_inside = false; }
    inside(const inside &) = delete;
    inside(inside &&) = delete;
    inside &operator=(const inside &) = delete;
    inside &operator=(inside &&) = delete;
};

// --- knowledge about the program -------------------------------------------------------------------------------------

/// Primary context of each GPU, as far as it is known. The handle is valid for that GPU even after a reset of the
/// context.
std::array<std::atomic<context>, most_gpus> primaries;

/// Returns the GPU whose primary context this is, or -1 for any other context. Retains a primary context only if the
/// program has already created it.
int gpu_of(context asked_for) {
    if (asked_for == nullptr) {
        return -1;
    }
    for (std::size_t gpu = 0; gpu < primaries.size(); ++gpu) {
        if (primaries.at(gpu).load(std::memory_order_relaxed) == asked_for) {
            return static_cast<int>(gpu);
        }
    }
    int count = 0;
    if (call(symbol::cuDeviceGetCount, &count) != success) {
        return -1;
    }
    for (int gpu = 0; gpu < count && gpu < most_gpus; ++gpu) {
        auto &known = primaries.at(static_cast<std::size_t>(gpu));
        unsigned flags = 0;
        int is_active = 0;
        context primary = nullptr;
        if (known.load(std::memory_order_relaxed) != nullptr ||
            call(symbol::cuDevicePrimaryCtxGetState, gpu, &flags, &is_active) != success || is_active == 0 ||
            call(symbol::cuDevicePrimaryCtxRetain, &primary, gpu) != success) {
            continue;
        }
        call(symbol::cuDevicePrimaryCtxRelease_v2, gpu);
        known.store(primary, std::memory_order_relaxed);
        if (primary == asked_for) {
            return gpu;
        }
    }
    return -1;
}

context context_of(stream in) {
    context found = nullptr;
    // The handles 0, 1 and 2 are default streams, which belong to the current context.
    const bool is_default = reinterpret_cast<std::uintptr_t>(in) <= 2;
    const result code = is_default ? call(symbol::cuCtxGetCurrent, &found) : call(symbol::cuStreamGetCtx, in, &found);
    return code == success ? found : nullptr;
}

bool is_capturing(stream in) {
    unsigned status = 0;
    return call(symbol::cuStreamIsCapturing, in, &status) != success || status != 0;
}

// --- devices and sizes for which a plan is faster --------------------------------------------------------------------

enum class gain : std::uint8_t { not_asked, asked, none, some };

/// Number of size classes, eight for each power of two. The first copy of a class decides whether copies of the class
/// are accelerated. If the next smaller decided class is accelerated, a new class is also accelerated until its first
/// plan shows otherwise. In all other cases the first copy of a class is planned before any is accelerated.
constexpr std::size_t size_classes = std::size_t{8} * 64;
std::array<std::atomic<gain>, std::size_t{most_devices} * most_devices * size_classes> gains;

std::size_t class_of(std::size_t bytes) {
    const auto top = static_cast<std::size_t>(63 - __builtin_clzll(bytes | 8));
    return 8 * top + ((bytes >> (top - 3)) & 7);
}

std::atomic<gain> &gain_of(int dst, int src, std::size_t size_class) {
    const auto pair = static_cast<std::size_t>(dst) * most_devices + static_cast<std::size_t>(src);
    return gains.at(pair * size_classes + size_class);
}

/// True if copies from device `src` to device `dst` are accelerated in the next smaller size class whose result is
/// known.
bool smaller_gains(int dst, int src, std::size_t size_class) {
    while (size_class-- > 0) {
        const gain known = gain_of(dst, src, size_class).load(std::memory_order_acquire);
        if (known == gain::some || known == gain::none) {
            return known == gain::some;
        }
    }
    return false;
}

// --- GPUs that mpgpu may use -----------------------------------------------------------------------------------------

/// Bit mask of the GPUs that mpgpu may use if the user has listed none: those on which the program had a context at the
/// last check.
std::atomic<std::uint64_t> used_gpus;

/// Determines which GPUs the program uses. If the user has listed no GPUs, mpgpu creates contexts on these GPUs only.
void look_at_gpus() {
    int count = 0;
    std::uint64_t used = 0;
    call(symbol::cuDeviceGetCount, &count);
    for (int gpu = 0; gpu < count && gpu < most_gpus; ++gpu) {
        unsigned flags = 0;
        int is_active = 0;
        if (call(symbol::cuDevicePrimaryCtxGetState, gpu, &flags, &is_active) == success && is_active != 0) {
            used |= std::uint64_t{1} << static_cast<unsigned>(gpu);
        }
    }
    if (used_gpus.exchange(used) != used) {
        for (auto &slot : gains) {
            slot = gain::not_asked;
        }
    }
}

std::uint64_t allowed_gpus() {
    return asked().gpus.value_or(used_gpus.load(std::memory_order_relaxed));
}

bool is_allowed(int device) {
    return device >= host || (allowed_gpus() >> static_cast<unsigned>(device) & 1) != 0;
}

/// Returns the reason for passing copies of this size between these devices to the driver. Returns `count` if no reason
/// is known.
outcome known_reason(int dst, int src, std::size_t bytes) {
    if (dst == src) {
        return outcome::no_gain;
    }
    if (!is_allowed(dst) || !is_allowed(src)) {
        return outcome::unused_gpu;
    }
    const bool is_none = gain_of(dst, src, class_of(bytes)).load(std::memory_order_acquire) == gain::none;
    return is_none ? outcome::no_gain : outcome::count;
}

/// Returns the mask of the GPUs that may forward data. Returns 0 if all GPUs may, or if MPGPU_RELAY_GPUS is set.
std::uint64_t relay_mask() {
    return asked().names_relays || allowed_gpus() == every_gpu ? 0 : allowed_gpus() | MP_RELAY_NONE;
}

mp_plan_options_t plan_options() {
    mp_plan_options_t options = MP_PLAN_OPTIONS_INIT;
    options.relay_gpus = relay_mask();
    return options;
}

mp_transfer_t transfer(device_pointer dst, device_pointer src, std::size_t bytes) {
    // NOLINTBEGIN(performance-no-int-to-ptr): the driver's pointers are numbers
    return {reinterpret_cast<void *>(dst), MP_DEVICE_AUTO, reinterpret_cast<const void *>(src), MP_DEVICE_AUTO, bytes};
    // NOLINTEND(performance-no-int-to-ptr)
}

/// Plan that this object owns. The context keeps the plan in its cache when the object is destroyed.
class plan {
  public:
    explicit plan(const mp_transfer_t &what) {
        const mp_plan_options_t options = plan_options();
        status_ = mp_plan(mpgpu_context, &what, 1, &options, &handle_);
        mp_plan_get_info(handle_, &info_);
    }
    ~plan() { mp_plan_destroy(handle_); }
    plan(const plan &) = delete;
    plan(plan &&) = delete;
    plan &operator=(const plan &) = delete;
    plan &operator=(plan &&) = delete;

    [[nodiscard]] mp_status_t status() const { return status_; }
    /// True if the plan is faster than the driver's copy. A plan with one path is the driver's copy, with one
    /// exception: threads may copy pageable memory. Such a plan is only made if it is much faster.
    [[nodiscard]] bool gains() const {
        return status_ == MP_SUCCESS && (info_.paths > 1 || info_.predicted_seconds < 0.95 * info_.direct_seconds);
    }
    /// Returns the time in seconds that the plan saves in comparison with the driver's copy. It is measured if
    /// possible, and otherwise predicted.
    [[nodiscard]] double saved_seconds() const {
        const bool is_measured = info_.measured_seconds > 0 && info_.measured_direct_seconds > 0;
        return is_measured ? info_.measured_direct_seconds - info_.measured_seconds
                           : info_.direct_seconds - info_.predicted_seconds;
    }
    mp_status_t execute(stream in, mp_request_t *request) const {
        return mp_execute(handle_, static_cast<mp_stream_t>(in), request);
    }
    /// Creates the resources that the first execution of the plan in a stream of this GPU would otherwise create.
    void prepare(int gpu) const {
        mp_stream_t own = nullptr;
        if (mp_stream_create(mpgpu_context, gpu, &own) == MP_SUCCESS) {
            mp_plan_prepare(handle_, own);
            mp_stream_destroy(mpgpu_context, own);
        }
    }

  private:
    mp_plan_t handle_ = nullptr;
    mp_status_t status_ = MP_SUCCESS;
    mp_plan_info_t info_ = MP_PLAN_INFO_INIT;
};

// --- preparing threads -----------------------------------------------------------------------------------------------

std::atomic<int> threads;

/// Runs `work` in a detached thread that blocks all signals except those of faults of the thread itself, as in
/// rust/backend/threads.rs. Returns true if the thread was started.
template <class Work> bool begin(Work work) noexcept {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
        sigdelset(&all, fault);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before);
    threads.fetch_add(1, std::memory_order_relaxed);
    bool has_begun = true;
    try {
        std::thread([work] {
            {
                const inside guard;
                work();
            }
            threads.fetch_sub(1, std::memory_order_release);
        }).detach();
    } catch (...) {
        threads.fetch_sub(1, std::memory_order_relaxed);
        has_begun = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return has_begun;
}

// --- comparing bytes -------------------------------------------------------------------------------------------------

std::mutex compared_lock;
/// Executions whose data mpgpu compares and that were not yet found to have finished. The list is never destroyed,
/// because threads may copy while the process ends.
std::vector<mp_request_t> &compared() {
    static auto &all = *new std::vector<mp_request_t>;
    return all;
}

/// Counts the executions that have finished. Returns immediately if another thread holds the lock. In a child of fork,
/// that thread may not exist.
void count_done() {
    const std::unique_lock guard(compared_lock, std::try_to_lock);
    if (!guard) {
        return;
    }
    std::vector<mp_request_t> left;
    for (mp_request_t request : compared()) {
        std::int32_t is_done = 0;
        const mp_status_t status = mp_test(&request, &is_done, nullptr);
        if (status == MP_SUCCESS && is_done == 0) {
            left.push_back(request);
        } else if (status == MP_SUCCESS || status == MP_ERROR_DATA_CORRUPTION) {
            count_compared(status == MP_SUCCESS);
        }
    }
    compared() = std::move(left);
}

void note_compared(mp_request_t request) noexcept {
    try {
        {
            const std::lock_guard guard(compared_lock);
            compared().push_back(request);
        }
        count_done();
    } catch (...) { // Without memory for the list it is not counted.
        mp_request_destroy(&request);
    }
}

// --- start and end ---------------------------------------------------------------------------------------------------

/// Called at the end of the program. Passes all later copies to the driver, and waits until the threads of mpgpu have
/// left the driver, which then shuts down.
void stop() {
    state.store(stage::off, std::memory_order_release);
    const timespec millisecond{0, 1000000};
    for (int tries = 0; threads.load(std::memory_order_acquire) != 0 && tries < 10000; ++tries) {
        nanosleep(&millisecond, nullptr);
    }
    count_done();
}

/// Minimum size in bytes of a copy of pageable memory that waits for the threads that create mpgpu's context or a plan.
constexpr std::size_t least_waiting = std::size_t{64} << 20;

/// Blocks until the preparing threads have ended, but at most for about half of the time in which the driver copies
/// `bytes` bytes of pageable memory. The driver holds locks during such a copy. Without the wait, a program that makes
/// one copy after the other would delay the preparation for seconds.
void wait_for_threads(std::size_t bytes) {
    constexpr double bytes_per_nanosecond = 20;
    const auto most =
        std::chrono::nanoseconds(static_cast<std::int64_t>(static_cast<double>(bytes) / bytes_per_nanosecond));
    const auto end = std::chrono::steady_clock::now() + most;
    const timespec step{0, 20000};
    while (threads.load(std::memory_order_acquire) != 0 && std::chrono::steady_clock::now() < end) {
        nanosleep(&step, nullptr);
    }
}

/// Copy for which the interposer must decide whether it is accelerated, and the entry in which it stores the decision
/// for similar copies.
struct question {
    std::atomic<gain> *slot;
    mp_transfer_t what;
    /// GPU of the copy's stream.
    int gpu;
};

/// Decides whether copies like this one are accelerated. The first call creates contexts and staging memory on relays.
/// This function also creates the resources of the first execution, so that the program does not wait for them.
/// Planning does not access memory of the program, which may be freed in the meantime.
void answer(const question &asked_for) {
    // The program may have opened memory of another process before mpgpu's context existed.
    for (const void *end : {static_cast<const void *>(asked_for.what.dst), asked_for.what.src}) {
        find_opened(reinterpret_cast<device_pointer>(end), mpgpu_context);
    }
    const plan made(asked_for.what);
    if (made.gains()) {
        made.prepare(asked_for.gpu);
    }
    // If the memory has been freed in the meantime, the next copy of this class is planned again.
    const bool has_gone = made.status() == MP_ERROR_INVALID_POINTER;
    *asked_for.slot = has_gone ? gain::not_asked : made.gains() ? gain::some : gain::none;
}

/// Creates the CUDA contexts of the GPUs in MPGPU_PRELOAD_GPUS. The program itself possibly does not use these GPUs. A
/// context takes some tenths of a second. Creating it here avoids a delay of the first plan that uses the GPU.
void create_contexts() {
    if (!asked().gpus || asked().names_relays) { // MPGPU_RELAY_GPUS may exclude some of these GPUs
        return;
    }
    for (int gpu = 0; gpu < most_gpus; ++gpu) {
        mp_stream_t own = nullptr;
        if (!is_allowed(gpu)) {
            continue;
        }
        if (mp_stream_create(mpgpu_context, gpu, &own) != MP_SUCCESS) {
            break; // there is no such GPU
        }
        mp_stream_destroy(mpgpu_context, own);
    }
}

/// Creates mpgpu's context in a new thread. Does nothing if another thread does this already, or if the context exists.
void prepare() {
    stage expected = stage::idle;
    if (!state.compare_exchange_strong(expected, stage::preparing)) {
        return;
    }
    if (!asked().gpus) {
        look_at_gpus();
    }
    // `stop` is registered after the handlers of the driver, so it is called before them.
    std::atexit(stop);
    const auto create = [] {
        mp_context_options_t options = MP_CONTEXT_OPTIONS_INIT;
        options.backend = MP_BACKEND_CUDA;
        stage next = stage::ready;
        if (mp_context_create(&options, &mpgpu_context) != MP_SUCCESS) {
            std::fprintf(stderr, "mpgpu: cannot create a context: %s; copies are not accelerated\n", mp_last_error());
            next = stage::off;
        }
        stage still = stage::preparing;
        if (state.compare_exchange_strong(still, next) && next == stage::ready) {
            create_contexts();
        }
    };
    if (!begin(create)) {
        state = stage::off;
    }
}

/// Starts a thread that decides about the copy `next`, unless such a thread is running.
void ask(const question &next) {
    if (!asked().gpus) {
        look_at_gpus();
    }
    gain expected = gain::not_asked;
    if (next.slot->compare_exchange_strong(expected, gain::asked) && !begin([next] { answer(next); })) {
        *next.slot = gain::not_asked;
    }
}

// --- ends of a copy --------------------------------------------------------------------------------------------------

constexpr unsigned host_type = 1;
constexpr unsigned device_type = 2;

/// Source or destination of a copy: attributes of the address as reported by the driver. For memory of another process,
/// the actual GPU and range replace the reported ones.
struct end {
    memory known;
    bool is_opened = false;

    explicit end(device_pointer address) : known(find_memory(address)) {
        if (const auto found = find_opened(address, is_in_use() ? mpgpu_context : nullptr)) {
            is_opened = true;
            known.gpu = found->gpu;
            known.base = found->base;
            known.bytes = found->bytes;
        }
    }
    [[nodiscard]] int device() const {
        if (known.type == 0) {
            return pageable;
        }
        return known.type == host_type ? host : known.gpu;
    }
    /// True for memory of a pool or of a mapping (cuMemMap), whose owner grants access to each GPU separately.
    [[nodiscard]] bool is_given_by_gpu() const { return known.type == device_type && known.plain == 0 && !is_opened; }
};

/// Returns the reason why the interposer does not accelerate copies of this memory, or `count` if there is none.
outcome refusal(const end &of, device_pointer address, std::size_t bytes) {
    const memory &known = of.known;
    if (known.managed != 0) {
        return outcome::managed;
    }
    if (known.type == 0) {
        return outcome::count; // not the driver's: ordinary memory of the process, as far as that has it
    }
    if (known.type != host_type && known.type != device_type) {
        return outcome::no_gpu;
    }
    if (known.type == device_type) {
        if (of.is_opened && known.gpu < 0) {
            return outcome::opened;
        }
        // Memory of pools and mappings belongs to no context. mpgpu queries the driver for the GPUs that have access,
        // and uses only these for the copy.
        const bool is_of_context = !of.is_given_by_gpu() || known.owner != nullptr;
        if (known.gpu < 0 || known.gpu >= most_gpus || (is_of_context && gpu_of(known.owner) < 0)) {
            return outcome::other_context;
        }
    }
    // The driver must report an error for a range that extends past its allocation, so such a copy is passed through.
    // Some drivers do not report the range of registered host memory.
    const bool is_within = known.bytes == 0 ? known.type == host_type
                                            : address >= known.base && address - known.base <= known.bytes &&
                                                  bytes <= known.bytes - (address - known.base);
    return is_within ? outcome::count : outcome::refused;
}

// --- copies that are passed through early ----------------------------------------------------------------------------

/// Memory range that earlier copies of this thread have used. The entry avoids a query of the driver for each copy. It
/// may be outdated, because other memory may have replaced the range. This is harmless: an entry only causes copies to
/// be passed to the driver, which is always correct, and the driver is soon queried again.
struct range {
    device_pointer base = 0;
    std::size_t bytes = 0;
    int device = 0;
    /// Number of further copies that may be passed to the driver because of this entry.
    int left = 0;
};
constexpr int passed_by_one = 128;
/// Size in bytes above which the driver is always queried. The cost of a query is negligible for larger copies.
constexpr std::size_t most_passed = std::size_t{64} << 20;

thread_local std::array<range, 8> ranges;
thread_local std::size_t next_range;

range *find_range(device_pointer address, std::size_t bytes) {
    for (range &known : ranges) {
        const std::size_t offset = address - known.base;
        if (offset < known.bytes && bytes <= known.bytes - offset) {
            return &known;
        }
    }
    return nullptr;
}

void note_range(const end &of) {
    const memory &seen = of.known;
    if (seen.type == 0 || seen.bytes == 0) {
        return;
    }
    range *place = nullptr;
    for (range &known : ranges) {
        if (seen.base - known.base < known.bytes || known.base - seen.base < seen.bytes) {
            known = {};
            place = &known;
        }
    }
    if (place == nullptr) {
        place = &ranges.at(next_range++ % ranges.size());
    }
    *place = {seen.base, seen.bytes, of.device(), passed_by_one};
}

/// Returns the reason why a copy is passed to the driver, or `count` if this cannot be determined without a query of
/// the driver.
outcome reason_at_once(device_pointer dst, device_pointer src, std::size_t bytes) {
    if (bytes < asked().min_bytes) {
        return outcome::small;
    }
    if (state.load(std::memory_order_acquire) == stage::off) {
        return outcome::no_context;
    }
    range *to = bytes <= most_passed ? find_range(dst, bytes) : nullptr;
    range *from = to != nullptr ? find_range(src, bytes) : nullptr;
    if (from == nullptr || to->left <= 0 || from->left <= 0) {
        return outcome::count;
    }
    const outcome why = known_reason(to->device, from->device, bytes);
    if (why != outcome::count) {
        --to->left;
        --from->left;
    }
    return why;
}

// --- single copies ---------------------------------------------------------------------------------------------------

outcome take_planned(device_pointer dst, device_pointer src, std::size_t bytes, stream in, double &saved) {
    if (is_capturing(in)) {
        return outcome::captured;
    }
    const int gpu = gpu_of(context_of(in));
    if (gpu < 0) {
        return outcome::other_context;
    }
    const end to(dst);
    const end from(src);
    for (const outcome why : {refusal(to, dst, bytes), refusal(from, src, bytes)}) {
        if (why != outcome::count) {
            return why;
        }
    }
    const int dst_device = to.device();
    const int src_device = from.device();
    const bool is_pageable = dst_device == pageable || src_device == pageable;
    if (is_pageable && dst_device >= host && src_device >= host) {
        return outcome::no_gpu;
    }
    note_range(to);
    note_range(from);
    outcome why = known_reason(dst_device, src_device, bytes);
    if (why == outcome::unused_gpu && !asked().gpus) {
        look_at_gpus();
        why = known_reason(dst_device, src_device, bytes);
    }
    if (why != outcome::count) {
        return why;
    }
    std::atomic<gain> &slot = gain_of(dst_device, src_device, class_of(bytes));
    const question like_this{&slot, transfer(dst, src, bytes), gpu};
    const bool may_wait = is_pageable && bytes >= least_waiting && slot.load(std::memory_order_acquire) != gain::some;
    if (may_wait) {
        wait_for_threads(bytes);
    }
    switch (state.load(std::memory_order_acquire)) {
    case stage::idle:
        prepare();
        return outcome::preparing;
    case stage::preparing:
        return outcome::preparing;
    case stage::off:
        return outcome::no_context;
    case stage::ready:
        break;
    }
    const bool is_open = slot.load(std::memory_order_acquire) != gain::some;
    if (is_open && !smaller_gains(dst_device, src_device, class_of(bytes))) {
        ask(like_this);
        if (may_wait) {
            wait_for_threads(bytes);
        }
        if (slot.load(std::memory_order_acquire) != gain::some) {
            return outcome::preparing;
        }
    }
    const plan made(like_this.what);
    if (is_open && made.status() == MP_SUCCESS) {
        slot = made.gains() ? gain::some : gain::none;
    }
    if (!made.gains()) {
        return made.status() == MP_SUCCESS ? outcome::no_gain : outcome::refused;
    }
    mp_request_t request = nullptr;
    mp_status_t status = made.execute(in, asked().verify || is_pageable ? &request : nullptr);
    if (status == MP_SUCCESS && is_pageable) {
        // The caller may write to the memory or read it as soon as the call returns, as with the driver. If a part of
        // the memory is not mapped, the driver makes the whole copy and returns the error to the program.
        status = mp_wait(&request, nullptr);
        if (asked().verify && (status == MP_SUCCESS || status == MP_ERROR_DATA_CORRUPTION)) {
            count_compared(status == MP_SUCCESS);
            status = MP_SUCCESS;
        }
    }
    if (status != MP_SUCCESS) {
        const bool is_shut = status == MP_ERROR_NOT_SUPPORTED && (to.is_given_by_gpu() || from.is_given_by_gpu());
        return is_shut ? outcome::pooled : outcome::refused;
    }
    saved = made.saved_seconds();
    if (request != nullptr) {
        note_compared(request);
    }
    if (dst_device >= host) {
        return outcome::device_to_host;
    }
    return src_device >= host ? outcome::host_to_device : outcome::device_to_device;
}

[[gnu::constructor]] void watch_forks() {
    // A child of fork does not have the threads, the context and the GPUs of its parent. If the parent had not created
    // them, the child starts in the initial state.
    pthread_atfork(nullptr, nullptr, [] {
        forget_counts();
        threads = 0;
        if (state != stage::idle) {
            state = stage::off;
        }
    });
}

[[gnu::destructor]] void tell() {
    write_report();
}

} // namespace

memory find_memory(device_pointer address) noexcept {
    memory found;
    // CU_POINTER_ATTRIBUTE_: CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE,
    // RANGE_START_ADDR, RANGE_SIZE.
    std::array<unsigned, 7> names = {1, 2, 8, 9, 10, 11, 12};
    std::array<void *, 7> values = {&found.owner, &found.type, &found.managed, &found.gpu,
                                    &found.plain, &found.base, &found.bytes};
    const result code =
        call(symbol::cuPointerGetAttributes, static_cast<unsigned>(names.size()), names.data(), values.data(), address);
    return code == success ? found : memory{};
}

bool is_owned_by(const memory &known, context owner) noexcept {
    return known.owner == owner || (known.type == device_type && known.plain == 0 && known.owner == nullptr &&
                                    known.gpu >= 0 && gpu_of(owner) == known.gpu);
}

void prepare_early() noexcept {
    if (is_inside || state.load(std::memory_order_relaxed) != stage::idle || !asked().on) {
        return;
    }
    try {
        const inside guard;
        prepare();
    } catch (...) { // The first large copy tries again.
    }
}

bool is_inside_mpgpu() noexcept {
    return is_inside;
}

bool is_being_captured(stream in) {
    return is_capturing(in);
}

bool with_context(const std::function<bool(mp_context *, std::uint64_t)> &work) {
    if (is_inside) {
        return false;
    }
    const inside guard;
    const stage now = state.load(std::memory_order_acquire);
    if (now == stage::idle) {
        prepare();
    }
    return now == stage::ready && work(mpgpu_context, relay_mask());
}

bool is_in_use() noexcept {
    return state.load(std::memory_order_acquire) == stage::ready;
}

bool passes(device_pointer dst, device_pointer src, std::size_t bytes) noexcept {
    if (is_inside) {
        return true;
    }
    const outcome why = reason_at_once(dst, src, bytes);
    if (why != outcome::count) {
        count(why, bytes);
    }
    return why != outcome::count;
}

bool take(device_pointer dst, device_pointer src, std::size_t bytes, stream in) noexcept {
    outcome what = outcome::refused;
    double saved = 0;
    try {
        const inside guard;
        what = take_planned(dst, src, bytes, in, saved);
    } catch (...) { // Before anything was enqueued.
    }
    count(what, bytes, saved);
    return what < outcome::small;
}

} // namespace mpgpu_preload
