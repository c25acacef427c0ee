// Copies of partitions that become ready while their producers still run: few thread blocks look for flags and move
// what is ready, in place of copy engines that wait.
//
// No block waits for another one: each takes tiles of whichever partition is ready, until all are taken. So blocks that
// find room on a multiprocessor late, or one after the other, delay nothing but themselves. Flags lie in memory of the
// GPU that copies, because many threads that poll host memory take its link from copies; one thread looks at a word in
// host memory now and then, by which the CPU ends a wait for a producer that never comes.
//
// As in segment_copy.hpp the body does not ask where it runs: a group of lanes is its argument, a thread block on a GPU
// and one thread on a CPU, by which the protocol is tested on machines without a GPU.
#pragma once

#include "segment_copy.hpp"
#include "signal_wait.hpp"

namespace mpgpu {

// A partition, its flags and what blocks have done of it. Addresses are integers.
struct PolledPartition {
    uint64_t dst;
    uint64_t src;
    uint64_t bytes;
    // Bytes that a block takes at once, at most 2^kMaxTileShift.
    uint64_t tile_bytes;
    // The flag that its producers raise.
    uint64_t ready;
    // The flag in host memory that tells the receiver of its arrival.
    uint64_t arrived;
    // Tiles that blocks have taken, and that they have copied. 0 between launches.
    uint64_t taken;
    uint64_t copied;
};
static_assert(sizeof(PolledPartition) == 64, "the Rust side writes the same fields");

// The argument of a launch: all words but `stop` lie in memory of the GPU.
struct PolledList {
    // Of `count` partitions, in the order in which they are expected.
    uint64_t partitions;
    uint64_t count;
    // Counts blocks that have ended. 0 between launches.
    uint64_t ended;
    // Raised in host memory by a CPU that gives the producers up: then everything counts as ready.
    uint64_t stop;
};
static_assert(sizeof(PolledList) == 32, "the Rust side declares the same fields");

// Partitions among which a block looks for one that is ready: one for each lane of a warp. Later ones wait until the
// first of these is taken.
constexpr uint32_t kPolledWindow = 32;

namespace detail {

MPGPU_HD inline PolledPartition &partition_at(const PolledList &list, uint64_t index) {
    return reinterpret_cast<PolledPartition *>(static_cast<uintptr_t>(list.partitions))[index];
}

MPGPU_HD inline uint64_t address_of(const uint64_t &word) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&word));
}

// Takes tiles of a partition that is ready, and copies them, until none is left.
template <class Group> MPGPU_HD inline void copy_partition(PolledPartition &partition, const Group &group) {
    const uint64_t dst = partition.dst;
    const uint64_t src = partition.src;
    const uint64_t bytes = partition.bytes;
    const uint64_t tile_bytes = partition.tile_bytes;
    const uint64_t tiles = bytes / tile_bytes + (bytes % tile_bytes != 0 ? 1 : 0);
    const uint64_t taken = address_of(partition.taken);
    uint64_t copied = 0;
    uint64_t tile = group.share(group.take(taken));
    while (tile < tiles) {
        // The next one is on its way while this one is copied.
        const uint64_t next = group.take(taken);
        const uint64_t offset = tile * tile_bytes;
        const uint64_t rest = bytes - offset;
        copy_tile(dst + offset, src + offset, static_cast<uint32_t>(rest < tile_bytes ? rest : tile_bytes),
                  group.lane(), group.lanes());
        ++copied;
        tile = group.share(next);
    }
    // Whoever has copied the last tile tells of all: what the others have written is seen by way of the count. All
    // lanes of this block have met since their last store.
    if (copied > 0 && group.lane() == 0 && group.count(address_of(partition.copied), copied) == tiles) {
        group.raise(partition.arrived);
    }
}

} // namespace detail

// What one of `blocks` blocks does. Every block must run; in any order, also one after the other.
//
// `Group` has: `lane()` of `lanes()`; `barrier()`, at which all lanes meet and after which each sees what others wrote;
// `find`, which asks about each of a window, some lanes one each, and gives all lanes the same set of those that are
// so; `take`, which counts one up in its first lane, and `share`, a barrier that gives all lanes the first one's value;
// `load` of a flag of this GPU, and `load_host`, which acquire; `count`, which acquires and releases; `raise`, which
// releases for the whole node; `set` of a word of this GPU, which does neither; and `pause`.
template <class Group>
MPGPU_HD inline void copy_polled(const PolledList &list, bool is_first, uint64_t blocks, const Group &group) {
    // All before `first` are taken, and those of the window after it that have a bit.
    uint64_t first = 0;
    uint32_t exhausted = 0;
    uint32_t looks = 0;
    while (first < list.count) {
        const uint32_t ready = group.find([&](uint32_t at) {
            return first + at < list.count && (exhausted >> at & 1) == 0 &&
                   group.load(detail::partition_at(list, first + at).ready) != 0;
        });
        for (uint32_t at = 0; at < kPolledWindow; ++at) {
            if ((ready >> at & 1) != 0) {
                detail::copy_partition(detail::partition_at(list, first + at), group);
                exhausted |= uint32_t{1} << at;
            }
        }
        while ((exhausted & 1) != 0) {
            exhausted >>= 1;
            ++first;
        }
        if (ready == 0) {
            ++looks;
            if (is_first && group.lane() == 0 && looks % kLooksPerStop == 0 && group.load_host(list.stop) != 0) {
                for (uint64_t i = 0; i < list.count; ++i) {
                    group.set(detail::partition_at(list, i).ready, 1);
                }
            }
            group.pause();
        }
    }
    // The last block sets everything back for the next step, which the stream orders.
    const bool is_last = group.lane() == 0 && group.count(list.ended, 1) == blocks;
    if (group.share(is_last ? 1 : 0) != 0) {
        for (uint64_t i = group.lane(); i < list.count; i += group.lanes()) {
            PolledPartition &partition = detail::partition_at(list, i);
            group.set(partition.ready, 0);
            group.set(detail::address_of(partition.taken), 0);
            group.set(detail::address_of(partition.copied), 0);
        }
        if (group.lane() == 0) {
            group.set(list.ended, 0);
        }
    }
}

// CPU build: one block on the calling thread, which yields while nothing is ready, and sleeps where that lasts.
void copy_polled_on_cpu(const PolledList &list, uint64_t block, uint64_t blocks) noexcept;

} // namespace mpgpu
