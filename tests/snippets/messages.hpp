// Names that docs/guide/messages.md leaves out.
#include <mpgpu/mpgpu.hpp>

#include <cstdint>

extern mpgpu::context ctx;
extern mpgpu::buffer<double> edge, ghost;
extern mpgpu::stream stream;
extern const std::uint32_t rank, ranks;
extern const int left, right;
extern const std::uint64_t tag;
