#include "opened.hpp"

#include <iterator>
#include <map>
#include <mutex>

namespace mpgpu_preload {
namespace {

std::mutex lock;
/// How many there are: most programs open none, and copies then ask no lock.
std::atomic<std::size_t> opened_count;

/// By base. Never destroyed: threads may copy while the process ends.
struct opening {
    /// Opening a handle again gives the same address.
    std::size_t times;
    std::uint64_t bytes;
};
std::map<device_pointer, opening> &openings() {
    static auto &all = *new std::map<device_pointer, opening>;
    return all;
}

} // namespace

void note_opened(device_pointer base, std::uint64_t bytes) {
    const std::lock_guard guard(lock);
    opening &noted = openings()[base];
    noted = {noted.times + 1, bytes};
    opened_count.store(openings().size(), std::memory_order_release);
}

void forget_opened(device_pointer base) {
    const std::lock_guard guard(lock);
    const auto found = openings().find(base);
    if (found != openings().end() && --found->second.times == 0) {
        openings().erase(found);
    }
    opened_count.store(openings().size(), std::memory_order_release);
}

bool is_opened(device_pointer address) {
    if (opened_count.load(std::memory_order_acquire) == 0) {
        return false;
    }
    const std::lock_guard guard(lock);
    const auto after = openings().upper_bound(address);
    if (after == openings().begin()) {
        return false;
    }
    const auto &[base, memory] = *std::prev(after);
    return address - base < memory.bytes;
}

} // namespace mpgpu_preload
