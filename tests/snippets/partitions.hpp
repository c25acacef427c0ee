// Names that docs/guide/partitions.md omits.
#include "cuda.hpp"

#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

extern mpgpu::context ctx;
extern mpgpu::stream stream;
extern mpgpu::buffer<double> mine, theirs;
extern std::vector<mpgpu::window> windows;
extern std::vector<mpgpu::node_transfer> transfers;
extern const std::uint64_t bytes;
std::pair<std::size_t, std::size_t> my_cells(unsigned block, unsigned of);
double compute(std::size_t cell);
