// GPU build of the fused copy kernel: what a caller on the host side needs.
#pragma once

#include "segment_copy.hpp"

#include <cuda_runtime_api.h>

namespace mpgpu {

// Enqueues the copy of `count` segments in `stream`, on the stream's device, which must be current and must reach every
// source and destination. Takes one launch for each kSegmentsPerLaunch segments. `segments` is read before the call
// returns. At most `blocks` thread blocks (0 counts as 1) are used by a launch: eight nearly fill a port between two
// GPUs (docs/hardware readings: 350 of 366 GB/s), and what they leave free is the simulation's. Returns the first error
// of a launch.
cudaError_t launch_copy_segments(const Segment *segments, size_t count, uint32_t tile_shift, uint32_t blocks,
                                 cudaStream_t stream) noexcept;

} // namespace mpgpu
