// Copies many pieces by few multiprocessors, in particular between a GPU and host memory. The GPU and the CPU build
// share this source.
//
// A group of up to 32 lanes copies one chunk of a piece at a time. In each pass over a chunk, every lane starts four
// loads of 16 bytes before its first store. Therefore four blocks of 1024 lanes fill a PCIe 5 link with pieces of
// 4 KiB and more. A group reads the index of its next piece before it copies the current one, which
// hides the latency of the read.
//
// Stores to host memory can be paced. Each group then waits until its stores have arrived before it stores more, which
// limits the bytes in flight. Without this limit, stores fill the buffers in front of the link. Other accesses of the
// GPU to its own memory then wait behind them, and matrix products fall to half of their rate (docs/results.md,
// "Pieces").
#pragma once

#include "portable.hpp"
#include "segment_copy.hpp"

#include <stddef.h>
#include <stdint.h>

namespace mpgpu {

// Maximum number of lanes of a group: a warp.
constexpr uint32_t kMostGroupLanes = 32;
// Bytes that a lane loads before it stores them.
constexpr uint32_t kLaneBytes = 64;
// Lanes of a thread block of the kernels that use these functions.
constexpr uint32_t kPieceLanes = 1024;
// Binary logarithm of the size of a chunk in bytes. A warp copies a chunk in eight passes.
constexpr uint32_t kChunkShift = 14;
// Maximum number of layers (pairs of arrays) in one launch.
constexpr uint32_t kLayersPerLaunch = 120;

// Addresses of the destination array and of the source array of one layer.
struct BlockLayer {
    uint64_t dst;
    uint64_t src;
};

// One end of a block copy (destination or source): shape of its arrays, and its index list.
struct BlockEnd {
    // Distance in bytes between consecutive blocks of an array.
    uint64_t stride;
    // Number of blocks of an array. A block with an index of at least this number is reported and not copied.
    uint64_t blocks;
    // Address of the index list. 0 if there is no list: entry i of the copy is then block i of the array.
    uint64_t index;
    // Size of an index in bytes, 4 or 8.
    uint64_t width;
};

// Argument of a launch that copies blocks, or pieces from a list in memory.
struct BlockList {
    BlockLayer layers[kLayersPerLaunch];
    BlockEnd dst;
    BlockEnd src;
    // Address of a list of `Segment`. If it is not 0, the launch copies these pieces and ignores `layers`, `dst` and
    // `src`.
    uint64_t pieces;
    // Position in the lists at which this launch starts.
    uint64_t first;
    // Number of blocks per layer, or number of pieces.
    uint64_t count;
    // Size in bytes of a block, or of the longest piece.
    uint64_t bytes;
    // Address of two words that report an index out of range: 1 + 2 * position (+ 1 for the source), and the index. May
    // be 0 if all indices have been checked before the launch.
    uint64_t report;
    uint32_t layer_count;
    // Number of lanes of a group, a power of two.
    uint32_t lanes;
    // 1 if each group waits until its stores have arrived before it stores more; otherwise 0.
    uint32_t is_paced;
    uint32_t unused;
};
static_assert(sizeof(BlockList) <= 4096, "kernel arguments are limited to 4096 bytes");

namespace detail {

// Chunk of a piece. The block indices of the piece have been loaded, but not checked.
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

// Loads the indices of chunk `number`. The function does not use the loaded values, so the GPU need not wait for them.
MPGPU_HD inline Chunk chunk_of(const BlockList &list, uint64_t chunks, uint64_t number) {
    Chunk chunk;
    const uint64_t piece = chunks == 1 ? number : number / chunks;
    chunk.offset = (number - piece * chunks) << kChunkShift;
    chunk.layer = static_cast<uint32_t>(list.layer_count == 1 ? 0 : piece / list.count);
    chunk.position = list.first + piece - chunk.layer * list.count;
    if (list.pieces != 0) {
        chunk.piece = reinterpret_cast<const Segment *>(static_cast<uintptr_t>(list.pieces))[chunk.position];
        chunk.dst_block = chunk.src_block = 0;
    } else {
        chunk.dst_block = block_index(list.dst, chunk.position);
        chunk.src_block = block_index(list.src, chunk.position);
    }
    return chunk;
}

// Computes the addresses of a chunk from its block indices. Returns false, and reports the index, if an index is out of
// range.
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

// Up to four words of one lane, `stride` words apart.
template <class Word> struct FourWords {
    Word a{}, b{}, c{}, d{};

    MPGPU_HD void load(const Word *src, uint64_t i, uint64_t words, uint64_t stride) {
        if (i < words)
            a = src[i];
        if (i + stride < words)
            b = src[i + stride];
        if (i + 2 * stride < words)
            c = src[i + 2 * stride];
        if (i + 3 * stride < words)
            d = src[i + 3 * stride];
    }
    MPGPU_HD void store(Word *dst, uint64_t i, uint64_t words, uint64_t stride) const {
        if (i < words)
            dst[i] = a;
        if (i + stride < words)
            dst[i + stride] = b;
        if (i + 2 * stride < words)
            dst[i + 2 * stride] = c;
        if (i + 3 * stride < words)
            dst[i + 3 * stride] = d;
    }
};

// Copies the words of `lane`, four at a time. The loads of the next pass are in flight while `settle` waits for the
// stores of this pass.
template <class Word, class Settle>
MPGPU_HD inline void copy_words(uint64_t dst_address, uint64_t src_address, uint64_t words, uint32_t lane,
                                uint32_t lanes, Settle settle) {
    Word *__restrict__ dst = reinterpret_cast<Word *>(static_cast<uintptr_t>(dst_address));
    const Word *__restrict__ src = reinterpret_cast<const Word *>(static_cast<uintptr_t>(src_address));
    const uint64_t stride = lanes;
    FourWords<Word> held;
    held.load(src, lane, words, stride);
    MPGPU_ROLLED for (uint64_t i = lane; i < words; i += 4 * stride) {
        held.store(dst, i, words, stride);
        held.load(src, i + 4 * stride, words, stride);
        settle();
    }
}

// Copies the bytes that belong to `lane`, in a piece or in a part of a piece. Uses the widest words that the alignment
// of both ends permits.
template <class Settle>
MPGPU_HD inline void copy_piece(uint64_t dst, uint64_t src, uint64_t bytes, uint32_t lane, uint32_t lanes,
                                Settle settle) {
    const uint64_t difference = dst ^ src;
    const uint32_t size = difference % 16 == 0 ? 16 : difference % 8 == 0 ? 8 : difference % 4 == 0 ? 4 : 1;
    const uint64_t to_border = (size - dst % size) % size;
    const uint64_t head = to_border < bytes ? to_border : bytes;
    const uint64_t words = (bytes - head) / size;
    const uint64_t body = head + words * size;
    copy_bytes(dst, src, static_cast<uint32_t>(head), lane, lanes);
    if (size == 16) {
        copy_words<Word16>(dst + head, src + head, words, lane, lanes, settle);
    } else if (size == 8) {
        copy_words<Word8>(dst + head, src + head, words, lane, lanes, settle);
    } else if (size == 4) {
        copy_words<Word4>(dst + head, src + head, words, lane, lanes, settle);
    } else {
        copy_words<Word1>(dst + head, src + head, words, lane, lanes, settle);
    }
    copy_bytes(dst + body, src + body, static_cast<uint32_t>(bytes - body), lane, lanes);
}

} // namespace detail

// Copies the part of a block copy that belongs to one lane of one group. Must be called once for each group and lane,
// in any order. If stores are paced, `settle` waits for the stores of the lane.
template <class Settle, class Report>
MPGPU_HD inline void copy_blocks(const BlockList &list, uint32_t group, uint32_t groups, uint32_t lane, uint32_t lanes,
                                 Settle settle, Report report) {
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
                               rest < chunk_bytes ? rest : chunk_bytes, lane, lanes, settle);
        }
    }
}

// Copies the part of a list of segments that belongs to one lane of one group. The tiles are numbered as in
// `copy_segments`.
template <class List, class Settle>
MPGPU_HD inline void copy_segments_by_groups(const List &list, uint32_t group, uint32_t groups, uint32_t lane,
                                             uint32_t lanes, Settle settle) {
    const uint64_t tile_bytes = uint64_t{1} << list.tile_shift;
    for (uint64_t tile = group; tile < list.first_tile[list.count]; tile += groups) {
        const uint32_t i = detail::segment_of(list, tile);
        const Segment &segment = list.segments[i];
        const uint64_t offset = (tile - list.first_tile[i]) << list.tile_shift;
        const uint64_t rest = segment.bytes - offset;
        detail::copy_piece(segment.dst + offset, segment.src + offset, rest < tile_bytes ? rest : tile_bytes, lane,
                           lanes, settle);
    }
}

// CPU build: runs all groups and lanes of a block copy in the calling thread.
void copy_blocks_on_cpu(const BlockList &list, uint32_t groups, uint32_t lanes) noexcept;

} // namespace mpgpu
