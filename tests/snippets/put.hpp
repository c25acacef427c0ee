// Names that docs/guide/put.md omits.
#include <mpgpu/mpi.hpp>

#include <cstddef>
#include <cstdint>

extern const std::size_t n;
extern const int left, right, me;
extern const std::uint64_t steps;
extern mpgpu::buffer<double> edge;
extern mpgpu::stream stream;
void compute(mpgpu::stream_view stream);
