// CPU build of the fused copy kernel.

#include "segment_copy.hpp"

namespace mpgpu {

namespace {

template <class List>
void copy_on_cpu(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks, uint32_t lanes) noexcept {
    List list;
    while (count > 0) {
        const uint32_t taken = fill(list, segments, count, tile_shift);
        for (uint32_t block = 0; block < blocks; ++block) {
            for (uint32_t lane = 0; lane < lanes; ++lane) {
                copy_segments(list, block, blocks, lane, lanes);
            }
        }
        segments += taken;
        count -= taken;
    }
}

} // namespace

void copy_segments_on_cpu(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                          uint32_t lanes) noexcept {
    // The list type is the one that the GPU build would use.
    if (count <= kFewSegments) {
        copy_on_cpu<SegmentListOf<kFewSegments>>(segments, count, tile_shift, blocks, lanes);
    } else {
        copy_on_cpu<SegmentList>(segments, count, tile_shift, blocks, lanes);
    }
}

} // namespace mpgpu
