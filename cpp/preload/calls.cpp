// Defines the functions that the interposer exports in place of the driver's. Each examines its arguments. If the copy
// is not accelerated, it calls the driver's own function with the same arguments.
#include "batches.hpp"
#include "copies.hpp"
#include "driver.hpp"
#include "opened.hpp"
#include "owners.hpp"
#include "peers.hpp"
#include "report.hpp"
#include "settings.hpp"

using namespace mpgpu_preload;

namespace {

device_pointer address(device_pointer pointer) {
    return pointer;
}
device_pointer address(const void *pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
}

/// Meaning of stream handle 0: the legacy default stream, or the per-thread default stream in functions whose name ends
/// in `_ptsz` or `_ptds`.
enum class zero { legacy, per_thread };

stream meant(zero means, stream in) {
    return means == zero::per_thread && in == nullptr ? per_thread_stream() : in;
}

/// True if a copy is passed to the driver without further checks.
bool passes_at_once(device_pointer dst, device_pointer src, std::size_t bytes) noexcept {
    return bytes < looked_at_from.load(std::memory_order_relaxed) || passes(dst, src, bytes);
}

template <class Dst, class Src>
result copy(symbol name, zero means, Dst dst, Src src, std::size_t bytes, stream in) noexcept {
    if (!passes_at_once(address(dst), address(src), bytes) &&
        take(address(dst), address(src), bytes, meant(means, in))) {
        return success;
    }
    return call(name, dst, src, bytes, in);
}

/// Makes a synchronous copy. Between GPUs the driver orders such copies with more than one stream, so the interposer
/// does not replace those.
template <class Dst, class Src> result copy_now(symbol name, zero means, Dst dst, Src src, std::size_t bytes) noexcept {
    const stream in = meant(means, nullptr);
    if (!passes_at_once(address(dst), address(src), bytes) && take(address(dst), address(src), bytes, in)) {
        return call(symbol::cuStreamSynchronize, in);
    }
    return call(name, dst, src, bytes);
}

result copy_peers(symbol name, zero means, device_pointer dst, context dst_context, device_pointer src,
                  context src_context, std::size_t bytes, stream in) noexcept {
    if (!passes_at_once(dst, src, bytes)) {
        // The memory at an address belongs to one context. If the arguments name another context, the driver decides
        // what happens.
        if (!is_owned_by(find_memory(dst), dst_context) || !is_owned_by(find_memory(src), src_context)) {
            count(outcome::other_context, bytes);
        } else if (take(dst, src, bytes, meant(means, in))) {
            return success;
        }
    }
    return call(name, dst, dst_context, src, src_context, bytes, in);
}

result open(symbol name, device_pointer *pointer, const ipc_handle &handle, unsigned flags) noexcept {
    const result code = call(name, pointer, handle, flags);
    if (code == success) {
        note_opened(*pointer, handle);
    }
    return code;
}

} // namespace

// NOLINTBEGIN(readability-identifier-naming): the driver's names
extern "C" {

#define MPGPU_EXPORTED __attribute__((visibility("default"))) result

MPGPU_EXPORTED cuGetProcAddress(const char *name, void **function, int version, std::uint64_t flags) noexcept {
    const result code = call(symbol::cuGetProcAddress, name, function, version, flags);
    if (code == success && function != nullptr) {
        *function = replaced(*function);
    }
    return code;
}

MPGPU_EXPORTED cuGetProcAddress_v2(const char *name, void **function, int version, std::uint64_t flags,
                                   void *found) noexcept {
    const result code = call(symbol::cuGetProcAddress_v2, name, function, version, flags, found);
    if (code == success && function != nullptr) {
        *function = replaced(*function);
    }
    return code;
}

#define MPGPU_COPY(name, form, Dst, Src)                                                                               \
    MPGPU_EXPORTED name(Dst dst, Src src, std::size_t bytes, stream in) noexcept {                                     \
        return copy(symbol::name, zero::form, dst, src, bytes, in);                                                    \
    }
MPGPU_COPY(cuMemcpyAsync, legacy, device_pointer, device_pointer)
MPGPU_COPY(cuMemcpyAsync_ptsz, per_thread, device_pointer, device_pointer)
MPGPU_COPY(cuMemcpyDtoDAsync_v2, legacy, device_pointer, device_pointer)
MPGPU_COPY(cuMemcpyDtoDAsync_v2_ptsz, per_thread, device_pointer, device_pointer)
MPGPU_COPY(cuMemcpyHtoDAsync_v2, legacy, device_pointer, const void *)
MPGPU_COPY(cuMemcpyHtoDAsync_v2_ptsz, per_thread, device_pointer, const void *)
MPGPU_COPY(cuMemcpyDtoHAsync_v2, legacy, void *, device_pointer)
MPGPU_COPY(cuMemcpyDtoHAsync_v2_ptsz, per_thread, void *, device_pointer)

#define MPGPU_COPY_NOW(name, form, Dst, Src)                                                                           \
    MPGPU_EXPORTED name(Dst dst, Src src, std::size_t bytes) noexcept {                                                \
        return copy_now(symbol::name, zero::form, dst, src, bytes);                                                    \
    }
MPGPU_COPY_NOW(cuMemcpyHtoD_v2, legacy, device_pointer, const void *)
MPGPU_COPY_NOW(cuMemcpyHtoD_v2_ptds, per_thread, device_pointer, const void *)
MPGPU_COPY_NOW(cuMemcpyDtoH_v2, legacy, void *, device_pointer)
MPGPU_COPY_NOW(cuMemcpyDtoH_v2_ptds, per_thread, void *, device_pointer)

#define MPGPU_PEER_COPY(name, form)                                                                                    \
    MPGPU_EXPORTED name(device_pointer dst, context dst_context, device_pointer src, context src_context,              \
                        std::size_t bytes, stream in) noexcept {                                                       \
        return copy_peers(symbol::name, zero::form, dst, dst_context, src, src_context, bytes, in);                    \
    }
MPGPU_PEER_COPY(cuMemcpyPeerAsync, legacy)
MPGPU_PEER_COPY(cuMemcpyPeerAsync_ptsz, per_thread)

MPGPU_EXPORTED cuDevicePrimaryCtxRetain(context *primary, int gpu) noexcept {
    const result code = call(symbol::cuDevicePrimaryCtxRetain, primary, gpu);
    if (code == success) {
        prepare_early();
    }
    return code;
}

#define MPGPU_BATCH(name, form)                                                                                        \
    MPGPU_EXPORTED name(device_pointer *dst, device_pointer *src, std::size_t *bytes, std::size_t count,               \
                        batch_attributes *attributes, std::size_t *first, std::size_t attribute_count,                 \
                        std::size_t *failed, stream in) noexcept {                                                     \
        if (take_batch({dst, src, bytes, count, attributes, attribute_count}, meant(zero::form, in))) {                \
            return success;                                                                                            \
        }                                                                                                              \
        return call(symbol::name, dst, src, bytes, count, attributes, first, attribute_count, failed, in);             \
    }
MPGPU_BATCH(cuMemcpyBatchAsync, legacy)
MPGPU_BATCH(cuMemcpyBatchAsync_ptsz, per_thread)

#define MPGPU_BATCH_V2(name, form)                                                                                     \
    MPGPU_EXPORTED name(device_pointer *dst, device_pointer *src, std::size_t *bytes, std::size_t count,               \
                        batch_attributes *attributes, std::size_t *first, std::size_t attribute_count,                 \
                        stream in) noexcept {                                                                          \
        if (take_batch({dst, src, bytes, count, attributes, attribute_count}, meant(zero::form, in))) {                \
            return success;                                                                                            \
        }                                                                                                              \
        return call(symbol::name, dst, src, bytes, count, attributes, first, attribute_count, in);                     \
    }
MPGPU_BATCH_V2(cuMemcpyBatchAsync_v2, legacy)
MPGPU_BATCH_V2(cuMemcpyBatchAsync_v2_ptsz, per_thread)

MPGPU_EXPORTED cuCtxEnablePeerAccess(context peer, unsigned flags) noexcept {
    return enabled_access(peer, call(symbol::cuCtxEnablePeerAccess, peer, flags));
}

// Plans still need the access between the contexts, so it stays enabled while mpgpu is in use.
MPGPU_EXPORTED cuCtxDisablePeerAccess(context peer) noexcept {
    const bool was_enabled = disabled_access(peer);
    if (!is_in_use()) {
        return call(symbol::cuCtxDisablePeerAccess, peer);
    }
    return was_enabled ? success : peer_access_not_enabled;
}

MPGPU_EXPORTED cuIpcGetMemHandle(ipc_handle *handle, device_pointer pointer) noexcept {
    const result code = call(symbol::cuIpcGetMemHandle, handle, pointer);
    if (code == success) {
        const memory known = find_memory(pointer);
        owner told{{}, known.bytes};
        if (known.bytes != 0 && call(symbol::cuDeviceGetUuid, &told.gpu, known.gpu) == success) {
            publish(*handle, told);
        }
    }
    return code;
}

MPGPU_EXPORTED cuIpcOpenMemHandle(device_pointer *pointer, ipc_handle handle, unsigned flags) noexcept {
    return open(symbol::cuIpcOpenMemHandle, pointer, handle, flags);
}

MPGPU_EXPORTED cuIpcOpenMemHandle_v2(device_pointer *pointer, ipc_handle handle, unsigned flags) noexcept {
    return open(symbol::cuIpcOpenMemHandle_v2, pointer, handle, flags);
}

MPGPU_EXPORTED cuIpcCloseMemHandle(device_pointer pointer) noexcept {
    forget_opened(pointer);
    return call(symbol::cuIpcCloseMemHandle, pointer);
}

} // extern "C"
// NOLINTEND(readability-identifier-naming)

void *mpgpu_preload::hook(symbol name) {
    switch (name) {
#define MPGPU_NAME(name)                                                                                               \
    case symbol::name:                                                                                                 \
        return reinterpret_cast<void *>(&::name);
        MPGPU_INTERPOSED(MPGPU_NAME)
#undef MPGPU_NAME
    default:
        return nullptr;
    }
}
