// Copies a list of segments tile by tile. This is the only source of the fused copy kernel, for the GPU and for the
// CPU.
//
// A launch moves many small messages. Segments are cut into tiles of equal size, and the tiles of all segments are
// numbered consecutively. Half of the thread blocks copy the first half of the tiles in round-robin order, and the
// others the second half. A face of 240 000 bytes is therefore spread over many blocks, a corner of 24 bytes costs one
// block, and no block is bound to a message. If the first half of the bytes leaves a GPU and the second half arrives
// there, both directions of its links are busy from the start to the end of the launch.
//
// Block and lane are arguments of the code below. The CPU build calls it in loops over both, so the index arithmetic of
// the GPU is tested on machines without one.
#pragma once

#include "portable.hpp"

#include <stddef.h>
#include <stdint.h>

namespace mpgpu {

// Contiguous copy. Addresses are integers, as everywhere between the parts of mpgpu. Source and destination must not
// overlap, neither in one segment nor among the segments of one launch.
struct Segment {
    uint64_t dst;
    uint64_t src;
    uint64_t bytes;
};

// Maximum number of segments of one launch. Kernel arguments may have 4096 bytes on every architecture. The list is
// passed by value, so it needs no device memory, need not be kept alive until the kernel has run, and is recorded by
// stream capture.
constexpr uint32_t kSegmentsPerLaunch = 120;
// Maximum number of segments of a launch with the shorter list. A halo exchange has 26 messages. The driver copies and
// the GPU fetches the whole argument, whatever part of it is used: 1040 bytes instead of 3856.
constexpr uint32_t kFewSegments = 32;

// Tile size as a power of two. 16 KiB correspond to one pass of four 16-byte words for each of 256 lanes. Sizes of 8 to
// 16 KiB were the fastest for 26 halo messages (hardware readings: 13.7 us in one fused kernel).
constexpr uint32_t kTileShift = 14;
// A tile is at least one word, so every tile has the alignment of its segment.
constexpr uint32_t kMinTileShift = 4;
// Indices within a tile have 32 bits.
constexpr uint32_t kMaxTileShift = 30;
constexpr uint32_t kLanes = 256;

// Argument of one launch that moves up to `most` segments.
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

// Fills `list` with as many of `segments` as fit into one launch, and returns that number.
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

// Structs, because a template argument keeps an attribute only if it belongs to a class.
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

// Copies the words assigned to `lane`. Four loads are issued before the first store, because a single load cannot hide
// the latency of memory, least of all of a peer's memory.
template <class Word>
MPGPU_HD inline void copy_words(uint64_t dst_address, uint64_t src_address, uint32_t words, uint32_t lane,
                                uint32_t lanes) {
    Word *__restrict__ dst = reinterpret_cast<Word *>(static_cast<uintptr_t>(dst_address));
    const Word *__restrict__ src = reinterpret_cast<const Word *>(static_cast<uintptr_t>(src_address));
    // 64 bits, so that no sum with `lanes` overflows.
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

// Copies the few bytes before the first word boundary and after the last.
MPGPU_HD inline void copy_bytes(uint64_t dst, uint64_t src, uint32_t bytes, uint32_t lane, uint32_t lanes) {
    MPGPU_ROLLED for (uint32_t i = lane; i < bytes; i += lanes) {
        reinterpret_cast<Word1 *>(static_cast<uintptr_t>(dst))[i] =
            reinterpret_cast<const Word1 *>(static_cast<uintptr_t>(src))[i];
    }
}

// Copies `bytes` in words between two addresses that are equal modulo the word size: single bytes up to the first word
// boundary, then words, then the remaining single bytes.
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

// Uses the widest word for which both addresses have the same misalignment. Faces of doubles agree at least modulo 8.
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

// Returns the segment that contains `tile`: the last one whose first tile is not after it. A segment without bytes has
// no tile and shares its first tile number with its successor, so choosing the last one skips it.
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

// Copies the share of one lane of one block. Every pair of block and lane must run once, in any order.
template <class List>
MPGPU_HD inline void copy_segments(const List &list, uint32_t block, uint32_t blocks, uint32_t lane, uint32_t lanes) {
    const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
    const uint64_t tiles = list.first_tile[list.count];
    // Even blocks copy the first tiles and odd blocks the rest, in proportion to their numbers.
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

// CPU build: runs every block and lane of the launches that move `count` segments, on the calling thread. One block
// with one lane is the fastest; more lanes exercise the indexing of a GPU launch. `tile_shift` must be in
// [kMinTileShift, kMaxTileShift].
void copy_segments_on_cpu(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                          uint32_t lanes) noexcept;

} // namespace mpgpu
