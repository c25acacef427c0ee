// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_LISTS_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_LISTS_HPP

#include "device_code.hpp"
#include "part.hpp"

#include <mpgpu/halo_indexed.hpp>

#include <cstddef>
#include <vector>

/// Exchange of ghost entries by index lists.
class by_lists {
  public:
    by_lists(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const part &own, const device_code &code) {
        std::vector<mpgpu::halo::index_neighbour> neighbours;
        for (const neighbour &n : own.neighbours) {
            const auto ghosts = mpgpu::halo::index_list::range(n.first_ghost, static_cast<std::size_t>(n.ghosts));
            neighbours.push_back({n.rank, n.send, ghosts});
        }
        mpgpu::halo::index_options how;
        how.kernel = code.index_kernel();
        ex_ = mpgpu::halo::indexed(ctx, node, node.device(), own.size(), neighbours, how);
    }

    void start(const mpgpu::stream &stream, mpgpu::buffer<double> &x) { ex_.start(stream, x); }
    void finish(const mpgpu::stream &stream) { ex_.finish(stream); }
    void destroy() { ex_.destroy(); }

  private:
    mpgpu::halo::indexed ex_;
};

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_LISTS_HPP
