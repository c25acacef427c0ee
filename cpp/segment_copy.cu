// GPU build of the fused copy kernel.

#include "segment_copy.cuh"

namespace mpgpu {

namespace {

// __grid_constant__ keeps the list in constant memory. Without it, each thread would first copy the list to local
// memory when its address is taken.
template <class List>
__global__ void __launch_bounds__(kLanes) copy_segments_kernel(const __grid_constant__ List list) {
    copy_segments(list, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

template <class List>
cudaError_t launch(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                   cudaStream_t stream) noexcept {
    List list;
    while (count > 0) {
        const uint32_t taken = fill(list, segments, count, tile_shift);
        const uint64_t tiles = list.first_tile[list.count];
        if (tiles > 0) {
            const uint32_t most = blocks > 0 ? blocks : 1;
            const uint32_t grid = tiles < most ? static_cast<uint32_t>(tiles) : most;
            void *arguments[] = {&list};
            const cudaError_t error =
                cudaLaunchKernel(copy_segments_kernel<List>, dim3(grid), dim3(kLanes), arguments, 0, stream);
            if (error != cudaSuccess) {
                return error;
            }
        }
        segments += taken;
        count -= taken;
    }
    return cudaSuccess;
}

} // namespace

cudaError_t launch_copy_segments(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                                 cudaStream_t stream) noexcept {
    return count <= kFewSegments ? launch<SegmentListOf<kFewSegments>>(segments, count, tile_shift, blocks, stream)
                                 : launch<SegmentList>(segments, count, tile_shift, blocks, stream);
}

} // namespace mpgpu
