// Names that docs/guide/pieces.md omits.
#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

extern mpgpu::context ctx;
extern mpgpu::stream stream, copy_stream, compute_stream;
extern std::vector<mpgpu::event> computed;
extern const std::vector<float *> host_layers;
extern const std::vector<const float *> gpu_layers;
extern const std::size_t host_pages, gpu_pages, page_elements, layers;
extern const std::vector<std::uint32_t> free_slots, evicted;

struct expert {
    void *on_gpu;
    const void *in_host_memory;
    std::uint64_t bytes;
};
extern const std::vector<expert> selected;
