// CPU build of the kernel that copies partitions as they become ready.

#include "polled_copy.hpp"

#include <sched.h>
#include <time.h>

namespace mpgpu {

namespace {

// Builtins, because std::atomic_ref came with C++20.
struct OneThread {
    static constexpr uint32_t lane() { return 0; }
    static constexpr uint32_t lanes() { return 1; }
    // A producer may be long in coming, or never come: after some looks the thread sleeps between them.
    void pause() const {
        constexpr uint32_t yields = 256;
        constexpr timespec nap = {0, 100000};
        if (++looks_ < yields) {
            sched_yield();
        } else {
            nanosleep(&nap, nullptr);
        }
    }
    static uint64_t share(uint64_t value) { return value; }
    template <class Is> uint32_t find(const Is &is) const {
        uint32_t found = 0;
        for (uint32_t at = 0; at < kPolledWindow; ++at) {
            found |= is(at) ? uint32_t{1} << at : 0;
        }
        if (found != 0) {
            looks_ = 0;
        }
        return found;
    }
    static uint64_t take(uint64_t counter) { return __atomic_fetch_add(at(counter), 1, __ATOMIC_RELAXED); }
    static uint64_t load(uint64_t flag) { return __atomic_load_n(at(flag), __ATOMIC_ACQUIRE); }
    static uint64_t load_host(uint64_t flag) { return load(flag); }
    static uint64_t count(uint64_t counter, uint64_t amount) {
        return __atomic_add_fetch(at(counter), amount, __ATOMIC_ACQ_REL);
    }
    static void raise(uint64_t flag) { __atomic_store_n(at(flag), 1, __ATOMIC_RELEASE); }
    static void set(uint64_t word, uint64_t value) { __atomic_store_n(at(word), value, __ATOMIC_RELAXED); }

  private:
    // That found nothing, one after the other.
    mutable uint32_t looks_ = 0;

    static uint64_t *at(uint64_t address) { return reinterpret_cast<uint64_t *>(static_cast<uintptr_t>(address)); }
};

} // namespace

void copy_polled_on_cpu(const PolledList &list, uint64_t block, uint64_t blocks) noexcept {
    copy_polled(list, block == 0, blocks, OneThread{});
}

} // namespace mpgpu
