// Names that docs/guide/halo.md omits, and those of mpgpu/halo.cuh, which requires nvcc.
#include "cuda.hpp"

// For notify_block::current, which only exists for nvcc.
#define __CUDACC__
#define __device__
#define __host__

#include <mpgpu/halo.hpp>
#include <mpgpu/halo/index_lists.hpp>
#include <mpgpu/mpgpu.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

extern mpgpu::buffer<double> density;
extern mpgpu::buffer<double> x, pressure, velocity;
extern const std::vector<std::int32_t> boundary_2, boundary_5, ghost_list_5;
extern const std::int64_t owned;
extern const std::size_t ghosts_2, local_entries;
extern double *p;
extern const std::size_t n;
extern const mpgpu::device gpu;
extern mpgpu::stream stream;
extern const mpgpu::halo::rank_arrays swapped;
void compute(mpgpu::stream_view stream);
void interior(mpgpu::stream_view stream);
void boundary(mpgpu::stream_view stream);
void interior(const mpgpu::notify_block &block);
void boundary(const mpgpu::notify_block &block);
void work_on_the_host();
namespace cooperative_groups {
struct grid {
    void sync() const;
};
grid this_grid();
} // namespace cooperative_groups
extern const mpgpu::halo::own_launch launch_sweep;
namespace mpgpu::halo {
persistent_copier cuda_own_kernel(own_launch launch);
index_kernel cuda_indexed();
} // namespace mpgpu::halo
