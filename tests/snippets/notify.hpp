// Names that docs/guide/notify.md omits.
#include "cuda.hpp"

// For notify_block::current, which only exists for nvcc.
#define __CUDACC__
#define __device__
#define __host__

#include <mpgpu/mpgpu.hpp>
#include <mpgpu/notify.cuh>
#include <mpgpu/notify.hpp>

#include <chrono>
#include <cstdint>

extern mpgpu::context ctx;
extern mpgpu::stream stream;
extern double *part;
extern const std::uint64_t step;
void compute(const mpgpu::notify_block &block, double *part);
void send(const double *part);
