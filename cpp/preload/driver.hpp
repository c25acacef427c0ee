// Declares the parts of the CUDA driver that the interposer uses: names, types and codes of the driver's C interface,
// which are stable.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

// All functions exported in place of the driver's, except dlsym. Functions that UCX patches (`cuMemAlloc*`,
// `cuMemFree*`, `cuMemMap` …) must not be listed: its patch and this library would wait for each other.
#define MPGPU_INTERPOSED(X)                                                                                            \
    X(cuGetProcAddress)                                                                                                \
    X(cuGetProcAddress_v2)                                                                                             \
    X(cuMemcpyAsync)                                                                                                   \
    X(cuMemcpyAsync_ptsz)                                                                                              \
    X(cuMemcpyDtoDAsync_v2)                                                                                            \
    X(cuMemcpyDtoDAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyHtoDAsync_v2)                                                                                            \
    X(cuMemcpyHtoDAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyDtoHAsync_v2)                                                                                            \
    X(cuMemcpyDtoHAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyHtoD_v2)                                                                                                 \
    X(cuMemcpyHtoD_v2_ptds)                                                                                            \
    X(cuMemcpyDtoH_v2)                                                                                                 \
    X(cuMemcpyDtoH_v2_ptds)                                                                                            \
    X(cuMemcpyBatchAsync)                                                                                              \
    X(cuMemcpyBatchAsync_ptsz)                                                                                         \
    X(cuMemcpyBatchAsync_v2)                                                                                           \
    X(cuMemcpyBatchAsync_v2_ptsz)                                                                                      \
    X(cuMemcpyPeerAsync)                                                                                               \
    X(cuMemcpyPeerAsync_ptsz)                                                                                          \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuCtxEnablePeerAccess)                                                                                           \
    X(cuCtxDisablePeerAccess)                                                                                          \
    X(cuIpcGetMemHandle)                                                                                               \
    X(cuIpcOpenMemHandle)                                                                                              \
    X(cuIpcOpenMemHandle_v2)                                                                                           \
    X(cuIpcCloseMemHandle)

// Functions of the driver that the interposer itself calls.
#define MPGPU_ASKED(X)                                                                                                 \
    X(cuCtxGetCurrent)                                                                                                 \
    X(cuDeviceGetCount)                                                                                                \
    X(cuDeviceGetUuid)                                                                                                 \
    X(cuDevicePrimaryCtxGetState)                                                                                      \
    X(cuDevicePrimaryCtxRelease_v2)                                                                                    \
    X(cuPointerGetAttributes)                                                                                          \
    X(cuStreamGetCtx)                                                                                                  \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuStreamSynchronize)

namespace mpgpu_preload {

/// Result code, `CUresult`.
using result = int;
constexpr result success = 0;
constexpr result not_found = 500;
constexpr result peer_access_already_enabled = 704;
constexpr result peer_access_not_enabled = 705;

using device_pointer = std::uint64_t; // CUdeviceptr
using context = void *;               // CUcontext
using stream = void *;                // CUstream

/// Returns the handle of the calling thread's default stream, `CU_STREAM_PER_THREAD`.
inline stream per_thread_stream() {
    return reinterpret_cast<stream>(std::uintptr_t{2}); // NOLINT(performance-no-int-to-ptr): a handle of the driver's
}

/// IPC handle, `CUipcMemHandle`.
struct ipc_handle {
    std::array<std::uint8_t, 64> bytes;
};

/// Unique id of a GPU, `CUuuid`. It is equal in all processes.
using uuid = std::array<std::uint8_t, 16>;

enum class symbol : std::size_t {
#define MPGPU_NAME(name) name,
    MPGPU_INTERPOSED(MPGPU_NAME) MPGPU_ASKED(MPGPU_NAME)
#undef MPGPU_NAME
        count
};

/// Returns the function that the interposer exports in place of the driver's function `name`. Null if the interposer
/// only calls this function of the driver.
void *hook(symbol name);

/// Returns the function that a look-up by the program should return when the driver's look-up returned `found`: the
/// replacement if the interposer replaces this function of the driver, and otherwise `found`. Compares addresses
/// instead of names, because `cuGetProcAddress` selects versions and variants (`_v2`, `_ptsz`) by numbers and flags.
void *replaced(void *found);

constexpr auto symbols = static_cast<std::size_t>(symbol::count);

/// Addresses of the driver's own functions, null until they are looked up. The array is declared in this header, so
/// that passing a call to the driver costs only two loads and a jump.
extern std::array<std::atomic<void *>, symbols> originals;

/// Looks up the address of the driver's own function `name`.
void *look_up(symbol name);

/// Returns the driver's own function `name`. Null if the driver is not loaded yet or does not have the function.
inline void *original(symbol name) {
    void *found = originals[static_cast<std::size_t>(name)].load(std::memory_order_acquire);
    return found != nullptr ? found : look_up(name);
}

/// Returns the driver's own function `name` with a function type.
template <class Result, class... Arguments> auto original_as(symbol name) {
    using function = Result (*)(Arguments...);
    return reinterpret_cast<function>(original(name));
}

/// Calls the driver's own function `name`. Returns an error if the driver does not have it.
template <class... Arguments> result call(symbol name, Arguments... arguments) {
    const auto function = original_as<result, Arguments...>(name);
    return function == nullptr ? not_found : function(arguments...);
}

} // namespace mpgpu_preload
