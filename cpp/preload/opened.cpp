#include "opened.hpp"

#include "copies.hpp"
#include "owners.hpp"

#include <iterator>
#include <map>
#include <mutex>

namespace mpgpu_preload {
namespace {

std::mutex lock;
/// Number of entries in the list of opened memory. Most programs open none, and then copies need no lock.
std::atomic<std::size_t> opened_count;

/// Memory of another process that this process has opened. The list is ordered by base address. It is never destroyed,
/// because threads may copy while the process ends.
struct opening {
    /// Number of times that the handle was opened and not closed. Each opening returns the same address.
    std::size_t times;
    opened memory;
    ipc_handle handle;
    /// mpgpu context that has adopted the memory. Null if none has.
    mp_context_t adopted_by;
};
std::map<device_pointer, opening> &openings() {
    static auto &all = *new std::map<device_pointer, opening>;
    return all;
}

/// Returns the number of the GPU with this id, or -1 if this process does not see the GPU.
int gpu_of(const uuid &name) {
    int count = 0;
    call(symbol::cuDeviceGetCount, &count);
    for (int gpu = 0; gpu < count; ++gpu) {
        uuid here{};
        if (call(symbol::cuDeviceGetUuid, &here, gpu) == success && here == name) {
            return gpu;
        }
    }
    return -1;
}

} // namespace

void note_opened(device_pointer base, const ipc_handle &handle) noexcept {
    const std::size_t seen = find_memory(base).bytes;
    // If the driver does not report the size, all addresses from the base on count as opened.
    opened memory{base, seen != 0 ? seen : UINT64_MAX, -1};
    // The driver maps whole pages, so the size that it reports may exceed that of the allocation, but is never smaller.
    const std::optional<owner> told = find_owner(handle);
    if (told && told->bytes <= seen) {
        memory = {base, told->bytes, gpu_of(told->gpu)};
    }
    const std::lock_guard guard(lock);
    opening &noted = openings()[base];
    noted = {noted.times + 1, memory, handle, noted.adopted_by};
    opened_count.store(openings().size(), std::memory_order_release);
}

void forget_opened(device_pointer base) noexcept {
    const std::lock_guard guard(lock);
    const auto found = openings().find(base);
    if (found == openings().end() || --found->second.times != 0) {
        return;
    }
    if (found->second.adopted_by != nullptr) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's pointers are numbers
        mp_memory_close(found->second.adopted_by, reinterpret_cast<void *>(base));
    }
    openings().erase(found);
    opened_count.store(openings().size(), std::memory_order_release);
}

std::optional<opened> find_opened(device_pointer address, mp_context_t known_by) {
    if (opened_count.load(std::memory_order_acquire) == 0) {
        return std::nullopt;
    }
    const std::lock_guard guard(lock);
    const auto after = openings().upper_bound(address);
    if (after == openings().begin()) {
        return std::nullopt;
    }
    opening &found = std::prev(after)->second;
    if (address - found.memory.base >= found.memory.bytes) {
        return std::nullopt;
    }
    if (found.memory.gpu >= 0 && found.adopted_by == nullptr && known_by != nullptr) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's pointers are numbers
        void *base = reinterpret_cast<void *>(found.memory.base);
        if (mp_memory_adopt(known_by, base, found.memory.bytes, found.memory.gpu, found.handle.bytes.data()) ==
            MP_SUCCESS) {
            found.adopted_by = known_by;
        } else {
            found.memory.gpu = -1;
        }
    }
    return found.memory;
}

} // namespace mpgpu_preload
