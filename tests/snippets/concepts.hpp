// Names that docs/guide/concepts.md omits.
#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <vector>

extern mpgpu::context ctx;
extern const std::size_t n;
