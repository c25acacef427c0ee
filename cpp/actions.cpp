// CPU build of the kernel that does a small part of a step.

#include "actions.hpp"

#include <algorithm>
#include <thread>

namespace mpgpu {

namespace {

struct ThreadGroup {
    static constexpr uint32_t lane() { return 0; }
    static constexpr uint32_t lanes() { return 1; }
    static void barrier() {}
    static void pause() { std::this_thread::yield(); }
    // Builtins, because std::atomic_ref came with C++20.
    static uint64_t load(uint64_t flag) { return __atomic_load_n(at(flag), __ATOMIC_ACQUIRE); }
    static void raise(uint64_t flag) { __atomic_store_n(at(flag), 1, __ATOMIC_RELEASE); }
    static void lower(uint64_t flag) { __atomic_store_n(at(flag), 0, __ATOMIC_RELAXED); }

  private:
    static uint64_t *at(uint64_t flag) { return reinterpret_cast<uint64_t *>(static_cast<uintptr_t>(flag)); }
};

} // namespace

void run_actions_on_cpu(const Segment *actions, size_t count) noexcept {
    ActionList list;
    list.count = static_cast<uint32_t>(std::min<size_t>(count, kActionsPerLaunch));
    std::copy_n(actions, list.count, list.actions);
    run_actions(list, ThreadGroup{});
}

} // namespace mpgpu
