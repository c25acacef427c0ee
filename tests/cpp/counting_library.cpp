// SPDX-License-Identifier: MIT OR Apache-2.0
#include "counting_library.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

using counting::kind;

struct entry {
    kind what;
    mp_context_t context;                 // owner; null for a context
    std::vector<mp_transfer_t> transfers; // transfers of a plan
    std::unique_ptr<std::byte[]> bytes;   // bytes of an allocation
};

constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
struct captured_function {
    mp_host_function_t function;
    mp_host_function_t release;
    void *user;
};

struct library {
    std::map<const void *, entry> entries;
    std::array<int, 6> made{};
    std::uintptr_t next = 0x1000;
    int misuses = 0;
    int waited = 0;
    int forgotten = 0;
    bool pending = false;
    bool capturing = false;
    std::vector<captured_function> captured;
    bool fail = false;
    mp_error_info_t failure{};
    mp_error_info_t last{};
    std::string argument;
    std::string message;
    mp_plan_options_t plan_options{};
    mp_context_options_t context_options{};
    std::string topology;
    std::uint64_t bytes = 0;
    mp_stream_t freed_in = nullptr;
    mp_stream_t prepared_for = nullptr;
    std::size_t refused_above = none;
    std::size_t execution_refused_above = none;
    mp_status_t refusal = MP_SUCCESS;
    std::size_t long_above = none;
    counting::duration of_long{};
    counting::duration of_others{};
    double queued = 0;
    bool is_queued = false;
    std::string text = "described";
    std::string grown = "described";
};

library &state() {
    static library instance;
    return instance;
}

/// Stores `value` in `*out`, unless `out` is null.
template <class T, class Value> void tell(T *out, Value value) {
    if (out != nullptr) {
        *out = value;
    }
}

mp_status_t report(mp_status_t status, const char *argument, const char *message) {
    library &lib = state();
    lib.argument = argument;
    lib.message = message;
    lib.last.status = status;
    lib.last.driver_code = 0;
    return status;
}

mp_status_t refused() {
    return report(state().refusal, "transfers", "more transfers than the double takes");
}

/// Stores the requested failure in `status` and returns true. Returns false if no failure is requested, and after the
/// first call.
bool told_to_fail(mp_status_t &status) {
    library &lib = state();
    if (!lib.fail) {
        return false;
    }
    lib.fail = false;
    status = report(lib.failure.status, lib.failure.argument, lib.failure.message);
    lib.last.driver_code = lib.failure.driver_code;
    return true;
}

template <class Handle> entry *find(kind what, Handle handle) {
    library &lib = state();
    const auto found = lib.entries.find(handle);
    return found != lib.entries.end() && found->second.what == what ? &found->second : nullptr;
}

/// Returns success if the handle is live and no failure is requested. Otherwise returns the error.
template <class Handle> mp_status_t enter(kind what, Handle handle) {
    mp_status_t status = MP_SUCCESS;
    if (told_to_fail(status)) {
        return status;
    }
    return find(what, handle) != nullptr ? MP_SUCCESS : report(MP_ERROR_INVALID_HANDLE, "handle", "not a live handle");
}

template <class Handle> void hand_out(kind what, mp_context_t context, Handle *handle) {
    library &lib = state();
    lib.next += 0x10;
    // The handle is a number that no code dereferences, like the handles of the real library.
    *handle = reinterpret_cast<Handle>(lib.next); // NOLINT(performance-no-int-to-ptr)
    lib.entries.emplace(*handle, entry{what, context, {}, nullptr});
    ++lib.made.at(static_cast<std::size_t>(what));
}

template <class Handle> mp_status_t take_back(kind what, mp_context_t context, Handle handle) {
    library &lib = state();
    const entry *found = find(what, handle);
    if (found == nullptr || (context != nullptr && found->context != context)) {
        ++lib.misuses;
        return report(MP_ERROR_INVALID_HANDLE, "handle", "not a live handle of this context");
    }
    lib.entries.erase(handle);
    return MP_SUCCESS;
}

mp_status_t write(char *text, std::size_t capacity, std::size_t *length) {
    library &lib = state();
    const std::string now = lib.text;
    *length = now.size() + 1;
    if (text == nullptr) {
        lib.text = lib.grown;
        return MP_SUCCESS;
    }
    if (capacity < *length) {
        return report(MP_ERROR_INVALID_ARGUMENT, "capacity", "too little room");
    }
    std::memcpy(text, now.c_str(), *length);
    return MP_SUCCESS;
}

} // namespace

namespace counting {

int live(kind what) {
    const auto &entries = state().entries;
    return static_cast<int>(
        std::count_if(entries.begin(), entries.end(), [&](const auto &e) { return e.second.what == what; }));
}
int made(kind what) {
    return state().made.at(static_cast<std::size_t>(what));
}
int misuses() {
    return state().misuses;
}
int waited() {
    return state().waited;
}
int forgotten() {
    return state().forgotten;
}
mp_plan_options_t last_plan_options() {
    return state().plan_options;
}
mp_context_options_t last_context_options() {
    return state().context_options;
}
std::string last_topology() {
    return state().topology;
}
mp_stream_t freed_in() {
    return state().freed_in;
}
mp_stream_t prepared_for() {
    return state().prepared_for;
}
std::uint64_t last_bytes() {
    return state().bytes;
}

void fail_next(mp_status_t status, std::int64_t driver_code, const char *argument, const char *message) {
    state().fail = true;
    state().failure = {sizeof(mp_error_info_t), status, driver_code, argument, message};
}
void hold(bool pending) {
    state().pending = pending;
}
void refuse_plans(std::size_t more_than, mp_status_t status) {
    state().refused_above = more_than;
    state().refusal = status;
}
void refuse_executions(std::size_t more_than, mp_status_t status) {
    state().execution_refused_above = more_than;
    state().refusal = status;
}
void executions_take(std::size_t more_than, duration of_those, duration of_others) {
    state().long_above = more_than;
    state().of_long = of_those;
    state().of_others = of_others;
}
void capture() {
    state().capturing = true;
}
void launch_captured() {
    for (const captured_function &each : state().captured) {
        each.function(each.user);
    }
}
void destroy_captured() {
    for (const captured_function &each : state().captured) {
        each.release(each.user);
    }
    state().captured.clear();
    state().capturing = false;
}
void describe_as(const std::string &text, const std::string &grown) {
    state().text = text;
    state().grown = grown;
}

} // namespace counting

extern "C" {

uint32_t mp_version(void) {
    return MP_VERSION;
}
const char *mp_status_string(mp_status_t status) {
    return status == MP_ERROR_OUT_OF_MEMORY ? "out of memory" : "another status";
}

mp_status_t mp_last_error_info(mp_error_info_t *info) {
    const library &lib = state();
    info->status = lib.last.status;
    info->driver_code = lib.last.driver_code;
    info->argument = lib.argument.empty() ? nullptr : lib.argument.c_str();
    info->message = lib.message.c_str();
    return MP_SUCCESS;
}

mp_status_t mp_log_set_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user) {
    if (callback != nullptr) {
        callback(max_level, "counting", "callback set", user);
    }
    return MP_SUCCESS;
}

mp_status_t mp_context_create_versioned(const mp_context_options_t *options, uint32_t header_version,
                                        mp_context_t *context) {
    mp_status_t status = MP_SUCCESS;
    if (told_to_fail(status)) {
        return status;
    }
    if (header_version != MP_VERSION) {
        return report(MP_ERROR_VERSION_MISMATCH, "header_version", "another version");
    }
    state().context_options = *options;
    state().topology = options->topology != nullptr ? options->topology : "";
    hand_out(kind::context, nullptr, context);
    return MP_SUCCESS;
}

mp_status_t mp_context_destroy(mp_context_t context) {
    auto &entries = state().entries;
    for (auto e = entries.begin(); e != entries.end();) {
        e = e->second.context == context ? entries.erase(e) : std::next(e);
    }
    return take_back(kind::context, nullptr, context);
}

mp_status_t mp_context_get_info(mp_context_t context, mp_backend_t *backend, int32_t *gpus, int32_t *host_domains) {
    tell(backend, MP_BACKEND_HOST);
    tell(gpus, 4);
    tell(host_domains, 1);
    return enter(kind::context, context);
}

mp_status_t mp_context_describe(mp_context_t context, mp_format_t /*format*/, char *text, size_t capacity,
                                size_t *length) {
    const mp_status_t status = enter(kind::context, context);
    return status == MP_SUCCESS ? write(text, capacity, length) : status;
}

mp_status_t mp_context_probe(mp_context_t context, const mp_probe_options_t *options) {
    if (options != nullptr && options->size != sizeof(mp_probe_options_t)) {
        return report(MP_ERROR_INVALID_ARGUMENT, "options", "wrong size");
    }
    return enter(kind::context, context);
}

mp_status_t mp_context_probed(mp_context_t context, char *text, size_t capacity, size_t *length) {
    const mp_status_t status = enter(kind::context, context);
    return status == MP_SUCCESS ? write(text, capacity, length) : status;
}

mp_status_t mp_context_statistics(mp_context_t context, mp_statistics_t *statistics) {
    if (statistics->size != sizeof(mp_statistics_t)) {
        return report(MP_ERROR_INVALID_ARGUMENT, "statistics", "wrong size");
    }
    statistics->executions = 7;
    return enter(kind::context, context);
}

mp_status_t mp_context_device_statistics(mp_context_t context, int32_t device, mp_device_statistics_t *statistics) {
    if (statistics->size != sizeof(mp_device_statistics_t)) {
        return report(MP_ERROR_INVALID_ARGUMENT, "statistics", "wrong size");
    }
    statistics->streams = static_cast<uint64_t>(device) + 10;
    return enter(kind::context, context);
}

mp_status_t mp_plan(mp_context_t context, const mp_transfer_t *transfers, size_t count,
                    const mp_plan_options_t *options, mp_plan_t *plan) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS && count > state().refused_above) {
        return refused();
    }
    if (status == MP_SUCCESS) {
        state().plan_options = *options;
        hand_out(kind::plan, context, plan);
        find(kind::plan, *plan)->transfers.assign(transfers, transfers + count);
    }
    return status;
}

mp_status_t mp_plan_destroy(mp_plan_t plan) {
    return take_back(kind::plan, nullptr, plan);
}

mp_status_t mp_plan_describe(mp_plan_t plan, mp_format_t /*format*/, char *text, size_t capacity, size_t *length) {
    const mp_status_t status = enter(kind::plan, plan);
    return status == MP_SUCCESS ? write(text, capacity, length) : status;
}

mp_status_t mp_plan_get_info(mp_plan_t plan, mp_plan_info_t *info) {
    if (info->size != sizeof(mp_plan_info_t)) {
        return report(MP_ERROR_INVALID_ARGUMENT, "info", "wrong size");
    }
    const mp_status_t status = enter(kind::plan, plan);
    if (status == MP_SUCCESS) {
        info->predicted_seconds = 1e-3;
        info->direct_seconds = 2e-3;
        for (const mp_transfer_t &t : find(kind::plan, plan)->transfers) {
            info->bytes += t.bytes;
        }
    }
    return status;
}

mp_status_t mp_plan_prepare(mp_plan_t plan, mp_stream_t stream) {
    state().prepared_for = stream;
    return enter(kind::plan, plan);
}

mp_status_t mp_execute(mp_plan_t plan, mp_stream_t /*stream*/, mp_request_t *request) {
    const mp_status_t status = enter(kind::plan, plan);
    if (status != MP_SUCCESS) {
        return status;
    }
    library &lib = state();
    const std::size_t count = find(kind::plan, plan)->transfers.size();
    if (count > lib.execution_refused_above) {
        return refused();
    }
    const counting::duration takes = count > lib.long_above ? lib.of_long : lib.of_others;
    lib.queued += std::exchange(lib.is_queued, true) ? takes.behind : takes.alone;
    for (const mp_transfer_t &t : find(kind::plan, plan)->transfers) {
        if (t.bytes > 0) {
            std::memcpy(t.dst, t.src, t.bytes);
        }
    }
    if (request != nullptr) {
        hand_out(kind::request, find(kind::plan, plan)->context, request);
    }
    return MP_SUCCESS;
}

mp_status_t mp_wait(mp_request_t *request, mp_message_info_t * /*info*/) {
    mp_status_t status = MP_SUCCESS;
    if (told_to_fail(status)) {
        return status;
    }
    if (*request != nullptr) {
        status = take_back(kind::request, nullptr, *request);
        ++state().waited;
        *request = nullptr;
    }
    return status;
}

mp_status_t mp_test(mp_request_t *request, int32_t *done, mp_message_info_t *info) {
    *done = state().pending ? 0 : 1;
    return *done != 0 ? mp_wait(request, info) : MP_SUCCESS;
}

mp_status_t mp_request_destroy(mp_request_t *request) {
    ++state().forgotten;
    return take_back(kind::request, nullptr, *request);
}

mp_status_t mp_alloc(mp_context_t context, int32_t /*device*/, uint64_t bytes, void **memory) {
    state().bytes = bytes;
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        auto block = std::make_unique<std::byte[]>(bytes);
        *memory = block.get();
        state().entries.emplace(block.get(), entry{kind::memory, context, {}, nullptr}).first->second.bytes =
            std::move(block);
        ++state().made.at(static_cast<std::size_t>(kind::memory));
    }
    return status;
}

mp_status_t mp_alloc_shared(mp_context_t context, int32_t device, uint64_t bytes, void **memory) {
    return mp_alloc(context, device, bytes, memory);
}

mp_status_t mp_free(mp_context_t context, void *memory) {
    return take_back(kind::memory, context, memory);
}

mp_status_t mp_free_async(mp_context_t context, void *memory, mp_stream_t stream) {
    mp_status_t status = MP_SUCCESS;
    if (told_to_fail(status)) {
        return status;
    }
    state().freed_in = stream;
    return take_back(kind::memory, context, memory);
}

mp_status_t mp_stream_create(mp_context_t context, int32_t /*device*/, mp_stream_t *stream) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        hand_out(kind::stream, context, stream);
    }
    return status;
}
mp_status_t mp_stream_destroy(mp_context_t context, mp_stream_t stream) {
    return take_back(kind::stream, context, stream);
}
mp_status_t mp_stream_synchronize(mp_context_t context, mp_stream_t /*stream*/) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::exchange(state().queued, 0));
    state().is_queued = false;
    std::this_thread::sleep_until(end);
    return enter(kind::context, context);
}
mp_status_t mp_stream_launch_host(mp_context_t context, mp_stream_t /*stream*/, mp_host_function_t function, void *user,
                                  mp_host_function_t release) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS && state().capturing) {
        state().captured.push_back({function, release, user});
    } else if (status == MP_SUCCESS) {
        function(user);
        if (release != nullptr) {
            release(user);
        }
    }
    return status;
}

mp_status_t mp_stream_get_info(mp_context_t context, mp_stream_t /*stream*/, int32_t *device, int32_t *capturing) {
    tell(device, MP_DEVICE_HOST);
    tell(capturing, state().capturing ? 1 : 0);
    return enter(kind::context, context);
}

mp_status_t mp_memory_leave(mp_context_t context, const void * /*pointer*/, uint64_t /*value*/) {
    return enter(kind::context, context);
}

mp_status_t mp_stream_raise_signals(mp_context_t context, mp_stream_t /*stream*/, const mp_signal_t * /*signals*/,
                                    size_t /*count*/) {
    return enter(kind::context, context);
}
mp_status_t mp_stream_wait_signals(mp_context_t context, mp_stream_t /*stream*/, const mp_signal_t * /*signals*/,
                                   size_t /*count*/) {
    return enter(kind::context, context);
}

mp_status_t mp_kernel_wait_signals(mp_context_t context, const mp_signal_t * /*signals*/, size_t /*count*/) {
    return enter(kind::context, context);
}
mp_status_t mp_signal_raise(mp_context_t context, uint64_t *counter, uint64_t value) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        *counter = value;
    }
    return status;
}
mp_status_t mp_signal_read(mp_context_t context, const uint64_t *counter, uint64_t *value) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        *value = *counter;
    }
    return status;
}
mp_status_t mp_signal_test(mp_context_t context, const uint64_t *counter, uint64_t value, int32_t *reached) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        *reached = *counter >= value ? 1 : 0;
    }
    return status;
}

mp_status_t mp_event_create(mp_context_t context, mp_event_t *event) {
    const mp_status_t status = enter(kind::context, context);
    if (status == MP_SUCCESS) {
        hand_out(kind::event, context, event);
    }
    return status;
}
mp_status_t mp_event_destroy(mp_context_t context, mp_event_t event) {
    return take_back(kind::event, context, event);
}
mp_status_t mp_event_record(mp_context_t context, mp_event_t event, mp_stream_t /*stream*/) {
    const mp_status_t status = enter(kind::context, context);
    return status == MP_SUCCESS ? enter(kind::event, event) : status;
}
mp_status_t mp_event_synchronize(mp_context_t context, mp_event_t event) {
    const mp_status_t status = enter(kind::context, context);
    return status == MP_SUCCESS ? enter(kind::event, event) : status;
}
mp_status_t mp_stream_wait_event(mp_context_t context, mp_stream_t /*stream*/, mp_event_t event) {
    const mp_status_t status = enter(kind::context, context);
    return status == MP_SUCCESS ? enter(kind::event, event) : status;
}

} // extern "C"
