// Executes one rank's part of a step with little data in one kernel: waits for flags of other ranks, copies segments
// and sets flags, in order. It replaces one stream operation for each of them.
//
// Like segment_copy.hpp, the code does not depend on where it runs: a group of lanes is its argument. On a GPU the
// group is a thread block. On a CPU it is one thread, so that the protocol is tested on machines without a GPU.
//
// A flag lies in memory of the GPU that waits for it, and counts the blocks of the kernel that sets it. Each block adds
// one, so no block waits for another, and the waiting kernel knows how many blocks there are. Several blocks divide the
// copies. The first block waits for the flags and opens a gate in memory of this GPU for the others. The others also
// poll the flags, so they need not wait for the gate. Blocks that the GPU cannot run yet delay only their share of the
// copies.
#pragma once

#include "segment_copy.hpp"
#include "signal_wait.hpp"

namespace mpgpu {

constexpr uint32_t kActionsPerLaunch = 120;
// Number of actions in the shorter list, enough for a step of two ranks. The driver copies the argument of each launch
// and the GPU fetches it, so a short argument is faster.
constexpr uint32_t kFewActions = 8;
// Lanes per block of a launch with several blocks.
constexpr uint32_t kWideLanes = 512;

// Argument of a launch. An action with bytes is a copy. Without bytes, an action with `dst` waits until the flag at
// this address has counted `src` blocks, and resets it to 0. An action with only `src` sets the flag at that address.
// An action with neither, allowed only in a launch of one block, completes all earlier actions before any later one.
// Copies run in no particular order, except that they finish before flags are set, and start after flags are waited
// for.
//
// Steps that alternate have two lists, one after the other, and a word that selects the next one.
template <uint32_t Most> struct ActionListOf {
    Segment actions[Most];
    // kActionWords words of this GPU's memory, which belong to successive launches.
    uint64_t words;
    // Word in host memory by which all waits end as lost once it is not 0. A launch that has waited for long sets the
    // following word to 1.
    uint64_t stop;
    // Word in this GPU's memory that selects the next list, 0 or 1. Address 0 if there is only one list.
    uint64_t turn;
    // Number of actions in each list.
    uint32_t count;
    // Bytes of a block's tile, as a power of two.
    uint32_t tile_shift;
};
using ActionList = ActionListOf<kActionsPerLaunch>;
static_assert(sizeof(ActionList) == 24 * kActionsPerLaunch + 32, "the Rust side declares the same fields");

// Words of a launch: the number of the last open gate, the number of blocks that have finished, and whether steps are
// abandoned. The first two are 0 between launches. The third is 1 after a launch with a lost wait.
constexpr uint32_t kActionWords = 3;
constexpr uint32_t kAbandonedWord = 2;
// Gate that an abandoned launch opens, so that its blocks finish.
constexpr uint64_t kLostGate = ~uint64_t{0};
// Value that each block of an abandoned launch adds to the number of blocks that have finished.
constexpr uint64_t kAbandons = uint64_t{1} << 32;

// A `Group` provides:
// - `lane()` of `lanes()` in `block()` of `blocks()`;
// - `barrier()`, which all lanes of the block reach, and after which each sees what the others wrote;
// - for flags: `load`, which acquires; `raise` and `add`, which release to the whole node what the lane has written and
//   seen; and `lower`, which does neither. One lane acquires and releases for all, with a barrier in between;
// - for words: `depart`, which adds a value and returns the previous one; `open` and `gate`, which release and acquire;
//   `clear`; and `tell`, a barrier by which all lanes learn whether one of them has passed true;
// - for the words that select a list and that abandon steps: `read` and `write`, the latter also for the word after
//   `stop`;
// - `let_next_begin`, which allows the GPU to start the next kernel, which waits until this one has ended.
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
                // If only waits for flags are left, the other blocks end to make room for the program's kernels.
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
    // True after a wait has ended as lost, in this launch or in an earlier one. From then on nothing is written, set or
    // awaited, because memory to which other ranks have not granted access must not be written. Equal in all lanes of a
    // block.
    bool is_abandoned;

    MPGPU_HD static bool is_take(const Segment &action) { return action.bytes == 0 && action.dst != 0; }
    MPGPU_HD static bool is_raise(const Segment &action) {
        return action.bytes == 0 && action.dst == 0 && action.src != 0;
    }

    // Returns the index after the last of the successive actions of the same kind.
    template <bool (*is_same)(const Segment &)> MPGPU_HD uint32_t end_of(uint32_t next) const {
        do {
            ++next;
        } while (next < list.count && is_same(actions[next]));
        return next;
    }

    // The tiles of all copies are numbered consecutively and distributed round-robin over the blocks.
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

    // Each lane waits for its own flag, because one poll takes about a microsecond.
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
        // Flags are reset after the gate is open, because other blocks may poll them until then.
        for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
            group.lower(actions[i].dst);
        }
        group.barrier();
    }

    // Returns false if the wait has ended as lost.
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
        // The first block alone sets flags before the first copy. A single block writes the total that several would
        // have added.
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

    // Waits until the gate is open, or until `need_not` returns true.
    template <class Or> MPGPU_HD void pass(const Or &need_not) {
        ++gates;
        uint64_t gate = 0;
        if (group.lane() == 0) {
            while ((gate = group.gate(list.words)) < gates && !need_not()) {
            }
        }
        is_abandoned = group.tell(gate == kLostGate);
    }

    // The last block to finish resets the words for the next launch.
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

    // Resets the words of the launch. `is_lost` is only valid in lane 0.
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

// CPU build: runs the share of one of `blocks` blocks, each of one lane, on the calling thread, which spins while it
// waits for a flag. All lists together have at most kActionsPerLaunch actions. The three `addresses` are `words`,
// `stop` and `turn` of the list, and `tile_shift` is its `tile_shift`.
void run_actions_on_cpu(const Segment *actions, size_t count, const uint64_t *addresses, uint32_t tile_shift,
                        uint32_t block, uint32_t blocks) noexcept;

} // namespace mpgpu
