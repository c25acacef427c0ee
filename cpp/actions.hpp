// One rank's part of a step in which little is moved, by one kernel: flags of other ranks are awaited, segments copied,
// flags raised, in order. It takes the place of an operation of the stream for each of them.
//
// As in segment_copy.hpp the body does not ask where it runs: a group of lanes is its argument. On a GPU that is a
// thread block, on a CPU one thread, by which the protocol is tested on machines without a GPU.
//
// A flag lies in memory of the GPU that takes it, and counts the blocks of the kernel that raises it: each adds one, so
// that none waits for another, and who takes it knows how many they are. Several blocks divide the copies. The first
// block takes the flags, and opens a gate in memory of this GPU for the others, which look at the flags too and need
// not wait for the gate. Blocks that the GPU cannot run yet hold up nothing but their share of the copies.
#pragma once

#include "segment_copy.hpp"
#include "signal_wait.hpp"

namespace mpgpu {

constexpr uint32_t kActionsPerLaunch = 120;
// Those of a step of two ranks: the driver copies the argument of each launch, and the GPU fetches it.
constexpr uint32_t kFewActions = 8;
// Lanes of each of several blocks.
constexpr uint32_t kWideLanes = 512;

// The argument of a launch. An action with bytes is a copy. Without, one with `dst` takes the flag at this address:
// awaits that it has counted `src` blocks, and sets it back to 0. One with `src` alone raises the flag there; neither,
// of one block alone: what comes before is done before what comes after. Copies run in no particular order, except
// before flags are raised and after flags are taken.
//
// Of steps that differ by turns there are two lists, one behind the other, and a word that says which is next.
template <uint32_t Most> struct ActionListOf {
    Segment actions[Most];
    // Of several blocks: kActionWords words of this GPU's memory, 0 between launches, which follow each other.
    uint64_t words;
    // A word in host memory which ends all waits once it is not 0. The one behind it is set to 1 by a launch that has
    // waited for long.
    uint64_t stop;
    // The word of this GPU's memory that says which list is next: 0 or 1. None at address 0.
    uint64_t turn;
    // Of each list.
    uint32_t count;
    // Bytes that a block takes at a time, as a power of two.
    uint32_t tile_shift;
};
using ActionList = ActionListOf<kActionsPerLaunch>;
static_assert(sizeof(ActionList) == 24 * kActionsPerLaunch + 32, "the Rust side declares the same fields");

// Words of a launch: the last gate that is open, and blocks that have left.
constexpr uint32_t kActionWords = 2;

// `Group` has: `lane()` of `lanes()` in `block()` of `blocks()`; `barrier()`, at which all lanes of the block meet and
// after which each sees what others wrote; for flags `load`, which acquires, `raise` and `add`, which release for the
// whole node what the lane has written and seen, and `lower`, which does neither. One lane acquires and releases for
// all, with a barrier between. For words: `depart`, which counts one more, and returns how many there were; `open` and
// `is_open`, which release and acquire; `clear`; and `tell`, a barrier by which all lanes learn what lane 0 says. For
// the word of turns `read` and `write`, the latter also for the one behind `stop`. `let_next_begin` lets the GPU bring
// in the next kernel, which waits until this one has ended.
template <uint32_t Most, class Group> class ActionRun {
  public:
    MPGPU_HD ActionRun(const ActionListOf<Most> &actions, const Group &lanes)
        : list(actions), group(lanes), turn(actions.turn == 0 ? 0 : lanes.read(actions.turn)),
          actions(actions.actions + turn * actions.count) {}

    MPGPU_HD void run() {
        uint32_t next = 0;
        MPGPU_ROLLED while (next < list.count) {
            const Segment action = actions[next];
            if (action.bytes > 0) {
                copy(action);
                ++next;
            } else if (is_take(action)) {
                const uint32_t end = end_of<is_take>(next);
                // Where flags alone are left to take, other blocks make room for the program's kernels.
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
    // What follows all blocks count alike.
    uint32_t tiles = 0; // modulo blocks
    uint32_t gates = 0;
    bool has_copied = false;

    MPGPU_HD static bool is_take(const Segment &action) { return action.bytes == 0 && action.dst != 0; }
    MPGPU_HD static bool is_raise(const Segment &action) {
        return action.bytes == 0 && action.dst == 0 && action.src != 0;
    }

    // Behind the last of the same kind in a row.
    template <bool (*is_same)(const Segment &)> MPGPU_HD uint32_t end_of(uint32_t next) const {
        do {
            ++next;
        } while (next < list.count && is_same(actions[next]));
        return next;
    }

    // Tiles of all copies are numbered through, and blocks take them by turns.
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

    // Each lane takes a flag of its own: one look takes about a microsecond.
    MPGPU_HD void take(uint32_t next, uint32_t end) {
        const bool opens = group.blocks() > 1 && end < list.count;
        if (group.block() != 0) {
            pass([&] { return are_up(next, end); });
            return;
        }
        for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
            await(actions[i]);
        }
        if (opens) {
            group.barrier();
            open();
        }
        // After the gate, because the others may look at the flags until then.
        for (uint32_t i = next + group.lane(); i < end; i += group.lanes()) {
            group.lower(actions[i].dst);
        }
        group.barrier();
    }

    MPGPU_HD void await(const Segment &flag) const {
        for (uint32_t looks = 1; !is_up(flag); ++looks) {
            if (looks % kLooksPerStop == 0) {
                if (group.load(list.stop) != 0) {
                    return;
                }
                if (looks == kLateLooks) {
                    group.write(list.stop + 8, 1);
                }
            }
        }
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
        // What comes before the first copy is the first block's. One that is alone writes what others would have added.
        const bool is_whole = !has_copied || group.blocks() == 1;
        for (uint32_t i = next + group.lane(); i < end && (!is_whole || group.block() == 0); i += group.lanes()) {
            if (is_whole) {
                group.raise(actions[i].src, group.blocks());
            } else {
                group.add(actions[i].src);
            }
        }
    }

    MPGPU_HD void open() {
        ++gates;
        if (group.lane() == 0) {
            group.open(list.words, gates);
        }
    }

    // Waits until a gate is open, or need not be.
    template <class Or> MPGPU_HD void pass(const Or &need_not) {
        ++gates;
        if (group.lane() == 0) {
            while (!group.is_open(list.words, gates) && !need_not()) {
            }
        }
        group.barrier();
    }

    // The last block to leave makes the words ready for the next launch.
    MPGPU_HD void leave() {
        group.barrier();
        group.let_next_begin();
        if (group.blocks() == 1 || group.tell(group.lane() == 0 && group.depart(list.words, 1) + 1 == group.blocks())) {
            clear();
        }
    }

    MPGPU_HD void clear() const {
        for (uint32_t i = group.lane(); group.blocks() > 1 && i < kActionWords; i += group.lanes()) {
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

// CPU build: the share of one of `blocks` blocks, each of one lane, on the calling thread, which spins while it awaits
// a flag. All lists together have at most kActionsPerLaunch; three `addresses` are `words`, `stop` and `turn` as in the
// list, and so is `tile_shift`.
void run_actions_on_cpu(const Segment *actions, size_t count, const uint64_t *addresses, uint32_t tile_shift,
                        uint32_t block, uint32_t blocks) noexcept;

} // namespace mpgpu
