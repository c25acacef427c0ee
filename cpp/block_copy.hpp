// Copy of many pieces by few multiprocessors, between a GPU and host memory above all: one source for the GPU and the
// CPU.
//
// A group of 32 lanes copies one chunk of a piece at a time. Every lane has four loads of 16 bytes in flight before its
// first store, also in the last pass over a chunk, so that 128 groups (four blocks of 1024 lanes) fill a PCIe 5 link
// from pieces of 1 KiB on. The index of a group's next piece is read before the current piece is copied, which hides
// its latency.
//
// Stores to host memory are paced: a group waits until its previous bytes should have left the GPU at the target rate.
// A link that is saturated with stores backs up into the GPU's own memory system, and matrix products beside it fall to
// half of their speed (docs/results.md, "Pieces").
#pragma once

#include "portable.hpp"
#include "segment_copy.hpp"

#include <stddef.h>
#include <stdint.h>

namespace mpgpu {

// Lanes of the largest group: a warp.
constexpr uint32_t kMostGroupLanes = 32;
// Bytes that a lane has in flight.
constexpr uint32_t kLaneBytes = 64;
// Lanes of a block of the kernels below.
constexpr uint32_t kPieceLanes = 1024;
// Bytes of a chunk as a power of two: eight passes of a warp.
constexpr uint32_t kChunkShift = 14;
// Pairs of arrays in one launch.
constexpr uint32_t kLayersPerLaunch = 120;

// First bytes of the destination array and of the source array of one layer.
struct BlockLayer {
    uint64_t dst;
    uint64_t src;
};

// One end of a block copy: where block i of the list lies in every array of that end.
struct BlockEnd {
    // Bytes from one block of an array to the next.
    uint64_t stride;
    // Blocks of an array. An index that is not below it is reported and not copied.
    uint64_t blocks;
    // Address of the indices; 0 if block i of the list is block i of the array.
    uint64_t index;
    // Bytes of an index, 4 or 8.
    uint64_t width;
};

// The argument of a launch that copies blocks, or pieces that are listed in memory.
struct BlockList {
    BlockLayer layers[kLayersPerLaunch];
    BlockEnd dst;
    BlockEnd src;
    // Address of a list of `Segment` that replaces layers and ends, or 0.
    uint64_t pieces;
    // Blocks of the list, or pieces.
    uint64_t count;
    // Bytes of a block, or of the longest piece.
    uint64_t bytes;
    // Address of two words that report an index out of range: 1 + 2 * position + (1 for the source), and the index. 0
    // if all indices have been checked.
    uint64_t report;
    uint32_t layer_count;
    // Lanes of a group, a power of two.
    uint32_t lanes;
    // Least time that a group takes for a byte, in picoseconds; 0 for no limit.
    uint32_t picoseconds;
    uint32_t unused;
};
static_assert(sizeof(BlockList) <= 4096, "kernel arguments are limited to 4096 bytes");

namespace detail {

// A chunk of a piece before its index has been looked at.
struct Chunk {
    Segment piece;
    uint64_t dst_block;
    uint64_t src_block;
    uint64_t position;
    uint64_t offset;
    uint32_t layer;
};

MPGPU_HD inline uint64_t block_index(const BlockEnd &end, uint64_t position) {
    if (end.index == 0) {
        return position;
    }
    const uint64_t address = end.index + position * end.width;
    return end.width == 4 ? *reinterpret_cast<const uint32_t *>(static_cast<uintptr_t>(address))
                          : *reinterpret_cast<const uint64_t *>(static_cast<uintptr_t>(address));
}

// Reads the chunk of this number. Nothing here depends on the values that it loads, so that a GPU goes on meanwhile.
MPGPU_HD inline Chunk chunk_of(const BlockList &list, uint64_t chunks, uint64_t number) {
    Chunk chunk;
    const uint64_t piece = chunks == 1 ? number : number / chunks;
    chunk.offset = (number - piece * chunks) << kChunkShift;
    chunk.layer = static_cast<uint32_t>(list.layer_count == 1 ? 0 : piece / list.count);
    chunk.position = piece - chunk.layer * list.count;
    if (list.pieces != 0) {
        chunk.piece = reinterpret_cast<const Segment *>(static_cast<uintptr_t>(list.pieces))[chunk.position];
        chunk.dst_block = chunk.src_block = 0;
    } else {
        chunk.dst_block = block_index(list.dst, chunk.position);
        chunk.src_block = block_index(list.src, chunk.position);
    }
    return chunk;
}

// Turns the block indices of a chunk into addresses. False for an index out of range, which is reported.
template <class Report> MPGPU_HD inline bool resolve(const BlockList &list, Chunk &chunk, Report report) {
    if (list.pieces != 0) {
        return true;
    }
    const bool dst_ok = chunk.dst_block < list.dst.blocks;
    const bool src_ok = chunk.src_block < list.src.blocks;
    if (!dst_ok || !src_ok) {
        report(list.report, 1 + 2 * chunk.position + (dst_ok ? 1 : 0), dst_ok ? chunk.src_block : chunk.dst_block);
        return false;
    }
    const BlockLayer &layer = list.layers[chunk.layer];
    chunk.piece.dst = layer.dst + chunk.dst_block * list.dst.stride;
    chunk.piece.src = layer.src + chunk.src_block * list.src.stride;
    chunk.piece.bytes = list.bytes;
    return true;
}

// Copies the words that fall to `lane`, four at a time. The pace is kept between the loads and the stores.
template <class Word, class Pace>
MPGPU_HD inline void copy_paced(uint64_t dst_address, uint64_t src_address, uint64_t words, uint32_t lane,
                                uint32_t lanes, Pace &pace) {
    Word *__restrict__ dst = reinterpret_cast<Word *>(static_cast<uintptr_t>(dst_address));
    const Word *__restrict__ src = reinterpret_cast<const Word *>(static_cast<uintptr_t>(src_address));
    const uint64_t stride = lanes;
    MPGPU_ROLLED for (uint64_t first = 0; first < words; first += 4 * stride) {
        const uint64_t i = first + lane;
        const bool has_a = i < words;
        const bool has_b = i + stride < words;
        const bool has_c = i + 2 * stride < words;
        const bool has_d = i + 3 * stride < words;
        Word a{}, b{}, c{}, d{};
        if (has_a)
            a = src[i];
        if (has_b)
            b = src[i + stride];
        if (has_c)
            c = src[i + 2 * stride];
        if (has_d)
            d = src[i + 3 * stride];
        const uint64_t rest = words - first;
        pace.keep(static_cast<uint32_t>((rest < 4 * stride ? rest : 4 * stride) * sizeof(Word)));
        if (has_a)
            dst[i] = a;
        if (has_b)
            dst[i + stride] = b;
        if (has_c)
            dst[i + 2 * stride] = c;
        if (has_d)
            dst[i + 3 * stride] = d;
    }
}

// Copies the bytes that fall to `lane` of a piece or a part of one, in the widest words that both ends allow.
template <class Pace>
MPGPU_HD inline void copy_piece(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t lane, uint32_t lanes, Pace &pace) {
    const uint64_t difference = dst ^ src;
    const uint32_t size = difference % 16 == 0 ? 16 : difference % 8 == 0 ? 8 : difference % 4 == 0 ? 4 : 1;
    const uint64_t to_border = (size - dst % size) % size;
    const uint64_t head = to_border < bytes ? to_border : bytes;
    const uint64_t words = (bytes - head) / size;
    const uint64_t body = head + words * size;
    copy_bytes(dst, src, static_cast<uint32_t>(head), lane, lanes);
    if (size == 16) {
        copy_paced<Word16>(dst + head, src + head, words, lane, lanes, pace);
    } else if (size == 8) {
        copy_paced<Word8>(dst + head, src + head, words, lane, lanes, pace);
    } else if (size == 4) {
        copy_paced<Word4>(dst + head, src + head, words, lane, lanes, pace);
    } else {
        copy_paced<Word1>(dst + head, src + head, words, lane, lanes, pace);
    }
    copy_bytes(dst + body, src + body, static_cast<uint32_t>(bytes - body), lane, lanes);
}

} // namespace detail

// The share of one lane of one group in a block copy. Every (group, lane) must run once, in any order.
template <class Pace, class Report>
MPGPU_HD inline void copy_blocks(const BlockList &list, uint32_t group, uint32_t groups, uint32_t lane, uint32_t lanes,
                                 Pace pace, Report report) {
    const uint64_t chunk_bytes = uint64_t{1} << kChunkShift;
    const uint64_t chunks = (list.bytes + chunk_bytes - 1) >> kChunkShift;
    const uint64_t all = list.count * list.layer_count * chunks;
    if (group >= all) {
        return;
    }
    detail::Chunk next = detail::chunk_of(list, chunks, group);
    for (uint64_t number = group; number < all; number += groups) {
        detail::Chunk now = next;
        if (number + groups < all) {
            next = detail::chunk_of(list, chunks, number + groups);
        }
        if (detail::resolve(list, now, report) && now.offset < now.piece.bytes) {
            const uint64_t rest = now.piece.bytes - now.offset;
            detail::copy_piece(now.piece.dst + now.offset, now.piece.src + now.offset,
                               rest < chunk_bytes ? rest : chunk_bytes, lane, lanes, pace);
        }
    }
}

// The share of one lane of one group in the copy of the segments of a launch, in tiles as `copy_segments` numbers them.
template <class List, class Pace>
MPGPU_HD inline void copy_paced_segments(const List &list, uint32_t group, uint32_t groups, uint32_t lane,
                                         uint32_t lanes, Pace pace) {
    const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
    for (uint64_t tile = group; tile < list.first_tile[list.count]; tile += groups) {
        const uint32_t i = detail::segment_of(list, tile);
        const Segment &segment = list.segments[i];
        const uint64_t offset = (tile - list.first_tile[i]) << list.tile_shift;
        const uint64_t rest = segment.bytes - offset;
        detail::copy_piece(segment.dst + offset, segment.src + offset, rest < tile_bytes ? rest : tile_bytes, lane,
                           lanes, pace);
    }
}

// CPU build: runs every group and lane of a block copy, on the calling thread.
void copy_blocks_on_cpu(const BlockList &list, uint32_t groups, uint32_t lanes) noexcept;

} // namespace mpgpu
