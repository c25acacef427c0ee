// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
#define MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP

#include "../jacobi/exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <array>
#include <cstddef>
#include <memory>

/// The rows of one rank between its two halo rows, for exchanges without mpgpu.
struct rank_rows {
    MPI_Comm ranks;
    /// The ranks at row 0 and beyond the last row, in this order, here and below.
    std::array<int, 2> neighbours;
    /// The two arrays that swap.
    std::array<float *, 2> arrays;
    std::size_t width; ///< elements of a row
    int rows;          ///< that are computed, of this rank
    const mpgpu::stream *sweeps;
    int device;

    [[nodiscard]] float *row(std::size_t parity, int number) const {
        return arrays.at(parity) + static_cast<std::size_t>(number) * width;
    }
};

/// By MPI, which gets pointers of the device: what an MPI program does that knows nothing of mpgpu. The host waits for
/// the sweep before it sends.
std::unique_ptr<exchange> exchange_by_mpi(const rank_rows &own);

#ifdef JACOBI_CUDA
/// By cudaMemcpyAsync into the neighbours' arrays, opened by CUDA IPC, with events of which an empty MPI message says
/// that they are recorded. The arrays have blocks of the driver's memory of their own, and ranks see each other's GPUs.
std::unique_ptr<exchange> exchange_by_peer_copies(const rank_rows &own);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
