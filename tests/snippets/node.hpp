// Names that docs/guide/node.md omits.
#include <mpgpu/mpi.hpp>

#include <cstdint>

extern mpgpu::context ctx;
extern const int left, right;
extern const std::uint64_t tag;
extern const int root;
extern mpgpu::buffer<double> edge, ghost, model, own, all, send, receive;
extern mpgpu::stream stream;
