// Names that docs/guide/messages.md omits.
#include <mpgpu/entry.hpp>
#include <mpgpu/mpgpu.hpp>

#include <cstdint>
#include <vector>

extern mpgpu::context ctx;
extern mpgpu::buffer<double> edge, ghost;
extern mpgpu::stream stream;
extern const std::uint32_t rank, ranks;
extern const int left, right;
extern const std::uint64_t tag;
extern const std::uint32_t other;
extern const std::uint64_t bar, method_bits;
extern const int steps;
extern std::vector<double> list;
void call_bar(int steps, const mpgpu::buffer<double> &ghost, const std::vector<double> &list);
