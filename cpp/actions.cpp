// CPU build of the kernel that executes a list of actions. The actions are one rank's operations of a step with little
// data.

#include "actions.hpp"

#include <algorithm>
#include <thread>

namespace mpgpu {

namespace {

struct ThreadGroup {
    uint32_t block_number;
    uint32_t block_count;

    uint32_t block() const { return block_number; }
    uint32_t blocks() const { return block_count; }
    static constexpr uint32_t lane() { return 0; }
    static constexpr uint32_t lanes() { return 1; }
    static void barrier() {}
    // Compiler built-ins are used because std::atomic_ref requires C++20. A waiting thread yields its core, possibly to
    // the thread for which it waits.
    static uint64_t load(uint64_t flag) {
        const uint64_t value = __atomic_load_n(at(flag), __ATOMIC_ACQUIRE);
        if (value == 0) {
            std::this_thread::yield();
        }
        return value;
    }
    static void raise(uint64_t flag, uint64_t value) { __atomic_store_n(at(flag), value, __ATOMIC_RELEASE); }
    static void add(uint64_t flag) { __atomic_fetch_add(at(flag), 1, __ATOMIC_RELEASE); }
    static void lower(uint64_t flag) { __atomic_store_n(at(flag), 0, __ATOMIC_RELAXED); }

    static bool tell(bool said) { return said; }
    static uint64_t depart(uint64_t words, uint32_t word, uint64_t by) {
        return __atomic_fetch_add(at(words + word * 8), by, __ATOMIC_ACQ_REL);
    }
    static void open(uint64_t gate, uint64_t number) { __atomic_store_n(at(gate), number, __ATOMIC_RELEASE); }
    static uint64_t gate(uint64_t word) { return load(word); }
    static uint64_t read(uint64_t word) { return __atomic_load_n(at(word), __ATOMIC_RELAXED); }
    static void write(uint64_t word, uint64_t value) { __atomic_store_n(at(word), value, __ATOMIC_RELAXED); }
    static void clear(uint64_t words, uint32_t word) { lower(words + word * 8); }
    static void let_next_begin() {}

  private:
    static uint64_t *at(uint64_t flag) { return reinterpret_cast<uint64_t *>(static_cast<uintptr_t>(flag)); }
};

} // namespace

void run_actions_on_cpu(const Segment *actions, size_t count, const uint64_t *addresses, uint32_t tile_shift,
                        uint32_t block, uint32_t blocks) noexcept {
    ActionList list;
    list.words = addresses[0];
    list.stop = addresses[1];
    list.turn = addresses[2];
    count = std::min<size_t>(count, kActionsPerLaunch);
    list.count = static_cast<uint32_t>(list.turn == 0 ? count : count / 2);
    list.tile_shift = tile_shift;
    std::copy_n(actions, count, list.actions);
    run_actions(list, ThreadGroup{block, blocks});
}

} // namespace mpgpu
