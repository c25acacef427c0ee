// Names that docs/guide/concepts.md leaves out.
#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <vector>

extern mpgpu::context ctx;
extern const std::size_t n;
