// Names that README.md omits.
#include <mpgpu/mpgpu.hpp>

#include <cstddef>

extern const std::size_t n, nx;
extern const int steps;
void compute(mpgpu::stream_view stream, mpgpu::buffer<float> &a, mpgpu::buffer<float> &b);
