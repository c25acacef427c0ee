// Implements driver functions that only UCX and the CUDA runtime need. They call the other functions of the fake
// driver.
#include "driver.hpp"

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

using uuid = std::array<std::uint8_t, 16>;

// NOLINTBEGIN(readability-identifier-naming): the driver's names
extern "C" {
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuDeviceGetUuid(uuid *made, CUdevice device);
CUresult cuPointerGetAttributes(unsigned count, unsigned *names, void **values, CUdeviceptr address);
}
// NOLINTEND(readability-identifier-naming)

namespace {

constexpr CUresult success = 0;
constexpr CUresult invalid_value = 1;
constexpr CUresult invalid_handle = 400;
constexpr CUresult not_supported = 801;

/// Returns the address of a function as an entry of a table.
template <class Function> void *slot(Function *function) {
    return reinterpret_cast<void *>(function);
}

// --- tables of the CUDA runtime --------------------------------------------------------------------------------------
// The driver gives the runtime tables of functions that are in no header. These contain the functions that runtime 11.1
// calls. From 11.3 on, the runtime checks with another function that the driver is NVIDIA's. The fake driver fails this
// check, and such a runtime returns cudaErrorSoftwareValidityNotEstablished.

/// Values that the runtime stores with a context. Never destroyed, because the runtime requests them until the process
/// ends.
struct storage {
    std::mutex lock;
    std::map<std::pair<CUcontext, void *>, void *> values;
};
storage &kept() {
    static auto &made = *new storage;
    return made;
}

CUcontext meant(CUcontext context) {
    CUcontext current = nullptr;
    cuCtxGetCurrent(&current);
    return context == nullptr ? current : context;
}

CUresult keep(CUcontext context, void *key, void *value, void *) {
    const std::lock_guard guard(kept().lock);
    kept().values[{meant(context), key}] = value;
    return success;
}

CUresult forget(CUcontext context, void *key) {
    const std::lock_guard guard(kept().lock);
    return kept().values.erase({meant(context), key}) != 0 ? success : invalid_handle;
}

CUresult find_kept(void **value, CUcontext context, void *key) {
    const std::lock_guard guard(kept().lock);
    const auto found = kept().values.find({meant(context), key});
    if (found == kept().values.end()) {
        return invalid_handle;
    }
    *value = found->second;
    return success;
}

/// Returns the switches of tools. All of them are off.
CUresult no_tools(void **switches, std::size_t *count) {
    static std::array<std::uint64_t, 1024> off{};
    *switches = off.data();
    *count = off.size();
    return success;
}

CUresult refused() {
    return not_supported;
}

/// Returns a table whose functions do nothing. Its first entry is its size.
std::array<void *, 16> refusing() {
    std::array<void *, 16> table{};
    table.fill(slot(refused));
    const std::size_t bytes = sizeof(table);
    std::memcpy(table.data(), &bytes, sizeof(bytes));
    return table;
}

} // namespace

// NOLINTBEGIN(readability-identifier-naming): the driver's names
extern "C" {

CUresult cuGetExportTable(void **table, const uuid *asked) {
    static std::array<void *, 3> storage = {slot(keep), slot(forget), slot(find_kept)};
    static auto contexts = refusing();
    static auto tools = refusing();
    static auto others = refusing();
    contexts[2] = slot(cuDevicePrimaryCtxRetain);
    tools[2] = slot(no_tools);
    tools[6] = slot(no_tools);
    switch (asked->front()) { // The first byte distinguishes them.
    case 0xc6:
        *table = storage.data();
        return success;
    case 0x6b:
        *table = contexts.data();
        return success;
    case 0xa0:
        *table = tools.data();
        return success;
    case 0x42:
        *table = others.data();
        return success;
    default:
        *table = nullptr;
        return invalid_value;
    }
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
    *version = 3020;
    return success;
}

CUresult cuDeviceTotalMem_v2(std::size_t *bytes, CUdevice) {
    *bytes = std::size_t{16} << 30;
    return success;
}

CUresult cuDeviceGetUuid_v2(uuid *made, CUdevice device) {
    return cuDeviceGetUuid(made, device);
}

CUresult cuPointerGetAttribute(void *value, unsigned name, CUdeviceptr address) {
    return cuPointerGetAttributes(1, &name, &value, address);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, std::size_t *bytes, CUdeviceptr address) {
    std::array<unsigned, 2> names = {11, 12}; // RANGE_START_ADDR, RANGE_SIZE
    std::array<void *, 2> values = {base, bytes};
    const CUresult code = cuPointerGetAttributes(2, names.data(), values.data(), address);
    return code == success && *bytes == 0 ? invalid_value : code;
}

// Only allocated memory and handles of the old kind are supported.
#define REFUSED(name)                                                                                                  \
    CUresult name() {                                                                                                  \
        return not_supported;                                                                                          \
    }
REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMemGetAllocationGranularity)

} // extern "C"
// NOLINTEND(readability-identifier-naming)
