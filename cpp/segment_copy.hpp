// Copies a list of segments (contiguous memory ranges) tile by tile. This file is the only source of the fused copy
// kernel, for the GPU and for the CPU.
//
// A launch moves many small messages. Segments are cut into tiles of equal size, and the tiles of all segments are
// numbered consecutively. Half of the thread blocks copy the first half of the tiles in round-robin order, and the
// other blocks copy the second half. So a face of 240 000 bytes is spread over many blocks, a corner of 24 bytes
// occupies one block, and no block is bound to a message. If the first half of the data leaves a GPU and the second
// half arrives there, both directions of its links are busy from the start to the end of the launch.
//
// The numbers of the block and of the lane (thread) are arguments of the functions below. The CPU build calls them in
// loops over both, so the index arithmetic of the GPU is tested on machines without a GPU.
#pragma once

#include "portable.hpp"

#include <stddef.h>
#include <stdint.h>

namespace mpgpu {

// Contiguous copy of `bytes` bytes from address `src` to address `dst`. Source and destination must not overlap,
// neither within one segment nor among the segments of one launch. Addresses are integers, as in all internal
// interfaces of mpgpu.
struct Segment {
    uint64_t dst;
    uint64_t src;
    uint64_t bytes;
};

// Maximum number of segments in one launch. Kernel arguments may have up to 4096 bytes on every architecture. The list
// is passed by value. It needs no device memory, need not be kept alive until the kernel has run, and is recorded by
// stream capture.
constexpr uint32_t kSegmentsPerLaunch = 120;
// Maximum number of segments of a launch with the shorter list. A halo exchange has 26 messages. The driver copies the
// whole argument and the GPU fetches all of it, even if only part of it is used. The shorter list has 1040 bytes
// instead of 3856.
constexpr uint32_t kFewSegments = 32;

// Default tile size as a power of two. A tile of 16 KiB needs one iteration of a loop in which each of 256 lanes copies
// four 16-byte words. Sizes of 8 to 16 KiB were the fastest for 26 halo messages (hardware readings: 13.7 us in one
// fused kernel).
constexpr uint32_t kTileShift = 14;
// Minimum tile size as a power of two. A tile is at least one word, so every tile has the alignment of its segment.
constexpr uint32_t kMinTileShift = 4;
// Maximum tile size as a power of two. Indices within a tile have 32 bits.
constexpr uint32_t kMaxTileShift = 30;
constexpr uint32_t kLanes = 256;

// Argument of one launch, which moves up to `most` segments.
template <uint32_t most> struct SegmentListOf {
    static constexpr uint32_t kMost = most;
    Segment segments[most];
    // first_tile[i] is the number of the first tile of segment i. first_tile[count] is the total number of tiles.
    uint64_t first_tile[most + 1];
    uint32_t count;
    uint32_t tile_shift;
};
using SegmentList = SegmentListOf<kSegmentsPerLaunch>;
static_assert(sizeof(Segment) == 24, "the Rust side declares the same three fields");
static_assert(sizeof(SegmentList) <= 4096, "kernel arguments are limited to 4096 bytes");

// Fills `list` with as many of the `count` segments as fit into one launch, and returns the number of segments taken.
template <class List> inline uint32_t fill(List &list, const Segment *segments, size_t count, uint32_t tile_shift) {
    list.count = count < List::kMost ? static_cast<uint32_t>(count) : List::kMost;
    list.tile_shift = tile_shift;
    const uint64_t tile_mask = (uint64_t{1} << tile_shift) - 1;
    uint64_t tile = 0;
    for (uint32_t i = 0; i < list.count; ++i) {
        list.segments[i] = segments[i];
        list.first_tile[i] = tile;
        tile += (segments[i].bytes >> tile_shift) + ((segments[i].bytes & tile_mask) != 0 ? 1 : 0);
    }
    list.first_tile[list.count] = tile;
    return list.count;
}

namespace detail {

// The words are structs, because an attribute of a template argument is kept only if it belongs to a class.
struct MPGPU_MAY_ALIAS Word16 {
    alignas(16) uint64_t low;
    uint64_t high;
};
struct MPGPU_MAY_ALIAS Word8 {
    uint64_t value;
};
struct MPGPU_MAY_ALIAS Word4 {
    uint32_t value;
};
struct MPGPU_MAY_ALIAS Word1 {
    uint8_t value;
};

// Copies the words that belong to lane `lane`. Four loads are issued before the first store, because a single load
// cannot hide the latency of memory, and the latency of a peer GPU's memory is the longest.
template <class Word>
MPGPU_HD inline void copy_words(uint64_t dst_address, uint64_t src_address, uint32_t words, uint32_t lane,
                                uint32_t lanes) {
    Word *__restrict__ dst = reinterpret_cast<Word *>(static_cast<uintptr_t>(dst_address));
    const Word *__restrict__ src = reinterpret_cast<const Word *>(static_cast<uintptr_t>(src_address));
    // The index has 64 bits, so that no sum with `lanes` overflows.
    uint64_t i = lane;
    const uint64_t stride = lanes;
    MPGPU_ROLLED for (; i + 3 * stride < words; i += 4 * stride) {
        const Word a = src[i];
        const Word b = src[i + stride];
        const Word c = src[i + 2 * stride];
        const Word d = src[i + 3 * stride];
        dst[i] = a;
        dst[i + stride] = b;
        dst[i + 2 * stride] = c;
        dst[i + 3 * stride] = d;
    }
    MPGPU_ROLLED for (; i < words; i += stride) {
        dst[i] = src[i];
    }
}

// Copies single bytes: the few before the first word boundary, or the few after the last.
MPGPU_HD inline void copy_bytes(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane, uint32_t lanes) {
    MPGPU_ROLLED for (uint32_t i = lane; i < bytes; i += lanes) {
        reinterpret_cast<Word1 *>(static_cast<uintptr_t>(dst))[i] =
            reinterpret_cast<const Word1 *>(static_cast<uintptr_t>(src))[i];
    }
}

// Copies `bytes` bytes in words between two addresses that are equal modulo the word size. Copies single bytes up to
// the first word boundary, then words, then the remaining single bytes.
template <class Word>
MPGPU_HD inline void copy_aligned(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane, uint32_t lanes) {
    const uint32_t size = sizeof(Word);
    const uint32_t to_border = static_cast<uint32_t>((size - dst % size) % size);
    const uint32_t head = to_border < bytes ? to_border : bytes;
    const uint32_t words = (bytes - head) / size;
    const uint32_t body = words * size;
    copy_bytes(dst, src, head, lane, lanes);
    copy_words<Word>(dst + head, src + head, words, lane, lanes);
    copy_bytes(dst + head + body, src + head + body, bytes - head - body, lane, lanes);
}

// Copies one tile in the widest words for which both addresses have the same misalignment. The addresses of faces of
// doubles agree at least modulo 8.
MPGPU_HD inline void copy_tile(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane, uint32_t lanes) {
    const uint64_t difference = dst ^ src;
    if (difference % 16 == 0) {
        copy_aligned<Word16>(dst, src, bytes, lane, lanes);
    } else if (difference % 8 == 0) {
        copy_aligned<Word8>(dst, src, bytes, lane, lanes);
    } else if (difference % 4 == 0) {
        copy_aligned<Word4>(dst, src, bytes, lane, lanes);
    } else {
        copy_words<Word1>(dst, src, bytes, lane, lanes);
    }
}

// Returns the index of the segment that contains tile number `tile`: the last segment whose first tile is not after it.
// A segment without bytes has no tile and shares its first tile number with its successor, so choosing the last one
// skips it.
template <class List> MPGPU_HD inline uint32_t segment_of(const List &list, uint64_t tile) {
    uint32_t low = 0;
    uint32_t high = list.count;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (list.first_tile[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

} // namespace detail

// Copies the share of one lane of one block. The caller runs it once for every pair of block and lane, in any order.
template <class List>
MPGPU_HD inline void copy_segments(const List &list, uint32_t block, uint32_t blocks, uint32_t lane, uint32_t lanes) {
    const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
    const uint64_t tiles = list.first_tile[list.count];
    // Even-numbered blocks copy the first tiles, and odd-numbered blocks the rest, in proportion to the numbers of
    // these blocks.
    const uint32_t even = (blocks + 1) / 2;
    const uint64_t middle = (tiles * even + blocks - 1) / blocks;
    const bool is_odd = block % 2 != 0;
    const uint64_t end = is_odd ? tiles : middle;
    for (uint64_t tile = (is_odd ? middle : 0) + block / 2; tile < end; tile += is_odd ? blocks - even : even) {
        const uint32_t i = detail::segment_of(list, tile);
        const Segment &segment = list.segments[i];
        const uint64_t offset = (tile - list.first_tile[i]) << list.tile_shift;
        const uint64_t rest = segment.bytes - offset;
        const uint32_t bytes = static_cast<uint32_t>(rest < tile_bytes ? rest : tile_bytes);
        detail::copy_tile(segment.dst + offset, segment.src + offset, bytes, lane, lanes);
    }
}

// CPU build: copies `count` segments on the calling thread, which runs every block and lane of the GPU's launches. One
// block with one lane is the fastest configuration; more lanes test the indexing of a GPU launch. `tile_shift` must be
// in [kMinTileShift, kMaxTileShift].
void copy_segments_on_cpu(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                          uint32_t lanes) noexcept;

} // namespace mpgpu
