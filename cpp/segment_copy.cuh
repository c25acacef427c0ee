// Declares the host function that launches the fused copy kernel on a GPU.
#pragma once

#include "segment_copy.hpp"

#include <cuda_runtime_api.h>

namespace mpgpu {

// Enqueues the copy of `count` segments in `stream`. The stream's device must be current, and must be able to access
// every source and destination. The function makes one launch for every kSegmentsPerLaunch segments, and reads
// `segments` before it returns. A launch uses at most `blocks` thread blocks (0 counts as 1). Eight blocks nearly
// saturate the link between two GPUs (hardware readings: 350 of 366 GB/s) and leave the other multiprocessors to the
// simulation. Returns the first error of a launch.
cudaError_t launch_copy_segments(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                                 cudaStream_t stream) noexcept;

} // namespace mpgpu
