// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
#define MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP

#include "../jacobi/exchange.hpp"

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <array>
#include <cstddef>
#include <memory>

/// Rows of one rank between its two halo rows, for exchanges without mpgpu.
struct rank_rows {
    MPI_Comm ranks;
    /// Ranks above row 0 and below the last row, in the order used for all pairs here.
    std::array<int, 2> neighbours;
    /// The two arrays that swap.
    std::array<float *, 2> arrays;
    std::size_t width; ///< elements per row
    int rows;          ///< computed rows of this rank
    const mpgpu::stream *sweeps;
    int device;

    [[nodiscard]] float *row(std::size_t parity, int number) const {
        return arrays.at(parity) + static_cast<std::size_t>(number) * width;
    }
};

/// Returns an exchange by MPI with pointers of the device, as in an MPI program without mpgpu. The host waits for the
/// sweep before it sends.
std::unique_ptr<exchange> exchange_by_mpi(const rank_rows &own);

#ifdef JACOBI_CUDA
/// Returns an exchange by cudaMemcpyAsync into the neighbours' arrays, which are opened by CUDA IPC. Empty MPI messages
/// notify the neighbours that events have been recorded. The arrays fill whole blocks of the driver's memory, and ranks
/// see each other's GPUs.
std::unique_ptr<exchange> exchange_by_peer_copies(const rank_rows &own);
#endif

#endif // MPGPU_EXAMPLES_JACOBI_MPI_EXCHANGES_HPP
