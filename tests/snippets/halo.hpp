// Names that docs/guide/halo.md leaves out, and those of mpgpu/halo.cuh, which takes nvcc.
#include <mpgpu/mpgpu.hpp>

#include <cstddef>

extern mpgpu::buffer<double> density;
extern double *p;
extern const std::size_t n;
extern const mpgpu::device gpu;
extern mpgpu::stream stream;
void compute(mpgpu::stream_view stream);
void interior(mpgpu::stream_view stream);
void boundary(mpgpu::stream_view stream);
