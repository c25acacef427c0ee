// Names that docs/guide/node.md leaves out.
#include <mpgpu/mpi.hpp>

#include <cstdint>

extern mpgpu::context ctx;
extern const int left, right;
extern const std::uint64_t tag;
extern mpgpu::buffer<double> edge, ghost;
extern mpgpu::stream stream;
