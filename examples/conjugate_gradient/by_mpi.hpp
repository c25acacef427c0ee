// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_MPI_HPP
#define MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_MPI_HPP

#include "device_code.hpp"
#include "part.hpp"

#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <vector>

/// Exchange of ghost entries by MPI with device pointers, as in an MPI program without mpgpu. One kernel per neighbour
/// packs the entries. The ghost entries of a neighbour are contiguous, so MPI receives them in place, without
/// unpacking.
class by_mpi {
  public:
    by_mpi(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const part &own, const device_code &code)
        : code_(code), neighbours_(own.neighbours) {
        const mpgpu::stream stream(ctx, node.device());
        for (const neighbour &n : neighbours_) {
            lists_.emplace_back(ctx, node.device(), n.send.size());
            packed_.emplace_back(ctx, node.device(), n.send.size());
            mpgpu::plan(ctx, {mpgpu::make_transfer(lists_.back(), mpgpu::span_of(n.send, mpgpu::device::host()))})
                .execute(stream)
                .synchronize();
        }
    }

    void start(const mpgpu::stream &stream, mpgpu::buffer<double> &x) {
        for (std::size_t i = 0; i < neighbours_.size(); ++i) {
            code_.pack(stream, count(i), lists_[i].data(), x.data(), packed_[i].data());
        }
        stream.synchronize(); // MPI is not ordered by streams
        for (std::size_t i = 0; i < neighbours_.size(); ++i) {
            const neighbour &n = neighbours_[i];
            MPI_Irecv(x.data() + n.first_ghost, n.ghosts, MPI_DOUBLE, n.rank, 0, MPI_COMM_WORLD,
                      &requests_.emplace_back());
            MPI_Isend(packed_[i].data(), count(i), MPI_DOUBLE, n.rank, 0, MPI_COMM_WORLD, &requests_.emplace_back());
        }
    }
    void finish(const mpgpu::stream & /*stream*/) {
        MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
        requests_.clear();
    }
    void destroy() {}

  private:
    [[nodiscard]] std::int32_t count(std::size_t i) const { return static_cast<std::int32_t>(lists_[i].size()); }

    const device_code &code_;
    std::vector<neighbour> neighbours_;
    std::vector<mpgpu::buffer<std::int32_t>> lists_;
    std::vector<mpgpu::buffer<double>> packed_;
    std::vector<MPI_Request> requests_;
};

#endif // MPGPU_EXAMPLES_CONJUGATE_GRADIENT_BY_MPI_HPP
