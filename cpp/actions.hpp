// One rank's part of a step, by one kernel: flags of other ranks are awaited, segments copied, flags raised, in order.
// It takes the place of an operation of the stream for each of them.
//
// As in segment_copy.hpp the body does not ask where it runs: a group of lanes is its argument. On a GPU that is a
// thread block, on a CPU one thread, by which the protocol is tested on machines without a GPU.
//
// Several blocks divide the copies. The first block alone looks at flags, because many blocks that look at host memory
// keep copy engines from it, and opens a gate for the others in memory of this GPU. The last block to come to where
// flags are raised raises them. No block waits for the others except at a gate, so blocks that the GPU cannot run yet
// hold up nothing but their own share of the copies.
#pragma once

#include "segment_copy.hpp"

namespace mpgpu {

constexpr uint32_t kActionsPerLaunch = 120;
// Those of a message: the driver copies the argument of each launch, and the GPU fetches it.
constexpr uint32_t kFewActions = 8;
// Lanes of each of several blocks.
constexpr uint32_t kWideLanes = 1024;

// The argument of a launch. An action with bytes is a copy. Without, `dst` is the address of a flag that is taken
// (awaited, and set back to 0), `src` that of one that is raised to 1; neither: what comes before is done before what
// comes after. Copies run in no particular order, except before flags are raised and after flags are taken.
template <uint32_t Most> struct ActionListOf {
    Segment actions[Most];
    // Where there are several blocks: kActionWords words of this GPU's memory, 0 between launches, which follow each
    // other.
    uint64_t words;
    uint32_t count;
    // Bytes that a block takes at a time, as a power of two.
    uint32_t tile_shift;
};
using ActionList = ActionListOf<kActionsPerLaunch>;
static_assert(sizeof(ActionList) == 24 * kActionsPerLaunch + 16, "the Rust side declares the same fields");

// Words of a launch: blocks that have left, the last gate that is open, then blocks that have come to each meeting.
constexpr uint32_t kActionWords = kActionsPerLaunch + 2;

// `Group` has: `lane()` of `lanes()` in `block()` of `blocks()`; `barrier()`, at which all lanes of the block meet and
// after which each sees what others wrote; for flags `load`, which acquires, `raise`, which releases for the whole node
// what the lane has written and seen, `lower`, which does neither, and `pause`. One lane acquires and releases for all,
// with a barrier between: a fence by each would wait for what it has lowered in host memory, 2.4 of 8.9 us one way (two
// H200). Where there are several blocks, for words: `arrive`, one more and how many there were, which releases and
// acquires; `open` and `is_open`, which release and acquire; `clear`; and `tell`, by which all lanes learn what lane 0
// says.
template <uint32_t Most, class Group> class ActionRun {
  public:
    MPGPU_HD ActionRun(const ActionListOf<Most> &actions, const Group &lanes) : list(actions), group(lanes) {}

    MPGPU_HD void run() {
        uint32_t next = 0;
        while (next < list.count) {
            const uint32_t end = end_of_kind(next);
            // Where flags alone are left to await, the other blocks make room for the program's kernels.
            if (end == list.count && group.block() != 0 && is_take(list.actions[next])) {
                break;
            }
            if (list.actions[next].bytes > 0) {
                copy(next, end);
            } else if (is_take(list.actions[next])) {
                take(next, end);
            } else if (is_raise(list.actions[next])) {
                raise(next, end);
            } else {
                order();
            }
            next = end;
        }
        leave();
    }

  private:
    const ActionListOf<Most> &list;
    const Group &group;
    // Where all blocks count alike how far they are.
    uint64_t tiles = 0;
    uint32_t meetings = 0;
    uint32_t gates = 0;
    bool has_copied = false;

    MPGPU_HD static bool is_take(const Segment &action) { return action.bytes == 0 && action.dst != 0; }
    MPGPU_HD static bool is_raise(const Segment &action) { return action.bytes == 0 && action.src != 0; }
    MPGPU_HD static uint32_t kind(const Segment &action) {
        return action.bytes > 0 ? 0 : is_take(action) ? 1 : is_raise(action) ? 2 : 3;
    }

    MPGPU_HD uint32_t end_of_kind(uint32_t next) const {
        uint32_t end = next + 1;
        while (end < list.count && kind(list.actions[end]) == kind(list.actions[next])) {
            ++end;
        }
        return end;
    }

    // Tiles of all copies are numbered through, and blocks take them by turns.
    MPGPU_HD void copy(uint32_t next, uint32_t end) {
        has_copied = true;
        const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
        for (; next < end; ++next) {
            const Segment &action = list.actions[next];
            const uint64_t count = (action.bytes + tile_bytes - 1) >> list.tile_shift;
            const uint64_t first = (group.block() + group.blocks() - tiles % group.blocks()) % group.blocks();
            for (uint64_t tile = first; tile < count; tile += group.blocks()) {
                const uint64_t offset = tile << list.tile_shift;
                const uint64_t rest = action.bytes - offset;
                detail::copy_tile(action.dst + offset, action.src + offset,
                                  static_cast<uint32_t>(rest < tile_bytes ? rest : tile_bytes), group.lane(),
                                  group.lanes());
            }
            tiles += count;
        }
    }

    // One look at host memory takes about a microsecond, so each lane looks at a flag of its own.
    MPGPU_HD void take(uint32_t next, uint32_t end) {
        if (group.block() == 0) {
            for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
                while (group.load(list.actions[i].dst) == 0) {
                    group.pause();
                }
                group.lower(list.actions[i].dst);
            }
            group.barrier();
        }
        pass(group.block() == 0);
    }

    MPGPU_HD void raise(uint32_t next, uint32_t end) {
        // What comes before the first copy is the first block's.
        if (has_copied ? is_last() : group.block() == 0) {
            for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
                group.raise(list.actions[i].src);
            }
        }
    }

    MPGPU_HD void order() { pass(is_last()); }

    // Whether this block is the last to come here. All that blocks did before is then visible to it.
    MPGPU_HD bool is_last() {
        group.barrier();
        const uint32_t word = 2 + meetings++;
        return group.blocks() == 1 ||
               group.tell(group.lane() == 0 && group.arrive(list.words, word) + 1 == group.blocks());
    }

    // Opens a gate, or waits until it is open.
    MPGPU_HD void pass(bool opens) {
        ++gates;
        if (group.blocks() == 1) {
            return;
        }
        if (group.lane() == 0) {
            if (opens) {
                group.open(list.words, 1, gates);
            } else {
                while (!group.is_open(list.words, 1, gates)) {
                }
            }
        }
        group.barrier();
    }

    // The last block to leave makes the words ready for the next launch.
    MPGPU_HD void leave() {
        if (group.blocks() == 1) {
            return;
        }
        group.barrier();
        if (group.tell(group.lane() == 0 && group.arrive(list.words, 0) + 1 == group.blocks())) {
            for (uint32_t i = group.lane(); i < 2 + meetings; i += group.lanes()) {
                group.clear(list.words, i);
            }
        }
    }
};

template <uint32_t Most, class Group>
MPGPU_HD inline void run_actions(const ActionListOf<Most> &list, const Group &group) {
    ActionRun<Most, Group>(list, group).run();
}

// CPU build: the share of one of `blocks` blocks, each of one lane, on the calling thread, which spins while it awaits
// a flag. `count` is at most kActionsPerLaunch; `words` is as in the list.
void run_actions_on_cpu(const Segment *actions, size_t count, uint64_t words, uint32_t tile_shift, uint32_t block,
                        uint32_t blocks) noexcept;

} // namespace mpgpu
