// Executes one rank's operations of a step with little data in a single kernel, in order: waits for flags of other
// ranks, copies segments and sets flags. The kernel replaces one stream operation for each of them.
//
// As in segment_copy.hpp, the code does not depend on the processor: a group of lanes (threads) is its argument. On a
// GPU the group is a thread block. On a CPU it is one thread, so that the protocol is tested on machines without a GPU.
//
// A flag is in memory of the GPU that waits for it. It is a counter: each block of the kernel that sets the flag adds
// one. So no block waits for another, and the waiting kernel knows how many blocks to expect. Several blocks share the
// copies. The first block waits for the flags, and then opens a gate for the other blocks, which is a word in memory of
// this GPU. The other blocks also poll the flags, so they need not wait for the gate. A block that the GPU cannot run
// yet delays only its own share of the copies.
#pragma once

#include "segment_copy.hpp"
#include "signal_wait.hpp"

namespace mpgpu {

constexpr uint32_t kActionsPerLaunch = 120;
// Number of actions in the shorter list, which is enough for a step of two ranks. The driver copies the argument of
// each launch and the GPU fetches it, so a short argument is faster.
constexpr uint32_t kFewActions = 8;
// Number of lanes (threads) per block in a launch with several blocks.
constexpr uint32_t kWideLanes = 512;

// Argument of a launch: the list of actions. An action with nonzero `bytes` is a copy. If `bytes` is 0, the action is
// one of three kinds. With nonzero `dst`, it waits until the flag at this address has counted `src` blocks, and resets
// the flag to 0. With nonzero `src` only, it sets the flag at that address. With neither, it completes all earlier
// actions before any later one, and is allowed only in a launch of one block. Copies run in no particular order, except
// that they finish before later flags are set, and start after earlier waits have ended.
//
// If steps alternate between two lists, both lists are stored one after the other, and a word in GPU memory selects the
// next one.
template <uint32_t Most> struct ActionListOf {
    Segment actions[Most];
    // Address of kActionWords words in this GPU's memory, which belong to all launches that run one after the other.
    uint64_t words;
    // Address of a word in host memory. A nonzero value cancels all waits. A launch that has waited for long sets the
    // word after it to 1.
    uint64_t stop;
    // Address of the word in this GPU's memory that selects the next list, 0 or 1. The address is 0 if there is only
    // one list.
    uint64_t turn;
    // Number of actions in each list.
    uint32_t count;
    // Size in bytes of a tile (the part of a copy that one block makes at a time), as a power of two.
    uint32_t tile_shift;
};
using ActionList = ActionListOf<kActionsPerLaunch>;
static_assert(sizeof(ActionList) == 24 * kActionsPerLaunch + 32, "the Rust side declares the same fields");

// Number of words that a launch uses. They contain the number of the gate that was opened last, the number of blocks
// that have finished, and whether steps are abandoned. The first two are 0 between launches. The third is 1 after a
// launch in which a wait was cancelled.
constexpr uint32_t kActionWords = 3;
constexpr uint32_t kAbandonedWord = 2;
// Number of the gate that the first block opens if a wait was cancelled, so that all blocks finish.
constexpr uint64_t kLostGate = ~uint64_t{0};
// Value that a block adds to the number of finished blocks, in addition to 1, if the launch is abandoned because a wait
// was cancelled.
constexpr uint64_t kAbandons = uint64_t{1} << 32;

// Runs a list of actions on one block. The class `Group` represents the block. It provides:
// - `lane()`, `lanes()`, `block()` and `blocks()`: the number of this lane (thread), the number of lanes in the block,
//   the number of this block, and the number of blocks;
// - `barrier()`: a barrier for all lanes of the block, after which each lane sees the writes of the others;
// - for flags: `load`, with acquire ordering; `raise` and `add`, with release ordering for the whole node; and `lower`,
//   without ordering. One lane acquires or releases for all lanes, with a barrier in between;
// - for the words of a launch: `depart`, which adds a value and returns the previous one; `open` with release ordering,
//   `gate` with acquire ordering, and `clear`;
// - `tell`: a barrier that returns true in all lanes if at least one lane has passed true;
// - `read` and `write`: for the word that selects a list, the word that abandons steps, and the word after `stop`;
// - `let_next_begin`: allows the GPU to launch the next kernel early. That kernel waits until this one has ended.
template <uint32_t Most, class Group> class ActionRun {
  public:
    MPGPU_HD ActionRun(const ActionListOf<Most> &actions, const Group &lanes)
        : list(actions), group(lanes), turn(actions.turn == 0 ? 0 : lanes.read(actions.turn)),
          actions(actions.actions + turn * actions.count),
          is_abandoned(lanes.read(actions.words + 8 * kAbandonedWord) != 0) {}

    MPGPU_HD void run() {
        uint32_t next = 0;
        MPGPU_ROLLED while (next < list.count && !is_abandoned) {
            const Segment action = actions[next];
            if (action.bytes > 0) {
                copy(action);
                ++next;
            } else if (is_take(action)) {
                const uint32_t end = end_of<is_take>(next);
                // If only waits for flags are left, all blocks except the first end, to make room for the program's
                // kernels.
                if (end == list.count && group.block() != 0) {
                    break;
                }
                take(next, end);
                next = end;
            } else if (is_raise(action)) {
                const uint32_t end = end_of<is_raise>(next);
                raise(next, end);
                next = end;
            } else {
                group.barrier();
                ++next;
            }
        }
        leave();
    }

  private:
    const ActionListOf<Most> &list;
    const Group &group;
    const uint64_t turn;
    const Segment *const actions;
    // The following values are equal in all blocks.
    uint32_t tiles = 0; // modulo blocks
    uint32_t gates = 0;
    bool has_copied = false;
    // True after a wait was cancelled, in this launch or in an earlier one. After that, no memory is written, no flag
    // is set and no flag is waited for, because the ranks that own the memory have not granted access for this step.
    // The value is equal in all lanes of a block.
    bool is_abandoned;

    MPGPU_HD static bool is_take(const Segment &action) { return action.bytes == 0 && action.dst != 0; }
    MPGPU_HD static bool is_raise(const Segment &action) {
        return action.bytes == 0 && action.dst == 0 && action.src != 0;
    }

    // Returns the index after the last of the successive actions that are of the same kind as action `next`.
    template <bool (*is_same)(const Segment &)> MPGPU_HD uint32_t end_of(uint32_t next) const {
        do {
            ++next;
        } while (next < list.count && is_same(actions[next]));
        return next;
    }

    // Copies the tiles of one copy that belong to this block. The tiles of all copies are numbered consecutively and
    // distributed round-robin over the blocks.
    MPGPU_HD void copy(const Segment &action) {
        has_copied = true;
        const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
        const uint32_t blocks = group.blocks();
        const uint32_t count = static_cast<uint32_t>((action.bytes + tile_bytes - 1) >> list.tile_shift);
        uint32_t tile = group.block() + (group.block() < tiles ? blocks : 0) - tiles;
        MPGPU_ROLLED for (; tile < count; tile += blocks) {
            const uint64_t offset = static_cast<uint64_t>(tile) << list.tile_shift;
            const uint64_t rest = action.bytes - offset;
            detail::copy_tile(action.dst + offset, action.src + offset,
                              static_cast<uint32_t>(rest < tile_bytes ? rest : tile_bytes), group.lane(),
                              group.lanes());
        }
        tiles = (tiles + count) % blocks;
    }

    // Waits for the flags of actions `next` to `end` and resets them. Each lane waits for a different flag, because one
    // poll takes about a microsecond.
    MPGPU_HD void take(uint32_t next, uint32_t end) {
        const bool opens = group.blocks() > 1 && end < list.count;
        if (group.block() != 0) {
            pass([&] { return are_up(next, end); });
            return;
        }
        bool is_lost = false;
        for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
            is_lost = !await(actions[i]) || is_lost;
        }
        is_abandoned = group.tell(is_lost);
        if (is_abandoned) {
            open(kLostGate);
            return;
        }
        if (opens) {
            open(++gates);
        }
        // Flags are reset after the gate is open, because the other blocks may poll the flags until then.
        for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
            group.lower(actions[i].dst);
        }
        group.barrier();
    }

    // Waits for one flag. Returns false if the wait was cancelled.
    MPGPU_HD bool await(const Segment &flag) const {
        for (uint32_t looks = 1; !is_up(flag); ++looks) {
            if (looks % kLooksPerStop == 0) {
                if (group.load(list.stop) != 0) {
                    return false;
                }
                if (looks == kLateLooks) {
                    group.write(list.stop + 8, 1);
                }
            }
        }
        return true;
    }

    MPGPU_HD bool is_up(const Segment &flag) const { return group.load(flag.dst) >= flag.src; }

    MPGPU_HD bool are_up(uint32_t next, uint32_t end) const {
        for (; next < end; ++next) {
            if (!is_up(actions[next])) {
                return false;
            }
        }
        return true;
    }

    MPGPU_HD void raise(uint32_t next, uint32_t end) {
        if (has_copied) {
            group.barrier();
        }
        // Before the first copy, the first block sets the flags alone. A single block writes the total to which several
        // blocks would have added.
        const bool is_whole = !has_copied || group.blocks() == 1;
        for (uint32_t i = next + group.lane(); i < end && (!is_whole || group.block() == 0); i += group.lanes()) {
            if (is_whole) {
                group.raise(actions[i].src, group.blocks());
            } else {
                group.add(actions[i].src);
            }
        }
    }

    MPGPU_HD void open(uint64_t gate) const {
        if (group.blocks() > 1 && group.lane() == 0) {
            group.open(list.words, gate);
        }
    }

    // Waits until the next gate is open, or until `need_not` returns true.
    template <class Or> MPGPU_HD void pass(const Or &need_not) {
        ++gates;
        uint64_t gate = 0;
        if (group.lane() == 0) {
            while ((gate = group.gate(list.words)) < gates && !need_not()) {
            }
        }
        is_abandoned = group.tell(gate == kLostGate);
    }

    // Ends the block's share of the launch. The last block to finish resets the words for the next launch.
    MPGPU_HD void leave() {
        group.barrier();
        group.let_next_begin();
        bool is_last = group.blocks() == 1;
        bool is_lost = is_abandoned;
        if (!is_last) {
            uint64_t left = 0;
            if (group.lane() == 0) {
                const uint64_t own = 1 + (is_abandoned ? kAbandons : 0);
                left = group.depart(list.words, 1, own) + own;
            }
            is_lost = left >= kAbandons;
            is_last = group.tell(static_cast<uint32_t>(left) == group.blocks());
        }
        if (is_last) {
            clear(is_lost);
        }
    }

    // Resets the words of the launch. `is_lost` is true if a wait was cancelled; its value is valid only in lane 0.
    MPGPU_HD void clear(bool is_lost) const {
        if (is_lost && group.lane() == 0) {
            group.write(list.words + 8 * kAbandonedWord, 1);
        }
        for (uint32_t i = group.lane(); group.blocks() > 1 && i < kAbandonedWord; i += group.lanes()) {
            group.clear(list.words, i);
        }
        if (list.turn != 0 && group.lane() == 0) {
            group.write(list.turn, 1 - turn);
        }
    }
};

template <uint32_t Most, class Group>
MPGPU_HD inline void run_actions(const ActionListOf<Most> &list, const Group &group) {
    ActionRun<Most, Group>(list, group).run();
}

// CPU build: runs the share of block number `block` out of `blocks` blocks, each of one lane, on the calling thread.
// The thread polls while it waits for a flag. All lists together contain at most kActionsPerLaunch actions. The three
// `addresses` are the fields `words`, `stop` and `turn` of the list, and `tile_shift` is its field of that name.
void run_actions_on_cpu(const Segment *actions, size_t count, const uint64_t *addresses, uint32_t tile_shift,
                        uint32_t block, uint32_t blocks) noexcept;

} // namespace mpgpu
