// One rank's part of a step in which little is moved, by one thread block: flags of other ranks are awaited, segments
// copied, flags raised, in order. It takes the place of an operation of the stream for each of them.
//
// As in segment_copy.hpp the body does not ask where it runs: a group of lanes is its argument. On a GPU that is a
// thread block, on a CPU one thread, by which the protocol is tested on machines without a GPU.
#pragma once

#include "segment_copy.hpp"

namespace mpgpu {

constexpr uint32_t kActionsPerLaunch = 120;
// Those of a message: the driver copies the argument of each launch, and the GPU fetches it.
constexpr uint32_t kFewActions = 8;

// The argument of a launch. An action with bytes is a copy. Without, `dst` is the address of a flag that is taken
// (awaited, and set back to 0), `src` that of one that is raised to 1; neither: what comes before is done before what
// comes after. Copies run in no particular order, except before flags are raised and after flags are taken.
template <uint32_t Most> struct ActionListOf {
    Segment actions[Most];
    uint32_t count;
};
using ActionList = ActionListOf<kActionsPerLaunch>;
static_assert(sizeof(ActionList) == 24 * kActionsPerLaunch + 8, "the Rust side declares the same fields");

// `Group` has: `lane()` of `lanes()`; `barrier()`, at which all lanes meet and after which each sees what others wrote;
// for flags `load`, which acquires, `raise`, which releases for the whole node what the lane has written and seen,
// `lower`, which does neither, and `pause`. One lane acquires and releases for all, with a barrier between: a fence by
// each would wait for what it has lowered in host memory, 2.4 of 8.9 us one way (two H200).
template <uint32_t Most, class Group>
MPGPU_HD inline void run_actions(const ActionListOf<Most> &list, const Group &group) {
    const auto take = [](const Segment &action) { return action.bytes == 0 && action.dst != 0; };
    const auto raise = [](const Segment &action) { return action.bytes == 0 && action.src != 0; };
    uint32_t next = 0;
    while (next < list.count) {
        const Segment &action = list.actions[next];
        if (action.bytes > 0) {
            // Pieces, because indices inside of one have 32 bits.
            constexpr uint64_t piece = uint64_t{1} << kMaxTileShift;
            for (uint64_t offset = 0; offset < action.bytes; offset += piece) {
                const uint64_t rest = action.bytes - offset;
                detail::copy_tile(action.dst + offset, action.src + offset,
                                  static_cast<uint32_t>(rest < piece ? rest : piece), group.lane(), group.lanes());
            }
            ++next;
        } else if (take(action)) {
            // One look at host memory takes about a microsecond, so each lane looks at a flag of its own.
            uint32_t end = next;
            while (end < list.count && take(list.actions[end])) {
                ++end;
            }
            for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
                while (group.load(list.actions[i].dst) == 0) {
                    group.pause();
                }
                group.lower(list.actions[i].dst);
            }
            group.barrier();
            next = end;
        } else if (raise(action)) {
            group.barrier();
            uint32_t end = next;
            while (end < list.count && raise(list.actions[end])) {
                ++end;
            }
            for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
                group.raise(list.actions[i].src);
            }
            next = end;
        } else {
            group.barrier();
            ++next;
        }
    }
}

// CPU build: all actions on the calling thread, which spins while it awaits a flag. `count` is at most
// kActionsPerLaunch.
void run_actions_on_cpu(const Segment *actions, size_t count) noexcept;

} // namespace mpgpu
